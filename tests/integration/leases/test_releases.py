"""Devices that are not known to be free, releases, charges and the comparison of store, engine and
Hub. Real: SQLite; simulated: devices and the clock."""

from __future__ import annotations

import asyncio
from datetime import timedelta, timezone
from functools import partial
from typing import Any

import pytest

from gpuspawner.core.errors import NoCredits, NoDeviceFree, UnknownLease
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease, LeaseState, Request, ServerRef, Sighting
from gpuspawner.leases.reconciliation import Confirm, HubState, Release, Seen, Unknown
from gpuspawner.services import Services
from tests.support.brokers import T0, Clock, Make, acquire, credits_of, fleet, running, states

ANNA, BERT = ServerRef("anna"), ServerRef("bert")


# Unknown is never free.


def test_failed_device_is_not_leased_but_its_lease_continues(
    services: Services, clock: Clock
) -> None:
    lease = running(services, "anna", 1)
    uuids = [view.device.uuid for view in services.monitoring.overview().devices]
    for uuid in (lease.uuids[0], uuids[2]):
        fleet(services).fail(uuid, "The GPU is lost.")
    clock.forward(minutes=30)
    assert states(services) == ["leased", "free", "unknown", "free"]
    detail = services.monitoring.overview().devices[0].detail
    assert detail == f"lease {lease.id}; not answering: The GPU is lost."
    assert services.ledger.charge_all() == 1 and credits_of(services) == 98
    assert acquire(services, "bert", 2).uuids == (uuids[1], uuids[3])
    with pytest.raises(NoDeviceFree, match="of 4, 3 are in use and 1 is not responding"):
        acquire(services, "cara")
    services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    with pytest.raises(NoDeviceFree, match="2 are not responding"):
        acquire(services, "cara")  # its device is not proved well by the end of its lease
    fleet(services).restore(uuids[2])
    clock.forward(seconds=3)
    assert acquire(services, "cara").uuids == (uuids[2],)


def test_no_device_is_granted_while_the_driver_is_lost(services: Services, clock: Clock) -> None:
    lease = running(services, "anna", 1)
    fleet(services).lose("The NVIDIA driver is not loaded.")
    clock.forward(hours=1)
    overview = services.monitoring.overview()
    assert [view.state for view in overview.devices] == ["leased"] + ["unknown"] * 3
    assert overview.error == "The NVIDIA driver is not loaded." and overview.free == 0
    with pytest.raises(NoDeviceFree, match="3 are not responding"):
        acquire(services, "bert")
    assert acquire(services, "bert", devices=0).devices == ()
    assert services.ledger.charge_all() == 1
    ended = services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    assert ended.charged == 4 * MICRO
    fleet(services).restore()
    assert states(services) == ["free"] * 4


def test_hub_without_a_driver_knows_devices_from_the_database(make: Make) -> None:
    new = make()
    fleet(new).lose("the driver is not responding")
    with pytest.raises(NoDeviceFree, match=r"status is unavailable.*the driver"):
        acquire(new, "anna")  # they were never seen: they are not said to be none
    assert acquire(new, "anna", devices=0, server="cpu").devices == ()
    fleet(new).restore()
    make().monitoring.overview()
    blind = make(gpu_rates={"*": 1})
    fleet(blind).lose()
    assert states(blind) == ["unknown"] * 4
    with pytest.raises(NoDeviceFree, match="4 are not responding"):
        acquire(blind, "anna")


def test_removed_device_is_unknown_and_not_leased(make: Make) -> None:
    make(device_source="simulated:3xT4").monitoring.overview()
    fewer = make(device_source="simulated:2xT4")
    assert states(fewer) == ["free", "free", "unknown"]
    assert len(acquire(fewer, "anna", 2).uuids) == 2
    with pytest.raises(NoDeviceFree):
        acquire(fewer, "bert")


def test_device_look_is_cached_unless_the_clock_goes_back(services: Services, clock: Clock) -> None:
    first = services.devices.look()
    clock.forward(seconds=1)
    assert services.devices.look() is first
    assert services.devices.look(fresh=True) is not first
    clock.forward(seconds=2)
    later = services.devices.look()
    assert later.inventory.observed_at == clock.now
    clock.forward(hours=-5)
    fleet(services).fail(later.devices[0].uuid)
    assert services.devices.look().devices[0].status == "unknown"


# Confirm and release, twice and late.


def test_failed_start_refunds_the_charge(
    failed: set[str], services: Services, clock: Clock
) -> None:
    lease = running(services, "anna")
    failed.add(lease.id)
    clock.forward(minutes=15)
    services.ledger.charge_all()
    assert credits_of(services) == 99
    released = services.leases.release(lease.id, ended_at=clock.now, reason="failed", failed=True)
    assert released.charged == 0
    assert credits_of(services) == 100
    kinds = [line.kind for line in services.ledger.statement("member:anna")]
    assert kinds == ["refund", "charge", "grant"]


def test_unknown_lease_is_neither_confirmed_nor_released(services: Services) -> None:
    for work in (services.leases.confirm, partial(services.leases.release, reason="stopped")):
        with pytest.raises(UnknownLease):
            work("nothing")


