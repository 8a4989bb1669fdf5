"""Who starts: planned starts, backfill, kinds, limits. Real: the scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from gpuspawner.queue.models import EndedSession, Priority, QueueLimits, QueuePolicy, Running
from gpuspawner.queue.scheduler import Scheduler
from tests.unit.scheduler.site import DAY, HOUR, T0, Site, lease, ticket


def scheduler_of(capacity: dict[str, int], **settings: Any) -> Scheduler:
    scheduler = Scheduler(**settings)
    scheduler.set_capacity(capacity)
    return scheduler


def test_a_decision_changes_nothing() -> None:
    scheduler = scheduler_of({"a": 4})
    for n in range(6):
        scheduler.submit(ticket(f"t{n}", at=T0 + n))
    first = scheduler.decide(T0 + 60, {"a": 4}, planned=3)

    assert first.starts == ("t0", "t1", "t2", "t3")
    assert scheduler.decide(T0 + 60, {"a": 4}, planned=3) == first
    assert len(scheduler.waiting) == 6 and not scheduler.running


def test_nothing_waits_or_nothing_is_free() -> None:
    scheduler = scheduler_of({"a": 4})
    assert scheduler.decide(T0, {"a": 4}).starts == ()
    scheduler.submit(ticket("t"))

    assert scheduler.decide(T0, {}).starts == ()
    assert scheduler.decide(T0, {"a": 0}).starts == ()
    assert scheduler.decide(T0, {"b": 9}).starts == ()


def test_a_wide_request_gets_its_devices_together_and_short_ones_use_them_meanwhile() -> None:
    scheduler = scheduler_of({"a": 4})
    scheduler.started(lease("running", {"a": 2}, ends_at=T0 + 4 * HOUR))
    scheduler.submit(ticket("wide", 4, seconds=HOUR, priority=Priority.COURSE))
    scheduler.submit(ticket("fits before", at=T0 + 1, seconds=4 * HOUR))
    scheduler.submit(ticket("too long", at=T0 + 2, seconds=5 * HOUR))
    scheduler.submit(ticket("fits too", at=T0 + 3, seconds=HOUR))
    decision = scheduler.decide(T0, {"a": 2})

    assert set(decision.starts) == {"fits before", "fits too"}
    assert decision.planned["wide"] == T0 + 4 * HOUR


def test_who_ends_later_may_use_what_the_wide_one_leaves_over() -> None:
    scheduler = scheduler_of({"a": 5})
    scheduler.started(lease("running", {"a": 3}, ends_at=T0 + 4 * HOUR))
    scheduler.submit(ticket("wide", 4, priority=Priority.COURSE))
    scheduler.submit(ticket("long", at=T0 + 1, seconds=9 * HOUR))
    scheduler.submit(ticket("long as well", at=T0 + 2, seconds=9 * HOUR))

    assert scheduler.decide(T0, {"a": 2}).starts == ("long",)


def test_a_wide_request_for_one_kind_does_not_hold_up_another_kind() -> None:
    scheduler = scheduler_of({"a": 4, "b": 2})
    scheduler.started(lease("running", {"a": 3}, ends_at=T0 + HOUR))
    scheduler.submit(ticket("wide", 4, kinds="a", priority=Priority.COURSE))
    scheduler.submit(ticket("other kind", kinds="b", at=T0 + 1, seconds=9 * HOUR))
    scheduler.submit(ticket("either", kinds="ab", at=T0 + 2, seconds=9 * HOUR))
    decision = scheduler.decide(T0, {"a": 1, "b": 2})

    assert dict(decision.on) == {"other kind": "b", "either": "b"}
    assert decision.planned == {"wide": T0 + HOUR}


def test_devices_of_one_request_are_of_one_kind() -> None:
    scheduler = scheduler_of({"a": 2, "b": 2})
    scheduler.submit(ticket("t", 2, kinds="ab"))

    assert scheduler.decide(T0, {"a": 1, "b": 1}).starts == ()
    assert scheduler.decide(T0, {"a": 1, "b": 2}).on == {"t": "b"}


def test_a_planned_start_is_on_the_kind_that_is_free_first() -> None:
    scheduler = scheduler_of({"a": 2, "b": 2})
    scheduler.started(lease("on a", {"a": 2}, ends_at=T0 + 9 * HOUR))
    scheduler.started(lease("on b", {"b": 1}, ends_at=T0 + HOUR))
    scheduler.submit(ticket("wide", 2, kinds="ab", priority=Priority.COURSE))
    scheduler.submit(ticket("short", kinds="ab", at=T0 + 1, seconds=HOUR))
    scheduler.submit(ticket("long", kinds="b", at=T0 + 2, seconds=2 * HOUR))
    decision = scheduler.decide(T0, {"b": 1})

    assert decision.planned == {"wide": T0 + HOUR}
    assert decision.starts == ("short",)


def test_ends_that_are_not_known_are_guessed_from_the_past() -> None:
    scheduler = scheduler_of({"a": 2})
    scheduler.learn(
        EndedSession(
            member="m", devices=1, started_at=T0 - DAY + n, ended_at=T0 - DAY + n + 2 * HOUR
        )
        for n in range(5)
    )
    scheduler.started(lease("running", {"a": 1}, member="m"))
    scheduler.submit(ticket("wide", 2, priority=Priority.COURSE))

    assert scheduler.decide(T0, {"a": 1}).planned == {"wide": pytest.approx(T0 + 2 * HOUR)}
    later = T0 + 3 * HOUR
    assert scheduler.decide(later, {"a": 1}).planned["wide"] > later


def test_a_session_that_should_be_over_does_not_look_as_if_it_would_end_at_once() -> None:
    scheduler = scheduler_of({"a": 2})
    scheduler.started(lease("stuck", {"a": 1}, ends_at=T0))
    scheduler.submit(ticket("wide", 2, priority=Priority.COURSE))
    scheduler.submit(ticket("short", at=T0 + 1, seconds=HOUR))

    assert scheduler.decide(T0 + 60, {"a": 1}).starts == ()
    assert scheduler.decide(T0 + 2 * HOUR, {"a": 1}).starts == ("short",)


def test_an_extension_moves_the_planned_start() -> None:
    scheduler = scheduler_of({"a": 2})
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


def test_who_waited_too_long_is_first_and_guesses_do_not_get_in_the_way() -> None:
    policy = QueuePolicy()
    scheduler = scheduler_of({"a": 20}, policy=policy)
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


def test_those_who_waited_too_long_get_a_share_and_no_more() -> None:
    policy = QueuePolicy(overdue_share=0.25)
    site = Site(scheduler_of({"a": 8}, policy=policy), {"a": 8}, now=T0 + policy.overdue_seconds)
    for n in range(6):
        site.scheduler.submit(ticket(f"old{n}", at=T0 - n, seconds=5 * DAY, priority=Priority.LOW))
        site.scheduler.submit(ticket(f"new{n}", at=site.now - 60, seconds=60.0))
    starts = site.step().starts

    assert starts[:2] == ("old5", "old4")
    assert {*starts[2:]} == {f"new{n}" for n in range(6)}


def test_a_part_of_many_devices_is_kept_for_small_requests() -> None:
    scheduler = scheduler_of({"a": 200})
    scheduler.learn(
        EndedSession(
            member=member, devices=1, started_at=T0 - 90 * DAY, ended_at=T0 - 90 * DAY + seconds
        )
        for member, seconds in (("long", 30 * HOUR), ("short", 60.0))
        for _ in range(9)
    )
    for n in range(200):
        scheduler.submit(ticket(f"long{n}", at=T0 + n, member="long", seconds=None))
    scheduler.submit(ticket("short", at=T0 + 999, member="short", seconds=None))
    starts = scheduler.decide(T0 + 1000, {"a": 200}).starts

    assert starts[0] == "short"
    assert len(starts) == 200 - int(QueuePolicy().small_share * 200)


def test_a_request_that_needs_nearly_all_devices_is_not_kept_waiting_by_that() -> None:
    scheduler = scheduler_of({"a": 200})
    scheduler.submit(ticket("all", 200, seconds=5 * DAY))

    assert scheduler.decide(T0, {"a": 200}).starts == ("all",)


class TestLimits:
    def test_a_member_at_the_limit_waits_and_others_do_not(self) -> None:
        scheduler = scheduler_of({"a": 4}, member_limits=QueueLimits(devices=2))
        scheduler.started(lease("one", {"a": 1}, member="m"))
        for n in range(3):
            scheduler.submit(ticket(f"m{n}", member="m", at=T0 + n))
        scheduler.submit(ticket("other", member="o", at=T0 + 9))
        decision = scheduler.decide(T0 + 10, {"a": 3}, reasons=True)

        assert set(decision.starts) == {"m0", "other"}
        assert decision.held_back == dict.fromkeys(
            ("m1", "m2"), "The member may have 2 GPUs at once and has 2."
        )

    def test_it_ends_with_the_lease(self) -> None:
        scheduler = scheduler_of({"a": 4}, member_limits=QueueLimits(devices=1))
        scheduler.started(lease("one", {"a": 1}, member="m"))
        scheduler.submit(ticket("t", member="m"))
        held_back = scheduler.decide(T0, {"a": 3}, reasons=True).held_back
        scheduler.ended("one", T0 + 60)
        decision = scheduler.decide(T0 + 60, {"a": 4}, reasons=True)

        assert held_back == {"t": "The member may have 1 GPU at once and has 1."}
        assert decision.starts == ("t",) and not decision.held_back

    def test_named_also_when_nothing_is_free(self) -> None:
        scheduler = scheduler_of({"a": 1}, member_limits=QueueLimits(devices=0))
        scheduler.submit(ticket("t"))

        assert "may have 0 GPUs" in scheduler.decide(T0, {"a": 0}, reasons=True).held_back["t"]

    def test_a_group_shares_its_limit(self) -> None:
        scheduler = scheduler_of({"a": 8}, group_limits={"guests": QueueLimits(devices=3)})
        for n in range(4):
            scheduler.submit(ticket(f"g{n}", member=f"m{n}", group="guests", at=T0 + n))
        scheduler.submit(ticket("free", group="staff", at=T0 + 9))
        decision = scheduler.decide(T0 + 10, {"a": 8}, reasons=True)

        assert set(decision.starts) == {"g0", "g1", "g2", "free"}
        assert decision.held_back == {"g3": "The group may have 3 GPUs at once and has 3."}

    def test_gpu_hours_that_are_held_get_fewer_as_time_passes(self) -> None:
        scheduler = scheduler_of({"a": 4}, member_limits=QueueLimits(gpu_hours=10.0))
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

    def test_one_decision_does_not_give_more_gpu_hours_than_the_limit(self) -> None:
        scheduler = scheduler_of({"a": 9}, member_limits=QueueLimits(gpu_hours=10.0))
        for n in range(5):
            scheduler.submit(ticket(f"t{n}", member="m", seconds=4 * HOUR, at=T0 + n))

        assert len(scheduler.decide(T0, {"a": 9}).starts) == 2
        assert len(scheduler.decide(T0, {"a": 9}).starts) == 2

    def test_a_wide_request_that_a_limit_keeps_does_not_gather_devices(self) -> None:
        scheduler = scheduler_of({"a": 4}, member_limits=QueueLimits(devices=2))
        scheduler.started(lease("running", {"a": 2}, ends_at=T0 + HOUR))
        scheduler.submit(ticket("wide", 4, priority=Priority.ADMIN))
        scheduler.submit(ticket("long", at=T0 + 1, seconds=9 * HOUR))

        assert scheduler.decide(T0, {"a": 2}).starts == ("long",)


def test_a_lease_that_has_an_id_of_its_own_takes_its_ticket_out_of_the_line() -> None:
    scheduler = scheduler_of({"a": 2})
    scheduler.submit(ticket("t", member="m"))
    scheduler.started(Running(id="lease", member="m", held={"a": 1}, started_at=T0, ticket_id="t"))

    assert not scheduler.waiting and set(scheduler.running) == {"lease"}
