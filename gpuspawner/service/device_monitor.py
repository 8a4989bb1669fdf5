"""The duties for devices: samples, sick and lost GPUs, and idle servers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

import docker
from docker.errors import DockerException

from ..catalog.loader import WatchedCatalog
from ..core.aio import side_by_side
from ..core.errors import EngineUnavailable, GPUSpawnerError, Unavailable
from ..devices.models import DeviceProcess
from ..devices.simulated import SimulatedSampler
from ..devices.source import DevicesUnavailable, Sampler, SamplingSource
from ..engines.base import ProcessOwners
from ..engines.device_probe import (
    ProbeNotPossible,
    ProbeResult,
    probe_by_process,
    probe_in_container,
)
from ..engines.docker import DockerEngine, client_from_environment
from ..engines.gpu_loss import LostDevices, cause_and_remedy
from ..leases.gpu_loss import KEPT, Restart
from ..leases.models import Lease, ServerRef
from ..monitoring.health import SymptomWindow
from ..monitoring.health_service import FoundSymptoms
from ..monitoring.models import DeviceUse, RemoteProcess, Rollups, Sample
from ..monitoring.service import GPUMonitoring
from ..slurm.cluster import Node
from ..slurm.images import connector
from ..slurm.scheduler import SlurmDelegate
from .hub_client import StartAnswer
from .lease_meter import LeaseMeter, LeaseOnDevice
from .memory_guard import GUARD_SECONDS, MemoryGuard
from .worker import Round, Supervisor, Tick, TickDuty

if TYPE_CHECKING:
    from ..engines.base import ProcessOwners


KEPT_SECONDS = 300
"""How many samples of each device are kept in memory."""
MOST_MINUTES = 20_000
"""How many complete minutes wait for an unavailable store: a day and a half of eight devices."""
AGAIN_SECONDS = 60.0
"""Seconds until the next attempt after the devices could not be seen."""

Clock = Callable[[], datetime]


class Sampling:
    """The sampling thread, and what it has collected. Call all methods from other threads."""

    def __init__(
        self,
        sampler: Sampler,
        clock: Clock,
        seconds: float,
        log: logging.Logger,
        monotonic: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Each sample is taken at a random moment of its interval, from ``chance()`` (0 to 1).

        A driver's utilization covers only the last fifth of a second, so evenly spaced samples
        could keep in step with a program that computes once a second, and always find it idle.
        """
        self._sampler = sampler
        self._clock = clock
        self._monotonic = monotonic
        self._chance = chance
        self._log = log
        self.seconds = seconds
        self.silent_after = 10 * max(1.0, seconds)
        """After this many seconds without an answer, the driver is reported as not responding."""
        self.owners: ProcessOwners | None = None
        """Owners of the processes on devices; set by code that knows the open leases."""
        self.meter = LeaseMeter()
        self._strange: dict[int, tuple[ProcessOwners, bool]] = {}
        self._rollups = Rollups(self._is_strange)
        self._recent: dict[str, deque[Sample]] = defaultdict(lambda: deque(maxlen=KEPT_SECONDS))
        self._of_leases: dict[LeaseOnDevice, deque[Sample]]
        self._of_leases = defaultdict(lambda: deque(maxlen=KEPT_SECONDS))
        self._complete: deque[DeviceUse] = deque(maxlen=MOST_MINUTES)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._answered_at = monotonic()
        self._error = ""

    def start(self) -> None:
        """Start the thread, which does not keep the process alive: it may hang in the driver."""
        self._thread = threading.Thread(target=self._run, name="sampling", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """Stop after the present sample; incomplete minutes count as complete."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return  # it hangs in the driver, and may still be adding
        with self._lock:
            self._complete.extend(self._rollups.rest())

    def recent(self) -> dict[str, list[Sample]]:
        """Return the newest samples of each device, oldest first."""
        with self._lock:
            return {uuid: list(samples) for uuid, samples in self._recent.items()}

    def recent_of_leases(self) -> dict[LeaseOnDevice, list[Sample]]:
        """Return the newest samples of each lease on a device that others may share."""
        with self._lock:
            return {key: list(samples) for key, samples in self._of_leases.items()}

    def trouble(self) -> str:
        """Return why there are no samples, as a sentence; empty if there are."""
        if self._error:
            return self._error
        silent = self._monotonic() - self._answered_at
        if silent > self.silent_after:
            return f"The driver has not answered for {silent:.0f} s; the use of GPUs is not known"
        return ""

    def complete(self) -> list[DeviceUse]:
        """Return the complete minutes that were not stored yet, oldest first."""
        with self._lock:
            return list(self._complete)

    def written(self, minutes: list[DeviceUse]) -> None:
        """Record that these minutes are in the store."""
        done = {id(minute) for minute in minutes}
        with self._lock:
            left = [minute for minute in self._complete if id(minute) not in done]
            self._complete = deque(left, maxlen=MOST_MINUTES)

    # In the thread.

    def _run(self) -> None:
        due = self._monotonic()
        while not self._stop.is_set():
            pause = self.seconds if self._look() else max(self.seconds, AGAIN_SECONDS)
            due += pause
            now = self._monotonic()
            if due < now:  # the driver was slow: missed samples are skipped
                due += (now - due) // self.seconds * self.seconds + self.seconds
            self._stop.wait(due + self._chance() * self.seconds - now)

    def _look(self) -> bool:
        try:
            samples = self._sampler.sample(self._clock(), self._monotonic())
        except DevicesUnavailable as lost:
            self._error = str(lost)
            self._answered_at = self._monotonic()
            return False
        except Exception as error:  # whatever a driver does, the next round follows
            if not self._error:
                self._log.exception("Sampling the GPUs failed")
            self._error = f"The use of GPUs cannot be read: {error!r}"
            return False
        self._error = ""
        self._answered_at = self._monotonic()
        of_leases = self.meter.divide(samples)
        with self._lock:
            for sample in samples:
                self._recent[sample.uuid].append(sample)
            for key in self._of_leases.keys() - self.meter.keys:
                del self._of_leases[key]
            for sample in of_leases:
                self._of_leases[sample.uuid, sample.lease_id].append(sample)
            self._complete.extend(self._rollups.add([*samples, *of_leases]))
        return True

    def _is_strange(self, process: DeviceProcess) -> bool:
        """Return True if a process has no lease; reads ``/proc`` once per set of open leases."""
        if isinstance(process, RemoteProcess):
            return process.strange
        if (owners := self.owners) is None:
            return False  # the owners are not known yet
        asked = self._strange.get(process.pid)
        if asked is None or asked[0] is not owners:
            if len(self._strange) > 1000:
                self._strange.clear()
            asked = self._strange[process.pid] = (owners, owners.lease_of(process.pid) is None)
        return asked[1]


ENGINE_SECONDS = 60.0
"""Seconds that the engine may take to answer a query."""

LEAKS_EVERY = 6
"""Rounds between two searches for devices occupied without a lease, which list processes."""

ONCE_MORE = 15.0
"""Seconds until a new probe, if the result could not be stored or passed on."""

Probe = Callable[[str], ProbeResult]
"""Probes the device with this UUID. Blocks. Raises ProbeNotPossible."""


def health_duty(tick: Tick, sampling: Sampling, sampler: Sampler, catalog: str = "") -> HealthDuty:
    """Return the judge of this host's samples; ``catalog`` names images for its probes."""
    injection = _injection(tick)

    def probe(uuid: str) -> ProbeResult:
        if isinstance(sampler, SimulatedSampler):
            if failure := sampler.fails_probe(uuid):
                return ProbeResult(failure.rstrip("."))
            if injection in ("auto", "process", "none"):
                return ProbeResult(text="a simulated device")
        if injection in ("process", "none"):
            if _node_of(tick, uuid):
                raise ProbeNotPossible("servers of this hub get no GPUs of the cluster's machines")
            return probe_by_process(uuid)
        return _probe_in_container(tick, catalog, uuid)

    return HealthDuty(tick, sampling, probe)


def _injection(tick: Tick) -> str:
    """Return how servers get their GPUs, as ``add_services`` says; probes do the same."""
    return str(tick.services.config.GPUDockerSpawner.get("gpu_injection", "auto"))


def _probe_in_container(tick: Tick, catalog: str, uuid: str) -> ProbeResult:
    image = str(tick.services.config.GPUDockerSpawner.get("image", ""))
    try:
        known = WatchedCatalog(catalog, tick.log).current().environments if catalog else ()
        images = [image, *(image for each in known for image in each.images)]
        client = _engine_of(tick, uuid)
    except (GPUSpawnerError, DockerException, OSError) as error:
        raise ProbeNotPossible(str(error)) from error
    with closing(client):
        return probe_in_container(client, images, _injection(tick), uuid)


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
                self.log.warning("Device %s is back in service: %s", uuid, found.text)


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
KEEP_MINUTES = timedelta(days=14)
"""How long use is kept by the minute: long enough to look into last week's complaint."""
KEEP_HOURS = timedelta(days=400)
"""How long use is kept by the hour: a year and the month to compare it with."""
CONTAINERS_SECONDS = 45.0
"""Seconds between two checks that containers reach their GPUs; each starts a process in them."""


PROCESSES_SECONDS = 60.0
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

    def recent_lease_samples(self) -> dict[LeaseOnDevice, list[Sample]]:
        """Return the newest samples of each lease on a shared device, oldest first."""
        return self.samples.recent_of_leases() if self.samples else {}

    async def watch_devices(
        self, tick: Tick, supervisor: Supervisor, poke: Callable[[], None]
    ) -> None:
        """Sample devices, and check containers, until cancelled."""
        rounds: list[Round] = [
            (2.0, "Restarts", RestartDuty(tick).round),
            (CONTAINERS_SECONDS, "GPUs in containers", GPULossDuty(tick, poke).round),
        ]
        await side_by_side(
            supervisor.keep("Use of GPUs", partial(self.remember_use, tick, poke)),
            *(supervisor.keep(x[1], partial(tick.every, *x)) for x in rounds),
        )

    async def remember_use(self, tick: Tick, poke: Callable[[], None] = lambda: None) -> None:
        """Sample, and store complete minutes, until cancelled."""
        services = tick.services
        source = services.watch.source
        if not self.monitoring.sample_seconds or not isinstance(source, SamplingSource):
            return
        sampler = source.sampler(PROCESSES_SECONDS)
        sampling = Sampling(sampler, services.clock, self.monitoring.sample_seconds, tick.log)
        self.samples = sampling
        catalog = getattr(self, "catalog", "")  # of the images that are prefetched, if any
        idle, health = IdleDuty(tick), health_duty(tick, sampling, sampler, catalog)
        guard = MemoryGuard(tick, sampler, sampling.recent, poke)
        guarding = asyncio.create_task(tick.every(GUARD_SECONDS, "Memory guard", guard.round))
        sampling.start()
        try:
            for number in itertools.count():
                await self._owners(tick, sampling, sampler, guard)
                await self._write(tick, sampling, tidy=number % TIDY_EVERY == 0)
                await tick.round("Sick GPUs", health.round)
                if number % JUDGE_EVERY == 0:
                    await tick.round("Idle GPUs", idle.round)
                await asyncio.sleep(WRITE_EVERY)
        finally:
            guarding.cancel()
            await asyncio.gather(guarding, return_exceptions=True)
            await health.close()
            await asyncio.to_thread(sampling.stop)
            await self._write(tick, sampling)

    async def _owners(
        self, tick: Tick, sampling: Sampling, sampler: Sampler, guard: MemoryGuard
    ) -> None:
        """Pass on the owners of processes, to the classifier and to the simulation."""
        try:
            leases = await tick.services.run(tick.services.leases.open_leases)
        except GPUSpawnerError as error:
            tick.trouble("Use of GPUs", error)
            return
        guard.follow(leases)
        if {lease.id: lease.engine_ref for lease in leases} != self._leases:
            self._leases = {lease.id: lease.engine_ref for lease in leases}
            sampling.owners = ProcessOwners(leases)
            sampling.meter.follow(leases, sampling.owners)
        if isinstance(sampler, SimulatedSampler) and sampling.owners is not None:
            pids = await asyncio.to_thread(sampling.owners.pids) if leases else {}
            on_device: dict[str, list[int]] = defaultdict(list)
            for lease in leases:
                for uuid in lease.uuids:
                    on_device[uuid] += pids.get(lease.id, [])
            sampler.pids = on_device

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
                await services.run(services.monitoring.tidy_use, KEEP_MINUTES, KEEP_HOURS)


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
            await self._give_up(restart, "the Hub no longer starts it")

    async def _give_up(self, restart: Restart, why: str) -> None:
        await self.services.run(self.services.restarts.end_restart, restart.server, why)
        self.log.warning("%s does not start again: %s", restart.server, why)
