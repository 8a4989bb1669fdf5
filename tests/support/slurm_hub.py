"""A real hub with its accounting service, whose members' servers run on a cluster's nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import requests

from gpuspawner.engines.base import LABEL_LEASE
from gpuspawner.leases.models import Lease, LeaseState, ServerRef
from gpuspawner.queue.models import Ticket
from gpuspawner.slurm.cluster import TLS, Cluster, NodeDevice
from gpuspawner.slurm.cluster import Node as ClusterNode
from gpuspawner.slurm.config import cluster_yaml
from tests.support.brokers import make_services, migrated_bytes
from tests.support.gpu_hub import CATALOG
from tests.support.hub import HubProcess
from tests.support.processes import free_port, wait_for
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_node import Node

CONFIG = """
c.JupyterHub.spawner_class = "gpuspawner.spawners.slurm.GPUSlurmSpawner"
c.JupyterHub.allow_named_servers = True
c.JupyterHub.cleanup_servers = False
c.JupyterHub.tornado_settings = {{"slow_spawn_timeout": 0.5}}
c.GPUDatabase.url = {database_url!r}
c.GPUSlurm.cluster_file = {cluster!r}
c.GPURates.by_model = {{"*": 3600}}
c.GPUCredits.opening_grant = 100_000
c.GPUCredits.hold_minutes = 0.01
c.GPUDevices.refresh_seconds = 0.5
c.GPUCredits.charge_seconds = 1
c.Accounting.reconcile_seconds = 2
c.GPUSlurmSpawner.gpu_injection = "device_requests"
c.GPUSlurmSpawner.catalog = {catalog!r}
c.GPUSlurmSpawner.host_ip = {host_ip!r}
{config}
import gpuspawner
from jupyterhub.services import service
class Watched(service._ServiceSpawner):
    poll_interval = 2
service._ServiceSpawner = Watched
gpuspawner.add_services(c, url={url!r})
"""
"""A credit a second for each GPU."""


class SlurmHub(HubProcess):
    """``with SlurmHub(folder, cluster) as hub``. Servers without a GPU are on the first node's
    engine, as if the hub were there too. ``shards``: of each device, 0 for none; ``samplers``:
    where each node's is, by the node's name; ``nodes``: the cluster as the hub has it, if not as
    usual."""

    def __init__(
        self, folder: Path, cluster: SlurmCluster, config: str = "", *, shards: int = 0,
        samplers: Mapping[str, str] | None = None, environments: str = "",
        nodes: Cluster | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        self.cluster = cluster
        self.database_url = f"sqlite:///{folder}/gpuspawner.sqlite"
        file = folder / "cluster.yaml"
        nodes = nodes or described(cluster, shards, samplers)
        file.write_text(cluster_yaml(nodes), encoding="utf-8")
        (folder / "catalog.yaml").write_text(CATALOG + environments, encoding="utf-8")
        text = CONFIG.format(
            database_url=self.database_url,
            cluster=str(file),
            catalog=str(folder / "catalog.yaml"),
            host_ip=cluster.nodes[0].address,
            config=config,
            url=f"http://127.0.0.1:{free_port()}",
        )
        environment = {"DOCKER_HOST": cluster.nodes[0].engine.url}
        super().__init__(folder, text, hub_ip=cluster.address, environment=environment, **kwargs)
        (folder / "gpuspawner.sqlite").write_bytes(migrated_bytes())
        self.services = make_services(database_url=self.database_url, cluster=str(file))
        self._users: set[str] = set()

    def stop(self) -> None:
        super().stop()
        self.services.store.close()

    def make_user(self, user: str) -> None:
        """Make a member's Linux user, once: it takes Slurm's database a second."""
        if user not in self._users:
            self.cluster.user(user)
            self._users.add(user)

    def ask(self, user: str, server: str = "", **options: Any) -> requests.Response:
        """Ask for a server as this member, whose Linux user is made before the first."""
        self.make_user(user)
        return self.spawn(user, options, server)

    def begin(self, user: str, server: str = "", **options: Any) -> Lease:
        """Ask for a server, and wait until it is up: its lease."""
        self.ask(user, server, **options)
        return self.wait_lease(user, server)

    def queue_up(self, user: str, server: str = "", **options: Any) -> Ticket:
        """Ask for a server that has to wait: its ticket, as soon as it has a job."""
        self.ask(user, server, wait=True, **options)
        ref, waiting = ServerRef(user, server), self.services.queue.waiting
        (ticket,) = wait_for(
            lambda: [ticket for ticket in waiting() if ticket.server == ref], f"{ref}'s ticket"
        )
        wait_for(lambda: self.cluster.holder(ticket.id), f"the job of {user}")
        return ticket

    def stop_servers(self, *users: str) -> None:
        """Stop the members' default servers."""
        for user in users:
            self.stop_server(user)

    def refusal(self, user: str, **options: Any) -> str:
        """Why a member gets no server; and that nobody has anything of it."""
        answer = self.ask(user, **options)
        said = answer.json()["message"] if answer.status_code >= 400 else self.failure(user)
        wait_for(lambda: self.server(user) is None, "the hub to know")
        assert user not in [ticket.server.user for ticket in self.services.queue.waiting()]
        assert self.services.leases.of_server(ServerRef(user)) is None
        assert not self.cluster.run("squeue", "-h", f"--user={user}")
        return str(said)

    def wait_lease(self, user: str, server: str = "", timeout: float = 60) -> Lease:
        """Until the server is up: its lease."""
        self.wait_server(user, server, timeout=timeout)
        lease = self.services.leases.of_server(ServerRef(user, server))
        assert lease is not None and lease.state is LeaseState.RUNNING
        return lease

    def wait_end(self, lease: Lease, timeout: float = 60) -> Lease:
        """Until the lease has ended: what it came to."""

        def ended() -> Lease | None:
            now = self.services.leases.get(lease.id)
            return now if now.state is LeaseState.ENDED else None

        return wait_for(ended, "the end of the lease", timeout=timeout)

    def node_of(self, lease: Lease) -> Node:
        """Where the lease's devices are."""
        uuid = lease.devices[0].uuid
        return next(n for n in self.cluster.nodes if uuid in {d.uuid for d in n.devices})

    def containers(self, node: Node) -> list[dict[str, Any]]:
        """Every container of a lease on a node, also those that have exited."""
        found: list[dict[str, Any]] = node.engine.client.containers(
            all=True, filters={"label": LABEL_LEASE}
        )
        return found


def described(
    cluster: SlurmCluster, shards: int = 0, samplers: Mapping[str, str] | None = None
) -> Cluster:
    """The cluster, as an admin would describe it in ``cluster.yaml``."""
    tls = cluster.directory / "tls"
    nodes = tuple(
        ClusterNode(
            name=node.name,
            address=node.address,
            engine=node.url,
            tls=TLS(*(str(tls / name) for name in ("ca.pem", "cert.pem", "key.pem"))),
            sampler=(samplers or {}).get(node.name, ""),
            devices=tuple(
                NodeDevice(d.uuid, d.model, d.memory_bytes, str(d.file), node.machine.gres)
                for d in node.devices
            ),
            cpus=4,
            memory_bytes=2**30,
            shards={node.machine.gres: shards} if shards else {},
        )
        for node in cluster.nodes
    )
    return Cluster(
        name=cluster.cluster_name,
        hub_address=cluster.address,
        slurm_conf=str(cluster.conf),
        nodes=nodes,
    )
