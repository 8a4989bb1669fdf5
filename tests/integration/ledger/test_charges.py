"""Charges of a tick many at once, against charges one after the other. Real: both databases."""

from __future__ import annotations

import random
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from gpuspawner.core.errors import LedgerError
from gpuspawner.core.units import MICRO
from gpuspawner.db.engine import Store
from gpuspawner.db.schema import MOST, accounts, postings, transfers
from gpuspawner.leases import repository as leases_repository
from gpuspawner.leases.models import Request, ServerRef, Terms
from gpuspawner.ledger import charges
from gpuspawner.ledger import repository as ledger_repository
from gpuspawner.ledger import rules as ledger_rules
from gpuspawner.services import Services
from tests.support.brokers import (
    Clock,
    Make,
    acquire,
    broken_invariants,
    open_services,
    problems,
    running,
)
from tests.support.parts import each_database

SITE: dict[str, Any] = {
    "device_source": "simulated:24xA100-80GB,2xT4",
    "gpu_rates": {"A100": "3.7", "T4": "0.000121", "*": 1},
    "when_dry": {"*": "stop", "lab": {"overdraft": 2}},
    "opening_grant": 40,
}


@pytest.fixture
def services(make: Make) -> Services:
    return make(**SITE)


def one_by_one(services: Services) -> int:
    """The tick as it was before charges were posted all at once."""
    now = services.clock()
    with services.store.write() as connection:
        found = leases_repository.open_leases(connection)
        shares = charges.shares_of(connection, found, now)
        return charges.charge_each(connection, found, now, shares)


def told(store: Store) -> dict[str, list[tuple[Any, ...]]]:
    """What the books say, but for the numbers that lines happen to have."""
    line = (postings.c.transfer_id, postings.c.account, postings.c.amount)
    with store.read() as connection:
        return {
            "leases": sorted(
                (str(lease.server), lease.charged)
                for lease in leases_repository.open_leases(connection)
            ),
            "accounts": list(
                connection.execute(
                    sa.select(accounts.c.name, accounts.c.balance).order_by(accounts.c.name)
                ).all()
            ),
            "transfers": sorted(
                (row.kind, row.at, row.actor, row.reason)
                for row in connection.execute(sa.select(transfers))
            ),
            "postings": sorted(
                (row.account, row.amount) for row in connection.execute(sa.select(*line))
            ),
        }


def some_life(services: Services, clock: Clock, tick: Any) -> list[int]:
    """Leases of many kinds, and a tick now and then; how many each charged."""
    chance = random.Random(3)
    counts = []
    for number in range(8):
        running(services, f"user{number % 3}", 1 + number % 2, server=f"{number}", model="A100")
    acquire(services, "user0", server="pending", model="A100")
    running(services, "user1", 0, server="without a GPU")
    running(services, "user2", 2, server="small", model="T4")
    request = Request(devices=2, model="A100")
    bounded = services.leases.grant(
        ServerRef("lara"), request, engine="docker", terms=Terms(groups=("lab",))
    )
    assert bounded.when_dry == "overdraft"
    services.leases.confirm(bounded.id)
    for _ in range(6):
        clock.forward(seconds=chance.choice((0.000001, 1, 59.999999, 60, 7200)))
        counts.append(tick())
    clock.forward(hours=-1)  # the clock is set back: nothing is due, nothing comes back
    counts.append(tick())
    return counts


@each_database
def test_batch_charging_equals_charging_one_by_one(
    services: Services, clock: Clock, tmp_path: Any
) -> None:
    other_clock = Clock()
    other = open_services(f"sqlite:///{tmp_path}/other.sqlite", other_clock, **SITE)
    try:
        counts = some_life(services, clock, services.ledger.charge_all)
        expected = some_life(other, other_clock, lambda: one_by_one(other))
        assert counts == expected
        assert counts[-1] == 0
        assert told(services.store) == told(other.store)
        assert problems(services.store) == problems(other.store) == []
        assert broken_invariants(services) == {}
    finally:
        other.store.close()


