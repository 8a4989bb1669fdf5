"""Which places a request gets. Pure: what exists, what is taken and what is linked go in,
places or a refusal come out.

The rules, in order:

1. A device that does not answer, is in MIG mode, is set to ``prohibited``, is fully taken or is
   occupied by a process that no lease explains, or whose memory is held, is never given.
2. Devices of one lease are distinct and of one model, so that a job runs evenly on all of them.
3. The tightest fit wins: the least memory that suffices, so that large devices stay free.
4. Of several that fit equally: N devices are the best connected ones; a single device is the one
   that the other free ones miss least.
5. What is left equal is settled by the lowest index, so that the same question always has the
   same answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ..model import Device, DeviceStatus, Place, Request
from .connectivity import ALONE, Links, Near, best_connected, neighbours
from .matching import by_model, most_of_one_model, suitable
from .refusals import no_device_free, too_much_asked

FEW = 16
"""So many places that changed since the last choice are looked at one by one."""


def leasable(device: Device) -> str | None:
    """None when the device could be leased if it were free, else why not, as a sentence."""
    if device.status is DeviceStatus.UNKNOWN:
        return device.reason or "It does not answer."
    if device.status is DeviceStatus.DRAINED:
        return device.reason or "Its machine is drained."
    if device.status is DeviceStatus.PARENT:
        return device.reason or "It is in MIG mode: its instances are leased instead."
    if device.compute_mode == "prohibited":
        return "Its compute mode is prohibited. Set it back with nvidia-smi --compute-mode=0."
    return None


def occupied(device: Device, taken: Collection[Place]) -> bool:
    """Whether something is on the device, or holds its memory, though no slot of it is taken."""
    return not device.empty and all(p.uuid != device.uuid for p in taken)


def free_places(devices: Iterable[Device], taken: Collection[Place]) -> list[Place]:
    """Every slot that could be given right now, in the order of ``devices``."""
    fleet = Fleet(list(devices), {})
    held = texts(taken)
    free = fleet.free(held)
    return [p for device in fleet.devices if device.uuid in free for p in _left(device, held)]


def choose(
    request: Request,
    devices: Sequence[Device],
    taken: Collection[Place],
    links: Links,
) -> tuple[Place, ...]:
    """The places for a request, on distinct devices, in the order of their indices.

    ``taken`` are the places of open leases; ``links`` as in
    :attr:`gpuspawner.model.Inventory.links`. Raises NoDeviceFree when other devices would have
    to become free first, TooMuchAsked when waiting would not help.
    """
    return Fleet(devices, links).choose(request, texts(taken))


def texts(places: Iterable[Place]) -> frozenset[str]:
    """Places as :class:`Fleet` takes them: each as one text."""
    return frozenset(place.text for place in places)


class Fleet:
    """What exists and how it is linked, prepared for many questions about what is taken.

    Immutable but for what it remembers: what depends on devices and links alone is worked out once,
    and from one choice to the next only what changed in between. Places that are taken are given
    as texts (see :func:`texts`), so that of a thousand devices nearly all is done by Python's own
    sets: a choice takes a twentieth of a millisecond. Thread-safe.
    """

    def __init__(self, devices: Sequence[Device], links: Links) -> None:
        self.devices = devices
        self.links = links
        self.by_uuid = {device.uuid: device for device in devices}
        self._existing = sorted(filter(_could_ever_be_leased, devices), key=_by_index)
        self._near = neighbours(links)
        leasable_ones = [device for device in devices if leasable(device) is None]
        # Nobody has a place on them and nothing is there: free unless a lease is added. A
        # device is found by its first place, and one that is shared by any.
        self._idle = {Place(d.uuid).text: d.uuid for d in leasable_ones if d.empty}
        self._shared = {
            Place(d.uuid, slot).text: d
            for d in leasable_ones
            if d.slots > 1
            for slot in range(d.slots)
        }
        self._group = {uuid: near.group for uuid, near in self._near.items()}
        self._members = Counter(self._group.values())
        self._suitable = lru_cache(maxsize=64)(self._find_suitable)
        self._last: _Free | None = None

    def choose(self, request: Request, taken: frozenset[str]) -> tuple[Place, ...]:
        """See :func:`choose`."""
        if request.devices <= 0:
            return ()
        known = self._suitable(request.model, request.models, request.memory_bytes)
        if known.most < request.devices:
            raise too_much_asked(request, self._existing, list(known.devices))
        now = self._now(taken)
        free = now.free
        if request.devices == 1 and (best := self._choose_one(known, now)):
            return (_left(best, taken)[0],)
        candidates = [device for device in known.devices if device.uuid in free]
        if most_of_one_model(candidates) < request.devices:
            places = map(Place.from_text, taken)
            raise no_device_free(request, list(known.devices), candidates, list(places))
        chosen = _choose_several(candidates, request.devices, self.links)
        return tuple(_left(device, taken)[0] for device in chosen)

    def free(self, taken: frozenset[str]) -> frozenset[str]:
        """The UUIDs of the devices with a place that could be given right now."""
        return self._now(taken).free

    def _now(self, taken: frozenset[str]) -> _Free:
        """What is free, worked out from the last answer when that is nearly the same."""
        last = self._last
        changed = taken ^ last.taken if last else taken
        if last is None or len(changed) > FEW:
            now = self._look(taken)
        elif changed:
            now = self._changed(last, taken, changed)
        else:
            return last
        self._last = now  # of several threads one is the last, which is as good as another
        return now

    def _look(self, taken: frozenset[str]) -> _Free:
        """What is free, from nothing."""
        free = frozenset(map(self._idle.__getitem__, self._idle.keys() - taken))
        partly = {
            self._shared[text].uuid: self._shared[text] for text in self._shared.keys() & taken
        }
        free = free.union(uuid for uuid, device in partly.items() if _left(device, taken))
        return _Free(taken, free, Counter(map(self._group.get, free)))

    def _changed(self, last: _Free, taken: frozenset[str], changed: Collection[str]) -> _Free:
        """The same, where only some places were taken or given back since the last answer."""
        shared = {device.uuid for text in changed if (device := self._shared.get(text))}
        uuids = shared.union(uuid for text in changed if (uuid := self._idle.get(text)))
        free = {uuid for uuid in uuids if self._gives(uuid, taken)}
        left = Counter(last.left)
        left.update(self._group.get(uuid) for uuid in free - last.free)
        left.subtract(self._group.get(uuid) for uuid in (uuids - free) & last.free)
        return _Free(taken, last.free - uuids | free, left)

    def _gives(self, uuid: str, taken: frozenset[str]) -> bool:
        """Whether a device that could be leased has a place that could be given right now."""
        first = Place(uuid).text
        if first in self._idle and first not in taken:
            return True
        device = self.by_uuid[uuid]
        left = _left(device, taken)
        return 0 < len(left) < device.slots

    def _choose_one(self, known: _Suitable, now: _Free) -> Device | None:
        """Of the free devices that fit tightest, the first that the other free ones miss least.

        What a device is worth to others is known beforehand, unless one of its group is not
        free: only in those groups is it counted anew.
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
        self, model: str | None, models: tuple[str, ...], memory_bytes: int
    ) -> _Suitable:
        request = Request(devices=1, model=model, models=models, memory_bytes=memory_bytes)
        found = suitable(request, self._existing)
        ranked = sorted(_rank(device, self._near.get(device.uuid, ALONE)) for device in found)
        groups: dict[int | None, list[_Rank]] = {}
        for one in ranked:
            groups.setdefault(one.group, []).append(one)
        firsts = sorted(ones[0] for group, ones in groups.items() if group is not None)
        return _Suitable(tuple(found), most_of_one_model(found), groups, tuple(firsts))


