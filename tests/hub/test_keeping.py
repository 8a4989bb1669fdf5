"""``remove = False`` on a real hub and a real Docker Engine: a container's own files stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.devices.source import open_source
from gpuspawner.services import utcnow
from gpuspawner.spawners import docker_commit
from tests.support.engine import PrivateEngine
from tests.support.hub import HubProcess

FLEET = "simulated:2xA100-80GB"
CONFIG = """
c.JupyterHub.spawner_class = "gpu-docker"
c.GPUDatabase.url = "sqlite:///{folder}/gpuspawner.sqlite"
c.GPUDevices.source = "{fleet}"
c.GPUDockerSpawner.gpu_injection = "device_requests"
c.DockerSpawner.image = "{image}"
c.DockerSpawner.use_internal_ip = True
{more}
"""


@pytest.fixture
def start(
    clean_engine: PrivateEngine, images: Any, hub_factory: Callable[..., HubProcess], tmp_path: Path
) -> Callable[..., HubProcess]:
    uuids = [device.uuid for device in open_source(FLEET).observe(utcnow()).devices]
    clean_engine.set_devices(uuids)

    def start(more: str = "") -> HubProcess:
        config = CONFIG.format(folder=tmp_path, fleet=FLEET, image=images.INSTANT, more=more)
        return hub_factory(
            config, hub_ip=clean_engine.gateway, environment={"DOCKER_HOST": clean_engine.url}
        )

    return start


def shell(engine: PrivateEngine, command: str) -> str:
    """Run a command as root in member1's container."""
    made = engine.client.exec_create("jupyter-member1", ["sh", "-c", command])
    return str(engine.client.exec_start(made["Id"]).decode())


def run_once(hub: HubProcess, gpus: int) -> None:
    assert hub.spawn("member1", {"gpus": gpus}).ok
    hub.wait_server("member1")


def test_files_of_the_container_itself_are_there_next_time(
    start: Callable[..., HubProcess], clean_engine: PrivateEngine
) -> None:
    hub = start()
    run_once(hub, 1)
    shell(clean_engine, "echo mine > /notes.txt")
    first = clean_engine.client.inspect_container("jupyter-member1")
    hub.stop_server("member1")
    waiting = clean_engine.client.inspect_container("jupyter-member1")
    assert waiting["State"]["Status"] == "created"
    assert not waiting["HostConfig"]["DeviceRequests"], "it waits with a GPU that it may not have"
    variables = dict(item.split("=", 1) for item in waiting["Config"]["Env"])
    assert not variables["GPUSPAWNER_LEASE_ID"]
    assert variables["NVIDIA_VISIBLE_DEVICES"] == "void", "as in the image"
    assert not waiting["Config"]["Labels"]["gpuspawner.lease"]

    run_once(hub, 2)
    assert shell(clean_engine, "cat /notes.txt") == "mine\n"
    assert shell(clean_engine, "ls /dev | grep -c 'nvidia[0-9]'") == "2\n"
    second = clean_engine.client.inspect_container("jupyter-member1")
    labels = second["Config"]["Labels"]
    assert labels["gpuspawner.lease"] != first["Config"]["Labels"]["gpuspawner.lease"]
    hub.stop_server("member1")

    run_once(hub, 0)
    assert shell(clean_engine, "cat /notes.txt; ls /dev | grep -c 'nvidia[0-9]'") == "mine\n0\n"
    old_token = next(
        item for item in first["Config"]["Env"] if item.startswith("JUPYTERHUB_API_TOKEN=")
    ).partition("=")[2]
    image = clean_engine.client.inspect_container("jupyter-member1")["Image"]
    assert old_token not in str(clean_engine.client.inspect_image(image)), "an image keeps a token"


def test_a_kept_image_never_becomes_too_deep(
    start: Callable[..., HubProcess], clean_engine: PrivateEngine
) -> None:
    hub = start("import gpuspawner.spawners.docker_commit as k; k.MAX_LAYERS = 3")
    depths = []
    for turn in range(5):
        run_once(hub, 1)
        shell(clean_engine, f"echo {turn} >> /turns")
        container = clean_engine.client.inspect_container("jupyter-member1")
        image = clean_engine.client.inspect_image(container["Image"])
        depths.append(len(image["RootFS"]["Layers"]))
        hub.stop_server("member1")
    run_once(hub, 1)
    assert shell(clean_engine, "cat /turns").split() == ["0", "1", "2", "3", "4"]
    assert max(depths) <= max(depths[0], 3) + 1
    assert 1 in depths[1:], "it was never flattened"


def test_with_remove_there_is_nothing_left(
    start: Callable[..., HubProcess], clean_engine: PrivateEngine
) -> None:
    hub = start("c.DockerSpawner.remove = True")
    run_once(hub, 1)
    hub.stop_server("member1")
    assert clean_engine.client.containers(all=True) == []


def test_tokens_are_emptied_and_the_rest_is_kept() -> None:
    environment = ["PATH=/bin", "JUPYTERHUB_API_TOKEN=abc", "MY_TOKEN=x", "GPUSPAWNER_RATE=1"]
    environment.append("NVIDIA_VISIBLE_DEVICES=GPU-1")
    assert docker_commit.without_secrets(environment, ["NVIDIA_VISIBLE_DEVICES=void"]) == [
        "PATH=/bin",
        "JUPYTERHUB_API_TOKEN=",
        "MY_TOKEN=",
        "GPUSPAWNER_RATE=",
        "NVIDIA_VISIBLE_DEVICES=void",
    ]
