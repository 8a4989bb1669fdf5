"""Shares of several slots, and several whole shared devices, in the queue. Real: the scheduler; a
slow account of who holds which device until when checks what it decides."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuspawner.core.units import DeviceCount
from gpuspawner.queue.kinds import shared_pools
from gpuspawner.queue.models import Decision, WaitingTicket
from gpuspawner.queue.scheduler import Scheduler
from tests.support.tier import examples
from tests.unit.queue.site import T0, kinds_of, lease, scheduler_of, ticket

GIB = 2**30
SHARED = tuple(f"T4/{16 * GIB}*4@GPU-{number}" for number in range(4))
OTHERS = tuple(f"A2/{16 * GIB}*2@GPU-{number}" for number in range(2))
ALONE = f"T4/{16 * GIB}"
CAPACITY: Mapping[str, int] = {**dict.fromkeys(SHARED + OTHERS, 1), ALONE: 2}
Held = Mapping[str, DeviceCount]


def whole(
    name: str, devices: int, kinds: tuple[str, ...] = SHARED, at: float = T0
) -> WaitingTicket:
    """One that wants so many whole devices."""
    return replace(ticket(name, devices, at=at), kinds=frozenset(kinds))


def share(name: str, gib: int, kinds: tuple[str, ...] = SHARED, at: float = T0) -> WaitingTicket:
    """One that wants a share with so much memory; it suits all these kinds."""
    slots = max(1, math.ceil(gib / 4))
    least = Fraction(slots, 4)
    found = replace(ticket(name, at=at), devices=least, share_bytes=gib * GIB)
    return replace(found, kinds=frozenset(kinds))


@st.composite
def moments(draw: st.DrawFn) -> tuple[Scheduler, dict[str, DeviceCount], float]:
    """A scheduler in the middle of a day, with all session ends known, what is free, the time."""
    scheduler, free = scheduler_of(capacity=CAPACITY), dict[str, DeviceCount](CAPACITY)
    now = T0 + 86_400
    parts = st.sampled_from([Fraction(1, 2), Fraction(1, 2), 1])
    for number in range(draw(st.integers(0, 8))):
        kind, part = draw(st.sampled_from(list(CAPACITY))), draw(parts)
        part = 1 if kind == ALONE else part
        if free[kind] >= part:
            free[kind] -= part
            ends_at = now + draw(st.integers(1, 12)) * 900.0
            scheduler.started(lease(f"l{number}", {kind: part}, now, ends_at=ends_at))
    for number in range(draw(st.integers(0, 8))):
        at = now - draw(st.integers(0, 20)) * 900.0
        name, kinds = f"t{number}", draw(st.sampled_from([SHARED, SHARED + OTHERS]))
        if draw(st.booleans()):
            asked = share(name, draw(st.sampled_from([0, 4, 6, 8])), kinds, at)
        else:
            asked = whole(name, draw(st.integers(1, 3)), (*kinds, ALONE), at)
        scheduler.submit(replace(asked, seconds=draw(st.integers(1, 12)) * 900.0))
    return scheduler, free, now


def ways(asked: WaitingTicket, left: Held) -> list[dict[str, DeviceCount]]:
    """Everything that a ticket could take of what is left."""
    alone = [
        {kind: asked.taken_of(kind)}
        for kind in sorted(asked.kinds)
        if left.get(kind, 0) >= asked.taken_of(kind)
    ]
    if asked.devices <= 1:
        return alone
    free = [
        [kind for kind in pool if left.get(kind, 0) >= 1]
        for pool in shared_pools(asked.kinds).values()
    ]
    sets = (some for pool in free for some in itertools.combinations(pool, int(asked.devices)))
    return alone + [dict.fromkeys(some, 1) for some in sets]


def after(left: Held, taken: Held) -> dict[str, DeviceCount]:
    return {kind: count - taken.get(kind, 0) for kind, count in left.items()}


def soonest(
    scheduler: Scheduler, free: Held, now: float, starts: Mapping[str, Held], asked: WaitingTicket
) -> float:
    """When a ticket could start at the soonest, if nothing else starts than ``starts``."""
    ends = [(each.ends_at or math.inf, each.held) for each in scheduler.running.values()]
    left = dict(free)
    for name, held in starts.items():
        left = after(left, held)
        ends.append((now + (scheduler.waiting[name].seconds or math.inf), held))
    for at in sorted({now, *(end for end, _ in ends)}):
        back = [held for end, held in ends if end <= at]
        then = {kind: left[kind] + sum(held.get(kind, 0) for held in back) for kind in left}
        if ways(asked, then):
            return at
    return math.inf


def check_fits(scheduler: Scheduler, free: Held, decision: Decision) -> dict[str, DeviceCount]:
    """Every start has its devices, all at once and of one pool. Returns what is left."""
    left = dict(free)
    assert list(decision.takes) == list(decision.starts)
    for name, held in decision.takes.items():
        assert held in ways(scheduler.waiting[name], left)
        left = after(left, held)
    assert all(decision.left.get(kind, 0) == count for kind, count in left.items())
    return left


@settings(max_examples=examples(300))
@given(moments())
def test_planned_starts_are_kept_and_nothing_is_wasted(
    moment: tuple[Scheduler, dict[str, DeviceCount], float],
) -> None:
    scheduler, free, now = moment
    decision = scheduler.decide(now, free)
    left = check_fits(scheduler, free, decision)
    for name, at in decision.planned.items():
        assert now < at
        assert soonest(scheduler, free, now, decision.takes, scheduler.waiting[name]) <= at
    for name in scheduler.waiting.keys() - set(decision.starts):
        for held in ways(scheduler.waiting[name], left):
            with_it = {**decision.takes, name: held}
            delayed = [
                other
                for other, at in decision.planned.items()
                if _is_delayed(scheduler, free, now, with_it, scheduler.waiting[other], at)
            ]
            assert delayed, f"{name} could have had {held}"


def _is_delayed(
    scheduler: Scheduler,
    free: Held,
    now: float,
    starts: Mapping[str, Held],
    asked: WaitingTicket,
    at: float,
) -> bool:
    """Whether any of the devices meant for a ticket may be missing at ``at``: which ones are meant
    is not said, so it is enough that a set of them that it may use is not complete then."""
    sets = [asked.kinds] if asked.devices <= 1 else shared_pools(asked.kinds).values()
    alone = [(kind,) for kind in asked.kinds]
    some = [
        choice
        for each in sets
        for choice in itertools.combinations(sorted(each), math.ceil(asked.devices))
    ]
    return any(
        soonest(scheduler, free, now, starts, replace(asked, kinds=frozenset(choice))) > at
        for choice in (*some, *alone)
    )


@settings(max_examples=examples(300))
@given(moments())
def test_first_ticket_starts_by_its_latest_start(
    moment: tuple[Scheduler, dict[str, DeviceCount], float],
) -> None:
    """Time goes on, every session lasts as long as it may, and nobody goes before the first."""
    scheduler, free, now = moment
    for place, name in enumerate(scheduler.in_line(now), start=1):
        scheduler.submit(replace(scheduler.waiting[name], position=place))
    decision = scheduler.decide(now, free, planned=1)
    began = dict[str, float]()
    latest = decision.latest
    while True:
        check_fits(scheduler, free, decision)
        for name in decision.starts:
            began[name] = now
            held, seconds = decision.takes[name], scheduler.waiting[name].seconds or 0.0
            free = after(free, held)
            scheduler.started(lease(name, held, now, ends_at=now + seconds))
        if not scheduler.running:
            break
        now = min(each.ends_at or math.inf for each in scheduler.running.values())
        for each in [x for x in scheduler.running.values() if x.ends_at == now]:
            free = after(free, {kind: -count for kind, count in each.held.items()})
            scheduler.ended(each.id, now)
        decision = scheduler.decide(now, free)
    assert not scheduler.waiting, "all have started"
    assert {name: began[name] for name in latest if began[name] > latest[name]} == {}


def test_several_whole_devices_are_unshared_ones_first() -> None:
    scheduler = scheduler_of(whole("two", 2, (*SHARED, ALONE)), capacity=CAPACITY)
    assert kinds_of(scheduler.decide(T0, {**CAPACITY, **dict.fromkeys(SHARED[2:], 0)})) == {
        "two": ALONE
    }
    assert scheduler.decide(T0, {**CAPACITY, ALONE: 1}).takes == {
        "two": {SHARED[0]: 1, SHARED[1]: 1}
    }, "rather than one of each"


def test_several_shared_devices_are_those_that_need_not_be_yielded() -> None:
    scheduler = scheduler_of(whole("two", 2), capacity=CAPACITY)
    yielded = {SHARED[0]: Fraction(1, 4), SHARED[2]: 1}
    decision = scheduler.decide(T0, dict.fromkeys(SHARED, 1), yielded=yielded)
    assert decision.takes == {"two": {SHARED[1]: 1, SHARED[3]: 1}}


def test_share_takes_as_many_slots_of_each_model_as_its_memory_needs() -> None:
    kinds = (SHARED[0], OTHERS[0])
    asked = replace(share("one", 6, kinds), devices=Fraction(1, 2))
    scheduler = scheduler_of(asked, capacity=CAPACITY)
    assert scheduler.decide(T0, {SHARED[0]: Fraction(1, 4)}).takes == {}
    assert scheduler.decide(T0, {SHARED[0]: Fraction(3, 4)}).takes == {
        "one": {SHARED[0]: Fraction(1, 2)}
    }
    both = {SHARED[0]: Fraction(1, 4), OTHERS[0]: Fraction(1, 2)}
    assert scheduler.decide(T0, both).takes == {"one": {OTHERS[0]: Fraction(1, 2)}}
