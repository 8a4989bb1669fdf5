"""Servers on nodes, looked at all together and often: one question for all of them.

JupyterHub polls each server by itself twice a minute. A server whose machine was lost, or whose
container died, keeps GPUs from others until somebody looks.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING
from weakref import WeakSet

from ..errors import GPUSpawnerError

if TYPE_CHECKING:
    from .slurm import GPUSlurmSpawner

EVERY = 1.5
"""Seconds between two looks while any server runs on a node."""

KEY = "gpuspawner_watched"


class Watched:
    """The servers of a hub that run on nodes."""

    def __init__(self) -> None:
        self.servers: WeakSet[GPUSlurmSpawner] = WeakSet()
        self._task: asyncio.Task[None] | None = None

    def add(self, spawner: GPUSlurmSpawner) -> None:
        self.servers.add(spawner)
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while self.servers:
            await asyncio.sleep(EVERY)
            with contextlib.suppress(GPUSpawnerError):
                await self._look()

    async def _look(self) -> None:
        """Have the Hub ask after each server that is not there any more."""
        by_lease = {spawner.lease_id: spawner for spawner in self.servers if spawner.lease_id}
        self.servers = WeakSet(by_lease.values())
        if not by_lease:
            return
        spawner = next(iter(by_lease.values()))
        engine = spawner.shared("gpuspawner_nodes", spawner.broker.delegated_engine)
        running = await spawner.broker.run_outside(engine.running)
        for lease_id, each in by_lease.items():
            if lease_id not in running and each.active and not each.pending:
                each.log.info("%s is not there any more: asking after it", each.server_ref)
                await each.poll_and_notify()


def watch_over(spawner: GPUSlurmSpawner) -> None:
    """Notice soon when this server is gone."""
    watched: Watched = spawner.shared(KEY, Watched)
    watched.add(spawner)
