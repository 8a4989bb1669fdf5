"""Connections and transactions: SQLite by default, PostgreSQL by URL.

Every write is one transaction. On SQLite it starts with ``BEGIN IMMEDIATE`` (WAL, full sync), so
two writers queue instead of failing half-way; on PostgreSQL writers take an advisory lock. Errors
because the database is locked, full or gone become
:class:`~gpuspawner.core.errors.StoreUnavailable`.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    IntegrityError,
    NoSuchModuleError,
    OperationalError,
    PendingRollbackError,
    ProgrammingError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..core.errors import ConfigError, StoreUnavailable
from .clock import SteadyClock

if TYPE_CHECKING:
    from alembic.config import Config


T = TypeVar("T")

BUSY_SECONDS = 10.0
"""How long a writer waits for another one."""

UPGRADE_SECONDS = 60.0
"""How long a process waits at its start for another one that upgrades the schema."""

_BEGIN = {
    "sqlite": ("BEGIN", "BEGIN IMMEDIATE"),
    "postgresql": (
        # By default each statement of a transaction has a view of its own.
        "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY",
        # The advisory lock of writers: the bytes of "gpus".
        f"SELECT pg_advisory_xact_lock({0x67707573})",
    ),
}
"""The first statement of a transaction that reads, and of one that writes."""

LOCK_NOT_AVAILABLE = "55P03"
"""What PostgreSQL says, as an SQLSTATE, of a lock that was waited for in vain."""

_OURS = (IntegrityError, ProgrammingError, DataError)
"""A violated rule or a programming error, not the database's absence."""
_ABSENT = (DBAPIError, PoolTimeout, PendingRollbackError, OSError)


class NestedWrite(RuntimeError):
    """A write transaction was started within another of the same thread: a programming error."""

    def __init__(self) -> None:
        super().__init__(
            "a write transaction was begun within another one of the same thread; "
            "pass the connection on instead"
        )


class _Current(threading.local):
    """What the current thread does with one store."""

    view: sa.Connection | None = None
    writing: bool = False


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise StoreUnavailable for errors because the database is locked, full or gone."""
    try:
        yield
    except _OURS:
        raise
    except _ABSENT as error:
        raise StoreUnavailable() from error


class Store:
    """One database. Thread-safe; share one per process through :meth:`open`."""

    _open: dict[str, Store] = {}
    _opening = threading.Lock()

    def __init__(self, url: str) -> None:
        self.url = url
        self.engine = _create_engine(url)
        self.dialect = self.engine.dialect.name
        reads, writes = _BEGIN[self.dialect]
        self.read_engine = _beginning_with(self.engine, reads)
        self.write_engine = _beginning_with(self.engine, writes)
        # SQLite has one writer at a time: more threads would only wait for one another.
        workers = 4 if self.dialect == "sqlite" else 8
        # Separate threads, so that a release waits neither for requests nor for pages and reports.
        self.executor = _threads(workers, "change")
        self.ask_executor = _threads(4, "ask")
        self.read_executor = _threads(4, "read")
        self.report_executor = _threads(2, "report")
        # Waiting for SQLite's own lock is polling; waiting for this one is sleeping.
        self._turn = threading.Lock() if self.dialect == "sqlite" else None
        self._current = _Current()
        self._migrated = False
        self._migrating = threading.Lock()

    @classmethod
    def open(cls, url: str) -> Store:
        """Return the store at ``url``, one per process; only the connection pool is shared."""
        with cls._opening:
            if url not in cls._open:
                cls._open[url] = Store(url)
            return cls._open[url]

    @cached_property
    def clock(self) -> SteadyClock:
        """The clock of everybody in this process who uses this store."""
        return SteadyClock(self)

    def close(self) -> None:
        """Close every connection and forget the store."""
        with self._opening:
            if self._open.get(self.url) is self:
                del self._open[self.url]
        executors = (self.executor, self.ask_executor, self.read_executor, self.report_executor)
        for executor in executors:
            executor.shutdown(wait=True)
        self.engine.dispose()

    def run(self, work: Callable[[sa.Connection], T], *, write: bool = False) -> T:
        """Run ``work(connection)`` in one transaction and return its result."""
        with self.write() if write else self.read() as connection:
            return work(connection)

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Start a read transaction: one consistent view."""
        if (shared := self._current.view) is not None:
            with _own_errors():
                yield shared
            return
        with self._transaction(self.read_engine) as connection:
            yield connection

    @contextmanager
    def view(self) -> Iterator[None]:
        """Make all reads of this thread within the block one transaction with one view.

        Do not query an engine, a driver or a file system meanwhile.
        """
        with self._transaction(self.read_engine) as connection:
            self._current.view = connection
            try:
                yield
            finally:
                self._current.view = None

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """Start a write transaction: it commits on success and rolls back on any exception.

        Writers come one at a time, so there are no deadlocks between accounts and no lost updates.
        Raises NestedWrite within another one of the same thread, which it would wait for in vain,
        and StoreUnavailable or ClockWasSet.
        """
        if self._current.writing:
            raise NestedWrite()
        with _own_errors():
            self._migrate()  # before taking the turn, for which others wait less long
        if self._turn and not self._turn.acquire(timeout=BUSY_SECONDS):
            raise StoreUnavailable()
        self._current.writing = True
        try:
            with self._transaction(self.write_engine) as connection:
                if "clock" in self.__dict__:
                    self.clock.check(connection)
                yield connection
        finally:
            self._current.writing = False
            if self._turn:
                self._turn.release()

    @contextmanager
    def _transaction(self, engine: sa.Engine) -> Iterator[sa.Connection]:
        with _own_errors():
            self._migrate()
            with engine.begin() as connection:
                yield connection

    def _migrate(self) -> None:
        """Upgrade the schema, once per process."""
        if self._migrated:
            return
        with self._migrating:
            if not self._migrated:
                if self.dialect == "sqlite":
                    _create_private(self.engine.url.database)
                # Only an outdated database is locked: others write to it meanwhile.
                end = time.monotonic() + UPGRADE_SECONDS
                while not self._is_current():
                    try:
                        with self.write_engine.begin() as connection:
                            upgrade(connection)
                    except OperationalError as error:
                        # Another process is upgrading, which on a slow machine takes a while.
                        if not _is_locked(error) or time.monotonic() > end:
                            raise
                self._migrated = True

    def _is_current(self) -> bool:
        with self.read_engine.begin() as connection:
            return revision(connection) == newest()


