"""What tickets could take of the devices, found by trying everything: it checks the scheduler."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

from gpuspawner.core.units import DeviceCount
from gpuspawner.queue.kinds import shared_pools
from gpuspawner.queue.models import Decision, WaitingTicket
from gpuspawner.queue.scheduler import Scheduler

Held = Mapping[str, DeviceCount]
"""Devices by kind."""


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


def check_decision(scheduler: Scheduler, free: Held, now: float) -> None:
    """Check that a decision delays no planned start, and leaves no device that a ticket could use.

    All ends of sessions are known.
    """
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
