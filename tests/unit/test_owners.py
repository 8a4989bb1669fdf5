"""Whose a process is, from what the host shows of it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpuspawner.engines.base import ProcessOwner, ProcessOwners, container_in, owner_of
from gpuspawner.engines.local import LEASE_VARIABLE
from tests.support.leases import lease_of

ID, INNER = "ab" * 32, "12" * 32
LEASE = lease_of("ada", engine_ref=ID)


@pytest.mark.parametrize(
    "cgroup",
    [
        f"0::/system.slice/docker-{ID}.scope\n",
        f"0::/docker/{ID}\n",
        f"12:devices:/docker/{ID}\n11:cpu,cpuacct:/docker/{ID}\n0::/\n",
        f"0::/docker/{INNER}/docker/{ID}\n",  # the engine runs in a container itself
        f"0::/docker/{ID}/init.scope\n",
        f"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope\n",
    ],
)
def test_a_container_is_found_in_every_way_of_writing_it(cgroup: str) -> None:
    assert container_in(cgroup) == ID


@pytest.mark.parametrize(
    "cgroup", ["", "0::/\n", "0::/user.slice/session-1.scope\n", f"0::/x{ID}ff\n"]
)
def test_outside_of_any_container(cgroup: str) -> None:
    assert container_in(cgroup) == ""


def test_a_process_is_its_containers_whatever_it_says_itself(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_text(f"0::/docker/{ID}\n")
    (tmp_path / "7" / "environ").write_bytes(f"A=1\0{LEASE_VARIABLE}=lease-2\0".encode())
    other = replace(LEASE, id="lease-2", engine_ref="")
    assert owner_of(7, tmp_path) == ProcessOwner(ID, "lease-2")
    assert ProcessOwners([LEASE, other], tmp_path).lease_of(7) == LEASE
    assert ProcessOwners([other], tmp_path).lease_of(7) == other
    assert ProcessOwners([], tmp_path).lease_of(7) is None
    assert ProcessOwners([LEASE], tmp_path).lease_of(8) is None


def test_real_processes_of_a_lease() -> None:
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
    assert owner_of(started.pid) is None
