"""Parts of what a session cost, given back. Real: SQLite and PostgreSQL; simulated: devices and
the clock."""

from __future__ import annotations

from datetime import timedelta
from itertools import permutations

import pytest

from gpuspawner.core.errors import InvalidRequest, LedgerError, UnknownLease
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease
from gpuspawner.services import Services
from tests.support.brokers import (
    T0,
    Clock,
    Make,
    acquire,
    broken_invariants,
    credits_of,
    problems,
    running,
)
from tests.support.parts import each_database
from tests.support.threads import at_once

ANNA = "member:anna"


@pytest.fixture
def services(make: Make) -> Services:
    """Anna has 10 credits; a GPU costs one credit an hour."""
    services = make(gpu_rates={"*": 1}, opening_grant=10)
    services.ledger.open_account("anna")
    return services


@pytest.fixture
def over(services: Services, clock: Clock) -> Lease:
    """A session that cost 3 credits, in two charges."""
    return session(services, clock)


def session(services: Services, clock: Clock) -> Lease:
    lease = running(services, "anna")
    clock.forward(hours=2)
    services.ledger.charge_all()
    clock.forward(hours=1)
    return services.leases.release(lease.id, ended_at=clock.now, reason="stopped")


def refund(services: Services, lease: Lease, credits: float | None = None, key: str = "") -> Lease:
    amount = None if credits is None else round(credits * MICRO)
    return services.ledger.refund(lease.id, amount, actor="root", reason="a slow disk", key=key)


def test_lease_is_refunded_in_part_and_then_fully(services: Services, over: Lease) -> None:
    part = refund(services, over, 0.5)
    assert (part.charged, part.refunded, part.outcome) == (2_500_000, 500_000, "")
    assert credits_of(services) == 7.5
    line = services.ledger.statement(ANNA, 1)[0]
    assert (line.kind, line.amount, line.lease_id) == ("refund", 500_000, over.id)
    assert (line.reason, line.actor) == ("a slow disk", "root")
    change = services.audit.trail()[0]
    assert (change.action, change.detail) == ("refund", f"0.50 credits to {ANNA}: a slow disk")
    assert broken_invariants(services) == {}
    rest = refund(services, over)
    assert (rest.charged, rest.refunded, rest.outcome) == (0, 3 * MICRO, "refunded")
    assert credits_of(services) == 10
    with pytest.raises(InvalidRequest, match="refunded already"):
        refund(services, over)
    charge = next(x for x in services.ledger.statement(ANNA) if x.kind == "charge").transfer
    with pytest.raises(InvalidRequest, match="was refunded: nothing is left to reverse"):
        services.ledger.reverse(charge, actor="root", reason="sick")
    assert credits_of(services) == 10 and broken_invariants(services) == {}


def test_impossible_refund_is_refused_with_the_reason(services: Services, clock: Clock) -> None:
    lease = running(services, "anna")
    clock.forward(hours=3)
    services.ledger.charge_all()
    with pytest.raises(InvalidRequest, match="is still open: stop its server first"):
        refund(services, lease)
    services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    with pytest.raises(InvalidRequest, match="reason is missing"):
        services.ledger.refund(lease.id, actor="root", reason=" ")
    refund(services, lease, 0.5)
    for credits in (0, -1, 2.500001, 10**12):
        with pytest.raises(InvalidRequest, match=r"at most 2\.50, the part of its charges"):
            refund(services, lease, credits)
    assert credits_of(services) == 7.5 and len(services.audit.trail()) == 1
    failed = acquire(services, "anna")
    services.leases.release(failed.id, reason="failed", failed=True)
    with pytest.raises(InvalidRequest, match="Nothing was charged"):
        refund(services, failed)
    with pytest.raises(UnknownLease):
        services.ledger.refund("nothing", actor="root", reason="sick")


def test_refund_with_the_same_key_is_given_once(services: Services, over: Lease) -> None:
    first = refund(services, over, 2, "ticket-7")
    assert refund(services, over, 2, "ticket-7") == first
    assert refund(services, over, None, "ticket-7") == first
    with pytest.raises(LedgerError, match="used for another amount"):
        refund(services, over, 1, "ticket-7")
    assert credits_of(services) == 9
    whole = refund(services, over, None, "ticket-8")
    assert refund(services, over, None, "ticket-8") == whole
    assert refund(services, over, 2, "ticket-7") == whole
    assert credits_of(services) == 10 and len(services.audit.trail()) == 2


