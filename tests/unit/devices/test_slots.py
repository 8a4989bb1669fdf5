"""Numbers of slots, and shares in words. Pure."""

from __future__ import annotations

from gpuspawner.devices.slots import describe_share
from gpuspawner.engines.injection import framework_hints
from gpuspawner.leases.models import LeasedDevice


def leased(slots: int, held_slots: int) -> LeasedDevice:
    return LeasedDevice(
        uuid="GPU-1",
        slot=0,
        index=0,
        model="NVIDIA A100-SXM4-80GB",
        memory_bytes=80 * 2**30,
        slots=slots,
        held_slots=held_slots,
    )


def test_leased_share_is_described_with_what_it_does_not_protect() -> None:
    assert describe_share(leased(4, 1)) == (
        "1/4 of NVIDIA A100-SXM4-80GB, about 20 GB, shared with up to 3 others, not isolated"
    )
    assert describe_share(leased(2, 1)).endswith(
        "about 40 GB, shared with up to 1 other, not isolated"
    )


def test_whole_device_is_not_described_as_a_share() -> None:
    assert describe_share(leased(1, 1)) == ""
    assert describe_share(leased(4, 4)) == ""


def test_framework_hints_leave_room_in_the_share() -> None:
    assert framework_hints(0.25) == {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.225",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    }
