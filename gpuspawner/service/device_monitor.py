"""The duties for devices: samples, idle servers, and containers that lost their GPUs.

Stops ordered here are carried out by the session duty, until the server is gone.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial

from ..core.aio import side_by_side
from ..core.errors import EngineUnavailable, GPUSpawnerError, Unavailable
from ..devices.simulated import SimulatedSampler
from ..devices.source import Sampler, SamplingSource
from ..engines.base import ProcessOwners
from ..engines.docker import DockerEngine
from ..engines.gpu_loss import LostDevices, cause_and_remedy
from ..leases.gpu_loss import KEPT, Restart
from ..leases.models import Lease, ServerRef
from ..monitoring.models import Sample
from ..monitoring.service import GPUMonitoring
from .health_monitor import health_duty
from .hub_client import StartAnswer
from .sampler import Sampling
from .supervisor import Supervisor
from .worker import Round, Tick, TickDuty


class IdleDuty(TickDuty):
    """Warns of idle GPUs, and has their servers stopped."""

    async def round(self) -> None:
        """Judge every server with GPUs, once the Hub has said when it last had output."""
        held = await self.services.run(self.services.idle.holding_gpus)
        if not held:
            return
        output: dict[ServerRef, datetime | None] = {}
        for lease in held:
            try:
                output[lease.server] = await self.tick.hub.last_activity(lease.server)
            except Unavailable as error:
                self.tick.trouble("Idle GPUs", error)
                break
        else:
            self.tick.well("Idle GPUs")
        for it in await self.services.run(self.services.idle.judge_idle, output):
            if it.event == "stop":
                what = "%s is to be stopped: its GPUs were not used (lease %s)"
                self.log.warning(what, it.lease.server, it.lease.id)
            elif it.event == "warn":
                what = "%s was warned: its GPUs are idle (lease %s)"
                self.log.info(what, it.lease.server, it.lease.id)


WRITE_EVERY = 5.0
"""Seconds between two checks for complete minutes."""
TIDY_EVERY = 120
"""After this many of them, completed hours are summed up and old data is deleted."""
JUDGE_EVERY = 12
"""After this many of them, idle GPUs are judged."""


PROCESSES_EVERY = 60.0
"""Seconds between two lists of the processes on a GPU, the driver's slowest query."""


class GPUSampler:
    """A service that samples the devices of its host, and checks containers that have them."""

    monitoring: GPUMonitoring

    _leases: dict[str, str] | None = None
    samples: Sampling | None = None
    """The sampler of this host's devices, while it runs."""

    def recent_samples(self) -> dict[str, list[Sample]]:
        """Return the newest samples of each device, oldest first; empty without a sampler."""
        return self.samples.recent() if self.samples else {}

    async def watch_devices(
        self, tick: Tick, supervisor: Supervisor, poke: Callable[[], None]
    ) -> None:
        """Sample devices, and check containers, until cancelled."""
        rounds: list[Round] = [(2.0, "Restarts", RestartDuty(tick).round)]
        if seconds := self.monitoring.containers_seconds:
            rounds.append((seconds, "GPUs in containers", GPULossDuty(tick, poke).round))
        await side_by_side(
            supervisor.keep("Use of GPUs", partial(self.remember_use, tick)),
            *(supervisor.keep(x[1], partial(tick.every, *x)) for x in rounds),
        )

    async def remember_use(self, tick: Tick) -> None:
        """Sample, and store complete minutes, until cancelled."""
        services = tick.services
        source = services.watch.source
        if not self.monitoring.sample_seconds or not isinstance(source, SamplingSource):
            return
        sampler = source.sampler(PROCESSES_EVERY)
        sampling = Sampling(sampler, services.clock, self.monitoring.sample_seconds, tick.log)
        self.samples = sampling
        catalog = getattr(self, "catalog", "")  # of the images that are prefetched, if any
        idle, health = IdleDuty(tick), health_duty(tick, sampling, sampler, catalog)
        sampling.start()
        try:
            for number in itertools.count():
                await self._owners(tick, sampling, sampler)
                await self._write(tick, sampling, tidy=number % TIDY_EVERY == 0)
                await tick.round("Sick GPUs", health.round)
                if number % JUDGE_EVERY == 0:
                    await tick.round("Idle GPUs", idle.round)
                await asyncio.sleep(WRITE_EVERY)
        finally:
            await health.close()
            await asyncio.to_thread(sampling.stop)
            await self._write(tick, sampling)

    async def _owners(self, tick: Tick, sampling: Sampling, sampler: Sampler) -> None:
        """Pass on the owners of processes, to the classifier and to the simulation."""
        try:
            leases = await tick.services.run(tick.services.leases.open_leases)
        except GPUSpawnerError as error:
            tick.trouble("Use of GPUs", error)
            return
        if {lease.id: lease.engine_ref for lease in leases} != self._leases:
            self._leases = {lease.id: lease.engine_ref for lease in leases}
            sampling.owners = ProcessOwners(leases)
        if isinstance(sampler, SimulatedSampler) and sampling.owners is not None:
            pids = await asyncio.to_thread(sampling.owners.pids) if leases else {}
            sampler.pids = {
                uuid: pids.get(lease.id, ()) for lease in leases for uuid in lease.uuids
            }

    async def _write(self, tick: Tick, sampling: Sampling, *, tidy: bool = False) -> None:
        services = tick.services
        if trouble := sampling.trouble():
            tick.trouble("Samples of GPUs", Unavailable(trouble))
        else:
            tick.well("Samples of GPUs")
        minutes = sampling.complete()
        with tick.going_on("Use of GPUs", Exception):
            if minutes:
                await services.run(services.monitoring.remember_use, minutes)
                sampling.written(minutes)
            if tidy:
                keep = (self.monitoring.keep_minutes_days, self.monitoring.keep_hours_days)
                await services.run(
                    services.monitoring.tidy_use, *(timedelta(days=number) for number in keep)
                )


