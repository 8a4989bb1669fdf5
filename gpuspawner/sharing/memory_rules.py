"""The rules of the memory guard: who uses more than their share of a shared device. Pure.

A member who is alone on a device may use all of it. As soon as others have a slot there too, a
member over their share is told after :data:`TELL_SECONDS`, and after :data:`END_SECONDS` the
largest process of their lease is ended. If the device is nearly full, the process is ended at once:
the next allocation of somebody within their share would fail. A lease within its share never loses
a process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

TELL_SECONDS = 10.0
"""How long a lease may be over its share before its member is told."""

END_SECONDS = 60.0
"""How long a lease may be over its share before its largest process is ended."""

LEAST_FREE = 0.05
"""The part of a device's memory that has to be free."""


@dataclass(frozen=True, slots=True)
class LeasedProcess:
    """A process on a device, of a lease that has a slot there."""

    lease_id: str
    pid: int
    used_bytes: int
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """The memory of a shared device at one moment."""

    uuid: str
    total_bytes: int
    free_bytes: int
    shares: Mapping[str, int]
    """Bytes that each lease on the device may use, by lease id."""
    processes: tuple[LeasedProcess, ...] = ()
    """Those whose lease and memory are known."""


@dataclass(frozen=True, slots=True)
class Overuse:
    """A lease that uses more than its share."""

    since: float
    """When that was first seen, in seconds of a monotonic clock."""
    told: bool = False
    """True if its member was told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """A lease over its share, with the figures that its member is told."""

    lease_id: str
    uuid: str
    used_bytes: int
    share_bytes: int
    others: int
    """How many other leases are on the device."""
    process: LeasedProcess
    """Its largest process there."""
    device_is_full: bool = False


@dataclass(frozen=True, slots=True)
class Judgement:
    """What follows from one look at a device."""

    over: Mapping[str, Overuse] = field(default_factory=dict)
    """The leases over their share, by id: what the next call gets as ``before``."""
    to_tell: tuple[Excess, ...] = ()
    to_end: Excess | None = None
    """The lease that loses its largest process; one at a time, as it may free enough memory."""


def judge(now: float, seen: SharedMemory, before: Mapping[str, Overuse]) -> Judgement:
    """Return who is over their share of a device, and what is to be done about it.

    Args:
        now: Seconds of a monotonic clock.
        seen: The device's memory.
        before: The leases over their share in the last look; empty after a look that failed.
    """
    if len(seen.shares) < 2:
        return Judgement()
    used = Counter[str]()
    for process in seen.processes:
        used[process.lease_id] += process.used_bytes
    is_full = seen.free_bytes < LEAST_FREE * seen.total_bytes
    over: dict[str, Overuse] = {}
    to_tell: list[Excess] = []
    to_end: list[Excess] = []
    for lease_id, share_bytes in seen.shares.items():
        if used[lease_id] <= share_bytes:
            continue
        state = before.get(lease_id, Overuse(now))
        excess = Excess(
            lease_id=lease_id,
            uuid=seen.uuid,
            used_bytes=used[lease_id],
            share_bytes=share_bytes,
            others=len(seen.shares) - 1,
            process=max(
                (each for each in seen.processes if each.lease_id == lease_id),
                key=lambda each: (each.used_bytes, each.pid),
            ),
            device_is_full=is_full,
        )
        if is_full or now - state.since >= END_SECONDS:
            to_end.append(excess)
        elif not state.told and now - state.since >= TELL_SECONDS:
            to_tell.append(excess)
            state = Overuse(state.since, told=True)
        over[lease_id] = state
    worst = max(to_end, key=lambda each: each.used_bytes - each.share_bytes, default=None)
    return Judgement(over, tuple(to_tell), worst)
