"""Samples of devices, and the minutes and hours made from them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from operator import or_
from typing import Any

from ..devices.models import DeviceProcess

MINUTE = 60
HOUR = 3600
"""The lengths of stored periods, in seconds."""

THROTTLE = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "too warm (software)",
    0x40: "too warm (hardware)",
    0x80: "power brake",
    0x400: "reliability",
}
"""Reasons for reduced clocks, by NVML's bits.

Idle clocks and clocks set by an admin are no fault, and not listed.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Rarely changing values that show a device's health; None if not reported."""

    remap_pending: bool | None = None
    """True if memory rows will be replaced at the next reset."""
    remap_failed: bool | None = None
    """True if it has no spare rows left for that."""
    pages_pending: bool | None = None
    """True if memory pages will be retired at the next reset (older models)."""
    link_width: int | None = None
    """PCIe lanes in use."""
    link_most: int | None = None
    """PCIe lanes possible in this slot."""
    limit_milliwatts: int | None = None
    """Its present power limit."""
    usual_milliwatts: int | None = None
    """Its default power limit."""


@dataclass(frozen=True, slots=True)
class RemoteProcess(DeviceProcess):
    """A process on another machine, whose id is meaningless here."""

    strange: bool = False
    """True if it belongs to no container and no job there."""


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What one process did on a device in the last sample period, in percent."""

    pid: int
    use: int
    """Of the time in which its kernels ran."""
    memory_activity: int = 0
    """Of the time in which it read or wrote memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A device at one moment. None if the device or its driver does not report a value."""

    uuid: str
    index: int
    at: datetime
    lease_id: str = ""
    """The lease whose work this is, on a shared device; empty for the work of the whole device."""
    use: int | None = None
    """Percent of the last sample period in which a kernel ran.

    None for a MIG instance, except on Hopper and newer.
    """
    memory_activity: int | None = None
    """Percent of the same period in which memory was read or written."""
    used_bytes: int | None = None
    total_bytes: int | None = None
    milliwatts: int | None = None
    celsius: int | None = None
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    throttle: int = 0
    """Bits of :data:`THROTTLE`."""
    ecc_errors: int | None = None
    """Uncorrected memory errors since the driver was loaded."""
    xids: tuple[int, ...] = ()
    """Driver errors since the previous sample."""
    processes: tuple[DeviceProcess, ...] | None = None
    """As last listed, some seconds ago."""
    listed_at: float | None = None
    """When that was, in seconds of the sampler's monotonic clock; None if it is not known."""
    process_use: tuple[ProcessUse, ...] | None = None
    """The use by each process that worked; None if unknown, or if nobody needs it."""
    condition: Condition | None = None
    """As last read, up to a minute ago."""
    error: str = ""
    """Why it is not responding; then there are no other values."""
    silent: str = ""
    """Why it could not be queried, as a sentence; then there are no other values.

    The device itself may be healthy.
    """
    resting: bool = False
    """True if it is silent because its machine is off until needed."""

    @property
    def busy(self) -> bool | None:
        """Whether it works: True, False, or None if unknown.

        If the use is unknown, as for some MIG instances, a compute process counts as work.
        """
        if self.error or self.silent:
            return None
        if self.use is not None:
            return self.use > 0
        if self.processes is None:
            return None
        return any(process.kind == "compute" for process in self.processes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """What a device did in a minute or an hour. Sums, so that any two can be combined."""

    uuid: str
    since: datetime
    seconds: int
    """The length of the period: :data:`MINUTE` or :data:`HOUR`."""
    lease_id: str = ""
    """As in :class:`Sample`."""
    samples: int = 0
    """How many samples were taken, one per second."""
    known: int = 0
    """How many of them showed whether the device worked."""
    busy: int = 0
    """In how many it worked."""
    measured: int = 0
    """How many showed the use in percent."""
    use_sum: int = 0
    use_max: int = 0
    memory_max: int = 0
    """Maximum bytes in use."""
    powered: int = 0
    """How many showed the power."""
    milliwatts_sum: int = 0
    celsius_max: int | None = None
    sm_mhz_max: int | None = None
    throttle: int = 0
    ecc_errors: int = 0
    """New uncorrected memory errors in this period."""
    xids: tuple[int, ...] = ()
    processes: int = 0
    """Maximum number of compute processes."""
    strangers: int = 0
    """Maximum number of compute processes without a lease."""
    error: str = ""
    """Why the device did not respond, as last reported."""

    @property
    def use(self) -> float | None:
        """Mean use in percent; None if never reported."""
        return self.use_sum / self.measured if self.measured else None

    @property
    def watts(self) -> float | None:
        """Mean power."""
        return self.milliwatts_sum / self.powered / 1000 if self.powered else None

    @property
    def judged_by(self) -> str:
        """How it is known if it worked: ``use``, ``processes``, or "" for unknown."""
        if self.measured:
            return "use"
        return "processes" if self.known else ""


MOST_XIDS = 20
"""Maximum different errors of a device kept per period: a sick one reports endlessly."""


def beginning(at: datetime, seconds: int) -> datetime:
    """Return the start of the minute or hour of a time."""
    if seconds == MINUTE:
        return at.replace(second=0, microsecond=0)
    return at.replace(minute=0, second=0, microsecond=0)


def combine(some: Iterable[DeviceUse], since: datetime, seconds: int) -> DeviceUse:
    """Combine periods of one device or lease, in any order. Raises ValueError for none."""
    parts = sorted(some, key=lambda part: part.since)
    if not parts:
        raise ValueError("there is nothing to combine")
    temperatures = [p.celsius_max for p in parts if p.celsius_max is not None]
    clocks = [p.sm_mhz_max for p in parts if p.sm_mhz_max is not None]
    return DeviceUse(
        uuid=parts[0].uuid,
        lease_id=parts[0].lease_id,
        since=since,
        seconds=seconds,
        samples=sum(p.samples for p in parts),
        known=sum(p.known for p in parts),
        busy=sum(p.busy for p in parts),
        measured=sum(p.measured for p in parts),
        use_sum=sum(p.use_sum for p in parts),
        use_max=max(p.use_max for p in parts),
        memory_max=max(p.memory_max for p in parts),
        powered=sum(p.powered for p in parts),
        milliwatts_sum=sum(p.milliwatts_sum for p in parts),
        celsius_max=max(temperatures, default=None),
        sm_mhz_max=max(clocks, default=None),
        throttle=reduce(or_, (p.throttle for p in parts)),
        ecc_errors=sum(p.ecc_errors for p in parts),
        xids=tuple(dict.fromkeys(xid for part in parts for xid in part.xids))[:MOST_XIDS],
        processes=max(p.processes for p in parts),
        strangers=max(p.strangers for p in parts),
        error=next((p.error for p in reversed(parts) if p.error), ""),
    )


class Rollups:
    """Collects the samples of all devices into minutes.

    A minute is complete when a sample of another minute comes, even of an earlier one: the clock
    may be set back.
    """

    def __init__(self, is_strange: Callable[[DeviceProcess], bool] = lambda process: False) -> None:
        self.is_strange = is_strange
        self._open: dict[tuple[str, str], DeviceUse] = {}
        self._ecc: dict[str, int] = {}

    def add(self, samples: Iterable[Sample]) -> list[DeviceUse]:
        """Add one round of samples, and return the minutes that are now complete."""
        done, latest = [], None
        for sample in samples:
            latest = beginning(sample.at, MINUTE)
            if sample.silent:
                continue
            key = sample.uuid, sample.lease_id
            current = self._open.get(key)
            if current is not None and current.since != latest:
                done.append(current)
                current = None
            second = self._second(sample, latest)
            parts = [current, second] if current else [second]
            self._open[key] = combine(parts, latest, MINUTE)
        if latest is not None:  # a missing device has no more samples to complete its minute
            for key in [key for key, use in self._open.items() if use.since != latest]:
                done.append(self._open.pop(key))
        return done

    def rest(self) -> list[DeviceUse]:
        """Return the incomplete minutes, when sampling ends."""
        left = list(self._open.values())
        self._open.clear()
        return left

    def _second(self, it: Sample, since: datetime) -> DeviceUse:
        """Return what a sample shows, as a period."""
        one: dict[str, Any] = {"uuid": it.uuid, "lease_id": it.lease_id, "since": since}
        one |= {"seconds": MINUTE, "samples": 1}
        if it.error:
            return DeviceUse(**one, xids=it.xids, error=it.error)
        compute = [p for p in it.processes or () if p.kind == "compute"]
        return DeviceUse(
            **one,
            known=int(it.busy is not None),
            busy=int(it.busy is True),
            measured=int(it.use is not None),
            use_sum=it.use or 0,
            use_max=it.use or 0,
            memory_max=it.used_bytes or 0,
            powered=int(it.milliwatts is not None),
            milliwatts_sum=it.milliwatts or 0,
            celsius_max=it.celsius,
            sm_mhz_max=it.sm_mhz,
            throttle=it.throttle,
            ecc_errors=self._new_ecc(it),
            xids=it.xids,
            processes=len(compute),
            strangers=sum(map(self.is_strange, compute)),
        )

    def _new_ecc(self, it: Sample) -> int:
        """Return the errors since the last count of this device, which restarts with the driver."""
        if it.ecc_errors is None:
            return 0
        before = self._ecc.get(it.uuid, it.ecc_errors)
        self._ecc[it.uuid] = it.ecc_errors
        return it.ecc_errors - before if it.ecc_errors >= before else it.ecc_errors
