"""What part of its GPU a MIG instance is. Real: pure values."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.core.units import DeviceCount
from gpuspawner.devices.mig_profiles import (
    InstanceSize,
    names_instances,
    part_of_gpu,
    size_in_name,
)
from tests.support.nvml.nvml_library import A100_40GB, GIB, H100_80GB, Profile

HALF, QUARTER = Fraction(1, 2), Fraction(1, 4)

DIVIDED = {
    ("NVIDIA A100-SXM4-40GB", 7, 40.0): {
        "1g.5gb": (4.75, Fraction(1, 7)),
        "1g.5gb+me": (4.75, Fraction(1, 7)),
        "1g.10gb": (9.75, QUARTER),
        "2g.10gb": (9.75, Fraction(2, 7)),
        "3g.20gb": (19.62, HALF),
        "4g.20gb": (19.62, Fraction(4, 7)),
        "7g.40gb": (39.25, 1),
    },
    ("NVIDIA H100 80GB HBM3", 7, 79.6): {
        "1g.10gb": (9.62, Fraction(1, 7)),
        "1g.20gb": (19.5, QUARTER),
        "3g.40gb": (39.5, HALF),
        "7g.80gb": (79.0, 1),
    },
    ("NVIDIA H200", 7, 140.4): {
        "1g.18gb": (16.0, Fraction(1, 7)),
        "1g.35gb": (32.5, QUARTER),
        "3g.71gb": (69.5, HALF),
        "7g.141gb": (140.0, 1),
    },
    ("NVIDIA A30", 4, 24.0): {
        "1g.6gb": (5.81, QUARTER),
        "2g.12gb": (11.69, HALF),
        "4g.24gb": (23.44, 1),
    },
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 4, 95.6): {
        "1g.24gb": (23.62, QUARTER),
        "2g.48gb": (47.38, HALF),
        "4g.96gb": (95.0, 1),
    },
}
"""By model, compute slices and GiB: the GiB of an instance, and its part."""


@pytest.mark.parametrize("gpu", DIVIDED)
def test_part_is_the_larger_of_compute_and_memory(gpu: tuple[str, int, float]) -> None:
    model, slices, memory = gpu
    for profile, (gib, part) in DIVIDED[gpu].items():
        size = InstanceSize(int(profile[0]), int(profile[0]), int(gib * GIB))
        assert part_of_gpu(size, slices, int(memory * GIB)) == part, profile
        by_name = size_in_name(f"{model} MIG {profile}")
        assert by_name is not None
        read = by_name._replace(memory_bytes=int(gib * GIB))
        assert part_of_gpu(read, slices, int(memory * GIB)) == part, profile
        assert part_of_gpu(by_name, slices, int(memory * GIB)) == part, "without its memory"


def test_compute_instances_share_the_part_of_their_gpu_instance() -> None:
    size = size_in_name("NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb")
    assert size == InstanceSize(3, 1, 20 * GIB)
    assert part_of_gpu(size, 7, 40 * GIB) == Fraction(1, 6)
    assert size_in_name("NVIDIA A100-SXM4-40GB") is None


def test_what_is_unknown_makes_no_instance_cheaper() -> None:
    assert part_of_gpu(InstanceSize(3, 3, 20 * GIB), 0, 40 * GIB) == HALF
    assert part_of_gpu(InstanceSize(3, 3, 0), 7, 40 * GIB) == Fraction(3, 7)
    assert part_of_gpu(InstanceSize(3, 3, 0), 7, 0) == Fraction(3, 7)
    assert part_of_gpu(InstanceSize(0, 0, 0), 0, 0) == 1
    assert part_of_gpu(InstanceSize(9, 9, 80 * GIB), 7, 40 * GIB) == 1


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        *((text, True) for text in ("1g.5gb", "A100 MIG 1g.5gb", "MIG", "a100 mig", "MIG 3g")),
        *((text, False) for text in ("*", "A100", "A100-80GB", "NVIDIA H100 80GB HBM3", "T4")),
    ],
)
def test_rate_names_instances_by_mig_or_a_profile(pattern: str, names: bool) -> None:
    assert names_instances(pattern) == names


Placed = list[tuple[Profile, int]]


def fits(placed: Placed, profile: Profile, start: int) -> bool:
    apart = all(start >= at + p.size or start + profile.size <= at for p, at in placed)
    same = sum(p.id == profile.id for p, _ in placed)
    slices = profile.slices + sum(p.slices for p, _ in placed)
    return apart and same < profile.most and slices <= 7


def filled(profiles: Sequence[Profile], order: Sequence[tuple[Profile, int]]) -> Placed:
    """A layout to which no instance can be added."""
    placed: Placed = []
    for profile, start in order:
        if fits(placed, profile, start):
            placed.append((profile, start))
    return placed


@given(st.data(), st.sampled_from([(A100_40GB, 40), (H100_80GB, 80)]))
def test_full_layout_is_at_least_the_whole_gpu(
    data: st.DataObject, gpu: tuple[tuple[Profile, ...], int]
) -> None:
    profiles, memory = gpu
    every = [(profile, start) for profile in profiles for start in profile.starts]
    placed = filled(profiles, data.draw(st.permutations(every)))
    parts: list[DeviceCount] = [
        part_of_gpu(InstanceSize(p.slices, p.slices, p.megabytes * 2**20), 7, memory * GIB)
        for p, _ in placed
    ]
    compute, size = sum(p.slices for p, _ in placed), sum(p.size for p, _ in placed)
    if compute == 7 or size == 8:
        assert sum(parts) >= 1
    # Nobody pays for a slice that no instance can have any more, as after 3g, 2g and 1g.
    assert sum(parts) >= Fraction(25, 28)
