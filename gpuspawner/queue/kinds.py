"""Kinds of devices, and how many of a kind requests take. Pure.

A *kind* is the text ``MODEL/MEMORY`` for all exclusive devices of a model and memory, which any
request could use instead of each other; for MIG instances ``MODEL/MEMORY~PART``, with how much of a
GPU each is. A shared device is a kind of its own, ``MODEL/MEMORY*SLOTS@UUID``: all slots of a share
or a whole device are on one device, and two shares of one member are not. Its number of devices is
1, and a slot counts as a part of it, such as 1/4. A request for several whole ones gets them from
one *pool*, ``MODEL/MEMORY*SLOTS``.

Devices that are reserved for the same groups are a kind of their own too, ``MODEL/MEMORY#GROUPS``,
and with ``+`` behind the groups if these lend them: ``T4/16#course-ml,vision-lab+*4@GPU-1``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote, unquote

from ..core.units import DeviceCount
from ..devices.models import Device, model_matches, slots_for
from ..leases.models import LeasedDevice

NO_KIND = ""
"""The kind of a request for which there is no device now."""

CPU_ONLY = "no device"
"""The kind of a request for no device, which waits for memory or CPU of the host."""

_KIND = re.compile(
    r"(?P<model>.*?)/(?P<memory>\d+)(?:~(?P<part>\d+/\d+))?"
    r"(?P<reserved>#(?P<groups>[^/#*@+]+)(?P<lent>\+)?)?"
    r"(?:\*(?P<slots>\d+)(?P<device>@.*)?)?",
    re.DOTALL,
)


class KindParts(NamedTuple):
    """What the text of a kind says."""

    model: str
    memory_bytes: int
    slots: int
    """1 if its devices are not shared."""
    part: DeviceCount = 1
    """How much of a GPU each of its devices is: 1, or such as 1/7 for MIG instances."""
    groups: tuple[str, ...] = ()
    """Which groups they are reserved for; empty if they are open to everybody."""
    lent: bool = False
    """True if these groups lend them to preemptible runs of others."""

    def slots_for(self, memory_bytes: int) -> int:
        """Return how many slots a share with so much memory has; see :func:`slots_for`."""
        return slots_for(memory_bytes, self.memory_bytes, self.slots)


def kind_of(device: Device | LeasedDevice) -> str:
    """Return the kind of a device; of a leased one, as if it were not reserved."""
    reserved = ""
    if isinstance(device, Device) and device.reserved_for:
        reserved = _reservation(device.reserved_for, device.lent)
    kind = _pool(device.model, device.memory_bytes, device.slots, device.part, reserved)
    return f"{kind}@{device.uuid}" if device.slots > 1 else kind


@lru_cache(maxsize=1024)
def _reservation(groups: tuple[str, ...], lent: bool) -> str:
    names = ",".join(quote(group, safe="", errors="surrogatepass") for group in groups)
    return f"#{names}{'+' if lent else ''}"


def pool_kind(model: str, memory_bytes: int, slots: int, part: DeviceCount = 1) -> str:
    """Return what :func:`pool_of` returns for devices of this model, memory, slots and part."""
    return _pool(model, memory_bytes, slots, part, "")


def _pool(model: str, memory_bytes: int, slots: int, part: DeviceCount, reserved: str) -> str:
    kind = f"{model}/{memory_bytes}" if part == 1 else f"{model}/{memory_bytes}~{part}"
    return f"{kind}{reserved}*{slots}" if slots > 1 else f"{kind}{reserved}"


@lru_cache(maxsize=4096)
def pool_of(kind: str) -> str:
    """Return a kind without its device: waits for all shared devices alike teach the same."""
    found = _KIND.fullmatch(kind)
    return kind[: found.start("device")] if found and found["device"] else kind


@lru_cache(maxsize=4096)
def parts_of(kind: str) -> KindParts:
    """Return the parts of a kind; of any other text, a model that is not shared."""
    found = _KIND.fullmatch(kind)
    if found is None:
        return KindParts(kind, 0, 1)
    groups = found["groups"].split(",") if found["groups"] else ()
    return KindParts(
        found["model"],
        int(found["memory"]),
        int(found["slots"] or 1),
        Fraction(found["part"]) if found["part"] else 1,
        tuple(unquote(group, errors="surrogatepass") for group in groups),
        bool(found["lent"]),
    )


@lru_cache(maxsize=4096)
def open_kind(kind: str) -> str:
    """Return what a kind would be if its devices were not reserved."""
    found = _KIND.fullmatch(kind)
    if found is None or not found["reserved"]:
        return kind
    return kind[: found.start("reserved")] + kind[found.end("reserved") :]


def equivalents_of(held: Mapping[str, DeviceCount]) -> DeviceCount:
    """Return how many GPUs these devices, by kind, are: a MIG instance counts as its part."""
    return sum(parts_of(kind).part * devices for kind, devices in held.items())


def most_equivalents(devices: DeviceCount, kinds: frozenset[str]) -> DeviceCount:
    """Return how many GPUs a request for so many devices of one of these kinds may get."""
    return devices * _largest_part(kinds)


@lru_cache(maxsize=4096)
def _largest_part(kinds: frozenset[str]) -> DeviceCount:
    return max((parts_of(kind).part for kind in kinds), default=1)


def shared_pools(kinds: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the shared devices among these kinds by pool, in order.

    A request for several devices gets them from one pool, each with all its slots.
    """
    pools: dict[str, list[str]] = {}
    for kind in sorted(kinds):
        if (pool := pool_of(kind)) != kind:
            pools.setdefault(pool, []).append(kind)
    return {pool: tuple(some) for pool, some in pools.items()}


