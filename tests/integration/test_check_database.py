"""Real: SQLite and PostgreSQL, file permissions. A list of mounts stands for a network's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from gpuspawner.cli.check_database import check_database, network_file_system
from gpuspawner.db.engine import Store
from gpuspawner.engines.preflight import Status
from gpuspawner.leases.models import Request, ServerRef
from gpuspawner.services import Broker
from tests.support.brokers import make_broker
from tests.support.processes import REPO


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    """A hub's broker with a lease and some postings."""
    broker = make_broker(database_url=database_url, device_source="simulated:2xT4")
    broker.ledger.open_account("ada")
    lease = broker.acquire(ServerRef("ada"), Request(devices=1), engine="local")
    broker.confirm(lease.id)
    yield broker
    Store.open(database_url).close()


def change(broker: Broker, *statements: str) -> None:
    with broker.store.write_engine.begin() as connection:
        for statement in statements:
            connection.execute(sa.text(statement))


def rows(broker: Broker) -> dict[str, Any]:
    """Everything that the database holds."""
    with broker.store.read() as connection:
        tables = sa.inspect(connection).get_table_names()
        return {
            table: sorted(map(str, connection.execute(sa.text(f'SELECT * FROM "{table}"'))))
            for table in tables
        }


def test_a_database_in_order_is_green_and_unchanged(broker: Broker) -> None:
    before = rows(broker)
    finding, readable = check_database(broker.settings.database.url)
    assert (finding.status, readable) == (Status.OK, True), finding
    assert "writable, refuses double leases and changes to the ledger" in finding.text
    assert rows(broker) == before
    broker.ledger.grant("member:ada", 1, actor="x", reason="it goes on")


@pytest.mark.parametrize(
    ("index", "allowed"),
    [
        ("one_open_lease_a_slot", "two leases of one device"),
        ("one_open_lease_a_server", "two leases of one server"),
        ("one_open_ticket_a_server", "two tickets of one server"),
    ],
)
def test_a_missing_constraint_is_red_by_name(broker: Broker, index: str, allowed: str) -> None:
    change(broker, f"DROP INDEX {index}")
    finding, _ = check_database(broker.settings.database.url)
    assert finding.status is Status.FAIL
    assert f"does not forbid {allowed}: constraints are missing" in finding.text


def test_a_ledger_that_can_be_changed_is_red(broker: Broker) -> None:
    if broker.store.dialect == "sqlite":
        change(broker, *(f"DROP TRIGGER postings_never_{verb}" for verb in ("update", "delete")))
    else:
        change(broker, "DROP TRIGGER postings_append_only ON postings")
    finding, _ = check_database(broker.settings.database.url)
    assert "does not forbid a changed posting, a deleted posting:" in finding.text


def test_a_database_of_a_newer_program_is_red(broker: Broker) -> None:
    change(broker, "UPDATE gpuspawner_version SET version_num = '9999'")
    finding, readable = check_database(broker.settings.database.url)
    assert (finding.status, readable) == (Status.FAIL, False)
    assert "is of version 9999, which this gpuspawner does not know" in finding.text


def test_an_empty_postgresql_database_is_green_and_stays_empty(postgres: Any) -> None:
    url = postgres.fresh_database()
    finding, readable = check_database(url)
    assert (finding.status, readable) == (Status.OK, False), finding
    assert "empty, the hub fills it at its start" in finding.text
    engine = sa.create_engine(url)
    assert sa.inspect(engine).get_table_names() == []
    engine.dispose()


def test_a_database_that_does_not_answer_is_red_without_its_password() -> None:
    finding, _ = check_database("postgresql+psycopg2://hub:hunter2@127.0.0.1:1/hub")
    assert finding.status is Status.FAIL
    assert "postgresql+psycopg2://hub:***@127.0.0.1:1/hub cannot be used" in finding.text
    assert "psql" in finding.remedy


def test_a_file_that_is_no_database_is_red(tmp_path: Path) -> None:
    path = tmp_path / "hub.sqlite"
    path.write_text("this is a letter, and not a database\n" * 100)
    finding, _ = check_database(f"sqlite:///{path}")
    assert "file is not a database" in finding.text


# As a user whom permissions hold: root is only root here without its capability to ignore them.


def checked_with_permissions(url: str) -> str:
    code = (
        "from gpuspawner.cli.check_database import check_database; import sys;"
        "finding, _ = check_database(sys.argv[1]);"
        "print(finding.status.value, finding.text, finding.remedy)"
    )
    held = "--bounding-set=-dac_override,-dac_read_search"
    keep = ["setpriv", held, "--"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*keep, sys.executable, "-c", code, url],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_directory_that_cannot_be_written_is_red(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o555)
    said = checked_with_permissions(f"sqlite:///{folder}/hub.sqlite")
    assert said.startswith(f"fail SQLite at {folder}/hub.sqlite cannot be made by ")
    assert f"must be able to write {folder} and the files in it." in said
    folder.chmod(0o755)
    assert checked_with_permissions(f"sqlite:///{folder}/hub.sqlite").startswith("ok ")
    assert list(folder.iterdir()) == []


def test_a_file_that_cannot_be_written_is_red(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/hub.sqlite"
    make_broker(database_url=url, device_source="simulated:1xT4").ledger.open_account("ada")
    Store.open(url).close()
    (tmp_path / "hub.sqlite").chmod(0o444)
    said = checked_with_permissions(url)
    assert said.startswith(f"fail SQLite at {tmp_path}/hub.sqlite cannot be used by "), said
    assert "attempt to write a readonly database" in said


# Where the file lies.

MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw,vers=4.2 0 0
/dev/sdb1 /home/fast ext4 rw 0 0
//nas/all /srv/with\\040space cifs rw 0 0
host /mnt 9p rw 0 0
tmpfs /mnt tmpfs rw 0 0
short line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/hub.sqlite", ""),
        ("/home/hub.sqlite", "nfs4"),
        ("/home/fast/hub.sqlite", ""),
        ("/homeless/hub.sqlite", ""),
        ("/srv/with space/hub.sqlite", "cifs"),
        ("/mnt/hub.sqlite", ""),
    ],
)
def test_network_file_systems(path: str, kind: str) -> None:
    assert network_file_system(Path(path), MOUNTS) == kind


def test_the_mounts_of_this_machine_are_read(tmp_path: Path) -> None:
    assert network_file_system(Path("/proc/x")) == ""
    assert network_file_system(tmp_path) == ""
