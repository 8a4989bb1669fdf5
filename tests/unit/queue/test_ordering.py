"""Who goes before whom, and why. Real: the scheduler; slow sums check what counts as use."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.queue.models import (
    EndedSession,
    Priority,
    QueuePolicy,
    RankedTicket,
    WaitingTicket,
)
from gpuspawner.queue.ordering import FairShareUse
from gpuspawner.queue.rank import compare
from gpuspawner.queue.scheduler import Scheduler
from tests.unit.queue.site import DAY, HOUR, T0, lease, scheduler_of, ticket


def line(scheduler: Scheduler, now: float = T0 + HOUR) -> list[str]:
    return [ranked.id for ranked in scheduler.order(now)]


def of(*tickets: WaitingTicket, **settings: Any) -> Scheduler:
    return scheduler_of(*tickets, capacity={"a": 4}, **settings)


def used(member: str, hours: float, ago: float = 1.0, group: str = "") -> EndedSession:
    """A session of one device that ended so many hours ago."""
    end = T0 - ago * HOUR
    return EndedSession(
        member=member, group=group, devices=1, started_at=end - hours * HOUR, ended_at=end
    )


def part(ranked: RankedTicket, name: str) -> float:
    return next(p.points for p in ranked.parts if p.name == name)


def test_newcomers_go_before_past_and_current_heavy_users() -> None:
    past, now = of(), of()
    past.learn([used("heavy", hours=100), used("newcomer's friend", hours=8)])
    now.started(lease("running", {"a": 3}, T0 - 5 * DAY, member="heavy"))
    for scheduler in (past, now):
        scheduler.submit(ticket("late", member="newcomer", at=T0 + 600, seconds=8 * HOUR))
        scheduler.submit(ticket("early", member="heavy", at=T0, seconds=8 * HOUR))
        assert line(scheduler) == ["late", "early"]


def share(scheduler: Scheduler, now: float = T0) -> float:
    return part(scheduler.order(now)[0], "share of the member")


def test_past_use_fades_with_its_half_life() -> None:
    scheduler = of(policy=QueuePolicy(half_life_seconds=DAY))
    scheduler.learn([used("member", hours=24)])
    scheduler.submit(ticket("t", member="member"))
    now = share(scheduler)

    assert now < 0.0
    assert share(scheduler, T0 + DAY) == pytest.approx(now / 2)


def test_fair_share_is_relative_to_capacity_not_other_use() -> None:
    """Who is alone is not punished for it: a tenth of the site costs a tenth of the points."""

    def lost(others: int = 0, capacity: int = 4) -> float:
        scheduler = scheduler_of(capacity={"a": capacity})
        scheduler.learn([used("alone", hours=20)] + [used(f"m{n}", 1) for n in range(others)])
        scheduler.submit(ticket("t", member="alone"))
        return share(scheduler)

    assert 0 > lost() == lost(others=500)
    assert lost() == pytest.approx(2 * lost(capacity=8))


def test_group_with_double_weight_may_use_twice_as_much() -> None:
    scheduler = of(group_weights={"research": 2.0})
    scheduler.learn([used("", 40, group="research"), used("", 20, group="course")])
    scheduler.submit(ticket("r", group="research", at=T0))
    scheduler.submit(ticket("c", group="course", at=T0))
    shares = {r.id: part(r, "share of the group") for r in scheduler.order(T0)}

    assert shares["r"] == pytest.approx(shares["c"], rel=0.05)


def test_priority_class_wins_until_a_ticket_is_overdue() -> None:
    scheduler = of()
    scheduler.learn([used("heavy", hours=2000)])
    scheduler.submit(ticket("low", seconds=60.0, priority=Priority.LOW))
    scheduler.submit(ticket("small", seconds=60.0))
    scheduler.submit(ticket("course", 4, seconds=9 * DAY, priority=Priority.COURSE))
    scheduler.submit(ticket("admin", 4, member="heavy", seconds=9 * DAY, priority=Priority.ADMIN))

    assert line(scheduler) == ["admin", "course", "small", "low"]

    policy = QueuePolicy()
    scheduler = of(ticket("low", at=T0, seconds=9 * DAY, priority=Priority.LOW))
    overdue = T0 + policy.overdue_seconds
    scheduler.submit(ticket("admin", at=overdue - HOUR, seconds=60.0, priority=Priority.ADMIN))

    assert line(scheduler, overdue - 1) == ["admin", "low"]
    assert line(scheduler, overdue + 1) == ["low", "admin"]


def test_small_requests_go_first_and_waiting_offsets_size() -> None:
    policy = QueuePolicy()
    scheduler = of()
    hours = {"small": 1.0, "large": 2 * policy.level_gpu_hours, "long": 8 * policy.level_gpu_hours}
    for member, each in hours.items():
        scheduler.learn(9 * [used(member, each, ago=2000)])
    scheduler.submit(ticket("long", member="long", seconds=None, at=T0))
    scheduler.submit(ticket("large", member="large", seconds=None, at=T0 + HOUR))
    # A point each: twice and eight times as large as what has none.
    level = T0 + 3.1 * policy.waiting_point_seconds + HOUR

    assert line(scheduler, T0 + 2 * HOUR) == ["large", "long"]
    assert line(scheduler, level) == ["long", "large"]

    scheduler.submit(ticket("small", member="small", seconds=None, at=level - 60))

    assert line(scheduler, level) == ["small", "long", "large"]


def test_queue_orders_by_position_boost_and_age_then_last() -> None:
    scheduler = of(
        ticket("plain", at=T0),
        ticket("later", at=T0 + 1),
        ticket("boosted", at=T0 + 60, boost=5.0),
        ticket("second", at=T0 + 60, position=2),
        ticket("first", at=T0 + 60, position=1),
        ticket("last", at=T0 - HOUR, last=True),
    )
    assert line(scheduler) == ["first", "second", "boosted", "plain", "later", "last"]
    scheduler = of(ticket("last", at=T0, last=True), ticket("plain", at=T0 + 6 * DAY))
    assert line(scheduler, T0 + QueuePolicy().overdue_seconds + HOUR) == ["last", "plain"]


def test_resubmitted_ticket_is_updated_and_unknown_ids_ignored() -> None:
    scheduler = of(ticket("a"), ticket("b", at=T0 + 1))
    scheduler.submit(ticket("b", at=T0 + 1, boost=9.0))
    scheduler.submit(ticket("b", at=T0 + 1, boost=9.0))

    assert line(scheduler) == ["b", "a"]
    assert len(scheduler.waiting) == 2

    scheduler = of(ticket("a"))
    scheduler.withdraw("nobody")
    scheduler.ended("nobody", T0)
    scheduler.extended("nobody", T0)
    scheduler.withdraw("a")
    scheduler.withdraw("a")

    assert scheduler.order(T0) == [] and scheduler.in_line(T0) == []
    assert scheduler.place("a", T0) == 0
    assert scheduler.decide(T0, {"a": 4}).starts == ()


tickets = st.builds(
    lambda n, member, at, seconds, devices, extra: ticket(
        f"t{n}", devices, at=T0 - at, member=f"m{member}", seconds=seconds, **extra
    ),
    st.integers(0, 40),
    st.integers(0, 4),
    st.floats(0, 8 * DAY),
    st.none() | st.floats(60, 5 * DAY),
    st.integers(1, 4),
    st.fixed_dictionaries(
        {},
        optional={
            "group": st.sampled_from(["", "lab", "course"]),
            "priority": st.sampled_from(Priority),
            "boost": st.floats(-50, 50),
            "position": st.integers(-3, 9),
            "last": st.booleans(),
        },
    ),
)
histories = st.lists(
    st.builds(used, st.sampled_from(["m0", "m1"]), st.floats(0, 99), st.floats(0, 99)), max_size=9
)


@given(st.lists(tickets, max_size=25), histories, st.floats(-DAY, 3 * DAY))
def test_scores_sum_their_parts_and_fall_along_the_queue(
    waiting: list[WaitingTicket], history: list[EndedSession], later: float
) -> None:
    scheduler = of()
    scheduler.learn(history)
    for each in waiting:
        scheduler.submit(each)
    ranked = scheduler.order(T0 + later)
    scheduler_line = scheduler.in_line(T0 + later)

    assert [r.id for r in ranked] == scheduler_line
    assert sorted(scheduler_line) == sorted({each.id for each in waiting})
    for place, one in enumerate(ranked, start=1):
        assert one.place == place == scheduler.place(one.id, T0 + later)
        assert one.score == pytest.approx(sum(p.points for p in one.parts))
        assert all(p.points >= 0 for p in one.parts if p.name == "waiting")
    if later >= 0:
        for before, after in itertools.pairwise(ranked):
            assert before.score >= after.score - 1e-6


# Past use.

sessions = st.lists(
    st.tuples(st.integers(1, 8), st.integers(0, 60 * 24), st.integers(0, 20 * 24)), max_size=8
)


@given(sessions, st.integers(0, 30 * 24))
def test_fair_share_use_sums_decayed_device_hours(
    held: list[tuple[int, int, int]], later: int
) -> None:
    """Against a sum over steps of six minutes, up to the last of the sessions and on."""
    half_life = 7 * DAY
    use = FairShareUse(half_life)
    changes = sorted(
        change
        for devices, start, hours in held
        for change in ((start, devices), (start + hours, -devices))
    )
    for at, devices in changes:
        use.change("m", devices, T0 + at * HOUR)
    now = T0 + (max([at for at, _ in changes], default=0) + later) * HOUR
    step = 360.0
    expected = 0.0
    for devices, start, hours in held:
        for n in range(hours * 10):
            age = now - (T0 + start * HOUR + (n + 0.5) * step)
            expected += devices * step * math.pow(0.5, age / half_life)

    assert use.of("m", now) == pytest.approx(expected, rel=1e-3, abs=1e-2)


def test_fair_share_use_of_a_permanent_lease_levels_off() -> None:
    use = FairShareUse(DAY)
    use.change("m", 3, T0)

    assert use.of("m", T0) == pytest.approx(0.0, abs=1e-3)
    assert use.of("m", T0 + 90 * DAY) == pytest.approx(3 * use.full)
    assert use.of("nobody", T0) == 0.0


@given(st.lists(st.tuples(st.integers(-3, 3), st.floats(-1e12, 1e12)), max_size=20))
def test_fair_share_use_accepts_any_date(changes: list[tuple[int, float]]) -> None:
    use = FairShareUse(DAY)
    for devices, at in changes:
        use.change("m", devices, at)
        assert use.of("m", at) >= 0.0 and not math.isnan(use.of("m", -at))


# Why one goes before another.


others = st.builds(
    WaitingTicket,
    id=st.uuids().map(str),
    member=st.sampled_from(["anna", "bert"]),
    group=st.sampled_from(["", "research"]),
    devices=st.integers(1, 8),
    kinds=st.just(frozenset({"A100"})),
    asked_at=st.floats(T0 - 40 * 86400, T0),
    seconds=st.none() | st.floats(60, 86400),
    priority=st.sampled_from(Priority),
    boost=st.floats(-1e6, 1e6),
    position=st.none() | st.integers(1, 9),
    last=st.booleans(),
)


@given(one=others, other=others)
def test_score_differences_add_up_to_the_total(one: WaitingTicket, other: WaitingTicket) -> None:
    weights = {"research": 2}
    scheduler = scheduler_of(one, other, capacity={"A100": 8}, group_weights=weights)
    first, second = scheduler.order(T0)
    found = compare(second, first)
    assert (found.first, found.second) == (first, second), "in whichever order they are given"
    assert sum(some.points for some in found.differences) == pytest.approx(found.points, abs=1e-3)
    named = [some.name for some in found.differences]
    assert sorted(named) == sorted({part.name for part in (*first.parts, *second.parts)})
    sizes = [abs(some.points) for some in found.differences]
    assert sizes == sorted(sizes, reverse=True)
