"""A disk that fills up in the middle of a tick. Real: a file system of its own that is too small,
with a database of SQLite, or a tablespace of PostgreSQL, on it.

Nothing is half-written, the command and the services say so in words, and when there is room again
the next tick goes on from where it was.
"""

from __future__ import annotations

import pwd
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import REPO

pytestmark = pytest.mark.usefixtures("processes")

SCRIPT = """
import os, sys
from contextlib import ExitStack
from pathlib import Path
from gpuspawner.services import Services
from gpuspawner.core.errors import StoreUnavailable
from gpuspawner.cli.app import main
from tests.support.brokers import Clock, open_services, problems, running
from tests.support.postgres import PrivatePostgres

place, kind, parts = Path(sys.argv[1]), sys.argv[2], ExitStack()
url = f"sqlite:///{place}/gpuspawner.sqlite"
words = "database or disk is full"
if kind == "postgresql":
    server = parts.enter_context(PrivatePostgres())
    url, words = server.fresh_database(place), "could not extend file"
clock = Clock()
services = open_services(url, clock, device_source="simulated:100xA100-80GB", gpu_rates={"*": 4})
for number in range(100):
    running(services, f"user{number}")

def state():
    with services.store.read() as connection:
        tables = ("accounts", "leases", "transfers", "postings")
        return [connection.exec_driver_sql(f"SELECT * FROM {t} ORDER BY 1").all() for t in tables]

ballast = place / "somebody-elses"
full = 0
for left in (0, 40_000, 400_000):
    with services.store.engine.connect() as connection:
        if kind == "sqlite":  # so that the log has to grow
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    with open(ballast, "wb") as file:
        free = os.statvfs(place)
        file.write(bytes(max(0, free.f_bavail * free.f_frsize - left)))
    before = state()
    clock.forward(minutes=1)
    try:
        services.ledger.charge_all()
    except StoreUnavailable as error:
        full += 1
        assert words in str(error.__cause__), error.__cause__
        assert "No changes were made." in error.message, error.message
        assert state() == before, "half of a tick was written"
        services.store.engine.dispose()
        code = main(["grant", "user1", "1", "--reason", "x", "--database", url])
        print("grant", left, code, flush=True)
    assert problems(services.store) == []
    ballast.unlink()
assert full, "the disk was never full"
assert services.ledger.charge_all() in (0, 100)
clock.forward(minutes=1)
assert services.ledger.charge_all() == 100, "it goes on when there is room"
assert all(lease.charged == 4 * 4_000_000 // 60 for lease in services.leases.open_leases())
assert problems(services.store) == []
assert not [finding.problem for finding in services.audit.check()[0] if finding.problem]
services.store.close()
parts.close()
print("well")
"""


def root_of_its_own(kind: str) -> list[str]:
    """A command by which another one sees a mount of its own; PostgreSQL refuses to be root."""
    root = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec"]
    mount = 'mount -t tmpfs -o size=32m tmpfs "$0" && exec "$@"'
    if kind == "sqlite":
        return [*root, mount]
    user = pwd.getpwnam("postgres")
    again = f"unshare --user --map-user={user.pw_uid} --map-group={user.pw_gid}"
    return [*root, mount.replace('exec "$@"', f'exec {again} "$@"')]


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder for PostgreSQL's socket, whose path may have no more than 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="full-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_full_disk_during_a_tick_leaves_nothing_half_written(
    tmp_path: Path, short: Path, kind: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    place = tmp_path / "disk"
    place.mkdir()
    # A mount that only this command sees, and that ends with it.
    done = subprocess.run(
        [*root_of_its_own(kind), str(place), sys.executable, str(script), str(place), kind],
        cwd=REPO,
        env={
            "PYTHONPATH": str(REPO),
            "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(tmp_path),
            "TMPDIR": str(short),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if line]
    assert said[-1] == "well"
    refused = [line for line in done.stderr.splitlines() if line.startswith("gpuspawner: ")]
    for line in refused:
        assert "disk is full" in line or "could not extend file" in line
        assert "No changes were made" in line
    assert any(line == "grant 0 1" for line in said), "the command says it too"
    assert "Traceback" not in done.stderr
