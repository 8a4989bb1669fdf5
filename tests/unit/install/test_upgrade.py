"""`gpuspawner upgrade`. Real: SQLite files, migrations, backups, the leader lock. Stand-ins: the
check, but for one test, and on an installed machine the programs."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command as alembic_command

from gpuspawner.core.errors import Refused
from gpuspawner.db import backup, engine
from gpuspawner.db.engine import Store
from gpuspawner.db.leader import LeaderLock
from gpuspawner.engines.preflight import CheckFinding, Status
from gpuspawner.install import commands, upgrade
from gpuspawner.install.files import FileTree
from tests.unit.install.machine import BIN, FakeHost, run

OLD = engine.versions()[-2]


@pytest.fixture
def database(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database of the version before the newest one, with an account in it, and its hub."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "gpuspawner.sqlite"
    path.touch(mode=0o600)
    with closing(Store(f"sqlite:///{path}")) as store, store.write_engine.begin() as connection:
        settings = engine.config()
        settings.attributes["connection"] = connection
        alembic_command.upgrade(settings, OLD)
        connection.exec_driver_sql("CREATE TABLE proof (text TEXT)")
        connection.exec_driver_sql("INSERT INTO proof VALUES ('as before')")
    (tmp_path / "jupyterhub_config.py").write_text(
        f"c = get_config()\nc.GPUDatabase.url = 'sqlite:///{path}'\n"
    )
    return path


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    before = set(Store._open)  # of fixtures that other tests in this process still use
    yield
    for url in set(Store._open) - before:
        Store._open[url].close()


FULL = [CheckFinding("disk", Status.FAIL, "it is full")]


class Check:
    """The check, which looks at the database, changes it, and finds what it is told.

    Without being told, it finds the disk green, and the database if that is of the newest version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.before: list[CheckFinding] = []
        self.after: list[CheckFinding] = []
        self.error: BaseException | None = None
        self.versions: list[str] = []
        self.commands: list[list[str]] = []

    def __call__(self, command: Sequence[str]) -> list[CheckFinding]:
        self.commands.append(list(command[3:]))
        self.versions.append(version(self.path))
        with closing(sqlite3.connect(self.path)) as connection:
            connection.execute("UPDATE proof SET text = 'changed'")
            connection.commit()
        is_newest = self.versions[-1] == engine.newest()
        if self.error and is_newest:
            raise self.error
        database = CheckFinding("database", Status.OK if is_newest else Status.FAIL, "as it is")
        disk = [CheckFinding("disk", Status.OK, "it has room")]
        return [database, *((self.after if is_newest else self.before) or disk)]


def version(path: Path) -> str:
    with closing(sqlite3.connect(path)) as connection:
        (found,) = connection.execute("SELECT version_num FROM gpuspawner_version").fetchone()
    return str(found)


def proof(path: Path) -> str:
    with closing(sqlite3.connect(path)) as connection:
        (found,) = connection.execute("SELECT text FROM proof").fetchone()
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    return str(found)


def backups(path: Path) -> list[Path]:
    return sorted((path.parent / "backups").glob("*"))


