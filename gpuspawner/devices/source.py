"""The interface of device sources (NVML or simulated), and one scan of a machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Protocol, runtime_checkable

from ..monitoring.models import Sample
from .models import Device, DeviceProcess, DeviceStatus, Inventory


class DeviceSource(Protocol):
    """A source that reports which devices this machine has.

    It is cheap to create and touches nothing before the first snapshot.
    """

    @property
    def name(self) -> str:
        """``nvml`` or ``simulated``."""

    def observe(self, now: datetime) -> Inventory:
        """Take one snapshot of the machine.

        Blocks (call it in a thread), may be called from several threads, and never raises: if
        nothing can be seen, the inventory has no devices and says why in ``error``. ``now`` is
        copied into ``observed_at``.
        """


class DriverGate(Protocol):
    """Tells a process when it may have NVML open.

    A GPU can be divided into MIG instances only while no other process has NVML open.
    """

    def enter(self, release: Callable[[], None]) -> bool:
        """Ask before NVML is opened; False if it must stay closed for now.

        ``release`` closes NVML, which calls :meth:`leave`. It is called, in another thread, as soon
        as somebody needs NVML to be closed.
        """

    def leave(self) -> None:
        """Report that NVML was closed, or could not be opened."""


class DevicesUnavailable(Exception):
    """Nothing can be seen. The message is a sentence that says why."""


class Sampler(Protocol):
    """Measures what devices do from second to second."""

    def sample(self, now: datetime, monotonic: float) -> tuple[Sample, ...]:
        """Sample every device. Blocks; for one thread. ``monotonic`` is in seconds.

        Raises DevicesUnavailable.
        """


@runtime_checkable
class SamplerOfProcesses(Sampler, Protocol):
    """A sampler that can list the processes of some devices more often than of others."""

    watched: frozenset[str]
    """UUIDs of devices whose processes are listed every few seconds, with what each of them does.

    For any thread.
    """


@runtime_checkable
class SamplingSource(Protocol):
    """A source that can also sample its devices."""

    def sampler(self, processes_every: float = 60.0) -> Sampler:
        """Return a sampler; ``processes_every`` are the least seconds between process lists."""


GONE_REASON = "NVML no longer lists it."

DRIVER_BYTES = 2 * 2**30
"""Bytes that a driver or a display may use while nobody computes."""
STEP = 256 * 2**20
"""Unexplained memory is reported in steps of this, so that it does not change all the time."""


@dataclass
class DeviceScan:
    """What one snapshot has found so far."""

    seen: dict[str, Device] = field(default_factory=dict)
    """By UUID."""
    healthy: dict[str, Any] = field(default_factory=dict)
    """Handles of GPUs that answer and are not in MIG mode, by UUID."""
    listed: set[str] = field(default_factory=set)
    """GPUs whose instances, if any, are all in ``seen``."""
    silent: dict[int, str] = field(default_factory=dict)
    """Why the GPU at an index, or an instance of it, did not even report its UUID."""

    @property
    def ailing(self) -> bool:
        """True if anything failed to answer."""
        return bool(self.silent) or any(
            device.status is DeviceStatus.UNKNOWN for device in self.seen.values()
        )

    def add_missing(self, known: dict[str, Device]) -> None:
        """Add the known devices that were not found, as unknown, with the nearest reason.

        If a healthy GPU no longer lists an instance, an admin removed it: it is dropped from
        ``known``.
        """
        for uuid, device in list(known.items()):
            if uuid in self.seen:
                continue
            if device.parent_uuid in self.listed:
                del known[uuid]
                continue
            gpu = self.seen.get(device.parent_uuid or "")
            if gpu is not None and gpu.status is DeviceStatus.UNKNOWN:
                reason = gpu.reason
            else:
                reason = self.silent.get(device.index, GONE_REASON)
            self.seen[uuid] = unknown(device, reason)


def unknown(device: Device, reason: str) -> Device:
    """Return the device as not answering. What ran on it is unknown too."""
    return replace(device, status=DeviceStatus.UNKNOWN, reason=reason, processes=(), held_bytes=0)


def held_bytes(used: int, processes: tuple[DeviceProcess, ...]) -> int:
    """Return roughly how many bytes are used although no process computes.

    The memory of processes that draw is subtracted. If that is unknown, the result is 0.
    """
    if any(p.kind == "compute" or p.used_memory_bytes is None for p in processes):
        return 0
    left = used - sum(p.used_memory_bytes or 0 for p in processes)
    return left // STEP * STEP if left > DRIVER_BYTES else 0
