"""When a ticket will probably start. Real: scheduler and estimator; sessions are random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuspawner.queue.estimates import Ahead, Estimator, Waited
from gpuspawner.queue.models import Decision, Estimate, Running, Waiting
from gpuspawner.queue.replay import Replayed, TraceJob, replay
from gpuspawner.queue.scheduler import Scheduler
from tests.support.tier import examples

from .site import DAY, HOUR, T0, lease, ticket

DEVICES = 8
KINDS = frozenset({"a"})


class Told:
    """A scheduler whose tickets are told, when they are asked for and do not start at once."""

    def __init__(self, estimator: Estimator) -> None:
        self.scheduler = Scheduler()
        self.scheduler.set_capacity({"a": DEVICES})
        self.estimator = estimator
        self.first: dict[int, Estimate | None] = {}
        self._new: list[Waiting] = []

    def submit(self, waiting: Waiting) -> None:
        self._tell(waiting.asked_at)
        self._new.append(waiting)
        self.scheduler.submit(waiting)
        self.estimator.asked(waiting)

    def started(self, running: Running) -> None:
        self.scheduler.started(running)
        self.estimator.started(running)

    def ended(self, lease_id: str, at: float) -> None:
        self._tell(at)
        self.scheduler.ended(lease_id, at)

    def decide(self, now: float, free: Mapping[str, int]) -> Decision:
        return self.scheduler.decide(now, free)

    def _tell(self, before: float) -> None:
        new = {waiting.id for waiting in self._new if waiting.asked_at < before}
        if not new:
            return
        now = self._new[-1].asked_at
        self._new.clear()
        ahead = Ahead()
        for ticket_id in self.scheduler.in_line(now):
            devices = ahead.of(self.scheduler.waiting[ticket_id])
            if ticket_id in new:
                told = self.estimator.estimate(ticket_id, now, devices)
                self.first[int(ticket_id)] = told


def jobs(seed: int, count: int, load: float, at: float = T0) -> list[TraceJob]:
    """Sessions of an hour on average for 1 or 2 devices, by three groups, all day long."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        at += chance.expovariate(load * DEVICES / (1.25 * HOUR))
        devices = chance.choice((1, 1, 1, 2))
        group = chance.choice("xyz")
        duration = chance.expovariate(1 / HOUR)
        found.append(
            TraceJob(asked_at=at, duration=duration, devices=devices, group=group, kinds=KINDS)
        )
    return found


def play(those: Sequence[TraceJob], estimator: Estimator | None = None) -> tuple[Replayed, Told]:
    told = Told(estimator or Estimator())
    return replay(those, {"a": DEVICES}, told), told


def inside(
    played: Replayed, told: Told, which: Callable[[int], bool] = lambda at: True
) -> tuple[int, float]:
    """How many tickets were told when they start, and the part of them that was told right."""
    right = [
        estimate.low <= played.starts[at] <= estimate.high
        for at, estimate in told.first.items()
        if estimate is not None and which(at)
    ]
    return len(right), sum(right) / max(1, len(right))


@pytest.mark.parametrize("seed", [1, 2])
def test_eight_of_ten_start_within_what_they_were_told(seed: int) -> None:
    played, told = play(jobs(seed, 3000, 0.95))
    count, part = inside(played, told)
    assert count > 1000
    assert 0.75 < part < 0.88
    for group in "xyz":
        _, part = inside(played, told, lambda at, group=group: played.jobs[at].group == group)
        assert part > 0.7
    for devices in (1, 2):
        _, part = inside(played, told, lambda at, w=devices: played.jobs[at].devices == w)
        assert part > 0.7


