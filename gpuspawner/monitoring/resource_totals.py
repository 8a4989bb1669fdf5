"""What the server or run of a lease used in all, added up over restarts of its container. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from ..engines.resource_use import ReportedUse, ResourceUse

COUNTERS = (
    "cpu_seconds",
    "disk_read_bytes",
    "disk_written_bytes",
    "network_received_bytes",
    "network_sent_bytes",
)
"""The figures that are counters in the engine's answers, and sums here."""

SHORTEST_RESTART = timedelta(seconds=1)
"""Counters that are smaller this soon after a sample were read before it, because no container
restarts so fast."""
LATEST_ANSWER = timedelta(minutes=5)
"""No answer is later than this. A sample that seems older than that was read after the engine's
clock was set back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceTotals:
    """What a lease used of its machine until ``sampled_at``. None if it was never reported."""

    cpu_seconds: float | None = None
    memory_bytes: int | None = None
    """At the last sample."""
    memory_peak_bytes: int | None = None
    """The most in any sample, or of one process as a run reported it at its end."""
    memory_limit_bytes: int | None = None
    """The memory of the machine if the container has no limit of its own."""
    disk_read_bytes: int | None = None
    disk_written_bytes: int | None = None
    network_received_bytes: int | None = None
    network_sent_bytes: int | None = None
    sampled_at: datetime | None = None
    memory_kills: int = 0
    """How often the system ended a program in the container because memory was used up."""

    @property
    def cpu_time(self) -> timedelta | None:
        """The time of one CPU."""
        return None if self.cpu_seconds is None else timedelta(seconds=self.cpu_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentUse:
    """What all servers and runs of an environment used since the first one."""

    cpu_seconds: float = 0.0
    disk_read_bytes: int = 0
    disk_written_bytes: int = 0
    network_received_bytes: int = 0
    network_sent_bytes: int = 0
    memory_kills: int = 0
    """How often the system ended a program because memory was used up."""

    @classmethod
    def between(cls, before: ResourceTotals, after: ResourceTotals) -> EnvironmentUse:
        """Return by how much the totals of a lease grew."""
        return cls(
            **{
                each.name: (getattr(after, each.name) or 0) - (getattr(before, each.name) or 0)
                for each in fields(cls)
            }
        )

    def plus(self, other: EnvironmentUse) -> EnvironmentUse:
        """Return the figures of both."""
        return EnvironmentUse(
            **{
                each.name: getattr(self, each.name) + getattr(other, each.name)
                for each in fields(self)
            }
        )


class ResourceSum(NamedTuple):
    """What several leases used together. None if none of them was measured."""

    cpu_seconds: float | None = None
    memory_peak_bytes: int | None = None
    """The most that one of them used."""

    def plus(self, other: ResourceSum) -> ResourceSum:
        """Return the figures of both."""
        seconds = [it for it in (self.cpu_seconds, other.cpu_seconds) if it is not None]
        peaks = (self.memory_peak_bytes, other.memory_peak_bytes)
        known = [it for it in peaks if it is not None]
        return ResourceSum(sum(seconds) if seconds else None, max(known, default=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRecord:
    """The totals of a lease, and what is needed to go on adding."""

    totals: ResourceTotals = field(default_factory=ResourceTotals)
    container_id: str = ""
    """The container of the last sample."""
    last: ResourceUse = field(default_factory=ResourceUse)
    """The counters as last reported; those of memory are not kept."""
    last_kill_nanoseconds: int = 0
    """When the newest counted kill happened, by the engine's clock since 1970."""
    told_at: datetime | None = None
    """When the member was last told of a kill."""


def add_sample(
    before: ResourceRecord, container_id: str, use: ResourceUse, at: datetime
) -> ResourceRecord:
    """Add a sample of a lease's container, which was read at ``at``.

    Its counters start again from zero in another container and after a restart, which shows in a
    smaller CPU time. Otherwise, a counter is smaller because it lost a disk or a network, and adds
    nothing. A sample that was read before the last one but comes later adds nothing either.
    """
    last, totals = before.last, before.totals
    if _is_late(before, container_id, use, at):
        return before
    restarted = container_id != before.container_id or _is_less(use.cpu_seconds, last.cpu_seconds)
    sums: dict[str, Any] = {}
    counters: dict[str, Any] = {}
    for name in COUNTERS:
        new, old = getattr(use, name), getattr(last, name)
        base = 0 if restarted or old is None else old
        total = getattr(totals, name)
        sums[name] = total if new is None else (total or 0) + max(0, new - base)
        counters[name] = (None if restarted else old) if new is None else new
    known = [it for it in (totals.memory_peak_bytes, use.memory_bytes) if it is not None]
    limit = use.memory_limit_bytes
    return replace(
        before,
        totals=replace(
            totals,
            **sums,
            memory_bytes=use.memory_bytes,
            memory_peak_bytes=max(known, default=None),
            memory_limit_bytes=totals.memory_limit_bytes if limit is None else limit,
            sampled_at=at,
        ),
        container_id=container_id,
        last=ResourceUse(**counters),
    )


def add_report(before: ResourceRecord, container_id: str, told: ReportedUse) -> ResourceRecord:
    """Add what the program of a run reported at its end, from the last sample on.

    It only adds, and no more than the machine could have done since: any program in the container
    could have written it. A report that cannot be true changes nothing.
    """
    totals, last = before.totals, before.last
    if container_id != before.container_id:
        last = ResourceUse()
    since = told.started_at
    if last.cpu_seconds is not None and totals.sampled_at is not None:
        since = max(since, totals.sampled_at)
    # The time and the counters of a sample are not read in the same instant.
    passed = max(timedelta(), told.ended_at - since) + SHORTEST_RESTART
    more = told.cpu_seconds - (last.cpu_seconds or 0.0)
    if not 0 <= more <= told.cpus * passed.total_seconds():
        return before
    if told.memory_bytes > told.memory_limit_bytes:
        return before
    return replace(
        before,
        totals=replace(
            totals,
            cpu_seconds=(totals.cpu_seconds or 0.0) + more,
            memory_peak_bytes=max(totals.memory_peak_bytes or 0, told.memory_bytes),
            memory_limit_bytes=totals.memory_limit_bytes or told.memory_limit_bytes,
            sampled_at=told.ended_at,
        ),
        container_id=container_id,
        last=replace(last, cpu_seconds=told.cpu_seconds),
    )


def _is_late(before: ResourceRecord, container_id: str, use: ResourceUse, at: datetime) -> bool:
    """Return True if a sample is older than the last one: two processes sample a container."""
    if (last_at := before.totals.sampled_at) is None:
        return False
    age = at - last_at
    if age < timedelta():
        return age >= -LATEST_ANSWER
    # The time and the counters are not read in the same instant.
    is_smaller = _is_less(use.cpu_seconds, before.last.cpu_seconds)
    return is_smaller and container_id == before.container_id and age < SHORTEST_RESTART


def _is_less(new: float | None, old: float | None) -> bool:
    return new is not None and old is not None and new < old
