"""When a ticket will start, as its member is told. Real: line, estimator, SQLite and PostgreSQL."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import datetime, timedelta

from gpuspawner.leases.models import Request, ServerRef
from gpuspawner.queue.models import Ticket
from gpuspawner.queue.service import Terms
from gpuspawner.services import Broker
from tests.support.brokers import Clock, running

Make = Callable[..., Broker]
ONE = Request(devices=1)


def ask(broker: Broker, user: str, hours: float | None = None, devices: int = 1) -> Ticket:
    seconds = None if hours is None else int(hours * 3600)
    terms = Terms(wait=True, seconds=seconds)
    request = Request(devices=devices)
    got = broker.ask(ServerRef(user), request, engine="docker", terms=terms)
    assert isinstance(got, Ticket)
    return got


def start_all(broker: Broker) -> list[str]:
    """Start whoever's turn it is; their leases."""
    present = frozenset(broker.standings())
    found = []
    for ticket_id in broker.turns(present):
        found.append(broker.start_ticket(ticket_id).id)
        broker.confirm(found[-1], "container")
    return found


def day(broker: Broker, clock: Clock, asked: int, seed: int = 1) -> list[bool]:
    """Members who come and go at random, on one device and nine tenths of its time; of each
    who was told an interval, whether it held the start."""
    chance = random.Random(seed)
    ends: dict[str, datetime] = {}
    told: dict[str, tuple[float, float]] = {}
    held = []
    comes, number = clock.now, 0
    while number < asked or ends:
        events = [*ends.values(), *([comes] if number < asked else [])]
        clock.now = max(clock.now, min(events)) + timedelta(seconds=1)
        for lease_id in [name for name, at in ends.items() if at <= clock.now]:
            del ends[lease_id]
            broker.release(lease_id, ended_at=clock.now, reason="its member stopped it")
        if number < asked and comes <= clock.now:
            number += 1
            comes += timedelta(minutes=chance.expovariate(1 / 30))
            terms = Terms(wait=True)
            got = broker.ask(ServerRef(f"m{number}"), ONE, engine="docker", terms=terms)
            if isinstance(got, Ticket):
                estimate = broker.standings()[got.id].estimate
                if estimate is not None:
                    assert clock.now.timestamp() <= estimate.low
                    assert estimate.low <= estimate.likely <= estimate.high
                    told[got.id] = (estimate.low, estimate.high)
            else:
                broker.confirm(got.id, "container")
                ends[got.id] = clock.now + timedelta(minutes=chance.uniform(5, 49))
        for lease_id in start_all(broker):
            ends[lease_id] = clock.now + timedelta(minutes=chance.uniform(5, 49))
            ticket_id = broker.lease(lease_id).ticket_id or ""
            if ticket_id in told:
                low, high = told.pop(ticket_id)
                held.append(low <= clock.now.timestamp() <= high)
    return held


def test_before_anybody_has_waited_the_ends_of_sessions_tell(make: Make, clock: Clock) -> None:
    broker = make(device_source="simulated:1xT4")
    first = broker.ask(ServerRef("ada"), ONE, engine="docker", terms=Terms(seconds=3 * 3600))
    broker.confirm(first.id, "container")
    second = ask(broker, "bob", hours=1)
    clock.forward(minutes=5)
    third = ask(broker, "cyd")
    clock.forward(minutes=5)
    last = ask(broker, "dan")

    standings = broker.standings()

    assert standings[second.id].sentence(clock.now) == (
        "You are next in line, of 3. Waiting for a GPU; none is free. Most likely start: by 15:00."
    )
    assert standings[third.id].when(clock.now) == "Most likely start: by 16:00."
    # Nobody knows how long cyd will stay.
    assert standings[last.id].when(clock.now).endswith("(a first guess).")


def test_a_session_without_an_end_gives_a_guess_that_says_so(broker: Broker, clock: Clock) -> None:
    running(broker, "ada", devices=4)
    ticket = ask(broker, "bob")
    said = broker.standings()[ticket.id].when(clock.now)
    assert said.startswith("Most likely start: around 12:")
    assert said.endswith("(a first guess).")


def test_those_who_waited_teach_how_long_it_takes(make: Make, clock: Clock) -> None:
    broker = make(device_source="simulated:1xT4")
    held = day(broker, clock, asked=160)
    assert len(held) > 40
    assert sum(held) >= 0.7 * len(held)


def test_a_broker_that_begins_learns_from_the_store(make: Make, clock: Clock) -> None:
    day(make(device_source="simulated:1xT4"), clock, asked=80)
    broker = make(device_source="simulated:1xT4")
    running(broker, "ada")
    ticket = ask(broker, "bob")
    standing = broker.standings()[ticket.id]
    assert standing.estimate is not None
    assert " to " in standing.start(clock.now)
    assert standing.estimate.high <= clock.now.timestamp() + 4 * 3600


def test_nobody_is_promised_anything_while_granting_is_paused(make: Make, clock: Clock) -> None:
    broker = make(device_source="simulated:1xT4")
    day(broker, clock, asked=80)
    running(broker, "ada")
    ticket = ask(broker, "bob")
    assert broker.standings()[ticket.id].start(clock.now)
    broker.devices.pause(actor="root", reason="new disks")
    assert broker.standings()[ticket.id].start(clock.now) == ""
    broker.devices.resume(actor="root")
    assert broker.standings()[ticket.id].start(clock.now)


def test_nobody_can_say_when_a_limit_of_their_own_ends(make: Make, clock: Clock) -> None:
    broker = make(device_source="simulated:1xT4,1xA100-80GB", member_limits={"devices": 1})
    day(broker, clock, asked=80)
    running(broker, "ada")
    ticket = broker.ask(ServerRef("ada", "more"), ONE, engine="docker", terms=Terms(wait=True))
    assert isinstance(ticket, Ticket)
    standing = broker.standings()[ticket.id]
    assert "may have 1 GPU at once" in standing.why
    assert standing.start(clock.now) == ""
