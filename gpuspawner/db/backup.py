"""Backups of a store: made while others write to it, and restored after they are checked.

A backup is one SQLite file, whatever the database is, so it can also move a site from one to the
other. The file with the final name is complete at any moment, whichever process is killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import quote

import sqlalchemy as sa

from ..core.errors import BackupRefused, GPUSpawnerError
from . import audit, hash_chain
from .engine import BUSY_SECONDS, VERSION_TABLE, Store, newest, revision, upgrade
from .leader import LeaderLock
from .schema import metadata

ROWS = 5000
"""How many rows are copied from one database to another at once."""

_OTHERS = sa.text(
    "SELECT coalesce(nullif(application_name, ''), usename) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid() "
    "AND backend_type = 'client backend'"
)
_FUNCTIONS = sa.text(
    "SELECT oid::regprocedure::text FROM pg_proc WHERE proname LIKE 'gpuspawner%' "
    "AND pronamespace = current_schema()::regnamespace"
)


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """The result of a restore."""

    rows: dict[str, int]
    kept: str
    """Where the previous database is now; empty if there was none."""


# Making a backup.


def back_up(store: Store, file: Path, *, overwrite: bool = False) -> int:
    """Copy the store into ``file``, for its owner only; return its size. Raises BackupRefused."""
    if file.exists() and not overwrite:
        what = f"{file} already exists; name another file, or use --overwrite"
        raise BackupRefused(f"Nothing was copied: {what}.")
    try:
        with _partial(file) as part:
            if store.dialect == "sqlite":
                _copy_file(store, part)
            else:
                _copy_rows(store, part)
            _close_up(part)
            _rename(part, file)
    except (OSError, sqlite3.Error) as error:
        raise BackupRefused(f"The copy {file} could not be made: {_said(error)}.") from error
    return file.stat().st_size


@contextmanager
def _partial(file: Path) -> Iterator[Path]:
    """Make or reuse an empty file of mode 600 beside ``file``, and remove it at the end."""
    part = file.with_name(f".{file.name}.part")
    descriptor = os.open(part, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BackupRefused(
                f"Another process is writing {file}. Wait until it has finished."
            ) from None
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, 0)
        try:
            yield part
        finally:
            for name in (part, *_beside(part)):
                name.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _copy_file(store: Store, part: Path) -> None:
    """Copy with one step of SQLite's backup, which reads one moment and blocks no writer."""
    path = quote(store.engine.url.database or "")  # it may have a ? or a %
    source = sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=BUSY_SECONDS)
    with closing(source), closing(sqlite3.connect(part)) as target:
        source.backup(target)


def _copy_rows(store: Store, part: Path) -> None:
    """Copy every row as of one moment into an SQLite file of the same version.

    Raises BackupRefused for another version than the newest: reading would upgrade the database.
    """
    with store.engine.connect() as connection:
        found = revision(connection)
    if found != newest():
        raise BackupRefused(
            f"Nothing was copied: the database has version {found}, and this gpuspawner copies "
            f"only version {newest()} from PostgreSQL. Use pg_dump --format=custom, or the "
            "gpuspawner that wrote it."
        )
    with (
        closing(Store(f"sqlite:///{part}")) as copy,
        store.read() as source,
        copy.write() as target,
    ):
        _carry(source, target)


def _carry(source: sa.Connection, target: sa.Connection) -> None:
    """Copy all rows of all tables, referenced tables first."""
    for table in metadata.sorted_tables:
        rows = source.execute(sa.select(table), execution_options={"yield_per": ROWS}).mappings()
        for some in rows.partitions(ROWS):
            target.execute(sa.insert(table), [dict(row) for row in some])


