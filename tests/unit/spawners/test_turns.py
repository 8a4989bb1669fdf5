"""What a member reads when a start got its devices. Pure."""

from __future__ import annotations

from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import LeasedDevice
from gpuspawner.spawners.turns import what_you_got
from tests.support.leases import lease_of


def test_start_with_a_share_says_that_it_is_not_isolated() -> None:
    device = LeasedDevice("GPU-1", 2, 3, "T4", 16 * 2**30, slots=4, held_slots=1)
    assert what_you_got(lease_of("ada", devices=(device,), rate=MICRO)) == (
        "A share of GPU 3 (1/4 of T4, about 4 GB, shared with up to 3 others, not isolated) is "
        "yours, 1.00 credits an hour"
    )


def test_start_with_whole_devices_names_them() -> None:
    devices = tuple(LeasedDevice(f"GPU-{n}", 0, n, "T4", 16 * 2**30) for n in range(2))
    assert what_you_got(lease_of("ada", devices=devices)) == (
        "GPU 0 (T4), GPU 1 (T4) is yours, 0.00 credits an hour"
    )
    assert what_you_got(lease_of("ada")) == "A server without a GPU (free of charge)"
