"""Charges of a tick many at once, against charges one after the other. Real: both databases."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from gpuspawner.core.errors import LedgerError
from gpuspawner.core.units import MICRO
from gpuspawner.db.engine import Store
from gpuspawner.db.schema import MOST, accounts, postings, transfers
from gpuspawner.leases import repository as leases_repository
from gpuspawner.leases.models import Lease, Request, ServerRef
from gpuspawner.ledger import charges
from gpuspawner.ledger import repository as ledger_repository
from gpuspawner.ledger import rules as ledger_rules
from gpuspawner.queue.service import Terms
from gpuspawner.services import Broker
from tests.support.brokers import Clock, acquire, open_broker, problems, running

FLEET = "simulated:24xA100-80GB,2xT4"
RATES = {"A100": "3.7", "T4": "0.000121", "*": 1}
WHEN_DRY = {"*": "stop", "lab": {"overdraft": 2}}


@pytest.fixture
def database_url(each_database_url: str) -> str:
    """The queries, locks and constraints here are each database's own."""
    return each_database_url


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def broker(database_url: str, clock: Clock) -> Iterator[Broker]:
    broker = open_broker(
        database_url,
        clock,
        device_source=FLEET,
        gpu_rates=RATES,
        when_dry=WHEN_DRY,
        opening_grant=40,
    )
    yield broker
    broker.store.close()


def one_by_one(broker: Broker) -> int:
    """The tick as it was before charges were posted all at once."""
    now = broker.clock()
    with broker.store.write() as connection:
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


def some_life(broker: Broker, clock: Clock, tick: Any) -> list[int]:
    """Leases of many kinds, and a tick now and then; how many each charged."""
    chance = random.Random(3)
    counts = []
    for number in range(8):
        running(broker, f"user{number % 3}", 1 + number % 2, server=f"{number}", model="A100")
    acquire(broker, "user0", server="pending", model="A100")
    running(broker, "user1", 0, server="without a GPU")
    running(broker, "user2", 2, server="small", model="T4")
    request = Request(devices=2, model="A100")
    bounded = broker.acquire(
        ServerRef("lara"), request, engine="docker", terms=Terms(groups=("lab",))
    )
    assert bounded.when_dry == "overdraft"
    broker.confirm(bounded.id)
    for _ in range(6):
        clock.forward(seconds=chance.choice((0.000001, 1, 59.999999, 60, 7200)))
        counts.append(tick())
    clock.forward(hours=-1)  # the clock is set back: nothing is due, nothing comes back
    counts.append(tick())
    return counts


def test_all_at_once_is_one_after_the_other(broker: Broker, clock: Clock, tmp_path: Any) -> None:
    other_clock = Clock()
    other = open_broker(
        f"sqlite:///{tmp_path}/other.sqlite",
        other_clock,
        device_source=FLEET,
        gpu_rates=RATES,
        when_dry=WHEN_DRY,
        opening_grant=40,
    )
    try:
        counts = some_life(broker, clock, broker.ledger.charge_all)
        expected = some_life(other, other_clock, lambda: one_by_one(other))
        assert counts == expected
        assert counts[-1] == 0
        assert told(broker.store) == told(other.store)
        assert problems(broker.store) == problems(other.store) == []
        assert [f.problem for f in broker.audit()[0] if f.problem] == []
    finally:
        other.store.close()


def test_a_second_tick_at_the_same_moment_charges_nothing(broker: Broker, clock: Clock) -> None:
    running(broker, "anna", model="A100")
    clock.forward(minutes=1)
    assert broker.ledger.charge_all() == 1
    assert broker.ledger.charge_all() == 0
    assert problems(broker.store) == []


def test_a_charge_that_was_posted_before_is_taken_once(broker: Broker, clock: Clock) -> None:
    """The key is there already; the others are charged all the same."""
    lease = running(broker, "anna", model="A100")
    other = running(broker, "bert", model="A100")
    clock.forward(minutes=1)
    due = ledger_rules.charge_due(lease, clock.now)
    posted = ledger_rules.charge(lease, due, clock.now)
    assert posted is not None
    broker.store.run(lambda c: ledger_repository.post(c, posted), write=True)
    assert broker.ledger.charge_all() == 2
    assert {x.charged for x in (broker.lease(lease.id), broker.lease(other.id))} == {due}
    assert problems(broker.store) == []


def test_an_account_that_would_hold_too_much_ends_the_tick(broker: Broker, clock: Clock) -> None:
    running(broker, "anna", model="A100")
    running(broker, "bert", model="A100")
    with broker.store.engine.connect() as connection:
        connection.execute(
            sa.update(accounts).where(accounts.c.name == "member:bert").values(balance=-MOST)
        )
        connection.commit()
    before = told(broker.store)
    clock.forward(minutes=1)
    with pytest.raises(LedgerError, match="would have more than an account can hold"):
        broker.ledger.charge_all()
    assert told(broker.store) == before, "all of a tick happens, or none"