class _Rank(NamedTuple):
    """A device among those that would do for one: the least is the best."""

    memory_bytes: int
    missed: int
    """What the other free ones miss when it is taken."""
    order: tuple[int, str]
    uuid: str
    group: int | None


def _rank(device: Device, near: Near) -> _Rank:
    return _Rank(device.memory_bytes, near.worth, _by_index(device), device.uuid, near.group)


@dataclass(frozen=True, slots=True)
class _Free:
    """What is free while these places are taken."""

    taken: frozenset[str]
    free: frozenset[str]
    """UUIDs of devices."""
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
    """The same by the number of their group, in each the best first if all were free."""
    firsts: tuple[_Rank, ...]
    """The first of each group, again the best first."""


def _choose_several(candidates: list[Device], count: int, links: Links) -> list[Device]:
    """The best ``count`` of one model. Whole GPUs go before MIG instances, which CUDA cannot
    use several of at once; then the tightest fit, then the best connected."""
    options = []
    for group in by_model(candidates).values():
        if len(group) < count:
            continue
        near = best_connected([d.uuid for d in group], count, links)
        members = [group[position] for position in near.members]
        instance = any(d.parent_uuid is not None for d in members)
        memory = min(d.memory_bytes for d in group)
        rank = (instance, memory, -near.total, -near.least, [_by_index(d) for d in members])
        options.append((rank, members))
    return min(options, key=lambda option: option[0])[1]


def _left(device: Device, taken: frozenset[str]) -> list[Place]:
    """The places on a device that nobody has."""
    places = (Place(device.uuid, slot) for slot in range(device.slots))
    return [place for place in places if place.text not in taken]


def _could_ever_be_leased(device: Device) -> bool:
    """An unknown device may answer again; a parent or a prohibited one waits for an admin."""
    return device.status is not DeviceStatus.PARENT and device.compute_mode != "prohibited"


def _by_index(device: Device) -> tuple[int, str]:
    return device.index, device.uuid