def _is_locked(error: OperationalError) -> bool:
    """Return True if another connection held the database for longer than BUSY_SECONDS."""
    state = getattr(error.orig, "sqlstate", None)
    return state == LOCK_NOT_AVAILABLE or "database is locked" in str(error.orig)


def _threads(count: int, name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix=f"gpuspawner-store-{name}")


def default_url() -> str:
    """Return the URL in ``GPUSPAWNER_DATABASE_URL``, else that of a file in this directory."""
    return os.environ.get("GPUSPAWNER_DATABASE_URL") or "sqlite:///gpuspawner.sqlite"


def sqlite_file(url: str) -> Path | None:
    """Return the absolute path of the file in an SQLite URL; None for any other."""
    try:
        parsed = sa.make_url(url)
    except ArgumentError:
        return None
    name = parsed.database or ""
    if parsed.get_backend_name() != "sqlite" or not name or name.startswith((":memory:", "file:")):
        return None
    return Path(os.path.abspath(name))


def _create_engine(url: str) -> sa.Engine:
    try:
        parsed = sa.make_url(url)
        if parsed.get_backend_name() == "sqlite":
            return _create_sqlite(parsed)
        if parsed.get_backend_name() == "postgresql":
            if parsed.drivername == "postgresql":  # whose driver differs between SQLAlchemys
                parsed = parsed.set(drivername="postgresql+psycopg")
            return sa.create_engine(
                parsed,
                pool_size=8,  # as many as the executor for changes has threads
                # For all others: the other executors, and asyncio's own threads (cores plus four).
                # A hub and its service together may then use half of PostgreSQL's default hundred.
                max_overflow=16,
                pool_timeout=BUSY_SECONDS,
                pool_pre_ping=True,
                connect_args={
                    "connect_timeout": 5,
                    # psycopg returns bytes for text from a database that was made as SQL_ASCII.
                    "client_encoding": "utf8",
                    "tcp_user_timeout": int(BUSY_SECONDS * 1000),
                    "options": f"-c lock_timeout={int(BUSY_SECONDS * 1000)}",
                },
            )
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        what = f"the database URL cannot be used ({error}); write it like sqlite:////srv/hub.sqlite"
        raise ConfigError(what=what) from None
    what = (
        f"{parsed.get_backend_name()!r} is not a supported database; "
        "use sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME"
    )
    raise ConfigError(what=what)


