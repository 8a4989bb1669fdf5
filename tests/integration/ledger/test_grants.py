"""Grants, reversals and credits that end. Real: SQLite; simulated: devices
and the clock."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from gpuspawner.core.errors import InvalidRequest, NoCredits
from gpuspawner.core.units import MICRO
from gpuspawner.leases import repository as leases_repository
from gpuspawner.leases.models import Lease
from gpuspawner.ledger.models import TransferKind
from gpuspawner.services import Services
from tests.support.brokers import T0, Clock, Make, acquire, credits_of, running
from tests.support.threads import at_once

ANNA = "member:anna"


def hours(number: float) -> datetime:
    return T0 + timedelta(hours=number)


def give(services: Services, credits: float, until: datetime | None = None, **more: Any) -> str:
    """A grant, and the id of its transfer."""
    amount = round(credits * MICRO)
    services.ledger.grant(ANNA, amount, actor="root", reason="course", until=until, **more)
    return services.ledger.statement(ANNA, 1)[0].transfer


def at(services: Services, clock: Clock, lease: Lease, hour: float) -> None:
    """The end of a server."""
    clock.now = hours(hour)
    services.leases.release(lease.id, ended_at=clock.now, reason="stopped")


@pytest.fixture
def services(make: Make) -> Services:
    """Members begin with nothing; a GPU costs one credit an hour."""
    services = make(gpu_rates={"*": 1}, opening_grant=0)
    services.ledger.open_account("anna")
    return services


# Reversals.


def test_reversal_undoes_a_transfer_once(services: Services) -> None:
    name = give(services, 10)
    reversal = services.ledger.reverse(name[:10], actor="root", reason="wrong member")
    assert reversal.kind is TransferKind.REVERSAL and reversal.amount_for(ANNA) == -10 * MICRO
    assert credits_of(services) == 0
    with pytest.raises(InvalidRequest, match=r"reversed already, by root at .*: wrong member"):
        services.ledger.reverse(name, actor="eva", reason="again")
    assert credits_of(services) == 0
    services.ledger.reverse(reversal.id, actor="root", reason="it was right")
    assert credits_of(services) == 10
    assert [change.action for change in services.audit.trail()] == ["reverse", "reverse", "grant"]
    assert services.audit.trail()[1].detail == f"-10 to {ANNA}: wrong member"
    for unknown in ("", "nothing", "%", "_"):
        with pytest.raises(InvalidRequest, match="no transfer that begins with"):
            services.ledger.reverse(unknown, actor="root", reason="wrong")


def test_reversed_charge_leaves_the_lease_running(services: Services, clock: Clock) -> None:
    give(services, 10)
    lease = running(services, "anna")
    clock.forward(hours=1)
    services.ledger.charge_all()
    services.ledger.reverse(
        services.ledger.statement(ANNA, 1)[0].transfer, actor="root", reason="a slow disk"
    )
    assert credits_of(services) == 10
    at(services, clock, lease, 3)
    assert credits_of(services) == 8 and services.leases.get(lease.id).charged == 3 * MICRO


def test_concurrent_reversals_happen_once(services: Services) -> None:
    name = give(services, 10)
    said = at_once(8, lambda n: services.ledger.reverse(name, actor=f"admin{n}", reason="wrong"))
    assert sum(isinstance(answer, InvalidRequest) for answer in said) == 7
    assert credits_of(services) == 0


def test_concurrent_grants_with_one_key_happen_once(services: Services) -> None:
    def grant(number: int) -> bool:
        key = "" if number % 2 else "the same"
        given = {"actor": f"admin{number}", "reason": "course", "until": hours(1)}
        return services.ledger.grant(ANNA, MICRO, key=key, **given)

    assert sorted(at_once(8, grant)) == [False] * 3 + [True] * 5
    assert (
        credits_of(services)
        == len(services.audit.trail())
        == len(services.ledger.lots_of(ANNA))
        == 5
    )


# Credits that end.


@pytest.mark.parametrize(("spent", "left"), [(4, 6), (10, 0)], ids=["a part spent", "all spent"])
def test_unspent_credits_expire_and_cannot_be_used(
    services: Services, clock: Clock, spent: float, left: int
) -> None:
    for amount, until, words in ((5, 0, "in the past"), (5, -1, "in the past"), (-5, 1, "no end")):
        with pytest.raises(InvalidRequest, match=words):
            give(services, amount, until=hours(until))
    assert credits_of(services) == 0 and services.audit.trail() == []
    give(services, 10, until=hours(24))
    at(services, clock, running(services, "anna"), spent)
    found = [(lot.ends_at, rest) for lot, rest in services.ledger.lots_of(ANNA) if rest]
    assert found == [(hours(24), left * MICRO)] * bool(left)
    assert services.ledger.end_lots() == 0
    clock.now = hours(24)
    with pytest.raises(NoCredits, match=r"balance of 0\.00 credits"):
        acquire(services, "anna")
    assert services.ledger.end_lots() == 1 and services.ledger.end_lots() == 0
    assert credits_of(services) == 0 and services.ledger.lots_of(ANNA) == []
    line = services.ledger.statement(ANNA, 1)[0]
    if not left:
        assert line.kind == "charge", "nothing is taken back"
        return
    assert (line.kind, line.amount, line.at) == ("expiry", -left * MICRO, hours(24))
    assert line.reason == "Credits that ended at 2025-03-02 12:00 UTC"


def test_no_show_spends_no_expired_credits(services: Services, clock: Clock) -> None:
    give(services, 5, until=hours(1))
    lease = running(services, "anna")
    clock.now = hours(1)
    services.ledger.end_lots()
    assert credits_of(services) == 1, "it runs: this hour is to be charged yet"
    clock.now = hours(2)
    with services.store.write() as connection:
        leases_repository.update(connection, lease.id, outcome="no_show")
    services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    assert credits_of(services) == 0
    assert [line.amount for line in services.ledger.statement(ANNA)] == [
        -MICRO,
        -4 * MICRO,
        5 * MICRO,
    ]


def test_reversed_grant_is_not_taken_back_again(services: Services, clock: Clock) -> None:
    wrong = give(services, 10, until=hours(10))
    give(services, 10, until=hours(20))
    lease = running(services, "anna")
    at(services, clock, lease, 4)
    services.ledger.reverse(wrong, actor="root", reason="wrong")
    assert credits_of(services) == 6
    assert [left for _, left in services.ledger.lots_of(ANNA)] == [6 * MICRO]
    clock.now = hours(12)
    services.ledger.end_lots()
    assert credits_of(services) == 6
    clock.now = hours(20)
    services.ledger.end_lots()
    assert credits_of(services) == 0
    ended = give(services, 10, until=hours(21))
    clock.now = hours(22)
    services.ledger.end_lots()
    services.ledger.reverse(ended, actor="root", reason="wrong")
    assert credits_of(services) == 0, "of what has ended nothing is left to take back"


def test_late_and_concurrent_expiry_takes_credits_once(services: Services, clock: Clock) -> None:
    for number in range(6):
        give(services, 1, until=hours(1 + number))
    clock.now = hours(48)
    at_once(6, lambda number: services.ledger.end_lots())
    assert credits_of(services) == 0
    kinds = [line.kind for line in services.ledger.statement(ANNA)]
    assert kinds.count("expiry") == 6


def test_clock_set_back_does_not_repeat_an_expiry(services: Services, clock: Clock) -> None:
    give(services, 5, until=hours(24))
    clock.now = hours(25)
    services.ledger.end_lots()
    clock.now = hours(1)
    assert services.ledger.end_lots() == 0 and credits_of(services) == 0
    give(services, 3, until=hours(24))
    clock.now = hours(26)
    services.ledger.end_lots()
    assert credits_of(services) == 0


def test_database_rejects_taking_more_than_was_granted(services: Services) -> None:
    """The database itself says so."""
    name = give(services, 5, until=hours(24))
    with pytest.raises(sa.exc.IntegrityError), services.store.write() as connection:
        connection.execute(
            sa.text("UPDATE lots SET taken = amount + 1 WHERE transfer_id = :id"), {"id": name}
        )
