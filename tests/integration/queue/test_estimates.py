"""When a ticket will start, as its member is told and as pages say before anybody asks. Real: line,
estimator, SQLite."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuspawner.catalog.models import Environment
from gpuspawner.core.errors import NoDeviceFree, TooMuchAsked
from gpuspawner.hub_pages.cards import said, sentence, usual_request
from gpuspawner.leases.models import Request, ServerRef, Terms
from gpuspawner.queue.models import Ticket
from gpuspawner.queue.positions import TRIED, Outlook
from gpuspawner.queue.schemas import TicketAnswer
from gpuspawner.services import Services
from tests.support.brokers import Clock, Make, running
from tests.support.sessions import ask, line_up
from tests.support.tier import examples

ONE, TWO = Request(devices=1), Request(devices=2)
BIG = Request(devices=1, models=("A100",))
HOUR = timedelta(hours=1)


def start_all(services: Services) -> list[str]:
    """Start whoever's turn it is; their leases."""
    present = frozenset(services.positions.standings())
    found = []
    for ticket_id in services.queue.turns(present):
        found.append(services.queue.start_ticket(ticket_id).id)
        services.leases.confirm(found[-1], "container")
    return found


def day(services: Services, clock: Clock, asked: int, seed: int = 1) -> list[bool]:
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
            services.leases.release(lease_id, ended_at=clock.now, reason="its member stopped it")
        if number < asked and comes <= clock.now:
            number += 1
            comes += timedelta(minutes=chance.expovariate(1 / 30))
            got = ask(services, f"m{number}", wait=True)
            if isinstance(got, Ticket):
                estimate = services.positions.standings()[got.id].estimate
                if estimate is not None:
                    assert clock.now.timestamp() <= estimate.low
                    assert estimate.low <= estimate.likely <= estimate.high
                    told[got.id] = (estimate.low, estimate.high)
            else:
                services.leases.confirm(got.id, "container")
                ends[got.id] = clock.now + timedelta(minutes=chance.uniform(5, 49))
        for lease_id in start_all(services):
            ends[lease_id] = clock.now + timedelta(minutes=chance.uniform(5, 49))
            ticket_id = services.leases.get(lease_id).ticket_id or ""
            if ticket_id in told:
                low, high = told.pop(ticket_id)
                held.append(low <= clock.now.timestamp() <= high)
    return held


def test_first_estimates_follow_the_session_ends(make: Make, clock: Clock) -> None:
    services = make(device_source="simulated:1xT4")
    first = ask(services, "ada", seconds=3 * 3600)
    services.leases.confirm(first.id, "container")
    second = line_up(services, "bob", seconds=3600)
    clock.forward(minutes=5)
    third = line_up(services, "cyd")
    clock.forward(minutes=5)
    last = line_up(services, "dan")

    standings = services.positions.standings()

    assert standings[second.id].sentence(clock.now) == (
        "You are next in the queue, of 3. Waiting for a GPU; none is free. "
        "Expected start: by 15:00 UTC at the latest."
    )
    assert standings[third.id].when(clock.now) == "Expected start: by 16:00 UTC at the latest."
    # Nobody knows how long cyd will stay.
    guess = standings[last.id].when(clock.now)
    assert guess.startswith("Expected start: around ") and guess.endswith("(a first guess).")


def test_learned_estimates_hold_and_outlive_the_process(make: Make, clock: Clock) -> None:
    held = day(make(device_source="simulated:1xT4"), clock, asked=120)
    assert len(held) > 30
    assert sum(held) >= 0.7 * len(held)

    services = make(device_source="simulated:1xT4", member_limits={"devices": 1})
    running(services, "ada")
    ticket = line_up(services, "bob")
    standing = services.positions.standings()[ticket.id]
    assert standing.estimate is not None
    assert " to " in standing.start(clock.now)
    assert standing.estimate.high <= clock.now.timestamp() + 4 * 3600
    services.devices.pause(actor="root", reason="new disks")
    assert services.positions.standings()[ticket.id].start(clock.now) == "", "nobody can say"
    services.devices.resume(actor="root")
    assert services.positions.standings()[ticket.id].start(clock.now)

    more = line_up(services, "ada", server="more")
    standing = services.positions.standings()[more.id]
    assert "may have 1 GPU at once" in standing.why
    assert standing.start(clock.now) == "", "a ticket that a limit holds has no expected start"


def outlook(services: Services, clock: Clock, request: Request) -> Outlook:
    clock.forward(seconds=3)  # past what one look serves
    return services.positions.outlooks({"it": request})["it"]


def start(services: Services, user: str, hours: float | None, request: Request = ONE) -> str:
    seconds = None if hours is None else int(3600 * hours)
    terms = Terms(seconds=seconds, wait=True)
    lease = services.leases.grant(ServerRef(user), request, engine="docker", terms=terms)
    services.leases.confirm(lease.id, "container")
    return lease.id


