"""The use of a shared device by each of its leases, from the figures of their processes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..engines.base import ProcessOwners
from ..leases.models import Lease
from ..monitoring.models import Sample

WORKS = 5
"""If a device's use is at least this many percent, one of its processes must have worked."""

CONTRADICTED = 10
"""After more than this many samples in a row in which a device works but none of its processes
does, the processes' figures are not believed. Fewer prove nothing: the two kinds of figures are
from different moments."""


LeaseOnDevice = tuple[str, str]
"""The UUID of a device that several leases may share, and a lease on it."""


@dataclass(frozen=True, slots=True)
class _Holders:
    """The open leases that were last passed to :meth:`LeaseMeter.follow`."""

    owners: ProcessOwners = field(default_factory=ProcessOwners)
    shared: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The leases on each device that several may share, by its UUID."""


class LeaseMeter:
    """Makes samples of leases from samples of shared devices.

    A lease that is alone on its device has all of the device's use. A lease's use is unknown if the
    figures failed, or if a process that worked ended before its lease was known. Use this from one
    thread only, except :meth:`follow`.
    """

    def __init__(self) -> None:
        self._holders = _Holders()
        self._last_owner: dict[int, str] = {}
        self._contradicted: Counter[str] = Counter()

    def follow(self, leases: Iterable[Lease], owners: ProcessOwners) -> None:
        """Note the open leases and the owners of their processes. For any thread."""
        shared: dict[str, list[str]] = defaultdict(list)
        for lease in leases:
            for device in lease.devices:
                if device.is_shared:
                    shared[device.uuid].append(lease.id)
        self._holders = _Holders(owners, {uuid: tuple(ids) for uuid, ids in shared.items()})

    @property
    def keys(self) -> set[LeaseOnDevice]:
        """Each lease on each shared device, of which there are samples."""
        shared = self._holders.shared
        return {(uuid, lease_id) for uuid, ids in shared.items() for lease_id in ids}

    def divide(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return a sample of each lease on each shared device of these samples."""
        holders = self._holders
        if not holders.shared:
            self._last_owner.clear()
            return []
        found: list[Sample] = []
        for sample in samples:
            if ids := holders.shared.get(sample.uuid):
                found += self._of_leases(sample, ids, holders.owners)
        self._forget(samples)
        return found

    def _of_leases(
        self, sample: Sample, ids: Sequence[str], owners: ProcessOwners
    ) -> Iterator[Sample]:
        if len(ids) == 1 or sample.error or sample.silent:
            for lease_id in ids:  # what is counted once per device is not counted again
                yield replace(sample, lease_id=lease_id, xids=(), ecc_errors=None)
            return
        blank = Sample(uuid=sample.uuid, index=sample.index, at=sample.at)
        worked = self._worked(sample, owners)
        if worked is not None:
            for process in sample.processes or ():
                if not self._last_owner.get(process.pid):
                    self._owner_of(process.pid, owners)
        for lease_id in ids:
            own = replace(blank, lease_id=lease_id)
            if worked is None or (None in worked and not worked[lease_id]):
                yield own
            else:
                yield replace(own, **self._figures(sample, lease_id, worked[lease_id]))

    def _figures(self, sample: Sample, lease_id: str, use: int) -> dict[str, Any]:
        listed = sample.processes
        mine = [p for p in listed or () if self._last_owner.get(p.pid) == lease_id]
        sizes = [p.used_memory_bytes for p in mine if p.used_memory_bytes is not None]
        return {
            "use": min(100, use),
            "used_bytes": sum(sizes) if listed is not None and len(sizes) == len(mine) else None,
            "total_bytes": sample.total_bytes,
            "processes": None if listed is None else tuple(mine),
        }

    def _worked(self, sample: Sample, owners: ProcessOwners) -> Counter[str | None] | None:
        """Return the use in percent by lease; None if it is not known.

        "" stands for processes without a lease, and None for those that ended before it was known.
        """
        if sample.process_use is None:
            return None
        works = [each for each in sample.process_use if each.use]
        is_odd = not works and sample.use is not None and sample.use >= WORKS
        self._contradicted[sample.uuid] = self._contradicted[sample.uuid] + 1 if is_odd else 0
        if self._contradicted[sample.uuid] > CONTRADICTED:
            return None
        found: Counter[str | None] = Counter()
        for each in works:
            found[self._owner_of(each.pid, owners)] += each.use
        return found

    def _owner_of(self, pid: int, owners: ProcessOwners) -> str | None:
        """Return the lease of a process, "" if it belongs to none, None if that is not known."""
        lease = owners.lease_of(pid)
        if lease is None and not owners.exists(pid):
            return self._last_owner.get(pid)
        self._last_owner[pid] = lease.id if lease else ""
        return self._last_owner[pid]

    def _forget(self, samples: Sequence[Sample]) -> None:
        """Forget processes that are no longer listed: another one may get their id."""
        listed = {process.pid for sample in samples for process in sample.processes or ()}
        worked = {each.pid for sample in samples for each in sample.process_use or ()}
        for pid in self._last_owner.keys() - listed - worked:
            del self._last_owner[pid]
