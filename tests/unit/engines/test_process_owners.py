"""Whose a process and a device are, from what host and engine show of them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.engines.base import ProcessOwners, container_in
from gpuspawner.engines.docker import was_given
from gpuspawner.engines.local import LEASE_VARIABLE
from gpuspawner.leases.models import LeasedDevice
from tests.support.leases import GRANTED, lease_of

ID, INNER = "ab" * 32, "12" * 32
LEASE = lease_of("ada", engine_ref=ID)


@pytest.mark.parametrize(
    ("cgroup", "found"),
    [
        (f"0::/system.slice/docker-{ID}.scope\n", ID),
        (f"0::/docker/{ID}\n", ID),
        (f"12:devices:/docker/{ID}\n11:cpu,cpuacct:/docker/{ID}\n0::/\n", ID),
        (f"0::/docker/{INNER}/docker/{ID}\n", ID),  # the engine runs in a container itself
        (f"0::/docker/{ID}/init.scope\n", ID),
        (f"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope\n", ID),
        *((cgroup, "") for cgroup in ("", "0::/\n", "0::/user.slice/session-1.scope\n")),
        (f"0::/x{ID}ff\n", ""),
    ],
)
def test_container_id_is_found_in_every_cgroup_format(cgroup: str, found: str) -> None:
    assert container_in(cgroup) == found


def test_process_owner_prefers_container_over_variable(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_text(f"0::/docker/{ID}\n")
    (tmp_path / "7" / "environ").write_bytes(f"A=1\0{LEASE_VARIABLE}=lease-2\0".encode())
    other = replace(LEASE, id="lease-2", engine_ref="")
    assert ProcessOwners([LEASE, other], tmp_path).lease_of(7) == LEASE
    assert ProcessOwners([other], tmp_path).lease_of(7) == other
    assert ProcessOwners([], tmp_path).lease_of(7) is None
    assert ProcessOwners([LEASE], tmp_path).lease_of(8) is None


def test_real_process_is_attributed_to_its_lease() -> None:
    lease = replace(LEASE, engine_ref="")
    started = subprocess.Popen(
        [sys.executable, "-c", "print(1, flush=True); input()"],
        env=os.environ | {LEASE_VARIABLE: lease.id},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert started.stdout and started.stdout.readline()
        owners = ProcessOwners([lease])
        assert owners.lease_of(started.pid) == lease
        assert owners.lease_of(os.getpid()) is None
        assert owners.pids() == {lease.id: [started.pid]}
    finally:
        started.kill()
        started.wait()
    assert owners.lease_of(started.pid) is None


# Which containers were given a device.


ON_GPU_A = lease_of("ada", devices=(LeasedDevice("GPU-a", 0, 3, "T4", 1),))


def container(requests: Any, *, runtime: str = "runc", sees: str = "", later: int = 1) -> Any:
    """What the engine says of one that was started ``later`` seconds after the grant."""
    started = GRANTED + timedelta(seconds=later)
    return {
        "HostConfig": {"DeviceRequests": requests, "Runtime": runtime},
        "Config": {"Env": ["PATH=/bin", f"NVIDIA_VISIBLE_DEVICES={sees}"]},
        "State": {"StartedAt": started.isoformat().replace("+00:00", "Z")},
    }


@pytest.mark.parametrize(
    ("given", "is_given"),
    [
        (container([{"DeviceIDs": ["GPU-a"]}]), True),
        (container([{"DeviceIDs": ["GPU-b"]}, {"DeviceIDs": ["3"]}]), True),
        (container([{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=GPU-a"]}]), True),
        (container(None, runtime="nvidia", sees="GPU-b,GPU-a"), True),
        (container(None), False),
        (container([{"DeviceIDs": ["GPU-b", "0"]}]), False),
        (container([{"Count": -1, "DeviceIDs": None}]), False),  # all of them: it only watches
        (container(None, runtime="runc", sees="GPU-a"), False),  # a word that nobody reads
        (container([{"DeviceIDs": ["GPU-a"]}], later=-1), False),  # it was there before the grant
    ],
)
def test_device_access_matches_uuid_index_cdi_or_variable(given: Any, is_given: bool) -> None:
    assert was_given(given, ON_GPU_A) is is_given
