"""Sessions that end. Real here: SQLite and PostgreSQL, HTTP, commands as hooks; the Hub is a
script, and the clock is the test's. ``tests/hub/test_sessions.py`` has the real Hub."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.process import BaseProcess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuspawner.broker import Broker, Terms
from gpuspawner.errors import CannotExtend, UnknownLease
from gpuspawner.ledger.rules import owed
from gpuspawner.model import MICRO, Lease, Notice, NoticeKind, Request, ServerRef, Ticket
from tests.support import racers
from tests.support.rounds import RATE, START, Clock, open_broker
from tests.support.soak import rounds

HOUR = 3600
WARN = (30.0, 10.0, 2.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def broker(database_url: str, clock: Clock) -> Iterator[Broker]:
    """Two A100 at 4 credits an hour and a T4 at 1; everybody has 1,000 credits."""
    broker = open_broker(database_url, clock)
    broker.opening_grant = 1000
    yield broker
    broker.store.close()


def session(
    broker: Broker, user: str, seconds: int | None = HOUR, devices: int = 1, model: str = "A100"
) -> Lease:
    """A running lease that ends after some time."""
    request = Request(devices=devices, model=model if devices else None)
    terms = Terms(seconds=seconds, groups=frozenset({"guests"}))
    lease = broker.ask(ServerRef(user), request, engine="local", terms=terms)
    assert isinstance(lease, Lease)
    return broker.confirm(lease.id)


def wait(broker: Broker, user: str, devices: int = 1, model: str = "A100") -> Ticket:
    """A ticket for an hour."""
    request = Request(devices=devices, model=model)
    terms = Terms(seconds=HOUR, wait=True)
    ticket = broker.ask(ServerRef(user), request, engine="local", terms=terms)
    assert isinstance(ticket, Ticket)
    return ticket


def turn(broker: Broker, ticket: Ticket) -> Lease:
    """The ticket's turn has come, and its server answers."""
    assert ticket.id in broker.turns(frozenset({ticket.id}))
    return broker.confirm(broker.start_ticket(ticket.id).id)


def told(broker: Broker, user: str, kind: NoticeKind) -> list[Notice]:
    return [notice for notice in broker.notices_of(user) if notice.kind is kind][::-1]


def warn(broker: Broker) -> list[float | None]:
    """Give every warning that is due; how many minutes each was for."""
    found = [broker.warn_session(lease.id, WARN) for lease in broker.due_sessions(WARN).warn]
    return [lease.told_minutes for lease in found if lease]


# Warnings.


