"""The leader lock: which hub owns the database, and which one may grant.

A hub's identity is a random id in a file beside its cookie secret, and moves with the hub.

The lock is held by the operating system (SQLite) or the server (PostgreSQL) for the hub's process,
and released however the process dies. It carries the hub's name, so that the accounting services of
other hubs know to stand aside. The database also records whose leases and tickets it contains.
While there are any, another hub may not grant, even with the lock, until an admin says so
(:meth:`LeaderLock.take_over`).
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from traitlets.config import Config

from ..core.errors import AnotherHubGrants, ConfigError, NotTheOwner, StoreUnavailable
from .audit_log import note
from .engine import Store
from .schema import OPEN_LEASE, OPEN_TICKET, leases, owner, tickets

NAME = "gpuspawner_hub_id"
_ID = re.compile(r"[0-9a-f]{16}")


def identity_file(config: Config) -> Path:
    """Return the absolute path of a hub's identity file, for this configuration and directory."""
    secret = config.get("JupyterHub", {}).get("cookie_secret_file", "jupyterhub_cookie_secret")
    return Path(os.path.abspath(str(secret))).parent / NAME


def read_identity(path: Path) -> str:
    """Return the id in the file; empty if there is none yet. Raises ConfigError or OSError."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""
    if not _ID.fullmatch(text):
        what = f"{path} does not contain a hub's id. Restore it from a backup, or remove it"
        raise ConfigError(what=what)
    return text


def make_identity(path: Path) -> str:
    """Return the id in the file, which is made if missing. Raises ConfigError or OSError."""
    if found := read_identity(path):
        return found
    part = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        os.write(descriptor, f"{secrets.token_hex(8)}\n".encode())
        os.fsync(descriptor)
        with suppress(FileExistsError):
            os.link(part, path)  # the first one wins, with a complete file
    finally:
        os.close(descriptor)
        part.unlink()
    return read_identity(path)


_ANYTHING = sa.select(
    sa.exists(sa.select(leases.c.id).where(OPEN_LEASE))
    | sa.exists(sa.select(tickets.c.id).where(OPEN_TICKET))
)


@dataclass(frozen=True, slots=True)
class DatabaseOwner:
    """The one hub that may change leases and tickets."""

    hub: str
    """Its identity; see :mod:`gpuspawner.db.leader`."""
    machine: str
    """Its host name at that time, for people."""
    since: datetime


def load_owner(connection: sa.Connection) -> DatabaseOwner | None:
    """Return the owner; None for a new database."""
    row = connection.execute(sa.select(owner.c.hub, owner.c.machine, owner.c.since)).first()
    return DatabaseOwner(*row) if row else None


def replace_owner(connection: sa.Connection, new: DatabaseOwner) -> None:
    """Make another hub the owner, or the first one."""
    connection.execute(sa.delete(owner))
    connection.execute(sa.insert(owner).values(id=1, **asdict(new)))


def has_something(connection: sa.Connection) -> bool:
    """Return True if the owner has open leases or waiting tickets."""
    return bool(connection.execute(_ANYTHING).scalar_one())


_KEY = 0x67707567  # "gpug": the advisory lock of the granting hub
_LOCK = sa.text(f"SELECT pg_try_advisory_lock({_KEY})")
_SET_NAME = sa.text("SELECT set_config('application_name', :name, false)")
_HOLDER = sa.text(
    "SELECT application_name FROM pg_stat_activity JOIN pg_locks USING (pid) WHERE granted "  # nosec B608
    "AND locktype = 'advisory' AND classid = 0 AND objsubid = 1 "
    f"AND objid = {_KEY} AND database = "
    "(SELECT oid FROM pg_database WHERE datname = current_database())"
)

SURE = 1.0
"""Seconds for which one check of a server's lock is enough."""

_TRIES = 5
"""Attempts: a process may hold the file's lock only for a moment, to read it."""


TAKE_OVER = (
    "Start that hub again or, if it is gone for good, run in this hub's working directory: "
    "gpuspawner takeover"
)
"""What an admin can do about NotTheOwner."""

STOP_ONE = "Stop the other hub, or give this one its own database (c.GPUDatabase.url)."
"""What an admin can do about AnotherHubGrants."""