def test_refund_of_the_cost_as_shown_gives_back_all(services: Services, clock: Clock) -> None:
    lease = running(services, "anna")
    clock.forward(seconds=4673)  # 1.298055, shown as 1.30
    lease = services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    assert lease.charged == 1_298_055
    whole = refund(services, lease, 1.3, "ticket-9")
    assert (whole.charged, whole.refunded, credits_of(services)) == (0, 1_298_055, 10)
    assert refund(services, lease, 1.3, "ticket-9") == whole
    assert len(services.audit.trail()) == 1


def test_refunds_and_reversals_never_exceed_the_charge(services: Services, over: Lease) -> None:
    """Whatever comes first: what was charged is the most."""
    last, first, _opening = services.ledger.statement(ANNA)
    services.ledger.reverse(last.transfer, actor="root", reason="a slow disk")
    with pytest.raises(InvalidRequest, match=r"at most 2\.00,"):
        refund(services, over, 3)
    refund(services, over, 0.5)
    with pytest.raises(InvalidRequest, match=r"1\.50 credits are left, and this charge is mo"):
        services.ledger.reverse(first.transfer, actor="root", reason="a slow disk")
    assert refund(services, over).charged == MICRO, "what the reversal gave back stays charged"
    assert credits_of(services) == 10
    with pytest.raises(InvalidRequest, match="already fully refunded"):
        refund(services, over)
    assert broken_invariants(services) == {}


def test_refund_can_be_reversed_and_restored(services: Services, over: Lease) -> None:
    refund(services, over, 2)
    given = services.ledger.statement(ANNA, 1)[0].transfer
    undone = services.ledger.reverse(given, actor="root", reason="the wrong session")
    assert credits_of(services) == 7
    services.ledger.reverse(undone.id, actor="root", reason="it was right")
    assert credits_of(services) == 9
    assert broken_invariants(services) == {}


@each_database
def test_concurrent_partial_refunds_never_exceed_the_charge(
    services: Services, over: Lease
) -> None:
    """With three credits, three parts of one credit are given back, and no fourth one."""
    at_once(20, lambda number: refund(services, over, 1, f"part-{number % 10}"))
    assert credits_of(services) == 10
    assert len([line for line in services.ledger.statement(ANNA) if line.kind == "refund"]) == 3
    assert services.leases.get(over.id).outcome == "refunded"
    assert problems(services.store) == [] and broken_invariants(services) == {}


@pytest.mark.parametrize("order", list(permutations(["part", "rest", "look"])))
def test_refund_of_expired_credits_stays_in_any_order(
    services: Services, clock: Clock, order: tuple[str, ...]
) -> None:
    """What is refunded stays, whenever the service looks at the lots that ended meanwhile."""
    until = T0 + timedelta(hours=4)
    services.ledger.grant(ANNA, 5 * MICRO, actor="root", reason="course", until=until)
    lease = session(services, clock)
    clock.now = until + timedelta(hours=1)
    for step in order:
        match step:
            case "part":
                refund(services, lease, 1)
            case "rest":
                if services.leases.get(lease.id).charged:
                    refund(services, lease, 0.25)
            case "look":
                services.ledger.end_lots()
    services.ledger.end_lots()
    assert credits_of(services) == 10 + 1.25
    until = clock.now + timedelta(hours=1)
    services.ledger.grant(ANNA, MICRO, actor="root", reason="course", until=until)
    clock.now = until
    services.ledger.end_lots()
    assert credits_of(services) == 10 + 1.25, "a later lot takes nothing of it along"
    assert broken_invariants(services) == {}


def test_refund_leaves_the_waived_amount_unchanged(make: Make, clock: Clock) -> None:
    services = make(gpu_rates={"*": 1}, opening_grant=1, when_dry={"*": {"overdraft": 1}})
    services.ledger.open_account("anna")
    lease = session(services, clock)
    assert (lease.charged, lease.waived) == (2 * MICRO, MICRO)
    part = refund(services, lease, 0.5)
    assert (part.charged, part.waived, part.refunded) == (1_500_000, MICRO, 500_000)
    whole = refund(services, lease)
    assert (whole.charged, whole.waived, whole.refunded) == (0, MICRO, 2 * MICRO)
    assert broken_invariants(services) == {}