def _beginning_with(engine: sa.Engine, statement: str) -> sa.Engine:
    """Return an engine with the same connections whose transactions start with a statement."""
    own = engine.execution_options()

    @sa.event.listens_for(own, "begin")
    def begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql(statement).close()

    return own


def _create_sqlite(url: sa.URL) -> sa.Engine:
    if not url.database or url.database == ":memory:":
        what = "the SQLite database must be a file: the hub and its service share it"
        raise ConfigError(what=what)
    path = os.path.abspath(url.database)
    engine = sa.create_engine(
        url.set(database=path),
        pool_size=8,
        max_overflow=16,
        pool_use_lifo=True,  # the last used connection has its pages in memory
        connect_args={"timeout": BUSY_SECONDS},
    )

    @sa.event.listens_for(engine, "do_connect")
    def never_create(dialect: Any, record: Any, args: list[Any], options: dict[str, Any]) -> None:
        # A database that disappeared must not come back as an empty one.
        args[0] = f"file:{quote(path)}?mode=rw"
        options["uri"] = True

    @sa.event.listens_for(engine, "connect")
    def prepare(dbapi_connection: Any, record: Any) -> None:
        record.info["file"] = _file_at(path)
        dbapi_connection.isolation_level = None  # BEGIN is sent by _beginning_with
        cursor = dbapi_connection.cursor()
        _use_wal(cursor)
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA foreign_keys=ON")
        # With the default of 2 MB, a tick over thousands of leases spills into the log.
        cursor.execute("PRAGMA cache_size=-32768")
        cursor.close()

    @sa.event.listens_for(engine, "checkout")
    def still_there(dbapi_connection: Any, record: Any, proxy: Any) -> None:
        # SQLite keeps writing to a deleted file, which nobody would ever read.
        if record.info["file"] != _file_at(path):
            raise sa.exc.DisconnectionError("the database file was moved, replaced or deleted")

    return engine


def _use_wal(cursor: sqlite3.Cursor) -> None:
    """Set the journal mode. SQLite's own timeout does not cover concurrent changes of it."""
    end = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(0.005)


def _file_at(path: str) -> tuple[int, int] | None:
    """Return the identity of the file that is there now; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _create_private(path: str | None) -> None:
    """Create the database file readable by the hub only: it contains who used what."""
    # If it exists, another process may have been faster; any other problem becomes StoreUnavailable
    # in the first transaction.
    with suppress(OSError):
        os.close(os.open(path or "", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


SCRIPTS = Path(__file__).parent / "migrations"

VERSION_TABLE = "gpuspawner_version"
"""Not Alembic's own name: JupyterHub's tables may be in the same database."""


def config() -> Config:
    """Return the Alembic configuration; no alembic.ini, so that a wheel needs no extra file."""
    from alembic.config import Config

    settings = Config()
    settings.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    return settings


def revision(connection: sa.Connection) -> str | None:
    """Return the version of the schema in the database, or None for an empty one."""
    if not sa.inspect(connection).has_table(VERSION_TABLE):
        return None
    version = sa.table(VERSION_TABLE, sa.column("version_num", sa.Text))
    return connection.execute(sa.select(version.c.version_num)).scalar()


@cache
def versions() -> list[str]:
    """Return the version that each migration leads to, oldest first, from its file name."""
    return sorted(path.name.partition("_")[0] for path in SCRIPTS.glob("versions/[0-9]*.py"))


def newest() -> str:
    """Return the version that the newest migration leads to."""
    return versions()[-1]


def unknown_version(version: str) -> str:
    """Return what is wrong with a database of a version that no migration leads to."""
    return f"has version {version}, which this gpuspawner does not know"


def upgrade(connection: sa.Connection) -> None:
    """Upgrade the schema within the transaction. Raises ConfigError for an unknown version."""
    current = revision(connection)
    if current == newest():
        return
    if current is not None and current not in versions():
        what = (
            f"the database {unknown_version(current)}; install the newer gpuspawner again, or "
            "restore the database from before its upgrade"
        )
        raise ConfigError(what=what)
    # Only now: a process with an up-to-date database starts a quarter of a second earlier.
    from alembic import command

    settings = config()
    settings.attributes["connection"] = connection
    command.upgrade(settings, "head")
