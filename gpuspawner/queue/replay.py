"""Replays of past jobs under a policy: traces, a virtual clock, and figures. Pure.

Besides our own scheduler there are policies to compare it with: what other systems do, and a bound
that nobody can reach.
"""

from __future__ import annotations

import csv
import gzip
import heapq
import math
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean
from typing import Protocol

from ..core.units import DeviceCount
from .kinds import shared_pools
from .models import HOUR, Decision, RunningLease, WaitingTicket

ANY = "any"
"""The kind of all devices if kinds do not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """A past session: what was requested, and how long it really lasted."""

    asked_at: float
    """Seconds since 1970."""
    duration: float
    """Seconds."""
    devices: DeviceCount
    member: str = ""
    group: str = ""
    kinds: frozenset[str] = frozenset({ANY})
    seconds: float | None = None
    """The requested session length; None if there was none."""


class ReplayTarget(Protocol):
    """What a replay drives: :class:`gpuspawner.queue.scheduler.Scheduler`, or another policy."""

    def submit(self, ticket: WaitingTicket) -> None:
        """Add a waiting ticket."""

    def started(self, lease: RunningLease) -> None:
        """Record that a lease began; it has the id of its ticket."""

    def ended(self, lease_id: str, at: float) -> None:
        """Record that a lease ended."""

    def decide(self, now: float, free: Mapping[str, DeviceCount]) -> Decision:
        """Return who starts now."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The start of each job."""

    jobs: Sequence[TraceJob]
    starts: Sequence[float]
    """When each job started, in the order of the jobs; NaN if it was refused."""
    devices: Mapping[str, int]

    @property
    def refused(self) -> int:
        """How many jobs want more devices than exist of any kind that fits."""
        return sum(map(math.isnan, self.starts))


def replay_trace(
    jobs: Sequence[TraceJob],
    devices: Mapping[str, int],
    player: ReplayTarget,
    wake_seconds: float = 0.0,
) -> ReplayResult:
    """Replay ``jobs`` (in the order of their requests) on this many devices by kind.

    At each moment ends come first, then requests, then one decision. A job that does not fit even
    on idle devices is refused, as the hub does. ``wake_seconds``: decide again this long after a
    decision that left tickets waiting and devices free, for policies that look at the whole queue
    only now and then. Raises RuntimeError if the policy lets tickets wait for ever, or grants
    devices that are not free.
    """
    free: dict[str, DeviceCount] = dict(devices)
    starts = [math.nan] * len(jobs)
    ends: list[tuple[float, int]] = []
    on: dict[int, Mapping[str, DeviceCount]] = {}
    coming, waiting = 0, 0
    idle: DeviceCount = sum(devices.values())
    asked_at = [job.asked_at for job in jobs] + [math.inf]
    end_at = wake_at = math.inf
    while True:
        now = min(end_at, asked_at[coming], wake_at)
        if now == math.inf:
            break
        while end_at <= now:
            at = heapq.heappop(ends)[1]
            end_at = ends[0][0] if ends else math.inf
            for kind, count in on.pop(at).items():
                free[kind] += count
                idle += count
            player.ended(str(at), now)
        while asked_at[coming] <= now:
            job = jobs[coming]
            ticket = _ticket(coming, job)
            if _fits(ticket, devices):
                player.submit(ticket)
                waiting += 1
            coming += 1
        wake_at = math.inf
        if not (waiting and idle):
            continue
        decision = player.decide(now, free)
        for ticket_id in decision.starts:
            at = int(ticket_id)
            job = jobs[at]
            held = decision.takes.get(ticket_id, {})
            is_right = held.keys() <= job.kinds and sum(held.values()) >= job.devices
            is_free = all(free[kind] >= count for kind, count in held.items())
            if not (is_right and is_free and math.isnan(starts[at])):
                raise RuntimeError(f"the policy starts job {at} on {held}, which it cannot")
            for kind, count in held.items():
                free[kind] -= count
                idle -= count
            waiting -= 1
            starts[at] = now
            on[at] = held
            heapq.heappush(ends, (now + job.duration, at))
            player.started(_lease(at, job, held, now))
        end_at = ends[0][0] if ends else math.inf
        if wake_seconds and waiting and idle:
            wake_at = now + wake_seconds
    if waiting:
        raise RuntimeError(f"{waiting} tickets wait forever: the policy starts none of them")
    return ReplayResult(jobs, starts, devices)


