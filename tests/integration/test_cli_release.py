"""Leases freed by hand. Real: the command, processes, both databases. Simulated: the devices."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuspawner.engines.local import LEASE_VARIABLE, process_ref
from gpuspawner.leases.models import Lease, LeaseState, Request
from gpuspawner.services import Broker
from tests.support.command import ADA, GRACE, Command, grant
from tests.support.processes import wait_for

# Release.


@pytest.fixture
def server() -> Iterator[Callable[[Lease], str]]:
    """Start a process that carries a lease, as GPULocalSpawner does; its engine_ref."""
    running: list[subprocess.Popen[bytes]] = []

    def start(lease: Lease) -> str:
        environment = {LEASE_VARIABLE: lease.id, "JUPYTERHUB_USER": lease.server.user}
        process = subprocess.Popen(
            ["sleep", "600"], env=os.environ | environment, start_new_session=True
        )
        running.append(process)
        wait_for(
            lambda: LEASE_VARIABLE.encode() in Path(f"/proc/{process.pid}/environ").read_bytes(),
            "the process to be sleep",
        )
        return process_ref(process.pid)

    yield start
    for process in running:
        process.kill()
        process.wait()


def test_a_live_server_keeps_its_lease_unless_forced(
    cli: Command, broker: Broker, server: Callable[[Lease], str]
) -> None:
    lease = broker.acquire(ADA, Request(devices=1, model="A100"), engine="local")
    broker.confirm(lease.id, server(lease))
    broker.forward(hours=1)
    done = cli("release", lease.id, "--yes", code=1)
    assert "is alive." in done.stderr
    assert "insist with --force" in done.stderr
    assert broker.lease(lease.id).state is LeaseState.RUNNING

    done = cli("release", lease.id, "--yes", "--force")
    assert "go on using the devices until the accounting service ends it" in done.stderr
    ended = broker.lease(lease.id)
    assert ended.state is LeaseState.ENDED
    assert ended.end_reason == "released by hand by root (alive)"
    assert ended.charged > 3_600_000, "up to now: the server ran all the time"
    again = cli("release", lease.id, "--yes", code=1)
    assert "ended already" in again.stderr


def test_a_server_that_is_gone_is_settled_up_to_its_last_sight(
    cli: Command, broker: Broker
) -> None:
    lease = grant(broker, ADA, ref="999999999:1", devices=2, model="A100")
    broker.forward(minutes=30)
    broker._mark_seen([lease.id], broker.clock())
    broker.forward(days=3)

    done = cli("release", lease.id[:8], answer="n\n", code=1)
    assert done.stderr.splitlines()[0] == (
        f"Lease {lease.id} of ada: 2x A100-80GB (0, 1), running since 2025-03-01 12:00:00 UTC."
    )
    assert "its process is gone" in done.stderr
    assert (
        "frees 2x A100-80GB (0, 1) for others and charges member:ada 3.60 credits in all, "
        "up to 2025-03-01 12:30:00 UTC (0.00 of them are charged already)." in done.stderr
    )
    assert "Nothing was changed." in done.stderr
    assert cli("release", lease.id, code=1).stderr.endswith("Nothing was changed.\n"), "no answer"
    assert broker.lease(lease.id).state is LeaseState.RUNNING

    done = cli("release", lease.id[:8], answer="y\n")
    assert done.stdout == f"Lease {lease.id} ended: 3.60 credits charged in all.\n"
    assert broker.lease(lease.id).charged == 3_600_000
    assert broker.overview().free == 3


def test_an_engine_that_cannot_be_asked_needs_force(cli: Command, broker: Broker) -> None:
    docker = grant(broker, ADA, engine="docker", ref="c0ffee", devices=1)
    done = cli("release", docker.id, "--yes", code=1, DOCKER_HOST="unix:///nowhere.sock")
    assert "the Docker Engine does not answer" in done.stderr
    assert "is unknown" in done.stderr
    other = grant(broker, GRACE, engine="slurm", devices=1)
    done = cli("release", other.id, "--yes", code=1)
    assert "cannot ask the engine 'slurm'" in done.stderr
    assert len(broker.open_leases()) == 2

    plain = cli.json("release", docker.id, "--yes", "--force", DOCKER_HOST="unix:///nowhere.sock")
    assert (plain["state"], plain["server_was"]) == ("ended", "unknown")
    assert [lease.id for lease in broker.open_leases()] == [other.id]


def test_a_start_under_way_is_not_gone(cli: Command, broker: Broker) -> None:
    lease = broker.acquire(ADA, Request(devices=1), engine="local")
    done = cli("release", lease.id, "--yes", code=1)
    assert "the start may be under way" in done.stderr
    cli("release", lease.id, "--yes", "--force")
    assert broker.lease(lease.id).charged == 0
    assert broker.ledger.member("ada").available == 100_000_000
