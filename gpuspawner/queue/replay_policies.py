"""Policies to compare with: what other systems do, and a bound that nobody can reach.

Each is driven by :func:`gpuspawner.queue.replay.replay` like our own scheduler.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence

from .models import Decision, Running, Waiting
from .replay import Player, TraceJob

DEPTH, INTERVAL = 100, 30.0
"""Slurm's ``bf_max_job_test`` (once ``default_queue_depth``) and ``bf_interval`` in seconds."""

HALF_LIFE = 7 * 86400.0
"""Slurm's ``PriorityDecayHalfLife`` in seconds."""

NEWEST = 0.1
"""How much the newest duration counts in the average that history ranking goes by."""


def make(name: str, jobs: Sequence[TraceJob]) -> Player:
    """The policy of one of :data:`NAMES`; ``jobs`` for those that know what nobody can know."""
    return NAMES[name](jobs)


def wakes(name: str) -> float:
    """Seconds after which the policy looks at the whole line again; 0 if it always does."""
    return INTERVAL if name == "easy" else 0.0


class _Fifo:
    """First come, first served; whoever does not fit holds up everybody behind."""

    def __init__(self) -> None:
        self.line: deque[Waiting] = deque()

    def submit(self, ticket: Waiting) -> None:
        self.line.append(ticket)

    def started(self, lease: Running) -> None:
        pass

    def ended(self, lease_id: str, at: float) -> None:
        pass

    def decide(self, now: float, free: Mapping[str, int]) -> Decision:
        left, on = dict(free), {}
        while self.line and (kind := _fits(self.line[0], left)):
            ticket = self.line.popleft()
            left[kind] -= ticket.devices
            on[ticket.id] = kind
        return Decision(starts=tuple(on), on=on)


class _Easy(_Fifo):
    """First come, first served, with backfill: the first :data:`DEPTH` in line are tried each
    :data:`INTERVAL`, and may not delay the planned start of the first that does not fit.
    Durations are known exactly, which is more than a real one is told."""

    def __init__(self, jobs: Sequence[TraceJob]) -> None:
        super().__init__()
        self.jobs = jobs
        self.ends: dict[str, list[tuple[float, str, int]]] = defaultdict(list)
        self.looked_at = -math.inf

    def started(self, lease: Running) -> None:
        for kind, devices in lease.held.items():
            end = lease.started_at + self.jobs[int(lease.id)].duration
            insort(self.ends[kind], (end, lease.id, devices))

    def ended(self, lease_id: str, at: float) -> None:
        for running in self.ends.values():
            running[:] = [entry for entry in running if entry[1] != lease_id]

    def decide(self, now: float, free: Mapping[str, int]) -> Decision:
        first = super().decide(now, free)
        if not self.line or now - self.looked_at < INTERVAL:
            return first
        self.looked_at = now
        left, on = dict(free), dict(first.on)
        devices = {ticket: self.jobs[int(ticket)].devices for ticket in first.starts}
        for ticket_id, kind in on.items():
            left[kind] -= devices[ticket_id]
        head = self.line[0]
        kind, at, spare = min(
            ((k, *self._planned(head.devices, k, left)) for k in head.kinds if k in free),
            key=lambda plan: plan[1],
        )
        for ticket in [self.line[n] for n in range(1, min(DEPTH, len(self.line)))]:
            other = _fits(ticket, left)
            if not other:
                continue
            if other == kind and now + self.jobs[int(ticket.id)].duration > at:
                if ticket.devices > spare:
                    continue
                spare -= ticket.devices
            left[other] -= ticket.devices
            on[ticket.id] = other
        self.line = deque(ticket for ticket in self.line if ticket.id not in on)
        return Decision(starts=tuple(on), on=on)

    def _planned(self, devices: int, kind: str, left: Mapping[str, int]) -> tuple[float, int]:
        """When so many are free at the earliest, and how many more there are then."""
        free = left.get(kind, 0)
        for end, _, back in self.ends[kind]:
            free += back
            if free >= devices:
                return end, free - devices
        return math.inf, 0


