"""Rules that choose slots for a request, and the sentences for refusals. Pure.

In this order:

  1. Never granted: a device that is not responding, is in MIG mode, is set to ``prohibited``, is
     fully taken, is occupied by a process without a lease, or has memory in use without a process.
     A request for whole devices gets shared ones only while all their slots are free; a request for
     a slot gets shared devices only, and none where its member has a slot already. A device that
     is reserved for groups is for their members, and for preemptible runs if it is lent.
  2. Devices of one lease are distinct and of one model, so that a job runs evenly on all of them,
     and reserved alike, as the queue counts them.
     A shared device is leased as the only one: the queue keeps one free of new slots until it is
     empty, and several at once could stay half empty for long.
  3. Devices that are reserved for the member's groups go first, because the fewest others can use
     them; then open ones, then those that are lent.
  4. For a slot, devices in use go before empty ones, so that whole devices stay free; a request by
     memory gets the smallest slot instead. Then the tightest fit wins: the least memory that
     suffices, so that large devices stay free.
  5. Of several equal fits: for N devices the best connected ones; for a single device the one that
     the other free devices miss least.
  6. Ties go to the lowest index, so that the same question always has the same answer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from ..core.errors import NoDeviceFree, TooMuchAsked
from ..core.text import listing
from ..core.units import DeviceCount
from ..leases.models import NO_SLOT, Request, Sharing, Slot
from .models import Device, DeviceStatus, Inventory, model_matches, model_words
from .reservations import Reservation, may_use, named_groups, preference, reservation_of
from .topology import ALONE, LinkedDevices, Links, best_connected, neighbours


def must_run(request: Request, inventory: Inventory) -> None:
    """Raise TooMuchAsked if the driver, or the CUDA version that it supports, is too old.

    An unknown version, as of simulated devices, is no reason to refuse.
    """
    if not request.devices:
        return
    name = _environment(request)
    for what, needed, there in (
        ("NVIDIA driver", request.min_driver, inventory.driver_version),
        ("CUDA", request.min_cuda, inventory.cuda_version),
    ):
        if _is_older(there, needed):
            raise TooMuchAsked(
                f"{name} needs {what} {needed} or newer, and this machine has {there}. Start it "
                "without a GPU, choose another, or ask your admin for a newer driver."
            )


def _is_older(there: str, needed: str) -> bool:
    if not needed or not re.match(r"[0-9]", there):
        return False
    ours, theirs = _numbers(there), _numbers(needed)
    return ours + (0,) * (len(theirs) - len(ours)) < theirs


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"[0-9]+", version)[:4])


def suitable(request: Request, devices: Iterable[Device]) -> list[Device]:
    """Return the devices that the request allows and its member may use, free or not."""
    return [device for device in of_request(request, devices) if may_use(request, device)]


def of_request(request: Request, devices: Iterable[Device]) -> list[Device]:
    """Return the devices that the request allows, free or not, also those reserved for others.

    A model that is written exactly like a device's name means that model alone: a member who picked
    ``NVIDIA A100-SXM4-40GB`` from a list does not get an instance of one. The memory of a slot is
    its share of the device's.
    """
    is_slot = request.sharing is Sharing.SLOT
    enough = [
        d
        for d in devices
        if d.memory_bytes >= request.memory_bytes * (d.slots if is_slot else 1)
        and (d.slots > 1 or not is_slot)
    ]
    return of_model(request.model, of_environment(request, enough))


def asks_for(request: Request, devices: Iterable[Device], uuids: AbstractSet[str]) -> bool:
    """Return True if the request is satisfied by all of exactly these devices."""
    fitting = {device.uuid for device in suitable(request, devices)}
    return 0 < request.devices == len(uuids) and uuids <= fitting


def of_environment(request: Request, devices: list[Device]) -> list[Device]:
    """Return the devices that the request's environment supports."""
    if not request.models:
        return devices
    models = {d.model for d in devices}
    named = {m for m in models if any(model_matches(wanted, m) for wanted in request.models)}
    return [d for d in devices if d.model in named]


Alike = tuple[str, Reservation]
"""What devices of one lease have in common: their model, and whom they are reserved for."""


def alike(devices: Iterable[Device]) -> dict[Alike, list[Device]]:
    """Group devices that one lease may have together, keeping their order."""
    groups: dict[Alike, list[Device]] = {}
    for device in devices:
        groups.setdefault((device.model, reservation_of(device)), []).append(device)
    return groups


