"""Grants, charges and releases. Real: SQLite and PostgreSQL; simulated: devices and the clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from gpuspawner.core.errors import NoCredits, NoDeviceFree, UnknownLease
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease, LeaseState, Request, ServerRef, Sighting
from gpuspawner.leases.reconciliation import Confirm, HubState, Release, Remove, Seen, Unknown
from gpuspawner.services import Broker
from tests.support.brokers import T0, Clock, acquire, credits_of, fleet, running, states

ANNA, BERT = ServerRef("anna"), ServerRef("bert")
Make = Callable[..., Broker]


# Unknown is never free.


@pytest.fixture
def database_url(each_database_url: str) -> str:
    """The queries, locks and constraints here are each database's own."""
    return each_database_url


def test_a_device_that_fails_is_not_leased_and_its_lease_goes_on(
    broker: Broker, clock: Clock
) -> None:
    lease = running(broker, "anna", 1)
    uuids = [view.device.uuid for view in broker.overview().devices]
    for uuid in (lease.uuids[0], uuids[2]):
        fleet(broker).fail(uuid, "The GPU is lost.")
    clock.forward(minutes=30)
    assert states(broker) == ["leased", "free", "unknown", "free"]
    assert (
        broker.overview().devices[0].detail == f"lease {lease.id}; not answering: The GPU is lost."
    )
    assert broker.ledger.charge_all() == 1 and credits_of(broker) == 98
    assert acquire(broker, "bert", 2).uuids == (uuids[1], uuids[3])
    with pytest.raises(NoDeviceFree, match="of 4, 3 are in use and 1 does not answer"):
        acquire(broker, "cara")
    broker.release(lease.id, ended_at=clock.now, reason="stopped")
    with pytest.raises(NoDeviceFree, match="2 do not answer"):
        acquire(broker, "cara")  # its device is not proved well by the end of its lease
    fleet(broker).restore(uuids[2])
    clock.forward(seconds=3)
    assert acquire(broker, "cara").uuids == (uuids[2],)


def test_nothing_is_granted_while_the_driver_is_lost(broker: Broker, clock: Clock) -> None:
    lease = running(broker, "anna", 1)
    fleet(broker).lose("The NVIDIA driver is not loaded.")
    clock.forward(hours=1)
    overview = broker.overview()
    assert [view.state for view in overview.devices] == ["leased"] + ["unknown"] * 3
    assert overview.error == "The NVIDIA driver is not loaded." and overview.free == 0
    with pytest.raises(NoDeviceFree, match="3 do not answer"):
        acquire(broker, "bert")
    assert acquire(broker, "bert", devices=0).devices == ()
    assert broker.ledger.charge_all() == 1
    assert broker.release(lease.id, ended_at=clock.now, reason="stopped").charged == 4 * MICRO
    fleet(broker).restore()
    assert states(broker) == ["free"] * 4


def test_a_hub_that_starts_without_a_driver_knows_its_devices_from_the_store(make: Make) -> None:
    make().overview()
    blind = make(gpu_rates={"*": 1})
    fleet(blind).lose()
    assert states(blind) == ["unknown"] * 4
    with pytest.raises(NoDeviceFree, match="4 do not answer"):
        acquire(blind, "anna")


def test_devices_that_were_never_seen_are_not_said_to_be_none(make: Make) -> None:
    broker = make()
    fleet(broker).lose("the driver does not answer")
    with pytest.raises(NoDeviceFree, match=r"cannot be seen just now.*the driver"):
        acquire(broker, "anna")
    assert acquire(broker, "anna", devices=0).devices == ()


def test_a_device_that_was_taken_out_is_not_free(make: Make, clock: Clock) -> None:
    make(device_source="simulated:3xT4").overview()
    fewer = make(device_source="simulated:2xT4")
    assert states(fewer) == ["free", "free", "unknown"]
    assert len(acquire(fewer, "anna", 2).uuids) == 2
    with pytest.raises(NoDeviceFree):
        acquire(fewer, "bert")


def test_a_look_serves_everybody_for_a_while_and_a_clock_set_back_does_not_freeze_it(
    broker: Broker, clock: Clock
) -> None:
    first = broker.look()
    clock.forward(seconds=1)
    assert broker.look() is first
    assert broker.look(fresh=True) is not first
    clock.forward(seconds=2)
    later = broker.look()
    assert later.inventory.observed_at == clock.now
    clock.forward(hours=-5)
    fleet(broker).fail(later.devices[0].uuid)
    assert broker.look().devices[0].status == "unknown"


# Confirm and release, twice and late.


def test_confirming_twice_changes_nothing(broker: Broker, clock: Clock) -> None:
    lease = acquire(broker, "anna")
    first = broker.confirm(lease.id, "container-1")
    clock.forward(minutes=5)
    assert broker.confirm(lease.id, "container-2") == first
    ended = broker.release(lease.id, ended_at=clock.now, reason="stopped")
    assert broker.confirm(lease.id) == ended, "an ended lease does not come back"