def test_narrower_than_the_same_for_all() -> None:
    played, told = play(jobs(4, 3000, 0.95))
    waits = {at: played.starts[at] - played.jobs[at].asked_at for at in told.first}
    ordered = sorted(waits.values())
    same_for_all = ordered[int(0.8 * len(ordered))]
    widths = sorted(e.high - e.low for e in told.first.values() if e is not None)
    assert widths[len(widths) // 2] < 0.8 * same_for_all


def test_holds_when_twice_as_many_come() -> None:
    quiet = jobs(5, 1500, 0.8)
    busy = jobs(6, 1500, 1.1, at=quiet[-1].asked_at)
    played, told = play([*quiet, *busy])
    count, part = inside(played, told, lambda at: at >= len(quiet))
    assert count > 700
    assert part > 0.7


def test_silent_until_enough_have_started_and_never_after() -> None:
    _, told = play(jobs(7, 2000, 0.95))
    said = [told.first[at] is not None for at in sorted(told.first)]
    assert not any(said[:20])
    first = said.index(True)
    assert first < 100
    assert all(said[first:])


def test_history_speaks_for_a_new_estimator() -> None:
    past = jobs(8, 2000, 0.95)
    before, _ = play(past)
    history = [
        Waited(asked_at=j.asked_at, started_at=at, devices=j.devices, kinds=KINDS, group=j.group)
        for j, at in zip(before.jobs, before.starts, strict=True)
    ]
    random.Random(0).shuffle(history)
    estimator = Estimator()
    estimator.learn(history)
    played, told = play(jobs(9, 2000, 0.95, at=past[-1].asked_at + HOUR), estimator)
    assert all(told.first.values())
    assert 0.72 < inside(played, told)[1] < 0.9


def test_a_start_that_is_certain_ends_the_interval() -> None:
    estimator = Estimator()
    _, _ = play(jobs(10, 1000, 0.95), estimator)
    now = T0 + 400 * DAY
    estimator.asked(ticket("t", at=now))
    free = estimator.estimate("t", now, 40)
    assert free is not None
    latest = (free.low + free.likely) / 2
    bound = estimator.estimate("t", now, 40, latest)
    assert bound == Estimate(free.low, latest, latest)
    past = estimator.estimate("t", now, 40, now - HOUR)
    assert past == Estimate(now, now, now)


def test_more_ahead_is_a_later_start() -> None:
    estimator = Estimator()
    play(jobs(11, 1500, 0.95), estimator)
    now = T0 + 400 * DAY
    estimator.asked(ticket("t", at=now))
    likely = [estimator.estimate("t", now, ahead) for ahead in (0, 10, 100)]
    assert None not in likely
    moments = [estimate.likely for estimate in likely if estimate]
    assert moments == sorted(moments)
    assert len(set(moments)) == 3


def test_those_who_gave_up_count_for_as_long_as_they_waited() -> None:
    def high(every_other: str) -> float:
        estimator = Estimator()
        for n in range(400):
            at = T0 + n * 600
            estimator.asked(ticket(f"{n}", at=at))
            estimator.estimate(f"{n}", at, 5)
            if n % 2 and every_other == "leaves":
                estimator.withdrawn(f"{n}", at + 500)
                estimator.started(lease(f"another {n}", {"a": 1}, at=at + 500))
            else:
                waits = 500 if n % 2 and every_other == "starts late" else 200
                estimator.started(lease(f"{n}", {"a": 1}, at=at + waits))
        now = T0 + 400 * 600
        estimator.asked(ticket("now", at=now))
        told = estimator.estimate("now", now, 5)
        assert told is not None
        return told.high - now

    assert high("leaves") > 1.5 * high("starts early")
    assert high("leaves") > 0.9 * high("starts late")


def test_a_long_wait_proves_an_interval_wrong_before_it_ends() -> None:
    def high(stuck: int) -> float:
        estimator = Estimator()
        for n in range(300):
            at = T0 + n * 600
            estimator.asked(ticket(f"{n}", at=at))
            estimator.estimate(f"{n}", at, 5)
            if n < 300 - stuck:
                estimator.started(lease(f"{n}", {"a": 1}, at=at + 300))
        now = T0 + 3 * DAY
        estimator.asked(ticket("now", at=now))
        told = estimator.estimate("now", now, 5)
        assert told is not None
        return told.high - now

    assert high(stuck=150) > 2 * high(stuck=0)


def test_unknown_tickets_and_a_clock_that_is_set_back() -> None:
    estimator = Estimator()
    assert estimator.estimate("nobody", T0, 0) is None
    estimator.withdrawn("nobody", T0)
    play(jobs(12, 1000, 0.95), estimator)
    now = T0 + 2 * DAY
    estimator.asked(ticket("t", at=now))
    for moment in (now, now - HOUR, now - 30 * DAY, now + HOUR):
        told = estimator.estimate("t", moment, 3)
        assert told is not None
        assert moment <= told.low <= told.likely <= told.high
    estimator.started(lease("t", {"a": 1}, at=now - HOUR))
    assert estimator.estimate("t", now, 3) is None


event = st.tuples(
    st.sampled_from(["ask", "start", "withdraw", "estimate", "lease"]),
    st.integers(0, 15),
    st.integers(1, 64),
    st.floats(-HOUR, 5 * HOUR),
)


@settings(max_examples=examples(50))
@given(st.lists(event, min_size=30, max_size=200))
def test_in_order_and_never_in_the_past(events: list[tuple[str, int, int, float]]) -> None:
    estimator = Estimator()
    play(jobs(13, 150, 1.2), estimator)
    now = T0 + DAY
    for what, number, devices, passed in events:
        now += passed
        name = f"t{number}"
        if what == "ask":
            estimator.asked(ticket(name, devices, "ab"[: 1 + devices % 2], at=now))
        elif what == "start":
            estimator.started(lease(name, {"a": devices}, at=now))
        elif what == "lease":
            estimator.started(lease(f"lease {now}", {"b": devices}, at=now))
        elif what == "withdraw":
            estimator.withdrawn(name, now)
        told = estimator.estimate(name, now, devices)
        if told is not None:
            assert now <= told.low <= told.likely <= told.high < float("inf")


@given(
    st.lists(st.tuples(st.integers(1, 8), st.sets(st.sampled_from("abc"), min_size=1)), max_size=30)
)
def test_ahead_counts_devices_on_kinds_in_common(line: list[tuple[int, set[str]]]) -> None:
    ahead = Ahead()
    for place, (devices, kinds) in enumerate(line):
        expected = sum(d for d, k in line[:place] if k & kinds)
        assert ahead.of(ticket(f"{place}", devices, "".join(kinds))) == expected


def test_looking_often_changes_nothing() -> None:
    """Pages ask every second; what is learned must not depend on who looks."""
    seldom, often = Estimator(), Estimator()
    for estimator, looks in ((seldom, 1), (often, 50)):
        for n in range(300):
            at = T0 + n * 600
            estimator.asked(ticket(f"{n}", at=at))
            for _ in range(looks):
                estimator.estimate(f"{n}", at, 5)
            estimator.started(lease(f"{n}", {"a": 1}, at=at + 100 + n % 7 * 50))
        estimator.asked(ticket("now", at=T0 + 5 * DAY))
    assert seldom.estimate("now", T0 + 5 * DAY, 5) == often.estimate("now", T0 + 5 * DAY, 5)
