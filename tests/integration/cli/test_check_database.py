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

from gpuspawner.cli.check_hub import check_database, network_file_system
from gpuspawner.db.engine import Store, unknown_version
from gpuspawner.engines.preflight import Status
from gpuspawner.leases.models import Request, ServerRef
from gpuspawner.services import Services
from tests.support.brokers import make_services
from tests.support.processes import REPO


@pytest.fixture
def services(database_url: str) -> Iterator[Services]:
    """A hub's services with a lease and some postings."""
    services = make_services(database_url=database_url, device_source="simulated:2xT4")
    services.ledger.open_account("ada")
    lease = services.leases.grant(ServerRef("ada"), Request(devices=1), engine="local")
    services.leases.confirm(lease.id)
    yield services
    Store.open(database_url).close()


def change(services: Services, *statements: str) -> None:
    with services.store.write_engine.begin() as connection:
        for statement in statements:
            connection.execute(sa.text(statement))


def rows(services: Services) -> dict[str, Any]:
    """Everything that the database holds."""
    with services.store.read() as connection:
        tables = sa.inspect(connection).get_table_names()
        return {
            table: sorted(map(str, connection.execute(sa.text(f'SELECT * FROM "{table}"'))))
            for table in tables
        }


def test_healthy_database_passes_and_stays_unchanged(services: Services) -> None:
    before = rows(services)
    finding, readable = check_database(services.settings.database.url)
    assert (finding.status, readable) == (Status.OK, True), finding
    assert "writable, refuses double leases and changes to the ledger" in finding.text
    assert rows(services) == before
    services.ledger.grant("member:ada", 1, actor="x", reason="it goes on")


DAMAGE = {
    "two leases of one device": ("DROP INDEX one_open_lease_a_slot",),
    "two shares of one device with one member": ("DROP INDEX one_share_a_member",),
    "two leases of one server": ("DROP INDEX one_open_lease_a_server",),
    "two tickets of one server": ("DROP INDEX one_open_ticket_a_server",),
    "a changed posting, a deleted posting": (
        "DROP TRIGGER postings_never_update",
        "DROP TRIGGER postings_never_delete",
    ),
}
"""What a database allows without some of its constraints."""


def test_missing_constraint_fails_and_is_named(services: Services) -> None:
    dropped: set[str] = set()
    for allowed, statements in DAMAGE.items():
        if services.store.dialect == "postgresql" and "posting" in allowed:
            statements = ("DROP TRIGGER postings_append_only ON postings",)
        change(services, *statements)
        dropped |= {*allowed.split(", ")}
        finding, _ = check_database(services.settings.database.url)
        assert finding.status is Status.FAIL
        named = finding.text.partition("does not forbid ")[2].partition(": constraints are missing")
        assert {*named[0].split(", ")} == dropped


def test_database_of_a_newer_version_fails(services: Services) -> None:
    change(services, "UPDATE gpuspawner_version SET version_num = '9999'")
    finding, readable = check_database(services.settings.database.url)
    assert (finding.status, readable) == (Status.FAIL, False)
    assert f" {unknown_version('9999')}." in finding.text


def test_empty_postgresql_database_passes_and_stays_empty(postgres: Any) -> None:
    url = postgres.fresh_database()
    finding, readable = check_database(url)
    assert (finding.status, readable) == (Status.OK, False), finding
    assert "empty, the hub fills it at its start" in finding.text
    engine = sa.create_engine(url)
    assert sa.inspect(engine).get_table_names() == []
    engine.dispose()


def test_unusable_database_fails_without_showing_its_password(tmp_path: Path) -> None:
    finding, _ = check_database("postgresql+psycopg://hub:hunter2@127.0.0.1:1/hub")
    assert finding.status is Status.FAIL
    assert "postgresql+psycopg://hub:***@127.0.0.1:1/hub cannot be used" in finding.text
    assert "psql" in finding.remedy
    path = tmp_path / "hub.sqlite"
    path.write_text("this is a letter, and not a database\n" * 100)
    finding, _ = check_database(f"sqlite:///{path}")
    assert "file is not a database" in finding.text


# As a user whom permissions hold: root is only root here without its capability to ignore them.


def checked_with_permissions(*urls: str) -> list[str]:
    """What a process says of these databases, one after the other: its imports take seconds."""
    code = (
        "from gpuspawner.cli.check_hub import check_database; import sys\n"
        "for url in sys.argv[1:]:\n"
        "    finding, _ = check_database(url)\n"
        "    print(finding.status.value, finding.text, finding.remedy)"
    )
    held = "--bounding-set=-dac_override,-dac_read_search"
    keep = ["setpriv", held, "--"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*keep, sys.executable, "-c", code, *urls],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_unwritable_places_fail(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("closed", "open")]
    for folder, mode in zip(folders, (0o555, 0o755), strict=True):
        folder.mkdir(mode=mode)
    file = tmp_path / "hub.sqlite"
    make_services(
        database_url=f"sqlite:///{file}", device_source="simulated:1xT4"
    ).ledger.open_account("ada")
    Store.open(f"sqlite:///{file}").close()
    file.chmod(0o444)
    files = [*(folder / "hub.sqlite" for folder in folders), file]
    closed, may_write, read_only = checked_with_permissions(
        *(f"sqlite:///{each}" for each in files)
    )
    assert closed.startswith(f"fail SQLite at {files[0]} cannot be made by ")
    assert f"must be able to write {folders[0]} and the files in it." in closed
    assert may_write.startswith("ok ") and list(folders[1].iterdir()) == []
    assert read_only.startswith(f"fail SQLite at {file} cannot be used by "), read_only
    assert "attempt to write a readonly database" in read_only


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


def test_network_file_system_is_found_in_the_mounts(tmp_path: Path) -> None:
    for path, kind in (
        ("/srv/hub.sqlite", ""),
        ("/home/hub.sqlite", "nfs4"),
        ("/home/fast/hub.sqlite", ""),
        ("/homeless/hub.sqlite", ""),
        ("/srv/with space/hub.sqlite", "cifs"),
        ("/mnt/hub.sqlite", ""),
    ):
        assert network_file_system(Path(path), MOUNTS) == kind, path
    assert network_file_system(Path("/proc/x")) == ""
    assert network_file_system(tmp_path) == ""
