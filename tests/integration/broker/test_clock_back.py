"""The clock is set back an hour while members wait and run. Real: SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpuspawner.leases.models import Lease, LeaseState, Request, ServerRef, Sighting
from gpuspawner.leases.reconciliation import HubState
from gpuspawner.ledger.rules import owed
from gpuspawner.queue.models import Ticket
from gpuspawner.queue.service import Terms
from gpuspawner.services import Broker
from tests.support.brokers import T0, Clock, running

Make = Callable[..., Broker]
HOUR = 3600
WAIT = Terms(wait=True, seconds=2 * HOUR)


@pytest.fixture
def broker(make: Make, clock: Clock) -> Broker:
    """Four devices in use for half an hour, and charged for it."""
    broker = make(gpu_rates={"*": 4})
    for number in range(4):
        running(broker, f"runner{number}")
    clock.forward(minutes=30)
    assert broker.ledger.charge_all() == 4
    return broker


def line_up(broker: Broker, user: str) -> Ticket:
    found = broker.ask(ServerRef(user), Request(devices=1), engine="docker", terms=WAIT)
    assert isinstance(found, Ticket)
    return found


def lease_of(broker: Broker, user: str) -> Lease:
    found = broker.lease_of(ServerRef(user))
    assert found is not None
    return found


def turns(broker: Broker) -> list[str]:
    """Whose turn it is, with a spawn for each ticket."""
    waiting = broker.waiting()
    users = {ticket.id: ticket.server.user for ticket in waiting}
    return [users[ticket] for ticket in broker.turns(frozenset(users))]


def test_the_line_goes_on(broker: Broker, clock: Clock) -> None:
    line_up(broker, "dan")
    clock.forward(minutes=10)
    line_up(broker, "eve")
    clock.forward(hours=-1)
    line_up(broker, "fay")
    assert turns(broker) == []
    order = broker.order()
    assert [standing.place for _, _, standing in order] == [1, 2, 3]
    for ticket, ranked, standing in order:
        [waited] = [part for part in ranked.parts if part.name == "waiting"]
        assert waited.points >= 0, f"{ticket.server} has waited a negative time"
        assert "in line" in standing.sentence(clock.now)
    for number, next_one in enumerate([ticket for ticket, _, _ in order]):
        broker.release(lease_of(broker, f"runner{number}").id, reason="stopped")
        assert turns(broker) == [next_one.server.user]
        assert broker.start_ticket(next_one.id).granted_at == clock.now
    assert broker.waiting() == []


def test_nobody_pays_twice_and_nobody_is_paid_back(broker: Broker, clock: Clock) -> None:
    half_an_hour = 2_000_000
    clock.forward(hours=-1)
    assert broker.ledger.charge_all() == 0, "that time was paid for"
    stopped = broker.release(
        lease_of(broker, "runner0").id, ended_at=clock.now, reason="stopped just now"
    )
    assert stopped.started_at is not None and stopped.ended_at is not None
    assert stopped.ended_at >= stopped.started_at
    assert 0 <= stopped.charged <= half_an_hour
    # Once the clock has caught up, charges are what they always were.
    clock.forward(hours=1, minutes=30)
    assert broker.ledger.charge_all() == 3
    still = lease_of(broker, "runner1")
    assert still.charged == owed(still.rate, T0, clock.now) == 2 * half_an_hour


def test_who_was_seen_last_pays_up_to_then(broker: Broker, clock: Clock) -> None:
    lease = lease_of(broker, "runner0")
    open_leases = broker.open_leases()
    seen = [Sighting(lease_id=x.id, ref="c", server=x.server, alive=True) for x in open_leases]
    broker.reconcile({"docker": seen}, {x.server: HubState.READY for x in open_leases})
    clock.forward(hours=-1)
    ended = broker.release(lease.id, ended_at=clock.now, reason="stopped")
    assert ended.charged == lease.charged == owed(lease.rate, T0, ended.ended_at or T0)


def test_a_ticket_without_a_spawn_gives_way_all_the_same(broker: Broker, clock: Clock) -> None:
    dan = line_up(broker, "dan")
    clock.forward(minutes=1)
    eve = line_up(broker, "eve")
    present = frozenset({eve.id})
    assert broker.turns(present) == []
    clock.forward(hours=-1)
    assert broker.turns(present) == []
    broker.release(lease_of(broker, "runner0").id, reason="stopped")
    assert broker.turns(present) == [], "dan's spawn may be on its way"
    clock.forward(minutes=3)
    assert broker.turns(present) == [eve.id]
    assert {ticket.id for ticket in broker.waiting()} == {dan.id, eve.id}


def test_sessions_end_once(broker: Broker, clock: Clock) -> None:
    dan = line_up(broker, "dan")
    broker.release(lease_of(broker, "runner0").id, reason="stopped")
    [_] = turns(broker)
    lease = broker.start_ticket(dan.id)
    lease = broker.confirm(lease.id, "container")
    end = lease.ends_at
    assert end is not None
    clock.forward(minutes=95)
    assert broker.warn_session(lease.id, [30]) is not None
    clock.forward(hours=-1)
    assert broker.warn_session(lease.id, [30]) is None, "told already"
    assert broker.end_session(lease.id) is None
    assert broker.due_sessions([30]).over == ()
    longer = broker.extend(lease.id, actor="dan").ends_at
    assert longer is not None and longer >= end, "no end moves to an earlier time"
    assert lease_of(broker, "dan").state is LeaseState.RUNNING
