"""Servers on the nodes of a Slurm cluster, and the watch over all of them.

JupyterHub itself polls each server only twice a minute. Until then, a server whose machine was lost
or whose container died keeps its devices from others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import MutableMapping
from typing import Any
from weakref import WeakSet

import docker
from traitlets import Bool, TraitError, Unicode, validate

from ..core.errors import ConfigError, EngineUnavailable, GPUSpawnerError, StartFailed, Unavailable
from ..engines.docker import DockerEngine
from ..leases.models import LeaseState, Request, ServerRef, Terms
from ..slurm.cluster import Node
from ..slurm.engine import CGROUP_V1, nest
from ..slurm.images import QUICK, WantedImage, connector
from ..slurm.job_spec import JobResources, resources_of
from ..slurm.jobs import ENDS_BY_SLURM
from ..slurm.scheduler import SlurmDelegate
from .docker import GPUDockerSpawner
from .mixin import ExitStatus

EVERY = 1.5
"""Seconds between two checks while any server runs on a node."""


class NodeWatch:
    """Watch over the servers of a hub that run on nodes."""

    def __init__(self) -> None:
        self.servers: WeakSet[GPUSlurmSpawner] = WeakSet()
        self._task: asyncio.Task[None] | None = None

    def add(self, spawner: GPUSlurmSpawner) -> None:
        """Watch this server too."""
        self.servers.add(spawner)
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while self.servers:
            await asyncio.sleep(EVERY)
            with contextlib.suppress(GPUSpawnerError):
                await self._look()

    async def _look(self) -> None:
        """Make the Hub poll each server that no longer runs."""
        by_lease = {spawner.lease_id: spawner for spawner in self.servers if spawner.lease_id}
        self.servers = WeakSet(by_lease.values())
        if not by_lease:
            return
        spawner = next(iter(by_lease.values()))
        engine = spawner.shared("gpuspawner_nodes", spawner.services.delegation.engine)
        running = await spawner.services.run_outside(engine.running)
        for lease_id, each in by_lease.items():
            # Stopped meanwhile: the Hub would stop the server that has its name now.
            if each.lease_id != lease_id or each.user.spawners.get(each.name) is not each:
                continue
            if lease_id not in running and each.active and not each.pending:
                each.log.info("%s has disappeared: the Hub polls it", each.server_ref)
                await each.poll_and_notify()


ENDING = 30.0
"""Seconds that Slurm may take to end a job and run its epilog."""

NOW = 1.0
"""Maximum age in seconds of Slurm's answer about a server that should be running."""

SELDOM = 5.0
"""Maximum age in seconds of Slurm's answer about a server that was stopped."""


