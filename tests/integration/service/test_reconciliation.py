"""Real here: SQLite and PostgreSQL, local processes as servers, HTTP. The Hub is a script."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from gpuspawner.core.errors import EngineUnavailable, StoreUnavailable
from gpuspawner.core.processes import process_ref
from gpuspawner.engines.local import LocalEngine
from gpuspawner.leases.models import Lease, LeaseState, Request, ServerRef, Sighting
from gpuspawner.ledger.rules import owed
from gpuspawner.services import Services
from tests.support.brokers import T0, Clock, Make, make_services
from tests.support.leases import lease_of
from tests.support.rounds import RATE, SITE, ScriptedHub, make_tick, running, told

Start = Callable[[Lease], "subprocess.Popen[bytes]"]


@pytest.fixture
def services(make: Make) -> Services:
    return make(**SITE)


async def test_running_server_is_adopted_and_ended_server_is_settled(
    services: Services, hub: ScriptedHub, clock: Clock, server: Start
) -> None:
    lease = services.leases.grant(
        ServerRef("ada"), Request(devices=1, model="A100"), engine="local"
    )
    process = server(lease)
    hub.has(lease.server)
    tick = make_tick(services, hub, LocalEngine())
    await tick.reconcile()
    adopted = services.leases.get(lease.id)
    assert adopted.state is LeaseState.RUNNING
    assert adopted.engine_ref == process_ref(process.pid)

    clock.forward(seconds=60)
    await tick.reconcile()
    clock.forward(seconds=30)
    await tick.charge()
    process.kill()
    process.wait()
    clock.forward(seconds=30)
    await tick.reconcile()
    settled = services.leases.get(lease.id)
    assert settled.state is LeaseState.ENDED
    # Nobody saw the process end: it is charged up to when it was last seen alive.
    assert settled.ended_at == T0 + timedelta(seconds=60)
    assert settled.charged == owed(RATE, T0, settled.ended_at)
    assert services.monitoring.overview().free == 3


@pytest.mark.parametrize("why", ["nobody owns it", "its member was removed", "its lease ended"])
async def test_unwanted_server_is_stopped_and_then_settled(
    services: Services, hub: ScriptedHub, clock: Clock, server: Start, why: str
) -> None:
    lease, other = running(services, "ada"), running(services, "eve", devices=0)
    process = server(lease)
    if why == "its member was removed":
        # Every server that the Hub has is known: none can be that of somebody who was renamed.
        server(other)
        hub.has(other.server)
    elif why == "its lease ended":
        clock.now = datetime.now(timezone.utc) + timedelta(minutes=1)
        services.leases.release(lease.id, reason="test")
    tick = make_tick(services, hub, LocalEngine())
    clock.forward(seconds=61)
    await tick.reconcile()
    assert process.wait(timeout=120) != 0
    if why != "its lease ended":
        assert services.leases.get(lease.id).state is LeaseState.RUNNING, "until it is proved gone"
    clock.forward(seconds=60)
    await tick.reconcile()
    assert services.leases.get(lease.id).state is LeaseState.ENDED


async def test_server_missing_from_hub_list_is_checked_by_name(
    services: Services, hub: ScriptedHub, clock: Clock, server: Start
) -> None:
    """Pages shift when others stop between them; the Hub is asked by name before an end."""
    lease = running(services, "ada")
    process = server(lease)
    hub.has(lease.server)
    hub.hidden = {"ada"}
    clock.forward(seconds=61)
    await make_tick(services, hub, LocalEngine()).reconcile()
    assert process.poll() is None
    assert "GET /hub/api/users/ada" in hub.asked
    assert services.leases.get(lease.id).state is LeaseState.RUNNING


async def test_server_of_a_renamed_member_keeps_running(
    services: Services, hub: ScriptedHub, clock: Clock, server: Start
) -> None:
    """The Hub has it under the new name alone, and writes that down at its next look."""
    lease = running(services, "ada")
    process = server(lease)
    new = ServerRef("ada-lovelace")
    hub.has(new)
    tick = make_tick(services, hub, LocalEngine())
    clock.forward(seconds=61)
    await tick.reconcile()
    assert process.poll() is None
    followed = services.leases.follow_rename(lease.id, new)
    assert followed == services.leases.get(lease.id)
    assert (followed.server, followed.account) == (new, "member:ada")
    assert [(c.action, c.subject) for c in services.audit.trail()] == [("renamed", "ada")]
    clock.forward(seconds=61)
    await tick.reconcile()
    assert process.poll() is None
    assert services.leases.get(lease.id).seen_at == clock.now
    hub.has()
    clock.forward(seconds=61)
    await tick.reconcile()
    assert process.wait(timeout=120) != 0, "the Hub does not know it any more"


def test_rename_changes_neither_ended_nor_other_leases(services: Services) -> None:
    lease, other = running(services, "ada"), running(services, "eve")
    assert services.leases.follow_rename(lease.id, other.server).server == lease.server
    services.leases.release(lease.id, reason="stopped")
    assert services.leases.follow_rename(lease.id, ServerRef("new")).server == lease.server
    assert services.audit.trail() == []


async def test_server_of_another_hub_is_left_alone(
    services: Services, hub: ScriptedHub, clock: Clock, server: Start
) -> None:
    ours = running(services, "ada", devices=0)
    theirs = lease_of("eve", id="feedfeedfeedfeed", granted_at=T0)
    process = server(theirs)
    clock.now = datetime.now(timezone.utc) + timedelta(hours=1)
    engine = LocalEngine()
    assert theirs.id in {sighting.lease_id for sighting in engine.sightings()}
    await make_tick(services, hub, engine).reconcile()
    assert process.poll() is None
    assert services.leases.get(ours.id).state is LeaseState.ENDED


class Meanwhile(LocalEngine):
    """An engine whose look takes a while, in which the hub goes on."""

    def __init__(self, happens: Callable[[], object]) -> None:
        self.happens = happens

    def sightings(self) -> list[Sighting]:
        found = super().sightings()
        self.happens()
        return found


async def test_server_starting_during_reconciliation_keeps_its_lease(
    services: Services, hub: ScriptedHub, clock: Clock, server: Start
) -> None:
    """The image was pulled for an hour, and the container came up behind the engine's list."""
    other = running(services, "eve", devices=0)
    server(other)
    lease = services.leases.grant(
        ServerRef("ada"), Request(devices=1, model="A100"), engine="local"
    )
    hub.has(lease.server, other.server, ready=False)
    clock.forward(seconds=3600)

    def comes_up() -> None:
        server(lease)
        services.leases.confirm(lease.id)
        hub.has(lease.server, other.server)

    await make_tick(services, hub, Meanwhile(comes_up)).reconcile()
    assert services.leases.get(lease.id).state is LeaseState.RUNNING


