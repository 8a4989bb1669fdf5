"""The GPUs of this machine as NVML reports them: inventory, condition and samples.

A sample takes few calls per device: use and memory every time; power, temperature, clocks and
errors every :data:`SLOW_EVERY` seconds; the list of processes, by far the slowest call, at most
every ``processes_every`` seconds and never for all devices at once.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LookTimeout
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import pynvml

from ..core.units import DeviceCount
from ..monitoring.models import Condition, ProcessUse, Sample
from . import topology
from .gpm import InstanceMeter, InstanceUse
from .mig_profiles import InstanceSize, part_of_gpu, size_in_name
from .models import Device, DeviceProcess, DeviceStatus, Inventory
from .source import (
    GONE_REASON,
    DeviceScan,
    DevicesUnavailable,
    DriverGate,
    Sampler,
    held_bytes,
    unknown,
)

T = TypeVar("T")

_ABOUT_THE_DRIVER = {
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
}
"""Errors that affect every device, no matter which one was queried."""

_SENTENCES = {
    pynvml.NVML_ERROR_UNINITIALIZED: "NVML was shut down.",
    pynvml.NVML_ERROR_NO_PERMISSION: "The hub lacks the permission: run it as a user who may run "
    "nvidia-smi.",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "The NVIDIA driver is not loaded: run nvidia-smi, and "
    "restart the machine after an update of the driver or the kernel.",
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "This machine has no NVIDIA driver (libnvidia-ml.so.1 "
    "was not found): install it, or let the hub simulate GPUs.",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "The NVIDIA driver is too old for this query: update it.",
    pynvml.NVML_ERROR_GPU_IS_LOST: "The GPU is lost, it fell off the bus: restart the machine, "
    "and check the GPU's power and seat.",
    pynvml.NVML_ERROR_RESET_REQUIRED: "The GPU must be reset: run nvidia-smi --gpu-reset.",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "The NVIDIA driver was updated while in use: "
    "restart the hub, and the machine if that does not help.",
    pynvml.NVML_ERROR_UNKNOWN: "NVML gave an unknown error: run nvidia-smi, and if the hub runs "
    "in a container that lost its GPUs, restart the container.",
}


class DriverLost(Exception):
    """NVML as a whole is not responding. The message is a sentence for the inventory."""


class DriverHeld(DriverLost):
    """NVML must stay closed for now."""


class QueryFailed(Exception):
    """A query of one device failed. The message is a reason for the device."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class Unsupported(QueryFailed):
    """The device does not support this query."""


class DriverTooOld(QueryFailed):
    """The driver does not know this query."""


def ask_driver(call: Callable[[], T]) -> T:
    """Call NVML about the driver. Raises DriverLost."""
    try:
        return call()
    except pynvml.NVMLError as error:
        raise DriverLost(sentence_of(error)) from error


def ask(what: str, call: Callable[..., T], *args: Any) -> T:
    """Query a device. Raises QueryFailed, or DriverLost if the driver is not responding."""
    try:
        return call(*args)
    except pynvml.NVMLError as error:
        code = error.value
        if code in _ABOUT_THE_DRIVER:
            raise DriverLost(sentence_of(error)) from error
        kind = {
            pynvml.NVML_ERROR_NOT_SUPPORTED: Unsupported,
            pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: DriverTooOld,
        }.get(code, QueryFailed)
        raise kind(f"Its {what} could not be read. {sentence_of(error)}", code) from error
    except ValueError as error:  # a sick device may return something other than text
        text = f"Its {what} makes no sense: {error}."
        raise QueryFailed(text, pynvml.NVML_ERROR_UNKNOWN) from error


def ask_or(default: T, what: str, call: Callable[..., T], *args: Any) -> T:
    """Query a device, with a default if the device or the driver does not support the query."""
    try:
        return ask(what, call, *args)
    except (Unsupported, DriverTooOld):
        return default


def sentence_of(error: pynvml.NVMLError) -> str:
    """Return a sentence for an NVML error."""
    return _SENTENCES.get(error.value) or f"NVML says: {error}."


LOST = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)
"""After these errors, further queries are pointless."""