def for_log(error: AnotherHubGrants) -> str:
    """Return the error's sentence and what an admin can do, which members do not read."""
    return f"{error.message} {TAKE_OVER if isinstance(error, NotTheOwner) else STOP_ONE}"


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise StoreUnavailable if the lock cannot be asked for."""
    try:
        yield
    except (sa.exc.DBAPIError, sa.exc.TimeoutError, OSError) as error:
        raise StoreUnavailable() from error


class LeaderLock:
    """The right to grant in one store. Every method raises StoreUnavailable.

    ``identity`` is the hub's own; without one, ownership is not checked.
    """

    def __init__(self, store: Store, identity: str = "") -> None:
        self.store = store
        self.identity = identity
        self._held: Any = None
        self._seen_at = -SURE
        self._taking = threading.Lock()

    @property
    def sure(self) -> bool:
        """True if this process certainly may grant, without a check."""
        if isinstance(self._held, int):
            return True
        return self._held is not None and time.monotonic() - self._seen_at < SURE

    def take(self) -> bool:
        """Return True if this process may grant: the first one that asks, from then on.

        False while another hub runs on the database. Raises NotTheOwner if none runs, but leases or
        tickets of another one are open.
        """
        with self._taking:
            if self.sure:
                return True
            with _own_errors():
                if self._held is None or not self._still_there():
                    try:
                        self.require_owner()
                    except NotTheOwner:
                        if self.holder():
                            return False
                        raise
                    self._held = self._try()
                    self._own()
            self._seen_at = time.monotonic()
            return self._held is not None

    def give_up(self) -> None:
        """Let another process grant."""
        with self._taking:
            self._let_go()

    def _let_go(self) -> None:
        if isinstance(self._held, int):
            os.close(self._held)
        elif self._held is not None:
            self._held.close()
        self._held = None

    # Ownership of the database.

    def owner(self) -> tuple[DatabaseOwner | None, bool]:
        """Return the owner, and True if it has open leases or waiting tickets."""
        with self.store.read() as connection:
            return load_owner(connection), has_something(connection)

    def require_owner(self) -> None:
        """Raise NotTheOwner while leases or tickets of another hub are open."""
        if self.identity:
            _require(self.identity, *self.owner())

    def _own(self) -> None:
        """Record that the database belongs to this hub, which holds the lock by now."""
        if not self.identity or self._held is None:
            return
        try:
            with self.store.write() as connection:
                found = load_owner(connection)
                if found is not None and found.hub == self.identity:
                    return
                _require(self.identity, found, has_something(connection))
                replace_owner(connection, _this_hub(self.identity))
        except BaseException:
            self._let_go()
            raise

    def take_over(self, actor: str) -> None:
        """Make the database this hub's, and record it. Raises AnotherHubGrants while one runs."""
        with self._taking:
            with _own_errors():
                self._held = self._try()
            if self._held is None:
                raise AnotherHubGrants()
            try:
                with self.store.write() as connection:
                    found, new = load_owner(connection), _this_hub(self.identity)
                    replace_owner(connection, new)
                    before = f"{found.hub} ({found.machine})" if found else "nobody"
                    note(
                        connection,
                        at=new.since,
                        actor=actor,
                        action="takeover",
                        subject="hub",
                        detail=f"from {before} to {new.hub} ({new.machine})",
                    )
            finally:
                self._let_go()

    def holder(self) -> str:
        """Return which hub may grant now (see :func:`hub_name`); empty if none does."""
        with _own_errors():
            if self._is_file:
                return self._holder_of_file()
            with self.store.engine.connect() as connection:
                return str(connection.execute(_HOLDER).scalar() or "")

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
                os.pwrite(descriptor, hub_name(os.getpid(), self.identity).encode(), 0)
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
        connection.detach()  # it must not go back to the pool for others
        connection.execute(_SET_NAME, {"name": hub_name(os.getpid(), self.identity)})
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


def hub_name(pid: int | str, identity: str = "") -> str:
    """Return a hub's name in its lock: its identity, its machine and its process."""
    process = f"{socket.gethostname()[:30]}:{pid}"  # PostgreSQL keeps 63 bytes
    return f"{identity}@{process}" if identity else process


def _this_hub(identity: str) -> DatabaseOwner:
    return DatabaseOwner(identity, socket.gethostname(), datetime.now(timezone.utc))


def _require(identity: str, found: DatabaseOwner | None, has_something: bool) -> None:
    if found is not None and found.hub != identity and has_something:
        raise NotTheOwner(machine=found.machine)