def test_each_warning_is_given_once_whoever_restarts(database_url: str, clock: Clock) -> None:
    given = []
    broker = open_broker(database_url, clock)
    session(broker, "ada")
    for _ in range(HOUR // 60 - 1):
        clock.advance(60)
        given += warn(broker) + warn(broker)
        broker.store.close()
        broker = open_broker(database_url, clock)  # another process
    assert given == [30, 10, 2]
    notices = told(broker, "ada", NoticeKind.SESSION_ENDS)
    assert len({notice.key for notice in notices}) == len(notices) == 3
    assert [(START + timedelta(hours=1) - n.at).total_seconds() for n in notices] == [
        1800,
        600,
        120,
    ]
    broker.store.close()


def test_who_comes_late_tells_only_the_last_warning(broker: Broker, clock: Clock) -> None:
    session(broker, "ada")
    clock.advance(HOUR - 90)
    assert warn(broker) == [2]
    assert warn(broker) == []
    assert len(told(broker, "ada", NoticeKind.SESSION_ENDS)) == 1


def test_a_short_session_is_not_warned_at_its_start(broker: Broker, clock: Clock) -> None:
    session(broker, "ada", seconds=900)
    assert warn(broker) == []
    clock.advance(300)
    assert warn(broker) == [10]


def test_what_has_no_end_or_has_not_begun_is_not_warned(broker: Broker, clock: Clock) -> None:
    session(broker, "ada", seconds=None)
    session(broker, "bob", devices=0)
    request = Request(devices=1, model="A100")
    starting = broker.ask(ServerRef("cleo"), request, engine="local", terms=Terms(seconds=HOUR))
    clock.advance(HOUR - 60)
    assert warn(broker) == []
    clock.advance(HOUR)
    due = broker.due_sessions(WARN)
    assert (due.warn, due.over, due.stop) == ((), (), ())
    assert broker.end_session(starting.id) is None


# The end.


def test_a_session_ends_once_and_says_why(broker: Broker, clock: Clock) -> None:
    lease = session(broker, "ada")
    clock.advance(HOUR - 0.001)
    assert broker.end_session(lease.id) is None
    clock.advance(0.001)
    (over,) = broker.due_sessions(WARN).over
    assert over.id == lease.id
    ordered = broker.end_session(lease.id)
    assert ordered is not None and ordered.outcome == "session_end"
    assert broker.end_session(lease.id) is None
    due = broker.due_sessions(WARN)
    assert due.over == () and [some.id for some in due.stop] == [lease.id]
    (notice,) = told(broker, "ada", NoticeKind.STOPPED)
    assert notice.title == "Your server is stopped: its time is over"

    end = clock.now + timedelta(seconds=7)  # the Hub takes its time
    clock.advance(9)
    broker.release(lease.id, ended_at=end, reason="stopped")
    ended = broker.lease(lease.id)
    assert (ended.outcome, ended.ended_at) == ("session_end", end)
    assert ended.end_reason.startswith("its time was over at ")
    assert ended.charged == owed(RATE, START, end)
    assert broker.due_sessions(WARN).stop == ()


def test_a_clock_set_back_tells_nothing_twice_and_ends_nothing_early(
    broker: Broker, clock: Clock
) -> None:
    lease = session(broker, "ada", seconds=2 * HOUR)
    clock.advance(2 * HOUR - 599)
    assert warn(broker) == [10]
    clock.advance(-HOUR)
    assert warn(broker) == []
    assert broker.extend(lease.id, actor="ada").ends_at == START + timedelta(
        seconds=HOUR - 599 + 2 * HOUR
    )
    clock.advance(-HOUR)
    extended = broker.lease(lease.id)
    assert broker.extend(lease.id, actor="ada") == extended, "no end moves to an earlier time"
    clock.now = extended.ends_at or clock.now
    (over,) = broker.due_sessions(WARN).over
    clock.advance(-HOUR)
    assert broker.end_session(over.id) is None
    assert broker.due_sessions(WARN).over == ()
    clock.advance(HOUR)
    assert broker.end_session(over.id) is not None
    clock.advance(-HOUR)
    assert [some.id for some in broker.due_sessions(WARN).stop] == [lease.id]
    with pytest.raises(CannotExtend):
        broker.extend(lease.id, actor="ada")
    assert len(told(broker, "ada", NoticeKind.STOPPED)) == 1


# Extensions.


def test_an_extension_begins_the_whole_length_anew_and_is_warned_anew(
    broker: Broker, clock: Clock
) -> None:
    lease = session(broker, "ada")
    clock.advance(3000.5)
    assert warn(broker) == [10]
    extended = broker.extend(lease.id, actor="ada")
    assert extended == broker.lease(lease.id)
    assert extended.ends_at == START + timedelta(seconds=3001 + HOUR)
    assert warn(broker) == []
    clock.advance(3001)
    assert warn(broker) == [10]
    assert len(told(broker, "ada", NoticeKind.SESSION_ENDS)) == 2
    assert broker.trail() == []


def test_an_admins_extension_is_in_the_audit_trail(broker: Broker, clock: Clock) -> None:
    lease = session(broker, "ada")
    clock.advance(60)
    broker.extend(lease.id, actor="kim")
    (change,) = broker.trail()
    assert (change.actor, change.action) == ("kim", "extend")
    assert change.subject == f"lease {lease.id} of ada"


def test_nobody_who_waits_is_delayed(broker: Broker, clock: Clock) -> None:
    mine, bobs = session(broker, "ada"), session(broker, "bob")
    clock.advance(600)
    wait(broker, "cleo")
    # Bob's device comes back when mine does: with mine kept longer, Cleo still has that one.
    extended = broker.extend(mine.id, actor="ada")
    assert extended.ends_at == clock.now + timedelta(hours=1)
    with pytest.raises(CannotExtend) as caught:
        broker.extend(bobs.id, actor="bob")
    assert caught.value.message == (
        "The session cannot be extended: 1 member waits for this GPU and would start later."
    )
    wait(broker, "dan")
    clock.advance(60)
    with pytest.raises(CannotExtend, match="2 members wait for this GPU"):
        broker.extend(bobs.id, actor="kim")
    with pytest.raises(CannotExtend, match="1 member waits for this GPU"):
        broker.extend(mine.id, actor="ada")
    assert (broker.lease(mine.id), broker.lease(bobs.id)) == (extended, bobs)
    assert broker.trail() == []


def test_who_waits_for_another_model_is_not_in_the_way(broker: Broker, clock: Clock) -> None:
    mine = session(broker, "ada")
    session(broker, "bob", model="T4")
    clock.advance(600)
    wait(broker, "cleo", model="T4")
    assert broker.extend(mine.id, actor="ada").extended == 600


def test_another_process_sees_the_extension_and_the_line(
    database_url: str, broker: Broker, clock: Clock
) -> None:
    """The service extends, the hub decides: each has a line of its own."""
    hub, service = (
        broker,
        Broker(database_url=database_url, device_source="simulated:2xA100-80GB,1xT4", clock=clock),
    )
    mine = session(hub, "ada")
    session(hub, "bob", seconds=2 * HOUR)
    clock.advance(600)
    assert service.extend(mine.id, actor="ada").extended == 600
    ticket = wait(hub, "cleo")
    planned = hub.standings()[ticket.id].planned
    assert planned == clock.now + timedelta(hours=1)
    with pytest.raises(CannotExtend):
        clock.advance(60)
        service.extend(mine.id, actor="ada")


@pytest.mark.parametrize("actor", ["ada", "kim"])
def test_what_cannot_be_extended_says_why(broker: Broker, clock: Clock, actor: str) -> None:
    def refused(lease_id: str) -> str:
        with pytest.raises(CannotExtend) as caught:
            broker.extend(lease_id, actor=actor)
        return caught.value.message

    with pytest.raises(UnknownLease):
        broker.extend("nothing", actor=actor)
    request = Request(devices=1, model="A100")
    starting = broker.ask(ServerRef("bob"), request, engine="local", terms=Terms(seconds=HOUR))
    assert "its server is not up yet" in refused(starting.id)
    broker.release(starting.id, reason="failed", failed=True)
    assert "it has ended" in refused(starting.id)

    lease = session(broker, "ada")
    endless, free = session(broker, "cleo", None), session(broker, "dan", devices=0)
    clock.advance(60)
    for some in (endless, free):
        assert broker.extend(some.id, actor=actor) == some
    broker.drain(lease.devices[0].uuid, actor="kim", reason="a new fan")
    assert "needed for maintenance after this session (a new fan)" in refused(lease.id)
    broker.undrain(lease.devices[0].uuid, actor="kim")
    broker.pause(actor="kim", reason="a new rack")
    assert broker.extend(lease.id, actor=actor).extended == 60, "what runs goes on"
    clock.advance(HOUR)
    assert "its server is being stopped" in refused(lease.id)
    broker.end_session(lease.id)
    clock.advance(-HOUR)
    assert "its server is being stopped" in refused(lease.id)


def test_hours_held_are_limited(broker: Broker, clock: Clock) -> None:
    broker.member_limits = {"gpu_hours": 1.5}
    mine = session(broker, "ada")
    clock.advance(1800)
    assert broker.extend(mine.id, actor="ada").extended == 1800
    request, terms = Request(devices=1, model="T4"), Terms(seconds=1200)
    second = broker.ask(ServerRef("ada", "second"), request, engine="local", terms=terms)
    broker.confirm(second.id)
    clock.advance(600)
    assert broker.extend(mine.id, actor="ada").extended == 2400, "3,600 + 600 seconds"
    assert broker.extend(second.id, actor="ada").extended == 600, "3,600 + 1,200 seconds"
    broker.member_limits = {"gpu_hours": 1.25}
    clock.advance(60)
    with pytest.raises(CannotExtend, match=r"1\.25 GPU-hours may be held at once, and with it"):
        broker.extend(mine.id, actor="ada")
    assert broker.extend(session(broker, "bob").id, actor="bob").extended == 0


steps = st.lists(
    st.tuples(
        st.sampled_from(["extend", "wait", "leave", "end", "turn"]),
        st.integers(0, 3),
        st.floats(0, 5000),
    ),
    max_size=12,
)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps)
def test_no_extension_moves_a_planned_start_to_later(
    fresh: Callable[[], Broker], steps: list[tuple[str, int, float]]
) -> None:
    """Whatever was asked, ended and extended before: every promise is kept, all in the store."""
    broker = fresh()
    clock = broker.clock
    assert isinstance(clock, Clock)
    users = ["ada", "bob", "cleo", "dan"]
    for action, number, seconds in steps:
        clock.advance(seconds)
        user = users[number]
        lease = broker.lease_of(ServerRef(user))
        mine = [ticket for ticket in broker.waiting() if ticket.server.user == user]
        if action == "wait" and lease is None and not mine:
            request = Request(devices=1 + number % 2, model="A100")
            terms = Terms(seconds=1800 * (1 + number), wait=True)
            got = broker.ask(ServerRef(user), request, engine="local", terms=terms)
            if isinstance(got, Lease):
                broker.confirm(got.id)
        elif action == "leave" and mine:
            broker.end_ticket(mine[0].id, "cancelled", "enough")
        elif action == "end" and lease is not None:
            broker.release(lease.id, ended_at=clock.now, reason="stopped")
        elif action == "turn":
            present = frozenset(ticket.id for ticket in broker.waiting())
            for ticket in broker.turns(present):
                broker.confirm(broker.start_ticket(ticket).id)
        elif action == "extend" and lease is not None:
            _extension_keeps_promises(broker, lease)


