"""The service's part in what devices do: it samples them, and remembers their minutes."""

from __future__ import annotations

import asyncio
import itertools

from traitlets import Bool, Float

from ..devices.base import Sampled, Sampler
from ..devices.simulated_samples import SimulatedSampler
from ..engines.owners import Owners
from ..errors import GPUSpawnerError, Unavailable
from ..telemetry import Sample
from .health import ProbesDevices
from .idle import IdleDuty
from .sampling import Sampling, days
from .tick import Tick

WRITE_EVERY = 5.0
"""Seconds between two looks for minutes that are complete."""
TIDY_EVERY = 120
"""After so many of them it looks for hours that are over and for what is older than is kept."""
JUDGE_EVERY = 12
"""After so many of them it judges which GPUs rest."""


class SamplesUse(ProbesDevices):
    """A service that samples the devices of its host."""

    sample_seconds = Float(
        1.0,
        min=0.0,
        config=True,
        help="""
        Seconds between two samples of what each GPU does. 0: none are taken, and nothing that
        needs them works. Example::

            c.Accounting.sample_seconds = 2
        """,
    )

    processes_seconds = Float(
        60.0,
        min=30.0,
        config=True,
        help="""
        Seconds between two lists of the processes on a GPU: the slowest question to a driver, so
        at least 30. Example::

            c.Accounting.processes_seconds = 120
        """,
    )

    keep_minutes_days = Float(
        14.0,
        min=1.0,
        config=True,
        help="""
        Days for which each minute of each GPU is kept. After that there are hours.

        Example::

            c.Accounting.keep_minutes_days = 30
        """,
    )

    keep_hours_days = Float(
        400.0,
        min=1.0,
        config=True,
        help="""
        Days for which each hour of each GPU is kept.

        Example::

            c.Accounting.keep_hours_days = 1200
        """,
    )

    members_see_names = Bool(
        False,
        config=True,
        help="""
        Whether the page of the cluster tells members who has a GPU. Admins always see it, and
        everybody what is theirs. Example::

            c.Accounting.members_see_names = True
        """,
    )

    _leases: dict[str, str] | None = None
    samples: Sampling | None = None
    """What samples the devices of this host, while something does."""

    def recent_samples(self) -> dict[str, list[Sample]]:
        """The newest samples of each device, the oldest first; none where nothing samples."""
        return self.samples.recent() if self.samples else {}

    async def remember_use(self, tick: Tick) -> None:
        """Sample, and write what is complete, until it is cancelled."""
        broker = tick.broker
        source = broker.watch.source
        if not self.sample_seconds or not isinstance(source, Sampled):
            return
        sampler = source.sampler(self.processes_seconds)
        sampling = Sampling(sampler, broker.clock, self.sample_seconds, tick.log)
        self.samples = sampling
        idle, health = IdleDuty(tick), self.health_duty(tick, sampling, sampler)
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
        """Tell whose processes are, to who asks NVML and to who simulates it."""
        try:
            leases = await tick.broker.run(tick.broker.open_leases)
        except GPUSpawnerError as error:
            tick.trouble("Use of GPUs", error)
            return
        if {lease.id: lease.engine_ref for lease in leases} != self._leases:
            self._leases = {lease.id: lease.engine_ref for lease in leases}
            sampling.owners = Owners(leases)
        if isinstance(sampler, SimulatedSampler) and sampling.owners is not None:
            pids = await asyncio.to_thread(sampling.owners.pids) if leases else {}
            sampler.pids = {
                uuid: pids.get(lease.id, ()) for lease in leases for uuid in lease.uuids
            }

    async def _write(self, tick: Tick, sampling: Sampling, *, tidy: bool = False) -> None:
        broker = tick.broker
        if trouble := sampling.trouble():
            tick.trouble("Samples of GPUs", Unavailable(trouble))
        else:
            tick.well("Samples of GPUs")
        minutes = sampling.complete()
        try:
            if minutes:
                await broker.run(broker.remember_use, minutes)
                sampling.written(minutes)
            if tidy:
                keep = (days(self.keep_minutes_days), days(self.keep_hours_days))
                await broker.run(broker.tidy_use, *keep)
        except GPUSpawnerError as error:
            tick.trouble("Use of GPUs", error)
        except Exception as error:
            tick.trouble("Use of GPUs", error, trace=True)
        else:
            tick.well("Use of GPUs")