def test_releasing_twice_changes_nothing(broker: Broker, clock: Clock) -> None:
    lease = running(broker, "anna")
    clock.forward(minutes=30)
    ended = broker.release(lease.id, ended_at=clock.now, reason="stopped")
    running(broker, "bert")
    clock.forward(minutes=30)
    assert broker.release(lease.id, ended_at=clock.now, reason="again", failed=True) == ended
    assert credits_of(broker) == 98 and len(broker.open_leases()) == 1


@pytest.mark.parametrize("work", [Broker.confirm, Broker.lease])
def test_a_lease_that_nobody_knows(broker: Broker, work: Any) -> None:
    with pytest.raises(UnknownLease, match="no lease 'nothing'"):
        work(broker, "nothing")
    with pytest.raises(UnknownLease):
        broker.release("nothing", reason="stopped")


def test_a_server_that_never_answered_costs_nothing(broker: Broker, clock: Clock) -> None:
    lease = acquire(broker, "anna")
    clock.forward(hours=1)
    assert broker.ledger.charge_all() == 0
    assert broker.release(lease.id, ended_at=clock.now, reason="it exited at once").charged == 0
    assert credits_of(broker) == 100 and states(broker) == ["free"] * 4


def test_a_failed_start_gives_back_what_was_charged(
    failed: set[str], broker: Broker, clock: Clock
) -> None:
    lease = running(broker, "anna")
    failed.add(lease.id)
    clock.forward(minutes=15)
    broker.ledger.charge_all()
    assert credits_of(broker) == 99
    assert broker.release(lease.id, ended_at=clock.now, reason="failed", failed=True).charged == 0
    assert credits_of(broker) == 100
    kinds = [line.kind for line in broker.ledger.statement("member:anna")]
    assert kinds == ["refund", "charge", "grant"]


def test_an_end_before_the_last_charge_gives_back_the_rest(broker: Broker, clock: Clock) -> None:
    lease = running(broker, "anna")
    end = clock.forward(minutes=30)
    clock.forward(minutes=30)
    broker.ledger.charge_all()
    assert credits_of(broker) == 96
    released = broker.release(lease.id, ended_at=end, reason="killed behind the hub's back")
    assert (released.ended_at, released.charged, credits_of(broker)) == (end, 2 * MICRO, 98)


def test_an_end_that_nobody_saw_is_charged_up_to_the_last_proof_of_life(
    broker: Broker, clock: Clock
) -> None:
    lease = running(broker, "anna")
    alive = clock.forward(minutes=45)
    broker.reconcile({"docker": [sighting(lease)]}, {ANNA: HubState.READY})
    clock.forward(hours=3)
    broker.ledger.charge_all()
    released = broker.release(lease.id, reason="the server was gone")
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
def test_an_end_lies_between_start_and_now(
    broker: Broker, clock: Clock, said: timedelta, kept: timedelta
) -> None:
    lease = running(broker, "anna")
    clock.forward(hours=1)
    assert broker.release(lease.id, ended_at=T0 + said, reason="stopped").ended_at == T0 + kept


def test_times_in_another_zone_are_the_same_times(broker: Broker, clock: Clock) -> None:
    lease = running(broker, "anna")
    clock.forward(hours=1)
    end = datetime(2025, 3, 1, 7, 30, tzinfo=timezone(timedelta(hours=-5)))
    assert broker.release(lease.id, ended_at=end, reason="stopped").charged == 2 * MICRO


# Charges.


