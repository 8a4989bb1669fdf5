"""Connections and transactions: SQLite by default, PostgreSQL by URL.

Every write is one transaction. On SQLite it begins with ``BEGIN IMMEDIATE`` (WAL, full
sync), so two writers queue instead of failing half-way; on PostgreSQL writers take an
advisory lock. Whatever the database says when it is locked, full or
gone becomes :class:`~gpuspawner.errors.StoreUnavailable`.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    IntegrityError,
    NoSuchModuleError,
    ProgrammingError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..errors import ConfigError, StoreUnavailable
from .migrate import upgrade
from .prepared import Prepared

T = TypeVar("T")

BUSY_SECONDS = 10.0
"""How long a writer waits for another before it gives up."""

_LOCK = Prepared(sa.text(f"SELECT pg_advisory_xact_lock({0x67707573})"))
"""The advisory lock of whoever writes, by the bytes of "gpus"."""
_BEGIN, _BEGIN_WRITE = Prepared(sa.text("BEGIN")), Prepared(sa.text("BEGIN IMMEDIATE"))


class _Own(threading.local):
    """What a thread has of a store."""

    keeps = False
    """Whether it keeps its connection: to borrow one from the pool for each transaction takes
    Python as long as the rest of a short one. Only the threads of :attr:`Store.executor` do, of
    which there are few."""
    connection: sa.Connection | None = None
    in_use = False


class Store:
    """One database. Thread-safe; share one a process through :meth:`open`."""

    _open: dict[str, Store] = {}
    _opening = threading.Lock()

    def __init__(self, url: str) -> None:
        self.url = url
        self.engine = _create_engine(url)
        self.dialect = self.engine.dialect.name
        self._reading = self.engine
        if self.dialect == "postgresql":
            # By default each statement of a transaction has a view of its own.
            self._reading = self.engine.execution_options(
                isolation_level="REPEATABLE READ", postgresql_readonly=True
            )
        # SQLite has one writer at a time: more threads would only wait for one another.
        workers = 4 if self.dialect == "sqlite" else 8
        self.executor = ThreadPoolExecutor(
            workers, thread_name_prefix="gpuspawner-store", initializer=self._keep
        )
        self._own = _Own()
        # Who waits for SQLite's own lock looks again and again; who waits for this one sleeps.
        self._turn = threading.Lock() if self.dialect == "sqlite" else None
        self._kept: set[sa.Connection] = set()
        self._migrated = False
        self._migrating = threading.Lock()

    @classmethod
    def open(cls, url: str) -> Store:
        """The store at ``url``, one a process: a connection pool is all that is shared."""
        with cls._opening:
            if url not in cls._open:
                cls._open[url] = Store(url)
            return cls._open[url]

    def close(self) -> None:
        """Close every connection and forget the store."""
        with self._opening:
            if self._open.get(self.url) is self:
                del self._open[self.url]
        self.executor.shutdown(wait=True)
        for connection in list(self._kept):
            connection.close()
        self.engine.dispose()

    def run(self, work: Callable[[sa.Connection], T], *, write: bool = False) -> T:
        """Run ``work(connection)`` in one transaction and return its result."""
        with self.write() if write else self.read() as connection:
            return work(connection)

    def read(self) -> AbstractContextManager[sa.Connection]:
        """A read transaction: one consistent view."""
        return self._transaction(write=False)

    def write(self) -> AbstractContextManager[sa.Connection]:
        """A write transaction; all of it happens or none. Writers come one at a time."""
        return self._transaction(write=True)

    def write_one(self, statement: Prepared, **values: Any) -> list[tuple[Any, ...]]:
        """What one statement returns that is a write transaction of its own."""
        # SQLite makes it one by itself, which spares BEGIN and COMMIT.
        with self._transaction(write=True, bare=self.dialect == "sqlite") as connection:
            return statement.rows(connection, **values)

    @contextmanager
    def _transaction(self, *, write: bool, bare: bool = False) -> Iterator[sa.Connection]:
        turn = self._turn if write else None
        if turn and not turn.acquire(timeout=BUSY_SECONDS):
            raise StoreUnavailable()
        try:
            self._migrate()
            with self._connected(write) as connection:
                if bare:
                    yield connection
                    return
                with connection.begin():
                    self.begin(connection, write=write)
                    yield connection
        except (IntegrityError, ProgrammingError, DataError):
            raise  # a rule of ours or a mistake of ours: not the database's absence
        except (DBAPIError, PoolTimeout, OSError) as error:
            raise StoreUnavailable() from error
        finally:
            if turn:
                turn.release()

    @contextmanager
    def _connected(self, write: bool) -> Iterator[sa.Connection]:
        own = self._own
        if not own.keeps or own.in_use:
            with (self.engine if write else self._reading).connect() as connection:
                yield connection
            return
        connection = self._own_connection()
        own.in_use = True
        try:
            yield connection
        except BaseException:
            self._let_go(connection)  # maybe it is no good any more: the pool will find out
            raise
        finally:
            own.in_use = False

    def _own_connection(self) -> sa.Connection:
        """The one that this thread keeps, on the database that is there now."""
        connection = self._own.connection
        if connection is not None:
            if _is_there(connection.connection.info, self.engine.url.database or ""):
                return connection
            self._let_go(connection)
        connection = self._own.connection = self.engine.connect()
        self._kept.add(connection)
        return connection

    def _let_go(self, connection: sa.Connection) -> None:
        self._own.connection = None
        self._kept.discard(connection)
        connection.close()

    def _keep(self) -> None:
        """A thread of the executor begins. PostgreSQL's connections are asked each time whether
        they still live, which the pool does."""
        self._own.keeps = self.dialect == "sqlite"

    def begin(self, connection: sa.Connection, *, write: bool) -> None:
        """What comes first in a transaction. Writers wait for one another: no deadlocks between
        accounts, no lost race."""
        if self.dialect == "sqlite":
            (_BEGIN_WRITE if write else _BEGIN).run(connection)
        elif write:
            _LOCK.run(connection)

    def _migrate(self) -> None:
        """Bring the schema up to date, once a process."""
        if self._migrated:
            return
        with self._migrating:
            if not self._migrated:
                if self.dialect == "sqlite":
                    _create_private(self.engine.url.database)
                with self.engine.connect() as connection, connection.begin():
                    self.begin(connection, write=True)
                    upgrade(connection)
                self._migrated = True


def default_url() -> str:
    """The database named by ``GPUSPAWNER_DATABASE_URL``, else a file in this directory."""
    return os.environ.get("GPUSPAWNER_DATABASE_URL") or "sqlite:///gpuspawner.sqlite"


def _create_engine(url: str) -> sa.Engine:
    try:
        parsed = sa.make_url(url)
        if parsed.get_backend_name() == "sqlite":
            return _create_sqlite(parsed)
        if parsed.get_backend_name() == "postgresql":
            if parsed.drivername == "postgresql":  # whose driver differs between SQLAlchemys
                parsed = parsed.set(drivername="postgresql+psycopg2")
            return sa.create_engine(
                parsed,
                pool_size=8,
                max_overflow=4,
                pool_timeout=BUSY_SECONDS,
                pool_pre_ping=True,
                connect_args={
                    "connect_timeout": 5,
                    "tcp_user_timeout": int(BUSY_SECONDS * 1000),
                    "options": f"-c lock_timeout={int(BUSY_SECONDS * 1000)}",
                },
            )
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
        what = f"the database URL cannot be used ({error}); write it like sqlite:////srv/hub.sqlite"
        raise ConfigError(what=what) from None
    what = (
        f"{parsed.get_backend_name()!r} is no supported database; "
        "use sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME"
    )
    raise ConfigError(what=what)


def _create_sqlite(url: sa.URL) -> sa.Engine:
    if not url.database or url.database == ":memory:":
        what = "the SQLite database must be a file: the hub and its service share it"
        raise ConfigError(what=what)
    path = os.path.abspath(url.database)
    engine = sa.create_engine(
        url.set(database=path),
        pool_size=8,
        max_overflow=4,
        pool_use_lifo=True,  # the connection that was used last has its pages in memory
        connect_args={"timeout": BUSY_SECONDS},
    )

    @sa.event.listens_for(engine, "do_connect")
    def never_create(dialect: Any, record: Any, args: list[Any], options: dict[str, Any]) -> None:
        # A database that went away must not come back as an empty one.
        args[0] = f"file:{quote(path)}?mode=rw"
        options["uri"] = True

    @sa.event.listens_for(engine, "connect")
    def prepare(dbapi_connection: Any, record: Any) -> None:
        record.info["file"] = _file_at(path)
        dbapi_connection.isolation_level = None  # we say BEGIN ourselves: Store.begin
        cursor = dbapi_connection.cursor()
        _use_wal(cursor)
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA foreign_keys=ON")
        # Of 2 MB, the default, a tick over thousands of leases spills into the log as it goes.
        cursor.execute("PRAGMA cache_size=-32768")
        cursor.close()

    @sa.event.listens_for(engine, "checkout")
    def still_there(dbapi_connection: Any, record: Any, proxy: Any) -> None:
        # SQLite goes on writing to a file that was deleted, and nobody would ever read it.
        if not _is_there(record.info, path):
            raise sa.exc.DisconnectionError("the database file was moved, replaced or deleted")

    return engine


def _use_wal(cursor: sqlite3.Cursor) -> None:
    """Set the journal mode. SQLite's own timeout does not cover several that do so at once."""
    end = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(0.005)


def _is_there(info: Any, path: str) -> bool:
    """Whether a connection, of which this was noted, is to the file that is there now."""
    there: bool = info["file"] == _file_at(path)
    return there


def _file_at(path: str) -> tuple[int, int] | None:
    """Which file is there now, whatever it is called; None when there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _create_private(path: str | None) -> None:
    """Make the database file readable by the hub alone: it says who used what."""
    try:
        os.close(os.open(path or "", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        pass  # it is there, or another process was faster
    except OSError:
        pass  # said as StoreUnavailable when the first transaction begins
