"""The duties for disks: measure containers, so that none fills the engine's disk, and workspaces.

Servers that wrote too much are stopped before the disk is full. Only the engine knows a container's
size, and it visits every file to find out. So it is asked rarely, unless the disk's free space
decreases: no server can have written more than that.

Workspaces are measured for the page that lists them. That visits every file too, so directories are
measured one at a time, with pauses, and never while somebody waits for a page.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from docker.errors import NotFound

from ..core.aio import in_daemon_thread
from ..core.errors import EngineUnavailable, Unavailable
from ..engines.disk_usage import SPARE, LimitedContainer, limited, room, size, written_bytes
from ..engines.docker import DockerEngine, client_from_environment
from ..engines.scratch import remove_unused
from ..leases.models import Lease
from ..storage.directories import volume_sizes
from ..storage.repository import Workspace
from .machines import HERE, MachineDuty, Machines, machines_with_engines
from .worker import Round, Tick, TickDuty

T = TypeVar("T")

LOOK_SECONDS = 2.0
"""Seconds between two checks of the disk's free space."""
SELDOM_SECONDS = 60.0
"""Seconds between two measurements while the free space does not decrease."""
BLIND_SECONDS = 15.0
"""Seconds between two measurements if the free space is unknown."""
STEP = 0.05
"""Everything is measured again when free space falls by this share of the smallest limit."""
MOST_BUSY = 5.0
"""The pause after a measurement, in multiples of its duration."""
PATIENCE_SECONDS = 120.0
"""Seconds that an engine may take to measure one container."""
ROUND_SECONDS = 5.0
"""Seconds that a round waits for sizes; a slow container does not delay others."""
AT_ONCE = 8
"""How many containers of one engine are measured at the same time."""

_in_thread = partial(in_daemon_thread, "gpuspawner-disk")


@dataclass(frozen=True, slots=True)
class DiskMeasurement:
    """The last measurement on one engine, by a monotonic clock."""

    at: float
    seconds: float
    """How long it took."""
    free_bytes: int | None
    """Free space before it; None if unknown."""
    step_bytes: float


def is_due(last: DiskMeasurement | None, now: float, free_bytes: int | None) -> bool:
    """Return True if it is time to measure again."""
    if last is None:
        return True
    since = now - last.at
    if since < MOST_BUSY * last.seconds:
        return False
    if free_bytes is None or last.free_bytes is None:
        return since >= BLIND_SECONDS
    return since >= SELDOM_SECONDS or last.free_bytes - free_bytes >= last.step_bytes


