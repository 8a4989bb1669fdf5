"""Copies made while others write, and put back. Real: SQLite, PostgreSQL, processes, SIGKILL."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command as alembic_command

from gpuspawner.cli.app import main
from gpuspawner.core.errors import BackupRefused, ConfigError
from gpuspawner.db import backup, engine
from gpuspawner.db.engine import Store
from gpuspawner.db.leader import LeaderLock
from gpuspawner.db.schema import metadata
from gpuspawner.services import Services
from tests.support import racers, spending
from tests.support.brokers import Clock, broken_invariants, open_services, problems, running
from tests.support.parts import each_database
from tests.support.processes import wait_for
from tests.support.tier import Rounds
from tests.support.years import Year, write_year


@pytest.fixture
def used(database_url: str) -> Iterator[Services]:
    """A store with something in most of its tables."""
    clock = Clock()
    services = open_services(database_url, clock, gpu_rates={"*": 4})
    running(services, "anna", 2)
    gone = running(services, "bert")
    clock.forward(hours=1)
    services.ledger.charge_all()
    services.leases.release(gone.id, ended_at=clock.now, reason="stopped")
    services.devices.pause(actor="admin", reason="new cables")
    services.devices.resume(actor="admin")
    services.monitoring.overview()
    yield services
    services.store.close()


def contents(store: Store) -> dict[str, list[tuple[object, ...]]]:
    """Every row of every table."""
    with store.read() as connection:
        return {
            table.name: sorted(map(tuple, connection.execute(sa.select(table)).all()), key=str)
            for table in metadata.sorted_tables
        }


def copied(file: Path) -> dict[str, list[tuple[object, ...]]]:
    """The same of a copy, which this changes."""
    with closing(Store(f"sqlite:///{file}")) as store:
        return contents(store)


def wait_unused(url: str, request: pytest.FixtureRequest) -> None:
    """Wait until connections that were closed have ended on the server, too."""
    if not url.startswith("sqlite"):
        request.getfixturevalue("postgres").wait_unused(url)


def another(url: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """The URL of another database of the same kind, with nothing in it."""
    if url.startswith("sqlite"):
        return f"sqlite:///{tmp_path}/another.sqlite"
    return str(request.getfixturevalue("postgres").fresh_database())


@each_database
def test_backup_is_one_private_file_that_restores_every_row(
    used: Services, database_url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    file = tmp_path / "copies" / "monday.copy"
    file.parent.mkdir()
    size = backup.back_up(used.store, file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert size == file.stat().st_size > 0
    assert [path.name for path in file.parent.iterdir()] == ["monday.copy"]
    assert backup.check(file)["leases"] == 2
    before = contents(used.store)

    url = another(database_url, tmp_path, request)
    assert backup.restore(url, file).rows["leases"] == 2
    services = open_services(url, used.clock, gpu_rates={"*": 4})
    try:
        assert contents(services.store) == before
        (anna,) = services.leases.open_leases()
        services.leases.release(anna.id, reason="stopped")
        running(services, "carl")  # new numbers do not collide with those that were carried over
        services.ledger.grant("member:anna", 5, actor="admin", reason="gift")
        services.devices.pause(actor="admin")
        assert problems(services.store) == []
        assert broken_invariants(services) == {}
    finally:
        services.store.close()


def test_backup_leaves_a_database_of_an_older_version_as_it_is(
    empty_database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An SQLite file is copied; of PostgreSQL the rows would be read as the newest version."""
    old, file = engine.versions()[-2], tmp_path / "old.copy"
    found = sa.create_engine(empty_database_url)
    settings = engine.config()
    with found.begin() as connection:
        settings.attributes["connection"] = connection
        alembic_command.upgrade(settings, old)
    code = main(["backup", "--database", empty_database_url, str(file)])
    if found.dialect.name == "sqlite":
        assert code == 0
        copy = sa.create_engine(f"sqlite:///{file}")
        with copy.connect() as connection:
            assert engine.revision(connection) == old
        copy.dispose()
    else:
        assert code == 1 and not file.exists()
        said = capsys.readouterr().err
        assert f"the database has version {old}" in said and "pg_dump --format=custom" in said
    with found.connect() as connection:
        assert engine.revision(connection) == old
    found.dispose()
    Store.open(empty_database_url).close()