def most_together(devices: Iterable[Device]) -> int:
    """Return the size of the largest group of devices that one lease may have."""
    return max(map(len, alike(devices).values()), default=0)


def of_model(wanted: str | None, devices: list[Device]) -> list[Device]:
    """Return the devices of a model: with exactly that name, or else with all its words."""
    words = model_words(wanted or "")
    if not words:
        return devices
    models = {d.model for d in devices}
    named = {m for m in models if model_words(m) == words} or {
        m for m in models if model_matches(wanted or "", m)
    }
    return [d for d in devices if d.model in named]


def no_device_free(
    request: Request,
    matching: list[Device],
    candidates: list[Device],
    taken: Collection[Slot],
    reserved: Sequence[Device] = (),
) -> NoDeviceFree:
    """Return the refusal of a request that can be granted later.

    ``matching`` are the devices that the request allows, ``candidates`` the free ones among them,
    and ``reserved`` those that it would allow if they were not reserved for others. Each matching
    device counts once, as the first that applies of free, in use, unknown, drained, occupied.
    """
    free = {d.uuid for d in candidates}
    busy = {place.uuid for place in taken}
    counts = dict.fromkeys(("in_use", "occupied", "unknown", "drained", "free"), 0)
    for device in matching:
        if device.uuid in free:
            state = "free"
        elif device.uuid in busy:
            state = "in_use"
        elif device.status in (DeviceStatus.UNKNOWN, DeviceStatus.DRAINED):
            state = device.status.value
        else:
            state = "occupied"
        counts[state] += 1
    said = _who_has_them(request, len(matching), counts, most_together(candidates))
    if reserved:
        more = _count(len(reserved), "more is", "more are")
        said += f" {more} reserved for {named_groups(reserved)}."
    return NoDeviceFree(said, matching=len(matching), **counts)


def too_much_asked(
    request: Request, existing: list[Device], matching: list[Device]
) -> TooMuchAsked:
    """Return the refusal of a request that none of the ``existing`` devices can ever satisfy."""
    most = most_together(matching)
    if reserved := [] if matching else reserved_for_others(request, existing):
        return TooMuchAsked(_reserved(request, reserved), asked=request.devices, most=0)
    said = _what_would_fit(request, existing, matching, most)
    if request.devices > 1 and len(suitable(request, existing)) > len(matching):
        most = max(1, most)
        said = _why_not_several_shared(request, matching, most)
    return TooMuchAsked(said, asked=request.devices, most=most, existing=len(existing))


def reserved_for_others(request: Request, devices: Iterable[Device]) -> list[Device]:
    """Return the devices that suit a request, but not its member."""
    return [d for d in of_request(request, devices) if not may_use(request, d)]


def no_slot_free(
    request: Request,
    matching: list[Device],
    candidates: list[Device],
    taken: Collection[Slot],
    reserved: Sequence[Device] = (),
) -> NoDeviceFree:
    """Return the refusal of a request for a slot that can be granted later.

    ``candidates`` are the devices with a free slot: there the member has a slot already.
    """
    if candidates:
        return NoDeviceFree(
            "You already have a share of each GPU with a free share, and a second one would share "
            "it with yourself. Stop that server, or wait for another GPU.",
            matching=len(matching),
            free=0,
        )
    refusal = no_device_free(request, matching, [], taken, reserved)
    slots = sum(device.slots for device in matching)
    if refusal.fields["in_use"] == len(matching):
        said = f"All {slots} shares of {_kind(len(matching), request)} are in use."
        return NoDeviceFree(said, **refusal.fields)
    return refusal


def no_slot_ever(request: Request, existing: list[Device], matching: list[Device]) -> TooMuchAsked:
    """Return the refusal of a request for a slot that waiting does not help."""
    if matching:
        said = f"A share is of one GPU, and you asked for {request.devices}. Ask for 1."
    elif reserved := reserved_for_others(request, existing):
        said = _reserved(request, reserved)
    elif not any(device.slots > 1 for device in existing):
        said = "This hub has no shared GPU. Ask for a whole one, or start without a GPU."
    else:
        said = _why_no_slot_suits(request, existing)
    return TooMuchAsked(said, asked=request.devices, most=min(1, len(matching)))