@each_database
def test_charge_posted_before_is_taken_once(services: Services, clock: Clock) -> None:
    """The key is there already; the others are charged all the same."""
    lease = running(services, "anna", model="A100")
    other = running(services, "bert", model="A100")
    clock.forward(minutes=1)
    due = ledger_rules.charge_due(lease, clock.now)
    posted = ledger_rules.charge(lease, due, clock.now)
    assert posted is not None
    services.store.run(lambda c: ledger_repository.post(c, posted), write=True)
    assert [services.ledger.charge_portion(MINUTE) for _ in range(2)] == [2, 0]
    assert {x.charged for x in (services.leases.get(lease.id), services.leases.get(other.id))} == {
        due
    }


@each_database
def test_account_overflow_cancels_the_whole_charging_tick(services: Services, clock: Clock) -> None:
    running(services, "anna", model="A100")
    running(services, "bert", model="A100")

    def set_balance(balance: int) -> None:
        bert = sa.update(accounts).where(accounts.c.name == "member:bert")
        services.store.run(lambda c: c.execute(bert.values(balance=balance)), write=True)

    set_balance(-MOST)
    before = told(services.store)
    clock.forward(minutes=1)
    with pytest.raises(LedgerError, match="would have more than an account can hold"):
        services.ledger.charge_all()
    assert told(services.store) == before, "all of a tick happens, or none"
    set_balance(40 * MICRO)


MINUTE = timedelta(minutes=1)


def charges_of(services: Services) -> Counter[str]:
    """How many charges each running lease had."""
    query = sa.select(transfers.c.lease_id).where(transfers.c.kind == "charge")
    return Counter(services.store.run(lambda c: c.execute(query).scalars().all()))


def test_leases_are_charged_each_minute_at_their_own_times(
    services: Services, clock: Clock
) -> None:
    some = []
    for number in range(6):
        some.append(running(services, f"user{number}", model="A100"))
        clock.forward(seconds=7.3)
    counts = []
    for _ in range(100):
        counts.append(services.ledger.charge_portion(MINUTE))
        clock.forward(seconds=3)
    assert max(counts) == 1, "they started at six moments"
    assert set(charges_of(services).values()) == {5} and len(charges_of(services)) == 6
    for lease in services.leases.open_leases():
        late = ledger_rules.charge_due(lease, clock.now) * 3600 / lease.rate
        assert 0 <= late <= 63.001, "and none waits longer"


def test_overdue_charges_are_posted_in_portions(services: Services, clock: Clock) -> None:
    for number in range(7):
        running(services, f"user{number % 3}", 1 + number % 2, server=f"{number}", model="A100")
    clock.forward(hours=2, seconds=11)
    counts = [services.ledger.charge_portion(MINUTE, 3) for _ in range(4)]
    assert counts == [3, 3, 1, 0]
    for lease in services.leases.open_leases():
        assert lease.charged == ledger_rules.owed(lease.rate, lease.started_at, clock.now)
    reasons = {
        line.reason for line in services.ledger.statement("member:user0") if line.kind == "charge"
    }
    assert reasons == {
        "1 x A100-80GB of user0/0",
        "2 x A100-80GB of user0/3",
        "1 x A100-80GB of user0/6",
    }


@each_database
def test_charges_in_portions_equal_one_tick(services: Services, clock: Clock) -> None:
    """Cheap ones, of which a minute costs less than a microcredit, and an overdraft among them."""
    some_life(services, clock, lambda: 0)
    chance = random.Random(5)
    for _ in range(25):
        clock.forward(seconds=chance.choice((-3, 0, 0.001, 0.9, 1, 31, 59.9999, 60, 500)))
        services.ledger.charge_portion(timedelta(seconds=chance.choice((0.5, 60, 61.7))), 3)
    clock.forward(hours=3)
    services.ledger.charge_all()
    for lease in services.leases.open_leases():
        owed = ledger_rules.owed(lease.rate, lease.started_at, clock.now)
        bounded = lease.when_dry == "overdraft"
        assert lease.charged == (min(owed, 42 * MICRO) if bounded else owed)
    assert broken_invariants(services) == {}
