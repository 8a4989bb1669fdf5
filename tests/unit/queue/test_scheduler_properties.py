"""Whatever is asked for in whatever order: the promises of the line hold. Real: the scheduler; a
slow and simple account of who holds what until when checks what it decides."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuspawner.queue.models import (
    Decision,
    Priority,
    QueueLimits,
    QueuePolicy,
)
from gpuspawner.queue.scheduler import Scheduler
from tests.support.tier import examples
from tests.unit.queue.site import DAY, HOUR, T0, Site, kinds_of, lease, scheduler_of, ticket
from tests.unit.queue.ways import check_decision, check_fits

KINDS = ("a", "b", "c")
MEMBERS = ("ada", "bob", "cyd")


@st.composite
def moments(
    draw: st.DrawFn, limits: QueueLimits | None = None
) -> tuple[Scheduler, dict[str, int], float]:
    """A scheduler in the middle of a day, with all session ends known, what is free, the time."""
    capacity = {kind: draw(st.integers(1, 9)) for kind in KINDS}
    scheduler, free = scheduler_of(capacity=capacity, member_limits=limits), dict(capacity)
    now = T0 + 2 * DAY
    for n in range(draw(st.integers(0, 8))):
        kind = draw(st.sampled_from(KINDS))
        count = draw(st.integers(1, 4))
        if count <= free[kind]:
            free[kind] -= count
            ends_at = now + draw(st.integers(1, 40)) * 900.0
            member = draw(st.sampled_from(MEMBERS))
            scheduler.started(lease(f"l{n}", {kind: count}, now, ends_at=ends_at, member=member))
    for n in range(draw(st.integers(0, 14))):
        scheduler.submit(
            ticket(
                f"t{n}",
                draw(st.integers(1, 6)),
                "".join(draw(st.sets(st.sampled_from(KINDS), min_size=1))),
                now - draw(st.integers(0, 200)) * 900.0,
                member=draw(st.sampled_from(MEMBERS)),
                seconds=draw(st.integers(1, 40)) * 900.0,
                priority=draw(st.sampled_from(Priority)),
            )
        )
    return scheduler, free, now


@settings(max_examples=examples(200))
@given(moments())
def test_devices_that_all_are_reserved_for_everybody_change_no_decision(
    moment: tuple[Scheduler, dict[str, int], float],
) -> None:
    source, free, now = moment

    def decide(suffix: str) -> Decision:
        """The decision with kinds of this ending, in which the order of kinds is the same."""
        capacity = {f"{kind}/1{suffix}": 9 for kind in KINDS}
        scheduler = scheduler_of(capacity=capacity)
        for running in source.running.values():
            held = {f"{kind}/1{suffix}": count for kind, count in running.held.items()}
            scheduler.started(replace(running, held=held))
        for waiting in source.waiting.values():
            kinds = frozenset(f"{kind}/1{suffix}" for kind in waiting.kinds)
            scheduler.submit(replace(waiting, kinds=kinds))
        return scheduler.decide(
            now, {f"{kind}/1{suffix}": count for kind, count in free.items()}, planned=9
        )

    is_open, reserved = decide(""), decide("#lab")
    assert kinds_of(reserved) == {name: f"{kind}#lab" for name, kind in kinds_of(is_open).items()}
    assert (reserved.starts, reserved.planned) == (is_open.starts, is_open.planned)
    assert reserved.latest == is_open.latest


@given(moments())
def test_backfill_delays_no_planned_start_and_wastes_no_device(
    moment: tuple[Scheduler, dict[str, int], float],
) -> None:
    check_decision(*moment)


@given(moments())
def test_identical_tickets_start_in_queue_order(
    moment: tuple[Scheduler, dict[str, int], float],
) -> None:
    scheduler, free, now = moment
    order = scheduler.in_line(now)
    started = set(scheduler.decide(now, free).starts)
    for before, after in itertools.combinations(order, 2):
        one, other = scheduler.waiting[before], scheduler.waiting[after]
        same = (one.devices, one.kinds, one.seconds) == (other.devices, other.kinds, other.seconds)
        assert not same or before in started or after not in started
    assert scheduler.in_line(now) == order


@given(moments(limits=QueueLimits(devices=5, gpu_hours=30.0)))
def test_limits_hold_and_held_back_tickets_are_reported(
    moment: tuple[Scheduler, dict[str, int], float],
) -> None:
    scheduler, free, now = moment
    decision = scheduler.decide(now, free, reasons=True)
    check_fits(scheduler, free, decision)
    devices = dict.fromkeys(MEMBERS, 0)
    hours = dict.fromkeys(MEMBERS, 0.0)
    for running in scheduler.running.values():
        devices[running.member] += running.devices
        hours[running.member] += running.devices * ((running.ends_at or 0.0) - now) / HOUR
    for name in decision.starts:
        waiting = scheduler.waiting[name]
        devices[waiting.member] += waiting.devices
        hours[waiting.member] += waiting.devices * (waiting.seconds or 0.0) / HOUR
        assert devices[waiting.member] <= 5 and hours[waiting.member] <= 30.0 + 1e-6
    over = {
        name
        for name, waiting in scheduler.waiting.items()
        if devices[waiting.member] + waiting.devices > 5
        or hours[waiting.member] + waiting.devices * (waiting.seconds or 0.0) / HOUR > 30.0
    }
    assert set(decision.held_back) == over - set(decision.starts)


class _Crowd:
    """Somebody who asks for a device whenever one may come free, and is always preferred."""

    def __init__(self, site: Site, seconds: float, known: bool) -> None:
        self.site, self.seconds, self.known = site, seconds, known
        self.count = 0

    def ask(self, most: int) -> None:
        waiting = sum(name.startswith("crowd") for name in self.site.scheduler.waiting)
        for _ in range(most - waiting):
            self.count += 1
            seconds = self.seconds if self.known else None
            newest = ticket(f"crowd{self.count}", at=self.site.now, seconds=seconds)
            self.site.scheduler.submit(replace(newest, priority=Priority.ADMIN))


@settings(max_examples=examples(25))
@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from([2 * HOUR, 7 * HOUR]),
    st.booleans(),
    st.booleans(),
)
def test_old_tickets_do_not_starve_behind_priority_requests(
    devices: int, wide: int, old: int, lasts: float, known: bool, last: bool
) -> None:
    """Requests of the lowest class, as wide as the site, among a crowd of the highest that wants
    every device at every moment: each starts within the limit and a session each."""
    policy = QueuePolicy(overdue_seconds=2 * DAY)
    site = Site(Scheduler(policy), {"a": devices})
    crowd = _Crowd(site, lasts, known)
    crowd.ask(3 * devices)
    site.step({f"crowd{n}": lasts * (0.1 + 0.9 * (n % 7) / 7) for n in range(99)}, known)
    names = [f"old{n}" for n in range(old)]
    for name in names:
        seconds, how = lasts if known else None, {"priority": Priority.LOW, "last": last}
        site.scheduler.submit(ticket(name, min(wide, devices), seconds=seconds, **how))
    # One drains the devices (a session), then runs; the next one of the share waits for it.
    bound = T0 + policy.overdue_seconds + 2 * lasts * old + lasts
    while not set(names) <= set(site.started_at):
        assert site.now <= bound, f"{set(names) - set(site.started_at)} starve"
        crowd.ask(3 * devices)
        every = {f"crowd{n}": lasts * (0.1 + 0.9 * (n % 7) / 7) for n in range(crowd.count + 1)}
        site.step({**every, **dict.fromkeys(names, lasts)}, known)
        following = site.next_end
        assert following is not None
        site.go_to(max(following, site.now + 1))


events = st.lists(
    st.tuples(
        st.sampled_from(["ask", "decide", "end", "withdraw", "extend", "order", "capacity"]),
        st.integers(0, 9),
        st.floats(-HOUR, 2 * DAY),
    ),
    max_size=60,
)


@given(events)
def test_clock_jumps_do_not_break_the_scheduler(happens: list[tuple[str, int, float]]) -> None:
    scheduler = Scheduler(member_limits=QueueLimits(devices=6))
    capacity = {"a": 8}
    scheduler.set_capacity(capacity)
    now = T0
    for count, (what, n, jump) in enumerate(happens):
        now += jump if jump > 0 or n == 0 else 0.0
        if what == "ask":
            seconds = None if n % 2 else 3 * HOUR
            member = MEMBERS[n % 3]
            scheduler.submit(ticket(f"t{n}", 1 + n % 3, at=now, member=member, seconds=seconds))
        elif what == "decide":
            in_use = sum(running.devices for running in scheduler.running.values())
            free = {"a": max(0, capacity["a"] - in_use)}
            decision = scheduler.decide(now, free, planned=n)
            check_fits(scheduler, free, decision)
            assert all(at >= now for at in decision.planned.values())
            for name in decision.starts:
                waiting = scheduler.waiting[name]
                ends_at = None if waiting.seconds is None else now + waiting.seconds
                who = {"ticket_id": name, "member": waiting.member}
                held = {"a": waiting.devices}
                scheduler.started(lease(f"l{count}-{name}", held, now, ends_at=ends_at, **who))
        elif what == "end" and scheduler.running:
            scheduler.ended(sorted(scheduler.running)[n % len(scheduler.running)], now)
        elif what == "withdraw":
            scheduler.withdraw(f"t{n}")
        elif what == "extend" and scheduler.running:
            name = sorted(scheduler.running)[n % len(scheduler.running)]
            scheduler.extended(name, None if n % 3 == 0 else now + n * HOUR)
        elif what == "capacity":
            scheduler.set_capacity({"a": 8} if n % 2 else {"a": 4, "b": 1})
        else:
            ranked = scheduler.order(now)
            assert {each.id for each in ranked} == set(scheduler.waiting)
            waits = [p.points for each in ranked for p in each.parts if p.name == "waiting"]
            assert all(points >= 0.0 for points in waits)