def _why_no_slot_suits(request: Request, existing: list[Device]) -> str:
    shared = [device for device in existing if device.slots > 1]
    named = of_model(request.model, of_environment(request, shared))
    wanted = _wanted_model(request)
    if named:
        largest = format_memory(max(device.memory_bytes // device.slots for device in named))
        return f"The largest share of {wanted or 'a GPU'} has {largest}: ask for less."
    return f"No {wanted} GPU is shared on this hub. Shared are {_fleet(shared)}."


def gigabytes(memory_bytes: int) -> int:
    """Return the GB of a GPU's memory as people name it: 80 for 80 GiB and for 80 x 10^9 bytes."""
    gib, rest = divmod(memory_bytes, 2**30)
    return memory_bytes // 10**9 if rest else gib


def format_memory(memory_bytes: int) -> str:
    """Format :func:`gigabytes`: ``80 GB``."""
    return f"{gigabytes(memory_bytes)} GB"


def _who_has_them(request: Request, total: int, counts: Mapping[str, int], most_free: int) -> str:
    if counts["in_use"] == total:
        kind = _kind(total, request)
        return f"The only {kind} is in use." if total == 1 else f"All {total} {kind} are in use."
    why = listing(
        [
            _count(counts["in_use"], "is in use", "are in use"),
            _count(counts["occupied"], "is used", "are used", " by programs outside the hub"),
            _count(counts["unknown"], "is not responding", "are not responding"),
            _count(counts["drained"], "is drained", "are drained"),
        ]
    )
    if not counts["free"]:
        return f"No {_kind(1, request)} is free: of {total}, {why}."
    asked = f"You asked for {request.devices} {_kind(request.devices, request)}"
    if most_free < counts["free"]:
        only = _count(most_free, "of one model is", "of one model are")
    else:
        only = _count(counts["free"], "is", "are")
    return f"{asked}, and only {only} free: of {total}, {why}."


def _reserved(request: Request, reserved: Sequence[Device]) -> str:
    """Return the refusal of a request that only devices ``reserved`` for others would suit."""
    shared = "shared " if request.sharing is Sharing.SLOT else ""
    kind = f"{shared}{_kind(len(reserved), request)}"
    every = f"All {kind} here are" if len(reserved) > 1 else f"The only {kind} here is"
    said = f"{every} reserved for {named_groups(reserved)}."
    if any(device.lent for device in reserved):
        said += " Preemptible runs of others may use what is idle."
    return said


def _what_would_fit(
    request: Request, existing: list[Device], matching: list[Device], most: int
) -> str:
    usable = [device for device in existing if may_use(request, device)]
    are = "are" if len(usable) > 1 else "is"
    open_to_all = "" if len(usable) == len(existing) else f" that {are} not reserved for others"
    existing = usable
    if not existing:
        return "This hub has no GPU. Start without one."
    if not matching:
        return _why_none_suits(request, existing)
    has = f"You asked for {_count(request.devices, 'GPU', 'GPUs')}. "
    has += f"This hub has {_count(len(existing), 'GPU', 'GPUs')}{open_to_all}"
    advice = f"Ask for {most} at most."
    if most < len(matching):
        same = "of one model"
        if any(device.reserved_for for device in matching):
            same += ", and reserved or not"
        return f"{has}, and those of one server are {same}: {_fleet(matching)}. {advice}"
    if len(matching) == len(existing):
        return f"{has}. {advice}"
    memory = f"{format_memory(request.memory_bytes)} or more"
    if model := _wanted_model(request):
        which = _count(most, "is", "are", f" {model}")
        which += f" with {memory}" if request.memory_bytes else ""
    else:
        which = _count(most, "has", "have", f" {memory}")
    return f"{has}, of which {which}. {advice}"


def _why_not_several_shared(request: Request, matching: list[Device], most: int) -> str:
    """Return the refusal of several devices; ``matching`` are those that are not shared."""
    said = f"You asked for {request.devices} GPUs. A server gets at most 1 shared GPU, and "
    if not matching:
        return f"{said}all that suit are shared. Ask for 1."
    return f"{said}of the others at most {most} of one model would suit. Ask for {most} at most."


def _why_none_suits(request: Request, existing: list[Device]) -> str:
    runs = of_environment(request, existing)
    models = " or ".join(request.models)
    if not runs:
        return f"{_environment(request)} runs on {models}, and this hub has {_fleet(existing)}."
    named = of_model(request.model, runs)
    if named:
        largest = format_memory(max(d.memory_bytes for d in named))
        return f"This hub has no {_kind(1, request)}. The most is {largest}: ask for less."
    if of_model(request.model, existing):
        return f"{_environment(request)} runs on {models}, not on {request.model}."
    return f"This hub has no {request.model} GPU. It has {_fleet(runs)}."


def _environment(request: Request) -> str:
    name = request.environment
    return f"The environment {name!r}" if name else "This environment"


def _wanted_model(request: Request) -> str:
    """Return the requested model, or else the environment's; empty means any."""
    return request.model or " or ".join(request.models)


def _kind(count: int, request: Request) -> str:
    """Return ``GPU`` or ``GPUs`` with the requested model and memory."""
    noun = "GPU" if count == 1 else "GPUs"
    if model := _wanted_model(request):
        noun = f"{model} {noun}"
    if request.memory_bytes:
        noun = f"{noun} with {format_memory(request.memory_bytes)}"
    return noun


def _fleet(devices: Iterable[Device]) -> str:
    return listing(
        f"{len(some)} {model}" + (f" reserved for {listing(its.groups)}" if its.groups else "")
        for (model, its), some in alike(devices).items()
    )


def _count(number: int, one: str, several: str, rest: str = "") -> str:
    return f"{number} {one if number == 1 else several}{rest}" if number else ""


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

    With ``is_external``, an external scheduler decides which devices a request gets, and it also
    gives several shared devices to one request.

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
        """Return True if one lease may have both devices: they are reserved alike."""
        ends = self.by_uuid.get(one), self.by_uuid.get(other)
        return len({reservation_of(end) for end in ends if end is not None}) < 2

    def is_for_slot(self, request: Request) -> bool:
        """Return True if the request gets one slot of its device, False if all of them."""
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

    def differs_in_reservations(self, other: PlacementIndex) -> bool:
        """Return True if a device that both have is reserved in another way there."""
        if not self._reserving and not other._reserving:
            return False
        both = ((d, other.by_uuid.get(d.uuid)) for d in self.devices)
        return any(o is not None and reservation_of(d) != reservation_of(o) for d, o in both)

    def choose(
        self, request: Request, taken: frozenset[str], *, shared: Collection[str] = ()
    ) -> tuple[Slot, ...]:
        """Choose the slots for a request, on distinct devices, in the order of their indices.

        A request for a whole shared device gets its first slot here; the lease takes all of them.

        Args:
            request: What is asked for.
            taken: The slots of open leases.
            shared: UUIDs of the devices on which the member has a slot already.

        Raises NoDeviceFree if other devices would have to become free first, TooMuchAsked if
        waiting would not help.
        """
        if request.devices <= 0:
            return ()
        if self.is_for_slot(request):
            return (self._choose_slot(request, taken, shared),)
        known = self._suitable(
            request.model,
            request.models,
            request.memory_bytes,
            request.groups,
            request.preemptible,
            request.devices > 1,
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

    def _choose_slot(
        self, request: Request, taken: frozenset[str], shared: Collection[str]
    ) -> Slot:
        matching = suitable(request, self._existing)
        if not matching or request.devices > 1:
            raise no_slot_ever(request, self._existing, matching)
        left = self.free_slots(taken)
        candidates = [device for device in matching if device.uuid in left]
        others = [device for device in candidates if device.uuid not in shared]
        if not others:
            reserved = reserved_for_others(request, self._existing)
            places = list(map(Slot.from_text, taken))
            raise no_slot_free(request, matching, candidates, places, reserved)

        def rank(device: Device) -> tuple[int, int, bool, int, int, tuple[int, str]]:
            own = preference(device.reserved_for, request.groups)
            share = device.memory_bytes // device.slots if request.smallest else 0
            count = left[device.uuid]
            return own, share, count == device.slots, device.memory_bytes, count, _by_index(device)

        return _left(min(others, key=rank), taken)[0]

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
        are_several: bool,
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
        if are_several and not self.is_external:
            found = [device for device in found if device.slots == 1]
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
    reserved for the member, then the tightest fit, then the best connected.
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
        rank = (instance, whose, memory, -near.total, -near.least, order)
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