def test_outlook_is_immediate_when_devices_are_free(make: Make, clock: Clock) -> None:
    services = make(device_source="simulated:2xA100-80GB,1xT4")
    assert outlook(services, clock, ONE) == Outlook(3, 3, at_once=True)
    assert outlook(services, clock, BIG) == Outlook(2, 2, at_once=True)
    assert outlook(services, clock, TWO) == Outlook(2, 2, at_once=True), "two of one model"
    assert outlook(services, clock, Request()) == Outlook(0, 0, at_once=True), "needs none"
    nowhere = Request(devices=1, models=("H200",))
    assert outlook(services, clock, nowhere) == Outlook(0, 0, at_once=False)
    start(services, "ada", 2, BIG)
    end = clock.now + 2 * HOUR
    found = Outlook(1, 2, at_once=False, planned=end, latest=end, place=1)
    assert outlook(services, clock, TWO) == found


def test_outlook_maximum_follows_the_session_ends(make: Make, clock: Clock) -> None:
    services = make(device_source="simulated:2xT4")
    start(services, "ada", 1)
    start(services, "bob", 3)
    now = clock.now
    found = outlook(services, clock, ONE)
    assert (found.free, found.total, found.at_once, found.estimate) == (0, 2, False, None)
    assert found.latest == now + HOUR
    line_up(services, "cyd")
    behind = outlook(services, clock, ONE)
    assert (behind.ahead, behind.latest) == (1, now + 3 * HOUR)
    third = line_up(services, "dan")
    assert outlook(services, clock, ONE).latest is None, "nobody can promise it"
    services.queue.end_ticket(third.id, "cancelled", "gone")
    assert outlook(services, clock, ONE).ahead == 1


def test_outlook_likely_wait_follows_past_waits(make: Make, clock: Clock) -> None:
    """An hour each, one after the other: who comes now is told about that of a wait."""
    services = make(device_source="simulated:1xT4")
    for number in range(24):
        lease = start(services, f"a{number}", None)
        clock.forward(minutes=1)
        ticket = line_up(services, f"b{number}")
        services.positions.standings()
        clock.forward(minutes=59)
        services.leases.release(lease, ended_at=clock.now, reason="done")
        [turn] = services.queue.turns(frozenset({ticket.id}))
        got = services.queue.start_ticket(turn)
        services.leases.confirm(got.id, "container")
        services.queue.turns(frozenset())  # as every second: this one has begun
        clock.forward(minutes=60)
        services.leases.release(got.id, ended_at=clock.now, reason="done")
    start(services, "ada", None)
    estimate = outlook(services, clock, ONE).estimate
    assert estimate is not None
    assert 20 * 60 <= estimate.likely - clock.now.timestamp() <= 3 * 3600


def test_all_places_state_the_same_expected_start(make: Make, clock: Clock) -> None:
    """Four GPUs: one session of an hour, one without an end, and two whose credits end first."""
    services = make(device_source="simulated:4xT4", gpu_rates={"*": 4})
    start(services, "ada", 1)
    start(services, "bob", None)
    start(services, "cyd", 7 * 24)
    start(services, "dan", 7 * 24)
    clock.forward(minutes=10)
    asked = {"it": ONE}
    outlook = services.positions.outlooks(asked, "eve", seconds=3600)["it"]
    text = outlook.start(clock.now)
    assert text == "around 12:30 UTC (a first guess), by 13:00 UTC at the latest"

    environment = Environment(slug="torch", display_name="PyTorch", image="lab")
    assert said(outlook, clock.now) == f"0 of 4 GPUs free now, start {text}"
    assert sentence(outlook, clock.now).endswith(f"Expected start: {text}.")
    assert services.positions.outlooks({"it": usual_request(environment)})["it"] == outlook
    with pytest.raises(NoDeviceFree) as caught:
        ask(services, "eve", seconds=3600, wait=False)
    assert caught.value.message == (
        f"All 4 GPUs are in use. Expected start in the queue: {text}. "
        "Join the queue, or start without a GPU."
    )
    ticket = line_up(services, "eve", seconds=3600)
    standing = services.positions.standings()[ticket.id]
    assert standing.start(clock.now) == text
    assert f"Expected start: {text}." in standing.sentence(clock.now)
    answer = TicketAnswer.of(ticket=ticket, standing=standing)
    assert (answer.planned, answer.latest) == (outlook.planned, outlook.latest)


