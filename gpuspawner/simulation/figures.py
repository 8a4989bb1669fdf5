"""What a replay came to, in figures."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from .replay import Replayed

HOUR = 3600.0

SHORTEST = 10.0
"""Seconds: a job that was over sooner counts as if it had lasted this long, so that a few
seconds of waiting are not a disaster for one that lasted none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Waits are in hours."""

    jobs: int
    mean: float
    p50: float
    p95: float
    longest: float
    worst_group: float
    """The mean wait of the group that waited longest on average."""
    slowdown: float
    """Bounded slowdown: the mean of (wait + duration) / max(duration, 10 s), 1 at least."""
    utilisation: float
    """Device-seconds in use, of all from the first job asked for to the last one over."""
    fairness: float
    """Jain's index over groups of wait per device-second got, shifted so that no wait is 1:
    (sum x)^2 / (n sum x^2) with x = used / (used + wait of its devices). 1 is the same for all,
    1/n is all for one."""


def figures(replayed: Replayed, first: int = 0, last: int | None = None) -> Figures:
    """Of the jobs from ``first`` up to ``last`` (not included) that were not refused."""
    chosen = [
        (job, start - job.asked_at)
        for job, start in zip(replayed.jobs[first:last], replayed.starts[first:last], strict=True)
        if not math.isnan(start)
    ]
    if not chosen:
        return Figures(
            jobs=0, mean=0.0, p50=0.0, p95=0.0, longest=0.0,
            worst_group=0.0, slowdown=1.0, utilisation=0.0, fairness=1.0,
        )  # fmt: skip
    waits = sorted(wait for _, wait in chosen)
    by_group: defaultdict[str, list[float]] = defaultdict(list)
    used: defaultdict[str, float] = defaultdict(float)
    waited: defaultdict[str, float] = defaultdict(float)
    for job, wait in chosen:
        by_group[job.group].append(wait)
        used[job.group] += job.devices * job.duration
        waited[job.group] += job.devices * wait
    begin = min(job.asked_at for job, _ in chosen)
    end = max(job.asked_at + wait + job.duration for job, wait in chosen)
    whole = sum(replayed.devices.values()) * (end - begin)
    return Figures(
        jobs=len(chosen),
        mean=_mean(waits) / HOUR,
        p50=waits[len(waits) // 2] / HOUR,
        p95=waits[int(0.95 * len(waits))] / HOUR,
        longest=waits[-1] / HOUR,
        worst_group=max(map(_mean, by_group.values())) / HOUR,
        slowdown=_mean([_slowdown(wait, job.duration) for job, wait in chosen]),
        utilisation=sum(used.values()) / whole if whole else 0.0,
        fairness=jain([used[g] / max(1.0, used[g] + waited[g]) for g in used]),
    )


def jain(values: Sequence[float]) -> float:
    """Jain's index of fairness: 1 when all are equal, 1/n when one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def _slowdown(wait: float, duration: float) -> float:
    return max(1.0, (wait + duration) / max(duration, SHORTEST))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
