"""The service's part in containers that do not reach their devices any more: it looks into them,
tells who is concerned, and brings servers back that are to start again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial

from traitlets import Float

from ..broker.restarting import KEPT, Restart
from ..engines import DockerEngine
from ..engines.lost import LostDevices, cause_and_remedy
from ..errors import EngineUnavailable
from ..model import Lease, ServerRef
from ..patience import side_by_side
from .hub import Started
from .supervisor import Supervisor
from .tick import Round, Tick
from .use import SamplesUse

RESTARTS_EVERY = 2.0
"""Seconds between two looks for servers that are to start again."""

AGAIN = 20.0
"""Seconds between two tries to start one."""

TRIES = 3
"""After so many its member is asked to do it."""


class WatchesContainers(SamplesUse):
    """A service that looks into the containers that have devices."""

    look_inside_seconds = Float(
        45.0,
        min=0.0,
        config=True,
        help="""
        Seconds between two looks into each container that has GPUs, whether it still reaches
        them: one small process in it that opens them and ends. 0: nobody looks. Example::

            c.Accounting.look_inside_seconds = 120
        """,
    )

    async def watch_devices(
        self, tick: Tick, supervisor: Supervisor, poke: Callable[[], None]
    ) -> None:
        """Sample devices, and look into containers, until it is cancelled."""
        rounds: list[Round] = [(RESTARTS_EVERY, "Restarts", Restarting(tick).round)]
        if self.look_inside_seconds:
            lost = Lost(tick, poke)
            rounds.append((self.look_inside_seconds, "GPUs in containers", lost.round))
        await side_by_side(
            supervisor.keep("Use of GPUs", partial(self.remember_use, tick)),
            *(supervisor.keep(x[1], partial(tick.every, *x)) for x in rounds),
        )


class Lost:
    """Rounds of looking, one after the other; none of it on the event loop."""

    def __init__(self, tick: Tick, poke: Callable[[], None] = lambda: None) -> None:
        self.tick = tick
        self.broker = tick.broker
        self.poke = poke
        self.engine = DockerEngine()  # a client of its own: a look may take long
        self.looks = LostDevices(self.engine)
        self._lost: set[str] = set()

    async def round(self) -> None:
        """Look into every container that has devices. Raises EngineUnavailable."""
        held = await self.broker.run(self.broker.holding_gpus)
        held = [lease for lease in held if lease.engine == self.engine.name and lease.engine_ref]
        self._lost &= {lease.id for lease in held}
        if not held:
            return
        found = await asyncio.to_thread(self.looks.surely, held)
        for lease in held:
            if found.get(lease.id) and lease.id not in self._lost:
                await self._tell(lease)

    async def _tell(self, lease: Lease) -> None:
        if await self.broker.run(self.broker.tell_lost, lease.id):
            self.poke()
        try:
            why = await asyncio.to_thread(cause_and_remedy, self.engine, lease.engine_ref)
        except EngineUnavailable as error:
            why = str(error)
        gpus = ", ".join(str(device.index) for device in lease.devices)
        what = (
            "%s does not reach its GPUs (%s) any more, though they are leased to it (lease %s). %s"
        )
        self.tick.log.warning(what, lease.server, gpus, lease.id, why)
        self._lost.add(lease.id)


class Restarting:
    """Rounds in which servers that have stopped for it are started again."""

    def __init__(self, tick: Tick) -> None:
        self.tick = tick
        self.broker = tick.broker
        self._tries: dict[ServerRef, tuple[int, float]] = {}
        """How often each was tried, and when it may be again, by the event loop's clock."""

    async def round(self) -> None:
        """Start who has stopped; give up who did not come back. Raises Unavailable."""
        going_on = await self.broker.run(self.broker.restarts)
        self._forget_all_but({each.server for each in going_on})
        for each in going_on:
            if not each.is_gone:
                continue
            if self.broker.clock() - each.since > KEPT:
                await self._give_up(each, f"it did not start within {KEPT.seconds // 60} minutes")
            else:
                await self._start(each)

    async def _start(self, restart: Restart) -> None:
        tries, not_before = self._tries.get(restart.server, (0, 0.0))
        now = asyncio.get_running_loop().time()
        if now < not_before or await self.tick.hub.server(restart.server):
            return  # it stops still, or starts already
        if tries >= TRIES:
            await self._give_up(restart, f"its start failed {TRIES} times")
            return
        self._tries[restart.server] = (tries + 1, now + AGAIN)
        started = await self.tick.hub.start_server(restart.server, None)
        if started is Started.YES:
            self.tick.log.info("%s starts again with the GPUs that it had", restart.server)
        else:
            await self._give_up(restart, "the Hub does not start it any more")

    async def _give_up(self, restart: Restart, why: str) -> None:
        await self.broker.run(self.broker.end_restart, restart.server, why)
        self.tick.log.warning("%s does not start again: %s", restart.server, why)

    def _forget_all_but(self, servers: Collection[ServerRef]) -> None:
        self._tries = {server: x for server, x in self._tries.items() if server in servers}
