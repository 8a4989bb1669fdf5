"""Parts of what a session cost, given back. Real: SQLite and PostgreSQL; simulated: devices and
the clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from itertools import permutations

import pytest

from gpuspawner.core.errors import InvalidRequest, LedgerError
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease
from gpuspawner.services import Broker
from tests.support.brokers import T0, Clock, credits_of, problems, running

Make = Callable[..., Broker]
ANNA = "member:anna"


@pytest.fixture
def broker(make: Make) -> Broker:
    """Anna has 10 credits; a GPU costs one credit an hour."""
    broker = make(gpu_rates={"*": 1}, opening_grant=10)
    broker.ledger.open_account("anna")
    return broker


@pytest.fixture
def over(broker: Broker, clock: Clock) -> Lease:
    """A session that cost 3 credits, in two charges."""
    return session(broker, clock)


def session(broker: Broker, clock: Clock) -> Lease:
    lease = running(broker, "anna")
    clock.forward(hours=2)
    broker.ledger.charge_all()
    clock.forward(hours=1)
    return broker.release(lease.id, ended_at=clock.now, reason="stopped")


def refund(broker: Broker, lease: Lease, credits: float | None = None, key: str = "") -> Lease:
    amount = None if credits is None else round(credits * MICRO)
    return broker.ledger.refund(lease.id, amount, actor="root", reason="a slow disk", key=key)


def audited(broker: Broker) -> list[str]:
    return [finding.problem for finding in broker.audit()[0] if finding.problem]


def test_a_part_and_then_the_rest(broker: Broker, over: Lease) -> None:
    part = refund(broker, over, 0.5)
    assert (part.charged, part.refunded, part.outcome) == (2_500_000, 500_000, "")
    assert credits_of(broker) == 7.5
    line = broker.ledger.statement(ANNA, 1)[0]
    assert (line.kind, line.amount, line.reason) == ("refund", 500_000, "a slow disk")
    assert broker.trail()[0].detail == f"0.50 credits to {ANNA}: a slow disk"
    assert audited(broker) == []
    rest = refund(broker, over)
    assert (rest.charged, rest.refunded, rest.outcome) == (0, 3 * MICRO, "refunded")
    assert credits_of(broker) == 10
    with pytest.raises(InvalidRequest, match="refunded already"):
        refund(broker, over)
    assert audited(broker) == []


@pytest.mark.parametrize("credits", [0, -1, 2.500001, 10**12])
def test_no_more_than_is_left(broker: Broker, over: Lease, credits: float) -> None:
    refund(broker, over, 0.5)
    with pytest.raises(InvalidRequest, match=r"at most 2\.500000, which is what is left"):
        refund(broker, over, credits)
    assert credits_of(broker) == 7.5 and len(broker.trail()) == 1


def test_the_same_key_gives_back_once(broker: Broker, over: Lease) -> None:
    first = refund(broker, over, 2, "ticket-7")
    assert refund(broker, over, 2, "ticket-7") == first
    assert refund(broker, over, None, "ticket-7") == first
    with pytest.raises(LedgerError, match="used for another amount"):
        refund(broker, over, 1, "ticket-7")
    assert credits_of(broker) == 9
    whole = refund(broker, over, None, "ticket-8")
    assert refund(broker, over, None, "ticket-8") == whole
    assert refund(broker, over, 2, "ticket-7") == whole
    assert credits_of(broker) == 10 and len(broker.trail()) == 2


def test_refunds_and_reversals_together_give_back_no_more(broker: Broker, over: Lease) -> None:
    """Whatever comes first: what was charged is the most."""
    last, first, _opening = broker.ledger.statement(ANNA)
    broker.ledger.reverse(last.transfer_id, actor="root", reason="a slow disk")
    with pytest.raises(InvalidRequest, match=r"at most 2\.000000"):
        refund(broker, over, 3)
    refund(broker, over, 0.5)
    with pytest.raises(InvalidRequest, match=r"1\.500000 credits are left, and this charge is mo"):
        broker.ledger.reverse(first.transfer_id, actor="root", reason="a slow disk")
    assert refund(broker, over).charged == MICRO, "what the reversal gave back stays charged"
    assert credits_of(broker) == 10
    with pytest.raises(InvalidRequest, match="came back already"):
        refund(broker, over)
    assert audited(broker) == []


def test_a_refund_is_undone_by_its_opposite(broker: Broker, over: Lease) -> None:
    refund(broker, over, 2)
    given = broker.ledger.statement(ANNA, 1)[0].transfer_id
    undone = broker.ledger.reverse(given, actor="root", reason="the wrong session")
    assert credits_of(broker) == 7
    broker.ledger.reverse(undone.id, actor="root", reason="it was right")
    assert credits_of(broker) == 9
    assert audited(broker) == []


def test_twenty_admins_refund_parts_at_once(broker: Broker, over: Lease) -> None:
    """With three credits, three parts of one credit are given back, and no fourth one."""
    gate, said = threading.Barrier(20), []

    def run(number: int) -> None:
        gate.wait(120)
        try:
            said.append(refund(broker, over, 1, f"part-{number % 10}"))
        except InvalidRequest as error:
            said.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(said) == 20
    assert credits_of(broker) == 10
    assert len([line for line in broker.ledger.statement(ANNA) if line.kind == "refund"]) == 3
    assert broker.lease(over.id).outcome == "refunded"
    assert problems(broker.store) == [] == audited(broker)


@pytest.mark.parametrize("order", list(permutations(["part", "rest", "look"])))
def test_credits_that_ended_take_no_part_back(
    broker: Broker, clock: Clock, order: tuple[str, ...]
) -> None:
    """What is refunded stays, whenever the service looks at the lots that ended meanwhile."""
    until = T0 + timedelta(hours=4)
    broker.ledger.grant(ANNA, 5 * MICRO, actor="root", reason="course", until=until)
    lease = session(broker, clock)
    clock.now = until + timedelta(hours=1)
    for step in order:
        match step:
            case "part":
                refund(broker, lease, 1)
            case "rest":
                if broker.lease(lease.id).charged:
                    refund(broker, lease, 0.25)
            case "look":
                broker.ledger.end_lots()
    broker.ledger.end_lots()
    assert credits_of(broker) == 10 + 1.25
    assert audited(broker) == []


def test_a_sessions_waiver_stays_in_its_books(make: Make, clock: Clock) -> None:
    broker = make(gpu_rates={"*": 1}, opening_grant=1, when_dry={"*": {"overdraft": 1}})
    broker.ledger.open_account("anna")
    lease = session(broker, clock)
    assert (lease.charged, lease.waived) == (2 * MICRO, MICRO)
    part = refund(broker, lease, 0.5)
    assert (part.charged, part.waived, part.refunded) == (1_500_000, MICRO, 500_000)
    whole = refund(broker, lease)
    assert (whole.charged, whole.waived, whole.refunded) == (0, MICRO, 2 * MICRO)
    assert audited(broker) == []
