"""Who starts: planned starts, kinds, limits, releases, policy. Real: the scheduler."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from gpuspawner.queue.models import EndedSession, Priority, QueueLimits, QueuePolicy
from tests.unit.queue.site import DAY, HOUR, T0, Site, lease, scheduler_of, ticket


def ended(member: str, at: float, seconds: float) -> EndedSession:
    return EndedSession(member=member, devices=1, started_at=at, ended_at=at + seconds)


def test_decision_does_not_change_the_scheduler() -> None:
    scheduler = scheduler_of(*(ticket(f"t{n}", at=T0 + n) for n in range(6)), capacity={"a": 4})
    first = scheduler.decide(T0 + 60, {"a": 4}, planned=3)

    assert first.starts == ("t0", "t1", "t2", "t3")
    assert scheduler.decide(T0 + 60, {"a": 4}, planned=3) == first
    assert len(scheduler.waiting) == 6 and not scheduler.running
    for nothing in ({}, {"a": 0}, {"b": 9}):
        assert scheduler.decide(T0 + 60, nothing).starts == ()
    assert scheduler_of(capacity={"a": 4}).decide(T0, {"a": 4}).starts == ()


def test_planned_start_uses_the_kind_that_frees_first() -> None:
    scheduler = scheduler_of(capacity={"a": 2, "b": 2})
    scheduler.started(lease("on a", {"a": 2}, ends_at=T0 + 9 * HOUR))
    scheduler.started(lease("on b", {"b": 1}, ends_at=T0 + HOUR))
    scheduler.submit(ticket("wide", 2, kinds="ab", priority=Priority.COURSE))
    scheduler.submit(ticket("short", kinds="ab", at=T0 + 1, seconds=HOUR))
    scheduler.submit(ticket("long", kinds="b", at=T0 + 2, seconds=2 * HOUR))
    decision = scheduler.decide(T0, {"b": 1})

    assert decision.planned == {"wide": T0 + HOUR}
    assert decision.starts == ("short",)


def test_unknown_session_ends_are_estimated_from_history() -> None:
    scheduler = scheduler_of(capacity={"a": 2})
    scheduler.learn(ended("m", T0 - DAY + n, 2 * HOUR) for n in range(5))
    scheduler.started(lease("running", {"a": 1}, member="m"))
    scheduler.submit(ticket("wide", 2, priority=Priority.COURSE))

    assert scheduler.decide(T0, {"a": 1}).planned == {"wide": pytest.approx(T0 + 2 * HOUR)}
    later = T0 + 3 * HOUR
    assert scheduler.decide(later, {"a": 1}).planned["wide"] > later


def test_overdue_session_is_not_expected_to_end_at_once() -> None:
    scheduler = scheduler_of(capacity={"a": 2})
    scheduler.started(lease("stuck", {"a": 1}, ends_at=T0))
    scheduler.submit(ticket("wide", 2, priority=Priority.COURSE))
    scheduler.submit(ticket("short", at=T0 + 1, seconds=HOUR))

    assert scheduler.decide(T0 + 60, {"a": 1}).starts == ()
    assert scheduler.decide(T0 + 2 * HOUR, {"a": 1}).starts == ("short",)


def test_extension_moves_the_planned_start() -> None:
    scheduler = scheduler_of(capacity={"a": 2})
    scheduler.started(lease("running", {"a": 2}, ends_at=T0 + HOUR))
    for name in ("first", "second", "third"):
        scheduler.submit(ticket(name, at=T0 + len(name), seconds=2 * HOUR))
    before = scheduler.decide(T0, {}, planned=3).planned
    scheduler.extended("running", T0 + 3 * HOUR)
    after = scheduler.decide(T0, {}, planned=3).planned
    scheduler.extended("running", T0 + HOUR)

    assert sorted(before.values()) == [T0 + HOUR, T0 + HOUR, T0 + 3 * HOUR]
    assert {name: at - 2 * HOUR for name, at in after.items()} == before
    assert scheduler.decide(T0, {}, planned=3).planned == before


def test_overdue_ticket_is_planned_without_blocking_other_starts() -> None:
    policy = QueuePolicy()
    scheduler = scheduler_of(capacity={"a": 20}, policy=policy)
    now = T0 + policy.overdue_seconds
    scheduler.started(lease("running", {"a": 10}, at=now - HOUR, ends_at=now + 9 * DAY))
    scheduler.submit(ticket("old", 12, at=T0, seconds=DAY, priority=Priority.LOW))
    scheduler.submit(ticket("guess", at=now - 60, seconds=None, priority=Priority.ADMIN))
    scheduler.submit(ticket("known", at=now - 60, seconds=DAY, priority=Priority.ADMIN))
    decision = scheduler.decide(now, {"a": 10})

    assert decision.planned["old"] == now + 9 * DAY
    # Eight are left over at the planned start, and who is known to end before needs none.
    assert set(decision.starts) == {"guess", "known"}
    crowd = [ticket(f"g{n}", at=now - 60 + n, seconds=None) for n in range(12)]
    for each in crowd:
        scheduler.submit(each)
    starts = scheduler.decide(now, {"a": 10}).starts
    assert "known" in starts and sum(name.startswith("g") for name in starts) == 8


def test_overdue_tickets_get_only_their_share_of_capacity() -> None:
    policy = QueuePolicy(overdue_share=0.25)
    site = Site(
        scheduler_of(capacity={"a": 8}, policy=policy), {"a": 8}, now=T0 + policy.overdue_seconds
    )
    for n in range(6):
        site.scheduler.submit(ticket(f"old{n}", at=T0 - n, seconds=5 * DAY, priority=Priority.LOW))
        site.scheduler.submit(ticket(f"new{n}", at=site.now - 60, seconds=60.0))
    starts = site.step().starts

    assert starts[:2] == ("old5", "old4")
    assert {*starts[2:]} == {f"new{n}" for n in range(6)}


def test_some_devices_are_reserved_for_small_requests() -> None:
    scheduler = scheduler_of(capacity={"a": 200})
    scheduler.learn(9 * [ended("long", T0 - 90 * DAY, 30 * HOUR)])
    scheduler.learn(9 * [ended("short", T0 - 90 * DAY, 60.0)])
    for n in range(200):
        scheduler.submit(ticket(f"long{n}", at=T0 + n, member="long", seconds=None))
    scheduler.submit(ticket("short", at=T0 + 999, member="short", seconds=None))
    starts = scheduler.decide(T0 + 1000, {"a": 200}).starts

    assert starts[0] == "short"
    assert len(starts) == 200 - int(QueuePolicy().small_share * 200)
    alone = scheduler_of(ticket("all", 200, seconds=5 * DAY), capacity={"a": 200})
    assert alone.decide(T0, {"a": 200}).starts == ("all",), "who needs nearly all is not kept by it"


# Limits.


def test_member_at_the_limit_waits_and_others_start() -> None:
    scheduler = scheduler_of(capacity={"a": 4}, member_limits=QueueLimits(devices=2))
    scheduler.started(lease("one", {"a": 1}, member="m"))
    for n in range(3):
        scheduler.submit(ticket(f"m{n}", member="m", at=T0 + n))
    scheduler.submit(ticket("other", member="o", at=T0 + 9))
    decision = scheduler.decide(T0 + 10, {"a": 3}, reasons=True)

    assert set(decision.starts) == {"m0", "other"}
    sentence = "The member may have 2 GPUs at once and has 2."
    assert decision.held_back == dict.fromkeys(("m1", "m2"), sentence)
    scheduler.ended("one", T0 + 60)
    assert set(scheduler.decide(T0 + 60, {"a": 4}).starts) == {"m0", "m1", "other"}
    closed = scheduler_of(ticket("t"), capacity={"a": 1}, member_limits=QueueLimits(devices=0))
    nothing_free = closed.decide(T0, {"a": 0}, reasons=True)
    assert "may have 0 GPUs" in nothing_free.held_back["t"]


def test_group_members_share_their_device_limit() -> None:
    scheduler = scheduler_of(capacity={"a": 8}, group_limits={"guests": QueueLimits(devices=3)})
    for n in range(4):
        scheduler.submit(ticket(f"g{n}", member=f"m{n}", group="guests", at=T0 + n))
    scheduler.submit(ticket("free", group="staff", at=T0 + 9))
    decision = scheduler.decide(T0 + 10, {"a": 8}, reasons=True)

    assert set(decision.starts) == {"g0", "g1", "g2", "free"}
    assert decision.held_back == {"g3": "The group may have 3 GPUs at once and has 3."}


def test_held_gpu_hours_decrease_as_time_passes() -> None:
    scheduler = scheduler_of(capacity={"a": 4}, member_limits=QueueLimits(gpu_hours=10.0))
    scheduler.started(lease("one", {"a": 2}, member="m", ends_at=T0 + 4 * HOUR))
    scheduler.submit(ticket("t", member="m", seconds=4 * HOUR))
    decision = scheduler.decide(T0, {"a": 2}, reasons=True)

    assert decision.held_back == {
        "t": "The member may hold 10 GPU-hours and holds 8.0; this request is for 4.0."
    }
    assert scheduler.decide(T0 + HOUR - 1, {"a": 2}).starts == ()
    assert scheduler.decide(T0 + HOUR, {"a": 2}).starts == ("t",)
    scheduler.extended("one", T0 + 5 * HOUR)
    assert scheduler.decide(T0 + HOUR, {"a": 2}).starts == ()


def test_limited_wide_request_does_not_reserve_devices() -> None:
    scheduler = scheduler_of(capacity={"a": 4}, member_limits=QueueLimits(devices=2))
    scheduler.started(lease("running", {"a": 2}, ends_at=T0 + HOUR))
    scheduler.submit(ticket("wide", 4, priority=Priority.ADMIN))
    scheduler.submit(ticket("long", at=T0 + 1, seconds=9 * HOUR))

    assert scheduler.decide(T0, {"a": 2}).starts == ("long",)


def test_lease_with_its_own_id_removes_its_ticket() -> None:
    scheduler = scheduler_of(capacity={"a": 2})
    scheduler.submit(ticket("t", member="m"))
    scheduler.started(lease("lease", {"a": 1}, member="m", ticket_id="t"))

    assert not scheduler.waiting and set(scheduler.running) == {"lease"}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("half_life_seconds", [0, -1]),
        ("overdue_seconds", [math.nan]),
        ("waiting_point_seconds", [math.inf]),
        ("level_gpu_hours", ["four"]),
        ("samples", [0, 2.5]),
        ("small_share", [-0.1]),
        ("member_share_points", [True]),
    ],
)
def test_invalid_queue_policy_parameter_is_named(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=name):
            QueuePolicy(**{name: value})
    zero: dict[str, Any] = dict.fromkeys(("small_share", "member_share_points", "overdue_share"), 0)
    assert QueuePolicy(**zero).small_share == 0


def test_tickets_that_were_only_tried_teach_nothing() -> None:
    """Each process tries other ones, and all have to show the same expected starts."""

    def shown(trials: int) -> tuple[object, object]:
        scheduler = scheduler_of(capacity={"a": 1})
        for number in range(6):
            at = T0 + number * HOUR
            scheduler.started(lease(f"l{number}", {"a": 1}, at=at, member="ada"))
            scheduler.ended(f"l{number}", at + 600)
        now = T0 + DAY
        asked = ticket("one", member="ada", seconds=None, at=now)
        for _ in range(trials):
            with scheduler.trying(replace(asked, id="tried")):
                assert scheduler.decide(now, {"a": 0}).starts == ()
        scheduler.submit(asked)
        scheduler.submit(ticket("two", member="bob", seconds=None, at=now))
        return scheduler.order(now), scheduler.decide(now, {"a": 0}, planned=5)

    assert shown(0) == shown(1) == shown(1000)
