"""What pages say before anybody asks. Real: line, estimator, SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from gpuspawner.core.errors import TooMuchAsked
from gpuspawner.leases.models import Request, ServerRef
from gpuspawner.queue.positions import Outlook
from gpuspawner.queue.service import Terms
from gpuspawner.services import Broker
from tests.support.brokers import Clock

Make = Callable[..., Broker]
ONE, TWO = Request(devices=1), Request(devices=2)
BIG = Request(devices=1, models=("A100",))
HOUR = timedelta(hours=1)


def outlook(broker: Broker, clock: Clock, request: Request) -> Outlook:
    clock.forward(seconds=3)  # past what one look serves
    return broker.outlooks({"it": request})["it"]


def start(broker: Broker, user: str, hours: float | None, request: Request = ONE) -> str:
    seconds = None if hours is None else int(3600 * hours)
    terms = Terms(seconds=seconds, wait=True)
    lease = broker.acquire(ServerRef(user), request, engine="docker", terms=terms)
    broker.confirm(lease.id, "container")
    return lease.id


def test_what_is_free_starts_at_once(make: Make, clock: Clock) -> None:
    broker = make(device_source="simulated:2xA100-80GB,1xT4")
    assert outlook(broker, clock, ONE) == Outlook(3, 3, at_once=True)
    assert outlook(broker, clock, BIG) == Outlook(2, 2, at_once=True)
    assert outlook(broker, clock, TWO) == Outlook(2, 2, at_once=True), "two of one model"
    assert outlook(broker, clock, Request()) == Outlook(0, 0, at_once=True), "needs none"
    nowhere = Request(devices=1, models=("H200",))
    assert outlook(broker, clock, nowhere) == Outlook(0, 0, at_once=False)
    start(broker, "ada", 2, BIG)
    assert outlook(broker, clock, TWO) == Outlook(1, 2, at_once=False, most=_left(2, 6))


def _left(hours: float, seconds: int) -> timedelta:
    return timedelta(hours=hours) - timedelta(seconds=seconds - 3)


def test_the_ends_of_sessions_say_how_long_at_most(make: Make, clock: Clock) -> None:
    broker = make(device_source="simulated:2xT4")
    start(broker, "ada", 1)
    start(broker, "bob", 3)
    found = outlook(broker, clock, ONE)
    assert (found.free, found.total, found.at_once, found.likely) == (0, 2, False, None)
    assert found.most == HOUR - timedelta(seconds=3)
    broker.ask(ServerRef("cyd"), ONE, engine="docker", terms=Terms(wait=True))
    behind = outlook(broker, clock, ONE)
    assert (behind.ahead, behind.most) == (1, 3 * HOUR - timedelta(seconds=6))
    third = broker.ask(ServerRef("dan"), ONE, engine="docker", terms=Terms(wait=True))
    assert outlook(broker, clock, ONE).most is None, "nobody can promise it"
    broker.end_ticket(third.id, "cancelled", "gone")
    start_free = outlook(broker, clock, ONE)
    assert start_free.ahead == 1


def test_while_granting_is_paused_nothing_is_promised(make: Make, clock: Clock) -> None:
    broker = make(device_source="simulated:1xT4")
    broker.devices.pause(actor="root", reason="new fans")
    assert outlook(broker, clock, ONE) == Outlook(1, 1, at_once=False)
    broker.devices.resume(actor="root")
    assert outlook(broker, clock, ONE).at_once


def test_those_who_waited_tell_how_long_it_takes(make: Make, clock: Clock) -> None:
    """An hour each, one after the other: who comes now is told about that of a wait."""
    broker = make(device_source="simulated:1xT4")
    for number in range(40):
        lease = start(broker, f"a{number}", None)
        clock.forward(minutes=1)
        ticket = broker.ask(ServerRef(f"b{number}"), ONE, engine="docker", terms=Terms(wait=True))
        broker.standings()
        clock.forward(minutes=59)
        broker.release(lease, ended_at=clock.now, reason="done")
        [turn] = broker.turns(frozenset({ticket.id}))
        got = broker.start_ticket(turn)
        broker.confirm(got.id, "container")
        broker.turns(frozenset())  # as every second: this one has begun
        clock.forward(minutes=60)
        broker.release(got.id, ended_at=clock.now, reason="done")
    start(broker, "ada", None)
    likely = outlook(broker, clock, ONE).likely
    assert likely is not None and timedelta(minutes=20) <= likely <= 3 * HOUR


def test_one_look_serves_everybody_for_a_moment(make: Make, clock: Clock) -> None:
    broker = make(device_source="simulated:1xT4")
    assert outlook(broker, clock, ONE).at_once
    start(broker, "ada", None)
    assert broker.outlooks({"same": ONE})["same"].at_once, "as it was a second ago"
    assert not outlook(broker, clock, ONE).at_once


def test_a_request_that_never_fits_is_named(make: Make) -> None:
    broker = make(device_source="simulated:1xT4")
    broker.must_fit(ONE)
    start(broker, "ada", None)
    broker.must_fit(ONE)
    with pytest.raises(TooMuchAsked, match="Ask for 1 at most"):
        broker.must_fit(TWO)
