"""Shares as gpuspawner gives them, for the tasks of the trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpuspawner.devices.models import Device, slots_for
from gpuspawner.devices.placement import PlacementIndex, texts
from gpuspawner.leases.models import Request, Sharing, Slot

from .fragmentation import Node
from .openb import WHOLE, Pod


class OurChoice:
    """The GPUs and the slots that gpuspawner chooses on a node. A GPU's memory is :data:`WHOLE`."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._taken: list[frozenset[str]] = [frozenset()] * len(nodes)
        self._indexes: dict[tuple[int, ...], PlacementIndex] = {}

    def __call__(self, number: int, pod: Pod) -> tuple[int, ...]:
        """Choose for a pod, and note it as placed."""
        slots = self._nodes[number].slots
        if slots not in self._indexes:
            devices = [
                Device(uuid=str(at), index=at, model="GPU", memory_bytes=WHOLE, slots=count)
                for at, count in enumerate(slots)
            ]
            self._indexes[slots] = PlacementIndex(devices, {})
        sharing = Sharing.SLOT if pod.part < WHOLE else Sharing.WHOLE
        asked = Request(devices=pod.gpus, memory_bytes=pod.part, sharing=sharing, smallest=True)
        chosen = self._indexes[slots].choose(asked, self._taken[number])
        if sharing is Sharing.WHOLE:
            chosen = tuple(Slot(d.uuid, n) for d in chosen for n in range(slots[int(d.uuid)]))
        self._taken[number] |= texts(chosen)
        return tuple({int(place.uuid): None for place in chosen})


def share_or_whole(slots: int, pod: Pod) -> Pod:
    """Return what a member asks for where GPUs have so many slots.

    Who needs all of them asks for the whole GPU.
    """
    needs_all = slots_for(pod.part, WHOLE, slots) >= slots
    return replace(pod, part=WHOLE) if pod.gpus and needs_all else pod