def _close_up(part: Path) -> None:
    """Turn the copy into one self-contained file, and flush it to disk."""
    with closing(sqlite3.connect(part)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
    _flush(part)


def _rename(part: Path, file: Path) -> None:
    os.replace(part, file)
    _flush(file.parent)


def _replace(part: Path, place: Path) -> None:
    """Put a copy in the place of a database, and give it the same owner if we are root."""
    with suppress(FileNotFoundError, PermissionError):  # no database there yet, or we are not root
        old = place.stat()
        os.chown(part, old.st_uid, old.st_gid, follow_symlinks=False)
    _rename(part, place)


def _flush(path: Path) -> None:
    """Flush a file or a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Checking and restoring a backup.


def prove(file: Path, copy: Path) -> dict[str, int]:
    """Check every invariant on ``copy``, a fresh copy of ``file``, and return the row counts.

    ``copy`` is upgraded to the schema of this gpuspawner. Raises BackupRefused, or ConfigError if a
    newer gpuspawner made it.
    """
    refused = f"{file} was not put in place"
    try:
        shutil.copyfile(file, copy)
        with closing(sqlite3.connect(copy)) as connection:
            (said,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            if said != "ok":
                raise BackupRefused(f"{refused}: it is damaged or was cut short ({said}).")
            # SQLite takes what is missing of the last page for zeros, which may even be right.
            sizes = (f"PRAGMA {name}" for name in ("page_count", "page_size"))
            pages, size = (connection.execute(each).fetchone()[0] for each in sizes)
            if copy.stat().st_size < pages * size:
                raise BackupRefused(f"{refused}: it is cut short.")
            known = "SELECT 1 FROM sqlite_master WHERE name = ?"
            if not connection.execute(known, (VERSION_TABLE,)).fetchone():
                raise BackupRefused(f"{refused}: it is not a copy of a gpuspawner database.")
    except sqlite3.Error as error:
        what = f"it is damaged, cut short, or not a copy of a gpuspawner database ({error})"
        raise BackupRefused(f"{refused}: {what}.") from error
    except OSError as error:
        raise BackupRefused(f"{refused}: {_said(error)}.") from error
    with closing(Store(f"sqlite:///{copy}")) as store, store.read() as found:
        for finding in audit.audit(found):
            if finding.problem:
                raise BackupRefused(f"{refused}: {finding.problem}")
        return audit.sizes(found)


def head(file: Path) -> str:
    """Return the head of a backup's audit chain; see :func:`gpuspawner.db.hash_chain.head`."""
    engine = sa.create_engine(f"sqlite:///{file}", poolclass=sa.NullPool)
    with engine.connect() as connection:
        return hash_chain.head(connection)


def check(file: Path) -> dict[str, int]:
    """Check a backup, changing nothing, and return the row counts. Raises as :func:`prove`."""
    with tempfile.TemporaryDirectory(prefix="gpuspawner-") as folder:
        return prove(file, Path(folder) / "copy.sqlite")


def restore(url: str, file: Path, *, overwrite: bool = False) -> RestoreResult:
    """Check a backup, then replace the database at ``url`` with it.

    An existing database is moved aside, and only with ``overwrite``. Raises BackupRefused, also
    while the database is in use; then nothing was changed.
    """
    store = Store(url)
    granter = LeaderLock(store)
    try:
        if store.dialect == "sqlite":
            return _restore_file(store, granter, file, overwrite)
        return _restore_rows(store, granter, file, overwrite)
    finally:
        granter.give_up()
        store.close()


def _restore_file(store: Store, granter: LeaderLock, file: Path, overwrite: bool) -> RestoreResult:
    place = Path(store.engine.url.database or "")
    if place.exists() and file.exists() and place.samefile(file):
        raise BackupRefused(f"{file} is the database itself: name a copy of it.")
    if place.exists() and not overwrite:
        raise BackupRefused(_THERE.format(what=place, how="the old one is kept under another name"))
    take_leader_lock(granter)
    try:
        with _partial(place) as part:
            rows = prove(file, part)
            _close_up(part)
            kept = _move_aside(place) if place.exists() else ""
            _replace(part, place)
    except OSError as error:
        raise BackupRefused(f"{file} could not be put in place: {_said(error)}.") from error
    return RestoreResult(rows, kept)


_THERE = "There is a database already: {what}. Use --overwrite to replace it ({how})."
_USED = "The database is in use{whose}. Stop the hub and its services first; nothing was changed."


def take_leader_lock(granter: LeaderLock) -> None:
    """Take the leader lock, so that no hub starts granting meanwhile. Raises BackupRefused."""
    if not granter.take():
        raise BackupRefused(_USED.format(whose=f" by the hub {granter.holder()}"))


def require_unused(place: Path) -> None:
    """Raise BackupRefused while another process has an SQLite database open."""
    try:
        with closing(sqlite3.connect(place, timeout=0)) as connection:
            # SQLite gives up the write-ahead log only for its only user.
            connection.execute("PRAGMA journal_mode=DELETE")
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise BackupRefused(_USED.format(whose="")) from None
        raise BackupRefused(f"{place} cannot be replaced: {error}.") from error
    except sqlite3.DatabaseError:
        pass  # it is damaged, which may be why there is a backup to restore


def put_back(place: Path, file: Path) -> None:
    """Replace an SQLite database with a backup as it is, of an older version too.

    :func:`restore` upgrades what it puts in place; this undoes an upgrade. The caller holds the
    leader lock. Raises BackupRefused while another process uses the database.
    """
    try:
        with _partial(place) as part:
            shutil.copyfile(file, part)
            _close_up(part)
            require_unused(place)
            for name in _beside(place):  # SQLite would apply what a damaged one left to this one
                name.unlink(missing_ok=True)
            _replace(part, place)
    except (OSError, sqlite3.Error) as error:
        raise BackupRefused(f"{file} could not be put back: {_said(error)}.") from error


def _move_aside(place: Path) -> str:
    """Rename the old database once nobody else has it open, and return its new name."""
    require_unused(place)
    aside = place.with_name(f"{place.name}.before-{_stamp()}")
    for name in _beside(place):  # of a damaged one: the new one must not use them
        with suppress(FileNotFoundError):
            name.rename(name.with_name(name.name.replace(place.name, aside.name, 1)))
    try:
        os.link(place, aside)  # if killed now, the old one is still in place
    except OSError:
        shutil.copy2(place, aside)
    return str(aside)


def _restore_rows(store: Store, granter: LeaderLock, file: Path, overwrite: bool) -> RestoreResult:
    with tempfile.TemporaryDirectory(prefix="gpuspawner-") as folder:
        copy = Path(folder) / "copy.sqlite"
        rows = prove(file, copy)
        with store.write() as target:
            if others := target.execute(_OTHERS).scalars().all():
                raise BackupRefused(_USED.format(whose=f" by {', '.join(sorted(set(others)))}"))
            take_leader_lock(granter)
            kept = ""
            if any(audit.sizes(target).values()):
                if not overwrite:
                    how = "the old tables are kept in a schema of their own"
                    what = "it has accounts or leases in it"
                    raise BackupRefused(_THERE.format(what=what, how=how))
                kept = _tables_aside(target)
            with closing(Store(f"sqlite:///{copy}")) as source, source.read() as found:
                _carry(found, target)
            _count_on(target)
    return RestoreResult(rows, kept)


def _tables_aside(connection: sa.Connection) -> str:
    """Move our tables into a schema of their own, create empty ones, and return its name."""
    schema = f"gpuspawner_before_{_stamp()}"
    connection.exec_driver_sql(f"CREATE SCHEMA {schema}")
    for name in (*metadata.tables, VERSION_TABLE):
        connection.exec_driver_sql(f'ALTER TABLE "{name}" SET SCHEMA {schema}')
    for function in connection.execute(_FUNCTIONS).scalars().all():
        connection.exec_driver_sql(f"ALTER FUNCTION {function} SET SCHEMA {schema}")
    upgrade(connection)
    return schema


def _count_on(connection: sa.Connection) -> None:
    """Set PostgreSQL's sequences to continue after the largest copied number."""
    for table in metadata.sorted_tables:
        column = table.autoincrement_column
        if column is None:
            continue
        greatest = connection.execute(sa.select(sa.func.max(column))).scalar()
        if greatest:
            sequence = sa.func.pg_get_serial_sequence(table.name, column.name)
            connection.execute(sa.select(sa.func.setval(sequence, greatest)))


# Helpers.


def _beside(file: Path) -> list[Path]:
    """Return the files that SQLite creates beside a database."""
    return [file.with_name(file.name + ending) for ending in ("-wal", "-shm", "-journal")]


def _stamp() -> str:
    return datetime.now(timezone.utc).strftime("%Y%m%d_%H%M%S_%f")


def _said(error: BaseException) -> str:
    if isinstance(error, GPUSpawnerError):
        return error.message
    return getattr(error, "strerror", None) or str(error)