class GPUSlurmSpawner(GPUDockerSpawner):
    """Spawner that leases a cluster's GPUs to containers on its nodes.

    Servers without a GPU run on this machine's Docker Engine.
    """

    remove = Bool(
        True,
        config=True,
        help="""
        Remove a server's container when it stops. On a cluster this is always on, because the next
        start may be on another node; ``False`` is refused. Example::

            c.GPUSlurmSpawner.remove = True
        """,
    )

    job_cgroup = Unicode(
        CGROUP_V1,
        config=True,
        help="""
        The cgroup for a server's container, with ``{node}``, ``{uid}`` and ``{job}`` filled in. The
        default is the cgroup of the server's Slurm job, so that the job's limits apply to the
        container. Empty: the engine chooses, and only the environment's limits apply.

        The job asks for the environment's memory and CPUs. In the job's cgroup a container never
        gets more than its job, so that is the larger of guarantee and limit; if this is empty, it
        is the guarantee, or else the limit. Example::

            c.GPUSlurmSpawner.job_cgroup = ""
        """,
    )

    _node_name = ""
    _over_said = ""
    _starting = False

    @validate("remove")
    def _must_remove(self, proposal: Any) -> bool:
        if not proposal["value"]:
            what = "GPUSlurmSpawner.remove = False cannot be: the next start may be elsewhere"
            raise TraitError(f"{what}. What members keep belongs into their workspace.")
        return True

    # Where the server runs.

    @property
    def delegate(self) -> SlurmDelegate:
        """The services' connection to Slurm. Raises ConfigError if there is none."""
        found = self.services.delegation.delegate
        if not isinstance(found, SlurmDelegate):
            raise ConfigError(
                'GPUSlurmSpawner needs c.GPUSlurm.cluster_file = "/etc/gpuspawner/cluster.yaml", '
                "which gpuspawner slurm config writes."
            )
        return found

    def _ask(self, request: Request, terms: Terms) -> None:
        """Additionally announce the server's image, memory and CPUs, which its job goes by."""
        images: dict[ServerRef, WantedImage] = self.shared("gpuspawner_wanted_images", dict)
        pulls = self.pull_policy.lower() not in ("never", "skip")
        images[self.server_ref] = WantedImage(str(self.image), pulls)
        self.delegate.images.wanted = lambda ticket: images.get(ticket.server)
        needs: dict[ServerRef, JobResources] = self.shared("gpuspawner_job_resources", dict)
        needs[self.server_ref] = resources_of(
            mem_guarantee=self.mem_guarantee,
            mem_limit=self.mem_limit,
            cpu_guarantee=self.cpu_guarantee,
            cpu_limit=self.cpu_limit,
            in_job=bool(self.job_cgroup),
        )
        self.delegate.resources = lambda ticket: needs.get(ticket.server, JobResources())
        super()._ask(request, terms)

    def engine_for(self, request: Request) -> str:
        """Return Slurm's engine for a request with devices, else this machine's."""
        return self.delegate.engine if request.devices else self.engine_name

    @property
    def node(self) -> Node | None:
        """The server's node; None if it runs on this machine."""
        lease = self.lease
        if lease is not None and lease.devices:
            found = self.delegate.cluster.device(lease.devices[0].uuid)
            self._node_name = found[0].name if found else ""
        elif lease is not None:
            self._node_name = ""
        return self.delegate.cluster.node(self._node_name) if self._node_name else None

    @property
    def engine_settings(self) -> MutableMapping[str, Any]:
        """The cache for the engine of the server's node, or for this machine's."""
        if (node := self.node) is None:
            return self.hub_settings
        key = f"gpuspawner_node:{node.name}"
        kept: MutableMapping[str, Any] = self.hub_settings.setdefault(key, {})
        return kept

    def connect(self, timeout: float = 60) -> docker.APIClient:
        """Return a new client of the engine that runs the server."""
        if (node := self.node) is None:
            return super().connect(timeout)
        return connector(node, timeout)()

    @property
    def client(self) -> docker.APIClient:
        """The client for DockerSpawner's own calls, with a short timeout outside of start and stop.

        Calls to a node that is cut off would occupy threads that all servers share.
        """
        if self.node is None or self.pending in ("spawn", "stop"):
            return super().client
        kept = self.engine_settings
        made: docker.APIClient | None = kept.get("gpuspawner_quick_client")
        return made or kept.setdefault("gpuspawner_quick_client", self.connect(QUICK))

    def engine(self) -> DockerEngine:
        """Return this machine's engine, wherever the server runs."""
        connect = super().connect
        found: DockerEngine = self.shared("gpuspawner_docker_engine", lambda: DockerEngine(connect))
        return found

    def server_engine(self) -> DockerEngine:
        """Return the engine of the server's current node, whatever node a later start uses."""
        if (node := self.node) is None:
            return self.engine()
        found: DockerEngine = self.of_engine(
            "gpuspawner_docker_engine", lambda: DockerEngine(connector(node, 60))
        )
        return found

    def get_state(self) -> dict[str, Any]:
        """Add the node's name to the state."""
        state = super().get_state()
        if self._node_name:
            state["node"] = self._node_name
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the node's name from the state."""
        super().load_state(state)
        self._node_name = state.get("node", "")

    def clear_state(self) -> None:
        """Forget the node's name as well."""
        super().clear_state()
        self._node_name = ""

    # The container and its job.

    def placed(self, create: dict[str, Any]) -> dict[str, Any]:
        """Put a container on a node into its job's cgroup. Raises StartFailed if the job ended."""
        node = self.node
        if node is None:
            return create
        ticket_id = self.lease.ticket_id if self.lease is not None else None
        if not ticket_id or (job := self.delegate.job(ticket_id)) is None or not job.lives:
            raise StartFailed(cause="its job in Slurm has ended")
        return nest(create, job, node, self.job_cgroup)

    async def start(self) -> Any:
        """Start the server, and watch it if it runs on a node."""
        if (node := self.node) is not None:
            self.said.say(f"On the machine {node.name}", 12)
        self._starting = True
        try:
            url = await super().start()
        finally:
            self._starting = False
        if node is not None:
            self._watch()
        return url

    # A server whose job has ended is gone.

    def _watch(self) -> None:
        watched: NodeWatch = self.shared("gpuspawner_watched", NodeWatch)
        watched.add(self)

    async def poll(self) -> Any:
        """Return None while the server and its job live or are unknown, else an exit status."""
        if self.node is None or self._starting:
            return await super().poll()
        await self.cleared()
        self._watch()
        # Check the job first: calls to the engine of a lost machine only time out.
        status = await self._poll_job()
        return await super().poll() if status is None else status

    async def _poll_job(self) -> Any:
        """Return 1 if the job has ended; None while it lives or its state is unknown."""
        if self.lease is None or not (ticket_id := self.lease.ticket_id):
            return None
        try:
            over = await self._over(ticket_id)
        except EngineUnavailable:
            return None
        if over is None or over.forgotten:
            return None  # a forgotten job is no proof of an end: the container decides
        if self._over_said != ticket_id:  # log once: during a stop the Hub polls repeatedly
            self._over_said = ticket_id
            self.log.warning("%s: %s", self.server_ref, over.detail)
        return 1

    async def prove_gone(self) -> ExitStatus:
        """Check whether the server is gone. Raises EngineUnavailable if that is unknown.

        It is gone if its job has ended, whether its node answers or not. Otherwise its container
        must be gone; then the job is cancelled.
        """
        lease = self.lease
        if lease is None or lease.engine != self.delegate.engine or not lease.ticket_id:
            return await super().prove_gone()
        # After a stop by its member, it does not matter what may have ended the job since.
        over = await self._over(lease.ticket_id, SELDOM if self.stopped_at else NOW)
        own = ExitStatus(gone=True)
        if over is None or over.forgotten:
            own = await super().prove_gone()
            if not own.gone:
                return own
            over = await self._end_job(lease.ticket_id)
        ended_at = over.ended_at or own.ended_at
        if over.ended_at and lease.state is LeaseState.RUNNING:
            # Slurm counts whole seconds: use no time before the container's own end.
            ended_at = max(over.ended_at, own.ended_at or self.stopped_at or over.ended_at)
            self.stopped_at = ended_at
        return ExitStatus(gone=True, ended_at=ended_at, detail=own.detail or over.detail)

    async def _over(self, ticket_id: str, age: float = NOW) -> ExitStatus | None:
        """Return how the job of a ticket ended; None while it lives. Raises EngineUnavailable."""
        try:
            turns = await self.services.run_outside(self.delegate.turns, age)
        except Unavailable as error:
            raise EngineUnavailable() from error
        turn = turns.get(ticket_id)
        if turn is None:
            return ExitStatus(gone=True, forgotten=True)
        if not turn.over:
            return None
        return ExitStatus(gone=True, ended_at=turn.ended_at, detail=turn.over)

    async def _end_job(self, ticket_id: str) -> ExitStatus:
        """Cancel the job and wait until it has ended in Slurm. Raises EngineUnavailable."""
        try:
            await self.services.run_outside(self.delegate.cancel, ticket_id)
        except Unavailable as error:
            raise EngineUnavailable() from error
        deadline = asyncio.get_running_loop().time() + ENDING
        while (over := await self._over(ticket_id)) is None:
            if asyncio.get_running_loop().time() > deadline:
                raise EngineUnavailable()
            await asyncio.sleep(0.25)
        # Slurm was about to end the job if its epilog had removed the container already.
        why = "" if self.stopped_at or over.detail not in ENDS_BY_SLURM else over.detail
        return ExitStatus(gone=True, ended_at=over.ended_at, detail=why)
