"""The engines of a cluster's nodes, and a job's cgroup for its container.

A server ends when its job does: then Slurm's epilog has removed the container, or Slurm keeps the
node out of service until it has. Who sees that a container ended before its job ends the job.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..core.errors import EngineUnavailable, SlurmUnavailable
from ..engines.base import LABEL_LEASE
from ..engines.docker import DockerEngine, sighting_of
from ..engines.files import MountedWorkspace
from ..engines.resource_use import ReportedUse, ResourceUse
from ..leases.models import Lease, LeaseState, Sighting
from .cluster import Node
from .images import MOST_AT_ONCE, QUICK, connector
from .jobs import SlurmJob
from .scheduler import SlurmDelegate

LABEL_JOB = "gpuspawner.job"
"""The label of a container with its job number: the epilog looks for it."""

_OURS = {"label": [LABEL_LEASE, LABEL_JOB]}

SOON = 1.0
"""Seconds in which a healthy node answers, when all are queried."""


class SlurmEngine:
    """Containers on all nodes, each with its job."""

    name = "slurm"

    def __init__(self, delegate: SlurmDelegate, log: logging.Logger | Any = None) -> None:
        self._delegate = delegate
        self._log = log or logging.getLogger(__name__)
        nodes = delegate.cluster.nodes
        self._engines = {node.name: DockerEngine(connector(node)) for node in nodes}
        self._quick = {node.name: DockerEngine(connector(node, QUICK)) for node in nodes}
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="gpuspawner-nodes")
        self._listed: dict[str, dict[str, str]] = {}
        """Lease and job of each running container, by node."""
        self._listing: dict[str, Future[bool]] = {}
        """The last query of each node: True if it was answered."""
        self._silent: set[str] = set()
        """The nodes that did not respond in time when last waited for."""
        self._away: set[str] = set()
        self._where: dict[str, tuple[str, str]] = {}
        """Node and job of each container seen."""

    def sightings(self) -> list[Sighting]:
        """Return every server on a node that answers.

        Raises EngineUnavailable if Slurm is not responding: without it nobody knows what has ended.
        """
        alive = self._living()
        ended = {str(job.id) for job in self._delegate.known() if not job.lives}
        self._away.clear()
        found = []
        for name, engine in self._engines.items():
            try:
                found += self._on_node(name, engine, alive, ended)
            except EngineUnavailable:
                self._away.add(name)
        return found

    def removed(self, leases: Iterable[Lease], found: Iterable[Sighting]) -> list[Sighting]:
        """Return what happened to running servers that were not found.

        They ended with their job, or are on a node that did not respond.
        """
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
            elif job is None:  # Slurm has forgotten it: only its node knows
                if lease.state is LeaseState.RUNNING:
                    node = self._delegate.machine_of(lease.uuids[0]) if lease.uuids else ""
                    more.append(replace(gone, alive=node in self._away))
            elif lease.state is LeaseState.RUNNING or job.node in self._away:
                if job.node not in self._away:
                    self._cancel(str(job.id))  # its container was removed
                more.append(replace(gone, alive=True))
        return more

    def running(self) -> set[str]:
        """Return the leases with a running container and a living job.

        Containers as of the last answer of their node. Fast, even if a node is lost, which Slurm
        reports. Raises EngineUnavailable.
        """
        alive = self._living()
        self._list_all()
        listed = [pair for jobs in self._listed.values() for pair in jobs.items()]
        return {lease for lease, job in listed if job in alive}

    def end(self, sighting: Sighting) -> None:
        """End a server without an owner, and its job. Raises EngineUnavailable."""
        node, job = self._where.get(sighting.ref, ("", ""))
        if node:
            self._engines[node].end(sighting)
        if job:
            self._cancel(job)

    def end_job(self, sighting: Sighting) -> None:
        """End the job of an exited container; Slurm's epilog removes the container."""
        _, job = self._where.get(sighting.ref, ("", ""))
        if job:
            self._cancel(job)

    def last_line(self, ref: str) -> str:
        """Return the last line that a container printed; empty if nothing was, or none was kept."""
        node, _ = self._where.get(ref, ("", ""))
        return self._engines[node].last_line(ref) if node else ""

    def memory_limit(self, ref: str) -> int | None:
        """Return how many bytes of memory a container may use; None if it is gone or has no limit.

        That of its job, which also applies, is not among the container's settings.
        """
        node, _ = self._where.get(ref, ("", ""))
        return self._engines[node].memory_limit(ref) if node else None

    def resource_use(self, ref: str) -> ResourceUse | None:
        """Return what a container uses now; None if it is not running."""
        node, _ = self._where.get(ref, ("", ""))
        return self._engines[node].resource_use(ref) if node else None

    def reported_use(self, ref: str) -> ReportedUse | None:
        """Return what the program of a run that has ended reported; None if it did not."""
        node, _ = self._where.get(ref, ("", ""))
        return self._engines[node].reported_use(ref) if node else None

    def signal(self, ref: str, name: str) -> None:
        """Send a signal to a container's first process; one that does not run gets none."""
        node, _ = self._where.get(ref, ("", ""))
        if node:
            self._engines[node].signal(ref, name)

    def mount_workspace(self, source: str) -> MountedWorkspace:
        """Return a directory that all nodes share, readable by the first node that answers."""
        for name in self._quick:
            if name not in self._away:
                with suppress(EngineUnavailable):
                    return self._quick[name].mount_workspace(source)
        raise EngineUnavailable()

    def remove_leftovers(self) -> None:
        """Remove the containers with which a killed process read files."""
        for engine in self._quick.values():
            with suppress(EngineUnavailable):
                engine.remove_leftovers()

    # Helpers.

    def _on_node(
        self, name: str, engine: DockerEngine, alive: Collection[str], ended: Collection[str]
    ) -> list[Sighting]:
        listed = engine.call(lambda client: client.containers(all=True, filters=_OURS))
        found = []
        for each in listed:
            state = engine.inspect(each["Id"])
            if state is None:
                continue
            sighting, job = sighting_of(state), str(each["Labels"][LABEL_JOB])
            self._where[sighting.ref] = name, job
            if sighting.alive and job in ended:  # one that Slurm did not name may just have begun
                # Its devices may be leased to others by now: the epilog missed it.
                self._log.warning("Ending %s on %s: its job has ended", sighting.server, name)
                engine.end(sighting)
            elif not sighting.alive and job in alive:
                # Until the job has ended. Its end removes the container, and with it the exit
                # status, so who needs that reads it first: see end_job.
                sighting = replace(sighting, alive=True, ended_at=None)
            found.append(sighting)
        return found

    def _list_all(self) -> None:
        """Query every node, without waiting for recently silent ones; late answers count."""
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
        """Query a node; returns True if it answered."""
        try:
            listed = self._quick[name].call(lambda client: client.containers(filters=_OURS))
        except EngineUnavailable:
            return False
        labels = [each["Labels"] for each in listed]
        self._listed[name] = {each[LABEL_LEASE]: str(each[LABEL_JOB]) for each in labels}
        return True

    def _living(self) -> set[str]:
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
"""The cgroup of a job's batch step with Debian's slurmd, in each controller of cgroup v1."""


def nest(create: Mapping[str, Any], job: SlurmJob, node: Node, cgroup: str) -> dict[str, Any]:
    """Return ``create_container`` arguments for a container of this job on this node.

    ``cgroup`` is the template of its parent, empty for the engine's default: inside of it the job's
    limits apply to the container too. The port is published where the hub reaches the node.
    """
    labels = {**(create.get("labels") or {}), LABEL_JOB: str(job.id)}
    host = dict(create.get("host_config") or {})
    if cgroup:
        host["CgroupParent"] = cgroup.format(node=node.name, uid=job.uid, job=job.id)
    host["PortBindings"] = {
        port: [{**binding, "HostIp": node.address} for binding in bindings]
        for port, bindings in (host.get("PortBindings") or {}).items()
    }
    return {**create, "labels": labels, "host_config": host}
