"""FGD, best fit and random choice of a node and its GPUs, as the FGD paper compares them.

FGD, fragmentation gradient descent (Weng et al., USENIX ATC 2023): the fragment of a node is the
part of its free GPUs that the next task could not use, on average over the known kinds of tasks:
all of them if the task does not fit, else those with too little left for it. A task without a GPU
uses none. A task goes where it adds the least; as in the authors' simulator this is measured in
whole points of 100, by a sigmoid, and the chooser takes any of the equal nodes. Best fit leaves
the least processors and GPUs free, each as a part of the largest node's, with equal weights.

GPUs may have equal slots. Then a task takes as many slots of one GPU as it needs, or whole GPUs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, inf
from random import Random

from gpuspawner.devices.models import slots_for

from .openb import WHOLE, Machine, Pod

POINTS = 100
ANY = 0
"""In place of a number of slots: a GPU without slots, of which a pod may take any fraction."""


def needed(pod: Pod, slots: int) -> float:
    """Return what a pod takes of each GPU with so many slots; infinite if it cannot have it.

    A share never has all slots.
    """
    if pod.part == WHOLE or slots == ANY:
        return pod.part
    held = slots_for(pod.part, WHOLE, slots)
    return held * WHOLE // slots if held < slots else inf


@dataclass(slots=True)
class Node:
    """A machine and what is left of it."""

    machine: Machine
    slots: tuple[int, ...]
    """Of each GPU."""
    cpu: int
    memory: int
    left: list[int]
    """Thousandths of each GPU."""

    @classmethod
    def empty(cls, machine: Machine, slots: Sequence[int] = ()) -> Node:
        """Return a node on which nothing runs; its GPUs have no slots unless said."""
        slots = tuple(slots) or (ANY,) * machine.gpus
        return cls(machine, slots, machine.cpu, machine.memory, [WHOLE] * machine.gpus)

    def ways(self, pod: Pod) -> Iterator[tuple[int, ...]]:
        """The choices of GPUs for a pod: of several alike, the first."""
        if pod.cpu > self.cpu or pod.memory > self.memory:
            return
        if not pod.gpus:
            yield ()
            return
        fits = [
            at
            for at, (left, slots) in enumerate(zip(self.left, self.slots, strict=True))
            if left >= needed(pod, slots)
        ]
        if pod.gpus > 1:
            if len(fits) >= pod.gpus:
                yield tuple(fits[: pod.gpus])
            return
        seen = set()
        for at in fits:
            if (kind := (self.left[at], self.slots[at])) not in seen:
                seen.add(kind)
                yield (at,)

    def after(self, pod: Pod, gpus: Sequence[int]) -> list[int]:
        """What would be left of the GPUs; ValueError if that is less than nothing."""
        left = list(self.left)
        for at in gpus:
            left[at] -= int(needed(pod, self.slots[at]))
        if min(left) < 0:
            raise ValueError(f"{pod} does not fit on GPUs {gpus} of {self}")
        return left

    def take(self, pod: Pod, gpus: Sequence[int]) -> int:
        """Place a pod; return the thousandths of GPUs that it holds."""
        before = sum(self.left)
        self.left = self.after(pod, gpus)
        self.cpu -= pod.cpu
        self.memory -= pod.memory
        return before - sum(self.left)


class Fragments:
    """How much of a node's free GPUs the next task cannot use, on average."""

    def __init__(self, kinds: Mapping[Pod, float]) -> None:
        groups: dict[tuple[int, int], dict[int, float]] = {}
        for pod, weight in kinds.items():
            if pod.gpus:
                group = groups.setdefault((pod.gpus, pod.part), {})
                group[pod.cpu] = group.get(pod.cpu, 0) + weight
        self._groups = [
            (
                Pod(0, 0, gpus, part),
                sorted(cpus),
                list(accumulate(w for _, w in sorted(cpus.items()))),
            )
            for (gpus, part), cpus in groups.items()
        ]
        self._levels = sorted({cpu for _, cpus, _ in self._groups for cpu in cpus})
        self._needed: dict[int, list[float]] = {}
        self._known: dict[object, float] = {}

    def of(self, cpu: int, left: Sequence[int], slots: Sequence[int]) -> float:
        """Return the fragment in thousandths of a GPU; as in the paper, memory is not looked at."""
        level = bisect_right(self._levels, cpu)
        key = (level, tuple(sorted(zip(slots, left, strict=True))))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._of(cpu, key[1])
        return found

    def _of(self, cpu: int, gpus: Sequence[tuple[int, int]]) -> float:
        usable = 0.0
        for number, (pod, cpus, weights) in enumerate(self._groups):
            if not (level := bisect_right(cpus, cpu)):
                continue
            fits = [left for slots, left in gpus if left >= self._needs(slots)[number]]
            if len(fits) >= pod.gpus:
                usable += weights[level - 1] * sum(fits)
        return sum(left for _, left in gpus) - usable

    def _needs(self, slots: int) -> list[float]:
        if slots not in self._needed:
            self._needed[slots] = [needed(pod, slots) for pod, _, _ in self._groups]
        return self._needed[slots]