@each_database
def test_restore_needs_an_unused_database_and_keeps_the_old_one(
    used: Services, database_url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    file = tmp_path / "copy"
    backup.back_up(used.store, file)
    with pytest.raises(BackupRefused, match="already exists; name another file"):
        backup.back_up(used.store, file)
    backup.back_up(used.store, file, overwrite=True)
    before = contents(used.store)
    used.ledger.grant("member:anna", 77, actor="admin", reason="after the copy")
    after = contents(used.store)
    with pytest.raises(BackupRefused, match="in use"):  # a service: it has connections open
        backup.restore(database_url, file, overwrite=True)
    hub = LeaderLock(used.store)
    assert hub.take()
    with pytest.raises(BackupRefused, match="in use"):
        backup.restore(database_url, file, overwrite=True)
    hub.give_up()
    wait_for(lambda: hub.holder() == "", "the lock to be released")
    used.store.close()
    wait_unused(database_url, request)
    with pytest.raises(BackupRefused, match="There is a database already"):
        backup.restore(database_url, file)
    with closing(Store(database_url)) as unchanged:
        assert contents(unchanged) == after

    wait_unused(database_url, request)
    kept = backup.restore(database_url, file, overwrite=True).kept
    with closing(Store(database_url)) as restored:
        assert contents(restored) == before
        if restored.dialect == "sqlite":
            assert copied(Path(kept)) == after
        else:
            with restored.read() as connection:
                query = f"SELECT reason FROM {kept}.transfers WHERE reason LIKE 'after%%'"
                assert connection.exec_driver_sql(query).scalar_one() == "after the copy"


SPOILT: list[tuple[float | str, str]] = [
    *((part, "was not put in place: it is") for part in (0.0, 0.02, 0.5, 0.9, 0.999)),
    (
        "UPDATE accounts SET balance = balance + 1 WHERE name = 'member:anna'",
        "The balance of member:anna is",
    ),
    ("UPDATE gpuspawner_version SET version_num = '9999'", "install the newer gpuspawner again"),
]
"""The part of a backup that is left, or what was changed in it, and why it is refused."""


def test_spoilt_or_foreign_file_is_not_restored(
    used: Services, database_url: str, tmp_path: Path
) -> None:
    whole, file = tmp_path / "whole", tmp_path / "copy"
    backup.back_up(used.store, whole)
    used.store.close()
    for spoilt, why in SPOILT:
        shutil.copy(whole, file)
        if isinstance(spoilt, float):
            os.truncate(file, int(file.stat().st_size * spoilt))
        else:
            with closing(sqlite3.connect(file)) as connection:
                connection.execute(spoilt)
                connection.commit()
        with pytest.raises((BackupRefused, ConfigError), match=why):
            backup.restore(database_url, file, overwrite=True)

    other = tmp_path / "other"
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
    (tmp_path / "text").write_text("Dear diary, " * 1000)
    before = other.read_bytes()
    for name in ("other", "text", "not-there"):
        with pytest.raises(BackupRefused, match="was not put in place"):
            backup.restore(database_url, tmp_path / name, overwrite=True)
    assert other.read_bytes() == before, "what is somebody else's stays as it is"
    with closing(Store(database_url)) as store:
        assert len(contents(store)["leases"]) == 2


def test_restore_replaces_a_damaged_database_but_not_by_itself(tmp_path: Path) -> None:
    url, file = f"sqlite:///{tmp_path}/hub.sqlite", tmp_path / "copy"
    services = open_services(url)
    services.ledger.open_account("anna")
    backup.back_up(services.store, file)
    services.store.close()
    with pytest.raises(BackupRefused, match="is the database itself"):
        backup.restore(url, tmp_path / "hub.sqlite", overwrite=True)
    (tmp_path / "hub.sqlite").write_bytes(b"\0" * 50_000)
    kept = backup.restore(url, file, overwrite=True).kept
    assert Path(kept).read_bytes() == b"\0" * 50_000
    services = open_services(url)
    assert services.ledger.member("anna").balance == 100_000_000
    services.store.close()


@each_database
def test_backups_made_during_writes_are_consistent(
    used: Services, database_url: str, tmp_path: Path
) -> None:
    used.store.close()
    began = time.time()
    services = spending.spender(database_url, began)
    workers, journal = [], tmp_path / "journal"

    def written() -> int:
        return journal.stat().st_size if journal.exists() else 0

    try:
        for number in range(2):
            work, user = spending.spend_until_killed, f"user{number}"
            workers.append(racers.Victim(work, database_url, began, user, 0, str(journal)))
            workers[-1].wait_round()
        seen = set()
        for number in range(3):
            before = written()
            wait_for(lambda before=before: written() > before, "a write")
            file = tmp_path / f"copy{number}"
            backup.back_up(services.store, file)
            seen.add(backup.check(file)["transfers"])
        assert len(seen) > 1, "there were writers"
    finally:
        for worker in workers:
            worker.kill()
        services.store.close()


def back_up_until_killed(ready: Connection, url: str, file: Path) -> None:
    store = Store(url)
    while True:
        ready.send("begins")
        backup.back_up(store, file, overwrite=True)


@each_database
def test_killed_backup_never_leaves_a_partial_backup(
    database_url: str, tmp_path: Path, rounds: Rounds, chance: random.Random
) -> None:
    """Under the wanted name there is the last whole copy, or none; never half of one."""
    store = Store(database_url)
    write_year(store, Year(members=20, devices=8, leases=200, days=10))
    expected = store.run(lambda c: c.exec_driver_sql("SELECT count(*) FROM postings").scalar())
    file = tmp_path / "copy"
    whole = 0
    for life in range(rounds(50)):
        victim = racers.Victim(back_up_until_killed, database_url, file)
        for _ in range(1 + life % 3):  # so many begin, and all but the last are whole
            victim.wait_round()
        time.sleep(chance.uniform(0, 0.2))
        victim.kill()
        if file.exists():
            whole += 1
            with closing(sqlite3.connect(file)) as connection:
                assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
                assert connection.execute("SELECT count(*) FROM postings").fetchone() == (expected,)
    assert whole
    backup.back_up(store, file, overwrite=True)  # what they left is in nobody's way
    assert backup.check(file)["postings"] == expected
    assert sorted(path.name for path in tmp_path.glob("*copy*")) == ["copy"]
    store.close()
