"""Samples of devices, and the minutes and hours that are made of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from ..devices.models import DeviceProcess

MINUTE = 60
HOUR = 3600
"""The lengths of what is kept, in seconds."""

THROTTLE = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "too warm (software)",
    0x40: "too warm (hardware)",
    0x80: "power brake",
    0x400: "reliability",
}
"""Why clocks are lower than they could be, by NVML's bits. Idle clocks and clocks that an admin
set are no fault, and have no entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What of a device changes seldom, and tells whether it is well. None is what it does not
    tell."""

    remap_pending: bool | None = None
    """Whether rows of its memory are to be replaced when it is reset."""
    remap_failed: bool | None = None
    """Whether it has no spare rows left for that."""
    pages_pending: bool | None = None
    """Whether pages of its memory are to be retired when it is reset (older models)."""
    link_width: int | None = None
    """Lanes of PCIe that are in use."""
    link_most: int | None = None
    """Lanes that it could have in this slot."""
    limit_milliwatts: int | None = None
    """The power that it may take now."""
    usual_milliwatts: int | None = None
    """The power that it may take as it is sold."""


@dataclass(frozen=True, slots=True)
class FarProcess(DeviceProcess):
    """A process of another machine, whose id says nothing here."""

    strange: bool = False
    """Whether it is of no container and of no job there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A device at one moment. None is what the device or its driver does not tell."""

    uuid: str
    index: int
    at: datetime
    use: int | None = None
    """Percent of the last sample period in which a kernel ran. A MIG instance has none."""
    memory_activity: int | None = None
    """Percent of the same time in which memory was read or written."""
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
    """Errors that the driver reported since the sample before."""
    processes: tuple[DeviceProcess, ...] | None = None
    """As listed last, some seconds ago."""
    condition: Condition | None = None
    """As read last, up to a minute ago."""
    error: str = ""
    """Why it does not answer; then there is nothing else."""
    silent: str = ""
    """Why nobody could ask it, as a sentence; then there is nothing else. It may be quite well."""
    resting: bool = False
    """Whether it is silent because its machine is off until it is needed."""

    @property
    def busy(self) -> bool | None:
        """Whether it works; None when that cannot be told. Where use is not known, as of a MIG
        instance, one with a compute process counts as busy."""
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
    """How long the time is that it is about: :data:`MINUTE` or :data:`HOUR`."""
    samples: int = 0
    """How many were taken, one a second."""
    known: int = 0
    """How many of them told whether the device works."""
    busy: int = 0
    """In how many it worked."""
    measured: int = 0
    """How many told the use in percent; none of a MIG instance."""
    use_sum: int = 0
    use_max: int = 0
    memory_max: int = 0
    """Bytes in use at most."""
    powered: int = 0
    """How many told the power."""
    milliwatts_sum: int = 0
    celsius_max: int | None = None
    sm_mhz_max: int | None = None
    throttle: int = 0
    ecc_errors: int = 0
    """Uncorrected memory errors that came in this time."""
    xids: tuple[int, ...] = ()
    processes: int = 0
    """Compute processes at most."""
    strangers: int = 0
    """Compute processes at most that belong to no lease."""
    error: str = ""
    """Why the device did not answer, as said last."""

    @property
    def use(self) -> float | None:
        """Mean use in percent; None when it was never told."""
        return self.use_sum / self.measured if self.measured else None

    @property
    def watts(self) -> float | None:
        """Mean power."""
        return self.milliwatts_sum / self.powered / 1000 if self.powered else None

    @property
    def judged_by(self) -> str:
        """How it is known whether it worked: ``use``, ``processes``, or not at all (empty)."""
        if self.measured:
            return "use"
        return "processes" if self.known else ""


MOST_XIDS = 20
"""How many different errors of a device are kept of one time: a sick one reports without end."""


def beginning(at: datetime, seconds: int) -> datetime:
    """When the minute or the hour began that a time lies in."""
    if seconds == MINUTE:
        return at.replace(second=0, microsecond=0)
    return at.replace(minute=0, second=0, microsecond=0)


def combine(some: Iterable[DeviceUse], since: datetime, seconds: int) -> DeviceUse:
    """Several of one device as one, in whatever order they come. Raises ValueError for none."""
    parts = sorted(some, key=lambda part: part.since)
    if not parts:
        raise ValueError("there is nothing to combine")
    temperatures = [p.celsius_max for p in parts if p.celsius_max is not None]
    clocks = [p.sm_mhz_max for p in parts if p.sm_mhz_max is not None]
    throttle = 0
    for part in parts:
        throttle |= part.throttle
    return DeviceUse(
        uuid=parts[0].uuid,
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
        throttle=throttle,
        ecc_errors=sum(p.ecc_errors for p in parts),
        xids=_different(xid for part in parts for xid in part.xids),
        processes=max(p.processes for p in parts),
        strangers=max(p.strangers for p in parts),
        error=next((p.error for p in reversed(parts) if p.error), ""),
    )


def _different(xids: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(xids))[:MOST_XIDS]


class Rollups:
    """Gathers the samples of all devices. A minute is complete when a sample of another one comes,
    also of an earlier one: the clock may be set back."""

    def __init__(self, is_strange: Callable[[DeviceProcess], bool] = lambda process: False) -> None:
        self.is_strange = is_strange
        self._open: dict[str, DeviceUse] = {}
        self._ecc: dict[str, int] = {}

    def add(self, samples: Iterable[Sample]) -> list[DeviceUse]:
        """Take one look in; the minutes that are complete by now."""
        done, latest = [], None
        for sample in samples:
            latest = beginning(sample.at, MINUTE)
            if sample.silent:
                continue
            current = self._open.get(sample.uuid)
            if current is not None and current.since != latest:
                done.append(current)
                current = None
            if current is None:
                current = DeviceUse(uuid=sample.uuid, since=latest, seconds=MINUTE)
            self._open[sample.uuid] = self._with(current, sample)
        if latest is not None:  # of a device that is gone, nothing comes that would complete it
            for uuid in [u for u, use in self._open.items() if use.since != latest]:
                done.append(self._open.pop(uuid))
        return done

    def rest(self) -> list[DeviceUse]:
        """The minutes that are not complete, at the end of all sampling."""
        left = list(self._open.values())
        self._open.clear()
        return left

    def _with(self, so_far: DeviceUse, it: Sample) -> DeviceUse:
        if it.error:
            xids = _different((*so_far.xids, *it.xids))
            return replace(so_far, samples=so_far.samples + 1, error=it.error, xids=xids)
        busy = it.busy
        compute = [p for p in it.processes or () if p.kind == "compute"]
        return DeviceUse(
            uuid=so_far.uuid,
            since=so_far.since,
            seconds=so_far.seconds,
            samples=so_far.samples + 1,
            known=so_far.known + (busy is not None),
            busy=so_far.busy + (busy is True),
            measured=so_far.measured + (it.use is not None),
            use_sum=so_far.use_sum + (it.use or 0),
            use_max=max(so_far.use_max, it.use or 0),
            memory_max=max(so_far.memory_max, it.used_bytes or 0),
            powered=so_far.powered + (it.milliwatts is not None),
            milliwatts_sum=so_far.milliwatts_sum + (it.milliwatts or 0),
            celsius_max=_greater(so_far.celsius_max, it.celsius),
            sm_mhz_max=_greater(so_far.sm_mhz_max, it.sm_mhz),
            throttle=so_far.throttle | it.throttle,
            ecc_errors=so_far.ecc_errors + self._new_ecc(it),
            xids=_different((*so_far.xids, *it.xids)) if it.xids else so_far.xids,
            processes=max(so_far.processes, len(compute)),
            strangers=max(so_far.strangers, sum(map(self.is_strange, compute))),
            error=so_far.error,
        )

    def _new_ecc(self, it: Sample) -> int:
        """Errors since the last count of this device. The count begins anew with the driver."""
        if it.ecc_errors is None:
            return 0
        before = self._ecc.get(it.uuid, it.ecc_errors)
        self._ecc[it.uuid] = it.ecc_errors
        return it.ecc_errors - before if it.ecc_errors >= before else it.ecc_errors


def _greater(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)
