"""How close the GPUs of one machine are, from what NVML says about PCIe and NVLink. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import combinations

from .base import NODE, PHB, PIX, PXB, SAME_BOARD, SYS, nvlinks, pair

PCIE_STEPS: Mapping[int | None, int] = {
    0: SAME_BOARD,
    10: PIX,
    20: PXB,
    30: PHB,
    40: NODE,
    50: SYS,
}
"""The closeness that NVML's nearest common ancestor (``nvmlGpuTopologyLevel_t``) stands for."""

SWITCH = "nvswitch"
"""The other end of an NVLink that goes to an NVSwitch, where every GPU meets every other."""


def closeness(
    pcie: Mapping[tuple[str, str], int], ends: Mapping[str, Counter[str]]
) -> dict[tuple[str, str], int]:
    """Links on the scale of :mod:`.base`; pairs that would be 0 are left out.

    ``pcie`` is the PCIe step of each pair, keyed as by :func:`.base.pair`. ``ends`` counts, for
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