def test_credits_that_run_out_first_are_a_guess_and_no_promise(make: Make, clock: Clock) -> None:
    services = make(device_source="simulated:1xT4", gpu_rates={"*": 4}, opening_grant=96)
    start(services, "ada", 7 * 24)
    found = outlook(services, clock, ONE)
    # A day's credits, five minutes of grace, two to notice and to stop; rounded up.
    assert found.start(clock.now) == (
        "around 12:08 UTC on 2 March (a first guess), by 12:00 UTC on 8 March at the latest"
    )


waits = st.lists(
    st.tuples(
        st.sampled_from(["start", "wait", "end", "leave"]),
        st.integers(1, 2),
        st.sampled_from([None, 1800, 3600, 4 * 3600]),
        st.integers(0, 3000),
    ),
    max_size=14,
)


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(waits, st.integers(1, 2), st.sampled_from([None, 3600]))
def test_all_places_state_the_expected_start_of_the_ticket_that_follows(
    fresh: Callable[..., Services],
    steps: list[tuple[str, int, int | None, int]],
    devices: int,
    seconds: int | None,
) -> None:
    services = fresh()
    clock = services.clock
    assert isinstance(clock, Clock)
    for number, (action, count, length, wait) in enumerate(steps):
        clock.forward(seconds=1 + wait)
        user = f"m{number}"
        leases, tickets = services.leases.open_leases(), services.queue.waiting()
        if action in ("start", "wait"):
            got = ask(services, user, count, wait=True, seconds=length)
            if not isinstance(got, Ticket):
                services.leases.confirm(got.id, "container")
        elif action == "end" and leases:
            services.leases.release(leases[count % len(leases)].id, reason="stopped")
            start_all(services)
        elif action == "leave" and tickets:
            services.queue.end_ticket(tickets[0].id, "cancelled", "gone")
    clock.forward(seconds=5)
    request = Request(devices=devices, environment="pytorch")
    [found] = services.positions.outlooks({"": request}, "zed", seconds=seconds).values()
    refused = ""
    if not found.at_once:
        with pytest.raises(NoDeviceFree) as caught:
            ask(services, "zed", devices, wait=False, seconds=seconds)
        refused = caught.value.message
    got = ask(services, "zed", devices, wait=True, seconds=seconds)
    if found.at_once:
        if isinstance(got, Ticket):
            assert got.id in services.queue.turns(frozenset(services.positions.standings()))
        return
    standing = services.positions.standings()[got.id]
    text = standing.start(clock.now)
    places = {
        "catalog": said(found, clock.now).partition(", start ")[2],
        "form": found.start(clock.now),
        "refusal": refused.partition("Expected start in the queue: ")[2].partition(". Join")[0],
    }
    assert places == dict.fromkeys(places, text)
    assert text in sentence(found, clock.now) and text in standing.sentence(clock.now)
    [(_, _, listed)] = [each for each in services.positions.order() if each[0].id == got.id]
    assert listed == standing, "the queue's page, also by REST and in a shell"
    answer = TicketAnswer.of(ticket=got, standing=standing)
    assert (answer.planned, answer.latest) == (found.planned, found.latest)


def test_position_is_also_known_before_a_long_queue_is_joined(make: Make, clock: Clock) -> None:
    groups = {"first": frozenset({"urgent"}), "last": frozenset[str]()}
    services = make(device_source="simulated:1xT4", group_priority={"urgent": "admin"})
    start(services, "ada", None)
    for number in range(TRIED + 5):
        line_up(services, f"m{number}")
    for user, place in (("first", 1), ("last", TRIED + 6)):
        clock.forward(seconds=3)
        ask_for = services.positions.outlooks
        found = ask_for({"": ONE}, user, groups[user], seconds=3600)[""]
        assert (found.place, found.at_once) == (place, False)
    assert len(services.positions.standings()) == TRIED + 5, "nobody joined it"
    ticket = line_up(services, "last")
    assert services.positions.standings()[ticket.id].place == TRIED + 6


def test_outlook_is_cached_briefly_and_follows_a_pause(make: Make, clock: Clock) -> None:
    services = make(device_source="simulated:1xT4")
    services.devices.pause(actor="root", reason="new fans")
    assert outlook(services, clock, ONE) == Outlook(1, 1, at_once=False)
    services.devices.resume(actor="root")
    assert outlook(services, clock, ONE).at_once
    start(services, "ada", None)
    assert services.positions.outlooks({"same": ONE})["same"].at_once, "as it was a second ago"
    assert not outlook(services, clock, ONE).at_once


def test_request_that_can_never_fit_is_rejected(make: Make) -> None:
    services = make(device_source="simulated:1xT4")
    services.positions.require_fit(ONE)
    start(services, "ada", None)
    services.positions.require_fit(ONE)
    with pytest.raises(TooMuchAsked, match="Ask for 1 at most"):
        services.positions.require_fit(TWO)
