"""Which places a request gets. Pure: what exists, what is taken and what is linked go in,
places or a refusal come out.

The rules, in order:

1. A device that does not answer, is in MIG mode, is set to ``prohibited``, is fully taken or is
   occupied by a process that no lease explains is never given.
2. Devices of one lease are distinct and of one model, so that a job runs evenly on all of them.
3. The tightest fit wins: the least memory that suffices, so that large devices stay free.
4. Of several that fit equally: N devices are the best connected ones; a single device is the one
   that the other free ones miss least.
5. What is left equal is settled by the lowest index, so that the same question always has the
   same answer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ..model import Device, DeviceStatus, Place, Request
from .connectivity import Links, best_connected, least_missed
from .matching import by_model, most_of_one_model, suitable
from .refusals import no_device_free, too_much_asked


def leasable(device: Device) -> str | None:
    """None when the device could be leased if it were free, else why not, as a sentence."""
    if device.status is DeviceStatus.UNKNOWN:
        return device.reason or "It does not answer."
    if device.status is DeviceStatus.PARENT:
        return device.reason or "It is in MIG mode: its instances are leased instead."
    if device.compute_mode == "prohibited":
        return "Its compute mode is prohibited. Set it back with nvidia-smi --compute-mode=0."
    return None


def occupied(device: Device, taken: Collection[Place]) -> bool:
    """Whether a compute process is on the device though no slot of it is taken."""
    return bool(device.compute_processes) and all(p.uuid != device.uuid for p in taken)


def free_places(devices: Iterable[Device], taken: Collection[Place]) -> list[Place]:
    """Every slot that could be given right now, in the order of ``devices``."""
    return [place for slots in _free_slots(devices, taken).values() for place in slots]


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
    if request.devices <= 0:
        return ()
    existing = [d for d in devices if _could_ever_be_leased(d)]
    matching = suitable(request, existing)
    if most_of_one_model(matching) < request.devices:
        raise too_much_asked(request, existing, matching)
    free = _free_slots(existing, taken)
    candidates = sorted((d for d in matching if d.uuid in free), key=_by_index)
    if most_of_one_model(candidates) < request.devices:
        raise no_device_free(request, matching, candidates, taken)
    if request.devices == 1:
        chosen = [_choose_one(candidates, free, links)]
    else:
        chosen = _choose_several(candidates, request.devices, links)
    return tuple(free[device.uuid][0] for device in chosen)


def _choose_one(candidates: list[Device], free: Collection[str], links: Links) -> Device:
    least = min(d.memory_bytes for d in candidates)
    fitting = {d.uuid: d for d in candidates if d.memory_bytes == least}
    return fitting[least_missed(list(fitting), free, links)]


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


def _free_slots(devices: Iterable[Device], taken: Collection[Place]) -> dict[str, list[Place]]:
    """The free places of each device that has any, by its UUID."""
    held = frozenset(taken)
    busy = {place.uuid for place in held}
    free = {}
    for device in devices:
        if leasable(device) is not None:
            continue
        if device.uuid not in busy:
            if device.processes and device.compute_processes:
                continue
            free[device.uuid] = [Place(device.uuid, slot) for slot in range(device.slots)]
        else:
            places = (Place(device.uuid, slot) for slot in range(device.slots))
            left = [place for place in places if place not in held]
            if left:
                free[device.uuid] = left
    return free


def _could_ever_be_leased(device: Device) -> bool:
    """An unknown device may answer again; a parent or a prohibited one waits for an admin."""
    return device.status is not DeviceStatus.PARENT and device.compute_mode != "prohibited"


def _by_index(device: Device) -> tuple[int, str]:
    return device.index, device.uuid
