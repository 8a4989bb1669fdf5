"""Real here: SQLite and PostgreSQL, local processes as servers, HTTP. The Hub is a script."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from gpuspawner.core.errors import EngineUnavailable, StoreUnavailable
from gpuspawner.engines.local import LEASE_VARIABLE, LocalEngine, process_ref
from gpuspawner.leases.models import Lease, LeaseState, Request, ServerRef, Sighting
from gpuspawner.ledger.rules import owed
from gpuspawner.services import Broker
from tests.support.brokers import make_broker
from tests.support.leases import lease_of
from tests.support.rounds import (
    RATE,
    START,
    Clock,
    ScriptedHub,
    make_tick,
    open_broker,
    running,
    told,
)

Start = Callable[[Lease], "subprocess.Popen[bytes]"]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def broker(database_url: str, clock: Clock) -> Iterator[Broker]:
    broker = open_broker(database_url, clock)
    yield broker
    broker.store.close()


@pytest.fixture
async def hub() -> AsyncIterator[ScriptedHub]:
    async with ScriptedHub().serving() as hub:
        yield hub


@pytest.fixture
def server() -> Iterator[Start]:
    """Start a process that bears a lease, as a local server does."""
    started: list[subprocess.Popen[bytes]] = []

    def start(lease: Lease) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            LEASE_VARIABLE: lease.id,
            "JUPYTERHUB_USER": lease.server.user,
            "JUPYTERHUB_SERVER_NAME": lease.server.name,
        }
        code = "import time; print('up', flush=True); time.sleep(600)"
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment,
            start_new_session=True,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout and process.stdout.readline() == b"up\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


async def test_what_lives_is_adopted_and_what_is_gone_is_settled(
    broker: Broker,
    hub: ScriptedHub,
    clock: Clock,
    server: Start,
) -> None:
    lease = broker.acquire(ServerRef("ada"), Request(devices=1, model="A100"), engine="local")
    process = server(lease)
    hub.has(lease.server)
    tick = make_tick(broker, hub, LocalEngine())
    await tick.reconcile()
    adopted = broker.lease(lease.id)
    assert adopted.state is LeaseState.RUNNING
    assert adopted.engine_ref == process_ref(process.pid)

    clock.advance(60)
    await tick.reconcile()
    clock.advance(30)
    await tick.charge()
    process.kill()
    process.wait()
    clock.advance(30)
    await tick.reconcile()
    settled = broker.lease(lease.id)
    assert settled.state is LeaseState.ENDED
    # Nobody saw the process end: it is charged up to when it was last seen alive.
    assert settled.ended_at == START + timedelta(seconds=60)
    assert settled.charged == owed(RATE, START, settled.ended_at)
    assert broker.overview().free == 3


async def test_a_server_that_nobody_owns_is_ended_and_then_settled(
    broker: Broker,
    hub: ScriptedHub,
    clock: Clock,
    server: Start,
) -> None:
    lease = running(broker, "ada")
    process = server(lease)
    tick = make_tick(broker, hub, LocalEngine())
    clock.advance(61)
    await tick.reconcile()
    assert process.wait(timeout=120) != 0
    assert broker.lease(lease.id).state is LeaseState.RUNNING
    clock.advance(60)
    await tick.reconcile()
    assert broker.lease(lease.id).state is LeaseState.ENDED


async def test_a_server_that_the_list_missed_is_left_alone(
    broker: Broker,
    hub: ScriptedHub,
    clock: Clock,
    server: Start,
) -> None:
    """Pages shift when others stop between them; the Hub is asked by name before an end."""
    lease = running(broker, "ada")
    process = server(lease)
    hub.has(lease.server)
    hub.hidden = {"ada"}
    clock.advance(61)
    await make_tick(broker, hub, LocalEngine()).reconcile()
    assert process.poll() is None
    assert "GET /hub/api/users/ada" in hub.asked
    assert broker.lease(lease.id).state is LeaseState.RUNNING


async def test_a_server_of_a_renamed_member_goes_on(
    broker: Broker,
    hub: ScriptedHub,
    clock: Clock,
    server: Start,
) -> None:
    """The Hub has it under the new name alone, and writes that down at its next look."""
    lease = running(broker, "ada")
    process = server(lease)
    new = ServerRef("ada-lovelace")
    hub.has(new)
    tick = make_tick(broker, hub, LocalEngine())
    clock.advance(61)
    await tick.reconcile()
    assert process.poll() is None
    followed = broker.follow_rename(lease.id, new)
    assert followed == broker.lease(lease.id)
    assert (followed.server, followed.account) == (new, "member:ada")
    assert [(c.action, c.subject) for c in broker.trail()] == [("renamed", "ada")]
    clock.advance(61)
    await tick.reconcile()
    assert process.poll() is None
    assert broker.lease(lease.id).seen_at == clock.now
    hub.has()
    clock.advance(61)
    await tick.reconcile()
    assert process.wait(timeout=120) != 0, "the Hub does not know it any more"


async def test_a_server_of_a_removed_member_is_ended(
    broker: Broker,
    hub: ScriptedHub,
    clock: Clock,
    server: Start,
) -> None:
    """Every server that the Hub has is known: none can be that of somebody who was renamed."""
    lease, other = running(broker, "ada"), running(broker, "eve", devices=0)
    process = server(lease)
    server(other)
    hub.has(other.server)
    clock.advance(61)
    await make_tick(broker, hub, LocalEngine()).reconcile()
    assert process.wait(timeout=120) != 0


def test_a_rename_does_not_touch_an_ended_lease_or_another(broker: Broker) -> None:
    lease, other = running(broker, "ada"), running(broker, "eve")
    assert broker.follow_rename(lease.id, other.server).server == lease.server
    broker.release(lease.id, reason="stopped")
    assert broker.follow_rename(lease.id, ServerRef("new")).server == lease.server
    assert broker.trail() == []


async def test_a_server_of_an_ended_lease_is_ended(
    broker: Broker,
    hub: ScriptedHub,
    clock: Clock,
    server: Start,
) -> None:
    lease = running(broker, "ada")
    process = server(lease)
    clock.now = datetime.now(timezone.utc) + timedelta(minutes=2)
    broker.release(lease.id, reason="test")
    await make_tick(broker, hub, LocalEngine()).reconcile()
    assert process.wait(timeout=120) != 0


async def test_a_server_of_another_hub_is_left_alone(
    broker: Broker,
    hub: ScriptedHub,
    clock: Clock,
    server: Start,
) -> None:
    ours = running(broker, "ada", devices=0)
    theirs = lease_of("eve", id="feedfeedfeedfeed", granted_at=START)
    process = server(theirs)
    clock.now = datetime.now(timezone.utc) + timedelta(hours=1)
    engine = LocalEngine()
    assert theirs.id in {sighting.lease_id for sighting in engine.sightings()}
    await make_tick(broker, hub, engine, ask=["local"]).reconcile()
    assert process.poll() is None
    assert broker.lease(ours.id).state is LeaseState.ENDED


class Meanwhile(LocalEngine):
    """An engine whose look takes a while, in which the hub goes on."""

    def __init__(self, happens: Callable[[], object]) -> None:
        self.happens = happens

    def sightings(self) -> list[Sighting]:
        found = super().sightings()
        self.happens()
        return found


async def test_a_server_that_comes_up_during_the_look_keeps_its_lease(
    broker: Broker,
    hub: ScriptedHub,
    clock: Clock,
    server: Start,
) -> None:
    """The image was pulled for an hour, and the container came up behind the engine's list."""
    other = running(broker, "eve", devices=0)
    server(other)
    lease = broker.acquire(ServerRef("ada"), Request(devices=1, model="A100"), engine="local")
    hub.has(lease.server, other.server, ready=False)
    clock.advance(3600)

    def comes_up() -> None:
        server(lease)
        broker.confirm(lease.id)
        hub.has(lease.server, other.server)

    await make_tick(broker, hub, Meanwhile(comes_up)).reconcile()
    assert broker.lease(lease.id).state is LeaseState.RUNNING


