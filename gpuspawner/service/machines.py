"""The Docker Engines with containers of leases: this machine's, and those of a cluster's nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from ..engines.docker import DockerEngine, client_from_environment
from ..leases.models import Lease
from ..services import Services
from ..slurm.cluster import Cluster
from ..slurm.images import connector
from ..slurm.scheduler import SlurmDelegate
from .worker import Tick, TickDuty

HERE = "this machine"


@dataclass(frozen=True, slots=True)
class Machines:
    """Some of the engines, each with its own containers."""

    engines: Mapping[str, DockerEngine]
    """By the machine's name."""
    machine_of: Callable[[Lease], str]
    """Returns the name of the machine with a lease's container; empty if it is not one of these."""


class MachineDuty(TickDuty):
    """A duty for the containers of leases, on each of some engines."""

    def __init__(
        self, tick: Tick, machines: Machines, poke: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(tick, poke)
        self.engines = machines.engines
        self._machine_of = machines.machine_of

    async def leases(self) -> dict[str, dict[str, Lease]]:
        """Return the open leases on each machine, by id. Raises StoreUnavailable."""
        found: dict[str, dict[str, Lease]] = {name: {} for name in self.engines}
        for lease in await self.services.run(self.services.leases.open_leases):
            if (machine := self._machine_of(lease)) in found:
                found[machine][lease.id] = lease
        return found


def machines_with_engines(services: Services, patience_seconds: float) -> list[Machines]:
    """Return this machine, then the nodes of a cluster if there is one.

    ``patience_seconds`` is how long an engine may take for an answer.
    """
    engine = DockerEngine(partial(client_from_environment, patience_seconds))

    def is_here(lease: Lease) -> str:
        return HERE if lease.engine == engine.name else ""

    found = [Machines({HERE: engine}, is_here)]
    delegate = services.delegation.delegate
    if isinstance(delegate, SlurmDelegate):
        nodes = {
            node.name: DockerEngine(connector(node, patience_seconds))
            for node in delegate.cluster.nodes
        }
        found.append(Machines(nodes, partial(node_of, delegate.cluster, delegate.engine)))
    return found


def node_of(cluster: Cluster, engine: str, lease: Lease) -> str:
    """Return the name of the machine with a lease's server; empty if not in the cluster."""
    if lease.engine != engine or not lease.devices:
        return ""
    found = cluster.device(lease.uuids[0])
    return found[0].name if found else ""
