"""Who may grant: one process a database, for as long as it lives.

A lock that the operating system (SQLite) or the server (PostgreSQL) holds for this process and
lets go of when the process dies, however it dies: there is no time to wait for and no clock.
"""

from __future__ import annotations

import fcntl
import os
import threading
from typing import Any

import sqlalchemy as sa

from .store import Store

_KEY = 0x67707567  # "gpug": the advisory lock of whoever grants


class Granter:
    """The right to grant in one store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._held: Any = None
        self._taking = threading.Lock()

    def take(self) -> bool:
        """Whether this process may grant; the first one that asks may, and goes on so."""
        with self._taking:
            if self._held is None or not self._still_there():
                self._held = self._try()
            return self._held is not None

    def give_up(self) -> None:
        """Let another process grant."""
        with self._taking:
            if isinstance(self._held, int):
                os.close(self._held)
            elif self._held is not None:
                self._held.close()
            self._held = None

    def _try(self) -> Any:
        return self._try_file() if self.store.dialect == "sqlite" else self._try_server()

    def _try_file(self) -> int | None:
        path = f"{os.path.abspath(self.store.engine.url.database or '')}.granter"
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor

    def _try_server(self) -> sa.Connection | None:
        connection = self.store.engine.connect()
        connection.detach()  # it is not for anybody else, and does not go back to the pool
        connection = connection.execution_options(isolation_level="AUTOCOMMIT")
        if connection.execute(sa.text(f"SELECT pg_try_advisory_lock({_KEY})")).scalar_one():
            return connection
        connection.close()
        return None

    def _still_there(self) -> bool:
        """A lock on a server ends with the connection."""
        if isinstance(self._held, int):
            return True
        try:
            self._held.execute(sa.text("SELECT 1"))
        except sa.exc.DBAPIError:
            return False
        return True
