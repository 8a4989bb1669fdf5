"""How busy MIG instances are: the driver's performance counters (GPM), on Hopper and newer.

A figure is the difference of two samples of the counters, whose memory is NVML's and must be freed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pynvml

MEASURED_EVERY = 0.5
"""The shortest time in seconds between two samples of an instance: over less, the counters say
little."""

_METRICS = (
    pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL,
    pynvml.NVML_GPM_METRIC_SM_UTIL,
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
)


@dataclass(frozen=True, slots=True)
class InstanceUse:
    """What a MIG instance did between two samples, in percent; None if it is not known."""

    use: int | None = None
    """Of the time in which anything ran on it."""
    memory_activity: int | None = None
    """Of its memory's bandwidth."""


@dataclass(slots=True)
class _MeasuredInstance:
    """A MIG instance, and its last two samples."""

    id: int
    """The driver's number of the GPU instance that it is on."""
    at: float = -math.inf
    newest: Any = None
    """The last sample; None before the first one, or after one failed."""
    spare: Any = None
    """The memory for the next one."""
    found: InstanceUse = InstanceUse()


class InstanceMeter:
    """Measures MIG instances. For one thread at a time."""

    def __init__(self) -> None:
        self._can_be_measured: dict[str, bool] = {}
        self._instances: dict[str, _MeasuredInstance] = {}
        self._asked = pynvml.c_nvmlGpmMetricsGet_t()
        self._asked.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self._asked.numMetrics = len(_METRICS)
        for number, metric in enumerate(_METRICS):
            self._asked.metrics[number].metricId = metric

    def measure(
        self, gpu: str, handle: Any, parts: Mapping[str, Any], clock: float
    ) -> dict[str, InstanceUse]:
        """Return what each MIG device of a GPU did since the last time, by UUID.

        A device is missing if that cannot be known: the GPU is older than Hopper, this was the
        first time, or several devices share one GPU instance.

        Args:
            gpu: The GPU's UUID.
            handle: NVML's handle of it.
            parts: The handles of its MIG devices, by UUID.
            clock: Seconds of a monotonic clock.
        """
        if gpu not in self._can_be_measured:
            self._can_be_measured[gpu] = _can_be_measured(handle)
        if not self._can_be_measured[gpu]:
            return {}
        for uuid, part in parts.items():
            if uuid not in self._instances:
                with suppress(pynvml.NVMLError):
                    made = _MeasuredInstance(pynvml.nvmlDeviceGetGpuInstanceId(part))
                    self._instances[uuid] = made
        here = {uuid: self._instances[uuid] for uuid in parts if uuid in self._instances}
        devices = Counter(each.id for each in here.values())
        found = {}
        for uuid, each in here.items():
            if devices[each.id] == 1:
                if clock - each.at >= MEASURED_EVERY:
                    each.at, each.found = clock, self._sample(handle, each)
                found[uuid] = each.found
        return found

    def keep(self, uuids: Mapping[str, Any]) -> None:
        """Free the samples of all MIG devices but these."""
        for uuid in self._instances.keys() - uuids.keys():
            _free(self._instances.pop(uuid))

    def free(self) -> None:
        """Free all samples, and start over: NVML is closed, or was."""
        self.keep({})
        self._can_be_measured.clear()

    def _sample(self, handle: Any, it: _MeasuredInstance) -> InstanceUse:
        before, it.newest = it.newest, None
        try:
            if it.spare is None:
                it.spare = pynvml.nvmlGpmSampleAlloc()
            pynvml.nvmlGpmMigSampleGet(handle, it.id, it.spare)
            it.newest, it.spare = it.spare, before
            if before is None:
                return InstanceUse()
            self._asked.sample1, self._asked.sample2 = before, it.newest
            pynvml.nvmlGpmMetricsGet(self._asked)
        except pynvml.NVMLError:
            if it.newest is None and before is not None:
                _free_sample(before)
            return InstanceUse()
        graphics, multiprocessors, memory = map(self._percent, range(len(_METRICS)))
        return InstanceUse(multiprocessors if graphics is None else graphics, memory)

    def _percent(self, number: int) -> int | None:
        metric = self._asked.metrics[number]
        is_sensible = math.isfinite(metric.value) and 0 <= metric.value <= 100
        is_known = metric.nvmlReturn == pynvml.NVML_SUCCESS and is_sensible
        return round(metric.value) if is_known else None


def _can_be_measured(handle: Any) -> bool:
    try:
        return bool(pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)
    except pynvml.NVMLError:
        return False


def _free(it: _MeasuredInstance) -> None:
    for sample in (it.newest, it.spare):
        if sample is not None:
            _free_sample(sample)


def _free_sample(sample: Any) -> None:
    with suppress(pynvml.NVMLError):
        pynvml.nvmlGpmSampleFree(sample)