class Silent(LocalEngine):
    """An engine that does not answer."""

    def sightings(self) -> list[Sighting]:
        raise EngineUnavailable()


async def test_what_does_not_answer_changes_nothing_and_is_said_once(
    broker: Broker,
    hub: ScriptedHub,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    server: Start,
) -> None:
    caplog.set_level(logging.INFO, "tick")
    lease = running(broker, "ada")
    server(lease)
    tick = make_tick(broker, hub, Silent())
    for _ in range(3):
        clock.advance(3600)
        await tick.reconcile()
    assert broker.lease(lease.id).state is LeaseState.RUNNING
    hub.status = 500
    tick.engines = {"local": LocalEngine()}
    for _ in range(3):
        clock.advance(3600)
        await tick.reconcile()
    assert broker.lease(lease.id).state is LeaseState.RUNNING
    assert broker.lease(lease.id).seen_at == clock.now
    hub.status = None
    hub.has(lease.server)
    await tick.reconcile()

    said = [line.partition(":")[0] for line in told(caplog.records)]
    assert said == ["Engine local", "Hub", "Engine local", "Hub"]
    assert "its leases stay as they are" in told(caplog.records)[0]
    assert told(caplog.records)[2].endswith("all is well again")
    assert told(caplog.records)[3].endswith("all is well again")


async def test_the_store_gone_and_back(postgres: Any, clock: Clock, hub: ScriptedHub) -> None:
    broker = make_broker(
        database_url=postgres.fresh_database(),
        device_source="simulated:1xA100-80GB",
        gpu_rates={"*": 4},
        clock=clock,
    )
    lease = running(broker, "ada")
    tick = make_tick(broker, hub, LocalEngine())
    clock.advance(60)
    postgres.halt()
    try:
        for work in (tick.charge, tick.reconcile):
            with pytest.raises(StoreUnavailable):
                await work()
    finally:
        postgres.start()
    clock.advance(60)
    await tick.charge()
    assert broker.lease(lease.id).charged == owed(RATE, START, clock.now)
    broker.store.close()
