"""How MIG instances count in shares, sizes and limits. Real: the scheduler."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest

from gpuspawner.queue.kinds import pool_kind
from gpuspawner.queue.models import EndedSession, QueueLimits, ScorePart
from gpuspawner.queue.scheduler import Scheduler
from tests.unit.queue.site import DAY, HOUR, T0, lease, scheduler_of, ticket

SEVENTH = Fraction(1, 7)
GPU = pool_kind("A100", 40, 1)
INSTANCE = pool_kind("A100 MIG 1g.5gb", 5, 1, SEVENTH)
CAPACITY = {GPU: 2, INSTANCE: 7}
"""Three GPUs, one of them divided."""


def waiting(*kinds: str) -> Scheduler:
    """A scheduler with one ticket for any of these kinds."""
    asked = replace(ticket("t", member="m", seconds=4 * HOUR), kinds=frozenset(kinds))
    return scheduler_of(asked, capacity=CAPACITY)


def parts(scheduler: Scheduler) -> dict[str, ScorePart]:
    (ranked,) = scheduler.order(T0)
    return {each.name: each for each in ranked.parts}


def share(scheduler: Scheduler) -> float:
    return parts(scheduler)["share of the member"].points


def test_use_of_an_instance_counts_as_its_part_of_a_gpu() -> None:
    past = EndedSession(member="m", devices=1, started_at=T0 - 9 * HOUR, ended_at=T0 - HOUR)
    for held, part in ((GPU, 1), (INSTANCE, SEVENTH)):
        now, before = waiting(GPU), waiting(GPU)
        now.started(lease("running", {held: 1}, T0 - DAY, member="m"))
        before.learn([replace(past, part=part)])
        seen = (share(now), share(before))
        if held == GPU:
            whole = seen
    assert seen == pytest.approx([points / 7 for points in whole])
    now.ended("running", T0)
    assert share(now) == pytest.approx(seen[0]), "it fades from where it was"


def test_capacity_counts_instances_as_their_parts() -> None:
    three_gpus = scheduler_of(ticket("t", member="m"), capacity={"a": 3})
    divided = waiting(GPU)
    for scheduler, kind in ((three_gpus, "a"), (divided, GPU)):
        scheduler.started(lease("running", {kind: 1}, T0 - DAY, member="m"))
    assert share(divided) == pytest.approx(share(three_gpus))


def test_request_is_as_large_as_what_it_may_get() -> None:
    some = ((GPU,), (INSTANCE,), (GPU, INSTANCE))
    whole, instance, either = (parts(waiting(*kinds))["size"].points for kinds in some)
    assert instance == pytest.approx(whole + math.log2(7)), "a seventh of the expected GPU-hours"
    assert either == whole


def test_limit_on_devices_counts_instances_and_the_one_on_hours_their_parts() -> None:
    asked = replace(ticket("t", member="m", seconds=4 * HOUR), kinds=frozenset({INSTANCE}))
    running = lease("running", {INSTANCE: 1}, member="m", ends_at=T0 + 7 * HOUR)

    def held_back(limits: QueueLimits) -> dict[str, str]:
        scheduler = scheduler_of(asked, capacity=CAPACITY, member_limits=limits)
        scheduler.started(running)
        scheduler.extended("running", T0 + 7 * HOUR)
        return dict(scheduler.decide(T0, {INSTANCE: 6}, reasons=True).held_back)

    assert held_back(QueueLimits(devices=1)) == {
        "t": "The member may have 1 GPU at once and has 1."
    }
    assert held_back(QueueLimits(devices=2, gpu_hours=1.6)) == {}
    assert held_back(QueueLimits(gpu_hours=1.5)) == {
        "t": "The member may hold 1.5 GPU-hours and holds 1.0; this request is for 0.6."
    }
