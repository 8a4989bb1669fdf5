"""How large a part of its GPU a MIG instance is. Pure."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from ..core.units import DeviceCount
from .models import model_words

MEMORY_SLICES = 8
"""The parts into which the memory of a GPU is counted; instances have 1, 2, 4 or 8 of them."""

GIB = 2**30

_PROFILE = re.compile(
    r"\bMIG (?:(?P<compute>\d+)c\.)?(?P<slices>\d+)g\.(?P<memory>\d+)gb", re.IGNORECASE
)
_PROFILE_WORD = re.compile(r"mig|\d+g")


class InstanceSize(NamedTuple):
    """The size of a MIG instance, as NVML or its name tells it."""

    slices: int
    """Compute slices of its GPU instance."""
    compute_slices: int
    """How many of these are its own: fewer if several compute instances share the GPU instance."""
    memory_bytes: int
    """Memory of its GPU instance; 0 if unknown."""


def size_in_name(model: str) -> InstanceSize | None:
    """Return the size that a model such as ``NVIDIA A100-SXM4-40GB MIG 1g.5gb`` has in its name.

    None if it has none. ``1c.3g.20gb`` is one slice of an instance that has three.
    """
    found = _PROFILE.search(model)
    if found is None:
        return None
    slices, memory = int(found["slices"]), int(found["memory"]) * GIB
    return InstanceSize(slices, int(found["compute"] or slices), memory)


def part_of_gpu(size: InstanceSize, gpu_slices: int, gpu_memory_bytes: int) -> DeviceCount:
    """Return how much of its GPU an instance is, at most 1.

    That is the larger of its parts of the compute slices and of the memory, because it takes both
    away from others: three of seven slices with half of the memory are one half. Compute instances
    that share a GPU instance divide its part by their slices.

    Args:
        size: The instance's size.
        gpu_slices: Compute slices of the GPU, such as 7; 0 if unknown.
        gpu_memory_bytes: Memory of the GPU; 0 if unknown.
    """
    parts = []
    if size.slices and gpu_slices:
        parts.append(Fraction(size.slices, gpu_slices))
    if size.memory_bytes and gpu_memory_bytes:
        # In slices, since an instance has a little less than its part of the bytes.
        slices = round(MEMORY_SLICES * Fraction(size.memory_bytes, gpu_memory_bytes))
        parts.append(Fraction(slices, MEMORY_SLICES))
    part = max(parts, default=Fraction(1)) or Fraction(1)
    if 0 < size.compute_slices < size.slices:
        part *= Fraction(size.compute_slices, size.slices)
    return part if part < 1 else 1


def names_instances(pattern: str) -> bool:
    """Return True if a model pattern is only for MIG instances: ``MIG``, ``A100 1g.5gb``."""
    return any(map(_PROFILE_WORD.fullmatch, model_words(pattern)))
