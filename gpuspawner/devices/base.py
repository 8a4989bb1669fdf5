"""What a device source is, how a configuration names one, and the scale of its links.

The scale, used in :attr:`gpuspawner.model.Inventory.links`: whole numbers, greater is closer.

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

from datetime import datetime
from typing import Protocol, runtime_checkable

from ..errors import ConfigError
from ..model import Inventory
from ..telemetry import Sample

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
    """The key of two UUIDs in :attr:`gpuspawner.model.Inventory.links`."""
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
