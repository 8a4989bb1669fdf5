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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
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
    ResourceClosedError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..errors import ConfigError, StoreUnavailable
from . import open_places
from .migrate import upgrade
from .prepared import Prepared, commit

T = TypeVar("T")

BUSY_SECONDS = 10.0
"""How long a writer waits for another before it gives up."""

_FIRST = {
    "sqlite": (Prepared(sa.text("BEGIN")), Prepared(sa.text("BEGIN IMMEDIATE"))),
    "postgresql": (
        # By default each statement of a transaction has a view of its own.
        Prepared(sa.text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")),
        # The advisory lock of whoever writes, by the bytes of "gpus".
        Prepared(sa.text(f"SELECT pg_advisory_xact_lock({0x67707573})")),
    ),
}
"""What comes first in a transaction that reads, and in one that writes."""

_OURS = (IntegrityError, ProgrammingError, DataError)
"""A rule of ours or a mistake of ours: not the database's absence."""
_ABSENT = (DBAPIError, PoolTimeout, ResourceClosedError, OSError)


@dataclass(slots=True, eq=False)
class _Kept:
    """The connection that a thread keeps: to borrow one from the pool for each transaction takes
    Python as long as the rest of a short one."""

    connection: sa.Connection | None = None
    file: tuple[int, int] | None = None
    """The file of SQLite that it is to."""
    in_use: bool = False


class _Own(threading.local):
    """What a thread has of a store."""

    kept: _Kept | None = None
    """Only the threads of :attr:`Store.executor` keep one, of which there are few."""


class Store:
    """One database. Thread-safe; share one a process through :meth:`open`."""

    _open: dict[str, Store] = {}
    _opening = threading.Lock()

    def __init__(self, url: str) -> None:
        self.url = url
        self.engine = _create_engine(url)
        self.dialect = self.engine.dialect.name
        self._first = _FIRST[self.dialect]
        self._path = self.engine.url.database if self.dialect == "sqlite" else None
        # SQLite has one writer at a time: more threads would only wait for one another.
        workers = 4 if self.dialect == "sqlite" else 8
        self.executor = ThreadPoolExecutor(
            workers, thread_name_prefix="gpuspawner-store", initializer=self._keep
        )
        self._own = _Own()
        # Who waits for SQLite's own lock looks again and again; who waits for this one sleeps.
        self._turn = threading.Lock() if self.dialect == "sqlite" else None
        # Those of the executor write on one connection, which knows what it wrote.
        self._writer = _Kept() if self._turn else None
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
        return _Transaction(self, False)

    def write(self) -> AbstractContextManager[sa.Connection]:
        """A write transaction; all of it happens or none. Writers come one at a time."""
        return _Transaction(self, True)

    def write_one(self, statement: Prepared, **values: Any) -> list[tuple[Any, ...]]:
        """What one statement returns that is a write transaction of its own."""
        # SQLite makes it one by itself, which spares BEGIN and COMMIT.
        with _Transaction(self, True, bare=self.dialect == "sqlite") as connection:
            return statement.rows(connection, **values)

    def begin(self, connection: sa.Connection, *, write: bool) -> None:
        """What comes first in a transaction. Writers wait for one another: no deadlocks between
        accounts, no lost race."""
        self._first[write].run(connection)

    def _take(self, write: bool, bare: bool) -> tuple[sa.Connection, _Kept | None]:
        """A connection on which a transaction has begun, unless it is to be ``bare``; and what
        the thread keeps, if it is that one's."""
        if not self._migrated:
            self._migrate()
        kept = self._own.kept
        if kept is not None and write and self._writer is not None:
            kept = self._writer
        if kept is not None and not kept.in_use:
            connection = kept.connection
            if connection is None or (self._path and kept.file != _file_at(self._path)):
                connection = self._connect(kept)
            try:
                if not bare:
                    self._first[write].run(connection)
                kept.in_use = True
                return connection, kept
            except BaseException as error:
                self._let_go(kept, broken=True)
                # It was lost while nobody used it, as when PostgreSQL was started again: go on
                # with one of which the pool has made sure that it lives.
                if not (isinstance(error, DBAPIError) and error.connection_invalidated):
                    raise
        connection = self.engine.connect()
        try:
            if not bare:
                self._first[write].run(connection)
            return connection, None
        except BaseException:
            _break_off(connection)
            raise

    def _connect(self, kept: _Kept) -> sa.Connection:
        """Another one for a thread to keep, to the database that is there now."""
        self._let_go(kept)
        connection = kept.connection = self.engine.connect()
        kept.file = connection.connection.info.get("file")
        self._kept.add(connection)
        return connection

    def _let_go(self, kept: _Kept, *, broken: bool = False) -> None:
        connection, kept.connection = kept.connection, None
        if connection is not None:
            self._kept.discard(connection)
            if broken:
                _break_off(connection)
            else:
                connection.close()

    def _keep(self) -> None:
        """A thread of the executor begins."""
        self._own.kept = _Kept()

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


class _Transaction:
    """From its begin to its commit, or to its rollback when anything is raised in it.

    A class and no generator, and no transaction of SQLAlchemy's unless a statement of its own
    makes it begin one: this is what a debit takes beside its rows.
    """

    __slots__ = ("_bare", "_connection", "_kept", "_store", "_turn", "_write")
    _connection: sa.Connection
    _kept: _Kept | None

    def __init__(self, store: Store, write: bool, bare: bool = False) -> None:
        """``bare``: the one statement in it is a transaction by itself."""
        self._store, self._write, self._bare = store, write, bare
        self._turn = store._turn if write else None

    def __enter__(self) -> sa.Connection:
        turn = self._turn
        if turn and not turn.acquire(timeout=BUSY_SECONDS):
            raise StoreUnavailable()
        try:
            self._connection, self._kept = self._store._take(self._write, self._bare)
            return self._connection
        except BaseException as error:
            if turn:
                turn.release()
            _raise_if_absent(error)
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            try:
                if error is None and not self._bare:
                    commit(self._connection)
            except BaseException:
                self._give_back()
                raise
            kept = self._kept
            if error is None and kept is not None:
                kept.in_use = False
            else:
                self._give_back()
        except BaseException as failed:
            _raise_if_absent(failed)
            raise
        finally:
            if self._turn:
                self._turn.release()
        if error is not None:
            _raise_if_absent(error)

    def _give_back(self) -> None:
        """To the pool, which rolls back what is not committed and finds out whether it is still
        any good."""
        if self._kept is None:
            self._connection.close()
        else:
            self._kept.in_use = False
            self._store._let_go(self._kept)


def _break_off(connection: sa.Connection) -> None:
    """Away with one of which nobody knows how far its first statement came: the pool keeps none
    that may be in the middle of something."""
    if not connection.closed:
        connection.invalidate()
        connection.close()


def _raise_if_absent(error: BaseException) -> None:
    """Raises StoreUnavailable for what the database says when it is locked, full or gone."""
    if isinstance(error, _ABSENT) and not isinstance(error, _OURS):
        raise StoreUnavailable() from error


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
                pool_size=8,  # as many as the executor's threads keep
                # For all others: asyncio's own threads, which are as many as cores and four more,
                # and whoever streams a long answer. A hub and its service may then take half of
                # the hundred that PostgreSQL allows unless somebody says otherwise.
                max_overflow=16,
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
        open_places.forget(record.info)
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
    # When it is there, another process may have been faster; whatever else is wrong will be said
    # as StoreUnavailable when the first transaction begins.
    with suppress(OSError):
        os.close(os.open(path or "", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
