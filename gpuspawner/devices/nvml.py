"""The GPUs of this machine as NVML sees them."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LookTimeout
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import pynvml

from ..model import Device, DeviceProcess, DeviceStatus, Inventory
from . import topology
from .base import Sampler, pair
from .look import Look, held_bytes, unknown
from .nvml_asking import DriverLost, TooOld, Unanswered, Unsupported, ask, ask_driver, ask_or

log = logging.getLogger(__name__)

REOPEN_AFTER = timedelta(seconds=60)
"""While a device does not answer, NVML is opened anew this often: only then it learns of a GPU
that was reset or given back."""

LOOK_SECONDS = 10.0
"""How long one look may take. After that every GPU is unknown until the driver answers. Opening
NVML takes seconds on a machine with many GPUs and no persistence daemon."""

HANGING = (
    f"The NVIDIA driver has not answered for {LOOK_SECONDS:.0f} seconds: run nvidia-smi, and "
    "restart the machine if that hangs too."
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

    A device that fails to answer is unknown, with the reason, and hides no other. So is one
    that answered before and cannot be found any more. A GPU that never gave its UUID cannot be
    named: it is left out, and the log says so. An instance has the index of its GPU.

    Each look runs in a thread of its own, so that a driver call that hangs blocks nothing else.
    """

    name = "nvml"

    def __init__(self) -> None:
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
        """Look once; see :class:`gpuspawner.devices.base.DeviceSource`.

        Returns after at most :data:`LOOK_SECONDS`, and at once while an earlier look has hung for
        longer than that.
        """
        with self._pending_lock:
            if self._pending is None or self._pending.done():
                self._pending, self._pending_since = Future(), time.monotonic()
                # A daemon thread: a driver that hangs must not keep the process from ending.
                threading.Thread(
                    target=self._look_into,
                    args=(self._pending, now),
                    name="gpuspawner-nvml",
                    daemon=True,
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
            except Exception as error:  # whatever a driver does, the hub goes on
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
        """What tells their use from second to second; see :mod:`.nvml_samples`."""
        from .nvml_samples import NVMLSampler

        return NVMLSampler(self, processes_every)

    def openings(self, now: datetime, *, ailing: bool = False) -> int:
        """Open NVML if it is not open, for who samples beside the looks. How often it was opened:
        with another number, what was kept of it is worth nothing.

        ``ailing``: a device does not answer, which may take a new opening. Raises DriverLost.
        """
        with self._lock:
            self._ailing = self._ailing or ailing
            self._open(now)
            return self._openings

    def close(self) -> None:
        """Let go of the driver, so that an admin can reset a GPU. The next look opens it again."""
        with self._lock:
            self._close()

    def _nothing(self, now: datetime, error: str) -> Inventory:
        self._close()
        return Inventory(devices=(), observed_at=now, source=self.name, error=error)

    def _open(self, now: datetime) -> None:
        if self._opened_at is not None and self._ailing and now - self._opened_at >= REOPEN_AFTER:
            self._close()
        if self._opened_at is None:
            ask_driver(pynvml.nvmlInit)
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

    def _look(self) -> Look:
        look = Look()
        for index in range(ask_driver(pynvml.nvmlDeviceGetCount)):
            try:
                self._look_at_gpu(index, look)
            except Unanswered as failure:
                look.silent[index] = str(failure)
        look.add_missing(self._known)
        self._ailing = look.ailing
        self._log_silent(look.silent)
        return look

    def _look_at_gpu(self, index: int, look: Look) -> None:
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

    def _look_at_instances(self, gpu: Device, handle: Any, look: Look) -> None:
        """A slot that cannot be read hides no other; what was in it is missing then."""
        slots = ask("number of instances", pynvml.nvmlDeviceGetMaxMigDeviceCount, handle)
        for slot in range(slots):
            try:
                part = ask("instance", pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot)
                instance = _read_instance(self._recall(part, gpu.index), part, gpu)
            except Unanswered as failure:
                if failure.code != pynvml.NVML_ERROR_NOT_FOUND:  # an empty slot is no failure
                    look.silent[gpu.index] = str(failure)
                continue
            look.seen[instance.uuid] = instance
            if instance.status is DeviceStatus.OK:
                self._known[instance.uuid] = instance
        if gpu.index not in look.silent:
            look.listed.add(gpu.uuid)

    def _recall(self, handle: Any, index: int) -> Device:
        """What is known of the device behind a handle, so that a failing one keeps its name."""
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
                log.warning("GPU %d, or an instance of it, does not answer. %s", index, reason)
        self._logged = silent

    def _links_between(self, gpus: Mapping[str, Any]) -> Mapping[tuple[str, str], int]:
        """Read once for each set of GPUs: cables are not moved while the machine runs."""
        if self._linked != frozenset(gpus):
            self._links, complete = _read_links(gpus)
            self._linked = frozenset(gpus) if complete else None
        return self._links


# Reading one device. What a device does not support stays empty; what fails makes it unknown.


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
    except Unanswered as failure:
        return unknown(replace(base, **found), str(failure))
    return replace(base, **found)


def _read_instance(base: Device, handle: Any, gpu: Device) -> Device:
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
        found["processes"] = running_processes(handle, ("compute",))
        found["held_bytes"] = held_bytes(memory.used if memory else 0, found["processes"])
    except Unanswered as failure:
        return unknown(replace(base, **found), str(failure))
    return replace(base, **found)


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
"""Each with the call that drivers before 510 have."""


def running_processes(
    handle: Any, kinds: tuple[str, ...] = ("compute",)
) -> tuple[DeviceProcess, ...]:
    """By process id. One that draws and computes is a compute process."""
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
        except TooOld:
            return ask(what, older, handle)
    except Unsupported:
        return ()


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


# Reading what connects them.


def _read_links(gpus: Mapping[str, Any]) -> tuple[dict[tuple[str, str], int], bool]:
    """The links, and whether every question was answered. A failure costs closeness only."""
    complete = True
    pcie: dict[tuple[str, str], int] = {}
    for (one, handle), (other, other_handle) in combinations(gpus.items(), 2):
        try:
            call = pynvml.nvmlDeviceGetTopologyCommonAncestor
            level = ask_or(None, "PCIe path", call, handle, other_handle)
            pcie[pair(one, other)] = topology.PCIE_STEPS.get(level, 0)
        except Unanswered:
            complete = False
    ends: dict[str, Counter[str]] = {}
    try:
        at = {_address(ask("address", pynvml.nvmlDeviceGetPciInfo, gpus[u])): u for u in gpus}
    except Unanswered:
        return topology.closeness(pcie, ends), False
    for uuid, handle in gpus.items():
        ends[uuid] = Counter()
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            try:
                end = _end_of(handle, link, at)
            except Unanswered as failure:
                # A link beyond the GPU's last one is an invalid argument.
                complete = complete and failure.code == pynvml.NVML_ERROR_INVALID_ARGUMENT
            else:
                ends[uuid].update([end] if end else [])
    return topology.closeness(pcie, ends), complete


def _end_of(handle: Any, link: int, at: Mapping[_Address, str]) -> str | None:
    """What an NVLink leads to: a GPU's UUID, a switch, or nothing that is of interest."""
    if not ask_or(0, "NVLink", pynvml.nvmlDeviceGetNvLinkState, handle, link):
        return None
    kind = ask_or(None, "NVLink", pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
    if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return topology.SWITCH
    end = ask_or(None, "NVLink", pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
    return at.get(_address(end)) if end is not None else None


_Address = tuple[int, int, int]


def _address(pci: Any) -> _Address:
    """NVML spells bus ids in several ways; the numbers are the same."""
    return pci.domain, pci.bus, pci.device


def _read_versions() -> tuple[str, str]:
    """Of the driver and of CUDA, such as ``550.54`` and ``12.4``; empty when not known."""
    try:
        driver = ask("driver version", pynvml.nvmlSystemGetDriverVersion)
        cuda = ask("CUDA version", pynvml.nvmlSystemGetCudaDriverVersion_v2)
    except Unanswered:
        return "", ""
    return driver, f"{cuda // 1000}.{cuda % 1000 // 10}"
