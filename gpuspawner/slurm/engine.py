"""The engines of a cluster's nodes, and a job's cgroup for the container beside it.

A server ends when its job does: then Slurm's epilog has removed the container, or Slurm holds
back the node until it has. A container that ended before its job takes the job along.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

from ..core.errors import EngineUnavailable, SlurmUnavailable
from ..engines.base import LABEL_LEASE
from ..engines.docker import DockerEngine, sighting_of
from ..leases.models import Lease, LeaseState, Sighting
from .cluster import Node
from .images import MOST_AT_ONCE, QUICK, connector
from .jobs import SlurmJob
from .scheduler import SlurmDelegate

LABEL_JOB = "gpuspawner.job"
"""The label of a container with the number of its job: the epilog looks for it."""

SOON = 1.0
"""Seconds in which a node that is well answers, in a look at all of them."""


class SlurmEngine:
    """Containers on all nodes, each with its job."""

    name = "slurm"

    def __init__(self, delegate: SlurmDelegate, log: logging.Logger | Any = None) -> None:
        self._delegate = delegate
        self._log = log or logging.getLogger(__name__)
        self._engines = {
            node.name: DockerEngine(connector(node)) for node in delegate.cluster.nodes
        }
        self._quick = {
            node.name: DockerEngine(connector(node, QUICK)) for node in delegate.cluster.nodes
        }
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="gpuspawner-nodes")
        self._listed: dict[str, dict[str, str]] = {}
        """Lease and job of each container that runs, by node."""
        self._listing: dict[str, Future[bool]] = {}
        """The last question to each node: whether it was answered."""
        self._silent: set[str] = set()
        """The nodes that did not answer in time when they were last waited for."""
        self._away: set[str] = set()
        self._where: dict[str, tuple[str, str]] = {}
        """Node and job of each container that was seen."""

    def on(self, node: str) -> DockerEngine:
        """The engine of a node."""
        return self._engines[node]

    def sightings(self) -> list[Sighting]:
        """Every server on a node that answers. Raises EngineUnavailable when Slurm does not:
        without it nobody can say what has ended."""
        alive, ended = self._living(), self._ended()
        self._away.clear()
        found = []
        for name, engine in self._engines.items():
            try:
                found += self._on_node(name, engine, alive, ended)
            except EngineUnavailable:
                self._away.add(name)
        return found

    def removed(self, leases: Iterable[Lease], found: Iterable[Sighting]) -> list[Sighting]:
        """Servers that run by the store and were not found: ended with their job, or on a node
        that did not answer."""
        there = {sighting.lease_id for sighting in found}
        more = []
        for lease in leases:
            if lease.engine != self.name or lease.id in there or not lease.ticket_id:
                continue
            job = self._delegate.job(lease.ticket_id)
            gone = Sighting(
                lease_id=lease.id, ref=lease.engine_ref, server=lease.server, alive=False
            )
            if job is not None and not job.lives:
                more.append(replace(gone, ended_at=job.ended_at, detail=job.end))
            elif job is None:  # Slurm has forgotten it: only its node can say
                if lease.state is LeaseState.RUNNING:
                    more.append(replace(gone, alive=self._node_of(lease) in self._away))
            elif lease.state is LeaseState.RUNNING or job.node in self._away:
                if job.node not in self._away:
                    self._cancel(str(job.id))  # its container was removed
                more.append(replace(gone, alive=True))
        return more

    def running(self) -> set[str]:
        """The leases whose container runs, or ran when its node last answered, and whose job
        lives. Quick, also where a node is lost: that it is lost, Slurm says. Raises
        EngineUnavailable."""
        alive = self._living()
        self._list_all()
        return {
            lease for listed in self._listed.values() for lease, job in listed.items()
            if job in alive
        }  # fmt: skip

    def end(self, sighting: Sighting) -> None:
        """End a server that nobody owns any more, and its job. Raises EngineUnavailable."""
        node, job = self._where.get(sighting.ref, ("", ""))
        if node:
            self._engines[node].end(sighting)
        if job:
            self._cancel(job)

    # Steps of the above.

    def _on_node(
        self, name: str, engine: DockerEngine, alive: Collection[str], ended: Collection[str]
    ) -> list[Sighting]:
        listed = engine.call(
            lambda client: client.containers(all=True, filters={"label": [LABEL_LEASE, LABEL_JOB]})
        )
        found = []
        for each in listed:
            state = engine.inspect(each["Id"])
            if state is None:
                continue
            sighting, job = sighting_of(state), str(each["Labels"][LABEL_JOB])
            self._where[sighting.ref] = name, job
            if sighting.alive and job in ended:  # one that Slurm did not name may just have begun
                # Its devices may be somebody else's by now: the epilog missed it.
                self._log.warning("Ending %s on %s: its job has ended", sighting.server, name)
                engine.end(sighting)
            elif not sighting.alive and job in alive:
                self._cancel(job)
                sighting = replace(sighting, alive=True, ended_at=None)  # until the job has ended
            found.append(sighting)
        return found

    def _list_all(self) -> None:
        """Ask every node. Nobody waits for one that was silent of late: its answer counts when it
        comes."""
        for name in self._quick:
            asked = self._listing.get(name)
            if asked is not None and not asked.done():
                continue
            if asked is not None and asked.result():
                self._silent.discard(name)
            self._listing[name] = self._threads.submit(self._list, name)
        _, late = wait([each for n, each in self._listing.items() if n not in self._silent], SOON)
        self._silent |= {name for name, asked in self._listing.items() if asked in late}

    def _list(self, name: str) -> bool:
        """Whether the node answered."""
        try:
            listed = self._quick[name].call(
                lambda client: client.containers(filters={"label": [LABEL_LEASE, LABEL_JOB]})
            )
        except EngineUnavailable:
            return False
        labels = [each["Labels"] for each in listed]
        self._listed[name] = {each[LABEL_LEASE]: str(each[LABEL_JOB]) for each in labels}
        return True

    def _ended(self) -> set[str]:
        """The numbers of the jobs of which Slurm says that they have ended."""
        return {str(job.id) for job in self._delegate.known() if not job.lives}

    def _node_of(self, lease: Lease) -> str:
        found = self._delegate.cluster.device(lease.uuids[0]) if lease.uuids else None
        return found[0].name if found else ""

    def _living(self) -> set[str]:
        """The numbers of the jobs that live."""
        try:
            return {str(job.id) for job in self._delegate.living()}
        except SlurmUnavailable as error:
            self._log.warning("%s", error.message)
            raise EngineUnavailable() from error

    def _cancel(self, job: str) -> None:
        try:
            self._delegate.cancel_job(int(job))
        except SlurmUnavailable as error:
            raise EngineUnavailable() from error


CGROUP_V1 = "/slurm_{node}/uid_{uid}/job_{job}/step_batch"
"""Where Debian's slurmd keeps a job's batch step, under each controller of cgroup v1."""


def nest(create: Mapping[str, Any], job: SlurmJob, node: Node, cgroup: str) -> dict[str, Any]:
    """The keyword arguments of ``create_container`` for a container of this job on this node.

    ``cgroup`` is the template of its parent, empty for the engine's own: inside of it the job's
    limits hold for the container too. The port is published where the hub reaches the node.
    """
    nested = dict(create)
    nested["labels"] = {**dict(create.get("labels") or {}), LABEL_JOB: str(job.id)}
    host = dict(create.get("host_config") or {})
    if cgroup:
        host["CgroupParent"] = cgroup.format(node=node.name, uid=job.uid, job=job.id)
    host["PortBindings"] = {
        port: [{**binding, "HostIp": node.address} for binding in bindings]
        for port, bindings in (host.get("PortBindings") or {}).items()
    }
    nested["host_config"] = host
    return nested
