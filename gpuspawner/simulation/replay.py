"""Jobs of the past under a policy of today: a virtual clock that leaps from event to event."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..scheduler import Decision, Running, Waiting

ANY = "any"
"""The kind of all devices where kinds do not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A session of the past: what was asked for, and how long it really lasted."""

    asked_at: float
    """Seconds since 1970."""
    duration: float
    """Seconds."""
    devices: int
    member: str = ""
    group: str = ""
    kinds: frozenset[str] = frozenset({ANY})
    seconds: float | None = None
    """The session length that was asked for; None when there was none."""


class Player(Protocol):
    """What a replay drives: :class:`gpuspawner.scheduler.Scheduler`, or a policy beside it."""

    def submit(self, ticket: Waiting) -> None:
        """A ticket waits."""

    def started(self, lease: Running) -> None:
        """A lease began; it has the id of its ticket."""

    def ended(self, lease_id: str, at: float) -> None:
        """A lease ended."""

    def decide(self, now: float, free: Mapping[str, int]) -> Decision:
        """Who starts now."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Who waited how long."""

    jobs: Sequence[Job]
    starts: Sequence[float]
    """When each job started, in the order of the jobs; NaN when it was refused."""
    devices: Mapping[str, int]

    @property
    def refused(self) -> int:
        """Jobs that want more devices than there are of any kind that fits."""
        return sum(map(math.isnan, self.starts))


def replay(
    jobs: Sequence[Job], devices: Mapping[str, int], player: Player, wake_seconds: float = 0.0
) -> Replayed:
    """Play ``jobs`` (in the order in which they were asked for) on so many devices by kind.

    At each moment ends come first, then what is asked for, then one decision. A job that does
    not fit even on idle devices is refused, as the hub does. ``wake_seconds``: ask again so
    long after a decision that left tickets waiting and devices free, for policies that look
    at the whole line only now and then. Raises RuntimeError when the policy lets tickets wait
    for ever, or gives out devices that are not free.
    """
    free = dict(devices)
    starts = [math.nan] * len(jobs)
    ends: list[tuple[float, int]] = []
    on: dict[int, str] = {}
    coming, waiting, idle = 0, 0, sum(devices.values())
    asked_at = [job.asked_at for job in jobs] + [math.inf]
    end_at = wake_at = math.inf
    while True:
        now = min(end_at, asked_at[coming], wake_at)
        if now == math.inf:
            break
        while end_at <= now:
            at = heapq.heappop(ends)[1]
            end_at = ends[0][0] if ends else math.inf
            kind, count = on.pop(at), jobs[at].devices
            free[kind] += count
            idle += count
            player.ended(str(at), now)
        while asked_at[coming] <= now:
            job = jobs[coming]
            if any(devices.get(kind, 0) >= job.devices for kind in job.kinds):
                player.submit(_ticket(coming, job))
                waiting += 1
            coming += 1
        wake_at = math.inf
        if not (waiting and idle):
            continue
        decision = player.decide(now, free)
        for ticket_id in decision.starts:
            at = int(ticket_id)
            job = jobs[at]
            kind = decision.on.get(ticket_id) or _kind(job, free)
            count = job.devices
            if kind not in job.kinds or free[kind] < count or not math.isnan(starts[at]):
                raise RuntimeError(f"the policy starts job {at} on {kind!r}, which it cannot")
            free[kind] -= count
            idle -= count
            waiting -= 1
            starts[at] = now
            on[at] = kind
            heapq.heappush(ends, (now + job.duration, at))
            player.started(_lease(at, job, kind, now))
        end_at = ends[0][0] if ends else math.inf
        if wake_seconds and waiting and idle:
            wake_at = now + wake_seconds
    if waiting:
        raise RuntimeError(f"{waiting} tickets wait for ever: the policy starts none of them")
    return Replayed(jobs, starts, devices)


def _ticket(at: int, job: Job) -> Waiting:
    return Waiting(
        id=str(at),
        member=job.member,
        group=job.group,
        devices=job.devices,
        kinds=job.kinds,
        asked_at=job.asked_at,
        seconds=job.seconds,
    )


def _lease(at: int, job: Job, kind: str, now: float) -> Running:
    return Running(
        id=str(at),
        member=job.member,
        group=job.group,
        held={kind: job.devices},
        started_at=now,
        ends_at=None if job.seconds is None else now + job.seconds,
    )


def _kind(job: Job, free: Mapping[str, int]) -> str:
    """For a policy that does not say: the kind with the most free devices."""
    return Counter({kind: free.get(kind, 0) for kind in job.kinds}).most_common(1)[0][0]
