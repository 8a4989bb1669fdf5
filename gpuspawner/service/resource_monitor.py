"""The duties for what servers and runs use of CPU, memory, disk and network.

Every engine reads the cgroups of its own containers, of both versions, and reports when the system
ended a program because memory was used up. An engine that does not respond delays no other one, and
a container that does not respond no other container: its figures are unknown until the next round.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection
from functools import partial

from ..core.aio import in_daemon_thread
from ..core.errors import EngineUnavailable
from ..engines.docker import DockerEngine
from ..engines.resource_use import MemoryKill
from ..leases.models import Lease
from ..monitoring.resource_service import ContainerSample
from .machines import MachineDuty, Machines, machines_with_engines
from .worker import Round, Tick

SAMPLE_SECONDS = 30.0
"""Seconds between two samples of each container. One more is taken before a stop: last_sample."""
KILLS_SECONDS = 5.0
"""Seconds between two looks for programs that the system ended: members wonder what happened."""
PATIENCE_SECONDS = 20.0
"""Seconds that an engine may take for an answer."""
ROUND_SECONDS = 5.0
"""Seconds that a round waits for answers; later ones belong to the next round."""
AT_ONCE = 8
"""How many containers of one engine are sampled at the same time."""

_in_thread = partial(in_daemon_thread, "gpuspawner-resources")


class ResourceDuty(MachineDuty):
    """Samples the containers of all leases, and looks for programs that the system ended."""

    def __init__(
        self, tick: Tick, machines: Machines, poke: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(tick, machines, poke)
        self._machines = {name: _Machine(self, name, it) for name, it in self.engines.items()}
        self._looks: dict[str, asyncio.Task[None]] = {}
        """Unfinished looks for kills, by machine."""

    async def sample(self) -> None:
        """Sample every container once. Raises StoreUnavailable."""
        leases = await self._with_container()
        rounds = (machine.sample(leases[name]) for name, machine in self._machines.items())
        samples = [each for some in await asyncio.gather(*rounds) for each in some]
        if samples:
            await self.services.run(self.services.resources.record, samples)

    async def look_for_kills(self) -> None:
        """Tell the members whose programs the system ended. Raises StoreUnavailable."""
        leases = await self._with_container()
        for name, machine in self._machines.items():
            if name not in self._looks:
                self._looks[name] = asyncio.ensure_future(machine.look(leases[name]))
        if self._looks:
            await asyncio.wait(self._looks.values(), timeout=ROUND_SECONDS)
        done = [self._looks.pop(name) for name, task in list(self._looks.items()) if task.done()]
        for task in done:
            task.result()

    async def _with_container(self) -> dict[str, list[Lease]]:
        """Return the open leases with a container, by machine."""
        found = await self.leases()
        return {name: [x for x in some.values() if x.engine_ref] for name, some in found.items()}


class _Machine:
    """One engine and its containers."""

    def __init__(self, duty: ResourceDuty, name: str, engine: DockerEngine) -> None:
        self._duty = duty
        self._engine = engine
        self._resources, self._memory = f"Resources of {name}", f"Memory of {name}"
        self._sampling: dict[str, asyncio.Task[ContainerSample | None]] = {}
        """Unfinished samples, by lease id."""
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._known: set[MemoryKill] = set()
        """Kills in the last look that are already noted."""
        self._waiting: set[MemoryKill] = set()
        """Kills in runs, which are noted at the next look."""
        self._had_leases = False

    async def sample(self, leases: Collection[Lease]) -> list[ContainerSample]:
        """Return the samples that are there in time, and those that were late last time."""
        for lease in leases:
            if lease.id not in self._sampling:
                self._sampling[lease.id] = asyncio.ensure_future(self._sample_one(lease))
        if self._sampling:
            await asyncio.wait(self._sampling.values(), timeout=ROUND_SECONDS)
        done = {name: task for name, task in self._sampling.items() if task.done()}
        for name in done:
            del self._sampling[name]
        samples, failed = [], None
        for task in done.values():
            try:
                samples.append(task.result())
            except EngineUnavailable as error:
                failed = error
        if failed is not None:
            self._duty.tick.trouble(self._resources, failed)
        elif samples:
            self._duty.tick.well(self._resources)
        return [sample for sample in samples if sample]

    async def _sample_one(self, lease: Lease) -> ContainerSample | None:
        """Return what a lease's container uses; None if it is not running."""
        ref = lease.engine_ref
        async with self._gate:
            use = await _in_thread(lambda: self._engine.resource_use(ref))
        return ContainerSample(lease.id, ref, use) if use else None

    async def look(self, leases: Collection[Lease]) -> None:
        """Look once for new kills, also after the last lease has ended."""
        if not leases and not self._had_leases:
            return
        try:
            kills = set(await _in_thread(self._engine.memory_kills))
            self._had_leases = bool(leases)
            open_runs = {lease.id for lease in leases if lease.server.run_id}
            # A kill may end a run, and then the notice about the run's end mentions it.
            new = kills - self._known
            waiting = {kill for kill in new - self._waiting if kill.lease_id in open_runs}
            by_container: dict[tuple[str, str], list[MemoryKill]] = defaultdict(list)
            for kill in new - waiting:
                by_container[kill.lease_id, kill.container_id].append(kill)
            for (lease_id, container_id), some in by_container.items():
                await self._note(lease_id, container_id, some)
            self._known, self._waiting = kills - waiting, waiting
        except EngineUnavailable as error:
            self._duty.tick.trouble(self._memory, error)
        else:
            self._duty.tick.well(self._memory)

    async def _note(self, lease_id: str, container_id: str, kills: Collection[MemoryKill]) -> None:
        use = await _in_thread(lambda: self._engine.resource_use(container_id))
        limit = await _in_thread(lambda: self._engine.memory_limit(container_id))
        note = partial(
            self._duty.services.resources.note_kills,
            used_bytes=use.memory_highest_bytes if use else None,
            limit_bytes=limit,
        )
        if await self._duty.services.run(note, lease_id, kills):
            self._duty.poke()


def resource_rounds(tick: Tick, poke: Callable[[], None]) -> list[Round]:
    """Return the duties for this machine's engine, and for those of a cluster."""
    where = ("", " on nodes")
    machines = machines_with_engines(tick.services, PATIENCE_SECONDS)
    rounds: list[Round] = []
    for on_nodes, each in zip(where, machines, strict=False):
        duty = ResourceDuty(tick, each, poke)
        rounds.append((SAMPLE_SECONDS, f"Use of resources{on_nodes}", duty.sample))
        rounds.append((KILLS_SECONDS, f"Out of memory{on_nodes}", duty.look_for_kills))
    return rounds
