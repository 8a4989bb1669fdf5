"""The duty for sick GPUs: judges samples, and probes sick GPUs.

Verdicts, drains, warnings and refunds are in the store and its services; a restart only loses what
the driver reported in the last seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing

import docker
from docker.errors import DockerException

from ..catalog.loader import WatchedCatalog
from ..core.errors import GPUSpawnerError, Unavailable
from ..devices.simulated import SimulatedSampler
from ..devices.source import Sampler
from ..engines.device_probe import (
    ProbeNotPossible,
    ProbeResult,
    probe_by_process,
    probe_in_container,
)
from ..engines.docker import client_from_environment
from ..monitoring.health import SymptomWindow
from ..monitoring.health_service import FoundSymptoms
from ..monitoring.models import Sample
from ..slurm.cluster import Node
from ..slurm.images import connector
from ..slurm.scheduler import SlurmDelegate
from .sampler import Sampling
from .worker import Tick, TickDuty

ENGINE_SECONDS = 60.0
"""Seconds that the engine may take to answer a query."""

LEAKS_EVERY = 6
"""After this many rounds, occupied devices without a lease are searched, which lists processes."""

ONCE_MORE = 15.0
"""Seconds until a new probe, if the result could not be stored or passed on."""

Probe = Callable[[str], ProbeResult]
"""Probes the device with this UUID. Blocks. Raises ProbeNotPossible."""


def health_duty(tick: Tick, sampling: Sampling, sampler: Sampler, catalog: str = "") -> HealthDuty:
    """Return the judge of this host's samples; ``catalog`` names images for its probes."""
    injection = tick.services.settings.health.probe_injection

    def probe(uuid: str) -> ProbeResult:
        if isinstance(sampler, SimulatedSampler):
            if failure := sampler.fails_probe(uuid):
                return ProbeResult(failure.rstrip("."))
            if injection in ("auto", "process", "none"):
                return ProbeResult(text="a simulated device")
        if injection in ("process", "none"):
            if _node_of(tick, uuid):
                how = f"c.GPUHealth.probe_injection is {injection!r}"
                raise ProbeNotPossible(f"{how}, and it is on a machine of the cluster")
            return probe_by_process(uuid)
        return _probe_in_container(tick, catalog, uuid)

    return HealthDuty(tick, sampling, probe)


def _probe_in_container(tick: Tick, catalog: str, uuid: str) -> ProbeResult:
    settings = tick.services.settings.health
    try:
        known = WatchedCatalog(catalog, tick.log).current().environments if catalog else ()
        images = [settings.probe_image, *(image for each in known for image in each.images)]
        client = _engine_of(tick, uuid)
    except (GPUSpawnerError, DockerException, OSError) as error:
        raise ProbeNotPossible(str(error)) from error
    with closing(client):
        return probe_in_container(client, images, settings.probe_injection, uuid)


class HealthDuty(TickDuty):
    """Rounds of this duty, one after the other; probes run beside them."""

    def __init__(self, tick: Tick, sampling: Sampling, probe: Probe) -> None:
        super().__init__(tick)
        self.sampling = sampling
        self._probe = probe
        self._signs: dict[str, SymptomWindow] = {}
        self._last: dict[str, Sample] = {}
        self._rounds = 0
        self._probing: dict[str, asyncio.Task[None]] = {}

    async def round(self) -> None:
        """Judge new samples, and refund ended leases on sick devices. Raises StoreUnavailable."""
        signs = self._new()
        found = {uuid: FoundSymptoms(its.look(), its.going_on) for uuid, its in signs.items()}
        if found:
            for change in await self.services.run(self.services.health.judge_health, found):
                if change.event == "sick":
                    what = "Device %s is sick: %s. It gets no new servers; members told: %s"
                    told = ", ".join(str(lease.server) for lease in change.told) or "none"
                    self.log.warning(what, change.uuid, change.reason, told)
                elif change.event == "probe":
                    self._begin_probe(change.uuid)
            for its in signs.values():
                its.judged()
        await self.services.run(self.services.health.settle_sick)
        if self._rounds % LEAKS_EVERY == 0:
            await self.services.run(self.services.leaks.judge_leaks)
        self._rounds += 1
        self.tick.well("Sick GPUs")

    async def close(self) -> None:
        """Abandon running probes: the next service makes new ones."""
        probing = list(self._probing.values())
        for task in probing:
            task.cancel()
        await asyncio.gather(*probing, return_exceptions=True)

    def _new(self) -> dict[str, SymptomWindow]:
        """Return the devices with new samples, and all symptoms found."""
        found = {}
        for uuid, samples in self.sampling.recent().items():
            fresh = _after(samples, self._last.get(uuid))
            if fresh:
                self._last[uuid] = fresh[-1]
                found[uuid] = self._signs.setdefault(uuid, SymptomWindow())
                found[uuid].add(fresh)
        return found

    def _begin_probe(self, uuid: str) -> None:
        if uuid not in self._probing:
            task = asyncio.ensure_future(self._try(uuid))
            self._probing[uuid] = task
            task.add_done_callback(lambda _: self._probing.pop(uuid, None))

    async def _try(self, uuid: str) -> None:
        part = f"Probe of {uuid}"
        try:
            found = await asyncio.to_thread(self._probe, uuid)
            done = await self.services.run(self.services.health.probed, uuid, found.failure)
        except ProbeNotPossible as reason:
            said = f"it stays out of service, and is probed again later: {reason}"
            self.tick.trouble(part, Unavailable(said))
        except Unavailable as error:
            self.tick.trouble(part, error)
            await asyncio.sleep(ONCE_MORE)  # it passed, and others may be back by then
        except Exception as error:
            self.tick.trouble(part, error)
        else:
            self.tick.well(part)
            if done and found.failure:
                self.log.warning("Device %s failed its probe: %s", uuid, found.failure)
            elif done:
                self.log.warning("Device %s is given out again: %s", uuid, found.text)


def _node_of(tick: Tick, uuid: str) -> Node | None:
    """Return the cluster node with a device; None for this host."""
    delegate = tick.services.delegation.delegate
    found = delegate.cluster.device(uuid) if isinstance(delegate, SlurmDelegate) else None
    return found[0] if found else None


def _engine_of(tick: Tick, uuid: str) -> docker.APIClient:
    """Return a client of the engine on the device's machine. Raises DockerException or OSError."""
    if node := _node_of(tick, uuid):
        return connector(node, ENGINE_SECONDS)()
    return client_from_environment(ENGINE_SECONDS)


def _after(samples: Sequence[Sample], last: Sample | None) -> Sequence[Sample]:
    """Return the samples after the last one seen, even if the clock was set."""
    for number in range(len(samples) - 1, -1, -1):
        if samples[number] is last:
            return samples[number + 1 :]
    return samples