class _Ranked:
    """Whoever has the least key goes first; who does not fit lets others pass."""

    def __init__(self, key: Callable[[Waiting], float]) -> None:
        self.key = key
        self.lines: dict[tuple[frozenset[str], int], list[tuple[float, int, Waiting]]] = {}
        self.count = 0

    def submit(self, ticket: Waiting) -> None:
        self.count += 1
        line = self.lines.setdefault((ticket.kinds, ticket.devices), [])
        heapq.heappush(line, (self.key(ticket), self.count, ticket))

    def started(self, lease: Running) -> None:
        pass

    def ended(self, lease_id: str, at: float) -> None:
        pass

    def decide(self, now: float, free: Mapping[str, int]) -> Decision:
        left, on = dict(free), {}
        while heads := [line for line in self.lines.values() if line and _fits(line[0][2], left)]:
            ticket = heapq.heappop(min(heads, key=lambda line: line[0][:2]))[2]
            kind = _fits(ticket, left)
            left[kind] -= ticket.devices
            on[ticket.id] = kind
        return Decision(starts=tuple(on), on=on)


class _History(_Ranked):
    """The least expected use first: a moving average of the logarithm of durations of the same
    group and size."""

    def __init__(self) -> None:
        super().__init__(lambda ticket: ticket.devices * math.exp(self._expected(ticket)))
        self.known: dict[tuple[str, int], float] = {}
        self.running: dict[str, Running] = {}

    def started(self, lease: Running) -> None:
        self.running[lease.id] = lease

    def ended(self, lease_id: str, at: float) -> None:
        lease = self.running.pop(lease_id)
        seen = math.log(max(1.0, at - lease.started_at))
        like = lease.group or lease.member, lease.devices
        self.known[like] = seen * NEWEST + self.known.get(like, seen) * (1 - NEWEST)

    def _expected(self, ticket: Waiting) -> float:
        return self.known.get((ticket.group or ticket.member, ticket.devices), math.log(3600.0))


class _FairShare:
    """The group with the least decayed use first, in each first come, first served; who does
    not fit lets other groups pass."""

    def __init__(self) -> None:
        self.lines: dict[str, deque[Waiting]] = {}
        self.running: dict[str, Running] = {}
        self.used: dict[str, tuple[float, int, float]] = {}
        """By group: device-seconds as of a moment, devices in use, the moment."""

    def submit(self, ticket: Waiting) -> None:
        self.lines.setdefault(ticket.group or ticket.member, deque()).append(ticket)

    def started(self, lease: Running) -> None:
        self.running[lease.id] = lease
        self._change(lease.group or lease.member, lease.devices, lease.started_at)

    def ended(self, lease_id: str, at: float) -> None:
        lease = self.running.pop(lease_id)
        self._change(lease.group or lease.member, -lease.devices, at)

    def decide(self, now: float, free: Mapping[str, int]) -> Decision:
        left, on = dict(free), {}
        extra: dict[str, float] = defaultdict(float)
        while heads := [name for name, line in self.lines.items() if line and _fits(line[0], left)]:
            # What a group is given now counts as if it had lasted an hour.
            name = min(heads, key=lambda group: self._use(group, now) + extra[group])
            ticket = self.lines[name].popleft()
            kind = _fits(ticket, left)
            left[kind] -= ticket.devices
            on[ticket.id] = kind
            extra[name] += 3600.0 * ticket.devices
        return Decision(starts=tuple(on), on=on)

    def _use(self, group: str, now: float) -> float:
        used, devices, at = self.used.get(group, (0.0, 0, now))
        decay = 0.5 ** (max(0.0, now - at) / HALF_LIFE)
        return used * decay + devices * (1 - decay) * HALF_LIFE / math.log(2)

    def _change(self, group: str, devices: int, now: float) -> None:
        before = self.used.get(group, (0.0, 0, now))[1]
        self.used[group] = self._use(group, now), before + devices, now


def _fits(ticket: Waiting, left: Mapping[str, int]) -> str:
    """The fitting kind with the most free devices; ``""`` when there are not enough of any."""
    best = max(ticket.kinds, key=lambda kind: left.get(kind, 0))
    return best if left.get(best, 0) >= ticket.devices else ""


NAMES: Mapping[str, Callable[[Sequence[TraceJob]], Player]] = {
    "fifo": lambda jobs: _Fifo(),
    "easy": _Easy,
    "fair-share": lambda jobs: _FairShare(),
    "history": lambda jobs: _History(),
    "clairvoyant": lambda jobs: _Ranked(
        lambda ticket: jobs[int(ticket.id)].duration * ticket.devices
    ),
}
"""Every policy by name: strict order, Slurm's backfill, decayed shares, expected use, and the
least use first by durations that nobody can know: a bound."""
