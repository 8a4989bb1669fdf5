"""The closeness of GPUs within a machine. Pure.

Up to :data:`EXACT_UP_TO` candidates the best set is found; beyond, a good one by growing from
the best linked devices and swapping, in time that hardly depends on the number of candidates.

The scale, used in :attr:`gpuspawner.devices.models.Inventory.links`: whole numbers, greater is
closer.

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

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

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
    """The key of two UUIDs in :attr:`gpuspawner.devices.models.Inventory.links`."""
    return (one, other) if one <= other else (other, one)


PCIE_STEPS: Mapping[int | None, int] = {
    0: SAME_BOARD,
    10: PIX,
    20: PXB,
    30: PHB,
    40: NODE,
    50: SYS,
}
"""The closeness of each of NVML's nearest common ancestors (``nvmlGpuTopologyLevel_t``)."""

SWITCH = "nvswitch"
"""The other end of an NVLink to an NVSwitch, which connects every GPU with every other."""


def closeness(
    pcie: Mapping[tuple[str, str], int], ends: Mapping[str, Counter[str]]
) -> dict[tuple[str, str], int]:
    """Links on the scale above; pairs that would be 0 are left out.

    ``pcie`` is the PCIe step of each pair, keyed as by :func:`pair`. ``ends`` counts, for
    each GPU, what its active NVLinks lead to: the UUID of another GPU, or :data:`SWITCH`.
    """
    links = {}
    none: Counter[str] = Counter()
    uuids = {uuid for key in pcie for uuid in key} | set(ends)
    for one, other in combinations(sorted(uuids), 2):
        from_one, from_other = ends.get(one, none), ends.get(other, none)
        # A link is seen from both sides; one side may have failed to answer.
        direct = max(from_one[other], from_other[one])
        switched = min(from_one[SWITCH], from_other[SWITCH])
        step = nvlinks(direct + switched) or pcie.get(pair(one, other), 0)
        if step:
            links[pair(one, other)] = step
    return links


Links = Mapping[tuple[str, str], int]
"""Closeness by UUIDs in sorted order; see :attr:`gpuspawner.devices.models.Inventory.links`."""

EXACT_UP_TO = 16
_SEEDS = 8
_SWAPS = 32


@dataclass(frozen=True, order=True)
class ConnectedSet:
    """A set of candidates and its closeness: greater is better."""

    total: int
    """Sum of the closeness of its pairs."""
    least: int
    """Closeness of its worst pair."""
    members: tuple[int, ...] = field(compare=False)
    """Positions among the candidates, ascending."""


def best_connected(candidates: Sequence[str], count: int, links: Links) -> ConnectedSet:
    """Return the ``count`` closest of the candidates (at least ``count``, and at least 2).

    Greatest sum over the pairs, then greatest worst pair, then the earliest candidates.
    """
    near = _neighbours(candidates, links)
    good = _greedy(near, count)
    return _exact(near, count, good) if len(near) <= EXACT_UP_TO else good


@dataclass(frozen=True, slots=True)
class LinkedDevices:
    """The devices that one device is linked to."""

    closeness: Mapping[str, int]
    worth: int
    """Sum of all its closeness values."""
    group: int | None
    """Devices connected by links, directly or through others, have the same number."""

    def worth_among(self, free: Collection[str]) -> int:
        """Return the sum of its closeness to free devices: what they lose when it is taken."""
        return sum(value for other, value in self.closeness.items() if other in free)


ALONE = LinkedDevices({}, 0, None)
"""The value for a device without links."""


def neighbours(links: Links) -> dict[str, LinkedDevices]:
    """Return each linked device's links."""
    found: dict[str, dict[str, int]] = {}
    for (one, other), closeness in links.items():
        found.setdefault(one, {})[other] = closeness
        found.setdefault(other, {})[one] = closeness
    group: dict[str, int] = {}
    for number, uuid in enumerate(found):
        reached = [] if uuid in group else [uuid]
        while reached:
            member = reached.pop()
            if member not in group:
                group[member] = number
                reached += found[member]
    return {
        uuid: LinkedDevices(near, sum(near.values()), group[uuid]) for uuid, near in found.items()
    }


Neighbours = list[dict[int, int]]
"""For each candidate, its closeness to every other one that it is linked to."""


