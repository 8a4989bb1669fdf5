"""Servers on the nodes of a cluster: Slurm chooses the node and the GPUs, and the container runs
there beside the job that holds them."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import docker
from traitlets import Bool, TraitError, Unicode, validate

from ..engines import DockerEngine
from ..errors import ConfigError, EngineUnavailable, StartFailed, Unavailable
from ..model import Lease, LeaseState, Request, ServerRef, Ticket
from ..slurm.cluster import Node
from ..slurm.delegate import SlurmDelegate
from ..slurm.images import Wanted
from ..slurm.jobs import Job
from ..slurm.nesting import CGROUP_V1, nest
from ..slurm.reaching import QUICK, connector
from .docker import GPUDockerSpawner
from .gone import Proof
from .watching import watch_over

if TYPE_CHECKING:
    from ..broker import Terms

ENDING = 30.0
"""Seconds that Slurm may take to end a job and its epilog to clear away."""

NOW = 1.0
"""Seconds that one answer of Slurm serves who has to know."""

SELDOM = 5.0
"""Seconds that one answer of Slurm serves everybody who asks whether a server lives."""


class GPUSlurmSpawner(GPUDockerSpawner):
    """Leases GPUs of a cluster to containers on its nodes. Servers without a GPU stay on this
    machine's Docker Engine."""

    remove = Bool(
        True,
        config=True,
        help="""
        Whether a server's container is removed when it stops. On a cluster it always is: the next
        start may be on another node. Example::

            c.GPUSlurmSpawner.remove = True
        """,
    )

    job_cgroup = Unicode(
        CGROUP_V1,
        config=True,
        help="""
        The cgroup that a server's container is put into, with ``{node}``, ``{uid}`` and
        ``{job}``: that of its job, so that the job's limits hold for it. Empty leaves it to the
        engine, and the limits are those of the environment alone. Example::

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

    # Where.

    @property
    def delegate(self) -> SlurmDelegate:
        """Slurm, as the broker asks it. Raises ConfigError when the broker does not."""
        found = self.broker.delegate
        if not isinstance(found, SlurmDelegate):
            raise ConfigError(
                'GPUSlurmSpawner needs c.Broker.cluster = "/etc/gpuspawner/cluster.yaml", which '
                "gpuspawner slurm config writes."
            )
        return found

    def _ask(self, request: Request, terms: Terms) -> asyncio.Future[Lease | Ticket]:
        """Also which image the server needs: nodes that lack it are not chosen."""
        images: dict[ServerRef, Wanted] = self.shared("gpuspawner_wanted_images", dict)
        pulls = self.pull_policy.lower() not in ("never", "skip")
        images[self.server_ref] = Wanted(str(self.image), pulls)
        self.delegate.images.wanted = lambda ticket: images.get(ticket.server)
        return super()._ask(request, terms)

    def engine_for(self, request: Request) -> str:
        return self.delegate.engine if request.devices else self.engine_name

    @property
    def node(self) -> Node | None:
        """The node of the server; None for one on this machine."""
        lease = self.lease
        if lease is not None and lease.devices:
            found = self.delegate.cluster.device(lease.devices[0].uuid)
            self._node_name = found[0].name if found else ""
        elif lease is not None:
            self._node_name = ""
        return self.delegate.cluster.node(self._node_name) if self._node_name else None

    def job(self) -> Job | None:
        """The job beside the server."""
        if self.lease is None or not self.lease.ticket_id:
            return None
        return self.delegate.job(self.lease.ticket_id)

    @property
    def engine_settings(self) -> MutableMapping[str, Any]:
        if (node := self.node) is None:
            return self.hub_settings
        kept: MutableMapping[str, Any]
        kept = self.hub_settings.setdefault(f"gpuspawner_node:{node.name}", {})
        return kept

    def connect(self, timeout: float = 60) -> docker.APIClient:
        """A client of the engine that the server is on."""
        if (node := self.node) is None:
            return super().connect(timeout)
        return connector(node, timeout)()

    @property
    def client(self) -> docker.APIClient:
        """The client for DockerSpawner's own calls. Who only looks after a server gives up soon: a
        node that is cut off answers nothing, and everybody's calls share the threads."""
        if self.node is None or self.pending in ("spawn", "stop"):
            return super().client
        kept = self.engine_settings
        made: docker.APIClient | None = kept.get("gpuspawner_quick_client")
        return made or kept.setdefault("gpuspawner_quick_client", self.connect(QUICK))

    def engine(self) -> DockerEngine:
        """This machine's engine, wherever the server is."""
        connect = super().connect
        found: DockerEngine = self.shared("gpuspawner_docker_engine", lambda: DockerEngine(connect))
        return found

    def server_engine(self) -> DockerEngine:
        """The engine of the server's node, whichever node this spawner is on later."""
        if (node := self.node) is None:
            return self.engine()
        found: DockerEngine = self.of_engine(
            "gpuspawner_docker_engine", lambda: DockerEngine(connector(node, 60))
        )
        return found

    def get_state(self) -> dict[str, Any]:
        state = super().get_state()
        if self._node_name:
            state["node"] = self._node_name
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._node_name = state.get("node", "")

    def clear_state(self) -> None:
        super().clear_state()
        self._node_name = ""

    # The container, beside its job.

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        node = self.node
        # Not the throw-away containers that only look at something.
        if method == "create_container" and node is not None and "labels" in kwargs:
            if (job := self.job()) is None or not job.lives:
                raise StartFailed(cause="its job in Slurm has ended")
            kwargs = nest(kwargs, job, node, self.job_cgroup)
        return await super()._call(method, *args, **kwargs)

    async def start(self) -> Any:
        if (node := self.node) is not None:
            self.said.say(f"On the machine {node.name}", 12)
        self._starting = True
        try:
            url = await super().start()
        finally:
            self._starting = False
        if node is not None:
            watch_over(self)
        return url

    # Gone is a server whose job has ended.

    async def poll(self) -> Any:
        if self.node is None or self._starting:
            return await super().poll()
        await self.cleared()
        watch_over(self)
        # First the job: a machine that was lost with it keeps who asks its engine waiting.
        status = await self._poll_job()
        return await super().poll() if status is None else status

    async def _poll_job(self) -> Any:
        """None while the job lives or nobody can say: its container may be out of sight."""
        if self.lease is None or not self.lease.ticket_id:
            return None
        try:
            turns = await self.broker.run_outside(self.delegate.turns, NOW)
        except Unavailable:
            return None
        turn = turns.get(self.lease.ticket_id)
        if turn is None or not turn.over:
            return None  # what Slurm has forgotten is no end: the container says
        if self._over_said != turn.ticket_id:  # the Hub asks several times while it stops one
            self._over_said = turn.ticket_id
            self.log.warning("%s: %s", self.server_ref, turn.over)
        return 1

    async def prove_gone(self) -> Proof:
        """Gone is a server whose container is gone, and then its job; or whose job is gone, where
        the node does not answer."""
        lease = self.lease
        if lease is None or lease.engine != self.delegate.engine or not lease.ticket_id:
            return await super().prove_gone()
        # Its member stopped it: what may have ended the job meanwhile is of no interest.
        over = await self._over(lease.ticket_id, SELDOM if self.stopped_at else NOW)
        own = Proof(gone=True)
        if over is None or over.forgotten:
            own = await super().prove_gone()
            if not own.gone:
                return own
            over = await self._end_job(lease.ticket_id)
        ended_at = over.ended_at or own.ended_at
        if over.ended_at and lease.state is LeaseState.RUNNING:
            # Slurm counts whole seconds: it is never before the container's own end.
            ended_at = max(over.ended_at, own.ended_at or self.stopped_at or over.ended_at)
            self.stopped_at = ended_at
        return Proof(gone=True, ended_at=ended_at, detail=own.detail or over.detail)

    async def _over(self, ticket_id: str, age: float = NOW) -> Proof | None:
        """How the job of a ticket ended; None while it lives. Raises EngineUnavailable."""
        try:
            turns = await self.broker.run_outside(self.delegate.turns, age)
        except Unavailable as error:
            raise EngineUnavailable() from error
        turn = turns.get(ticket_id)
        if turn is None:
            return Proof(gone=True, forgotten=True)
        return Proof(gone=True, ended_at=turn.ended_at, detail=turn.over) if turn.over else None

    async def _end_job(self, ticket_id: str) -> Proof:
        """Cancel the job and wait until Slurm has cleared away behind it."""
        try:
            await self.broker.run_outside(self.delegate.cancel, ticket_id)
        except Unavailable as error:
            raise EngineUnavailable() from error
        deadline = asyncio.get_running_loop().time() + ENDING
        while (over := await self._over(ticket_id)) is None:
            if asyncio.get_running_loop().time() > deadline:
                raise EngineUnavailable()
            await asyncio.sleep(0.25)
        return Proof(gone=True, ended_at=over.ended_at)
