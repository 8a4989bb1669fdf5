"""Shares of several slots, and several whole shared devices, in the queue. Real: the scheduler; a
slow account of who holds which device until when checks what it decides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuspawner.core.units import DeviceCount
from gpuspawner.queue.models import WaitingTicket
from gpuspawner.queue.scheduler import Scheduler
from tests.support.tier import examples
from tests.unit.queue.site import T0, kinds_of, lease, scheduler_of, ticket
from tests.unit.queue.ways import after, check_decision, check_fits

GIB = 2**30
SHARED = tuple(f"T4/{16 * GIB}*4@GPU-{number}" for number in range(4))
OTHERS = tuple(f"A2/{16 * GIB}*2@GPU-{number}" for number in range(2))
ALONE = f"T4/{16 * GIB}"
CAPACITY: Mapping[str, int] = {**dict.fromkeys(SHARED + OTHERS, 1), ALONE: 2}


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


@settings(max_examples=examples(300))
@given(moments())
def test_planned_starts_are_kept_and_nothing_is_wasted(
    moment: tuple[Scheduler, dict[str, DeviceCount], float],
) -> None:
    check_decision(*moment)


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