def gathers_slots(devices: DeviceCount, kinds: frozenset[str], share_bytes: int = 0) -> bool:
    """Return True if a request may need several slots of a device, free at the same time.

    A whole shared device has all its slots. The arguments are those of :func:`taken_of`.
    """
    shared = [(kind, parts_of(kind).slots) for kind in kinds if parts_of(kind).slots > 1]
    return any(taken_of(kind, devices, share_bytes) * slots > 1 for kind, slots in shared)


def taken_of(kind: str, devices: DeviceCount, share_bytes: int = 0) -> DeviceCount:
    """Return how much of a kind a request takes: whole slots, where it is for a share.

    Args:
        kind: The kind.
        devices: How many devices it asks for; for a share, the least that it may take of any kind.
        share_bytes: The memory that a share must have; 0 is any, and for whole devices.
    """
    if isinstance(devices, int):
        return devices
    parts = parts_of(kind)
    slots = max(math.ceil(devices * parts.slots), parts.slots_for(share_bytes))
    return Fraction(slots, parts.slots)


Preference = tuple[DeviceCount, ...]
"""A key that sorts kinds, the best first."""


def kind_preference(
    kind: str, left: DeviceCount, taken: DeviceCount, *, smallest: bool = False
) -> Preference:
    """Return a key that sorts the kinds that a request may get; it would take ``taken`` of this.

    Devices that are reserved for the member go first. Then for a share as placement does: devices
    in use go before empty ones, then small before large ones, then full before less full. For whole
    devices the kind with most ``left``, then those that are not shared. With ``smallest``, the
    memory of the devices or of the share decides before that; several MIG instances come last,
    because CUDA cannot use them together.
    """
    parts = parts_of(kind)
    is_open = not parts.groups
    if taken < 1:
        share = parts.memory_bytes * taken if smallest else 0
        return is_open, share, left >= 1, parts.memory_bytes, left * parts.slots
    size: Preference = ()
    if smallest:
        size = (taken > 1 and model_matches("MIG", parts.model), parts.memory_bytes)
    return is_open, *size, -left, parts.slots > 1


def add(one: Mapping[str, DeviceCount], other: Mapping[str, DeviceCount]) -> dict[str, DeviceCount]:
    """Return the sums by kind, without those that are not positive."""
    return _combine(one, other, lambda a, b: a + b)


def subtract(
    one: Mapping[str, DeviceCount], other: Mapping[str, DeviceCount]
) -> dict[str, DeviceCount]:
    """Return the differences by kind, without those that are not positive."""
    return _combine(one, other, lambda a, b: a - b)


def count_kinds(held: Iterable[tuple[str, DeviceCount]]) -> dict[str, DeviceCount]:
    """Return the sum of the devices of each kind."""
    found: dict[str, DeviceCount] = {}
    for kind, devices in held:
        found[kind] = found.get(kind, 0) + devices
    return found


def _combine(
    one: Mapping[str, DeviceCount],
    other: Mapping[str, DeviceCount],
    of: Callable[[DeviceCount, DeviceCount], DeviceCount],
) -> dict[str, DeviceCount]:
    found = {kind: of(one.get(kind, 0), other.get(kind, 0)) for kind in {**one, **other}}
    return {kind: devices for kind, devices in found.items() if devices > 0}
