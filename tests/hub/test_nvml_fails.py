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
from tests.support.gpu_hub import GPUHub, message_of, text_of
from tests.support.nvml import nvml_library as nvml
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
def module_hub(
    hubs: None, engine: PrivateEngine, images: Any, fleet: Path, folder: Path
) -> Iterator[GPUHub]:
    library = nvml.build_nvml_library(folder / "nvml")
    environment = nvml.environment(library, fleet)
    hub = GPUHub(folder / "hub", engine, CONFIG, environment=environment)
    hub.devices = [gpu.uuid for gpu in FLEET]
    with hub:
        yield hub
    engine.clean()


@pytest.fixture
def hub(module_hub: GPUHub, fleet: Path) -> Iterator[GPUHub]:
    """A hub on a machine with two GPUs, as far as it can tell; nobody has one before a test."""
    hub = module_hub
    wait_for(lambda: "2 of 2 GPUs free" in form_text(hub, "reader"), "both GPUs")
    yield hub
    nvml.write_fleet(fleet, FLEET)
    for lease in hub.open_leases():
        hub.stop_server(lease.server.user)


def form_text(hub: GPUHub, member: str) -> str:
    page = hub.open_page(member, "/hub/spawn")
    assert page.ok
    return text_of(page.text)


def test_lost_device_is_granted_only_after_recovery(hub: GPUHub, fleet: Path) -> None:
    assert "2 of 2 GPUs free" in form_text(hub, "member1")
    hub.spawn_and_wait("member1", {"gpus": 1})
    assert "GPUs get into containers by device_requests" in hub.log_text()
    [lease] = hub.open_leases()
    assert hub.environment_of("member1")["NVIDIA_VISIBLE_DEVICES"] == lease.uuids[0]
    assert len(hub.device_nodes("member1")) == 1
    # The GPU that nobody has falls off the bus.
    free = next(gpu for gpu in FLEET if gpu.uuid not in lease.uuids)
    sick = [
        replace(gpu, fails={"nvmlDeviceGetMemoryInfo": nvml.GPU_IS_LOST}) if gpu == free else gpu
        for gpu in FLEET
    ]
    nvml.write_fleet(fleet, sick)
    wait_for(lambda: "0 of 1 GPU free" in form_text(hub, "member2"), "the form to say so")
    number = FLEET.index(free)
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
    assert hub.open_leases("member3")[0].uuids == (free.uuid,)


def test_lost_device_is_not_reused_after_its_session(hub: GPUHub, fleet: Path) -> None:
    """The lease goes on, and its device is nobody else's, also after it ended."""
    hub.spawn_and_wait("member4", {"gpus": 1})
    [lease] = hub.open_leases()
    nvml.write_fleet(
        fleet,
        [
            replace(gpu, fails={"nvmlDeviceGetMemoryInfo": nvml.GPU_IS_LOST})
            if gpu.uuid in lease.uuids
            else gpu
            for gpu in FLEET
        ],
    )
    wait_for(lambda: "1 GPU is not responding" in form_text(hub, "member5"), "the form to say so")
    [still] = hub.open_leases()
    assert still.id == lease.id and still.state is LeaseState.RUNNING
    assert hub.get("member4", "env").ok
    hub.stop_server("member4")
    assert not hub.taken()
    hub.spawn_and_wait("member4", {"gpus": 1})
    assert hub.open_leases("member4")[0].uuids != lease.uuids
    assert hub.spawn("member5", {"gpus": 1, "wait": "no"}).status_code == 409


def test_nvml_loss_pauses_grants_but_not_sessions(hub: GPUHub, fleet: Path) -> None:
    """As after a driver update: the library no longer fits the driver."""
    hub.spawn_and_wait("member6", {"gpus": 1})
    [lease] = hub.open_leases()
    nvml.write_fleet(fleet, FLEET, fails={"nvmlDeviceGetCount_v2": nvml.DRIVER_NOT_LOADED})
    lost = "GPU status is unavailable, so no GPU session can start"
    wait_for(lambda: lost in form_text(hub, "member7"), "the form to say so")
    refused = hub.spawn("member7", {"gpus": 1, "wait": "no"})
    assert refused.status_code == 409 and "not responding" in message_of(refused)
    assert [open_lease.id for open_lease in hub.open_leases()] == [lease.id]
    assert hub.get("member6", "env").ok
    # Without a GPU it starts, and sees none.
    hub.spawn_and_wait("member7", {"environment": "cpu"})
    assert hub.environment_of("member7")["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert hub.device_nodes("member7") == []
    # A server can still be stopped, and is settled.
    hub.stop_server("member6")
    assert not hub.open_leases("member6")
    nvml.write_fleet(fleet, FLEET)
    wait_for(lambda: "2 of 2 GPUs free" in form_text(hub, "member8"), "the form to say so")
    hub.spawn_and_wait("member6", {"gpus": 2})
    assert len(hub.device_nodes("member6")) == 2