def _ticket(at: int, job: TraceJob) -> WaitingTicket:
    return WaitingTicket(
        id=str(at),
        member=job.member,
        group=job.group,
        devices=job.devices,
        kinds=job.kinds,
        asked_at=job.asked_at,
        seconds=job.seconds,
    )


def _lease(at: int, job: TraceJob, held: Mapping[str, DeviceCount], now: float) -> RunningLease:
    return RunningLease(
        id=str(at),
        member=job.member,
        group=job.group,
        held=held,
        started_at=now,
        ends_at=None if job.seconds is None else now + job.seconds,
    )


SHORTEST = 10.0
"""Seconds: a shorter job counts as if it had lasted this long.

So a few seconds of waiting are no disaster for a job that lasted none.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayFigures:
    """Figures of a replay. Waits are in hours."""

    jobs: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    longest: float = 0.0
    worst_group: float = 0.0
    """The mean wait of the group that waited longest on average."""
    slowdown: float = 1.0
    """Bounded slowdown: the mean of (wait + duration) / max(duration, 10 s), at least 1."""
    utilisation: float = 0.0
    """Device-seconds in use, as a share of all from the first request to the last end."""
    fairness: float = 1.0
    """Jain's index over groups of wait per device-second used, shifted so that no wait is 1.

    (sum x)^2 / (n sum x^2) with x = used / (used + wait of its devices). 1 is the same for all, 1/n
    is all for one.
    """


def figures(replayed: ReplayResult, first: int = 0, last: int | None = None) -> ReplayFigures:
    """Return the figures of the jobs from ``first`` up to ``last`` (exclusive), without refused."""
    chosen = [
        (job, start - job.asked_at)
        for job, start in zip(replayed.jobs[first:last], replayed.starts[first:last], strict=True)
        if not math.isnan(start)
    ]
    if not chosen:
        return ReplayFigures()
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
    return ReplayFigures(
        jobs=len(chosen),
        mean=fmean(waits) / HOUR,
        p50=waits[len(waits) // 2] / HOUR,
        p95=waits[int(0.95 * len(waits))] / HOUR,
        longest=waits[-1] / HOUR,
        worst_group=max(map(fmean, by_group.values())) / HOUR,
        slowdown=fmean(
            max(1.0, (wait + job.duration) / max(job.duration, SHORTEST)) for job, wait in chosen
        ),
        utilisation=sum(used.values()) / whole if whole else 0.0,
        fairness=jain([used[g] / max(1.0, used[g] + waited[g]) for g in used]),
    )


def jain(values: Sequence[float]) -> float:
    """Return Jain's index of fairness: 1 if all are equal, 1/n if one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


REQUIRED = ("timestamp", "duration", "num_gpus")
"""Columns that a trace must have; ``cluster``, ``group``, ``member``, ``seconds`` are optional."""

_MOST_DEVICES = 1_000_000
_MOST_SECONDS = 100 * 365 * 86400.0


class TraceError(ValueError):
    """The trace cannot be read; the message has the line and what is wrong with it."""


def read_trace(path: str | Path) -> list[TraceJob]:
    """Read the jobs of a CSV file (``.gz`` is unpacked), in the order of their requests.

    Columns: ``timestamp`` (``2017-10-09 07:01:55``, UTC if no zone is given, or seconds since
    1970), ``duration`` in seconds, ``num_gpus``; optionally ``cluster`` or ``group``, ``member``
    and ``seconds`` (the requested session length). Others are ignored. Raises TraceError.
    """
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as file:
            return parse_trace(file, path.name)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path.name} cannot be read: {error}.") from error