AGAIN = 20.0
"""Seconds between two attempts to start a server."""

TRIES = 3
"""After this many attempts, its member is asked to start it."""


class GPULossDuty(TickDuty):
    """Checks containers with GPUs; nothing blocks the event loop."""

    def __init__(self, tick: Tick, poke: Callable[[], None] = lambda: None) -> None:
        super().__init__(tick, poke)
        self.engine = DockerEngine()  # a client of its own: a check may take long
        self.looks = LostDevices(self.engine)
        self._lost: set[str] = set()

    async def round(self) -> None:
        """Check every container that has devices. Raises EngineUnavailable."""
        held = await self.services.run(self.services.idle.holding_gpus)
        held = [lease for lease in held if lease.engine == self.engine.name and lease.engine_ref]
        self._lost &= {lease.id for lease in held}
        if not held:
            return
        found = await asyncio.to_thread(self.looks.surely, held)
        for lease in held:
            if found.get(lease.id) and lease.id not in self._lost:
                await self._tell(lease)

    async def _tell(self, lease: Lease) -> None:
        if await self.services.run(self.services.restarts.tell_lost, lease.id):
            self.poke()
        try:
            why = await asyncio.to_thread(cause_and_remedy, self.engine, lease.engine_ref)
        except EngineUnavailable as error:
            why = str(error)
        gpus = ", ".join(str(device.index) for device in lease.devices)
        what = (
            "%s does not reach its GPUs (%s) any more, though they are leased to it (lease %s). %s"
        )
        self.log.warning(what, lease.server, gpus, lease.id, why)
        self._lost.add(lease.id)


class RestartDuty(TickDuty):
    """Starts servers again that have stopped for a restart."""

    def __init__(self, tick: Tick) -> None:
        super().__init__(tick)
        self._tries: dict[ServerRef, tuple[int, float]] = {}
        """How often each was tried, and when it may be tried again, by the event loop's clock."""

    async def round(self) -> None:
        """Start stopped servers, and give up those that do not return. Raises Unavailable."""
        going_on = await self.services.run(self.services.restarts.all_restarts)
        servers = {each.server for each in going_on}
        self._tries = {server: x for server, x in self._tries.items() if server in servers}
        for each in going_on:
            if not each.is_gone:
                continue
            if self.services.clock() - each.since > KEPT:
                await self._give_up(each, f"it did not start within {KEPT.seconds // 60} minutes")
            else:
                await self._start(each)

    async def _start(self, restart: Restart) -> None:
        tries, not_before = self._tries.get(restart.server, (0, 0.0))
        now = asyncio.get_running_loop().time()
        if now < not_before or await self.tick.hub.server(restart.server):
            return  # it is still stopping, or already starting
        if tries >= TRIES:
            await self._give_up(restart, f"its start failed {TRIES} times")
            return
        self._tries[restart.server] = (tries + 1, now + AGAIN)
        started = await self.tick.hub.start_server(restart.server, None)
        if started is StartAnswer.YES:
            self.log.info("%s starts again with the GPUs that it had", restart.server)
        else:
            await self._give_up(restart, "the Hub does not start it any more")

    async def _give_up(self, restart: Restart, why: str) -> None:
        await self.services.run(self.services.restarts.end_restart, restart.server, why)
        self.log.warning("%s does not start again: %s", restart.server, why)
