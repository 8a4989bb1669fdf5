"""Warnings and ends of sessions. Real here: SQLite and PostgreSQL, kill -9; the clock is the
test's. ``tests/hub/test_sessions.py`` has the real Hub."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuspawner.core.errors import CannotExtend
from gpuspawner.leases.models import Request, ServerRef
from gpuspawner.ledger.rules import owed
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.queue.service import Terms
from gpuspawner.services import Broker
from tests.support import racers
from tests.support.rounds import RATE, START, Clock, open_broker
from tests.support.sessions import HOUR, WARN, session, told, warn
from tests.support.tier import Rounds, examples

# Warnings.


@pytest.fixture
def database_url(each_database_url: str) -> str:
    """The queries, locks and constraints here are each database's own."""
    return each_database_url


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


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def test_services_killed_in_the_midst_of_it_warn_once_and_in_order(
    database_url: str, tmp_path: Path, rounds: Rounds, chance: random.Random
) -> None:
    """Two at a time, as a service that is not dead yet and the one that comes after it."""
    clock = racers.SharedClock(tmp_path / "clock")
    broker = racers.paid_broker(database_url, clock)
    hours = rounds(100)
    terms = Terms(seconds=hours * HOUR)
    lease = broker.acquire(ServerRef("ada"), Request(devices=1), engine="local", terms=terms)
    broker.confirm(lease.id)
    seconds, killed = 0.0, 0
    while not broker.lease(lease.id).outcome:
        assert killed < 100 * hours, "it never ends"
        victims = [_start_looking_after(database_url, clock) for _ in range(2)]
        for _ in range(4):
            seconds += chance.uniform(0, HOUR / 4)
            clock.set(seconds)
            time.sleep(chance.uniform(0.0, 0.05))  # a random moment of what they do
        for victim in victims:
            os.kill(victim.pid or 0, signal.SIGKILL)
            victim.join(timeout=120)
            killed += 1
    assert killed > hours, "some were killed while there was work"
    ended = broker.lease(lease.id)
    assert ended.ends_at is not None and broker.clock() >= ended.ends_at
    notices = broker.notifications.notices_of("ada", 1000)[::-1]
    assert [notice.kind for notice in notices].count(NoticeKind.STOPPED) == 1
    assert notices[-1].kind is NoticeKind.STOPPED
    minutes = [float(notice.key.rpartition(":")[2]) for notice in notices[:-1]]
    assert minutes, "somebody was quick enough to warn"
    assert minutes == sorted(set(minutes), reverse=True)
    assert ended.told_minutes == minutes[-1]
    broker.store.close()


def _start_looking_after(url: str, clock: racers.SharedClock) -> BaseProcess:
    ready, theirs = racers.FORKSERVER.Pipe()
    work = racers.look_after_sessions_until_killed
    victim = racers.FORKSERVER.Process(target=work, args=(theirs, url, clock), daemon=True)
    victim.start()
    assert ready.poll(60) and ready.recv() == "working"
    return victim
