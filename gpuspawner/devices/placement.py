"""Rules that choose slots for a request. Pure.

In this order:

  1. Never granted: a device that is not responding, is in MIG mode, is set to ``prohibited``, is
     fully taken, is occupied by a process without a lease, or has memory in use without a process.
     A request for whole devices gets shared ones only while all their slots are free; a request for
     a share gets shared devices only, and none where its member has a share already. A device that
     is reserved for groups is for their members, and for preemptible runs if it is lent.
  2. Devices of one lease are distinct and of one model, so that a job runs evenly on all of them.
     They are reserved alike and have as many slots, as the queue counts them.
  3. Devices that are reserved for the member's groups go first, because the fewest others can use
     them; then open ones, then those that are lent.
  4. A share is of one device, and has the fewest slots that come to the memory that is asked for;
     never all of them, which would be the whole device. Devices in use go before empty ones, so
     that whole devices stay free; a request by memory gets the smallest share instead. Then the
     tightest fit wins: the least memory that suffices, so that large devices stay free.
  5. Of several equal fits: for N devices the best connected ones; for a single device the one that
     the other free devices miss least.
  6. Ties go to the lowest index, so that the same question always has the same answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from ..core.units import DeviceCount
from ..leases.models import NO_SLOT, Request, Sharing, Slot
from .models import Device, DeviceStatus
from .refusals import (
    no_device_free,
    no_share_ever,
    no_share_free,
    reserved_for_others,
    too_much_asked,
    why_reserved,
)
from .reservations import preference, reservation_of
from .suitability import alike, most_together, suitable
from .topology import ALONE, LinkedDevices, Links, best_connected, neighbours

FEW = 16
"""Up to this many slots changed since the last choice are updated one by one."""


def leasable(device: Device) -> str | None:
    """Return None if the device could be leased when free, else the reason as a sentence."""
    if device.status is not DeviceStatus.OK:
        return device.reason or f"Its status is {device.status.value}."
    if device.compute_mode == "prohibited":
        return "Its compute mode is prohibited. Set it back with nvidia-smi --compute-mode=0."
    return None


def texts(places: Iterable[Slot]) -> frozenset[str]:
    """Convert slots to the texts that :class:`PlacementIndex` uses."""
    return frozenset(place.text for place in places)


class PlacementIndex:
    """All devices and their links, prepared for many questions with changing taken slots.

    With ``is_external``, an external scheduler decides which devices a request gets.

    What depends on devices and links alone is calculated once, and between two choices only what
    changed. Taken slots are given as texts (see :func:`texts`), so that Python's own sets do most
    of the work: with a thousand devices, a choice takes a twentieth of a millisecond. Immutable
    apart from its caches, and thread-safe.
    """

    def __init__(
        self, devices: Sequence[Device], links: Links, *, is_external: bool = False
    ) -> None:
        self.devices = devices
        self.links = links
        self.is_external = is_external
        self.by_uuid = {device.uuid: device for device in devices}
        # An unknown device may answer again; a MIG parent or a prohibited one waits for an admin.
        existing = (
            device
            for device in devices
            if device.status is not DeviceStatus.PARENT and device.compute_mode != "prohibited"
        )
        self._existing = sorted(existing, key=_by_index)
        self._near = neighbours({ends: near for ends, near in links.items() if self._alike(*ends)})
        leasable_ones = [device for device in devices if leasable(device) is None]
        # Empty and without a lease: free unless a lease is added.
        self._idle = {d.uuid: d for d in leasable_ones if d.empty}
        self._shared = {d.uuid: d for d in leasable_ones if d.slots > 1}
        self._by_text = {
            Slot(d.uuid, slot).text: d.uuid
            for d in leasable_ones
            for slot in range(NO_SLOT, d.slots)
        }
        self._reserving = frozenset(group for d in devices for group in d.reserved_for)
        self._group = {uuid: near.group for uuid, near in self._near.items()}
        self._members = Counter(self._group.values())
        self._suitable = lru_cache(maxsize=64)(self._find_suitable)
        self._last: _Free | None = None

    def _alike(self, one: str, other: str) -> bool:
        """Return True if both devices are reserved alike, so that one lease may have both."""
        ends = self.by_uuid.get(one), self.by_uuid.get(other)
        return len({reservation_of(end) for end in ends if end is not None}) < 2

    def is_for_share(self, request: Request) -> bool:
        """Return True if the request gets some slots of its device, False if all of them."""
        return request.sharing is Sharing.SLOT

    def of_member(
        self, request: Request, groups: Collection[str], *, preemptible: bool = False
    ) -> Request:
        """Return a request with what decides which reserved devices its member may use."""
        mine = tuple(sorted(self._reserving.intersection(groups)))
        preemptible = preemptible and bool(self._reserving)
        if (mine, preemptible) == (request.groups, request.preemptible):
            return request
        return replace(request, groups=mine, preemptible=preemptible)

    def why_reserved(self, request: Request) -> str:
        """Return the sentence that only devices reserved for others suit a request; else empty."""
        return why_reserved(request, self._existing)

    def differs_in_reservations(self, other: PlacementIndex) -> bool:
        """Return True if a device that both have is reserved in another way there."""
        if not self._reserving and not other._reserving:
            return False
        both = ((d, other.by_uuid.get(d.uuid)) for d in self.devices)
        return any(o is not None and reservation_of(d) != reservation_of(o) for d, o in both)

    def choose(
        self, request: Request, taken: frozenset[str], *, shared: Collection[str] = ()
    ) -> tuple[Slot, ...]:
        """Choose the slots for a request, in the order of their devices' indices.

        A share may have several slots, all of one device. A request for whole devices gets the
        first slot of each here; the lease takes all of them.

        Args:
            request: What is asked for.
            taken: The slots of open leases.
            shared: UUIDs of the devices on which the member has a share already.

        Raises NoDeviceFree if other devices would have to become free first, TooMuchAsked if
        waiting would not help.
        """
        if request.devices <= 0:
            return ()
        if self.is_for_share(request):
            return self._choose_share(request, taken, shared)
        known = self._suitable(
            request.model,
            request.models,
            request.memory_bytes,
            request.groups,
            request.preemptible,
        )
        if known.most < request.devices:
            raise too_much_asked(request, self._existing, list(known.devices))
        now = self._now(taken)
        if request.devices == 1 and (best := self._choose_one(known, now)):
            return (Slot(best.uuid),)
        candidates = [device for device in known.devices if device.uuid in now.free]
        if most_together(candidates) < request.devices:
            raise no_device_free(
                request,
                list(known.devices),
                candidates,
                list(map(Slot.from_text, taken)),
                reserved_for_others(request, self._existing),
            )
        chosen = _choose_several(candidates, request, self.links)
        return tuple(Slot(device.uuid) for device in chosen)

    def free(self, taken: frozenset[str]) -> frozenset[str]:
        """Return the UUIDs of the devices that could be granted whole now."""
        return self._now(taken).free

    def free_slots(self, taken: frozenset[str]) -> dict[str, int]:
        """Return how many slots could be granted now, by the UUIDs of shared devices."""
        now = self._now(taken)
        left = {
            uuid: len(_left(device, taken))
            for uuid, device in self._shared.items()
            if uuid in now.free or uuid in now.partly
        }
        return {uuid: count for uuid, count in left.items() if count}

    def count_free(self, taken: frozenset[str]) -> DeviceCount:
        """Return how many devices could be granted now; one free slot of four counts as 1/4."""
        slots = self.free_slots(taken)
        shared = sum(Fraction(left, self.by_uuid[uuid].slots) for uuid, left in slots.items())
        return len(self.free(taken) - slots.keys()) + shared

    def _choose_share(
        self, request: Request, taken: frozenset[str], shared: Collection[str]
    ) -> tuple[Slot, ...]:
        matching = suitable(request, self._existing)
        if not matching or request.devices > 1:
            raise no_share_ever(request, self._existing, matching)
        left = self.free_slots(taken)
        needed = {device.uuid: device.slots_for(request.memory_bytes) for device in matching}
        candidates = [d for d in matching if left.get(d.uuid, 0) >= needed[d.uuid]]
        others = [device for device in candidates if device.uuid not in shared]
        if not others:
            reserved = reserved_for_others(request, self._existing)
            places = list(map(Slot.from_text, taken))
            raise no_share_free(request, matching, candidates, left, places, reserved)

        def rank(device: Device) -> tuple[int, int, bool, int, int, tuple[int, str]]:
            own = preference(device.reserved_for, request.groups)
            share = device.memory_bytes * needed[device.uuid] // device.slots
            count = left[device.uuid]
            return (
                own,
                share if request.smallest else 0,
                count == device.slots,
                device.memory_bytes,
                count,
                _by_index(device),
            )

        best = min(others, key=rank)
        return tuple(_left(best, taken)[: needed[best.uuid]])

    def _now(self, taken: frozenset[str]) -> _Free:
        """Return what is free, derived from the last answer if that is nearly the same."""
        last = self._last
        changed = taken ^ last.taken if last else taken
        if last is None or len(changed) > FEW:
            now = self._look(taken)
        elif changed:
            now = self._changed(last, taken, changed)
        else:
            return last
        self._last = now  # any thread's answer is as good as another's
        return now

    def _look(self, taken: frozenset[str]) -> _Free:
        in_use = {uuid for text in taken if (uuid := self._by_text.get(text))}
        free = frozenset(self._idle.keys() - in_use)
        shared = in_use & self._shared.keys()
        partly = frozenset(uuid for uuid in shared if not _is_closed(uuid, taken))
        return _Free(taken, free, partly, Counter(map(self._group.get, free)))

    def _changed(self, last: _Free, taken: frozenset[str], changed: Collection[str]) -> _Free:
        """Update the last answer where only some slots were taken or returned since."""
        uuids = {uuid for text in changed if (uuid := self._by_text.get(text))}
        in_use = {uuid for uuid in uuids if _is_in_use(self.by_uuid[uuid], taken)}
        free = {uuid for uuid in uuids - in_use if uuid in self._idle}
        left = Counter(last.left)
        left.update(self._group.get(uuid) for uuid in free - last.free)
        left.subtract(self._group.get(uuid) for uuid in (uuids - free) & last.free)
        shared = in_use & self._shared.keys()
        partly = last.partly - uuids | {uuid for uuid in shared if not _is_closed(uuid, taken)}
        return _Free(taken, last.free - uuids | free, partly, left)

    def _choose_one(self, known: _Suitable, now: _Free) -> Device | None:
        """Choose the tightest fit, and among equals the device that others miss least.

        A device's worth to others is precalculated; only in groups with a device that is not free
        is it counted again.
        """
        free, left = now.free, now.left
        whole = (one for one in known.firsts if left[one.group] == self._members[one.group])
        alone = (one for one in known.groups.get(None, ()) if one.uuid in free)
        found = [next(whole, None), next(alone, None)]
        for group, count in left.items():
            if group is None or count in (0, self._members[group]):
                continue
            for one in known.groups.get(group, ()):
                if one.uuid in free:
                    missed = self._near[one.uuid].worth_among(free)
                    found.append(one._replace(missed=missed))
        best = min(filter(None, found), default=None)
        return self.by_uuid[best.uuid] if best else None

    def _find_suitable(
        self,
        model: str | None,
        models: tuple[str, ...],
        memory_bytes: int,
        groups: tuple[str, ...],
        preemptible: bool,
    ) -> _Suitable:
        request = Request(
            devices=1,
            model=model,
            models=models,
            memory_bytes=memory_bytes,
            groups=groups,
            preemptible=preemptible,
        )
        found = suitable(request, self._existing)
        ranked = sorted(
            _rank(device, self._near.get(device.uuid, ALONE), groups) for device in found
        )
        by_group: dict[int | None, list[_Rank]] = {}
        for one in ranked:
            by_group.setdefault(one.group, []).append(one)
        firsts = sorted(ones[0] for group, ones in by_group.items() if group is not None)
        return _Suitable(tuple(found), most_together(found), by_group, tuple(firsts))


class _Rank(NamedTuple):
    """The rank of a device for a request of one: the smallest is the best."""

    preference: int
    """0 if it is reserved for the member's groups, 1 if it is open, 2 if others lend it."""
    memory_bytes: int
    missed: int
    """What the other free devices lose when it is taken."""
    order: tuple[int, str]
    uuid: str
    group: int | None


