"""What a container uses of CPU, memory, disk and network, as the engine reads it from cgroups.

Engines answer alike for cgroups v1 and v2, with other names for a few figures. Pure.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple

_NEVER = "0001-01-01"
_FRACTION = re.compile(r"\.(\d{1,6})\d*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceUse:
    """A container's figures at one moment. None if the engine does not report a figure.

    All but those of memory are counters, which begin at 0 whenever the container starts.
    """

    read_at: datetime | None = None
    """When the engine read them, by its own clock."""
    cpu_seconds: float | None = None
    memory_bytes: int | None = None
    """In use, without the file cache that the kernel gives up first."""
    memory_highest_bytes: int | None = None
    """The most since the start, with that cache; engines with cgroups v2 do not report it."""
    memory_limit_bytes: int | None = None
    """The memory of the machine if the container has no limit of its own."""
    disk_read_bytes: int | None = None
    disk_written_bytes: int | None = None
    network_received_bytes: int | None = None
    network_sent_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedUse:
    """What the program of a run reported at its end, and what can be true of it.

    Only the engine's own part is certain: any program in the container could have written the rest.
    """

    cpu_seconds: float
    """From the start of the container."""
    memory_bytes: int
    """The most of one process."""
    cpus: int
    """CPU cores of the machine, as the engine says."""
    memory_limit_bytes: int
    """As the engine says; the memory of the machine if the container has no limit of its own."""
    started_at: datetime
    """When the container started, by the engine's clock."""
    ended_at: datetime


REPORT = "gpuspawner-use "
"""How a run's program begins its report, the last line in the log; see runs/run_program.py."""


class MemoryKill(NamedTuple):
    """The system ended a program in a container because memory was used up."""

    lease_id: str
    container_id: str
    at_nanoseconds: int
    """Since 1970, by the engine's clock: tells one from another."""


def read_stats(answer: Mapping[str, Any]) -> ResourceUse | None:
    """Return what an answer to ``/containers/ID/stats`` says; None if the container is not running.

    A figure that is missing or not a number is None.
    """
    read_at = parse_time(str(answer.get("read", "")))
    if read_at is None:
        return None
    memory = _object(answer, "memory_stats")
    nanoseconds = _count(_object(_object(answer, "cpu_stats"), "cpu_usage").get("total_usage"))
    return ResourceUse(
        read_at=read_at,
        cpu_seconds=None if nanoseconds is None else nanoseconds / 1e9,
        memory_bytes=_memory_in_use(memory),
        memory_highest_bytes=_count(memory.get("max_usage")),
        memory_limit_bytes=_count(memory.get("limit")),
        disk_read_bytes=_of_disks(answer, "read"),
        disk_written_bytes=_of_disks(answer, "write"),
        network_received_bytes=_of_networks(answer, "rx_bytes"),
        network_sent_bytes=_of_networks(answer, "tx_bytes"),
    )


def read_report(
    line: str, container: Mapping[str, Any], machine: Mapping[str, Any]
) -> ReportedUse | None:
    """Return what the last line in the log of an ended container reports; None if it does not.

    ``container`` and ``machine`` are the engine's answers to ``inspect`` and ``info``.
    """
    if not line.startswith(REPORT):
        return None
    try:
        told = json.loads(line.removeprefix(REPORT))
        seconds, memory = float(told["cpu_seconds"]), _count(told["memory_bytes"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None  # another program wrote it
    state = _object(container, "State")
    started_at = parse_time(str(state.get("StartedAt", "")))
    ended_at = parse_time(str(state.get("FinishedAt", "")))
    cpus, limit = _count(machine.get("NCPU")), _count(machine.get("MemTotal"))
    limit = _count(_object(container, "HostConfig").get("Memory")) or limit
    if memory is None or not (math.isfinite(seconds) and started_at and ended_at):
        return None
    return ReportedUse(
        cpu_seconds=seconds,
        memory_bytes=memory,
        cpus=cpus or 0,
        memory_limit_bytes=limit or 0,
        started_at=started_at,
        ended_at=ended_at,
    )


def memory_kill(event: Mapping[str, Any], label: str) -> MemoryKill | None:
    """Return what an engine's ``oom`` event says; None if it is not about a lease's container.

    ``label`` is the container label with the lease's id.
    """
    actor, at = _object(event, "Actor"), _count(event.get("timeNano"))
    lease_id = _object(actor, "Attributes").get(label)
    return MemoryKill(str(lease_id), str(actor.get("ID", "")), at) if lease_id and at else None


def parse_time(text: str) -> datetime | None:
    """Parse Docker's RFC 3339 time with nanoseconds; None for its zero time."""
    if not text or text.startswith(_NEVER):
        return None
    shortened = _FRACTION.sub(lambda match: "." + match[1].ljust(6, "0"), text)
    return datetime.fromisoformat(shortened.replace("Z", "+00:00")).astimezone(timezone.utc)


def _memory_in_use(memory: Mapping[str, Any]) -> int | None:
    used = _count(memory.get("usage"))
    details = _object(memory, "stats")
    # The total is that of v1, whose plain figure leaves out what lies below in the hierarchy.
    cache = _count(details.get("total_inactive_file", details.get("inactive_file"))) or 0
    return None if used is None else max(0, used - cache)


def _of_disks(answer: Mapping[str, Any], action: str) -> int | None:
    """Add up what was read or written on all disks; None if there was nothing of either."""
    listed = _object(answer, "blkio_stats").get("io_service_bytes_recursive")
    found = [
        count
        for each in (listed if isinstance(listed, list) else ())
        # v1 writes Read and Write, v2 read and write.
        if isinstance(each, Mapping) and str(each.get("op", "")).lower() == action
        if (count := _count(each.get("value"))) is not None
    ]
    return sum(found) if found else None


def _of_networks(answer: Mapping[str, Any], name: str) -> int | None:
    """Add up a counter of all network interfaces; None without any, as in the host's network."""
    found = [
        count
        for each in _object(answer, "networks").values()
        if isinstance(each, Mapping) and (count := _count(each.get(name))) is not None
    ]
    return sum(found) if found else None


def _object(of: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = of.get(name)
    return found if isinstance(found, Mapping) else {}


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None