def _extension_keeps_promises(broker: Broker, lease: Lease) -> None:
    tickets = {ticket.id: ticket for ticket in broker.waiting()}
    before = broker.standings()
    try:
        extended = broker.extend(lease.id, actor=lease.server.user)
    except CannotExtend:
        assert broker.lease(lease.id) == lease
        return
    assert extended.ends_at is not None and lease.ends_at is not None
    assert extended.ends_at >= max(lease.ends_at, broker.clock())
    broker.line.revision += 1  # not the standings that were kept for a second
    after = broker.standings()
    for name, standing in before.items():
        if tickets[name].server != lease.server and standing.planned:
            later = after[name].planned
            assert later is None or later <= standing.planned + timedelta(seconds=1)


@pytest.fixture
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Broker]]:
    """A new broker, on a store of its own."""
    opened: list[Broker] = []

    def make() -> Broker:
        while opened:
            opened.pop().store.close()
        url = f"sqlite:///{tmp_path_factory.mktemp('store')}/gpuspawner.sqlite"
        opened.append(open_broker(url, Clock()))
        opened[0].opening_grant = 1000
        return opened[0]

    yield make
    for broker in opened:
        broker.store.close()


# No-shows.


def from_the_queue(broker: Broker, user: str) -> Lease:
    """A server of a member who had to wait for it."""
    others = [session(broker, f"{user}-before-{n}") for n in range(2)]
    ticket = wait(broker, user)
    for lease in others:
        broker.release(lease.id, ended_at=broker.clock(), reason="stopped")
    return turn(broker, ticket)


