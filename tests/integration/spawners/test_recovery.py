"""A hub that restarts while the start of a server is not confirmed. Real: the spawner, the
server's process, SQLite. Stand-in: the Hub around the spawner."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from jupyterhub.objects import Server

from gpuspawner.db import engine as db_engine
from gpuspawner.leases.models import Lease, LeaseState, Request, ServerRef
from gpuspawner.services import Services
from gpuspawner.spawners.local import GPULocalSpawner
from tests.support import tiny_server
from tests.support.brokers import open_services
from tests.support.gpu_hub import locked
from tests.support.processes import PATIENCE, free_port
from tests.support.telling import until

LOG = logging.getLogger(__name__)
LONG = 30 * PATIENCE


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch, new_file: Callable[[], str]) -> Iterator[Services]:
    monkeypatch.setattr(db_engine, "BUSY_SECONDS", 0.3)
    services = open_services(new_file(), gpu_rates={"*": 1})
    services.ledger.open_account("ada")
    yield services
    services.store.close()


@pytest.fixture
def lease(services: Services) -> Lease:
    return services.leases.grant(ServerRef("ada"), Request(devices=1), engine="local")


@pytest.fixture
def process(processes: None, lease: Lease) -> Iterator[tuple[int, int]]:
    """The process id and the port of ada's server, which the hub before this one started."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/user/ada/"
    environment = {"GPUSPAWNER_LEASE_ID": lease.id, "JUPYTERHUB_SERVICE_URL": url}
    command = [sys.executable, str(Path(tiny_server.__file__))]
    with subprocess.Popen(command, env={**os.environ, **environment}) as process:
        yield process.pid, port
        process.kill()


async def test_failed_adoption_is_retried_at_the_next_poll(
    services: Services, lease: Lease, process: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    pid, port = process
    user = SimpleNamespace(
        name="ada", escaped_name="ada", settings={}, groups=[], url="/user/ada/", admin=False
    )
    spawner = GPULocalSpawner(user=user, services=services, log=LOG)
    spawner.load_state({"pid": pid, "lease_id": lease.id})
    spawner.server = Server(ip="127.0.0.1", port=port, base_url="/user/ada/")

    with locked(services.settings.database.url):
        assert await spawner.poll() is None
        failed = "is not adopted yet"
        await until(lambda: failed in caplog.text, "the adoption to fail", LONG)
    assert services.leases.get(lease.id).state is LeaseState.GRANTED

    def is_confirmed() -> bool:
        return services.leases.get(lease.id).state is LeaseState.RUNNING

    assert await spawner.poll() is None
    await until(is_confirmed, "the adoption", LONG)
    assert services.leases.get(lease.id).started_at is not None
    await until(lambda: spawner.lease.state is LeaseState.RUNNING, "the hub to know", LONG)
    assert await spawner.poll() is None
    assert caplog.text.count(failed) == 1, "an adopted server is not adopted again"
