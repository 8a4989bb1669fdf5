"""Devices as frozen values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from functools import lru_cache
from typing import Protocol

from ..core.units import DeviceCount


class DeviceStatus(str, Enum):
    """What the device source last observed, regardless of leases."""

    OK = "ok"
    UNKNOWN = "unknown"
    """Not answering, or missing since the last snapshot. Never free."""
    DRAINED = "drained"
    """The scheduler of its machine grants nothing more on it; running servers continue."""
    PARENT = "parent"
    """A GPU in MIG mode: its instances are leased, never the GPU itself."""


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process on a device, as the host sees it."""

    pid: int
    used_memory_bytes: int | None = None
    kind: str = "compute"
    """``compute`` or ``graphics``; only a compute process occupies a device."""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU or MIG instance. The UUID identifies it; the index is for display only."""

    uuid: str
    index: int
    model: str
    memory_bytes: int
    pci_bus_id: str = ""
    parent_uuid: str | None = None
    part: DeviceCount = 1
    """How much of a GPU it is: 1, or a fraction such as 1/7 for a MIG instance."""
    compute_mode: str = "default"
    """``default``, ``exclusive_process`` or ``prohibited``."""
    slots: int = 1
    reserved_for: tuple[str, ...] = ()
    """The groups that it is reserved for, in order; empty if it is open to everybody."""
    lent: bool = False
    """True if preemptible runs of others may use it while its groups do not."""
    status: DeviceStatus = DeviceStatus.OK
    reason: str = ""
    """Why the status is not ``ok``, in words.

    For status ``ok``, other useful information, such as that its machine is off until needed.
    """
    processes: tuple[DeviceProcess, ...] = ()
    held_bytes: int = 0
    """Approximate memory in use that no listed process explains; 0 if only the driver uses it."""

    def slots_for(self, memory_bytes: int) -> int:
        """Return how many of its slots a share with so much memory has; see :func:`slots_for`."""
        return slots_for(memory_bytes, self.memory_bytes, self.slots)

    @property
    def compute_processes(self) -> tuple[DeviceProcess, ...]:
        """The processes that count as use of the device."""
        return tuple(p for p in self.processes if p.kind == "compute")

    @property
    def empty(self) -> bool:
        """True if nobody has a process or memory on it."""
        return not self.held_bytes and not self.compute_processes


def slots_for(memory_bytes: int, device_bytes: int, slots: int) -> int:
    """Return the fewest slots of a device that come to so much memory; at least one.

    That is more than the device has if it is too small.

    Args:
        memory_bytes: How much is asked for.
        device_bytes: Memory of the whole device, divided equally among its slots.
        slots: How many slots the device has.
    """
    if memory_bytes > device_bytes:
        return slots + 1
    return max(1, -(-memory_bytes * slots // device_bytes)) if memory_bytes else 1


@dataclass(frozen=True, slots=True, order=True)
class MIGPlacement:
    """A part of a GPU's memory, in slices."""

    start: int
    size: int

    def overlaps(self, other: MIGPlacement) -> bool:
        """Return True if both have a slice in common."""
        return self.start < other.start + other.size and other.start < self.start + self.size


@dataclass(frozen=True, slots=True)
class MIGProfile:
    """A kind of instance that a GPU can be divided into, as NVML describes it."""

    id: int
    name: str
    """Such as ``1g.5gb``."""
    max_instances: int
    placements: tuple[MIGPlacement, ...]
    """Every place that the GPU allows, taken or not."""


@dataclass(frozen=True, slots=True)
class MIGInstance:
    """An instance that exists on a GPU."""

    id: int
    """The driver's number for it, which is reused after the instance is destroyed."""
    profile_id: int
    placement: MIGPlacement
    uuids: tuple[str, ...] = ()
    """Its MIG devices; empty if it has no compute instance, without which nobody can use it."""


@dataclass(frozen=True, slots=True)
class MIGState:
    """How a GPU is divided, and how it could be."""

    uuid: str
    index: int
    model: str
    is_enabled: bool
    """True if the GPU is in MIG mode."""
    is_pending: bool = False
    """True if the mode changes with the next reset of the GPU."""
    profiles: tuple[MIGProfile, ...] = ()
    instances: tuple[MIGInstance, ...] = ()
    processes: tuple[DeviceProcess, ...] = ()
    """On the GPU and its instances."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """One snapshot of the machine by a device source."""

    devices: tuple[Device, ...]
    observed_at: datetime
    source: str = "nvml"
    """``nvml`` or ``simulated``."""
    driver_version: str = ""
    cuda_version: str = ""
    links: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Closeness of two devices, keyed by their UUIDs in sorted order. Greater is closer;
    a pair that is absent counts as 0. See :mod:`gpuspawner.devices.topology` for the scale."""
    error: str = ""
    """Why nothing could be seen (NVML lost). Empty if the snapshot succeeded."""


_WORD = re.compile(r"[a-z]{2,}(?=\d)|[a-z0-9]+")


@lru_cache(maxsize=1024)
def model_words(model: str) -> tuple[str, ...]:
    """Split a model's name into words.

    Split at everything but letters and digits, and before the number of a series (RTX4090 is RTX
    4090), but not inside a model such as A100 or 80GB.
    """
    return tuple(_WORD.findall(model.lower()))


def model_matches(pattern: str, model: str) -> bool:
    """Return True if each word of ``pattern`` is a word of the model's name, case-insensitively.

    ``a100`` and ``A100-80GB`` match ``NVIDIA A100-SXM4-80GB``; ``RTX4090`` matches ``NVIDIA GeForce
    RTX 4090``. Parts of words do not match: ``A10`` is not A100 and ``L40`` is not L40S.
    """
    return set(model_words(pattern)) <= set(model_words(model))


def longest_match(names: Iterable[str], model: str) -> str | None:
    """Return the name that matches a model with the most words; None if none does."""
    fitting = (name for name in names if model_matches(name, model))
    return max(fitting, key=lambda name: (len(model_words(name)), name), default=None)


class MachineScheduler(Protocol):
    """A scheduler that allocates the devices of several machines. Its methods block."""

    def machine_of(self, uuid: str) -> str:
        """Return the name of the machine with this device; empty if unknown."""

    def on_machine(self, uuid: str) -> tuple[str, ...]:
        """Return all devices of the machine with this device: they are closed together."""

    def close(self, uuid: str, reason: str) -> None:
        """Allocate nothing more on a device's machine; a machine closed there stays as it is.

        Raises Refused or Unavailable.
        """

    def keep_closed(self, closed: Mapping[str, str]) -> list[str]:
        """Keep the machines of these devices closed, each for its reason.

        Returns the devices of the machines that were closed just now. Cheap if nothing changed.
        What is refused or not answered is tried again next time, and meanwhile not given to
        submitted tickets.
        """

    def reopen(self, uuid: str) -> None:
        """Reopen what :meth:`close` closed.

        Raises Refused, also for a machine that somebody else closed, or Unavailable.
        """