def parse_trace(lines: Iterable[str], name: str = "the trace") -> list[TraceJob]:
    """Read the jobs from lines of text, as :func:`read_trace`."""
    jobs = sorted(_jobs(lines, name), key=lambda job: job.asked_at)
    if not jobs:
        raise TraceError(f"{name} has no jobs: there is nothing to replay.")
    return jobs


def _jobs(lines: Iterable[str], name: str) -> Iterator[TraceJob]:
    reader = csv.DictReader(lines)
    missing = [column for column in REQUIRED if column not in (reader.fieldnames or ())]
    if missing:
        raise TraceError(
            f"{name} has no column {missing[0]!r} in its first line; it needs "
            f"{', '.join(REQUIRED)}, and may have group (or cluster), member and seconds."
        )
    for row in reader:
        try:
            yield _job(row)
        except ValueError as error:
            raise TraceError(f"{name}, line {reader.line_num}: {error}.") from error


def _job(row: Mapping[str, str | None]) -> TraceJob:
    for column in REQUIRED:
        if not (row.get(column) or "").strip():
            raise ValueError(f"{column} is missing")
    devices = _number(row, "num_gpus", 1, _MOST_DEVICES)
    if devices != int(devices):
        raise ValueError(f"num_gpus is {row['num_gpus']!r}; it is a whole number")
    seconds = row.get("seconds")
    return TraceJob(
        asked_at=_moment(row["timestamp"] or ""),
        duration=_number(row, "duration", 0, _MOST_SECONDS),
        devices=int(devices),
        member=row.get("member") or "",
        group=row.get("group") or row.get("cluster") or "",
        seconds=_number(row, "seconds", 1, _MOST_SECONDS) if seconds else None,
    )


def _number(row: Mapping[str, str | None], column: str, least: float, most: float) -> float:
    text = (row[column] or "").strip()
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:  # also if it is not a number
        raise ValueError(f"{column} is {text!r}; it is a number from {least:g} to {most:g}")
    return value