_MOST_LANES = 64
_MOST_MILLIWATTS = 10_000_000
_MOST_BYTES = 2**50
_MOST_CELSIUS = 200
_MOST_MHZ = 100_000


def condition_of(handle: Any) -> Condition:
    """Read what the device reports and is plausible. Raises QueryFailed if it is lost."""
    rows = _read("remapped rows", pynvml.nvmlDeviceGetRemappedRows, handle)
    pages = _read("retired pages", pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
    link = partial(_number, "PCIe link", 1, _MOST_LANES)
    limit = partial(_number, "power limit", 1, _MOST_MILLIWATTS)
    return Condition(
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
        pages_pending=None if pages is None else bool(pages),
        link_width=link(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        link_most=link(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        limit_milliwatts=limit(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle),
        usual_milliwatts=limit(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle),
    )


def _number(what: str, least: int, most: int, call: Callable[..., Any], *args: Any) -> int | None:
    value = _read(what, call, *args)
    return value if value is not None and least <= value <= most else None


def _read(what: str, call: Callable[..., Any], *args: Any) -> Any:
    """Return None if the query fails. Raises QueryFailed if the device is lost."""
    try:
        return ask_or(None, what, call, *args)
    except QueryFailed as failure:
        if failure.code in LOST:
            raise
        return None


log = logging.getLogger(__name__)

REOPEN_AFTER = timedelta(seconds=60)
"""How often NVML is reopened while a device is not responding.

Only a new session learns of a GPU that was reset or returned.
"""

LOOK_SECONDS = 10.0
"""How long one snapshot may take; then every GPU is unknown until the driver answers.

Opening NVML takes seconds on a machine with many GPUs and no persistence daemon.
"""

HANGING = (
    f"The NVIDIA driver has not answered for {LOOK_SECONDS:.0f} seconds: run nvidia-smi, and "
    "restart the machine if that hangs too."
)

HELD = (
    "The MIG layout of a GPU is being changed. Its driver is asked again when that is done: try "
    "again in a minute."
)

PARENT_REASON = "It is in MIG mode: its instances are leased instead."

_COMPUTE_MODES = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: "default",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD: "exclusive_process",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive_process",
    pynvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
}


class NVMLDevices:
    """The GPUs and MIG instances of this machine.

    A device that fails to answer is unknown, with the reason, and does not hide others. So is one
    that answered before and is missing now. A GPU that never reported its UUID cannot be named: it
    is left out, with a log message. An instance has the index of its GPU.

    Each snapshot runs in its own thread, so that a hanging driver call blocks nothing else.
    """

    name = "nvml"

    def __init__(self, gate: DriverGate | None = None) -> None:
        """``gate`` tells when NVML must stay closed; without one, it never must."""
        self._gate = gate
        self.sampling = threading.Lock()
        """Held while a sampler uses its handles."""
        self._samplers: WeakSet[NVMLSampler] = WeakSet()
        self._pending: Future[Inventory] | None = None
        self._pending_since = 0.0
        self._pending_lock = threading.Lock()
        self._lock = threading.Lock()
        self._opened_at: datetime | None = None
        self._openings = 0
        self._versions = ("", "")
        self._known: dict[str, Device] = {}
        self._ailing = False
        self._links: dict[tuple[str, str], int] = {}
        self._linked: frozenset[str] | None = None
        self._logged: dict[int, str] = {}

    def observe(self, now: datetime) -> Inventory:
        """Take a snapshot; see :class:`gpuspawner.devices.source.DeviceSource`.

        Returns after at most :data:`LOOK_SECONDS`, and at once while an earlier snapshot has been
        hanging for longer.
        """
        with self._pending_lock:
            if self._pending is None or self._pending.done():
                self._pending, self._pending_since = Future(), time.monotonic()
                # A daemon thread: a hanging driver must not keep the process from ending.
                work = (self._pending, now)
                threading.Thread(
                    target=self._look_into, args=work, name="gpuspawner-nvml", daemon=True
                ).start()
            pending, since = self._pending, self._pending_since
        try:
            return pending.result(max(0.0, since + LOOK_SECONDS - time.monotonic()))
        except LookTimeout:
            return Inventory(devices=(), observed_at=now, source=self.name, error=HANGING)

    def _look_into(self, pending: Future[Inventory], now: datetime) -> None:
        pending.set_result(self._observe(now))

    def _observe(self, now: datetime) -> Inventory:
        with self._lock:
            try:
                self._open(now)
                look = self._look()
                links = self._links_between(look.healthy)
            except DriverLost as lost:
                return self._nothing(now, str(lost))
            except Exception as error:  # whatever a driver does, the hub continues
                log.exception("Looking at the GPUs failed")
                return self._nothing(now, f"The GPUs cannot be seen: {error!r}.")
            if look.silent and not look.seen:
                return self._nothing(now, "No GPU answers. " + next(iter(look.silent.values())))
            return Inventory(
                devices=tuple(sorted(look.seen.values(), key=lambda d: (d.index, d.uuid))),
                observed_at=now,
                source=self.name,
                driver_version=self._versions[0],
                cuda_version=self._versions[1],
                links=links,
            )

    def sampler(self, processes_every: float = 60.0) -> Sampler:
        """Return a sampler of the devices' use, an :class:`NVMLSampler`."""
        sampler = NVMLSampler(self, processes_every)
        self._samplers.add(sampler)
        return sampler

    def openings(self, now: datetime, *, ailing: bool = False) -> int:
        """Open NVML if necessary, for a sampler, and return how often it was opened.

        If the number changed, all handles from before are invalid. ``ailing``: a device does not
        answer, which may require reopening. Raises DriverLost.
        """
        with self._lock:
            self._ailing = self._ailing or ailing
            self._open(now)
            return self._openings

    def close(self) -> None:
        """Close NVML, so that an admin can reset a GPU. The next snapshot opens it again."""
        with self._lock:
            self._close()

    def release(self) -> None:
        """Close NVML as :meth:`close` does, after the samples that are being taken.

        What samplers have allocated in NVML is freed before.
        """
        with self.sampling:
            for sampler in self._samplers:
                sampler.instances.free()
            self.close()

    def _nothing(self, now: datetime, error: str) -> Inventory:
        self._close()
        return Inventory(devices=(), observed_at=now, source=self.name, error=error)

    def _open(self, now: datetime) -> None:
        if self._opened_at is not None and self._ailing and now - self._opened_at >= REOPEN_AFTER:
            self._close()
        if self._opened_at is None:
            if self._gate is not None and not self._gate.enter(self.release):
                raise DriverHeld(HELD)
            try:
                ask_driver(pynvml.nvmlInit)
            except DriverLost:
                self._leave()
                raise
            self._opened_at = now
            self._openings += 1
            self._versions = _read_versions()

    def _close(self) -> None:
        if self._opened_at is not None:
            self._opened_at = None
            try:
                pynvml.nvmlShutdown()
            except pynvml.NVMLError as error:
                log.debug("NVML was gone before it was closed: %s", error)
            self._leave()

    def _leave(self) -> None:
        if self._gate is not None:
            self._gate.leave()

    def _look(self) -> DeviceScan:
        look = DeviceScan()
        for index in range(ask_driver(pynvml.nvmlDeviceGetCount)):
            try:
                self._look_at_gpu(index, look)
            except QueryFailed as failure:
                look.silent[index] = str(failure)
        look.add_missing(self._known)
        self._ailing = look.ailing
        self._log_silent(look.silent)
        return look

    def _look_at_gpu(self, index: int, look: DeviceScan) -> None:
        handle = ask("handle", pynvml.nvmlDeviceGetHandleByIndex, index)
        gpu = _read_gpu(self._recall(handle, index), handle)
        look.seen[gpu.uuid] = gpu
        if gpu.status is DeviceStatus.UNKNOWN:
            return
        self._known[gpu.uuid] = gpu
        if gpu.status is DeviceStatus.PARENT:
            self._look_at_instances(gpu, handle, look)
        else:
            look.healthy[gpu.uuid] = handle
            look.listed.add(gpu.uuid)

    def _look_at_instances(self, gpu: Device, handle: Any, look: DeviceScan) -> None:
        """Read the instances of a GPU; one that cannot be read does not hide the others."""
        slots = ask("number of instances", pynvml.nvmlDeviceGetMaxMigDeviceCount, handle)
        for slot in range(slots):
            try:
                part = ask("instance", pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot)
                instance = _read_instance(self._recall(part, gpu.index), part, gpu, slots)
            except QueryFailed as failure:
                if failure.code != pynvml.NVML_ERROR_NOT_FOUND:  # an empty slot is no failure
                    look.silent[gpu.index] = str(failure)
                continue
            look.seen[instance.uuid] = instance
            if instance.status is DeviceStatus.OK:
                self._known[instance.uuid] = instance
        if gpu.index not in look.silent:
            look.listed.add(gpu.uuid)

    def _recall(self, handle: Any, index: int) -> Device:
        """Return what is known of a handle's device, so that a failing one keeps its name."""
        uuid = ask("UUID", pynvml.nvmlDeviceGetUUID, handle)
        known = self._known.get(uuid)
        if known is None:
            return Device(uuid=uuid, index=index, model="unknown model", memory_bytes=0)
        return replace(
            known, index=index, status=DeviceStatus.OK, reason="", processes=(), held_bytes=0
        )

    def _log_silent(self, silent: dict[int, str]) -> None:
        for index, reason in silent.items():
            if self._logged.get(index) != reason:
                log.warning("GPU %d, or an instance of it, is not responding. %s", index, reason)
        self._logged = silent

    def _links_between(self, gpus: Mapping[str, Any]) -> Mapping[tuple[str, str], int]:
        """Read the links once for each set of GPUs: they do not change while the machine runs."""
        if self._linked != frozenset(gpus):
            self._links, complete = _read_links(gpus)
            self._linked = frozenset(gpus) if complete else None
        return self._links


# Reading one device. Unsupported values stay empty; a failure makes the device unknown.


def _read_gpu(base: Device, handle: Any) -> Device:
    found: dict[str, Any] = {}
    try:
        found["model"] = ask_or(base.model, "name", pynvml.nvmlDeviceGetName, handle)
        found["pci_bus_id"] = ask_or("", "PCI bus id", _bus_id, handle)
        memory = ask_or(None, "memory", pynvml.nvmlDeviceGetMemoryInfo, handle)
        found["memory_bytes"] = int(memory.total) if memory else 0
        mode = ask_or(0, "compute mode", pynvml.nvmlDeviceGetComputeMode, handle)
        found["compute_mode"] = _COMPUTE_MODES.get(mode, "default")
        mig_mode, _ = ask_or((0, 0), "MIG mode", pynvml.nvmlDeviceGetMigMode, handle)
        if mig_mode == pynvml.NVML_DEVICE_MIG_ENABLE:
            return replace(base, **found, status=DeviceStatus.PARENT, reason=PARENT_REASON)
        found["processes"] = running_processes(handle, ("graphics", "compute"))
        found["held_bytes"] = held_bytes(memory.used if memory else 0, found["processes"])
    except QueryFailed as failure:
        return unknown(replace(base, **found), str(failure))
    return replace(base, **found)


def _read_instance(base: Device, handle: Any, gpu: Device, gpu_slices: int) -> Device:
    """Read an instance of a GPU with so many compute slices, which is its most instances."""
    found: dict[str, Any] = {
        "parent_uuid": gpu.uuid,
        "pci_bus_id": gpu.pci_bus_id,
        "compute_mode": gpu.compute_mode,
    }
    try:
        model = f"{gpu.model} MIG"
        found["model"] = ask_or(model, "name", pynvml.nvmlDeviceGetName, handle)
        memory = ask_or(None, "memory", pynvml.nvmlDeviceGetMemoryInfo, handle)
        found["memory_bytes"] = int(memory.total) if memory else 0
        found["part"] = _part_of_gpu(handle, replace(base, **found), gpu, gpu_slices)
        found["processes"] = running_processes(handle)
        found["held_bytes"] = held_bytes(memory.used if memory else 0, found["processes"])
    except QueryFailed as failure:
        return unknown(replace(base, **found), str(failure))
    return replace(base, **found)


def _part_of_gpu(handle: Any, instance: Device, gpu: Device, gpu_slices: int) -> DeviceCount:
    """Return how much of its GPU an instance is; from its name, if the driver does not tell.

    If neither has it, the instance's present value is kept. Raises QueryFailed if the device is
    lost.
    """
    attributes = _read("MIG attributes", pynvml.nvmlDeviceGetAttributes_v2, handle)
    size = size_in_name(instance.model)
    if attributes is not None and attributes.gpuInstanceSliceCount:
        size = InstanceSize(
            attributes.gpuInstanceSliceCount,
            attributes.computeInstanceSliceCount,
            attributes.memorySizeMB * 2**20,
        )
    if size is None:
        return instance.part
    memory = instance.memory_bytes or size.memory_bytes
    return part_of_gpu(size._replace(memory_bytes=memory), gpu_slices, gpu.memory_bytes)


def _bus_id(handle: Any) -> str:
    return str(pynvml.nvmlDeviceGetPciInfo(handle).busId)


_RUNNING = {
    "graphics": (
        pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3,
        pynvml.nvmlDeviceGetGraphicsRunningProcesses_v2,
    ),
    "compute": (
        pynvml.nvmlDeviceGetComputeRunningProcesses_v3,
        pynvml.nvmlDeviceGetComputeRunningProcesses_v2,
    ),
}
"""Each kind's calls: the current one, and the one of drivers before 510."""


def running_processes(
    handle: Any, kinds: tuple[str, ...] = ("compute",)
) -> tuple[DeviceProcess, ...]:
    """List processes by process id. One that draws and computes is a compute process."""
    found = {}
    for kind in kinds:
        for process in _running(kind, handle):
            name = _process_name(process.pid)
            found[process.pid] = DeviceProcess(process.pid, process.usedGpuMemory, kind, name)
    return tuple(found[pid] for pid in sorted(found))


def _running(kind: str, handle: Any) -> Sequence[Any]:
    newer, older = _RUNNING[kind]
    what = f"list of {kind} processes"
    try:
        try:
            return ask(what, newer, handle)
        except DriverTooOld:
            return ask(what, older, handle)
    except Unsupported:
        return ()


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


# Reading the links.


def _read_links(gpus: Mapping[str, Any]) -> tuple[dict[tuple[str, str], int], bool]:
    """Return the links, and True if all queries succeeded. A failure only costs closeness."""
    complete = True
    pcie: dict[tuple[str, str], int] = {}
    for (one, handle), (other, other_handle) in combinations(gpus.items(), 2):
        try:
            call = pynvml.nvmlDeviceGetTopologyCommonAncestor
            level = ask_or(None, "PCIe path", call, handle, other_handle)
            pcie[topology.pair(one, other)] = topology.PCIE_STEPS.get(level, 0)
        except QueryFailed:
            complete = False
    ends: dict[str, Counter[str]] = {}
    try:
        at = {_address(ask("address", pynvml.nvmlDeviceGetPciInfo, gpus[u])): u for u in gpus}
    except QueryFailed:
        return topology.closeness(pcie, ends), False
    for uuid, handle in gpus.items():
        ends[uuid] = Counter()
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            try:
                end = _end_of(handle, link, at)
            except QueryFailed as failure:
                # A link number beyond the GPU's last one is an invalid argument.
                complete = complete and failure.code == pynvml.NVML_ERROR_INVALID_ARGUMENT
            else:
                ends[uuid].update([end] if end else [])
    return topology.closeness(pcie, ends), complete


def _end_of(handle: Any, link: int, at: Mapping[_Address, str]) -> str | None:
    """Return the other end of an NVLink: a GPU's UUID, a switch, or None."""
    if not ask_or(0, "NVLink", pynvml.nvmlDeviceGetNvLinkState, handle, link):
        return None
    kind = ask_or(None, "NVLink", pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
    if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return topology.SWITCH
    end = ask_or(None, "NVLink", pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
    return at.get(_address(end)) if end is not None else None


_Address = tuple[int, int, int]


def _address(pci: Any) -> _Address:
    """Return the address as numbers: NVML formats bus ids in several ways."""
    return pci.domain, pci.bus, pci.device


def _read_versions() -> tuple[str, str]:
    """Return the versions of driver and CUDA, such as ``550.54`` and ``12.4``; empty if unknown."""
    try:
        driver = ask("driver version", pynvml.nvmlSystemGetDriverVersion)
        cuda = ask("CUDA version", pynvml.nvmlSystemGetCudaDriverVersion_v2)
    except QueryFailed:
        return "", ""
    return driver, f"{cuda // 1000}.{cuda % 1000 // 10}"


SLOW_EVERY = 10.0
"""Seconds between two readings of slowly changing values."""

CONDITION_EVERY = 60.0
"""Seconds between two readings of rarely changing values."""

WATCHED_EVERY = 5.0
"""Seconds between two lists of the processes on a watched device."""

PROCESS_USE_EVERY = 0.9
"""The shortest time in seconds between two queries of the use by each process. The driver takes up
to a second for new figures, and a process without one would seem to be idle."""

_NO_PROCESS_WORKED = (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_SUCCESS)
"""The query's errors when no process worked: pynvml raises one even for an empty list."""

NEARLY_FULL = 0.9
"""If more of a watched device's memory is in use, every sample lists its processes."""

MOST_EVENTS = 64
"""How many events are read at once: a sick device reports them endlessly."""


@dataclass(slots=True)
class _KeptReadings:
    """Values of one device that are not read every time."""

    slow_at: float = -math.inf
    condition_at: float = -math.inf
    listed_at: float = -math.inf
    processes_at: float | None = None
    """When the processes were last listed; ``listed_at`` is when their turn last came."""
    slow: dict[str, Any] = field(default_factory=dict)
    processes: tuple[DeviceProcess, ...] | None = None
    condition: Condition | None = None
    process_use: tuple[ProcessUse, ...] | None = None
    process_use_at: float = -math.inf
    process_use_until: int | None = None
    """The driver's time of the newest figures of any process, in microseconds."""
    mig: bool = False
    watched: bool = False
    """True if NVML was asked to report its errors."""


class NVMLSampler:
    """Takes samples through the NVML session of its devices. For one thread."""

    def __init__(self, devices: NVMLDevices, processes_every: float = 60.0) -> None:
        self._devices = devices
        self._processes_every = processes_every
        self._opening = -1
        self._kept: dict[str, _KeptReadings] = {}
        self._seen: dict[str, int] = {}
        self._events: Any = None
        self._ailing = False
        self._clock = 0.0
        self._turn = ""
        self.instances = InstanceMeter()
        """Measures MIG instances. Hold the lock ``sampling`` of the devices while using it."""
        self.watched: frozenset[str] = frozenset()

    def sample(self, now: datetime, monotonic: float) -> tuple[Sample, ...]:
        """Sample every device that is or was present.

        A device that is not responding or is missing has an error. There is no sample while NVML
        must stay closed. ``monotonic`` is in seconds and paces slow readings. Raises
        DevicesUnavailable if NVML as a whole is not responding.
        """
        try:
            with self._devices.sampling:
                return self._sample(now, monotonic)
        except DriverHeld:
            return ()
        except DriverLost as lost:
            self._opening = -1
            self._devices.close()
            raise DevicesUnavailable(str(lost)) from lost

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
            except QueryFailed as failure:
                silent[index] = str(failure)
                continue
            blank = Sample(uuid=uuid, index=index, at=now, xids=xids.get(uuid, ()))
            found |= {sample.uuid: sample for sample in self._of_gpu(handle, blank)}
        self.instances.keep(found)
        for uuid, index in self._seen.items():
            if uuid not in found:
                reason = silent.get(index, GONE_REASON)
                found[uuid] = Sample(uuid=uuid, index=index, at=now, error=reason)
        self._seen = {uuid: sample.index for uuid, sample in found.items()}
        self._ailing = bool(silent) or any(sample.error for sample in found.values())
        return tuple(found.values())

    def _begin(self, opening: int) -> None:
        """Start over after NVML was reopened: all handles from before are invalid."""
        self._opening, self._kept, self._events = opening, {}, None
        self.instances.free()
        try:
            self._events = ask("events", pynvml.nvmlEventSetCreate)
        except QueryFailed as failure:
            log.info("Errors of GPUs (Xid) are not reported here. %s", failure)

    def _of_gpu(self, handle: Any, blank: Sample) -> Iterator[Sample]:
        kept = self._kept_of(blank.uuid)
        try:
            if self._clock - kept.slow_at >= SLOW_EVERY:
                kept.slow_at = self._clock
                self._watch(handle, kept)
                mode, _ = ask_or((0, 0), "MIG mode", pynvml.nvmlDeviceGetMigMode, handle)
                kept.mig = mode == pynvml.NVML_DEVICE_MIG_ENABLE
                kept.slow = _slow(handle)
            if self._clock - kept.condition_at >= CONDITION_EVERY:
                kept.condition_at = self._clock
                kept.condition = condition_of(handle)
            if kept.mig:
                yield from self._of_instances(handle, blank, kept)
            else:
                yield self._read(handle, blank, kept)
        except QueryFailed as failure:
            yield replace(blank, error=str(failure))

    def _of_instances(self, handle: Any, gpu: Sample, of_gpu: _KeptReadings) -> Iterator[Sample]:
        """Sample the instances; temperature and errors of their GPU apply to each."""
        slots = ask("number of instances", pynvml.nvmlDeviceGetMaxMigDeviceCount, handle)
        parts: dict[str, Any] = {}
        for slot in range(slots):
            try:
                part = ask("instance", pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot)
                parts[ask("UUID", pynvml.nvmlDeviceGetUUID, part)] = part
            except QueryFailed:
                continue  # an empty slot; an instance that disappeared is missed by its UUID
        measured = self.instances.measure(gpu.uuid, handle, parts, self._clock)
        for uuid, part in parts.items():
            kept, blank = self._kept_of(uuid), replace(gpu, uuid=uuid)
            kept.slow, kept.condition = of_gpu.slow | {"milliwatts": None}, of_gpu.condition
            try:
                yield self._read(part, blank, kept, measured.get(uuid, InstanceUse()))
            except QueryFailed as failure:
                yield replace(blank, error=str(failure))

    def _read(
        self,
        handle: Any,
        blank: Sample,
        kept: _KeptReadings,
        of_instance: InstanceUse | None = None,
    ) -> Sample:
        did = of_instance or _whole_use(handle)
        memory = ask_or(None, "memory", pynvml.nvmlDeviceGetMemoryInfo, handle)
        if of_instance or blank.uuid not in self.watched:
            kept.process_use = kept.process_use_until = None
        elif self._clock - kept.process_use_at >= PROCESS_USE_EVERY:
            kept.process_use, kept.process_use_at = self._process_use(handle, kept), self._clock
        if self._turn == blank.uuid or self._is_watched_now(blank.uuid, kept, memory):
            kept.processes, kept.processes_at = running_processes(handle), self._clock
        return replace(
            blank,
            use=did.use,
            memory_activity=did.memory_activity,
            used_bytes=None if memory is None else _sensible("memory", memory.used, _MOST_BYTES),
            total_bytes=None if memory is None else _sensible("memory", memory.total, _MOST_BYTES),
            processes=kept.processes,
            listed_at=kept.processes_at,
            process_use=kept.process_use,
            condition=kept.condition,
            **kept.slow,
        )

    def _process_use(self, handle: Any, kept: _KeptReadings) -> tuple[ProcessUse, ...] | None:
        """Return what each process did since the last time; None if that is not known."""
        since = kept.process_use_until
        try:
            call = pynvml.nvmlDeviceGetProcessUtilization
            found = ask("use by process", call, handle, since or 0)
        except QueryFailed as failure:
            if failure.code in LOST:
                raise
            if failure.code not in _NO_PROCESS_WORKED:
                return None
            found = []
        kept.process_use_until = max([since or 0, *(each.timeStamp for each in found)])
        # The first answer is about all that the driver remembers.
        return None if since is None else process_use(found, since)

    def _is_watched_now(self, uuid: str, kept: _KeptReadings, memory: Any) -> bool:
        if uuid not in self.watched:
            return False
        listed_at = -math.inf if kept.processes_at is None else kept.processes_at
        is_nearly_full = memory is not None and memory.used > NEARLY_FULL * memory.total
        return is_nearly_full or self._clock - listed_at >= WATCHED_EVERY

    def _kept_of(self, uuid: str) -> _KeptReadings:
        if uuid not in self._kept:
            self._kept[uuid] = _KeptReadings()
            self._turn = self._turn or self._next_listed(self._clock)
        return self._kept[uuid]

    def _next_listed(self, monotonic: float) -> str:
        """Return the device listed longest ago, whose turn it is; empty if none is due."""
        waits = ((kept.listed_at, uuid) for uuid, kept in self._kept.items() if not kept.mig)
        at, uuid = min(waits, default=(monotonic, ""))
        if monotonic - at < self._processes_every:
            return ""
        self._kept[uuid].listed_at = monotonic  # also if it is not responding, because others wait
        return uuid

    # Errors that the driver reports.

    def _watch(self, handle: Any, kept: _KeptReadings) -> None:
        if self._events is None or kept.watched:
            return
        kept.watched = True
        kinds = pynvml.nvmlEventTypeXidCriticalError
        ask_or(None, "events", pynvml.nvmlDeviceRegisterEvents, handle, kinds, self._events)

    def _reported(self) -> dict[str, tuple[int, ...]]:
        """Return the errors since the last round, by GPU."""
        found: dict[str, tuple[int, ...]] = {}
        for _ in range(MOST_EVENTS if self._events is not None else 0):
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
                uuid = pynvml.nvmlDeviceGetUUID(event.device)
            except pynvml.NVMLError as error:
                if error.value not in (pynvml.NVML_ERROR_TIMEOUT, pynvml.NVML_ERROR_GPU_IS_LOST):
                    log.warning("Errors of GPUs (Xid) are no longer reported: %s", error)
                    self._events = None
                break
            found[uuid] = (*found.get(uuid, ()), int(event.eventData))
        return found


def _whole_use(handle: Any) -> InstanceUse:
    """Return the use of a whole GPU; NVML does not report this for MIG instances."""
    rates = ask_or(None, "use", pynvml.nvmlDeviceGetUtilizationRates, handle)
    if rates is None:
        return InstanceUse()
    return InstanceUse(_sensible("use", rates.gpu, 100), _sensible("use", rates.memory, 100))


def process_use(found: Iterable[Any], since: int) -> tuple[ProcessUse, ...] | None:
    """Return the mean use by process, from NVML's samples after ``since``.

    None if one of them makes no sense, which happens with some drivers now and then.
    """
    by_pid: dict[int, list[Any]] = defaultdict(list)
    for each in found:
        if each.timeStamp > since and (each.smUtil or each.memUtil):
            if each.smUtil > 100 or each.memUtil > 100:
                return None
            by_pid[each.pid].append(each)
    return tuple(
        ProcessUse(
            pid,
            round(sum(each.smUtil for each in some) / len(some)),
            round(sum(each.memUtil for each in some) / len(some)),
        )
        for pid, some in sorted(by_pid.items())
    )


def _slow(handle: Any) -> dict[str, Any]:
    """Read the slow values; one that fails or makes no sense does not affect the others."""
    heat = (pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)
    clock = (pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM)
    memory_clock = (pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM)
    throttle = (pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    uncorrected = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    ecc = (pynvml.nvmlDeviceGetTotalEccErrors, handle, *uncorrected)
    return {
        "milliwatts": _number("power", 0, _MOST_MILLIWATTS, pynvml.nvmlDeviceGetPowerUsage, handle),
        "celsius": _number("temperature", 0, _MOST_CELSIUS, *heat),
        "sm_mhz": _number("clock", 0, _MOST_MHZ, *clock),
        "memory_mhz": _number("memory's clock", 0, _MOST_MHZ, *memory_clock),
        "throttle": _number("reasons to be slow", 0, 2**32, *throttle) or 0,
        "ecc_errors": _number("memory errors", 0, 2**63, *ecc),
    }


def _sensible(what: str, value: int, most: int) -> int:
    if not 0 <= value <= most:
        text = f"Its {what} makes no sense: {value}."
        raise QueryFailed(text, pynvml.NVML_ERROR_UNKNOWN)
    return value
