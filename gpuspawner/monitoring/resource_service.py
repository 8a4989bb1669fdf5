"""What servers and runs use of CPU, memory, disk and network; members told when memory is used up.

Every sample and every kill is added once, in one transaction with its notice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import sqlalchemy as sa

from ..core.errors import UnknownLease
from ..core.units import format_bytes
from ..db.engine import Store
from ..engines.resource_use import MemoryKill, ReportedUse, ResourceUse
from ..leases import repository as leases_repository
from ..leases.models import Lease, LeaseState
from ..notifications import repository as notifications_repository
from ..notifications.models import NoticeKind
from ..notifications.service import compose
from . import resource_repository
from .resource_totals import (
    EnvironmentUse,
    ResourceRecord,
    ResourceSum,
    ResourceTotals,
    add_report,
    add_sample,
)

QUIET = timedelta(minutes=5)
"""The shortest time between two notices about the memory of one server."""

RECENT = timedelta(minutes=5)
"""How long after its end a member is still told that a server ran out of memory."""

NEARLY = 0.9
"""A measured figure explains a kill if it is at least this share of the limit."""


@dataclass(frozen=True, slots=True)
class ContainerSample:
    """What one container of a lease used until now."""

    lease_id: str
    container_id: str
    use: ResourceUse


@dataclass(eq=False)
class ResourceService:
    """Adds up what leases use, and tells members whose programs the system ended."""

    store: Store
    clock: Callable[[], datetime]
    log: logging.Logger

    def record(self, samples: Collection[ContainerSample]) -> None:
        """Add samples to the totals of their leases. Raises StoreUnavailable, and adds none then.

        A lease that has ended meanwhile gets its last sample too. The order does not matter: the
        last sample includes whatever the engine read before it.
        """
        now = self.clock()
        with self.store.write() as connection:
            for each in samples:
                before = resource_repository.get(connection, each.lease_id)
                at = each.use.read_at or now
                after = add_sample(before, each.container_id, each.use, at)
                _put(connection, each.lease_id, before, after)

    def note_report(self, lease_id: str, container_id: str, told: ReportedUse) -> None:
        """Add what the program of a run reported at its end, if that can be true."""
        with self.store.write() as connection:
            before = resource_repository.get(connection, lease_id)
            _put(connection, lease_id, before, add_report(before, container_id, told))

    def totals_of(self, lease_ids: Collection[str]) -> dict[str, ResourceTotals]:
        """Return the totals of leases by id, without those that were never sampled."""
        return self.store.run(lambda c: resource_repository.totals_of(c, lease_ids))

    def use_of_environments(self) -> dict[str, EnvironmentUse]:
        """Return what all servers and runs used until now, by environment."""
        return self.store.run(resource_repository.use_of_environments)

    def memory_in_use(self) -> dict[str, int]:
        """Return the memory in bytes that servers and runs use now, by environment."""
        return self.store.run(resource_repository.memory_in_use)

    def sums_between(self, bounds: Sequence[datetime], by: str) -> list[dict[str, ResourceSum]]:
        """Return what leases used that started between each time and the next.

        By a field of Kind, such as ``user``. A lease's whole use counts in the period in which it
        started.
        """
        return self.store.run(lambda c: resource_repository.sums_between(c, bounds, by))

    def note_kills(
        self,
        lease_id: str,
        kills: Collection[MemoryKill],
        *,
        used_bytes: int | None = None,
        limit_bytes: int | None = None,
    ) -> bool:
        """Count new kills of a lease's programs, and tell its member; returns True if told.

        Kills that were counted before change nothing. The member is told at most once in
        :data:`QUIET`. ``used_bytes``: the most that the container used; ``limit_bytes``: what it
        may use. Both are None if the engine does not report them; then the figures of samples
        count.
        """
        now = self.clock()
        with self.store.write() as connection:
            try:
                lease = leases_repository.get(connection, lease_id, lock=True)
            except UnknownLease:  # another hub's container on the same engine
                return False
            before = resource_repository.get(connection, lease_id)
            new = [it for it in kills if it.at_nanoseconds > before.last_kill_nanoseconds]
            if not new:
                return False
            tells = _tells(lease, before.told_at, now)
            peak = before.totals.memory_peak_bytes
            totals = replace(
                before.totals,
                memory_kills=before.totals.memory_kills + len(new),
                memory_limit_bytes=limit_bytes or before.totals.memory_limit_bytes,
            )
            limit = totals.memory_limit_bytes
            after = replace(
                before,
                totals=totals,
                last_kill_nanoseconds=max(it.at_nanoseconds for it in new),
                told_at=now if tells else before.told_at,
            )
            _put(connection, lease_id, before, after)
            if tells:
                used = max((it for it in (used_bytes, peak) if it is not None), default=None)
                self._tell(connection, lease, now, used, limit)
        said = f"limit {format_bytes(limit)}" if limit else "limit unknown"
        self.log.warning("%s ran out of memory (%s; lease %s)", lease.server, said, lease.id)
        return tells

    def note_end(self, lease_id: str, ended_at: datetime, limit_bytes: int | None) -> None:
        """Record that a container ended after a kill, in case the kill itself was not seen yet.

        ``ended_at`` is the end by the engine's clock: kills before it count as seen.
        """
        with self.store.write() as connection:
            before = resource_repository.get(connection, lease_id)
            totals = replace(
                before.totals,
                memory_kills=max(1, before.totals.memory_kills),
                memory_limit_bytes=limit_bytes or before.totals.memory_limit_bytes,
            )
            last = max(before.last_kill_nanoseconds, math.ceil(ended_at.timestamp() * 1e9))
            after = replace(before, totals=totals, last_kill_nanoseconds=last)
            _put(connection, lease_id, before, after)

    def _tell(
        self,
        connection: sa.Connection,
        lease: Lease,
        now: datetime,
        used_bytes: int | None,
        limit_bytes: int | None,
    ) -> None:
        is_near = bool(used_bytes and limit_bytes and used_bytes >= NEARLY * limit_bytes)
        told = compose(
            "out_of_memory",
            NoticeKind.OUT_OF_MEMORY,
            f"memory:{lease.id}:{now.timestamp()}",
            lease.server.user,
            now,
            lease=lease,
            used=format_bytes(used_bytes) if used_bytes else "",
            limit=format_bytes(limit_bytes) if limit_bytes else "",
            is_near=is_near,
            has_ended=lease.state is LeaseState.ENDED,
        )
        notifications_repository.add(connection, told)


def _put(
    connection: sa.Connection, lease_id: str, before: ResourceRecord, after: ResourceRecord
) -> None:
    """Replace the record of a lease, and count the difference for its environment."""
    if after == before:
        return
    resource_repository.put(connection, lease_id, after)
    used = EnvironmentUse.between(before.totals, after.totals)
    resource_repository.count(connection, lease_id, used)


def _tells(lease: Lease, told_at: datetime | None, now: datetime) -> bool:
    """Return True if a member is to be told of a kill now.

    The notice about the end of a run says it already.
    """
    if lease.ended_at is not None and (lease.server.run_id or now - lease.ended_at > RECENT):
        return False
    return told_at is None or now - told_at >= QUIET
