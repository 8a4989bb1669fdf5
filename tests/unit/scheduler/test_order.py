"""Who goes before whom, and why. Real: the scheduler, as the broker uses it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.queue.models import EndedSession, Priority, QueuePolicy, Ranked, Waiting
from gpuspawner.queue.scheduler import Scheduler
from tests.unit.scheduler.site import DAY, HOUR, T0, lease, ticket


def line(scheduler: Scheduler, now: float = T0 + HOUR) -> list[str]:
    return [ranked.id for ranked in scheduler.order(now)]


def of(*tickets: Waiting, **settings: Any) -> Scheduler:
    scheduler = Scheduler(**settings)
    scheduler.set_capacity({"a": 4})
    for each in tickets:
        scheduler.submit(each)
    return scheduler


def used(member: str, hours: float, ago: float = 1.0, group: str = "") -> EndedSession:
    """A session of one device that ended so many hours ago."""
    end = T0 - ago * HOUR
    return EndedSession(
        member=member, group=group, devices=1, started_at=end - hours * HOUR, ended_at=end
    )


def part(ranked: Ranked, name: str) -> float:
    return next(p.points for p in ranked.parts if p.name == name)


def test_equal_requests_go_by_age() -> None:
    scheduler = of(ticket("b", at=T0 + 1), ticket("a", at=T0), ticket("c", at=T0 + 2))

    assert line(scheduler) == ["a", "b", "c"]


def test_newcomers_go_before_those_who_used_much_of_late() -> None:
    scheduler = of()
    scheduler.learn([used("heavy", hours=100), used("newcomer's friend", hours=8)])
    scheduler.submit(ticket("late", member="newcomer", at=T0 + 600, seconds=8 * HOUR))
    scheduler.submit(ticket("early", member="heavy", at=T0, seconds=8 * HOUR))

    assert line(scheduler) == ["late", "early"]


def test_what_runs_counts_as_use_from_its_start() -> None:
    scheduler = of()
    scheduler.started(lease("running", {"a": 3}, T0 - 5 * DAY, member="busy"))
    for name, member in (("one", "busy"), ("two", "idle")):
        scheduler.submit(ticket(name, member=member, at=T0))

    assert line(scheduler) == ["two", "one"]


def test_use_fades_with_the_half_life() -> None:
    scheduler = of(policy=QueuePolicy(half_life_seconds=DAY))
    scheduler.learn([used("member", hours=24)])
    scheduler.submit(ticket("t", member="member", at=T0))
    now = part(scheduler.order(T0)[0], "share of the member")
    later = part(scheduler.order(T0 + DAY)[0], "share of the member")

    assert now < 0.0
    assert later == pytest.approx(now / 2)


def test_a_share_is_one_of_the_capacity_and_not_of_what_others_use() -> None:
    """Who is alone is not punished for it: a tenth of the site costs a tenth of the points."""
    points = []
    for others in (0, 500):
        scheduler = of()
        scheduler.learn([used("alone", hours=20)] + [used(f"m{n}", 1) for n in range(others)])
        scheduler.submit(ticket("t", member="alone", at=T0))
        points.append(part(scheduler.order(T0)[0], "share of the member"))
    small, large = of(), of()
    large.set_capacity({"a": 8})
    for scheduler in (small, large):
        scheduler.learn([used("alone", hours=20)])
        scheduler.submit(ticket("t", member="alone", at=T0))

    assert points[0] == points[1]
    of_four, of_eight = (part(s.order(T0)[0], "share of the member") for s in (small, large))
    assert of_four == pytest.approx(2 * of_eight)


def test_a_group_of_twice_the_weight_may_use_twice_as_much() -> None:
    scheduler = of(group_weights={"research": 2.0})
    scheduler.learn([used("", 40, group="research"), used("", 20, group="course")])
    scheduler.submit(ticket("r", group="research", at=T0))
    scheduler.submit(ticket("c", group="course", at=T0))
    shares = {r.id: part(r, "share of the group") for r in scheduler.order(T0)}

    assert shares["r"] == pytest.approx(shares["c"], rel=0.05)


def test_a_class_goes_before_every_size_and_share_of_the_one_below() -> None:
    scheduler = of()
    scheduler.learn([used("heavy", hours=2000)])
    scheduler.submit(ticket("low", seconds=60.0, priority=Priority.LOW))
    scheduler.submit(ticket("small", seconds=60.0))
    scheduler.submit(ticket("course", 4, seconds=9 * DAY, priority=Priority.COURSE))
    scheduler.submit(ticket("admin", 4, member="heavy", seconds=9 * DAY, priority=Priority.ADMIN))

    assert line(scheduler) == ["admin", "course", "small", "low"]


def test_waiting_wins_over_a_class_in_the_end() -> None:
    policy = QueuePolicy()
    scheduler = of(ticket("low", at=T0, seconds=9 * DAY, priority=Priority.LOW))
    overdue = T0 + policy.overdue_seconds
    scheduler.submit(ticket("admin", at=overdue - HOUR, seconds=60.0, priority=Priority.ADMIN))

    assert line(scheduler, overdue - 1) == ["admin", "low"]
    assert line(scheduler, overdue + 1) == ["low", "admin"]


def test_small_requests_go_first_and_waiting_makes_up_for_size_but_no_more() -> None:
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


def test_positions_boosts_and_the_last() -> None:
    scheduler = of(
        ticket("plain", at=T0),
        ticket("boosted", at=T0 + 60, boost=5.0),
        ticket("second", at=T0 + 60, position=2),
        ticket("first", at=T0 + 60, position=1),
        ticket("last", at=T0 - HOUR, last=True),
    )

    assert line(scheduler) == ["first", "second", "boosted", "plain", "last"]


def test_also_the_last_get_their_turn() -> None:
    scheduler = of(ticket("last", at=T0, last=True), ticket("plain", at=T0 + 6 * DAY))

    assert line(scheduler, T0 + QueuePolicy().overdue_seconds + HOUR) == ["last", "plain"]


def test_a_replaced_ticket_counts_as_it_is_now() -> None:
    scheduler = of(ticket("a"), ticket("b", at=T0 + 1))
    scheduler.submit(ticket("b", at=T0 + 1, boost=9.0))
    scheduler.submit(ticket("b", at=T0 + 1, boost=9.0))

    assert line(scheduler) == ["b", "a"]
    assert len(scheduler.waiting) == 2


def test_who_is_gone_is_no_error() -> None:
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
def test_scores_are_the_sums_of_their_parts_and_fall_along_the_line(
    waiting: list[Waiting], history: list[EndedSession], later: float
) -> None:
    scheduler = of()
    scheduler.learn(history)
    for each in waiting:
        scheduler.submit(each)
    ranked = scheduler.order(T0 + later)
    scheduler_line = scheduler.in_line(T0 + later)

    assert [r.id for r in ranked] == scheduler_line
    assert sorted(scheduler_line) == sorted({each.id for each in waiting})
    for place, each in enumerate(ranked, start=1):
        assert each.place == place == scheduler.place(each.id, T0 + later)
        assert each.score == pytest.approx(sum(p.points for p in each.parts))
        assert all(p.points >= 0 for p in each.parts if p.name == "waiting")
    if later >= 0:
        for before, after in itertools.pairwise(ranked):
            assert before.score >= after.score - 1e-6
