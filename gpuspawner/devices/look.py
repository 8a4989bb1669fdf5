"""One look at a machine, while it is being taken: what was found, and what is missing. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ..model import Device, DeviceProcess, DeviceStatus

GONE_REASON = "NVML does not list it any more."

A_DRIVER_S_OWN = 2 * 2**30
"""Bytes that a driver, or a screen, may take where nobody computes."""
STEP = 256 * 2**20
"""What is held is told in steps of this, so that it does not change with every look."""


@dataclass
class Look:
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