def test_charges_late_doubled_or_lost_are_the_same_sum(broker: Broker, clock: Clock) -> None:
    lease = running(broker, "anna", 3)

    def owed() -> int:
        return 12 * MICRO * ((clock.now - T0) // timedelta(microseconds=1)) // 3_600_000_000

    for minutes in (1, 0, 0.013, 61.7, 0, 7):
        clock.forward(minutes=minutes)
        broker.ledger.charge_all()
        assert broker.ledger.member("anna").balance == 100 * MICRO - owed()
    assert broker.ledger.charge_all() == 0
    clock.forward(seconds=-30)
    assert broker.ledger.charge_all() == 0, "a clock that goes back takes nothing and gives nothing"
    end = clock.forward(seconds=30.7, hours=5)
    charged = broker.release(lease.id, ended_at=end, reason="stopped").charged
    assert charged == owed()


def test_a_charge_takes_the_account_below_zero_and_not_the_server_down(
    make: Make, clock: Clock
) -> None:
    broker = make(opening_grant=1, gpu_rates={"*": 4})
    running(broker, "anna")
    clock.forward(hours=1)
    broker.ledger.charge_all()
    assert credits_of(broker) == -3 and len(broker.open_leases()) == 1
    with pytest.raises(NoCredits, match=r"balance of -3\.00 credits does"):
        acquire(broker, "anna", server="lab")


# Store, engines and Hub.


def sighting(lease: Lease, **changes: Any) -> Sighting:
    fields = {"ref": f"container-{lease.id}", "server": lease.server, "alive": True}
    return Sighting(lease_id=lease.id, **{**fields, "created_at": lease.granted_at, **changes})


def test_reconcile_adopts_settles_and_leaves_alone(broker: Broker, clock: Clock) -> None:
    adopted = acquire(broker, "anna")
    clock.forward(seconds=1)
    gone = running(broker, "bert")
    clock.forward(seconds=1)
    exited = running(broker, "cara")
    clock.forward(seconds=1)
    coming = acquire(broker, "dora")
    clock.now = exited.granted_at + timedelta(hours=1)
    end = clock.now - timedelta(minutes=15)
    actions = broker.reconcile(
        {"docker": [sighting(adopted), sighting(exited, alive=False, ended_at=end)]},
        {ANNA: HubState.READY, BERT: HubState.READY, ServerRef("dora"): HubState.PENDING},
    )
    assert [type(action) for action in actions] == [Confirm, Release, Release, Unknown]

    now_adopted = broker.lease(adopted.id)
    assert (now_adopted.state, now_adopted.started_at) == (LeaseState.RUNNING, clock.now)
    assert now_adopted.engine_ref == f"container-{adopted.id}"
    assert broker.lease(gone.id).ended_at == gone.started_at, "nobody saw it alive after its start"
    assert broker.lease(exited.id).ended_at == end
    assert broker.lease(coming.id).state is LeaseState.GRANTED
    assert (credits_of(broker, "bert"), credits_of(broker, "cara")) == (100, 97)
    assert states(broker).count("free") == 2

    again = broker.reconcile({"docker": [sighting(adopted)]}, None)
    assert [type(action) for action in again] == [Seen, Unknown]


def test_a_lease_that_started_during_the_comparison_is_not_released(
    broker: Broker, clock: Clock
) -> None:
    """The proof that there was no server is older than the server."""
    lease = acquire(broker, "anna")
    clock.forward(minutes=5)

    class LateLook(dict[str, list[Sighting]]):
        def get(self, engine: str, default: Any = None) -> Any:
            broker.confirm(lease.id)
            return []

    [action] = broker.reconcile(LateLook(), {})
    assert isinstance(action, Release)
    assert broker.lease(lease.id).state is LeaseState.RUNNING
    broker.reconcile({"docker": []}, {})
    assert broker.lease(lease.id).state is LeaseState.ENDED


def test_reconcile_changes_nothing_while_the_engine_does_not_answer(
    broker: Broker, clock: Clock
) -> None:
    running(broker, "anna")
    acquire(broker, "bert")
    before = broker.open_leases()
    clock.forward(days=1)
    for sightings in ({"docker": None}, {}):
        actions = broker.reconcile(sightings, {})
        assert [type(action) for action in actions] == [Unknown, Unknown]
    assert broker.open_leases() == before


def test_what_nobody_owns_is_for_the_caller_to_end(broker: Broker, clock: Clock) -> None:
    lease = running(broker, "anna")
    ended = running(broker, "bert")
    broker.release(ended.id, ended_at=clock.now, reason="stopped")
    clock.forward(minutes=5)
    both = {"docker": [sighting(lease), sighting(ended)]}
    actions = broker.reconcile(both, {})
    assert [action.sighting.lease_id for action in actions if isinstance(action, Remove)] == [
        lease.id,
        ended.id,
    ]
    assert broker.lease(lease.id).state is LeaseState.RUNNING, "until it is proved gone"
    broker.reconcile({"docker": []}, {})
    assert broker.open_leases() == []


def test_a_server_of_another_hub_on_the_same_engine_is_nobody_elses_to_end(
    broker: Broker, clock: Clock
) -> None:
    """Its lease is not in this store at all: not ended, unknown."""
    lease = running(broker, "anna")
    stranger = Sighting(lease_id="of-another-hub", ref="c", server=BERT, alive=True)
    actions = broker.reconcile(
        {"docker": [sighting(lease), stranger]}, {ANNA: HubState.READY}, grace_seconds=0
    )
    assert actions == [Seen(lease)]


# Off the event loop.


async def test_a_cancelled_caller_does_not_cancel_the_work(broker: Broker) -> None:
    waiting = asyncio.ensure_future(
        broker.run(broker.acquire, ANNA, Request(devices=1), engine="docker")
    )
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    for _ in range(200):
        if await broker.run(broker.open_leases):
            break
        await asyncio.sleep(0.02)
    (lease,) = await broker.run(broker.open_leases)
    assert lease.server == ANNA and len(lease.devices) == 1


async def test_an_error_reaches_the_caller(broker: Broker) -> None:
    with pytest.raises(UnknownLease):
        await broker.run(broker.lease, "nothing")
