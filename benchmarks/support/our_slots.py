"""Slots as gpuspawner gives them, for the tasks of the trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from math import ceil

from gpuspawner.devices.models import Device
from gpuspawner.devices.placement import PlacementIndex, texts
from gpuspawner.leases.models import Request, Sharing, Slot

from .fragmentation import Node
from .openb import WHOLE, Machine, Pod


class OurChoice:
    """The GPUs and the slot that gpuspawner chooses on a node. A GPU's memory is :data:`WHOLE`."""

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
        asked = Request(devices=pod.gpus, memory_bytes=pod.part, sharing=sharing)
        chosen = self._indexes[slots].choose(asked, self._taken[number])
        if sharing is Sharing.WHOLE:
            chosen = tuple(Slot(d.uuid, n) for d in chosen for n in range(slots[int(d.uuid)]))
        self._taken[number] |= texts(chosen)
        return tuple({int(place.uuid): None for place in chosen})


def with_slots(
    machines: Sequence[Machine], counts: Sequence[int], unshared: Sequence[str]
) -> list[tuple[int, ...]]:
    """Return the number of slots of each GPU of each machine: the counts in turn."""
    turn = cycle(counts)
    return [
        (1,) * machine.gpus if machine.model in unshared else tuple(islice(turn, machine.gpus))
        for machine in machines
    ]


def one_slot(largest: int, pod: Pod) -> Pod:
    """Return what a member asks for whose part of a GPU is too large for each slot: all of it."""
    return replace(pod, part=WHOLE) if largest < pod.part < WHOLE else pod


def several_slots(count: int, pod: Pod) -> Pod:
    """Return what as many of ``count`` slots as are needed come to."""
    if not 0 < pod.part < WHOLE:
        return pod
    return replace(pod, part=ceil(pod.part * count / WHOLE) * WHOLE // count)


def asked(kinds: Mapping[Pod, float], request: Callable[[Pod], Pod]) -> dict[Pod, float]:
    """Return how frequent each kind is after :func:`one_slot` or :func:`several_slots`."""
    found: dict[Pod, float] = {}
    for pod, weight in kinds.items():
        found[request(pod)] = found.get(request(pod), 0) + weight
    return found
