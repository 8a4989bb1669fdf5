"""NVML that fails. Real: hub, Docker Engine, pynvml; stand-ins: NVML's library, NVIDIA's hook.

The hub loads the stand-in through its own pynvml, finds by itself how GPUs get into
containers, and proves it with containers of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.leases.models import LeaseState
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import GPUHub, message_of
from tests.support.nvml import nvml_library as nvml
from tests.support.page_text import text_of
from tests.support.processes import wait_for

CONFIG = """
c.GPUDevices.source = "auto"
c.GPUDevices.refresh_seconds = 0.2
c.GPUDockerSpawner.gpu_injection = "auto"
c.Spawner.poll_interval = 1
"""

FLEET = nvml.gpus(2)


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Path:
    """The file that says what NVML shows now."""
    path = folder / "fleet"
    nvml.write_fleet(path, FLEET)
    return path


@pytest.fixture(scope="module")
def hub(
    hubs: None, engine: PrivateEngine, images: Any, fleet: Path, folder: Path
) -> Iterator[GPUHub]:
    """A hub on a machine with two GPUs, as far as it can tell."""
    library = nvml.build_nvml_library(folder / "nvml")
    environment = nvml.environment(library, fleet)
    hub = GPUHub(folder / "hub", engine, CONFIG, environment=environment)
    hub.devices = [gpu.uuid for gpu in FLEET]
    with hub:
        yield hub
    engine.clean()


def lose(fleet: Path, uuid: str) -> None:
    """Let one GPU fall off the bus."""
    fails = {"nvmlDeviceGetMemoryInfo": nvml.GPU_IS_LOST}
    nvml.write_fleet(fleet, [replace(g, fails=fails) if g.uuid == uuid else g for g in FLEET])


def form_text(hub: GPUHub, member: str) -> str:
    page = hub.open_page(member, "/hub/spawn")
    assert page.ok
    return text_of(page.text)


def wait_form(hub: GPUHub, member: str, text: str) -> None:
    wait_for(lambda: text in form_text(hub, member), f"the form to say: {text}")


def test_nothing_lost_is_granted_and_sessions_go_on(hub: GPUHub, fleet: Path) -> None:
    wait_form(hub, "member1", "2 of 2 GPUs free")
    hub.spawn_and_wait("member1", {"gpus": 1})
    assert "GPUs get into containers by device_requests" in hub.log_text()
    [lease] = hub.open_leases()
    assert hub.environment_of("member1")["NVIDIA_VISIBLE_DEVICES"] == lease.uuids[0]
    assert len(hub.device_nodes("member1")) == 1

    # The GPU that nobody has falls off the bus.
    number, free = next((n, g.uuid) for n, g in enumerate(FLEET) if g.uuid not in lease.uuids)
    lose(fleet, free)
    wait_form(hub, "member2", "0 of 1 GPU free")
    said = f"1 GPU is not responding and is out of service: GPU {number} (NVIDIA A100-SXM4-80GB)."
    assert said in form_text(hub, "member2")
    refused = hub.spawn("member2", {"gpus": 1, "wait": "no"})
    assert refused.status_code == 409
    assert message_of(refused).startswith(
        "No GPU is free: of 2, 1 is in use and 1 is not responding"
    )
    assert not hub.leases("member2")
    # Who waits gets it as soon as it is back, and not before.
    assert hub.spawn("member3", {"gpus": 1}).status_code == 202
    assert not hub.leases("member3")
    nvml.write_fleet(fleet, FLEET)
    hub.wait_server("member3")
    assert hub.open_leases("member3")[0].uuids == (free,)

    # One that somebody has: their lease goes on, and nobody gets it after that.
    lose(fleet, lease.uuids[0])
    wait_form(hub, "member2", "1 GPU is not responding")
    [still] = hub.open_leases("member1")
    assert still.id == lease.id and still.state is LeaseState.RUNNING
    assert hub.get("member1", "env").ok
    hub.stop_server("member1")
    assert {slot.uuid for slot in hub.taken()} == {free}
    assert hub.spawn("member1", {"gpus": 1, "wait": "no"}).status_code == 409

    # All of NVML is lost, as after a driver update: the library no longer fits the driver.
    [lease] = hub.open_leases("member3")
    nvml.write_fleet(fleet, FLEET, fails={"nvmlDeviceGetCount_v2": nvml.DRIVER_NOT_LOADED})
    wait_form(hub, "member4", "GPU status is unavailable, so no GPU session can start")
    refused = hub.spawn("member4", {"gpus": 1, "wait": "no"})
    assert refused.status_code == 409 and "not responding" in message_of(refused)
    assert [open_lease.id for open_lease in hub.open_leases()] == [lease.id]
    assert hub.get("member3", "env").ok
    # Without a GPU it starts, and sees none.
    hub.spawn_and_wait("member4", {"environment": "cpu"})
    assert hub.environment_of("member4")["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert hub.device_nodes("member4") == []
    # A server can still be stopped, and is settled.
    hub.stop_server("member3")
    assert not hub.open_leases("member3")
    nvml.write_fleet(fleet, FLEET)
    wait_form(hub, "member5", "2 of 2 GPUs free")
    hub.spawn_and_wait("member3", {"gpus": 2})
    assert len(hub.device_nodes("member3")) == 2
