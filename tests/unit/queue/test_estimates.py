"""When a ticket will probably start. Real: scheduler and estimator; sessions are random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuspawner.queue.estimates import DevicesAhead, Estimator, PastWait
from gpuspawner.queue.models import Decision, Estimate, RunningLease, WaitingTicket
from gpuspawner.queue.replay import ReplayResult, TraceJob, replay_trace
from gpuspawner.queue.scheduler import Scheduler
from tests.support.tier import examples
from tests.unit.queue.site import DAY, HOUR, T0, lease, ticket

DEVICES = 8
KINDS = frozenset({"a"})


class Told:
    """A scheduler whose tickets are told, when they are asked for and do not start at once."""

    def __init__(self, estimator: Estimator) -> None:
        self.scheduler = Scheduler()
        self.scheduler.set_capacity({"a": DEVICES})
        self.estimator = estimator
        self.first: dict[int, Estimate | None] = {}
        self._new: list[WaitingTicket] = []

    def submit(self, waiting: WaitingTicket) -> None:
        self._tell(waiting.asked_at)
        self._new.append(waiting)
        self.scheduler.submit(waiting)
        self.estimator.asked(waiting)

    def started(self, running: RunningLease) -> None:
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
        ahead = DevicesAhead()
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


def play(
    those: Sequence[TraceJob], estimator: Estimator | None = None
) -> tuple[ReplayResult, Told]:
    told = Told(estimator or Estimator())
    return replay_trace(those, {"a": DEVICES}, told), told


def inside(
    played: ReplayResult, told: Told, which: Callable[[int], bool] = lambda at: True
) -> tuple[int, float]:
    """How many tickets were told when they start, and the part of them that was told right."""
    right = [
        estimate.low <= played.starts[at] <= estimate.high
        for at, estimate in told.first.items()
        if estimate is not None and which(at)
    ]
    return len(right), sum(right) / max(1, len(right))


def test_estimates_cover_eight_of_ten_starts_after_warm_up() -> None:
    played, told = play(jobs(1, 2600, 0.95))
    count, part = inside(played, told)
    assert count > 1000
    assert 0.75 < part < 0.88
    for field, values in (("group", "xyz"), ("devices", (1, 2))):
        for value in values:
            which = {at for at, job in enumerate(played.jobs) if getattr(job, field) == value}
            assert inside(played, told, which.__contains__)[1] > 0.7

    # Silent until enough have started, and never after.
    said = [told.first[at] is not None for at in sorted(told.first)]
    first = said.index(True)
    assert 20 <= first < 100 and all(said[first:])

    # Narrower than the same for all.
    waits = sorted(played.starts[at] - played.jobs[at].asked_at for at in told.first)
    widths = sorted(e.high - e.low for e in told.first.values() if e is not None)
    assert widths[len(widths) // 2] < 0.8 * waits[int(0.8 * len(waits))]


def test_estimates_stay_accurate_when_load_increases() -> None:
    quiet = jobs(5, 1500, 0.8)
    busy = jobs(6, 1500, 1.1, at=quiet[-1].asked_at)
    played, told = play([*quiet, *busy])
    count, part = inside(played, told, lambda at: at >= len(quiet))
    assert count > 700
    assert part > 0.7


def test_new_estimator_is_accurate_after_learning_history() -> None:
    past = jobs(8, 1200, 0.95)
    before, _ = play(past)
    history = [
        PastWait(asked_at=j.asked_at, started_at=at, devices=j.devices, kinds=KINDS, group=j.group)
        for j, at in zip(before.jobs, before.starts, strict=True)
    ]
    random.Random(0).shuffle(history)
    estimator = Estimator()
    estimator.learn(history)
    played, told = play(jobs(9, 1500, 0.95, at=past[-1].asked_at + HOUR), estimator)
    assert all(told.first.values())
    assert 0.72 < inside(played, told)[1] < 0.9


def test_estimate_ends_at_certain_start_and_grows_with_queue() -> None:
    estimator = Estimator()
    play(jobs(10, 1000, 0.95), estimator)
    now = T0 + 400 * DAY
    estimator.asked(ticket("t", at=now))
    free = estimator.estimate("t", now, 40)
    assert free is not None
    latest = (free.low + free.likely) / 2
    assert estimator.estimate("t", now, 40, latest) == Estimate(free.low, latest, latest)
    assert estimator.estimate("t", now, 40, now - HOUR) == Estimate(now, now, now)

    told = [estimator.estimate("t", now, ahead) for ahead in (0, 10, 100)]
    moments = [estimate.likely for estimate in told if estimate is not None]
    assert moments == sorted(set(moments)) and len(moments) == 3


def high_after(stuck: int = 0, every_other: str = "starts early", looks: int = 1) -> float:
    """How long the newest is told at most, after 400 of whom every other does so, or some wait."""
    estimator = Estimator()
    for n in range(400):
        name, at = f"{n}", T0 + n * 600
        estimator.asked(ticket(name, at=at))
        for _ in range(looks):
            estimator.estimate(name, at, 5)
        if n >= 400 - stuck:
            continue
        if n % 2 and every_other == "leaves":
            estimator.withdrawn(name, at + 500)
            estimator.started(lease(f"another {n}", {"a": 1}, at=at + 500))
        else:
            waits = 500 if n % 2 and every_other == "starts late" else 200 + n % 7
            estimator.started(lease(name, {"a": 1}, at=at + waits))
    now = T0 + 4 * DAY if stuck else T0 + 400 * 600
    estimator.asked(ticket("now", at=now))
    told = estimator.estimate("now", now, 5)
    assert told is not None
    return told.high - now


def test_estimates_count_waiting_and_withdrawn_tickets_not_views() -> None:
    assert high_after(every_other="leaves") > 1.5 * high_after()
    assert high_after(every_other="leaves") > 0.9 * high_after(every_other="starts late")
    assert high_after(stuck=200) > 2 * high_after()
    # Pages ask every second; what is learned must not depend on who looks.
    assert high_after(looks=50) == high_after()


event = st.tuples(
    st.sampled_from(["ask", "start", "withdraw", "estimate", "lease"]),
    st.integers(0, 15),
    st.integers(1, 64),
    st.floats(-HOUR, 5 * HOUR),
)


@settings(max_examples=examples(25))
@given(st.lists(event, min_size=30, max_size=200))
def test_estimates_are_ordered_and_never_in_the_past(
    events: list[tuple[str, int, int, float]],
) -> None:
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
def test_devices_ahead_are_counted_by_common_kinds(line: list[tuple[int, set[str]]]) -> None:
    ahead = DevicesAhead()
    for place, (devices, kinds) in enumerate(line):
        expected = sum(d for d, k in line[:place] if k & kinds)
        assert ahead.of(ticket(f"{place}", devices, "".join(kinds))) == expected
