"""Grants, charges and releases. Real: SQLite and PostgreSQL; simulated: devices and the clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpuspawner.core.errors import (
    ConfigError,
    LedgerError,
    NoCredits,
    NoDeviceFree,
    ServerHasLease,
    TooMuchAsked,
    UnknownAccount,
)
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import LeaseState, Request, ServerRef
from gpuspawner.services import Broker
from tests.support.brokers import T0, Clock, acquire, credits_of, fleet, running, states

ANNA, BERT = ServerRef("anna"), ServerRef("bert")
Make = Callable[..., Broker]


# From grant to release.


@pytest.fixture
def database_url(each_database_url: str) -> str:
    """The queries, locks and constraints here are each database's own."""
    return each_database_url


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
    assert lease.charged == 12 * MICRO and credits_of(broker) == 88
    assert states(broker) == ["free"] * 4 and broker.open_leases() == []
    assert broker.lease_of(lease.server) is None
    assert acquire(broker, "bert", 4).uuids[:2] == lease.uuids, "free at once for the next"


def test_the_price_at_the_grant_is_the_price_paid(make: Make, clock: Clock) -> None:
    before = make(gpu_rates={"A100": 4, "T4": "0.5"}, device_source="simulated:1xA100-80GB,1xT4")
    lease = running(before, "anna", model="A100")
    assert lease.rate == 4 * MICRO
    after = make(gpu_rates={"*": 50}, device_source="simulated:1xA100-80GB,1xT4")
    clock.forward(hours=1)
    after.ledger.charge_all()
    assert credits_of(after) == 96
    assert running(after, "bert", model="T4").rate == 50 * MICRO
    assert after.release(lease.id, ended_at=clock.now, reason="stopped").charged == 4 * MICRO


def test_without_a_device_a_lease_costs_nothing_and_takes_none(
    broker: Broker, clock: Clock
) -> None:
    lease = running(broker, "anna", devices=0)
    assert (lease.devices, lease.rate, lease.hold) == ((), 0, 0)
    clock.forward(days=30)
    assert broker.ledger.charge_all() == 0
    broker.release(lease.id, ended_at=clock.now, reason="stopped")
    assert credits_of(broker) == 100 and states(broker) == ["free"] * 4


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
        broker.ledger.grant("group:ml", 10 * MICRO, actor="admin", reason="term")


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
    assert broker.ledger.member("anna").balance == 0
    assert broker.ledger.open_account("anna").balance == 100 * MICRO
    assert broker.ledger.open_account("anna").balance == 100 * MICRO
    acquire(broker, "anna", 0)
    assert credits_of(broker) == 100
    assert [line.kind for line in broker.ledger.statement("member:anna")] == ["grant"]


def test_an_account_opens_with_the_first_lease_where_nobody_signed_in(broker: Broker) -> None:
    assert acquire(broker, "anna").hold == pytest.approx(4 * MICRO / 6, abs=1)
    assert credits_of(broker) == 100


@pytest.mark.parametrize(("amount", "balance"), [(0, 0), ("12.5", 12.5), (0.000001, 0.000001)])
def test_the_opening_grant_is_the_admins(make: Make, amount: Any, balance: float) -> None:
    assert make(opening_grant=amount).ledger.open_account("anna").balance == balance * MICRO


def test_an_opening_grant_that_is_no_number_is_named(make: Make) -> None:
    broker = make(opening_grant="plenty")
    with pytest.raises(ConfigError, match=r"c\.GPUCredits\.opening_grant: 'plenty'"):
        broker.ledger.open_account("anna")
    assert broker.ledger.accounts() == []


def test_a_grant_comes_once(broker: Broker) -> None:
    broker.ledger.open_account("anna")

    def give(amount: int, key: str = "") -> bool:
        return broker.ledger.grant("member:anna", amount, actor="admin", reason="term", key=key)

    assert give(5 * MICRO, "term-1") is True
    assert give(5 * MICRO, "term-1") is False
    with pytest.raises(LedgerError, match="used for another amount"):
        give(6 * MICRO, "term-1")
    assert give(5 * MICRO) and give(5 * MICRO)
    assert give(-15 * MICRO, "typo")
    assert credits_of(broker) == 100
    with pytest.raises(UnknownAccount, match="member:nobody"):
        broker.ledger.grant("member:nobody", 1, actor="admin", reason="gift")
    with pytest.raises(LedgerError):
        broker.ledger.grant("member:anna", 0, actor="admin", reason="nothing")


def test_a_hold_is_set_aside_until_it_is_charged_or_the_lease_ends(
    broker: Broker, clock: Clock
) -> None:
    lease = running(broker, "anna", 3)
    assert lease.hold == 2 * MICRO  # 3 x 4 credits an hour, 10 minutes
    account = broker.ledger.member("anna")
    assert (account.balance, account.held, account.available) == (
        100 * MICRO,
        2 * MICRO,
        98 * MICRO,
    )
    clock.forward(minutes=4)
    broker.ledger.charge_all()
    account = broker.ledger.member("anna")
    assert (account.held, account.available) == (1_200_000, 98 * MICRO)
    assert [a.held for a in broker.ledger.accounts()] == [1_200_000]
    clock.forward(minutes=26)
    broker.ledger.charge_all()
    account = broker.ledger.member("anna")
    assert (account.held, account.available) == (0, 94 * MICRO)
    broker.release(lease.id, ended_at=clock.now, reason="stopped")
    assert broker.ledger.member("anna").held == 0


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
    broker.ledger.open_account("anna")
    broker.ledger.grant("member:anna", (balance - 1) * MICRO, actor="admin", reason="spent")
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
