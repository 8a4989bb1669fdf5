"""Grants, charges and releases. Real: SQLite and PostgreSQL; simulated: devices and the clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from gpuspawner.broker import Broker
from gpuspawner.errors import (
    ConfigError,
    LedgerError,
    NoCredits,
    NoDeviceFree,
    ServerHasLease,
    TooMuchAsked,
    UnknownAccount,
    UnknownLease,
)
from gpuspawner.model import MICRO, Lease, LeaseState, Request, ServerRef, Sighting
from gpuspawner.reconcile import Confirm, HubState, Release, Remove, Seen, Unknown
from tests.support.brokers import T0, Clock, acquire, fleet, open_broker, problems, running

ANNA, BERT = ServerRef("anna"), ServerRef("bert")
Make = Callable[..., Broker]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def hubs_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sentences name times in the hub's own zone: here UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def make(database_url: str, clock: Clock) -> Iterator[Make]:
    """Open brokers on one database; at the end everything in it must hold."""
    opened: list[Broker] = []

    def make(**settings: Any) -> Broker:
        opened.append(open_broker(database_url, **{"clock": clock, **settings}))
        return opened[-1]

    yield make
    assert opened
    assert problems(opened[0].store, failed=getattr(make, "failed", ())) == []
    opened[0].store.close()


@pytest.fixture
def broker(make: Make) -> Broker:
    """Four A100s at 4 credits an hour; members get 100 credits; 10 minutes are held."""
    return make(gpu_rates={"A100": 4, "T4": "0.5"})


def credits(broker: Broker, user: str = "anna") -> float:
    return broker.member(user).balance / MICRO


def states(broker: Broker) -> list[str]:
    return [view.state for view in broker.overview().devices]


# From grant to release.


def test_a_lease_from_grant_to_release(broker: Broker, clock: Clock) -> None:
    lease = acquire(broker, "anna", 2, server="lab")
    assert (lease.state, lease.granted_at, lease.engine) == (LeaseState.GRANTED, T0, "docker")
    assert (lease.server, lease.account) == (ServerRef("anna", "lab"), "member:anna")
    assert [d.index for d in lease.devices] == [0, 1] and len(set(lease.uuids)) == 2
    assert broker.lease_of(lease.server) == lease == broker.lease(lease.id)
    assert states(broker) == ["leased", "leased", "free", "free"]

    clock.forward(minutes=3)
    lease = broker.confirm(lease.id, "container-1")
    assert (lease.state, lease.started_at) == (LeaseState.RUNNING, clock.now)
    assert lease.engine_ref == "container-1"

    clock.forward(minutes=90)
    lease = broker.release(lease.id, ended_at=clock.now, reason="stopped")
    assert (lease.state, lease.ended_at, lease.end_reason) == (
        LeaseState.ENDED,
        clock.now,
        "stopped",
    )
    assert lease.charged == 12 * MICRO and credits(broker) == 88
    assert states(broker) == ["free"] * 4 and broker.open_leases() == []
    assert broker.lease_of(lease.server) is None
    assert acquire(broker, "bert", 4).uuids[:2] == lease.uuids, "free at once for the next"


def test_the_price_at_the_grant_is_the_price_paid(make: Make, clock: Clock) -> None:
    before = make(gpu_rates={"A100": 4, "T4": "0.5"}, device_source="simulated:1xA100-80GB,1xT4")
    lease = running(before, "anna", model="A100")
    assert lease.rate == 4 * MICRO
    after = make(gpu_rates={"*": 50}, device_source="simulated:1xA100-80GB,1xT4")
    clock.forward(hours=1)
    after.charge_all()
    assert credits(after) == 96
    assert running(after, "bert", model="T4").rate == 50 * MICRO
    assert after.release(lease.id, ended_at=clock.now, reason="stopped").charged == 4 * MICRO


def test_without_a_device_a_lease_costs_nothing_and_takes_none(
    broker: Broker, clock: Clock
) -> None:
    lease = running(broker, "anna", devices=0)
    assert (lease.devices, lease.rate, lease.hold) == ((), 0, 0)
    clock.forward(days=30)
    assert broker.charge_all() == 0
    broker.release(lease.id, ended_at=clock.now, reason="stopped")
    assert credits(broker) == 100 and states(broker) == ["free"] * 4


def test_each_server_of_a_member_has_a_lease_of_its_own(broker: Broker) -> None:
    first, second = acquire(broker, "anna"), acquire(broker, "anna", server="lab")
    assert set(first.uuids).isdisjoint(second.uuids)
    with pytest.raises(ServerHasLease, match="stop it first"):
        acquire(broker, "anna", server="lab")
    with pytest.raises(ServerHasLease):
        acquire(broker, "anna", devices=0)
    assert len(broker.open_leases()) == 2


def test_a_group_can_pay(broker: Broker, clock: Clock) -> None:
    request = Request(devices=1)
    with pytest.raises(NoCredits, match=r"balance of 0\.00 credits"):
        broker.acquire(ANNA, request, engine="docker", account="group:ml")
    with pytest.raises(UnknownAccount):
        broker.grant("group:ml", 10 * MICRO, actor="admin", reason="term")


def test_best_connected_devices_first(make: Make) -> None:
    broker = make(device_source="simulated:8xA100-80GB")
    acquire(broker, "anna", 1)
    taken = acquire(broker, "bert", 4)
    assert [d.index for d in taken.devices] == [4, 5, 6, 7], "four behind one switch"


def test_more_than_there_is(broker: Broker) -> None:
    with pytest.raises(TooMuchAsked, match=r"You asked for 5 GPUs\. This hub has 4 GPUs"):
        acquire(broker, "anna", 5)
    with pytest.raises(TooMuchAsked, match=r"This hub has no H100 GPU\. It has 4 A100-80GB"):
        acquire(broker, "anna", model="H100")


# Credits.


def test_an_account_opens_once(broker: Broker) -> None:
    assert broker.member("anna").balance == 0
    assert broker.open_account("anna").balance == 100 * MICRO
    assert broker.open_account("anna").balance == 100 * MICRO
    acquire(broker, "anna", 0)
    assert credits(broker) == 100
    assert [line.kind for line in broker.statement("member:anna")] == ["grant"]


def test_an_account_opens_with_the_first_lease_where_nobody_signed_in(broker: Broker) -> None:
    assert acquire(broker, "anna").hold == pytest.approx(4 * MICRO / 6, abs=1)
    assert credits(broker) == 100


@pytest.mark.parametrize(("amount", "balance"), [(0, 0), ("12.5", 12.5), (0.000001, 0.000001)])
def test_the_opening_grant_is_the_admins(make: Make, amount: Any, balance: float) -> None:
    assert make(opening_grant=amount).open_account("anna").balance == balance * MICRO


def test_an_opening_grant_that_is_no_number_is_named(make: Make) -> None:
    broker = make(opening_grant="plenty")
    with pytest.raises(ConfigError, match=r"Broker\.opening_grant: 'plenty'"):
        broker.open_account("anna")
    assert broker.accounts() == []


def test_a_grant_comes_once(broker: Broker) -> None:
    broker.open_account("anna")

    def give(amount: int, key: str = "") -> bool:
        return broker.grant("member:anna", amount, actor="admin", reason="term", key=key)

    assert give(5 * MICRO, "term-1") is True
    assert give(5 * MICRO, "term-1") is False
    with pytest.raises(LedgerError, match="used for another amount"):
        give(6 * MICRO, "term-1")
    assert give(5 * MICRO) and give(5 * MICRO)
    assert give(-15 * MICRO, "typo")
    assert credits(broker) == 100
    with pytest.raises(UnknownAccount, match="member:nobody"):
        broker.grant("member:nobody", 1, actor="admin", reason="gift")
    with pytest.raises(LedgerError):
        broker.grant("member:anna", 0, actor="admin", reason="nothing")


def test_a_hold_is_set_aside_until_it_is_charged_or_the_lease_ends(
    broker: Broker, clock: Clock
) -> None:
    lease = running(broker, "anna", 3)
    assert lease.hold == 2 * MICRO  # 3 x 4 credits an hour, 10 minutes
    account = broker.member("anna")
    assert (account.balance, account.held, account.available) == (
        100 * MICRO,
        2 * MICRO,
        98 * MICRO,
    )
    clock.forward(minutes=4)
    broker.charge_all()
    account = broker.member("anna")
    assert (account.held, account.available) == (1_200_000, 98 * MICRO)
    assert [a.held for a in broker.accounts()] == [1_200_000]
    clock.forward(minutes=26)
    broker.charge_all()
    account = broker.member("anna")
    assert (account.held, account.available) == (0, 94 * MICRO)
    broker.release(lease.id, ended_at=clock.now, reason="stopped")
    assert broker.member("anna").held == 0


def test_no_credits_says_what_there_is_and_how_to_get_more(make: Make, clock: Clock) -> None:
    broker = make(opening_grant="0.5", gpu_rates={"*": 4}, credits_help="Write to gpu@lab.example.")
    with pytest.raises(NoCredits) as caught:
        acquire(broker, "anna")
    assert caught.value.message == (
        "Your balance of 0.50 credits does not cover this: it costs 4.00 credits an hour, and the "
        "first 10 minutes (0.67) must be there at the start. Write to gpu@lab.example. You can "
        "start without a GPU: that is free."
    )
    assert caught.value.fields == {"balance": MICRO // 2, "hold": 666_667}
    assert broker.open_leases() == []
    assert acquire(broker, "anna", devices=0).devices == ()


def test_what_running_servers_hold_is_not_there_for_the_next(make: Make) -> None:
    broker = make(opening_grant=1, gpu_rates={"*": 4})
    acquire(broker, "anna")
    with pytest.raises(NoCredits, match=r"balance of 0.33 credits \(0.66 more are set aside"):
        acquire(broker, "anna", server="lab")


@pytest.mark.parametrize("balance", [0, -5])
def test_an_empty_account_starts_without_a_gpu_and_with_one_that_is_free_of_charge(
    make: Make, balance: int
) -> None:
    broker = make(opening_grant=1, gpu_rates={"A100": 4, "T4": 0}, device_source="simulated:1xT4")
    broker.open_account("anna")
    broker.grant("member:anna", (balance - 1) * MICRO, actor="admin", reason="spent")
    assert acquire(broker, "anna", devices=0).devices == ()
    assert acquire(broker, "anna", server="lab").rate == 0


# No device free.


def test_all_in_use_says_when_some_are_free_at_the_latest(broker: Broker, clock: Clock) -> None:
    running(broker, "anna", 2)  # 100 credits at 8 an hour: dry in 12 h 30 min
    clock.forward(minutes=30)
    running(broker, "bert", 1)
    running(broker, "cara", 1)
    with pytest.raises(NoDeviceFree) as caught:
        acquire(broker, "dora")
    # Five minutes of grace, and two rounds of the accounting service to notice and to stop.
    assert caught.value.message == (
        "All 4 GPUs are in use (2 will be free by 00:37 on 2 March at the latest). "
        "Start without a GPU, or try again."
    )
    assert caught.value.fields["in_use"] == 4
    with pytest.raises(NoDeviceFree, match="4 will be free by 13:37 on 2 March at the latest"):
        acquire(broker, "dora", 3)
    assert acquire(broker, "dora", devices=0).devices == ()


def test_only_devices_that_would_do_are_promised(make: Make, clock: Clock) -> None:
    broker = make(
        device_source="simulated:1xA100-80GB,1xT4", gpu_rates={"A100": 4, "T4": 1}, opening_grant=2
    )
    running(broker, "anna", model="T4")
    running(broker, "bert", model="A100")
    with pytest.raises(NoDeviceFree, match=r"The only T4 GPU is in use \(1 will be free by 14:07"):
        acquire(broker, "cara", model="T4")
    with pytest.raises(
        NoDeviceFree, match=r"The only A100 GPU is in use \(1 will be free by 12:37"
    ):
        acquire(broker, "cara", models=("A100",), model="A100")
    with pytest.raises(NoDeviceFree, match=r"with 80 GB is in use \(1 will be free by 12:37"):
        acquire(broker, "cara", memory_bytes=80 * 2**30)


def test_nothing_is_promised_for_what_costs_nothing(make: Make) -> None:
    broker = make(gpu_rates={"*": 0}, device_source="simulated:1xT4")
    running(broker, "anna")
    with pytest.raises(NoDeviceFree) as caught:
        acquire(broker, "bert")
    assert caught.value.message == "The only GPU is in use. Start without a GPU, or try again."


def test_a_device_used_by_a_stranger_is_shown_and_not_leased(broker: Broker, clock: Clock) -> None:
    uuids = [view.device.uuid for view in broker.overview().devices]
    for uuid in uuids[:3]:
        fleet(broker).occupy(uuid, pid=4711, name="miner")
    clock.forward(seconds=3)
    views = broker.overview().devices
    assert [view.state for view in views] == ["occupied"] * 3 + ["free"]
    assert views[0].detail == "used without a lease by miner (pid 4711)"
    assert running(broker, "anna").uuids == (uuids[3],)
    with pytest.raises(NoDeviceFree, match="3 are used by programs outside the hub"):
        acquire(broker, "bert")
    # The stranger leaves: the broker looks anew before it says no.
    fleet(broker).restore(uuids[0])
    assert acquire(broker, "bert").uuids == (uuids[0],)


def test_what_a_server_left_running_is_no_stranger_until_its_lease_ends(
    broker: Broker, clock: Clock
) -> None:
    lease = running(broker, "anna", 4)
    fleet(broker).occupy(lease.uuids[0], pid=4711, name="python")
    clock.forward(seconds=3)
    assert states(broker) == ["leased"] * 4
    broker.release(lease.id, ended_at=clock.now, reason="stopped")
    assert states(broker) == ["occupied", "free", "free", "free"]
    assert lease.uuids[0] not in acquire(broker, "bert", 2).uuids
    fleet(broker).restore()
    clock.forward(seconds=3)
    assert states(broker).count("free") == 2


# Unknown is never free.


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
    assert broker.charge_all() == 1 and credits(broker) == 98
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
    assert broker.charge_all() == 1
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
    assert credits(broker) == 98 and len(broker.open_leases()) == 1


@pytest.mark.parametrize("work", [Broker.confirm, Broker.lease])
def test_a_lease_that_nobody_knows(broker: Broker, work: Any) -> None:
    with pytest.raises(UnknownLease, match="no lease 'nothing'"):
        work(broker, "nothing")
    with pytest.raises(UnknownLease):
        broker.release("nothing", reason="stopped")


def test_a_server_that_never_answered_costs_nothing(broker: Broker, clock: Clock) -> None:
    lease = acquire(broker, "anna")
    clock.forward(hours=1)
    assert broker.charge_all() == 0
    assert broker.release(lease.id, ended_at=clock.now, reason="it exited at once").charged == 0
    assert credits(broker) == 100 and states(broker) == ["free"] * 4


def test_a_failed_start_gives_back_what_was_charged(
    make: Make, broker: Broker, clock: Clock
) -> None:
    lease = running(broker, "anna")
    make.failed = {lease.id}  # type: ignore[attr-defined]  # the checks at the end want to know
    clock.forward(minutes=15)
    broker.charge_all()
    assert credits(broker) == 99
    assert broker.release(lease.id, ended_at=clock.now, reason="failed", failed=True).charged == 0
    assert credits(broker) == 100
    kinds = [line.kind for line in broker.statement("member:anna")]
    assert kinds == ["refund", "charge", "grant"]


def test_an_end_before_the_last_charge_gives_back_the_rest(broker: Broker, clock: Clock) -> None:
    lease = running(broker, "anna")
    end = clock.forward(minutes=30)
    clock.forward(minutes=30)
    broker.charge_all()
    assert credits(broker) == 96
    released = broker.release(lease.id, ended_at=end, reason="killed behind the hub's back")
    assert (released.ended_at, released.charged, credits(broker)) == (end, 2 * MICRO, 98)


def test_an_end_that_nobody_saw_is_charged_up_to_the_last_proof_of_life(
    broker: Broker, clock: Clock
) -> None:
    lease = running(broker, "anna")
    alive = clock.forward(minutes=45)
    broker.reconcile({"docker": [sighting(lease)]}, {ANNA: HubState.READY})
    clock.forward(hours=3)
    broker.charge_all()
    released = broker.release(lease.id, reason="the server was gone")
    assert (released.ended_at, released.charged) == (alive, 3 * MICRO)


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (timedelta(hours=9), timedelta(hours=1)),  # an engine whose clock is ahead
        (-timedelta(hours=9), timedelta(0)),
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
        broker.charge_all()
        assert broker.member("anna").balance == 100 * MICRO - owed()
    assert broker.charge_all() == 0
    clock.forward(seconds=-30)
    assert broker.charge_all() == 0, "a clock that goes back takes nothing and gives nothing"
    end = clock.forward(seconds=30.7, hours=5)
    charged = broker.release(lease.id, ended_at=end, reason="stopped").charged
    assert charged == owed()


def test_a_charge_takes_the_account_below_zero_and_not_the_server_down(
    make: Make, clock: Clock
) -> None:
    broker = make(opening_grant=1, gpu_rates={"*": 4})
    running(broker, "anna")
    clock.forward(hours=1)
    broker.charge_all()
    assert credits(broker) == -3 and len(broker.open_leases()) == 1
    with pytest.raises(NoCredits, match=r"balance of -3\.00 credits does"):
        acquire(broker, "anna", server="lab")


def test_a_warning_is_noted_once_and_taken_back(broker: Broker, clock: Clock) -> None:
    lease = running(broker, "anna")
    first = clock.now
    broker.warn(lease.id)
    clock.forward(minutes=2)
    broker.warn(lease.id)
    assert broker.lease(lease.id).warned_at == first
    broker.unwarn(lease.id)
    assert broker.lease(lease.id).warned_at is None


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
    assert (credits(broker, "bert"), credits(broker, "cara")) == (100, 97)
    assert states(broker).count("free") == 2

    again = broker.reconcile({"docker": [sighting(adopted)]}, None)
    assert [type(action) for action in again] == [Seen, Unknown]


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