def _neighbours(candidates: Sequence[str], links: Links) -> Neighbours:
    position = {uuid: number for number, uuid in enumerate(candidates)}
    near: Neighbours = [{} for _ in candidates]
    for (uuid, other_uuid), closeness in links.items():
        one, other = position.get(uuid), position.get(other_uuid)
        if one is not None and other is not None and closeness > 0:
            near[one][other] = near[other][one] = closeness
    return near


def _measure(near: Neighbours, members: Collection[int]) -> ConnectedSet:
    ordered = tuple(sorted(members))
    scores = [
        near[one].get(other, 0)
        for at, one in enumerate(ordered)
        for other in ordered[at + 1 :]
    ]  # fmt: skip
    return ConnectedSet(sum(scores), min(scores), ordered)


# Many candidates: grow, then swap.


def _greedy(near: Neighbours, count: int) -> ConnectedSet:
    strength = [sum(heapq.nlargest(count - 1, links.values())) for links in near]
    strongest = sorted(range(len(near)), key=lambda number: -strength[number])
    best: ConnectedSet | None = None
    for seed in strongest[:_SEEDS]:
        found = _measure(near, _swap(near, _grow(near, seed, count, strongest)))
        if best is None or found > best:
            best = found
    assert best is not None, "there are at least two candidates"
    return best


def _grow(near: Neighbours, seed: int, count: int, strongest: list[int]) -> set[int]:
    """Add the candidate closest to the set so far, or the strongest one if none is close."""
    members = {seed}
    gain = dict(near[seed])
    spare = iter(strongest)
    while len(members) < count:
        if gain:
            added = max(gain, key=lambda number: (gain[number], -number))
            del gain[added]
        else:
            added = next(number for number in spare if number not in members)
        members.add(added)
        for number, closeness in near[added].items():
            if number not in members:
                gain[number] = gain.get(number, 0) + closeness
    return members


def _swap(near: Neighbours, members: set[int]) -> set[int]:
    """Swap a member for an outsider while that makes the set closer."""
    for _ in range(_SWAPS):
        inside = {
            number: sum(c for other, c in near[number].items() if other in members)
            for number in members
        }
        outside: dict[int, int] = {}
        for number in members:
            for other, closeness in near[number].items():
                if other not in members:
                    outside[other] = outside.get(other, 0) + closeness
        leavers = heapq.nsmallest(_SEEDS, inside, key=lambda number: (inside[number], -number))
        comers = heapq.nlargest(_SEEDS, outside, key=lambda number: (outside[number], -number))
        gains = [
            (outside[comer] - near[comer].get(leaver, 0) - inside[leaver], -comer, -leaver)
            for comer in comers
            for leaver in leavers
        ]
        gained, comer, leaver = max(gains, default=(0, 0, 0))
        if gained <= 0:
            break
        members = (members - {-leaver}) | {-comer}
    return members


# Few candidates: all sets, except those that cannot beat the best one so far.


def _exact(near: Neighbours, count: int, good: ConnectedSet) -> ConnectedSet:
    """Return the best set, the earliest of equals. ``good`` is one that it must equal or beat."""
    size = len(near)
    row = [[links.get(other, 0) for other in range(size)] for links in near]
    reach = [_reach(scores, count) for scores in row]
    best = ConnectedSet(good.total, good.least - 1, good.members)

    def extend(members: tuple[int, ...], total: int, least: int, gain: list[int]) -> None:
        """Try all additions; ``gain`` is each candidate's summed closeness to the members."""
        nonlocal best
        missing = count - len(members)
        if not missing:
            best = max(best, ConnectedSet(total, least, members))
            return
        first = members[-1] + 1 if members else 0
        # Each addition is worth at most its links to the members and half of its best links to the
        # other additions (a link between two of them is counted at both ends).
        worth = sorted(
            (2 * gain[number] + reach[number][missing - 1] for number in range(first, size)),
            reverse=True,
        )
        bound = total + sum(worth[:missing]) // 2
        if (bound, least) <= (best.total, best.least):
            return
        for number in range(first, size - missing + 1):
            scores = row[number]
            extend(
                (*members, number),
                total + gain[number],
                min([least, *(scores[member] for member in members)]),
                [old + new for old, new in zip(gain, scores, strict=True)],
            )

    extend((), 0, max(map(max, row)), [0] * size)
    return best


def _reach(scores: list[int], count: int) -> list[int]:
    """Return the sums of the 0, 1, ..., ``count`` greatest scores."""
    sums = [0]
    for score in sorted(scores, reverse=True)[:count]:
        sums.append(sums[-1] + score)
    return sums