class Silent(LocalEngine):
    """An engine that is not responding."""

    def sightings(self) -> list[Sighting]:
        raise EngineUnavailable()


async def test_engine_or_hub_outage_changes_nothing_and_logs_once(
    services: Services,
    hub: ScriptedHub,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    server: Start,
) -> None:
    caplog.set_level(logging.INFO, "tick")
    lease = running(services, "ada")
    server(lease)
    tick = make_tick(services, hub, Silent())
    for _ in range(3):
        clock.forward(seconds=3600)
        await tick.reconcile()
    assert services.leases.get(lease.id).state is LeaseState.RUNNING
    hub.status = 500
    tick.engines = {"local": LocalEngine()}
    for _ in range(3):
        clock.forward(seconds=3600)
        await tick.reconcile()
    assert services.leases.get(lease.id).state is LeaseState.RUNNING
    assert services.leases.get(lease.id).seen_at == clock.now
    hub.status = None
    hub.has(lease.server)
    await tick.reconcile()

    said = [line.partition(":")[0] for line in told(caplog.records)]
    assert said == ["Engine local", "Hub", "Engine local", "Hub"]
    assert "its leases stay as they are" in told(caplog.records)[0]
    assert told(caplog.records)[2].endswith("all is well again")
    assert told(caplog.records)[3].endswith("all is well again")


async def test_charging_catches_up_after_a_database_outage(
    postgres: Any, clock: Clock, hub: ScriptedHub
) -> None:
    services = make_services(
        database_url=postgres.migrated_database(),
        device_source="simulated:1xA100-80GB",
        gpu_rates={"*": 4},
        clock=clock,
    )
    lease = running(services, "ada")
    tick = make_tick(services, hub, LocalEngine())
    clock.forward(seconds=60)
    with postgres.halted():
        for work in (tick.charge, tick.reconcile):
            with pytest.raises(StoreUnavailable):
                await work()
    clock.forward(seconds=60)
    await tick.charge()
    assert services.leases.get(lease.id).charged == owed(RATE, T0, clock.now)
    services.store.close()
