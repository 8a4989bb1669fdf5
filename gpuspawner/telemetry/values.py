"""One second of a device, and what is kept of many."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from ..model import DeviceProcess

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