def _rank(device: Device, near: LinkedDevices, groups: tuple[str, ...]) -> _Rank:
    return _Rank(
        preference(device.reserved_for, groups),
        device.memory_bytes,
        near.worth,
        _by_index(device),
        device.uuid,
        near.group,
    )


@dataclass(frozen=True, slots=True)
class _Free:
    """What is free while these slots are taken."""

    taken: frozenset[str]
    free: frozenset[str]
    """UUIDs of devices without a lease."""
    partly: frozenset[str]
    """UUIDs of shared devices with leases that are not closed, whether a slot is left or not."""
    left: Counter[int | None]
    """How many of each group are free."""


@dataclass(frozen=True, slots=True)
class _Suitable:
    """The devices that a request allows, free or not."""

    devices: tuple[Device, ...]
    """By index."""
    most: int
    """How many are of one model."""
    groups: Mapping[int | None, Sequence[_Rank]]
    """The devices by group number, best first if all were free."""
    firsts: tuple[_Rank, ...]
    """The first of each group, best first."""


def _choose_several(candidates: list[Device], request: Request, links: Links) -> list[Device]:
    """Choose the best devices of one model for a request of several.

    Whole GPUs go before MIG instances, because CUDA cannot use several of those at once; then those
    reserved for the member, then the tightest fit, then those that are not shared, then the best
    connected.
    """
    options, count = [], request.devices
    for group in alike(candidates).values():
        if len(group) < count:
            continue
        near = best_connected([d.uuid for d in group], count, links)
        members = [group[position] for position in near.members]
        instance = any(d.parent_uuid is not None for d in members)
        memory = min(d.memory_bytes for d in group)
        whose = preference(group[0].reserved_for, request.groups)
        order = [_by_index(d) for d in members]
        shared = group[0].slots > 1
        rank = (instance, whose, memory, shared, -near.total, -near.least, order)
        options.append((rank, members))
    return min(options, key=lambda option: option[0])[1]


def _left(device: Device, taken: frozenset[str]) -> list[Slot]:
    """Return the untaken slots of a device."""
    places = (Slot(device.uuid, slot) for slot in range(device.slots))
    return [place for place in places if place.text not in taken]


def _is_in_use(device: Device, taken: frozenset[str]) -> bool:
    """Return True if any slot of a device is taken, or if it is closed."""
    return len(_left(device, taken)) < device.slots or _is_closed(device.uuid, taken)


def _is_closed(uuid: str, taken: frozenset[str]) -> bool:
    return Slot.closure(uuid).text in taken


def _by_index(device: Device) -> tuple[int, str]:
    return device.index, device.uuid
