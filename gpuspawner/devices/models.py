"""Devices as frozen values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from functools import lru_cache
from typing import Protocol


class DeviceStatus(str, Enum):
    """What the device source last saw, before any lease is considered."""

    OK = "ok"
    UNKNOWN = "unknown"
    """Not answering, or gone since the last look. Never free."""
    DRAINED = "drained"
    """Whoever gives out its machine gives out nothing more of it; what is on it goes on."""
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
    """One GPU or MIG instance. The UUID names it; the index is for people to read."""

    uuid: str
    index: int
    model: str
    memory_bytes: int
    pci_bus_id: str = ""
    parent_uuid: str | None = None
    compute_mode: str = "default"
    """``default``, ``exclusive_process`` or ``prohibited``."""
    slots: int = 1
    status: DeviceStatus = DeviceStatus.OK
    reason: str = ""
    """Why the status is not ``ok``, in words; of one that is, what else is to be known of it, such
    as that its machine is off until it is needed."""
    processes: tuple[DeviceProcess, ...] = ()
    held_bytes: int = 0
    """Memory that is held though no process is listed that could hold it, roughly; what a driver
    takes for itself is 0."""

    @property
    def compute_processes(self) -> tuple[DeviceProcess, ...]:
        """The processes that count as use of the device."""
        return tuple(p for p in self.processes if p.kind == "compute")

    @property
    def empty(self) -> bool:
        """Whether nothing of anybody's is on it."""
        return not self.held_bytes and not self.compute_processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What a device source saw in one look at the machine."""

    devices: tuple[Device, ...]
    observed_at: datetime
    source: str = "nvml"
    """``nvml`` or ``simulated``."""
    driver_version: str = ""
    cuda_version: str = ""
    links: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Closeness of two devices, keyed by their UUIDs in sorted order. Greater is closer;
    a pair that is absent counts as 0. See :mod:`gpuspawner.devices.source` for the scale."""
    error: str = ""
    """Why nothing could be seen (NVML lost). Empty when the look succeeded."""


_WORD = re.compile(r"[a-z]{2,}(?=\d)|[a-z0-9]+")


@lru_cache(maxsize=1024)
def model_words(model: str) -> tuple[str, ...]:
    """A model's name as words: split at anything but letters and digits, and before the
    number of a series (RTX4090 is RTX 4090), but not inside a model such as A100 or 80GB."""
    return tuple(_WORD.findall(model.lower()))


def model_matches(pattern: str, model: str) -> bool:
    """Whether each word of ``pattern`` is a word of the model's name, compared without case.

    ``a100`` and ``A100-80GB`` match ``NVIDIA A100-SXM4-80GB``; ``RTX4090`` matches
    ``NVIDIA GeForce RTX 4090``. Parts of words do not count: ``A10`` is no A100 and ``L40``
    no L40S.
    """
    return set(model_words(pattern)) <= set(model_words(model))


class MachineScheduler(Protocol):
    """Whoever gives out the devices of several machines. Its methods block."""

    def machine_of(self, uuid: str) -> str:
        """The name of the machine that a device is in; empty for one that nobody knows."""

    def on_machine(self, uuid: str) -> tuple[str, ...]:
        """All devices of the machine that a device is in: they are closed together."""

    def close(self, uuid: str, reason: str) -> None:
        """Give out nothing more of a device's machine; one that is closed there stays as it is.
        Raises Refused or Unavailable."""

    def keep_closed(self, closed: Mapping[str, str]) -> list[str]:
        """The same for all these devices, each with the reason, where it is not so; those of the
        machines that were closed now. Cheap when nothing changed. What is refused, or nobody
        answers to, is tried again the next time, and not given to who is handed over meanwhile."""

    def reopen(self, uuid: str) -> None:
        """Give out again what :meth:`close` closed. Raises Refused, also for a machine that was
        closed by somebody else, or Unavailable."""
