"""What members and admins are told about memory beyond a share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from ..core.units import format_bytes
from ..db import audit_log
from ..db.engine import Store
from ..leases import repository as leases_repository
from ..leases.models import Lease
from ..leases.sessions import goes_on
from ..notifications import repository as notifications_repository
from ..notifications.models import NoticeKind
from ..notifications.service import compose
from .memory_rules import END_SECONDS, Excess

GUARD = "memory guard"
"""The actor in the audit log."""


@dataclass(eq=False)
class MemoryGuardService:
    """Tells members that they use more than their share, and records ended processes."""

    store: Store
    clock: Callable[[], datetime]

    def tell_of_excess(self, excess: Excess) -> bool:
        """Tell a member that their largest process is ended soon. False if the session ends."""
        with self.store.write() as connection:
            return self._tell(connection, "memory_over_share", excess)

    def record_end(self, excess: Excess) -> str:
        """Record that a process was ended and tell its member; returns the reason as a sentence.

        Both in one transaction.
        """
        said = why_ended(excess)
        with self.store.write() as connection:
            is_told = self._tell(connection, "memory_process_ended", excess)
            audit_log.note(
                connection,
                at=self.clock(),
                actor=GUARD,
                action="end_process",
                subject=excess.uuid,
                detail=f"lease {excess.lease_id}: {said}" if is_told else said,
            )
        return said

    def _tell(self, connection: sa.Connection, template: str, excess: Excess) -> bool:
        now = self.clock()
        lease: Lease = leases_repository.get(connection, excess.lease_id, lock=True)
        if not goes_on(lease):
            return False
        notice = compose(
            template,
            NoticeKind.GPU_MEMORY,
            f"{template}:{lease.id}:{now:%Y-%m-%dT%H:%M}",
            lease.server.user,
            now,
            lease=lease,
            used=format_bytes(excess.used_bytes),
            share=format_bytes(excess.share_bytes),
            others=excess.others,
            process=excess.process.name or "its largest process",
            pid=excess.process.pid,
            process_used=format_bytes(excess.process.used_bytes),
            device_is_full=excess.device_is_full,
            seconds=round(END_SECONDS),
        )
        notifications_repository.add(connection, notice)
        return True


def why_ended(excess: Excess) -> str:
    """Return why a process was ended, as a sentence for logs."""
    process = excess.process
    name = f"{process.name} (process {process.pid})" if process.name else f"process {process.pid}"
    used, share = format_bytes(excess.used_bytes), format_bytes(excess.share_bytes)
    when = (
        "when the GPU was nearly full"
        if excess.device_is_full
        else f"for more than {END_SECONDS:.0f} seconds"
    )
    return (
        f"gpuspawner ended {name}, which used {format_bytes(process.used_bytes)} of GPU memory. "
        f"The session used {used} of a GPU that others share, {when}; its share is {share}."
    )
