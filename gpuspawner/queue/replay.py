"""Replays of past jobs under a policy: traces, a virtual clock, and figures. Pure."""

from __future__ import annotations

import csv
import gzip
import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol

from .models import Decision, Running, Waiting

ANY = "any"
"""The kind of all devices where kinds do not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
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
    """What a replay drives: :class:`gpuspawner.queue.scheduler.Scheduler`, or a policy beside
    it."""

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

    jobs: Sequence[TraceJob]
    starts: Sequence[float]
    """When each job started, in the order of the jobs; NaN when it was refused."""
    devices: Mapping[str, int]

    @property
    def refused(self) -> int:
        """Jobs that want more devices than there are of any kind that fits."""
        return sum(map(math.isnan, self.starts))


def replay(
    jobs: Sequence[TraceJob], devices: Mapping[str, int], player: Player, wake_seconds: float = 0.0
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


def _ticket(at: int, job: TraceJob) -> Waiting:
    return Waiting(
        id=str(at),
        member=job.member,
        group=job.group,
        devices=job.devices,
        kinds=job.kinds,
        asked_at=job.asked_at,
        seconds=job.seconds,
    )


def _lease(at: int, job: TraceJob, kind: str, now: float) -> Running:
    return Running(
        id=str(at),
        member=job.member,
        group=job.group,
        held={kind: job.devices},
        started_at=now,
        ends_at=None if job.seconds is None else now + job.seconds,
    )


def _kind(job: TraceJob, free: Mapping[str, int]) -> str:
    """For a policy that does not say: the kind with the most free devices."""
    return Counter({kind: free.get(kind, 0) for kind in job.kinds}).most_common(1)[0][0]


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


REQUIRED = ("timestamp", "duration", "num_gpus")
"""Columns that a trace must have; ``cluster`` or ``group``, ``member`` and ``seconds`` may be."""

_MOST_DEVICES = 1_000_000
_MOST_SECONDS = 100 * 365 * 86400.0


class TraceError(ValueError):
    """The trace cannot be read; the sentence says which line and what is wrong with it."""


def read_trace(path: str | Path) -> list[TraceJob]:
    """The jobs of a CSV file (``.gz`` is unpacked), in the order in which they were asked for.

    Columns: ``timestamp`` (``2017-10-09 07:01:55``, UTC where no zone is given, or seconds since
    1970), ``duration`` in seconds, ``num_gpus``; ``cluster`` or ``group``, ``member`` and
    ``seconds`` (the session length asked for) where there are such. Others are ignored. Raises
    TraceError.
    """
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as file:
            return parse_trace(file, path.name)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path.name} cannot be read: {error}.") from error


def parse_trace(lines: Iterable[str], name: str = "the trace") -> list[TraceJob]:
    """The same from lines of text."""
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
    if not least <= value <= most:  # also when it is not a number
        raise ValueError(f"{column} is {text!r}; it is a number from {least:g} to {most:g}")
    return value


def _moment(text: str) -> float:
    """Seconds since 1970."""
    try:
        value = float(text)
    except ValueError:
        pass
    else:
        if not 0 <= value < 1e11:
            raise ValueError(f"timestamp is {text!r}; in seconds since 1970 that is no date")
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
