"""``remove = False`` on a real hub and a real Docker Engine: a container's own files stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.spawners import member_images
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import simulated_uuids
from tests.support.hub import HubProcess

FLEET = "2xA100-80GB"
CONFIG = """
c.JupyterHub.spawner_class = "gpu-docker"
c.GPUDatabase.url = "sqlite:///{folder}/gpuspawner.sqlite"
c.GPUDevices.source = "simulated:{fleet}"
c.GPUDockerSpawner.gpu_injection = "device_requests"
c.DockerSpawner.image = "{image}"
c.DockerSpawner.use_internal_ip = True
import gpuspawner.spawners.member_images
gpuspawner.spawners.member_images.MAX_LAYERS = 3
"""


@pytest.fixture(scope="module")
def hub(hubs: None, engine: PrivateEngine, images: Any, folder: Path) -> Iterator[HubProcess]:
    """The files of a container are kept as an image of three layers at most."""
    engine.set_devices(simulated_uuids(FLEET))
    config = CONFIG.format(folder=folder, fleet=FLEET, image=images.INSTANT)
    environment = {"DOCKER_HOST": engine.url}
    with HubProcess(folder, config, hub_ip=engine.gateway, environment=environment) as hub:
        yield hub
    engine.clean()


def shell(engine: PrivateEngine, member: str, command: str) -> str:
    """Run a command as root in a member's container."""
    return engine.execute(f"jupyter-{member}", ["sh", "-c", command])[1]


def test_kept_container_files_survive_the_next_start(
    hub: HubProcess, engine: PrivateEngine
) -> None:
    hub.spawn_and_wait("member1", {"gpus": 1})
    shell(engine, "member1", "echo mine > /notes.txt")
    first = engine.client.inspect_container("jupyter-member1")
    hub.stop_server("member1")
    waiting = engine.client.inspect_container("jupyter-member1")
    assert waiting["State"]["Status"] == "created"
    assert not waiting["HostConfig"]["DeviceRequests"], "it waits with a GPU that it may not have"
    variables = dict(item.split("=", 1) for item in waiting["Config"]["Env"])
    assert not variables["GPUSPAWNER_LEASE_ID"]
    assert variables["NVIDIA_VISIBLE_DEVICES"] == "void", "as in the image"
    assert not waiting["Config"]["Labels"]["gpuspawner.lease"]

    hub.spawn_and_wait("member1", {"gpus": 2})
    assert shell(engine, "member1", "cat /notes.txt") == "mine"
    assert shell(engine, "member1", "ls /dev | grep -c 'nvidia[0-9]'") == "2"
    second = engine.client.inspect_container("jupyter-member1")
    labels = second["Config"]["Labels"]
    assert labels["gpuspawner.lease"] != first["Config"]["Labels"]["gpuspawner.lease"]
    hub.stop_server("member1")

    hub.spawn_and_wait("member1", {"gpus": 0})
    look = "cat /notes.txt; ls /dev | grep -c 'nvidia[0-9]'"
    assert shell(engine, "member1", look) == "mine\n0"
    old_token = next(
        item for item in first["Config"]["Env"] if item.startswith("JUPYTERHUB_API_TOKEN=")
    ).partition("=")[2]
    image = engine.client.inspect_container("jupyter-member1")["Image"]
    assert old_token not in str(engine.client.inspect_image(image)), "an image keeps a token"
    hub.stop_server("member1")


def test_kept_image_layers_stay_bounded(hub: HubProcess, engine: PrivateEngine) -> None:
    depths = []
    for turn in range(5):
        hub.spawn_and_wait("member2", {"gpus": 1})
        shell(engine, "member2", f"echo {turn} >> /turns")
        container = engine.client.inspect_container("jupyter-member2")
        image = engine.client.inspect_image(container["Image"])
        depths.append(len(image["RootFS"]["Layers"]))
        hub.stop_server("member2")
    hub.spawn_and_wait("member2", {"gpus": 1})
    assert shell(engine, "member2", "cat /turns").split() == ["0", "1", "2", "3", "4"]
    assert max(depths) <= max(depths[0], 3) + 1
    assert 1 in depths[1:], "it was never flattened"


def test_secret_variables_are_blanked_in_kept_images() -> None:
    environment = ["PATH=/bin", "JUPYTERHUB_API_TOKEN=abc", "MY_TOKEN=x", "GPUSPAWNER_RATE=1"]
    environment.append("NVIDIA_VISIBLE_DEVICES=GPU-1")
    assert member_images.without_secrets(environment, ["NVIDIA_VISIBLE_DEVICES=void"]) == [
        "PATH=/bin",
        "JUPYTERHUB_API_TOKEN=",
        "MY_TOKEN=",
        "GPUSPAWNER_RATE=",
        "NVIDIA_VISIBLE_DEVICES=void",
    ]