def test_unobserved_end_is_charged_up_to_the_last_sighting(
    services: Services, clock: Clock
) -> None:
    lease = running(services, "anna")
    alive = clock.forward(minutes=45)
    services.leases.reconcile({"docker": [sighting(lease)]}, {ANNA: HubState.READY})
    clock.forward(hours=3)
    services.ledger.charge_all()
    released = services.leases.release(lease.id, reason="the server was gone")
    assert (released.ended_at, released.charged) == (alive, 3 * MICRO)


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        # An engine whose clock is wrong: up to when it was last seen alive.
        (timedelta(hours=9), timedelta(0)),
        (-timedelta(hours=9), timedelta(0)),
        (timedelta(hours=1, seconds=3), timedelta(hours=1)),  # one that is a little ahead
        (timedelta(minutes=30), timedelta(minutes=30)),
    ],
)
def test_reported_end_is_kept_between_start_and_now(
    services: Services, clock: Clock, said: timedelta, kept: timedelta
) -> None:
    lease = running(services, "anna")
    clock.forward(hours=1)
    end = (T0 + said).astimezone(timezone(timedelta(hours=-5)))  # the same time elsewhere
    assert services.leases.release(lease.id, ended_at=end, reason="stopped").ended_at == T0 + kept


# Charges.


def test_late_or_repeated_charges_reach_the_same_sum(services: Services, clock: Clock) -> None:
    lease = running(services, "anna", 3)

    def owed() -> int:
        return 12 * MICRO * ((clock.now - T0) // timedelta(microseconds=1)) // 3_600_000_000

    for minutes in (1, 0, 0.013, 61.7, 0, 7):
        clock.forward(minutes=minutes)
        services.ledger.charge_all()
        assert services.ledger.member("anna").balance == 100 * MICRO - owed()
    assert services.ledger.charge_all() == 0
    clock.forward(seconds=-30)
    assert services.ledger.charge_all() == 0, "a clock that goes back takes and gives nothing"
    end = clock.forward(seconds=30.7, hours=5)
    charged = services.leases.release(lease.id, ended_at=end, reason="stopped").charged
    assert charged == owed()


def test_overdrawn_account_keeps_its_lease_but_gets_no_other(make: Make, clock: Clock) -> None:
    services = make(opening_grant=1, gpu_rates={"*": 4})
    running(services, "anna")
    clock.forward(hours=1)
    services.ledger.charge_all()
    assert credits_of(services) == -3 and len(services.leases.open_leases()) == 1
    with pytest.raises(NoCredits, match=r"balance of -3\.00 credits does"):
        acquire(services, "anna", server="lab")


# Store, engines and Hub.


def sighting(lease: Lease, **changes: Any) -> Sighting:
    fields = {"ref": f"container-{lease.id}", "server": lease.server, "alive": True}
    return Sighting(lease_id=lease.id, **{**fields, "created_at": lease.granted_at, **changes})


def test_reconcile_adopts_live_servers_and_ends_gone_ones(services: Services, clock: Clock) -> None:
    adopted = acquire(services, "anna")
    clock.forward(seconds=1)
    gone = running(services, "bert")
    clock.forward(seconds=1)
    exited = running(services, "cara")
    clock.forward(seconds=1)
    coming = acquire(services, "dora")
    clock.now = exited.granted_at + timedelta(hours=1)
    end = clock.now - timedelta(minutes=15)
    actions = services.leases.reconcile(
        {"docker": [sighting(adopted), sighting(exited, alive=False, ended_at=end)]},
        {ANNA: HubState.READY, BERT: HubState.READY, ServerRef("dora"): HubState.PENDING},
    )
    assert [type(action) for action in actions] == [Confirm, Release, Release, Unknown]

    now_adopted = services.leases.get(adopted.id)
    assert (now_adopted.state, now_adopted.started_at) == (LeaseState.RUNNING, clock.now)
    assert now_adopted.engine_ref == f"container-{adopted.id}"
    # Nobody saw it alive after its start.
    assert services.leases.get(gone.id).ended_at == gone.started_at
    assert services.leases.get(exited.id).ended_at == end
    assert services.leases.get(coming.id).state is LeaseState.GRANTED
    assert (credits_of(services, "bert"), credits_of(services, "cara")) == (100, 97)
    assert states(services).count("free") == 2

    again = services.leases.reconcile({"docker": [sighting(adopted)]}, None)
    assert [type(action) for action in again] == [Seen, Unknown]


# Off the event loop.


async def test_cancelled_caller_does_not_cancel_the_grant(services: Services) -> None:
    waiting = asyncio.ensure_future(
        services.run(services.leases.grant, ANNA, Request(devices=1), engine="docker")
    )
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    for _ in range(6000):
        if await services.run(services.leases.open_leases):
            break
        await asyncio.sleep(0.02)
    (lease,) = await services.run(services.leases.open_leases)
    assert lease.server == ANNA and len(lease.devices) == 1
