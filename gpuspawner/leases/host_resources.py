"""Memory and CPU of the host: what servers are guaranteed, and how much of it there is. Pure.

One host runs all servers (Docker or local processes). What a lease is guaranteed is reserved for
it from the grant until its end, whether its server uses it or not. If the server then restarts with
the same devices, it stays reserved as long as they are kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from ..core.units import DeviceCount, format_bytes, format_cores

UNLIMITED = 2**62
"""An amount that no machine has: of what is not limited, so much is left."""


@dataclass(frozen=True, slots=True)
class HostAmount:
    """An amount of memory and of CPU, exactly."""

    memory_bytes: int = 0
    milli_cpus: int = 0
    """Thousandths of a CPU core."""

    @classmethod
    def of(cls, memory_bytes: int | None, cpus: float | None) -> HostAmount:
        """Return an amount of bytes and CPU cores, each none if it is None or 0."""
        return cls(memory_bytes or 0, math.ceil(1000 * (cpus or 0)))

    def as_fields(self) -> dict[str, Any]:
        """Return the fields of a request or a lease for this amount."""
        return {"host_memory_bytes": self.memory_bytes, "host_milli_cpus": self.milli_cpus}

    def __bool__(self) -> bool:
        return self.memory_bytes > 0 or self.milli_cpus > 0

    def __add__(self, other: HostAmount) -> HostAmount:
        return HostAmount(
            self.memory_bytes + other.memory_bytes, self.milli_cpus + other.milli_cpus
        )

    def __sub__(self, other: HostAmount) -> HostAmount:
        return HostAmount(
            self.memory_bytes - other.memory_bytes, self.milli_cpus - other.milli_cpus
        )

    def for_devices(self, devices: DeviceCount) -> HostAmount:
        """Return so many times the amount; parts are rounded up."""
        return HostAmount(
            math.ceil(self.memory_bytes * devices), math.ceil(self.milli_cpus * devices)
        )

    def at_most(self, other: HostAmount) -> HostAmount:
        """Return the smaller memory and the smaller CPU of both."""
        return HostAmount(
            min(self.memory_bytes, other.memory_bytes), min(self.milli_cpus, other.milli_cpus)
        )

    def at_least(self, other: HostAmount) -> HostAmount:
        """Return the larger memory and the larger CPU of both."""
        return HostAmount(
            max(self.memory_bytes, other.memory_bytes), max(self.milli_cpus, other.milli_cpus)
        )

    def less_than(self, asked: HostAmount) -> HostAmount:
        """Return what is asked too much of: the memory, the CPU cores or both."""
        return HostAmount(
            self.memory_bytes if asked.memory_bytes > self.memory_bytes else 0,
            self.milli_cpus if asked.milli_cpus > self.milli_cpus else 0,
        )

    def fits(self, left: HostAmount) -> bool:
        """Return True if so much is left. What is not asked for always fits."""
        return not (0 < self.memory_bytes > left.memory_bytes) and not (
            0 < self.milli_cpus > left.milli_cpus
        )

    def lacking(self, left: HostAmount) -> str:
        """Describe what of it is not left: ``32.0 GB of memory (8.0 GB are free)``."""
        parts = []
        if 0 < self.memory_bytes > left.memory_bytes:
            free = format_bytes(max(0, left.memory_bytes))
            parts.append(f"{format_bytes(self.memory_bytes)} of memory ({free} free)")
        if 0 < self.milli_cpus > left.milli_cpus:
            parts.append(
                f"{format_cores(self.milli_cpus)} ({max(0, left.milli_cpus) / 1000:g} free)"
            )
        return " and ".join(parts)

    def __str__(self) -> str:
        parts = []
        if self.memory_bytes:
            parts.append(f"{format_bytes(self.memory_bytes)} of memory")
        if self.milli_cpus:
            parts.append(format_cores(self.milli_cpus))
        return " and ".join(parts) or "nothing"


NOTHING = HostAmount()


class Guarantees(Protocol):
    """What an environment of the catalog says of memory (in bytes) and CPU cores."""

    @property
    def mem_guarantee(self) -> int | None:
        """Memory that is guaranteed to a server."""

    @property
    def mem_limit(self) -> int | None:
        """The most memory of a server."""

    @property
    def cpu_guarantee(self) -> float | None:
        """CPU cores that are guaranteed to a server."""

    @property
    def cpu_limit(self) -> float | None:
        """The most CPU cores of a server."""


def guaranteed_to(environment: Guarantees, usual: HostAmount = NOTHING) -> HostAmount:
    """Return what is guaranteed to a server of an environment.

    ``usual`` is for an environment that guarantees nothing itself, up to its limits.
    """
    own = HostAmount.of(environment.mem_guarantee, environment.cpu_guarantee)
    most = HostAmount.of(environment.mem_limit, environment.cpu_limit)
    return HostAmount(
        own.memory_bytes or min(usual.memory_bytes, most.memory_bytes or UNLIMITED),
        own.milli_cpus or min(usual.milli_cpus, most.milli_cpus or UNLIMITED),
    )


@dataclass(frozen=True, slots=True)
class HostBudget:
    """How much the guarantees of all open leases may add up to."""

    total: HostAmount
    """For all servers; :data:`UNLIMITED` of what has no budget."""
    per_free_gpu: HostAmount = NOTHING
    """What servers without a GPU leave for each GPU that could be granted."""

    def left(
        self, reserved: HostAmount, free_devices: DeviceCount, *, has_devices: bool
    ) -> HostAmount:
        """Return what a start may still have; negative if more is reserved than the budget.

        Args:
            reserved: The guarantees of all open leases and restarts.
            free_devices: Devices that could be granted now; a slot of four counts as 1/4.
            has_devices: True for a start with a device, which may use all of the budget.
        """
        left = self.total - reserved
        return left if has_devices else left - self.per_free_gpu.for_devices(free_devices)

    def limited(self, amount: HostAmount) -> HostAmount:
        """Return an amount without what has no budget."""
        return HostAmount(
            0 if self.total.memory_bytes == UNLIMITED else amount.memory_bytes,
            0 if self.total.milli_cpus == UNLIMITED else amount.milli_cpus,
        )

    def summary(self, reserved: HostAmount) -> str:
        """Describe how much is reserved: ``40.0 GB of 92.0 GB of memory reserved``."""
        parts = []
        if self.total.memory_bytes != UNLIMITED:
            used, total = map(format_bytes, (reserved.memory_bytes, self.total.memory_bytes))
            parts.append(f"{used} of {total} of memory")
        if self.total.milli_cpus != UNLIMITED:
            parts.append(f"{reserved.milli_cpus / 1000:g} of {format_cores(self.total.milli_cpus)}")
        return " and ".join(parts) + " reserved"


@dataclass(frozen=True, slots=True)
class HostSnapshot:
    """The host's budget at one moment."""

    budget: HostBudget
    reserved: HostAmount
    """The guarantees of all open leases."""
    free_devices: DeviceCount = 0
    """Devices that could be granted; a slot of four counts as 1/4."""

    @property
    def text(self) -> str:
        """How much is reserved, in words."""
        return self.budget.summary(self.reserved)

    def left(self, *, has_devices: bool) -> HostAmount:
        """Return what a start with, or without, a device may still have; 0 if nothing is left."""
        left = self.budget.left(self.reserved, self.free_devices, has_devices=has_devices)
        return left.at_least(NOTHING)
