"""Who may grant: one hub a database, for as long as it lives.

A lock that the operating system (SQLite) or the server (PostgreSQL) holds for the hub's process
and lets go of when the process dies, however it dies: there is no time to wait for and no clock.
The lock carries the hub's name, so that the accounting services of others know to stand aside.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import sqlalchemy as sa

from ..errors import StoreUnavailable
from .store import Store

_KEY = 0x67707567  # "gpug": the advisory lock of whoever grants
_LOCK = sa.text(f"SELECT pg_try_advisory_lock({_KEY})")
_NAME = sa.text("SELECT set_config('application_name', :name, false)")
_HOLDER = sa.text(
    "SELECT application_name FROM pg_stat_activity JOIN pg_locks USING (pid) WHERE granted "  # nosec B608
    "AND locktype = 'advisory' AND classid = 0 AND objsubid = 1 "
    f"AND objid = {_KEY} AND database = "
    "(SELECT oid FROM pg_database WHERE datname = current_database())"
)

SURE = 1.0
"""Seconds for which one look at a lock that a server holds is enough."""

_TRIES = 5
"""Somebody may only be looking who holds the lock on a file: it is tried again."""


class Granter:
    """The right to grant in one store. Every method raises StoreUnavailable."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._held: Any = None
        self._seen_at = -SURE
        self._taking = threading.Lock()

    @property
    def sure(self) -> bool:
        """Whether this process may grant, without a look at anything."""
        if isinstance(self._held, int):
            return True
        return self._held is not None and time.monotonic() - self._seen_at < SURE

    def take(self) -> bool:
        """Whether this process may grant; the first one that asks may, and goes on so."""
        with self._taking:
            if self.sure:
                return True
            try:
                if self._held is None or not self._still_there():
                    self._held = self._try()
            except (sa.exc.DBAPIError, sa.exc.TimeoutError, OSError) as error:
                raise StoreUnavailable() from error
            self._seen_at = time.monotonic()
            return self._held is not None

    def give_up(self) -> None:
        """Let another process grant."""
        with self._taking:
            if isinstance(self._held, int):
                os.close(self._held)
            elif self._held is not None:
                self._held.close()
            self._held = None

    def holder(self) -> str:
        """Which hub may grant just now (see :func:`hub_name`); nothing when none does."""
        try:
            return self._holder_of_file() if self._is_file else self._holder_at_server()
        except (sa.exc.DBAPIError, sa.exc.TimeoutError, OSError) as error:
            raise StoreUnavailable() from error

    # A lock on a file beside the database.

    @property
    def _is_file(self) -> bool:
        return self.store.dialect == "sqlite"

    @property
    def _path(self) -> str:
        return f"{os.path.abspath(self.store.engine.url.database or '')}.granter"

    def _try_file(self) -> int | None:
        descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        for _ in range(_TRIES):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.01)
            else:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, hub_name(os.getpid()).encode(), 0)
                return descriptor
        os.close(descriptor)
        return None

    def _holder_of_file(self) -> str:
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return ""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.pread(descriptor, 1000, 0).decode(errors="replace")
        else:
            return ""
        finally:
            os.close(descriptor)

    # A lock at the server, which ends with the connection.

    def _try(self) -> Any:
        return self._try_file() if self._is_file else self._try_server()

    def _try_server(self) -> sa.Connection | None:
        connection = self.store.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        connection.detach()  # it is not for anybody else, and does not go back to the pool
        connection.execute(_NAME, {"name": hub_name(os.getpid())})
        if connection.execute(_LOCK).scalar_one():
            return connection
        connection.close()
        return None

    def _still_there(self) -> bool:
        try:
            self._held.execute(sa.text("SELECT 1"))
        except sa.exc.DBAPIError:
            with suppress(sa.exc.SQLAlchemyError):
                self._held.close()
            self._held = None
            return False
        return True

    def _holder_at_server(self) -> str:
        with self.store.engine.connect() as connection:
            return str(connection.execute(_HOLDER).scalar() or "")


def hub_name(pid: int | str) -> str:
    """What a hub is called in its lock: its machine and its process."""
    return f"{socket.gethostname()[:40]}:{pid}"  # PostgreSQL keeps 63 bytes
