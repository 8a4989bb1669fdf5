"""A real hub on a real private Docker Engine, with our spawner and the stock one side by side."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support import HUB_PATH
from support.members import Members
from tests.support import images
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import simulated_uuids
from tests.support.hub import HubProcess

CONFIG = """
from docker.types import DeviceRequest
from dockerspawner import DockerSpawner
from support.either import by_name
from gpuspawner.spawners.docker import GPUDockerSpawner

class StockSpawner(DockerSpawner):
    # Else its client and its one thread would be GPUDockerSpawner's too, which inherits them.
    _client = None
    _executor = None

c.JupyterHub.spawner_class = by_name({{"ours": GPUDockerSpawner, "stock": StockSpawner}})
c.JupyterHub.cleanup_servers = False
c.DockerSpawner.client_kwargs = {{"base_url": {engine!r}}}
c.DockerSpawner.image = {image!r}
c.DockerSpawner.remove = True
c.DockerSpawner.use_internal_ip = True
c.StockSpawner.extra_host_config = {{
    "device_requests": [DeviceRequest(device_ids=[{spare!r}], capabilities=[["gpu"]])]
}}
c.GPUDockerSpawner.gpu_injection = "device_requests"
c.GPUDevices.source = "simulated:{fleet}"
c.GPUCredits.opening_grant = 1000000
"""


@dataclass(frozen=True, slots=True)
class DockerHub:
    """What runs."""

    engine: PrivateEngine
    hub: HubProcess
    members: Members
    ours: list[str]
    """Members whose servers are GPUDockerSpawner's."""
    stock: list[str]
    """Members whose servers are DockerSpawner's."""


@contextlib.contextmanager
def docker_hub(
    members: int, config: str = "", *, spare: int = 0, image: str = images.INSTANT
) -> Iterator[DockerHub]:
    """A hub with so many members of either side, a device for each of ours, and ``spare`` more.

    Both sides get one device by a device request: ours the one that it leases, the stock
    spawner always the same one more.
    """
    leased = members + spare
    uuids = simulated_uuids(f"{leased + 1}xT4")
    with tempfile.TemporaryDirectory() as folder, PrivateEngine() as engine:
        images.ensure_images(engine, [image])
        engine.set_devices(uuids)
        text = CONFIG.format(engine=engine.url, image=image, fleet=f"{leased}xT4", spare=uuids[-1])
        with HubProcess(
            Path(folder), text + config, hub_ip=engine.gateway, environment=HUB_PATH
        ) as hub:
            client = Members(hub, connections=2 * members)
            ours = [f"ours-{n}" for n in range(members)]
            stock = [f"stock-{n}" for n in range(members)]
            client.add(ours + stock)
            try:
                yield DockerHub(engine, hub, client, ours, stock)
            except BaseException:
                print(hub.log_text()[-8000:], engine.log_text(), sep="\n", file=sys.stderr)
                raise