def _moment(text: str) -> float:
    """Parse a time as seconds since 1970."""
    try:
        value = float(text)
    except ValueError:
        pass
    else:
        if not 0 <= value < 1e11:
            raise ValueError(f"timestamp is {text!r}; in seconds since 1970 that is not a date")
        return value
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(
            f"timestamp is {text!r}; write 2017-10-09 07:01:55 or seconds since 1970"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return moment.timestamp()


DEPTH, INTERVAL = 100, 30.0
"""Slurm's ``bf_max_job_test`` (once ``default_queue_depth``) and ``bf_interval`` in seconds."""

HALF_LIFE = 7 * 86400.0
"""Slurm's ``PriorityDecayHalfLife`` in seconds."""

NEWEST = 0.1
"""The weight of the newest duration in the average that history ranking uses."""


def make(name: str, jobs: Sequence[TraceJob]) -> ReplayTarget:
    """Create a policy of :data:`NAMES`; ``jobs`` is for those that know the future."""
    return NAMES[name](jobs)


def wakes(name: str) -> float:
    """Return the seconds between the policy's looks at the whole queue; 0 if it always looks."""
    return INTERVAL if name == "easy" else 0.0


class _Policy:
    """Starts one ticket after the other, as long as a subclass names another one."""

    def started(self, lease: RunningLease) -> None:
        pass

    def ended(self, lease_id: str, at: float) -> None:
        pass

    def decide(self, now: float, free: Mapping[str, DeviceCount]) -> Decision:
        left, takes = dict(free), {}
        while ticket := self.next(now, left):
            takes[ticket.id] = _take(_fits(ticket, left), left)
        return Decision(starts=tuple(takes), takes=takes)

    def next(self, now: float, left: Mapping[str, DeviceCount]) -> WaitingTicket | None:
        """Take a ticket that fits the devices that are left, or return None."""
        raise NotImplementedError


class _Fifo(_Policy):
    """First come, first served; a ticket that does not fit holds up everybody behind it."""

    def __init__(self) -> None:
        self.line: deque[WaitingTicket] = deque()

    def submit(self, ticket: WaitingTicket) -> None:
        self.line.append(ticket)

    def next(self, now: float, left: Mapping[str, DeviceCount]) -> WaitingTicket | None:
        return self.line.popleft() if self.line and _fits(self.line[0], left) else None


class _Easy(_Fifo):
    """First come, first served, with backfill.

    The first :data:`DEPTH` tickets are tried each :data:`INTERVAL`, and may not delay the planned
    start of the first that does not fit. Durations are known exactly, unlike to a real scheduler.
    """

    def __init__(self, jobs: Sequence[TraceJob]) -> None:
        super().__init__()
        self.jobs = jobs
        self.ends: dict[str, list[tuple[float, str, DeviceCount]]] = defaultdict(list)
        self.looked_at = -math.inf

    def started(self, lease: RunningLease) -> None:
        for kind, devices in lease.held.items():
            end = lease.started_at + self.jobs[int(lease.id)].duration
            insort(self.ends[kind], (end, lease.id, devices))

    def ended(self, lease_id: str, at: float) -> None:
        for running in self.ends.values():
            running[:] = [entry for entry in running if entry[1] != lease_id]

    def decide(self, now: float, free: Mapping[str, DeviceCount]) -> Decision:
        first = super().decide(now, free)
        if not self.line or now - self.looked_at < INTERVAL:
            return first
        self.looked_at = now
        left, takes = dict(free), dict(first.takes)
        for held in takes.values():
            _take(held, left)
        head = self.line[0]
        kind, at, spare = min(
            ((k, *self._planned(head.devices, k, left)) for k in head.kinds if k in free),
            key=lambda plan: plan[1],
        )
        for ticket in [self.line[n] for n in range(1, min(DEPTH, len(self.line)))]:
            held = _fits(ticket, left)
            if not held:
                continue
            if kind in held and now + self.jobs[int(ticket.id)].duration > at:
                if ticket.devices > spare:
                    continue
                spare -= held[kind]
            takes[ticket.id] = _take(held, left)
        self.line = deque(ticket for ticket in self.line if ticket.id not in takes)
        return Decision(starts=tuple(takes), takes=takes)

    def _planned(
        self, devices: DeviceCount, kind: str, left: Mapping[str, DeviceCount]
    ) -> tuple[float, DeviceCount]:
        """Return the earliest time when this many are free, and how many more are free then."""
        free = left.get(kind, 0)
        for end, _, back in self.ends[kind]:
            free += back
            if free >= devices:
                return end, free - devices
        return math.inf, 0


class _Ranked(_Policy):
    """The smallest key goes first; a ticket that does not fit lets others pass."""

    def __init__(self, key: Callable[[WaitingTicket], float]) -> None:
        self.key = key
        self.lines: dict[
            tuple[frozenset[str], DeviceCount], list[tuple[float, int, WaitingTicket]]
        ] = {}
        self.count = 0

    def submit(self, ticket: WaitingTicket) -> None:
        self.count += 1
        line = self.lines.setdefault((ticket.kinds, ticket.devices), [])
        heapq.heappush(line, (self.key(ticket), self.count, ticket))

    def next(self, now: float, left: Mapping[str, DeviceCount]) -> WaitingTicket | None:
        heads = [line for line in self.lines.values() if line and _fits(line[0][2], left)]
        if not heads:
            return None
        return heapq.heappop(min(heads, key=lambda line: line[0][:2]))[2]


class _History(_Ranked):
    """The least expected use first.

    Expected from a moving average of the logarithm of durations of the same group and size.
    """

    def __init__(self) -> None:
        super().__init__(lambda ticket: ticket.devices * math.exp(self._expected(ticket)))
        self.known: dict[tuple[str, DeviceCount], float] = {}
        self.running: dict[str, RunningLease] = {}

    def started(self, lease: RunningLease) -> None:
        self.running[lease.id] = lease

    def ended(self, lease_id: str, at: float) -> None:
        lease = self.running.pop(lease_id)
        seen = math.log(max(1.0, at - lease.started_at))
        like = lease.group or lease.member, lease.devices
        self.known[like] = seen * NEWEST + self.known.get(like, seen) * (1 - NEWEST)

    def _expected(self, ticket: WaitingTicket) -> float:
        return self.known.get((ticket.group or ticket.member, ticket.devices), math.log(HOUR))


class _FairShare(_Policy):
    """The group with the least decayed use first; first come, first served within a group.

    A ticket that does not fit lets other groups pass.
    """

    def __init__(self) -> None:
        self.lines: dict[str, deque[WaitingTicket]] = {}
        self.running: dict[str, RunningLease] = {}
        self.used: dict[str, tuple[float, DeviceCount, float]] = {}
        """By group: device-seconds as of a moment, devices in use, the moment."""
        self.extra: defaultdict[str, float] = defaultdict(float)
        """By group: what the current decision gives it counts as if it had lasted an hour."""

    def submit(self, ticket: WaitingTicket) -> None:
        self.lines.setdefault(ticket.group or ticket.member, deque()).append(ticket)

    def started(self, lease: RunningLease) -> None:
        self.running[lease.id] = lease
        self._change(lease.group or lease.member, lease.devices, lease.started_at)

    def ended(self, lease_id: str, at: float) -> None:
        lease = self.running.pop(lease_id)
        self._change(lease.group or lease.member, -lease.devices, at)

    def decide(self, now: float, free: Mapping[str, DeviceCount]) -> Decision:
        self.extra.clear()
        return super().decide(now, free)

    def next(self, now: float, left: Mapping[str, DeviceCount]) -> WaitingTicket | None:
        heads = [name for name, line in self.lines.items() if line and _fits(line[0], left)]
        if not heads:
            return None
        name = min(heads, key=lambda group: self._use(group, now) + self.extra[group])
        ticket = self.lines[name].popleft()
        self.extra[name] += HOUR * ticket.devices
        return ticket

    def _use(self, group: str, now: float) -> float:
        used, devices, at = self.used.get(group, (0.0, 0, now))
        decay = 0.5 ** (max(0.0, now - at) / HALF_LIFE)
        return used * decay + devices * (1 - decay) * HALF_LIFE / math.log(2)

    def _change(self, group: str, devices: DeviceCount, now: float) -> None:
        before = self.used.get(group, (0.0, 0, now))[1]
        self.used[group] = self._use(group, now), before + devices, now


def _fits(ticket: WaitingTicket, left: Mapping[str, DeviceCount]) -> Mapping[str, DeviceCount]:
    """Return what a ticket takes, of the kind with the most free devices; empty if too few are."""
    best = max(ticket.kinds, key=lambda kind: left.get(kind, 0))
    if left.get(best, 0) >= ticket.devices:
        return {best: ticket.taken_of(best)}
    for pool in shared_pools(ticket.kinds).values() if ticket.devices > 1 else ():
        free = [kind for kind in pool if left.get(kind, 0) >= 1]
        if len(free) >= ticket.devices:
            return dict.fromkeys(free[: int(ticket.devices)], 1)
    return {}


def _take(
    held: Mapping[str, DeviceCount], left: dict[str, DeviceCount]
) -> Mapping[str, DeviceCount]:
    """Take these devices out of those that are left."""
    for kind, count in held.items():
        left[kind] -= count
    return held


NAMES: Mapping[str, Callable[[Sequence[TraceJob]], ReplayTarget]] = {
    "fifo": lambda jobs: _Fifo(),
    "easy": _Easy,
    "fair-share": lambda jobs: _FairShare(),
    "history": lambda jobs: _History(),
    "clairvoyant": lambda jobs: _Ranked(
        lambda ticket: jobs[int(ticket.id)].duration * ticket.devices
    ),
}
"""All policies by name.

Strict order, Slurm's backfill, decayed shares, expected use, and as a bound the least use first by
durations that nobody can know.
"""
