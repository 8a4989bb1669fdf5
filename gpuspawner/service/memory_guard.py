"""The memory guard: ends programs that take the memory of others on a shared device."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from ..core.errors import EngineUnavailable, GPUSpawnerError
from ..core.processes import lives, process_ref
from ..devices.source import Sampler, SamplerOfProcesses
from ..engines.base import ProcessOwners
from ..engines.processes import EngineWithProcesses, pid_inside, send_signal
from ..leases.models import Lease
from ..monitoring.models import Sample
from ..sharing.memory_rules import (
    Excess,
    Judgement,
    LeasedProcess,
    Overuse,
    SharedMemory,
    judge,
)
from .worker import Tick, TickDuty

GUARD_SECONDS = 1.0
"""Seconds between two looks at the shared devices."""

RECORDS = "Records of the memory guard"

Recent = Callable[[], Mapping[str, Sequence[Sample]]]
"""Returns the newest samples of each device, oldest first."""


class MemoryGuard(TickDuty):
    """Watches the memory of devices on which several leases have a slot.

    Processes on other machines, and those whose lease or memory is unknown, are left alone.
    """

    def __init__(
        self, tick: Tick, sampler: Sampler, recent: Recent, poke: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(tick, poke)
        self._sampler = sampler
        self._recent = recent
        self._leases: dict[str, list[Lease]] = {}
        self._over: dict[str, Mapping[str, Overuse]] = {}
        self._judged_at: dict[str, float] = {}
        self._signalled: dict[str, set[str]] = {}
        """Processes that got a first signal, by device: their ids and when they started."""
        self._unrecorded: list[tuple[Lease, Excess]] = []
        """Processes that got a first signal which is not recorded yet."""

    def follow(self, leases: Collection[Lease]) -> None:
        """Note the open leases; the processes on devices with several of them are then watched."""
        found = defaultdict(list)
        for lease in leases:
            for device in lease.devices:
                if device.is_shared:
                    found[device.uuid].append(lease)
        self._leases = {uuid: some for uuid, some in found.items() if len(some) > 1}
        if isinstance(self._sampler, SamplerOfProcesses):
            self._sampler.watched = frozenset(self._leases)

    async def round(self) -> None:
        """Judge each shared device whose processes were listed since the last round."""
        await self._record_ends()
        if not self._leases:
            self._over, self._signalled = {}, {}
            return
        samples = self._recent()
        for uuid, leases in list(self._leases.items()):
            newest = next(iter(samples.get(uuid, ())[-1:]), None)
            await self._judge(uuid, leases, newest)

    async def _judge(self, uuid: str, leases: Sequence[Lease], sample: Sample | None) -> None:
        if sample is None or sample.processes is None or sample.listed_at is None:
            self._over.pop(uuid, None)  # memory that was not measured counts against nobody
            return
        if sample.listed_at <= self._judged_at.get(uuid, float("-inf")):
            return
        self._judged_at[uuid] = sample.listed_at
        owners = ProcessOwners(leases)
        seen = await asyncio.to_thread(shared_memory, sample, leases, owners)
        if seen is None:
            self._over.pop(uuid, None)
            return
        found = judge(sample.listed_at, seen, self._over.get(uuid, {}))
        self._over[uuid] = await self._tell(found)
        refs = {process_ref(process.pid) for process in sample.processes}
        self._signalled[uuid] = self._signalled.get(uuid, set()) & refs
        if found.to_end:
            lease = next(each for each in leases if each.id == found.to_end.lease_id)
            await self._end(lease, found.to_end)

    async def _tell(self, found: Judgement) -> Mapping[str, Overuse]:
        """Tell the members who are over their share; the next round retries those that failed."""
        over = dict(found.over)
        for excess in found.to_tell:
            state = over[excess.lease_id]
            over[excess.lease_id] = replace(state, told=False)
            with self.tick.going_on(RECORDS):
                await self.services.run(self.services.memory_guard.tell_of_excess, excess)
                over[excess.lease_id] = state
                self.poke()
        return over

    async def _end(self, lease: Lease, excess: Excess) -> None:
        """End a process: SIGTERM at first; SIGKILL the next time, or if the device is full."""
        ref, part = process_ref(excess.process.pid), f"Memory guard of lease {lease.id}"
        if not ref:
            return  # it has ended by itself
        is_first = ref not in self._signalled[excess.uuid]
        name = "SIGTERM" if is_first and not excess.device_is_full else "SIGKILL"
        try:
            if await asyncio.to_thread(self._send, lease, ref, name) and is_first:
                self._signalled[excess.uuid].add(ref)
                self._unrecorded.append((lease, excess))
        except GPUSpawnerError as error:
            self.tick.trouble(part, error)
        else:
            self.tick.well(part)
        await self._record_ends()

    async def _record_ends(self) -> None:
        """Record the ended processes; if the database does not take one, a later round retries."""
        for each in list(self._unrecorded):
            lease, excess = each
            with self.tick.going_on(RECORDS):
                said = await self.services.run(self.services.memory_guard.record_end, excess)
                self._unrecorded.remove(each)
                self.log.warning("%s (lease %s of %s)", said, lease.id, lease.server)
                self.poke()
                await asyncio.to_thread(self._write_log, lease, said)

    def _send(self, lease: Lease, ref: str, name: str) -> bool:
        def is_right_one(pid: int) -> bool:
            owner = ProcessOwners([lease]).lease_of(pid)
            return lives(ref) and owner is not None and owner.id == lease.id

        pid = int(ref.partition(":")[0])
        try:
            return send_signal(pid, is_right_one, name)
        except PermissionError:
            inside, engine = pid_inside(pid), self._engine_of(lease)
            if inside is None or engine is None:
                raise EngineUnavailable(
                    f"The process {pid} uses too much GPU memory, and this service may not end it."
                ) from None
            return engine.end_process(lease.engine_ref, inside, name)

    def _write_log(self, lease: Lease, said: str) -> None:
        if engine := self._engine_of(lease):
            engine.write_log(lease.engine_ref, said)

    def _engine_of(self, lease: Lease) -> EngineWithProcesses | None:
        if lease.engine not in self.tick.engines:
            return None
        engine = self.tick.engines[lease.engine]
        return engine if isinstance(engine, EngineWithProcesses) else None


def shared_memory(
    sample: Sample, leases: Sequence[Lease], owners: ProcessOwners
) -> SharedMemory | None:
    """Return the memory of a shared device, from a sample; None if it is unknown.

    Reads ``/proc``. Processes whose lease or memory is unknown are left out.
    """
    if sample.used_bytes is None or sample.total_bytes is None or sample.processes is None:
        return None
    found = []
    for process in sample.processes:
        lease = owners.lease_of(process.pid)
        if lease is not None and process.used_memory_bytes is not None:
            found.append(
                LeasedProcess(lease.id, process.pid, process.used_memory_bytes, process.name)
            )
    return SharedMemory(
        uuid=sample.uuid,
        total_bytes=sample.total_bytes,
        free_bytes=sample.total_bytes - sample.used_bytes,
        shares={
            lease.id: device.share_bytes
            for lease in leases
            for device in lease.devices
            if device.uuid == sample.uuid
        },
        processes=tuple(found),
    )
