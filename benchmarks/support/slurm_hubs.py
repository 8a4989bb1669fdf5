"""A cluster, a hub on it, and a hub of one machine on the first node's engine, side by side."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support import HUB_PATH
from support.members import Members
from tests.support import images
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import simulated_uuids
from tests.support.hub import HubProcess
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_hub import SlurmHub

FLEET = "1xA100-40GB"
CATALOG = f"""
environments:
  - slug: instant
    display_name: Instant
    description: A server that answers at once.
    image: {images.INSTANT}
    default: true
    devices: {{default: 1, max: 8}}
  - slug: base
    display_name: JupyterLab
    description: A notebook.
    image: {images.BASE}
    devices: {{default: 1, max: 8}}
"""
BOTH = """
c.JupyterHub.tornado_settings = {{"slow_spawn_timeout": 60}}
c.{spawner}.catalog = {catalog!r}
c.{spawner}.gpu_injection = "device_requests"
c.GPUCredits.opening_grant = 1_000_000
"""
SINGLE = """
c.JupyterHub.spawner_class = "gpuspawner.spawners.docker.GPUDockerSpawner"
c.JupyterHub.cleanup_servers = False
c.GPUDockerSpawner.host_ip = {host_ip!r}
c.GPUDockerSpawner.remove = True
c.GPUDatabase.url = {database_url!r}
c.GPUDevices.source = "simulated:{fleet}"
c.GPURates.by_model = {{"*": 3600}}
"""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two hubs, with one member."""

    hub: HubProcess
    members: Members
    name: str

    def spawn(self, environment: str) -> None:
        """Ask for a server, and wait until it is ready."""
        answer = self.hub.api(
            "POST", f"users/{self.name}/server", json={"environment": environment}, timeout=300
        )
        if answer.status_code == 202:
            self.hub.wait_server(self.name, timeout=300)
        elif answer.status_code != 201:
            raise RuntimeError(f"{answer.status_code} {answer.text}")

    def stop(self) -> None:
        """And wait until it is gone."""
        self.members.stop(self.name)

    def to_ready(self) -> tuple[float, float]:
        """Seconds to a server that answers at once, and until it is gone again."""
        began = time.perf_counter()
        self.spawn("instant")
        ready = time.perf_counter()
        self.stop()
        return ready - began, time.perf_counter() - ready

    def to_kernel(self) -> float:
        """Seconds to a notebook server's kernel that has answered."""
        began = time.perf_counter()
        self.spawn("base")
        assert self.hub.kernel_run(self.name, "print(6 * 7)").strip() == "42"
        took = time.perf_counter() - began
        self.stop()
        return took


@dataclass(frozen=True, slots=True)
class Hubs:
    """What runs."""

    cluster: SlurmCluster
    slurm: SlurmHub
    ours: Side
    single: Side


@contextlib.contextmanager
def hubs() -> Iterator[Hubs]:
    """Both, with the same images and environments."""
    with tempfile.TemporaryDirectory() as folder, SlurmCluster() as cluster:
        catalog = Path(folder, "environments.yaml")
        catalog.write_text(CATALOG, encoding="utf-8")
        with PrivateEngine() as source:
            images.ensure_images(source, [images.BASE])
            cluster.load_images(source, images.BASE)
        node = cluster.nodes[0]
        own = [device.uuid for device in node.devices]
        node.engine.set_devices([*own, *simulated_uuids(FLEET)], node.devices[0].model)
        ours = SlurmHub(
            Path(folder, "slurm"),
            cluster,
            BOTH.format(spawner="GPUSlurmSpawner", catalog=str(catalog)),
        )
        database = f"sqlite:///{folder}/single.sqlite"
        text = SINGLE.format(host_ip=node.address, fleet=FLEET, database_url=database)
        single = HubProcess(
            Path(folder, "single"),
            text + BOTH.format(spawner="GPUDockerSpawner", catalog=str(catalog)),
            hub_ip=cluster.address,
            environment={**HUB_PATH, "DOCKER_HOST": node.engine.url},
            name="single",
        )
        with ours, single:
            sides = []
            for hub, name in ((ours, "bench"), (single, "single")):
                members = Members(hub)
                members.add([name])
                sides.append(Side(hub, members, name))
            cluster.user("bench")
            try:
                yield Hubs(cluster, ours, *sides)
            except BaseException:
                print(ours.log_text()[-8000:], single.log_text()[-3000:], file=sys.stderr)
                raise
