"""The interface of device sources (NVML or simulated), and one scan of a machine.

The scale, used in :attr:`gpuspawner.devices.models.Inventory.links`: whole numbers, greater is
closer.

=====================  =====================================================================
value                  how data gets from one device to the other
=====================  =====================================================================
100 x n                n NVLinks, directly or through NVSwitch (see :func:`nvlinks`)
:data:`SAME_BOARD`     two GPUs on one board
:data:`PIX`            one PCIe switch
:data:`PXB`            several PCIe switches, without crossing a host bridge
:data:`PHB`            one PCIe host bridge
:data:`NODE`           several host bridges of one NUMA node
:data:`SYS`            across NUMA nodes
0 (or absent)          not known, or no way but through the network
=====================  =====================================================================

The steps are even so that sums over a set of devices compare sensibly: one NVLink outweighs
any PCIe path, and a set is not called close because of a single good pair.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Protocol, runtime_checkable

from ..core.errors import ConfigError
from ..monitoring.models import Sample
from .models import Device, DeviceProcess, DeviceStatus, Inventory

SYS = 10
NODE = 20
PHB = 30
PXB = 40
PIX = 50
SAME_BOARD = 60


def nvlinks(count: int) -> int:
    """Closeness of two devices joined by ``count`` NVLinks."""
    return 100 * count


def pair(one: str, other: str) -> tuple[str, str]:
    """The key of two UUIDs in :attr:`gpuspawner.devices.models.Inventory.links`."""
    return (one, other) if one <= other else (other, one)


class DeviceSource(Protocol):
    """Something that can say which devices this machine has.

    A source is cheap to make and touches nothing before the first look.
    """

    @property
    def name(self) -> str:
        """``nvml`` or ``simulated``."""

    def observe(self, now: datetime) -> Inventory:
        """Look at the machine once.

        Blocks (call it in a thread), may be called from several threads, and never raises:
        when nothing can be seen the inventory has no devices and says why in ``error``.
        ``now`` is copied into ``observed_at``.
        """


class LooksLost(Exception):
    """Nothing can be seen. The text is a sentence that says why."""


class Sampler(Protocol):
    """Something that tells what devices do from second to second."""

    def sample(self, now: datetime, monotonic: float) -> tuple[Sample, ...]:
        """One look at every device. Blocks; for one thread. ``monotonic`` is in seconds.

        Raises LooksLost.
        """


@runtime_checkable
class Sampled(Protocol):
    """A source that also tells what its devices do."""

    def sampler(self, processes_every: float = 60.0) -> Sampler:
        """What tells it. The processes of each device are listed at most every so many seconds."""


EXAMPLE = "simulated:4xA100-80GB,2xT4"


def open_source(spec: str) -> DeviceSource:
    """The source that a configuration names.

    ``""``, ``"auto"`` and ``"nvml"`` are the GPUs of this machine, also when it has none: the
    inventory says so then. ``"simulated:FLEET"`` is a simulated fleet. Raises ConfigError.
    """
    kind, colon, fleet = spec.strip().partition(":")
    if kind.lower() in ("", "auto", "nvml") and not colon:
        from .nvml import NVMLDevices

        return NVMLDevices()
    if kind.lower() == "simulated":
        from .simulated import SimulatedDevices

        return SimulatedDevices(fleet)
    raise ConfigError(
        f"There is no device source {spec!r}. Write nvml for the GPUs of this machine, "
        f"or a simulated fleet such as {EXAMPLE}."
    )


GONE_REASON = "NVML does not list it any more."

A_DRIVER_S_OWN = 2 * 2**30
"""Bytes that a driver, or a screen, may take where nobody computes."""
STEP = 256 * 2**20
"""What is held is told in steps of this, so that it does not change with every look."""


@dataclass
class DeviceScan:
    """What one look has found so far."""

    seen: dict[str, Device] = field(default_factory=dict)
    """By UUID."""
    healthy: dict[str, Any] = field(default_factory=dict)
    """Handles of GPUs that answer and are not in MIG mode, by UUID."""
    listed: set[str] = field(default_factory=set)
    """GPUs whose instances, if any, are all in ``seen``."""
    silent: dict[int, str] = field(default_factory=dict)
    """Why the GPU at an index, or an instance of it, did not even give its UUID."""

    @property
    def ailing(self) -> bool:
        """Whether anything failed to answer."""
        return bool(self.silent) or any(
            device.status is DeviceStatus.UNKNOWN for device in self.seen.values()
        )

    def add_missing(self, known: dict[str, Device]) -> None:
        """Add the known devices that were not found, as unknown, with the nearest reason.

        An instance that its GPU, which is well, does not list was taken apart by an admin: it
        is dropped from ``known``.
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
    """The device as one that does not answer. What ran on it is not known either."""
    return replace(device, status=DeviceStatus.UNKNOWN, reason=reason, processes=(), held_bytes=0)


def held_bytes(used: int, processes: tuple[DeviceProcess, ...]) -> int:
    """Bytes in use though no process computes, beside what those that draw have; roughly. Where it
    is not known how much these have, nothing counts as held."""
    if any(p.kind == "compute" or p.used_memory_bytes is None for p in processes):
        return 0
    left = used - sum(p.used_memory_bytes or 0 for p in processes)
    return left // STEP * STEP if left > A_DRIVER_S_OWN else 0
