"""Which containers were given a device of a lease. Real: everything, it is pure."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from gpuspawner.engines.docker import was_given
from gpuspawner.leases.models import LeasedDevice
from tests.support.leases import GRANTED, lease_of

LEASE = lease_of("ada", devices=(LeasedDevice("GPU-a", 0, 3, "T4", 1),))


def container(requests: Any, *, runtime: str = "runc", sees: str = "", later: int = 1) -> Any:
    """What the engine says of one that was started ``later`` seconds after the grant."""
    started = GRANTED + timedelta(seconds=later)
    return {
        "HostConfig": {"DeviceRequests": requests, "Runtime": runtime},
        "Config": {"Env": ["PATH=/bin", f"NVIDIA_VISIBLE_DEVICES={sees}"]},
        "State": {"StartedAt": started.isoformat().replace("+00:00", "Z")},
    }


@pytest.mark.parametrize(
    "given",
    [
        container([{"DeviceIDs": ["GPU-a"]}]),
        container([{"DeviceIDs": ["GPU-b"]}, {"DeviceIDs": ["3"]}]),
        container([{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=GPU-a"]}]),
        container(None, runtime="nvidia", sees="GPU-b,GPU-a"),
    ],
)
def test_a_device_is_given_by_uuid_index_cdi_name_or_variable(given: Any) -> None:
    assert was_given(given, LEASE)


@pytest.mark.parametrize(
    "given",
    [
        container(None),
        container([{"DeviceIDs": ["GPU-b", "0"]}]),
        container([{"Count": -1, "DeviceIDs": None}]),  # all of them: it only watches
        container(None, runtime="runc", sees="GPU-a"),  # a word that nobody reads
        container([{"DeviceIDs": ["GPU-a"]}], later=-1),  # it was there before the grant
    ],
)
def test_other_containers_were_not_given_it(given: Any) -> None:
    assert not was_given(given, LEASE)