Choice = tuple[float, tuple[int, ...]]
"""A penalty (lower is better, infinite if the pod does not fit) and the GPUs that it would get."""
NO_WAY: Choice = (inf, ())
Score = Callable[[Node, Pod], Choice]


def fgd(fragments: Fragments) -> Score:
    """Return the score of FGD: the points that a pod's placement loses by added fragments."""

    def score(node: Node, pod: Pod) -> Choice:
        best = NO_WAY
        for gpus in node.ways(pod):
            after = fragments.of(node.cpu - pod.cpu, node.after(pod, gpus), node.slots)
            added = after - fragments.of(node.cpu, node.left, node.slots)
            best = min(best, (-int(POINTS / (1 + exp(added / WHOLE))), gpus))
        return best

    return score


def best_fit(machines: Sequence[Machine]) -> Score:
    """Return the score of best fit: what stays free of the node, then of the GPU."""
    cpus = max(machine.cpu for machine in machines)
    gpus_most = WHOLE * max(machine.gpus for machine in machines)

    def score(node: Node, pod: Pod) -> Choice:
        best = min(node.ways(pod), key=lambda gpus: [node.left[at] for at in gpus], default=None)
        if best is None:
            return NO_WAY
        free = (node.cpu - pod.cpu) / cpus + sum(node.after(pod, best)) / gpus_most
        return free, best

    return score


def at_random(random: Random) -> Score:
    """Return the score of a random choice: every way is as good."""

    def score(node: Node, pod: Pod) -> Choice:
        ways = list(node.ways(pod))
        return (0.0, random.choice(ways)) if ways else NO_WAY

    return score


class Chooser:
    """Chooses the node of the least score. Remembers the scores of nodes that did not change."""

    def __init__(self, nodes: Sequence[Node], score: Score, random: Random | None = None) -> None:
        self.nodes = nodes
        self._score = score
        self._random = random
        self._known: dict[Pod, tuple[list[float], list[tuple[int, ...]]]] = {}
        self._changed: dict[Pod, set[int]] = {}

    def choose(self, pod: Pod) -> tuple[int, tuple[int, ...]] | None:
        """Return the node's number and its GPUs, or None if the pod fits nowhere.

        Of equal ones it is the first; with ``random``, any.
        """
        if pod not in self._known:
            self._known[pod] = [inf] * len(self.nodes), [()] * len(self.nodes)
            self._changed[pod] = set(range(len(self.nodes)))
        scores, gpus = self._known[pod]
        for number in self._changed[pod]:
            scores[number], gpus[number] = self._score(self.nodes[number], pod)
        self._changed[pod] = set()
        least = min(scores)
        if least == inf:
            return None
        if self._random:
            number = self._random.choice([n for n, score in enumerate(scores) if score == least])
        else:
            number = scores.index(least)
        return number, gpus[number]

    def changed(self, number: int) -> None:
        """Tell that something was placed on this node."""
        for numbers in self._changed.values():
            numbers.add(number)


@dataclass(slots=True)
class Filled:
    """How full the cluster is; all as parts of its GPUs."""

    asked: float = 0.0
    """What the placed pods asked for."""
    held: float = 0.0
    """What they hold: more, if a slot is larger than what was asked for."""


def fill(
    chooser: Chooser,
    pods: Iterator[Pod],
    *,
    arrived: Sequence[float],
    request: Callable[[Pod], Pod] = lambda pod: pod,
    devices: Callable[[int, Pod], tuple[int, ...]] | None = None,
) -> list[Filled]:
    """Place pods until they have asked for so many times the GPUs of all nodes.

    Args:
        chooser: Chooses the node and GPUs.
        pods: They arrive one after another and never leave; one that fits nowhere is lost.
        arrived: Where the state is noted, ascending.
        request: What is asked of the cluster for a pod.
        devices: Chooses the GPUs on the node in the chooser's place.
    """
    capacity = WHOLE * sum(node.machine.gpus for node in chooser.nodes)
    now, came, notes = Filled(), 0.0, []
    for mark in arrived:
        while came < mark:
            pod = next(pods)
            came += pod.asked / capacity
            wanted = request(pod)
            if (choice := chooser.choose(wanted)) is None:
                continue
            number, gpus = choice
            if devices:
                gpus = devices(number, wanted)
            now.held += chooser.nodes[number].take(wanted, gpus) / capacity
            now.asked += pod.asked / capacity
            chooser.changed(number)
        notes.append(Filled(now.asked, now.held))
    return notes