@pytest.fixture
def check(database: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    found = Check(database)
    monkeypatch.setattr(commands, "run_check", found)
    return found


def test_upgrade_backs_up_migrates_and_checks(database: Path, check: Check) -> None:
    done = run("upgrade")
    assert done.code == 0, done.output
    assert check.versions == [OLD, engine.newest()]
    assert check.commands == [["check", "--json"]] * 2
    assert version(database) == engine.newest()
    (kept,) = backups(database)
    assert version(kept) == OLD and proof(kept) == "as before"
    assert kept.stat().st_mode & 0o777 == 0o600 and kept.parent.stat().st_mode & 0o777 == 0o700
    assert f"from version {OLD} to {engine.newest()}" in done.output
    assert str(kept) in done.output


def test_failed_check_puts_the_database_back(database: Path, check: Check) -> None:
    check.after = FULL
    done = run("upgrade", "--no-containers")
    assert done.code == 1
    assert check.versions == [OLD, engine.newest()]
    assert check.commands == [["check", "--json", "--no-containers"]] * 2
    assert version(database) == OLD and proof(database) == "as before"
    assert database.stat().st_mode & 0o777 == 0o600
    (kept,) = backups(database)
    assert f"Red after the upgrade: disk. The database is as it was before (version {OLD})" in (
        done.output
    )
    assert re.search("FAIL +disk +it is full", done.output)
    assert str(kept) in done.output and "install the earlier gpuspawner" in done.output
    assert {path.name for path in database.parent.glob("gpuspawner.sqlite*")} == {
        "gpuspawner.sqlite",
        "gpuspawner.sqlite.granter",
    }


@pytest.mark.parametrize(
    "before",
    [
        FULL,
        [CheckFinding("disk", Status.UNCHECKED, "nobody knows")],
        [CheckFinding("disk", Status.OK, "of members"), *FULL],
    ],
)
def test_check_that_was_not_green_before_undoes_nothing(
    database: Path, check: Check, before: list[CheckFinding]
) -> None:
    check.before, check.after = before, FULL
    done = run("upgrade")
    assert done.code == 0, done.output
    assert version(database) == engine.newest()
    assert "Not green before the upgrade either: disk." in done.output


def test_database_that_stays_red_is_put_back(database: Path, check: Check) -> None:
    check.after = [CheckFinding("database", Status.FAIL, "it does not forbid double leases")]
    done = run("upgrade")
    assert done.code == 1 and "Red after the upgrade: database." in done.output
    assert version(database) == OLD and proof(database) == "as before"


def test_real_check_is_read_before_and_after(database: Path) -> None:
    """The hub's spawner leases no GPUs: a configuration that is red both times."""
    done = run("upgrade", "--no-containers")
    assert done.code == 0, done.output
    assert version(database) == engine.newest()
    assert re.search(f"ok +database .*version {engine.newest()}", done.output), done.output
    assert re.search("Not green before the upgrade either: .*configuration", done.output)


def test_check_that_says_nothing_is_refused() -> None:
    with pytest.raises(Refused, match="ended with 3, and found nothing"):
        commands.run_check(["sh", "-c", "exit 3"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a file to another user")
def test_database_that_is_put_back_has_its_owner(database: Path, check: Check) -> None:
    os.chown(database, 12345, 23456)
    check.after = FULL
    assert run("upgrade").code == 1
    found = database.stat()
    assert (found.st_uid, found.st_gid) == (12345, 23456)


def test_failed_migration_puts_the_database_back(
    database: Path, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_it(connection: sa.Connection) -> None:
        engine.upgrade(connection)
        connection.exec_driver_sql("UPDATE proof SET text = 'changed'")
        connection.exec_driver_sql("COMMIT")  # what a transaction would have undone
        connection.exec_driver_sql("BEGIN")
        connection.exec_driver_sql("INSERT INTO nowhere VALUES (1)")

    monkeypatch.setattr(upgrade, "upgrade", break_it)
    done = run("upgrade")
    assert done.code == 1 and "The upgrade failed (OperationalError: no such table: nowhere)" in (
        done.output
    )
    assert check.versions == [OLD]
    assert version(database) == OLD and proof(database) == "as before"


def test_interrupted_check_puts_the_database_back(database: Path, check: Check) -> None:
    check.error = KeyboardInterrupt()
    assert run("upgrade").code == 130
    assert version(database) == OLD and proof(database) == "as before"


def test_lost_terminal_puts_the_database_back(
    database: Path, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def say(sentence: str, **options: Any) -> None:
        if sentence == "Checking the hub:":
            seen.append(version(database))
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(commands.click, "echo", say)
        assert run("upgrade", "--no-containers").code == 1
    assert seen == [engine.newest()] and check.versions == [OLD]
    assert version(database) == OLD and proof(database) == "as before"


def test_database_that_cannot_be_put_back_is_reported(
    database: Path, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    check.after = FULL

    def refuse(place: Path, file: Path) -> None:
        raise backup.BackupRefused("The disk is full.")

    monkeypatch.setattr(backup, "put_back", refuse)
    done = run("upgrade")
    assert done.code == 1 and "could not be put back: The disk is full." in done.output
    assert f"then copy {backups(database)[0]} over it" in done.output


def test_second_upgrade_changes_nothing(database: Path, check: Check) -> None:
    assert run("upgrade").code == 0
    before = backups(database)
    done = run("upgrade")
    assert "is up to date" in done.output and backups(database) == before
    check.after = FULL
    assert run("upgrade").code == 1, "the check is red"
    assert version(database) == engine.newest()


def test_running_hub_or_service_is_refused(database: Path, check: Check) -> None:
    before = database.read_bytes()
    with closing(Store(f"sqlite:///{database}")) as store:
        hub = LeaderLock(store)
        assert hub.take()
        done = run("upgrade")
        assert done.code == 1 and "The database is in use by the hub" in done.output
        hub.give_up()

    with closing(sqlite3.connect(database)) as service:
        service.execute("PRAGMA journal_mode=WAL")
        service.execute("BEGIN")
        service.execute("SELECT * FROM proof").fetchall()
        done = run("upgrade")
        assert done.code == 1 and "Stop the hub and its services first" in done.output
    assert version(database) == OLD and backups(database) == [] and check.versions == []
    assert len(database.read_bytes()) == len(before)
    assert run("upgrade").code == 0, "nobody holds the lock any more"


def test_json_names_database_and_backup(database: Path, check: Check, tmp_path: Path) -> None:
    file = tmp_path / "copy.sqlite"
    done = run("upgrade", "--json", "--backup", str(file))
    expected = {"database": str(database), "ok": True, "backup": str(file)}
    assert json.loads(done.stdout) == expected
    done = run("upgrade", "--json")
    assert json.loads(done.stdout) == {**expected, "backup": None}


def test_named_backup_is_not_overwritten(database: Path, check: Check, tmp_path: Path) -> None:
    mine = tmp_path / "mine.sqlite"
    mine.write_text("precious")
    done = run("upgrade", "--backup", str(mine))
    assert done.code == 1 and "already exists" in done.output
    assert mine.read_text() == "precious" and version(database) == OLD

    other = tmp_path / "other.sqlite"
    assert run("upgrade", "--backup", str(other)).code == 0
    assert version(other) == OLD


def test_other_databases_are_refused_with_what_to_do(database: Path, check: Check) -> None:
    done = run("upgrade", "--database", "postgresql://gpuspawner@db.lab.example/gpuspawner")
    assert done.code == 1 and "pg_dump --format=custom" in done.output
    done = run("upgrade", "--database", f"sqlite:///{database.parent}/none.sqlite")
    assert done.code == 1 and "There is no database at" in done.output
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("UPDATE gpuspawner_version SET version_num = '9999'")
        connection.commit()
    done = run("upgrade")
    assert done.code == 1 and "has version 9999" in done.output and backups(database) == []
    other = database.parent / "other.sqlite"
    other.touch()
    done = run("upgrade", "--database", f"sqlite:///{other}")
    assert done.code == 1 and "is not a database of gpuspawner" in done.output


def test_check_runs_no_module_of_the_working_directory(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = database.parent
    (folder / "gpuspawner").mkdir()
    for name in ("gpuspawner/__init__.py", "gpuspawner/__main__.py", "click.py"):
        (folder / name).write_text("print('of somebody else')")
    said = []

    def ask_version(command: Sequence[str]) -> list[CheckFinding]:
        assert command[3:] == ["check", "--json"]
        words = [*command[:3], "--version"]
        said.append(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout)
        return []

    monkeypatch.setattr(commands, "run_check", ask_version)
    assert run("upgrade").code == 0
    assert said[0].startswith("gpuspawner ") and "somebody else" not in said[0]


# On a machine that `init` installed.


@pytest.fixture
def installed(root: Path, host: FakeHost) -> FakeHost:
    assert run("init", "--prefix", str(root), "--defaults").code == 0
    host.checks.clear()
    host.active.clear()
    return host


def upgrade_installed(root: Path, host: FakeHost, *words: str) -> int:
    return commands.upgrade_installed_hub(FileTree(root), host, words)


def test_installed_hub_is_upgraded_as_its_user(
    root: Path, installed: FakeHost, capsys: pytest.CaptureFixture[str]
) -> None:
    assert upgrade_installed(root, installed, "--no-containers") == 0
    ((words, environment, folder),) = installed.checks
    config = "/etc/gpuspawner/jupyterhub_config.py"
    assert words == [f"{BIN}/gpuspawner", "upgrade", "-f", config, "--no-containers"]
    assert folder == "/var/lib/gpuspawner" and environment["CONFIGPROXY_AUTH_TOKEN"]
    assert "systemctl start gpuspawner" in capsys.readouterr().err
    installed.check_code = 1
    assert upgrade_installed(root, installed) == 1
    assert "systemctl start" not in capsys.readouterr().err


def test_jupyterhubs_own_database_is_upgraded_after_ours(
    root: Path, installed: FakeHost, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "var/lib/gpuspawner/jupyterhub.sqlite").touch()
    assert upgrade_installed(root, installed) == 0
    assert [words[1] for words, *_ in installed.checks] == ["upgrade", "upgrade-db"]
    installed.codes["upgrade-db"] = 1
    capsys.readouterr()
    assert upgrade_installed(root, installed) == 1
    said = capsys.readouterr().err
    assert "JupyterHub's own database was not upgraded" in said and "systemctl" not in said
    installed.checks.clear()
    installed.check_code = 1
    assert upgrade_installed(root, installed) == 1
    assert [words[1] for words, *_ in installed.checks] == ["upgrade"]


def test_installed_hub_has_to_be_stopped_first(root: Path, installed: FakeHost) -> None:
    installed.active.add("gpuspawner.service")
    with pytest.raises(Refused, match="systemctl stop gpuspawner"):
        upgrade_installed(root, installed)
    assert installed.checks == []


def test_command_finds_the_installed_hub_unless_another_is_named(
    root: Path, installed: FakeHost, database: Path, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "FileTree", lambda path: FileTree(root))
    run("upgrade")
    assert len(installed.checks) == 1 and version(database) == OLD
    run("upgrade", "-f", "jupyterhub_config.py")
    assert len(installed.checks) == 1 and version(database) == engine.newest()
