"""Sessions: no-shows, stops, warnings, ends and extensions. Real: SQLite, kill -9, the production
scheduler; the clock is the test's. ``tests/hub/test_sessions.py`` has the real Hub."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuspawner.core.errors import CannotExtend, CannotStop, InvalidRequest, UnknownLease
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease, Request, ServerRef, Terms
from gpuspawner.ledger.rules import owed
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.services import Services
from tests.support import racers
from tests.support.brokers import T0, Clock, Make, make_services
from tests.support.parts import each_database
from tests.support.processes import wait_for
from tests.support.rounds import RATE, SITE, open_services
from tests.support.sessions import HOUR, WARN, session, told, turn, wait, warn
from tests.support.tier import Rounds, examples

# No-shows.


@pytest.fixture
def services(make: Make) -> Services:
    """Two A100 at 4 credits an hour and a T4 at 1; everybody has 1,000 credits."""
    return make(**{**SITE, "opening_grant": 1000})


def from_the_queue(services: Services, user: str) -> Lease:
    """A server of a member who had to wait for it."""
    others = [session(services, f"{user}-before-{n}") for n in range(2)]
    ticket = wait(services, user)
    for lease in others:
        services.leases.release(lease.id, ended_at=services.clock(), reason="stopped")
    return turn(services, ticket)


def test_no_show_is_stopped_and_not_charged(services: Services, clock: Clock) -> None:
    lease = from_the_queue(services, "ada")
    clock.forward(seconds=599)
    services.ledger.charge_all()
    assert services.ledger.member("ada").balance < 1000 * MICRO
    assert services.sessions.no_show(lease.id).outcome == ""
    clock.forward(seconds=1)
    assert services.sessions.no_show(lease.id).outcome == "no_show"
    assert services.sessions.claim(lease.id).claimed_at is None, "too late is too late"
    assert [some.id for some in services.sessions.due_sessions(WARN).stop] == [lease.id]
    clock.forward(seconds=5)
    ended = services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    assert (ended.outcome, ended.charged) == ("no_show", 0)
    assert ended.end_reason == "no one connected within 10 min of its start"
    assert services.leases.get(lease.id) == ended
    assert services.ledger.member("ada").balance == 1000 * MICRO
    (notice,) = told(services, "ada", NoticeKind.STOPPED)
    assert "Nothing was charged." in notice.body and "end of the queue" not in notice.body


def test_connected_member_keeps_the_session(services: Services, clock: Clock) -> None:
    lease = from_the_queue(services, "ada")
    clock.forward(seconds=599)
    claimed = services.sessions.claim(lease.id)
    assert claimed.claimed_at == clock.now and claimed.claim_by is None
    clock.forward(seconds=HOUR)
    assert services.sessions.no_show(lease.id).outcome == ""
    assert services.sessions.claim(lease.id).claimed_at == claimed.claimed_at
    straight = session(services, "eve")
    assert services.sessions.no_show(straight.id) == straight
    assert services.sessions.claim(straight.id) == straight


def test_two_consecutive_no_shows_put_the_next_ticket_last(
    services: Services, clock: Clock
) -> None:
    def misses(user: str) -> str:
        lease = from_the_queue(services, user)
        clock.forward(seconds=600)
        services.sessions.no_show(lease.id)
        services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
        clock.forward(seconds=60)
        return told(services, user, NoticeKind.STOPPED)[-1].body

    assert "end of the queue" not in misses("ada")
    comes = from_the_queue(services, "ada")
    services.sessions.claim(comes.id)
    services.leases.release(comes.id, ended_at=clock.now, reason="stopped")
    clock.forward(seconds=60)
    assert "end of the queue" not in misses("ada"), "it was not the second in a row"
    assert "next time you wait at the end of the queue" in misses("ada")
    for n in range(2):
        session(services, f"other-{n}")
    assert wait(services, "ada").last
    assert not wait(services, "bob").last


# Orders of admins.


def test_first_stop_order_stays_with_actor_and_reason(services: Services, clock: Clock) -> None:
    lease = session(services, "ada")
    for reason, words in (("", "reason is missing"), ("x" * 301, "300 is the most")):
        with pytest.raises(InvalidRequest, match=words):
            services.sessions.stop(lease.id, actor="kim", reason=reason)
    with pytest.raises(UnknownLease):
        services.sessions.stop("nothing", actor="kim", reason="a fan")
    why = "The machine gets a new fan"
    ordered = services.sessions.stop(lease.id, actor="kim", reason=why)
    assert (ordered.outcome, ordered.end_reason) == ("admin", why)
    with pytest.raises(CannotStop, match=rf"is being stopped already \({why}\)"):
        services.sessions.stop(lease.id, actor="lee", reason="other")
    (change,) = services.audit.trail()
    assert (change.actor, change.action, change.detail) == ("kim", "stop", why)
    clock.forward(seconds=2 * HOUR)
    assert services.sessions.end_session(lease.id) is None
    services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    ended = services.leases.get(lease.id)
    assert (ended.outcome, ended.end_reason) == ("admin", why)
    assert ended.charged == owed(RATE, T0, clock.now)
    with pytest.raises(CannotStop, match="has stopped already"):
        services.sessions.stop(lease.id, actor="lee", reason="other")
    assert services.leases.get(lease.id) == ended
    assert services.audit.trail() == [change]
    (notice,) = told(services, "ada", NoticeKind.STOPPED)
    assert notice.body.startswith("Reason: The machine gets a new fan. Your files")


# Warnings.


def test_session_warnings_are_given_once_across_restarts(database_url: str, clock: Clock) -> None:
    given = []
    services = open_services(database_url, clock)
    session(services, "ada")
    for minutes in (29, 1, 5, 15, 5, 3, 1):  # to 30, 10 and 2 minutes before the end
        clock.forward(minutes=minutes)
        given += warn(services) + warn(services)
        services.store.close()
        services = open_services(database_url, clock)  # another process
    assert given == [30, 10, 2]
    notices = told(services, "ada", NoticeKind.SESSION_ENDS)
    assert len({notice.key for notice in notices}) == len(notices) == 3
    assert [(T0 + timedelta(hours=1) - n.at).total_seconds() for n in notices] == [1800, 600, 120]
    services.store.close()


@pytest.mark.parametrize(
    ("seconds", "looks"),
    [(HOUR, [(HOUR - 90, [2]), (0, [])]), (900, [(0, []), (300, [10])])],
    ids=["who comes late tells only the last", "none at the start of a short session"],
)
def test_only_the_latest_due_session_warning_is_given(
    services: Services, clock: Clock, seconds: int, looks: list[tuple[int, list[float]]]
) -> None:
    session(services, "ada", seconds=seconds)
    for pause, warnings in looks:
        clock.forward(seconds=pause)
        assert warn(services) == warnings
    assert len(told(services, "ada", NoticeKind.SESSION_ENDS)) == 1


def test_session_without_an_end_or_start_is_not_warned(services: Services, clock: Clock) -> None:
    session(services, "ada", seconds=None)
    session(services, "bob", devices=0)
    request = Request(devices=1, model="A100")
    starting = services.queue.ask(
        ServerRef("cleo"), request, engine="local", terms=Terms(seconds=HOUR)
    )
    clock.forward(seconds=HOUR - 60)
    assert warn(services) == []
    clock.forward(seconds=HOUR)
    due = services.sessions.due_sessions(WARN)
    assert (due.warn, due.over, due.stop) == ((), (), ())
    assert services.sessions.end_session(starting.id) is None


# The end.


def test_session_is_ended_once_with_its_reason(services: Services, clock: Clock) -> None:
    lease = session(services, "ada")
    clock.forward(seconds=HOUR - 0.001)
    assert services.sessions.end_session(lease.id) is None
    clock.forward(seconds=0.001)
    (over,) = services.sessions.due_sessions(WARN).over
    assert over.id == lease.id
    ordered = services.sessions.end_session(lease.id)
    assert ordered is not None and ordered.outcome == "session_end"
    assert services.sessions.end_session(lease.id) is None
    due = services.sessions.due_sessions(WARN)
    assert due.over == () and [some.id for some in due.stop] == [lease.id]
    (notice,) = told(services, "ada", NoticeKind.STOPPED)
    assert notice.title == "Your server was stopped: its time limit was reached"

    end = clock.now + timedelta(seconds=7)  # the Hub takes its time
    clock.forward(seconds=9)
    services.leases.release(lease.id, ended_at=end, reason="stopped")
    ended = services.leases.get(lease.id)
    assert (ended.outcome, ended.ended_at) == ("session_end", end)
    assert ended.end_reason.startswith("its time was over at ")
    assert ended.charged == owed(RATE, T0, end)
    assert services.sessions.due_sessions(WARN).stop == ()


@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.floats(0, 1200), max_size=10), st.integers(1, 7200))
def test_session_warnings_come_in_order_before_the_end(
    fresh: Callable[..., Services], pauses: list[float], seconds: int
) -> None:
    """However late or often somebody looks, and however long the session is."""
    services = fresh()
    clock = services.clock
    assert isinstance(clock, Clock)
    lease = session(services, "ada", seconds=seconds)
    given_minutes: list[float | None] = []
    for pause in pauses:
        clock.forward(seconds=pause)
        given_minutes += warn(services)
        left = (lease.ends_at or clock.now) - clock.now
        assert (services.sessions.end_session(lease.id) is not None) == (left <= timedelta(0))
        if left <= timedelta(0):
            break
        assert all(left <= timedelta(minutes=m or math.inf) for m in given_minutes)
    assert given_minutes == sorted(given_minutes, reverse=True, key=lambda m: m or 0)
    assert len(set(given_minutes)) == len(given_minutes)


# Killed at any moment.


@each_database
def test_killed_services_warn_once_and_in_order(
    database_url: str, tmp_path: Path, rounds: Rounds, chance: random.Random
) -> None:
    """Two at a time, as a service that is not dead yet and the one that comes after it."""
    clock = racers.SharedClock(tmp_path / "clock")
    services = racers.paid_services(database_url, clock)
    hours = rounds(40)
    terms = Terms(seconds=hours * HOUR)
    lease = services.leases.grant(ServerRef("ada"), Request(devices=1), engine="local", terms=terms)
    services.leases.confirm(lease.id)
    seconds, killed = 0.0, 0
    while not services.leases.get(lease.id).outcome:
        assert killed < 100 * hours, "it never ends"
        work = racers.look_after_sessions_until_killed
        victims = [racers.Victim(work, database_url, clock) for _ in range(2)]
        for victim in victims:
            victim.wait_round()
        # Even on a busy machine, one of them has time to warn.
        if seconds >= max(1, hours - 9) * HOUR:
            wait_for(lambda: services.notifications.notices_of("ada"), "a warning", timeout=60)
        for _ in range(4):
            seconds += chance.uniform(0, HOUR / 2)
            clock.set(seconds)
            time.sleep(chance.uniform(0.0, 0.1))  # a random moment of what they do
        for victim in victims:
            victim.kill()
            killed += 1
    assert killed > hours, "some were killed while there was work"
    ended = services.leases.get(lease.id)
    assert ended.ends_at is not None and services.clock() >= ended.ends_at
    notices = services.notifications.notices_of("ada", 1000)[::-1]
    assert [notice.kind for notice in notices].count(NoticeKind.STOPPED) == 1
    assert notices[-1].kind is NoticeKind.STOPPED
    minutes = [float(notice.key.rpartition(":")[2]) for notice in notices[:-1]]
    assert minutes == sorted(set(minutes), reverse=True)
    assert ended.told_minutes == minutes[-1]
    services.store.close()


def test_extension_renews_the_whole_length_and_the_warnings(
    services: Services, clock: Clock
) -> None:
    lease = session(services, "ada")
    clock.forward(seconds=3000.5)
    assert warn(services) == [10]
    extended = services.extensions.extend(lease.id, actor="ada")
    assert extended == services.leases.get(lease.id)
    assert extended.ends_at == T0 + timedelta(seconds=3001 + HOUR)
    assert warn(services) == []
    clock.forward(seconds=3001)
    assert warn(services) == [10]
    assert len(told(services, "ada", NoticeKind.SESSION_ENDS)) == 2
    assert services.audit.trail() == []
    clock.forward(seconds=1)
    services.extensions.extend(lease.id, actor="kim")
    (change,) = services.audit.trail()
    assert (change.actor, change.action) == ("kim", "extend")
    assert change.subject == f"lease {lease.id} of ada"


def test_extension_that_delays_a_waiting_member_is_refused(
    services: Services, clock: Clock
) -> None:
    mine, bobs = session(services, "ada"), session(services, "bob")
    session(services, "eve", model="T4")
    clock.forward(seconds=300)
    wait(services, "fay", model="T4")
    extended = services.extensions.extend(mine.id, actor="ada")
    assert extended.extended == 300, "for another model: not in the way"
    clock.forward(seconds=300)
    wait(services, "cleo")
    # Bob's device comes back when mine does: with mine kept longer, Cleo still has that one.
    extended = services.extensions.extend(mine.id, actor="ada")
    assert extended.ends_at == clock.now + timedelta(hours=1)
    with pytest.raises(CannotExtend) as caught:
        services.extensions.extend(bobs.id, actor="bob")
    assert caught.value.message == (
        "The session cannot be extended: 1 member waits for this GPU and would start later."
    )
    wait(services, "dan")
    clock.forward(seconds=60)
    with pytest.raises(CannotExtend, match="2 members wait for this GPU"):
        services.extensions.extend(bobs.id, actor="kim")
    with pytest.raises(CannotExtend, match="1 member waits for this GPU"):
        services.extensions.extend(mine.id, actor="ada")
    assert (services.leases.get(mine.id), services.leases.get(bobs.id)) == (extended, bobs)
    assert services.audit.trail() == []


def test_other_processes_see_the_extension_and_the_queue(
    database_url: str, services: Services, clock: Clock
) -> None:
    """The service extends, the hub decides: each has a line of its own."""
    source = "simulated:2xA100-80GB,1xT4"
    hub, service = services, make_services(clock, database_url=database_url, device_source=source)
    mine = session(hub, "ada")
    session(hub, "bob", seconds=2 * HOUR)
    clock.forward(seconds=600)
    assert service.extensions.extend(mine.id, actor="ada").extended == 600
    ticket = wait(hub, "cleo")
    planned = hub.positions.standings()[ticket.id].planned
    assert planned == clock.now + timedelta(hours=1)
    with pytest.raises(CannotExtend):
        clock.forward(seconds=60)
        service.extensions.extend(mine.id, actor="ada")


def test_impossible_extension_is_refused_with_the_reason(services: Services, clock: Clock) -> None:
    def refused(lease_id: str) -> str:
        with pytest.raises(CannotExtend) as caught:
            services.extensions.extend(lease_id, actor="kim")
        return caught.value.message

    with pytest.raises(UnknownLease):
        services.extensions.extend("nothing", actor="kim")
    request = Request(devices=1, model="A100")
    starting = services.queue.ask(
        ServerRef("bob"), request, engine="local", terms=Terms(seconds=HOUR)
    )
    assert "its server is not up yet" in refused(starting.id)
    services.leases.release(starting.id, reason="failed", failed=True)
    assert "it has ended" in refused(starting.id)

    lease = session(services, "ada")
    endless, free = session(services, "cleo", None), session(services, "dan", devices=0)
    clock.forward(seconds=60)
    for some in (endless, free):
        assert services.extensions.extend(some.id, actor="kim") == some
    services.devices.drain(lease.devices[0].uuid, actor="kim", reason="a new fan")
    assert "needed for maintenance after this session (a new fan)" in refused(lease.id)
    services.devices.undrain(lease.devices[0].uuid, actor="kim")
    services.devices.pause(actor="kim", reason="a new rack")
    assert services.extensions.extend(lease.id, actor="kim").extended == 60, "what runs goes on"
    clock.forward(seconds=HOUR)
    assert "its server is being stopped" in refused(lease.id)
    services.sessions.end_session(lease.id)
    clock.forward(seconds=-HOUR)
    assert "its server is being stopped" in refused(lease.id)


def test_gpu_hours_limit_applies_to_extensions(services: Services, clock: Clock) -> None:
    services.settings.queue.member_limits = {"gpu_hours": 1.25}
    mine = session(services, "ada")
    clock.forward(seconds=600)
    assert services.extensions.extend(mine.id, actor="ada").extended == 600
    request, terms = Request(devices=1, model="T4"), Terms(seconds=1200)
    second = services.queue.ask(ServerRef("ada", "second"), request, engine="local", terms=terms)
    services.leases.confirm(second.id)
    clock.forward(seconds=60)
    with pytest.raises(CannotExtend, match=r"1\.25 GPU-hours may be held at once, and with it"):
        services.extensions.extend(mine.id, actor="ada")
    assert services.extensions.extend(session(services, "bob").id, actor="bob").extended == 0


def test_bound_shown_beside_a_guess_is_kept_too(services: Services, clock: Clock) -> None:
    """Bob's session has no end and is guessed to end first; Cleo was promised Ada's GPU."""
    mine = session(services, "ada")
    session(services, "bob", seconds=None)
    clock.forward(minutes=1)
    ticket = wait(services, "cleo")
    before = services.positions.standings()[ticket.id]
    assert before.latest == mine.ends_at
    assert before.planned is not None and before.planned < before.latest
    with pytest.raises(CannotExtend, match="1 member waits for this GPU and would start later"):
        services.extensions.extend(mine.id, actor="ada")


steps = st.lists(
    st.tuples(
        st.sampled_from(["extend", "wait", "leave", "end", "turn"]),
        st.integers(0, 3),
        st.floats(0, 5000),
    ),
    max_size=12,
)


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps)
def test_extension_never_delays_a_planned_start(
    fresh: Callable[..., Services], steps: list[tuple[str, int, float]]
) -> None:
    """Whatever was asked, ended and extended before: every promise is kept, all in the store."""
    services = fresh()
    clock = services.clock
    assert isinstance(clock, Clock)
    users = ["ada", "bob", "cleo", "dan"]
    for action, number, seconds in steps:
        clock.forward(seconds=seconds)
        user = users[number]
        lease = services.leases.of_server(ServerRef(user))
        mine = [ticket for ticket in services.queue.waiting() if ticket.server.user == user]
        if action == "wait" and lease is None and not mine:
            request = Request(devices=1 + number % 2, model="A100")
            length = None if seconds > 4000 else 1800 * (1 + number)
            terms = Terms(seconds=length, wait=True)
            got = services.queue.ask(ServerRef(user), request, engine="local", terms=terms)
            if isinstance(got, Lease):
                services.leases.confirm(got.id)
        elif action == "leave" and mine:
            services.queue.end_ticket(mine[0].id, "cancelled", "enough")
        elif action == "end" and lease is not None:
            services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
        elif action == "turn":
            present = frozenset(ticket.id for ticket in services.queue.waiting())
            for ticket in services.queue.turns(present):
                services.leases.confirm(services.queue.start_ticket(ticket).id)
        elif action == "extend" and lease is not None:
            _extension_keeps_promises(services, lease)


def _extension_keeps_promises(services: Services, lease: Lease) -> None:
    tickets = {ticket.id: ticket for ticket in services.queue.waiting()}
    before = services.positions.standings()
    try:
        extended = services.extensions.extend(lease.id, actor=lease.server.user)
    except CannotExtend:
        assert services.leases.get(lease.id) == lease
        return
    if lease.ends_at is not None:
        assert extended.ends_at is not None
        assert extended.ends_at >= max(lease.ends_at, services.clock())
    services.line.revision += 1  # not the standings that were kept for a second
    after = services.positions.standings()
    for name, standing in before.items():
        if tickets[name].server == lease.server:
            continue
        if standing.planned:
            later = after[name].planned
            assert later is None or later <= standing.planned + timedelta(seconds=1)
        if standing.latest:
            bound = after[name].latest
            assert bound is not None and bound <= standing.latest + timedelta(seconds=1)