def test_nobody_connected_in_time(broker: Broker, clock: Clock) -> None:
    lease = from_the_queue(broker, "ada")
    clock.advance(599)
    broker.charge_all()
    assert broker.member("ada").balance < 1000 * MICRO
    assert broker.no_show(lease.id).outcome == ""
    clock.advance(1)
    assert broker.no_show(lease.id).outcome == "no_show"
    assert broker.claim(lease.id).claimed_at is None, "too late is too late"
    assert [some.id for some in broker.due_sessions(WARN).stop] == [lease.id]
    clock.advance(5)
    ended = broker.release(lease.id, ended_at=clock.now, reason="stopped")
    assert (ended.outcome, ended.charged) == ("no_show", 0)
    assert ended.end_reason == "nobody connected within 10 min of its start"
    assert broker.lease(lease.id) == ended
    assert broker.member("ada").balance == 1000 * MICRO
    (notice,) = told(broker, "ada", NoticeKind.STOPPED)
    assert "Nothing was charged." in notice.body and "end of the line" not in notice.body


def test_who_connected_keeps_the_server(broker: Broker, clock: Clock) -> None:
    lease = from_the_queue(broker, "ada")
    clock.advance(599)
    claimed = broker.claim(lease.id)
    assert claimed.claimed_at == clock.now and claimed.claim_by is None
    clock.advance(HOUR)
    assert broker.no_show(lease.id).outcome == ""
    assert broker.claim(lease.id).claimed_at == claimed.claimed_at
    straight = session(broker, "eve")
    assert broker.no_show(straight.id) == straight == broker.claim(straight.id)


def test_after_two_no_shows_in_a_row_the_next_ticket_is_last(broker: Broker, clock: Clock) -> None:
    def misses(user: str) -> str:
        lease = from_the_queue(broker, user)
        clock.advance(600)
        broker.no_show(lease.id)
        broker.release(lease.id, ended_at=clock.now, reason="stopped")
        clock.advance(60)
        return told(broker, user, NoticeKind.STOPPED)[-1].body

    assert "end of the line" not in misses("ada")
    comes = from_the_queue(broker, "ada")
    broker.claim(comes.id)
    broker.release(comes.id, ended_at=clock.now, reason="stopped")
    clock.advance(60)
    assert "end of the line" not in misses("ada"), "it was not the second in a row"
    assert "next time you wait at the end of the line" in misses("ada")
    for n in range(2):
        session(broker, f"other-{n}")
    assert wait(broker, "ada").last
    assert not wait(broker, "bob").last


