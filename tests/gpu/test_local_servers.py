"""Real: a hub, its local processes as servers, and the GPUs of this machine. Only the proxy keeps
its routes and forwards nothing: the tests talk to hub and servers themselves.

Last passed on an NVIDIA H200, driver 580.159.04, CUDA 13.0, on 2026-11-27 at 26eb697d.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import datetime, timezone

import pytest

from gpuspawner.devices.discovery import open_source
from tests.support.cuda import Program
from tests.support.hub import DirectHub
from tests.support.placements import free_slots
from tests.support.processes import REPO, wait_for

pytestmark = pytest.mark.gpu

CATALOG = """
environments:
  - {slug: gpu, display_name: With a GPU, image: none, devices: {default: 1, max: 8}, default: true}
  - {slug: cpu, display_name: Without a GPU, image: none, devices: {max: 0}}
"""

CONFIG = """
c.JupyterHub.proxy_class = "tests.support.memory_proxy.MemoryProxy"
c.JupyterHub.spawner_class = "gpuspawner.spawners.local.GPULocalSpawner"
c.Spawner.cmd = {cmd!r}
c.Spawner.env_keep.append("LD_LIBRARY_PATH")  # where the driver's libraries may be
c.GPUDatabase.url = "sqlite:///gpuspawner.sqlite"
c.GPUDevices.source = "nvml"
c.GPUDevices.refresh_seconds = 0.5
c.GPULocalSpawner.catalog = {catalog!r}
c.GPUCredits.opening_grant = 100_000
"""


def free_uuids() -> list[str]:
    inventory = open_source("nvml").observe(datetime.now(timezone.utc))
    return [slot.uuid for slot in free_slots(inventory.devices)]


@pytest.fixture(scope="module")
def hub(hubs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DirectHub]:
    folder = tmp_path_factory.mktemp("hub")
    (folder / "catalog.yaml").write_text(CATALOG, encoding="utf-8")
    cmd = [sys.executable, str(REPO / "tests/support/gpu_server.py")]
    config = CONFIG.format(cmd=cmd, catalog=str(folder / "catalog.yaml"))
    with DirectHub(folder / "hub", config) as hub:
        yield hub


def test_server_with_a_lease_sees_exactly_its_device(hub: DirectHub) -> None:
    free = wait_for(free_uuids, "a free GPU")
    hub.spawn_and_wait("member1", {"environment": "gpu", "gpus": 1})
    seen = hub.ask_server("member1", "devices").json()
    assert len(seen) == 1 and seen[0] in free
    hub.stop_server("member1")


def test_server_without_a_lease_sees_no_device(hub: DirectHub) -> None:
    hub.spawn_and_wait("member2", {"environment": "cpu"})
    assert hub.ask_server("member2", "devices").json() == []
    hub.stop_server("member2")


def test_start_waits_for_a_gpu_that_programs_of_nobody_use(hub: DirectHub) -> None:
    programs = []
    try:
        for uuid in wait_for(free_uuids, "a free GPU"):
            programs.append(Program({"CUDA_VISIBLE_DEVICES": uuid}))
            programs[-1].tell("open")
        answer = hub.spawn("member3", {"environment": "gpu", "gpus": 1})
        assert answer.status_code == 202, answer.text
        told = next(e for e in hub.events("member3") if "Waiting for a GPU" in e.get("message", ""))
        assert "none is free" in told["message"]
    finally:
        for program in programs:
            program.end()
    hub.wait_server("member3")
    assert len(hub.ask_server("member3", "devices").json()) == 1
    hub.stop_server("member3")
