"""The memory guard: ends programs that take the memory of others on a shared device."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

from ..core.errors import EngineUnavailable, GPUSpawnerError
from ..devices.source import Sampler, SamplerOfProcesses
from ..engines.base import ProcessOwners
from ..engines.processes import EngineWithProcesses, pid_inside, send_signal
from ..leases.models import Lease
from ..monitoring.models import Sample
from ..sharing.memory_rules import Excess, LeasedProcess, Overuse, SharedMemory, judge
from .worker import Tick, TickDuty

GUARD_SECONDS = 1.0
"""Seconds between two looks at the shared devices."""

Recent = Callable[[], Mapping[str, Sequence[Sample]]]
"""Returns the newest samples of each device, oldest first."""


class MemoryGuard(TickDuty):
    """Looks at the devices on which several leases have a slot.

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
        self._signals: dict[tuple[str, int], str] = {}

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
        if not self._leases:
            self._over, self._signals = {}, {}
            return
        samples = self._recent()
        for uuid, leases in list(self._leases.items()):
            newest = next(iter(samples.get(uuid, ())[-1:]), None)
            await self._judge(uuid, leases, newest)

    async def _judge(self, uuid: str, leases: Sequence[Lease], sample: Sample | None) -> None:
        if sample is None or sample.processes is None or sample.listed_at is None:
            self._over.pop(uuid, None)  # what was not seen does not count against anybody
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
        self._over[uuid] = found.over
        guard = self.services.memory_guard
        for excess in found.to_tell:
            await self.services.run(guard.tell_of_excess, excess)
            self.poke()
        if found.to_end:
            lease = next(each for each in leases if each.id == found.to_end.lease_id)
            await self._end(lease, found.to_end)

    async def _end(self, lease: Lease, excess: Excess) -> None:
        """End a process: politely at first, and if it is still there in the next list, at once."""
        asked = (lease.id, excess.process.pid)
        is_first = asked not in self._signals
        name = "SIGTERM" if is_first and not excess.device_is_full else "SIGKILL"
        self._signals[asked] = name
        part = f"Memory guard of lease {lease.id}"
        try:
            if not await asyncio.to_thread(self._send, lease, excess.process.pid, name):
                return  # it has ended by itself
            if is_first:
                said = await self.services.run(self.services.memory_guard.record_end, excess)
                self.log.warning("%s (lease %s of %s)", said, lease.id, lease.server)
                self.poke()
                await asyncio.to_thread(self._write_log, lease, said)
        except GPUSpawnerError as error:
            self.tick.trouble(part, error)
        else:
            self.tick.well(part)

    def _send(self, lease: Lease, pid: int, name: str) -> bool:
        def is_right_one(pid: int) -> bool:
            owner = ProcessOwners([lease]).lease_of(pid)
            return owner is not None and owner.id == lease.id

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