# Orders of admins.


def test_an_order_stays_and_says_who_gave_it(broker: Broker, clock: Clock) -> None:
    lease = session(broker, "ada")
    why = "The machine gets a new fan"
    ordered = broker.order_stop(lease.id, "admin", actor="kim", reason=why)
    assert (ordered.outcome, ordered.end_reason) == ("admin", why)
    assert broker.order_stop(lease.id, "admin", actor="lee", reason="other") == ordered
    (change,) = broker.trail()
    assert (change.actor, change.action, change.detail) == ("kim", "stop", why)
    clock.advance(2 * HOUR)
    assert broker.end_session(lease.id) is None
    broker.release(lease.id, ended_at=clock.now, reason="stopped")
    ended = broker.lease(lease.id)
    assert (ended.outcome, ended.end_reason) == ("admin", why)
    assert ended.charged == owed(RATE, START, clock.now)
    assert broker.order_stop(lease.id, "admin", actor="lee", reason="other") == ended
    (notice,) = told(broker, "ada", NoticeKind.STOPPED)
    assert notice.body.startswith("The machine gets a new fan. Your files")


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.floats(0, 1200), max_size=10), st.integers(1, 7200))
def test_warnings_come_in_order_and_the_end_after_them(
    fresh: Callable[[], Broker], pauses: list[float], seconds: int
) -> None:
    """However late or often somebody looks, and however long the session is."""
    broker = fresh()
    clock = broker.clock
    assert isinstance(clock, Clock)
    lease = session(broker, "ada", seconds=seconds)
    given_minutes: list[float | None] = []
    for pause in pauses:
        clock.advance(pause)
        given_minutes += warn(broker)
        left = (lease.ends_at or clock.now) - clock.now
        assert (broker.end_session(lease.id) is not None) == (left <= timedelta(0))
        if left <= timedelta(0):
            break
        assert all(left <= timedelta(minutes=m or math.inf) for m in given_minutes)
    assert given_minutes == sorted(given_minutes, reverse=True, key=lambda m: m or 0)
    assert len(set(given_minutes)) == len(given_minutes)


# Killed at any moment.


@pytest.mark.soak
def test_services_killed_in_the_midst_of_it_warn_once_and_in_order(database_url: str) -> None:
    """Two at a time, as a service that is not dead yet and the one that comes after it."""
    racers.FORKSERVER.set_forkserver_preload(["tests.support.racers"])
    chance = random.Random(database_url.partition(":")[0])
    began = time.time()
    broker = racers.fast_broker(database_url, began)
    hours = rounds(100)
    terms = Terms(seconds=hours * HOUR)
    lease = broker.acquire(ServerRef("ada"), Request(devices=1), engine="local", terms=terms)
    broker.confirm(lease.id)
    killed = 0
    while not broker.lease(lease.id).outcome:
        assert time.time() - began < hours + 120, "it never ends"
        victims = [_start_looking_after(database_url, began) for _ in range(2)]
        time.sleep(chance.uniform(0.0, 0.5))
        for victim in victims:
            os.kill(victim.pid or 0, signal.SIGKILL)
            victim.join(timeout=30)
            killed += 1
    assert killed > 4, "some were killed while there was work"
    ended = broker.lease(lease.id)
    assert ended.ends_at is not None and broker.clock() >= ended.ends_at
    notices = broker.notices_of("ada", 1000)[::-1]
    assert [notice.kind for notice in notices].count(NoticeKind.STOPPED) == 1
    assert notices[-1].kind is NoticeKind.STOPPED
    minutes = [float(notice.key.rpartition(":")[2]) for notice in notices[:-1]]
    assert minutes, "somebody was quick enough to warn"
    assert minutes == sorted(set(minutes), reverse=True)
    assert ended.told_minutes == minutes[-1]
    broker.store.close()


def _start_looking_after(url: str, began: float) -> BaseProcess:
    ready, theirs = racers.FORKSERVER.Pipe()
    work = racers.look_after_sessions_until_killed
    victim = racers.FORKSERVER.Process(target=work, args=(theirs, url, began), daemon=True)
    victim.start()
    assert ready.poll(60) and ready.recv() == "working"
    return victim
