"""A hub that restarts: a comparison for which many starts wait, and servers whose start is not
confirmed. Real: the spawner, the server's process, SQLite. Stand-in: the Hub around the spawner,
and an engine that comes up later."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from jupyterhub import orm
from jupyterhub.objects import Server
from sqlalchemy.orm import Session

from gpuspawner.core.errors import EngineUnavailable, NotReconciled, StartFailed
from gpuspawner.db import engine as db_engine
from gpuspawner.engines.local import LocalEngine
from gpuspawner.leases.models import Lease, LeaseState, Request, ServerRef, Sighting
from gpuspawner.services import Services
from gpuspawner.spawners import recovery
from gpuspawner.spawners.local import GPULocalSpawner
from tests.support import tiny_server
from tests.support.brokers import open_services
from tests.support.gpu_hub import locked
from tests.support.processes import PATIENCE, free_port
from tests.support.telling import until

LOG = logging.getLogger(__name__)
LONG = 30 * PATIENCE
WAITERS = 50


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


class LateEngine(LocalEngine):
    """An engine that does not respond until it is up."""

    def __init__(self) -> None:
        self.is_up = False
        self.asked = 0

    def sightings(self) -> list[Sighting]:
        self.asked += 1
        if not self.is_up:
            raise EngineUnavailable()
        return super().sightings()


class Waiters:
    """Many starts that wait for one comparison with an engine."""

    def __init__(self, services: Services, engine: LateEngine, patience: float) -> None:
        self.said: list[str] = []
        self.recovery = recovery.Recovery(services, LOG)
        database = sa.create_engine("sqlite://")
        orm.Base.metadata.create_all(database)
        hub_db = Session(database)
        self.tasks = [
            asyncio.ensure_future(
                self.recovery.wait(
                    "late", lambda: engine, hub_db, patience=patience, say=self.said.append
                )
            )
            for _ in range(WAITERS)
        ]


async def test_starts_that_wait_share_one_comparison(
    services: Services, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(recovery, "REST", 0.01)
    engine = LateEngine()
    waiters = Waiters(services, engine, LONG)
    cancelled, *others = waiters.tasks
    await until(lambda: engine.asked >= 3, "the engine to be asked again", LONG)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert not waiters.recovery.is_done and not any(task.done() for task in others)
    assert set(waiters.said) == {
        "Checking which GPUs are in use",
        "Checking which GPUs are in use: waiting for the container engine",
    }
    assert caplog.text.count("late is not responding") == 1

    engine.is_up = True
    await asyncio.gather(*others)
    assert waiters.recovery.is_done
    assert caplog.text.count("granting may begin") == 1


async def test_starts_that_wait_are_refused_after_their_time(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "REST", 0.2)
    engine, began = LateEngine(), time.monotonic()
    waiters = Waiters(services, engine, 1.0)
    ends = await asyncio.gather(*waiters.tasks, return_exceptions=True)
    assert {type(end) for end in ends} == {NotReconciled}
    assert not waiters.recovery.is_done
    rests = (time.monotonic() - began) / recovery.REST
    assert engine.asked <= 1 + rests, "once in REST seconds, however many wait"


def spawner_of(services: Services, **state: Any) -> GPULocalSpawner:
    user = SimpleNamespace(
        name="ada", escaped_name="ada", settings={}, groups=[], url="/user/ada/", admin=False
    )
    spawner = GPULocalSpawner(user=user, services=services, log=LOG)
    spawner.load_state(state)
    return spawner


async def test_failed_adoption_is_retried_at_the_next_poll(
    services: Services, lease: Lease, process: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    pid, port = process
    spawner = spawner_of(services, pid=pid, lease_id=lease.id)
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


async def test_stopped_server_is_not_adopted(
    services: Services, lease: Lease, process: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    """The Hub has forgotten the address of a server that its member stopped meanwhile."""
    pid, _ = process
    spawner = spawner_of(services, pid=pid, lease_id=lease.id)
    assert spawner.server is None and await spawner.poll() is None
    adopting = spawner._adopting
    assert adopting is not None
    await adopting
    assert services.leases.get(lease.id).state is LeaseState.GRANTED
    assert not caplog.text


async def test_page_opened_before_a_start_begins_follows_it(services: Services) -> None:
    spawner = spawner_of(services)
    spawner.said.say("Of the start before")
    events = spawner.progress()
    assert (await anext(events))["message"] == "Of the start before"
    more = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    spawner._begin_progress()
    spawner.said.say("Of this start")
    assert (await asyncio.wait_for(more, LONG))["message"] == "Of this start"
    await events.aclose()


async def test_start_that_was_stopped_fails_in_words(services: Services, lease: Lease) -> None:
    """The Hub has forgotten its address, and it is started nevertheless."""
    spawner = spawner_of(services, lease_id=lease.id)
    spawner.lease = lease
    with pytest.raises(StartFailed) as failed:
        await spawner._wait_ready(("127.0.0.1", 1))
    assert failed.value.message == (
        "Your server did not start: it was stopped before it answered. Nothing was charged."
    )
