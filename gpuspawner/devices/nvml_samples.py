"""What the GPUs of this machine do from second to second, as NVML tells it.

A look takes few calls for each device: its use and its memory every time; power, temperature,
clocks and errors every :data:`SLOW_EVERY` seconds; the list of its processes, by far the slowest
call, at most every ``processes_every`` seconds and never for all devices in one look.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pynvml

from ..model import DeviceProcess
from ..telemetry import Sample
from ..telemetry.values import Condition
from .base import LooksLost
from .nvml import NVMLDevices, running_processes
from .nvml_asking import DriverLost, Unanswered, ask, ask_driver, ask_or
from .nvml_condition import LOST, condition_of

log = logging.getLogger(__name__)

SLOW_EVERY = 10.0
"""Seconds between two readings of what changes slowly."""

CONDITION_EVERY = 60.0
"""Seconds between two readings of what changes seldom."""

MOST_EVENTS = 64
"""How many events are taken at a time: a sick device reports without end."""

_MOST_BYTES = 2**50
_MOST_MILLIWATTS = 10_000_000
_MOST_CELSIUS = 200
_MOST_MHZ = 100_000


@dataclass(slots=True)
class _Kept:
    """Of one device, what is not read at every look."""

    slow_at: float = -math.inf
    condition_at: float = -math.inf
    listed_at: float = -math.inf
    slow: dict[str, Any] = field(default_factory=dict)
    processes: tuple[DeviceProcess, ...] | None = None
    condition: Condition | None = None
    mig: bool = False
    watched: bool = False
    """Whether NVML was told to report its errors."""


class NVMLSampler:
    """Samples through the opening of NVML that its devices have. For one thread."""

    def __init__(self, devices: NVMLDevices, processes_every: float = 60.0) -> None:
        self._devices = devices
        self._processes_every = processes_every
        self._opening = -1
        self._kept: dict[str, _Kept] = {}
        self._seen: dict[str, int] = {}
        self._events: Any = None
        self._ailing = False
        self._clock = 0.0
        self._turn = ""

    def sample(self, now: datetime, monotonic: float) -> tuple[Sample, ...]:
        """One look at every device that is there, or was: one that does not answer, or is gone,
        has an error. ``monotonic`` is in seconds and paces what is read seldom.

        Raises LooksLost with the reason when NVML as a whole does not answer.
        """
        try:
            return self._sample(now, monotonic)
        except DriverLost as lost:
            self._opening = -1
            self._devices.close()
            raise LooksLost(str(lost)) from lost

    def _sample(self, now: datetime, monotonic: float) -> tuple[Sample, ...]:
        opening = self._devices.openings(now, ailing=self._ailing)
        if opening != self._opening:
            self._begin(opening)
        self._clock, self._turn = monotonic, self._next_listed(monotonic)
        found: dict[str, Sample] = {}
        silent: dict[int, str] = {}
        xids = self._reported()
        for index in range(ask_driver(pynvml.nvmlDeviceGetCount)):
            try:
                handle = ask("handle", pynvml.nvmlDeviceGetHandleByIndex, index)
                uuid = ask("UUID", pynvml.nvmlDeviceGetUUID, handle)
            except Unanswered as failure:
                silent[index] = str(failure)
                continue
            for sample in self._of_gpu(uuid, handle, index, now, xids.get(uuid, ())):
                found[sample.uuid] = sample
        for uuid, index in self._seen.items():
            if uuid not in found:
                reason = silent.get(index, "NVML does not list it any more.")
                found[uuid] = Sample(uuid=uuid, index=index, at=now, error=reason)
        self._seen = {uuid: sample.index for uuid, sample in found.items()}
        self._ailing = bool(silent) or any(sample.error for sample in found.values())
        return tuple(found.values())

    def _begin(self, opening: int) -> None:
        """NVML was opened anew: whatever it gave before is worth nothing."""
        self._opening, self._kept, self._events = opening, {}, None
        try:
            self._events = ask("events", pynvml.nvmlEventSetCreate)
        except Unanswered as failure:
            log.info("Errors of GPUs (Xid) are not reported here. %s", failure)

    def _of_gpu(
        self, uuid: str, handle: Any, index: int, now: datetime, xids: tuple[int, ...]
    ) -> Iterator[Sample]:
        kept = self._kept_of(uuid)
        try:
            slow_is_due = self._clock - kept.slow_at >= SLOW_EVERY
            if slow_is_due:
                kept.slow_at = self._clock
                self._watch(handle, kept)
                mode, _ = ask_or((0, 0), "MIG mode", pynvml.nvmlDeviceGetMigMode, handle)
                kept.mig = mode == pynvml.NVML_DEVICE_MIG_ENABLE
                kept.slow = _slow(handle)
            if self._clock - kept.condition_at >= CONDITION_EVERY:
                kept.condition_at = self._clock
                kept.condition = condition_of(handle)
            if kept.mig:
                yield from self._of_instances(handle, index, now, kept, xids)
                return
            yield self._read(uuid, handle, index, now, kept, xids)
        except Unanswered as failure:
            yield Sample(uuid=uuid, index=index, at=now, xids=xids, error=str(failure))

    def _of_instances(
        self, handle: Any, index: int, now: datetime, gpu: _Kept, xids: tuple[int, ...]
    ) -> Iterator[Sample]:
        """An instance is as warm as its GPU, and what the GPU reports concerns each."""
        slots = ask("number of instances", pynvml.nvmlDeviceGetMaxMigDeviceCount, handle)
        for slot in range(slots):
            try:
                part = ask("instance", pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot)
                uuid = ask("UUID", pynvml.nvmlDeviceGetUUID, part)
            except Unanswered:
                continue  # an empty slot; one that was there and is not is missed by its UUID
            kept = self._kept_of(uuid)
            kept.slow, kept.condition = gpu.slow | {"milliwatts": None}, gpu.condition
            try:
                yield self._read(uuid, part, index, now, kept, xids, whole=False)
            except Unanswered as failure:
                yield Sample(uuid=uuid, index=index, at=now, xids=xids, error=str(failure))

    def _read(
        self,
        uuid: str,
        handle: Any,
        index: int,
        now: datetime,
        kept: _Kept,
        xids: tuple[int, ...],
        *,
        whole: bool = True,
    ) -> Sample:
        rates = None
        if whole:  # of an instance NVML cannot tell
            rates = ask_or(None, "use", pynvml.nvmlDeviceGetUtilizationRates, handle)
        memory = ask_or(None, "memory", pynvml.nvmlDeviceGetMemoryInfo, handle)
        if self._turn == uuid:
            kept.processes = running_processes(handle)
        return Sample(
            uuid=uuid,
            index=index,
            at=now,
            use=None if rates is None else _sensible("use", rates.gpu, 100),
            memory_activity=None if rates is None else _sensible("use", rates.memory, 100),
            used_bytes=None if memory is None else _sensible("memory", memory.used, _MOST_BYTES),
            total_bytes=None if memory is None else _sensible("memory", memory.total, _MOST_BYTES),
            processes=kept.processes,
            xids=xids,
            condition=kept.condition,
            **kept.slow,
        )

    def _kept_of(self, uuid: str) -> _Kept:
        if uuid not in self._kept:
            self._kept[uuid] = _Kept()
            self._turn = self._turn or self._next_listed(self._clock)
        return self._kept[uuid]

    def _next_listed(self, monotonic: float) -> str:
        """Whose processes are listed in this look: it was longest ago; empty when none is due."""
        waits = ((kept.listed_at, uuid) for uuid, kept in self._kept.items() if not kept.mig)
        at, uuid = min(waits, default=(monotonic, ""))
        if monotonic - at < self._processes_every:
            return ""
        self._kept[uuid].listed_at = monotonic  # also when it does not answer: others wait
        return uuid

    # Errors that the driver reports.

    def _watch(self, handle: Any, kept: _Kept) -> None:
        if self._events is None or kept.watched:
            return
        kept.watched = True
        kinds = pynvml.nvmlEventTypeXidCriticalError
        ask_or(None, "events", pynvml.nvmlDeviceRegisterEvents, handle, kinds, self._events)

    def _reported(self) -> dict[str, tuple[int, ...]]:
        """The errors since the last look, by the GPU that they came from."""
        found: dict[str, tuple[int, ...]] = {}
        for _ in range(MOST_EVENTS if self._events is not None else 0):
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
                uuid = pynvml.nvmlDeviceGetUUID(event.device)
            except pynvml.NVMLError as error:
                if error.value not in (pynvml.NVML_ERROR_TIMEOUT, pynvml.NVML_ERROR_GPU_IS_LOST):
                    log.warning("Errors of GPUs (Xid) are not reported any more: %s", error)
                    self._events = None
                break
            found[uuid] = (*found.get(uuid, ()), int(event.eventData))
        return found


_SLOW: tuple[tuple[str, str, int, Callable[[Any], Any]], ...] = (
    ("milliwatts", "power", _MOST_MILLIWATTS, pynvml.nvmlDeviceGetPowerUsage),
    (
        "celsius",
        "temperature",
        _MOST_CELSIUS,
        lambda handle: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
    ),
    (
        "sm_mhz",
        "clock",
        _MOST_MHZ,
        lambda handle: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
    ),
    (
        "memory_mhz",
        "memory's clock",
        _MOST_MHZ,
        lambda handle: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
    ),
    (
        "throttle",
        "reasons to be slow",
        2**32,
        pynvml.nvmlDeviceGetCurrentClocksThrottleReasons,
    ),
    (
        "ecc_errors",
        "memory errors",
        2**63,
        lambda handle: pynvml.nvmlDeviceGetTotalEccErrors(
            handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        ),
    ),
)


def _slow(handle: Any) -> dict[str, Any]:
    """Each that the device tells; that one of them fails, or makes no sense, costs no other."""
    found: dict[str, Any] = {}
    for name, what, most, call in _SLOW:
        try:
            value = ask_or(None, what, call, handle)
            found[name] = None if value is None else _sensible(what, value, most)
        except Unanswered as failure:
            if failure.code in LOST:
                raise
            found[name] = None
    found["throttle"] = found["throttle"] or 0
    return found


def _sensible(what: str, value: int, most: int) -> int:
    if not 0 <= value <= most:
        text = f"Its {what} makes no sense: {value}."
        raise Unanswered(text, pynvml.NVML_ERROR_UNKNOWN)
    return value