def test_what_one_lease_is_told_is_what_a_single_charge_says(broker: Broker, clock: Clock) -> None:
    lease: Lease = running(broker, "anna", 2, model="A100")
    clock.forward(minutes=1)
    (due,) = broker.store.run(lambda c: ledger_repository.charges_due(c, clock.now))
    single = ledger_rules.charge(lease, due.amount, clock.now)
    assert single is not None
    assert single.reason == due.reason == "2 x A100-80GB of anna"
    broker.ledger.charge_all()
    (line,) = [x for x in broker.ledger.statement("member:anna") if x.kind == "charge"]
    assert (line.reason, line.actor, line.at) == (single.reason, single.actor, single.at)
    key = broker.store.run(
        lambda c: c.execute(sa.select(transfers.c.key).where(transfers.c.kind == "charge")).scalar()
    )
    assert key == single.key


# In portions: each lease at its own moment of the minute.


MINUTE = timedelta(minutes=1)


def charges_of(broker: Broker) -> Counter[str]:
    """How many charges each running lease had."""
    query = sa.select(transfers.c.lease_id).where(transfers.c.kind == "charge")
    return Counter(broker.store.run(lambda c: c.execute(query).scalars().all()))


def test_each_is_charged_once_a_minute_at_a_moment_of_its_own(broker: Broker, clock: Clock) -> None:
    some = []
    for number in range(6):
        some.append(running(broker, f"user{number}", model="A100"))
        clock.forward(seconds=7.3)
    counts = []
    for _ in range(300):
        counts.append(broker.ledger.charge_portion(MINUTE))
        clock.forward(seconds=1)
    assert max(counts) == 1, "they started at six moments"
    assert set(charges_of(broker).values()) == {5} and len(charges_of(broker)) == 6
    for lease in broker.open_leases():
        late = ledger_rules.charge_due(lease, clock.now) * 3600 / lease.rate
        assert 0 <= late <= 61.001, "and none waits longer"
    assert problems(broker.store) == []


def test_after_a_pause_all_are_charged_portion_by_portion(broker: Broker, clock: Clock) -> None:
    for number in range(7):
        running(broker, f"user{number % 3}", 1 + number % 2, server=f"{number}", model="A100")
    clock.forward(hours=2, seconds=11)
    counts = [broker.ledger.charge_portion(MINUTE, 3) for _ in range(4)]
    assert counts == [3, 3, 1, 0]
    for lease in broker.open_leases():
        assert lease.charged == ledger_rules.owed(lease.rate, lease.started_at, clock.now)
    reasons = {
        line.reason for line in broker.ledger.statement("member:user0") if line.kind == "charge"
    }
    assert reasons == {
        "1 x A100-80GB of user0/0",
        "2 x A100-80GB of user0/3",
        "1 x A100-80GB of user0/6",
    }
    assert problems(broker.store) == []


def test_portions_at_any_moments_charge_what_one_tick_does(broker: Broker, clock: Clock) -> None:
    """Cheap ones, of which a minute costs less than a microcredit, and an overdraft among them."""
    some_life(broker, clock, lambda: 0)
    chance = random.Random(5)
    for _ in range(40):
        clock.forward(seconds=chance.choice((-3, 0, 0.001, 0.9, 1, 31, 59.9999, 60, 500)))
        broker.ledger.charge_portion(timedelta(seconds=chance.choice((0.5, 60, 61.7))), 3)
    assert problems(broker.store) == []
    clock.forward(hours=3)
    broker.ledger.charge_all()
    for lease in broker.open_leases():
        owed = ledger_rules.owed(lease.rate, lease.started_at, clock.now)
        bounded = lease.when_dry == "overdraft"
        assert lease.charged == (min(owed, 42 * MICRO) if bounded else owed)
    assert [f.problem for f in broker.audit()[0] if f.problem] == []


def test_a_portion_whose_charge_was_posted_before_takes_it_once(
    broker: Broker, clock: Clock
) -> None:
    lease = running(broker, "anna", model="A100")
    clock.forward(minutes=1)
    posted = ledger_rules.charge(lease, ledger_rules.charge_due(lease, clock.now), clock.now)
    assert posted is not None
    broker.store.run(lambda c: ledger_repository.post(c, posted), write=True)
    assert broker.ledger.charge_portion(MINUTE) == 1
    assert broker.lease(lease.id).charged == ledger_rules.owed(
        lease.rate, lease.started_at, clock.now
    )
    assert broker.ledger.charge_portion(MINUTE) == 0
    assert problems(broker.store) == []
