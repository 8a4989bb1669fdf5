"""A database that is locked, full, unreadable or gone. Real: all of that, on SQLite;
test_postgres_failures.py has PostgreSQL.

Whatever happens, it is said as StoreUnavailable, nothing is half-written, and it works again
as soon as the database does.
"""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import sqlalchemy as sa

from gpuspawner.db import engine as db_engine
from gpuspawner.leases.models import ServerRef
from gpuspawner.services import Services
from tests.support import racers
from tests.support.broken_stores import assert_unavailable, assert_works, in_use
from tests.support.brokers import acquire, open_services, problems, running
from tests.support.processes import PATIENCE


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits ten seconds for a lock in a test."""
    monkeypatch.setattr(db_engine, "BUSY_SECONDS", 0.3)


@pytest.fixture
def path(tmp_path: Path, migrated_file: Path) -> Path:
    """An SQLite database, in a folder that has nothing else."""
    (tmp_path / "srv").mkdir()
    return Path(shutil.copy(migrated_file, tmp_path / "srv" / "gpuspawner.sqlite"))


# SQLite, locked by another process.

HOLD = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
for statement in sys.argv[2:]:
    connection.execute(statement).fetchall()
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(path: Path, *statements: str) -> Iterator[None]:
    """Another process has run these statements, and does not let go."""
    command = [sys.executable, "-c", HOLD, str(path), *statements]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout and other.stdout.readline() == "held\n"
        yield
        other.communicate()


def test_other_sqlite_writer_blocks_writes_but_not_reads(path: Path) -> None:
    with in_use(f"sqlite:///{path}") as services:
        with held(path, "BEGIN IMMEDIATE"):
            assert_unavailable(services, reads=False)
            assert len(services.leases.open_leases()) == 1, "who only reads is not disturbed"
        assert_works(services)


def test_locked_sqlite_file_makes_the_store_unavailable(path: Path) -> None:
    with in_use(f"sqlite:///{path}") as services:
        services.store.engine.dispose()  # a lock of the whole file waits for who has it open
        whole = ("PRAGMA locking_mode = EXCLUSIVE", "BEGIN EXCLUSIVE", "SELECT * FROM accounts")
        with held(path, *whole):
            assert_unavailable(services)
        assert_works(services)


def test_write_waits_for_a_lock_released_in_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db_engine, "BUSY_SECONDS", 30 * PATIENCE)
    with in_use(f"sqlite:///{path}") as services:
        asked = threading.Event()
        write = services.store.write

        def noted() -> AbstractContextManager[sa.Connection]:
            asked.set()
            return write()

        monkeypatch.setattr(services.store, "write", noted)
        with held(path, "BEGIN IMMEDIATE"):
            waiting = services.store.executor.submit(acquire, services, "cara", 1)
            assert asked.wait(30 * PATIENCE)
            assert not waiting.done()
        assert len(waiting.result(timeout=30 * PATIENCE).devices) == 1


# SQLite, gone.


def test_store_recovers_when_its_missing_folder_returns(path: Path) -> None:
    with in_use(f"sqlite:///{path}") as services:
        path.parent.rename(path.parent.with_name("elsewhere"))
        assert_unavailable(services)
        path.parent.mkdir()
        assert_unavailable(services)
        assert list(path.parent.iterdir()) == [], "no empty database takes its place"
        path.parent.rmdir()
        path.parent.with_name("elsewhere").rename(path.parent)
        assert_works(services)


def test_deleted_database_file_makes_the_store_unavailable(path: Path) -> None:
    """Nothing is written to a file that nobody can read any more."""
    with in_use(f"sqlite:///{path}") as services:
        copy = path.with_name("copy.sqlite")
        assert services.leases.open_leases()
        with closing(sqlite3.connect(path)) as whole, closing(sqlite3.connect(copy)) as backup:
            whole.backup(backup)
        for file in path.parent.glob("gpuspawner.sqlite*"):
            file.unlink()
        assert_unavailable(services)
        copy.rename(path)  # a backup is put in its place, while the hub runs
        assert_works(services)


def test_store_works_once_its_folder_is_created(tmp_path: Path) -> None:
    services = open_services(f"sqlite:///{tmp_path}/not/yet/gpuspawner.sqlite")
    assert_unavailable(services)
    (tmp_path / "not" / "yet").mkdir(parents=True)
    assert acquire(services, "anna").server == ServerRef("anna")
    services.store.close()


def test_file_that_is_not_a_database_is_left_unchanged(path: Path) -> None:
    path.write_text("a letter that somebody saved here by mistake " * 100)
    services = open_services(f"sqlite:///{path}")
    assert_unavailable(services)
    assert path.read_text().startswith("a letter"), "and is left as it was"
    services.store.close()


# SQLite, not to be read, not to be written, full. As processes, whose rights and limits are
# their own.


def _as_somebody_else(gate: Barrier, url: str, mode: int) -> list[str]:
    """What reading and writing comes to when the rights change under a running hub."""
    db_engine.BUSY_SECONDS = 0.3
    services = open_services(url)
    services.monitoring.overview()
    services.store.engine.dispose()
    os.chmod(services.store.engine.url.database or "", mode)
    if os.geteuid() == 0:  # whom no rights stop
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    return [
        racers.outcome(services.leases.open_leases),
        racers.outcome(partial(acquire, services, "anna")),
    ]


@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_file_without_permission_makes_the_store_unavailable(mode: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="gpuspawner-rights-"))  # not in a folder of root's own
    try:
        folder.chmod(0o755)
        url = f"sqlite:///{folder}/gpuspawner.sqlite"
        assert racers.together((_as_somebody_else, url, mode)) == [["StoreUnavailable"] * 2]
        (folder / "gpuspawner.sqlite").chmod(0o600)
        services = open_services(url)
        assert acquire(services, "anna").server == ServerRef("anna")
        services.store.close()
    finally:
        shutil.rmtree(folder)


def _on_a_full_disk(gate: Barrier, url: str) -> tuple[list[str], str, list[str]]:
    """Lives of servers until there is no room, then one with room again."""
    services = open_services(url)
    services.monitoring.overview()
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, most))
    said: list[str] = []
    while len(said) < 2000 and set(said) <= {"lease"}:
        said.append(racers.outcome(partial(_come_and_go, services, f"user{len(said)}")))
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    after = racers.outcome(partial(_come_and_go, services, "late"))
    wrong = problems(services.store)
    services.store.close()
    return said, after, wrong


def _come_and_go(services: Services, user: str) -> None:
    lease = running(services, user)
    services.ledger.charge_all()
    services.leases.release(lease.id, reason="stopped")


def test_full_disk_makes_the_store_unavailable_until_freed(path: Path) -> None:
    """A limit of the process's file size stands for the disk's end: the same write fails."""
    ((said, after, wrong),) = racers.together((_on_a_full_disk, f"sqlite:///{path}"))
    assert (said[0], said[-1]) == ("lease", "StoreUnavailable")
    assert (after, wrong) == ("lease", [])