class DiskDuty(MachineDuty):
    """Checks the disk of each engine; one that is not responding does not delay the others."""

    def __init__(
        self, tick: Tick, machines: Machines, poke: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(tick, machines, poke)
        self._disks = {name: Disk(self, name, engine) for name, engine in self.engines.items()}

    async def round(self) -> None:
        """Check every disk that is due. Raises StoreUnavailable."""
        leases = await self.leases()
        rounds = (disk.round(leases[name]) for name, disk in self._disks.items())
        for error in await asyncio.gather(*rounds, return_exceptions=True):
            if error is not None:
                raise error


class Disk:
    """One engine's disk and its containers."""

    def __init__(self, duty: DiskDuty, machine: str, engine: DockerEngine) -> None:
        self.tick = duty.tick
        self.services = duty.services
        self.engine = engine
        self._poke = duty.poke
        self._part = f"Disk of {machine}"
        self._is_here = machine == HERE
        self._root: str | None = None
        self._last: DiskMeasurement | None = None
        self._warned: set[str] = set()
        self._measuring: dict[str, asyncio.Task[int | None]] = {}
        """Unfinished measurements, by lease id."""
        self._gate = asyncio.Semaphore(AT_ONCE)

    async def round(self, leases: Mapping[str, Lease]) -> None:
        """Measure the containers of these leases if due; log if the engine is not responding."""
        self._warned &= leases.keys()
        if not leases:
            self._last = None
            return
        try:
            await self._round(leases)
        except EngineUnavailable as error:
            self.tick.trouble(self._part, error)

    async def _round(self, leases: Mapping[str, Lease]) -> None:
        began = time.monotonic()
        found = await _in_thread(self._room) if self._is_here else None
        free = found[0] if found else None
        if not is_due(self._last, began, free):
            return
        limits = await _in_thread(lambda: self.engine.call(limited))
        # Containers that are being stopped are no longer measured.
        here = [x for x in limits if x.lease_id in leases and not leases[x.lease_id].outcome]
        for each in here:
            if each.lease_id not in self._measuring:
                work = self._see_to(each, leases[each.lease_id])
                self._measuring[each.lease_id] = asyncio.ensure_future(work)
        if self._measuring:
            await asyncio.wait(self._measuring.values(), timeout=ROUND_SECONDS)
        done = {name: task for name, task in self._measuring.items() if task.done()}
        for name in done:
            del self._measuring[name]
        sizes = {name: task.result() for name, task in done.items()}
        self._say(found, {leases[name]: sizes[name] for name in sizes if name in leases})
        # Without a container, there is no limit for a step: the next round measures again.
        step = STEP * min((x.limit_bytes for x in here), default=0)
        ended = time.monotonic()
        self._last = DiskMeasurement(ended, ended - began, free, step) if here else None

    def _room(self) -> tuple[int, int] | None:
        """Return free and total bytes of the engine's disk; None if unknown from here."""
        if self._root is None:
            info: dict[str, Any] = self.engine.call(lambda client: client.info())
            self._root = str(info.get("DockerRootDir", ""))
        return room(self._root)

    async def _see_to(self, container: LimitedContainer, lease: Lease) -> int | None:
        """Measure one container, and act on its size; None if its size is unknown."""
        try:
            async with self._gate:
                written = await _in_thread(lambda: self._written(container.container_id))
        except EngineUnavailable:
            return None
        if written is None:
            return 0  # it has ended
        verdict, limit = container.judge(written), container.limit_bytes
        told: dict[str, Any] = {"written_bytes": written, "limit_bytes": limit}
        told["folders"] = container.folders
        said = f"{size(written)} of {size(limit)} in its own container (lease {lease.id})"
        if verdict == "over":
            if await self.services.run(self.services.disk_limits.stop_for_disk, lease.id, **told):
                self.tick.log.warning("%s is to be stopped: %s", lease.server, said)
                self._poke()
        elif verdict == "near" and lease.id not in self._warned:
            told["is_enforced"] = container.is_enforced
            if await self.services.run(self.services.disk_limits.warn_of_disk, lease.id, **told):
                self.tick.log.info("%s was warned: %s", lease.server, said)
                self._poke()
            self._warned.add(lease.id)
        return written

    def _written(self, container_id: str) -> int | None:
        try:
            return self.engine.call(lambda client: written_bytes(client, container_id))
        except NotFound:
            return None

    def _say(self, found: tuple[int, int] | None, sizes: Mapping[Lease, int | None]) -> None:
        """Log once what an admin must act on."""
        if unknown := [str(lease.server) for lease, written in sizes.items() if written is None]:
            said = f"the engine does not say how large the containers of {', '.join(unknown)} are"
            self.tick.trouble(self._part, Unavailable(said))
        elif found and found[0] < SPARE * found[1]:
            known = sorted(((s, str(x.server)) for x, s in sizes.items() if s), reverse=True)
            most = [f"{server} ({size(written)})" for written, server in known[:3]]
            who = f"; the largest containers: {', '.join(most)}" if most else ""
            said = f"less than {SPARE:.0%} of {size(found[1])} is free{who}. Make room there"
            self.tick.trouble(self._part, Unavailable(said))
        else:
            self.tick.well(self._part)


SCRATCH_SECONDS = 60.0
"""Seconds between two searches for scratch volumes that lost their container."""


class ScratchDuty(MachineDuty):
    """Deletes the scratch volumes that are left if a process was killed during a stop.

    Each engine is asked while it has leases, and after the last one until it has answered once.
    """

    def __init__(self, tick: Tick, machines: Machines) -> None:
        super().__init__(tick, machines)
        self._due = set(self.engines)

    async def round(self) -> None:
        """Ask every engine that is due. Raises StoreUnavailable."""
        busy = {name for name, leases in (await self.leases()).items() if leases}
        self._due |= busy
        await asyncio.gather(*(self._sweep(name, name in busy) for name in sorted(self._due)))

    async def _sweep(self, machine: str, is_busy: bool) -> None:
        with suppress(EngineUnavailable):  # other duties report that
            removed = await _in_thread(lambda: self.engines[machine].call(remove_unused))
            for lease_id in removed:
                self.log.info("Deleted the scratch directory of lease %s", lease_id)
            if not is_busy:
                self._due.discard(machine)


def disk_rounds(tick: Tick, poke: Callable[[], None]) -> list[Round]:
    """Return the duties for containers: of this machine's engine, and of those of a cluster."""
    names = (("Disk", "Scratch"), ("Disks of nodes", "Scratch of nodes"))
    machines = machines_with_engines(tick.services, PATIENCE_SECONDS)
    rounds: list[Round] = []
    for (disk, scratch), each in zip(names, machines, strict=False):
        disks = DiskDuty(tick, each, poke)
        leftovers = ScratchDuty(tick, each)
        rounds.append((LOOK_SECONDS, disk, disks.round))
        rounds.append((SCRATCH_SECONDS, scratch, leftovers.round))
    return rounds


WORKSPACE_ROUND_SECONDS = 30.0
"""Seconds between two searches for workspaces to measure."""
WORKSPACE_PATIENCE_SECONDS = 600.0
"""Seconds for one directory; the size of one that takes longer is unknown."""


class WorkspaceDuty(TickDuty):
    """Measures workspaces: directories of this machine, and volumes of its engine."""

    def __init__(self, tick: Tick, engine: DockerEngine) -> None:
        super().__init__(tick)
        self.engine = engine
        self._under_way = set[str]()
        """Workspaces that are being measured, including by threads that ran out of time."""

    async def round(self) -> None:
        """Measure what is due."""
        storage = self.services.storage
        unmeasured = await self.services.run(storage.unmeasured)
        due = [some for some in unmeasured if some.source not in self._under_way]
        if volumes := [some for some in due if some.is_volume]:
            names = [some.source for some in volumes]
            with self.tick.going_on("Sizes of volumes"):
                sizes = await self._paced(partial(self.engine.call, volume_sizes), *names)
                for some in volumes:
                    storage.keep_size(some.source, sizes.get(some.source))
        for some in due:
            if not some.is_volume:
                with self.tick.going_on(f"Size of {some.source}"):
                    await self._measure(some)

    async def _measure(self, some: Workspace) -> None:
        storage = self.services.storage
        try:
            use = await self._paced(
                partial(storage.use_of, some.source, some.quota, WORKSPACE_PATIENCE_SECONDS),
                some.source,
            )
        except asyncio.TimeoutError as error:  # the thread may never end; there is one at most
            storage.keep_size(some.source, None)
            raise Unavailable("its file system is not responding") from error
        storage.keep_size(some.source, use.used if use else None)

    async def _paced(self, work: Callable[[], T], *sources: str) -> T:
        """Return the result of blocking work, after a pause. Raises asyncio.TimeoutError."""
        began = time.monotonic()
        self._under_way.update(sources)
        result = in_daemon_thread(
            "gpuspawner-workspaces", work, lambda: self._under_way.difference_update(sources)
        )
        await asyncio.wait({result}, timeout=2 * WORKSPACE_PATIENCE_SECONDS)
        await asyncio.sleep(MOST_BUSY * (time.monotonic() - began))
        if not result.done():
            raise asyncio.TimeoutError
        return result.result()


def workspace_rounds(tick: Tick) -> list[Round]:
    """Return the duty for workspaces."""
    engine = DockerEngine(partial(client_from_environment, WORKSPACE_PATIENCE_SECONDS))
    return [(WORKSPACE_ROUND_SECONDS, "Workspaces", WorkspaceDuty(tick, engine).round)]
