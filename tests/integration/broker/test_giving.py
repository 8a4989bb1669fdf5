"""Grants, refunds, reversals and credits that end. Real: SQLite and PostgreSQL; simulated: devices
and the clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from gpuspawner.core.errors import InvalidRequest, NoCredits, UnknownAccount, UnknownLease
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease
from gpuspawner.ledger.models import TransferKind
from gpuspawner.services import Broker
from tests.support.brokers import T0, Clock, acquire, credits_of, problems, running

Make = Callable[..., Broker]
ANNA = "member:anna"


def hours(number: float) -> datetime:
    return T0 + timedelta(hours=number)


def give(broker: Broker, credits: float, until: datetime | None = None, **more: Any) -> str:
    """A grant, and the id of its transfer."""
    amount = round(credits * MICRO)
    broker.ledger.grant(ANNA, amount, actor="root", reason="course", until=until, **more)
    return broker.ledger.statement(ANNA, 1)[0].transfer_id


def at(broker: Broker, clock: Clock, lease: Lease, hour: float) -> None:
    """The end of a server."""
    clock.now = hours(hour)
    broker.release(lease.id, ended_at=clock.now, reason="stopped")


@pytest.fixture
def broker(make: Make) -> Broker:
    """Members begin with nothing; a GPU costs one credit an hour."""
    broker = make(gpu_rates={"*": 1}, opening_grant=0)
    broker.ledger.open_account("anna")
    return broker


# Refunds.


def test_a_refund_gives_back_all_that_a_lease_cost(broker: Broker, clock: Clock) -> None:
    give(broker, 10)
    lease = running(broker, "anna")
    clock.forward(hours=2)
    broker.ledger.charge_all()
    at(broker, clock, lease, 3)
    assert credits_of(broker) == 7
    refunded = broker.ledger.refund(lease.id, actor="root", reason="ECC errors")
    assert (refunded.charged, refunded.outcome) == (0, "refunded") and credits_of(broker) == 10
    line = broker.ledger.statement(ANNA, 1)[0]
    assert (line.kind, line.reason, line.actor, line.lease_id) == (
        *("refund", "ECC errors", "root"),
        lease.id,
    )
    change = broker.trail()[0]
    assert (change.action, change.detail) == ("refund", f"3.00 credits to {ANNA}: ECC errors")


def test_what_cannot_be_refunded_says_why(broker: Broker, clock: Clock) -> None:
    give(broker, 10)
    lease = running(broker, "anna")
    clock.forward(hours=1)
    broker.ledger.charge_all()
    with pytest.raises(InvalidRequest, match="goes on: stop its server first"):
        broker.ledger.refund(lease.id, actor="root", reason="sick")
    at(broker, clock, lease, 1)
    with pytest.raises(InvalidRequest, match="reason is missing"):
        broker.ledger.refund(lease.id, actor="root", reason=" ")
    broker.ledger.refund(lease.id, actor="root", reason="sick")
    with pytest.raises(InvalidRequest, match="refunded already"):
        broker.ledger.refund(lease.id, actor="root", reason="sick")
    failed = acquire(broker, "anna")
    broker.release(failed.id, reason="failed", failed=True)
    with pytest.raises(InvalidRequest, match="Nothing was charged"):
        broker.ledger.refund(failed.id, actor="root", reason="sick")
    with pytest.raises(UnknownLease):
        broker.ledger.refund("nothing", actor="root", reason="sick")
    assert credits_of(broker) == 10


# Reversals.


def test_a_reversal_is_the_opposite_once(broker: Broker) -> None:
    name = give(broker, 10)
    reversal = broker.ledger.reverse(name[:10], actor="root", reason="wrong member")
    assert reversal.kind is TransferKind.REVERSAL and reversal.amount_for(ANNA) == -10 * MICRO
    assert credits_of(broker) == 0
    with pytest.raises(InvalidRequest, match=r"reversed already, by root at .*: wrong member"):
        broker.ledger.reverse(name, actor="eva", reason="again")
    assert credits_of(broker) == 0
    broker.ledger.reverse(reversal.id, actor="root", reason="it was right")
    assert credits_of(broker) == 10
    assert [change.action for change in broker.trail()] == ["reverse", "reverse", "grant"]
    assert broker.trail()[1].detail == f"-10 to {ANNA}: wrong member"


@pytest.mark.parametrize("name", ["", "nothing", "%", "_"])
def test_a_transfer_that_is_not_there(broker: Broker, name: str) -> None:
    give(broker, 10)
    with pytest.raises(InvalidRequest, match="no transfer that begins with"):
        broker.ledger.reverse(name, actor="root", reason="wrong")


def test_a_charge_can_be_reversed_and_the_lease_goes_on(broker: Broker, clock: Clock) -> None:
    give(broker, 10)
    lease = running(broker, "anna")
    clock.forward(hours=1)
    broker.ledger.charge_all()
    broker.ledger.reverse(
        broker.ledger.statement(ANNA, 1)[0].transfer_id, actor="root", reason="a slow disk"
    )
    assert credits_of(broker) == 10
    at(broker, clock, lease, 3)
    assert credits_of(broker) == 8 and broker.lease(lease.id).charged == 3 * MICRO


def test_nothing_is_given_back_twice(broker: Broker, clock: Clock) -> None:
    """By a refund and by a reversal of what was refunded."""
    give(broker, 10)
    first, second = running(broker, "anna"), running(broker, "anna", server="b")
    clock.forward(hours=1)
    broker.ledger.charge_all()
    charges = {line.lease_id: line.transfer_id for line in broker.ledger.statement(ANNA, 2)}
    broker.release(first.id, ended_at=clock.now, reason="stopped")
    broker.release(second.id, ended_at=clock.now, reason="stopped")
    broker.ledger.refund(first.id, actor="root", reason="sick")
    with pytest.raises(InvalidRequest, match="was refunded: nothing is left to reverse"):
        broker.ledger.reverse(charges[first.id], actor="root", reason="sick")
    broker.ledger.reverse(charges[second.id], actor="root", reason="sick")
    with pytest.raises(InvalidRequest, match=r"came back already: there is nothing"):
        broker.ledger.refund(second.id, actor="root", reason="sick")
    assert credits_of(broker) == 10


def test_two_admins_reverse_at_once(broker: Broker) -> None:
    name = give(broker, 10)
    said = together(
        8, lambda number: broker.ledger.reverse(name, actor=f"admin{number}", reason="wrong")
    )
    assert sorted(map(type, said), key=str)[0] is InvalidRequest
    assert sum(not isinstance(answer, Exception) for answer in said) == 1
    assert credits_of(broker) == 0


def test_two_admins_grant_at_once(broker: Broker) -> None:
    def grant(number: int) -> bool:
        key = "" if number % 2 else "the same"
        return broker.ledger.grant(ANNA, MICRO, actor=f"admin{number}", reason="course", key=key)

    assert sorted(together(8, grant)) == [False] * 3 + [True] * 5
    assert credits_of(broker) == 5 and len(broker.trail()) == 5


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    """The answers, or the errors, of so many threads that begin at the same moment."""
    gate, said = threading.Barrier(count), []

    def run(number: int) -> None:
        gate.wait(120)
        try:
            said.append(work(number))
        except InvalidRequest as error:
            said.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(said) == count
    return said


# Credits that end.


def test_what_is_left_at_the_end_is_taken_back(broker: Broker, clock: Clock) -> None:
    give(broker, 5)
    give(broker, 10, until=hours(24))
    lease = running(broker, "anna")
    at(broker, clock, lease, 4)
    ((lot, left),) = broker.ledger.lots_of(ANNA)
    assert (lot.ends_at, left) == (hours(24), 6 * MICRO)
    assert broker.ledger.end_lots() == 0
    clock.now = hours(24)
    assert broker.ledger.end_lots() == 1 and broker.ledger.end_lots() == 0
    assert credits_of(broker) == 5 and broker.ledger.lots_of(ANNA) == []
    line = broker.ledger.statement(ANNA, 1)[0]
    assert (line.kind, line.amount, line.at) == ("expiry", -6 * MICRO, hours(24))
    assert line.reason == "Credits that ended at 2025-03-02 12:00 UTC"


def test_what_was_spent_to_the_end_takes_nothing_back(broker: Broker, clock: Clock) -> None:
    give(broker, 2, until=hours(3))
    lease = running(broker, "anna")
    at(broker, clock, lease, 2)
    clock.now = hours(3)
    assert broker.ledger.end_lots() == 1
    assert credits_of(broker) == 0 and broker.ledger.statement(ANNA, 1)[0].kind == "charge"


def test_nobody_starts_on_credits_that_have_ended(broker: Broker, clock: Clock) -> None:
    give(broker, 10, until=hours(1))
    clock.now = hours(1)
    with pytest.raises(NoCredits, match=r"balance of 0\.00 credits"):
        acquire(broker, "anna")
    assert broker.open_leases() == []


@pytest.mark.parametrize("ticks", [[], [0.5], [0.5, 2, 4.2], [5], [1, 5, 7]])
@pytest.mark.parametrize("ended", [[5], [3, 8], [8, 3, 3]])
def test_what_is_taken_back_does_not_depend_on_ticks(
    broker: Broker, clock: Clock, ticks: list[float], ended: list[float]
) -> None:
    """A lease from 0 to 4 and lots until 3 and 6; the service looks when it looks."""
    give(broker, 4)
    give(broker, 5, until=hours(3))
    give(broker, 5, until=hours(6))
    lease = running(broker, "anna")
    for moment, what in sorted(
        [(tick, broker.ledger.charge_all) for tick in ticks]
        + [(end, broker.ledger.end_lots) for end in ended],
        key=lambda step: step[0],
    ):
        clock.now = hours(moment)
        what()
    clock.now = hours(9)
    # Its server died at 4, and somebody notices now.
    broker.release(lease.id, ended_at=hours(4), reason="stopped")
    broker.ledger.end_lots()
    # 3 of the first 5, then 1 of the second 5: 2 and 4 were left.
    assert credits_of(broker) == 4
    taken = [line.amount for line in broker.ledger.statement(ANNA) if line.kind == "expiry"]
    assert sum(taken) == -6 * MICRO
    assert problems(broker.store) == []


def test_a_no_show_spent_nothing_of_what_has_ended(broker: Broker, clock: Clock) -> None:
    give(broker, 5, until=hours(1))
    lease = running(broker, "anna")
    clock.now = hours(1)
    broker.ledger.end_lots()
    assert credits_of(broker) == 1, "it runs: this hour is to be charged yet"
    clock.now = hours(2)
    broker.order_stop(lease.id, "no_show", reason="nobody came")
    broker.release(lease.id, ended_at=clock.now, reason="stopped")
    assert credits_of(broker) == 0
    assert [line.amount for line in broker.ledger.statement(ANNA)] == [
        -MICRO,
        -4 * MICRO,
        5 * MICRO,
    ]


def test_a_refund_gives_credits_that_stay(broker: Broker, clock: Clock) -> None:
    """Its member could not use them in time because of the device."""
    give(broker, 5, until=hours(4))
    lease = running(broker, "anna")
    at(broker, clock, lease, 3)
    clock.now = hours(5)
    broker.ledger.end_lots()
    assert credits_of(broker) == 0
    broker.ledger.refund(lease.id, actor="root", reason="sick")
    assert credits_of(broker) == 3
    clock.now = hours(10)
    give(broker, 1, until=hours(11))
    clock.now = hours(11)
    broker.ledger.end_lots()
    assert credits_of(broker) == 3


def test_a_reversed_grant_is_not_taken_back_a_second_time(broker: Broker, clock: Clock) -> None:
    wrong = give(broker, 10, until=hours(10))
    give(broker, 10, until=hours(20))
    lease = running(broker, "anna")
    at(broker, clock, lease, 4)
    broker.ledger.reverse(wrong, actor="root", reason="wrong")
    assert credits_of(broker) == 6
    assert [left for _, left in broker.ledger.lots_of(ANNA)] == [6 * MICRO]
    clock.now = hours(12)
    broker.ledger.end_lots()
    assert credits_of(broker) == 6
    clock.now = hours(20)
    broker.ledger.end_lots()
    assert credits_of(broker) == 0


def test_a_grant_that_ended_can_be_reversed(broker: Broker, clock: Clock) -> None:
    wrong = give(broker, 10, until=hours(2))
    clock.now = hours(3)
    broker.ledger.end_lots()
    assert credits_of(broker) == 0
    broker.ledger.reverse(wrong, actor="root", reason="wrong")
    assert credits_of(broker) == 0


@pytest.mark.parametrize(
    ("credits", "until", "words"),
    [(5, hours(0), "over already"), (5, hours(-1), "over already"), (-5, hours(1), "no end")],
)
def test_an_end_that_cannot_be(broker: Broker, credits: int, until: datetime, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        give(broker, credits, until=until)
    assert credits_of(broker) == 0 and broker.trail() == []


def test_an_unknown_account_gets_nothing(broker: Broker) -> None:
    with pytest.raises(UnknownAccount):
        broker.ledger.grant("member:nobody", MICRO, actor="root", reason="x", until=hours(1))
    assert broker.trail() == []


def test_the_same_key_gives_one_lot(broker: Broker, clock: Clock) -> None:
    for _ in range(2):
        broker.ledger.grant(ANNA, MICRO, actor="root", reason="x", key="k", until=hours(1))
    assert len(broker.ledger.lots_of(ANNA)) == 1 and credits_of(broker) == 1


def test_the_service_looks_late_and_two_look_at_once(broker: Broker, clock: Clock) -> None:
    for number in range(6):
        give(broker, 1, until=hours(1 + number))
    clock.now = hours(48)
    together(6, lambda number: broker.ledger.end_lots())
    assert credits_of(broker) == 0
    kinds = [line.kind for line in broker.ledger.statement(ANNA)]
    assert kinds.count("expiry") == 6


def test_the_clock_goes_back_a_day_and_on_again(broker: Broker, clock: Clock) -> None:
    give(broker, 5, until=hours(24))
    clock.now = hours(25)
    broker.ledger.end_lots()
    clock.now = hours(1)
    assert broker.ledger.end_lots() == 0 and credits_of(broker) == 0
    give(broker, 3, until=hours(24))
    clock.now = hours(26)
    broker.ledger.end_lots()
    assert credits_of(broker) == 0


def test_no_more_than_was_given_can_be_taken_back(broker: Broker) -> None:
    """The database itself says so."""
    name = give(broker, 5, until=hours(24))
    with pytest.raises(sa.exc.IntegrityError), broker.store.write() as connection:
        connection.execute(
            sa.text("UPDATE lots SET taken = amount + 1 WHERE transfer_id = :id"), {"id": name}
        )
