"""Placement asked once, without an index that is kept."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gpuspawner.devices.models import Device
from gpuspawner.devices.placement import PlacementIndex, texts
from gpuspawner.devices.topology import Links
from gpuspawner.leases.models import Request, Slot


def choose(
    request: Request,
    devices: Sequence[Device],
    taken: Collection[Slot] = (),
    links: Links | None = None,
) -> tuple[Slot, ...]:
    """The slots that a request is given while these are taken."""
    return PlacementIndex(devices, links or {}).choose(request, texts(taken))


def free_slots(devices: Sequence[Device], taken: Collection[Slot] = ()) -> list[Slot]:
    """Every slot that could be granted now, in the order of the devices."""
    index, texts_taken = PlacementIndex(devices, {}), texts(taken)
    free = index.free(texts_taken) | index.free_slots(texts_taken).keys()
    slots = [Slot(device.uuid, slot) for device in devices for slot in range(device.slots)]
    return [slot for slot in slots if slot.uuid in free and slot not in taken]
