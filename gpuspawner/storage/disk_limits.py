"""Servers that write much into their own container: warned, and stopped beyond their limit.

As with every stop order, the accounting service asks the Hub until the server is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from ..db.engine import Store
from ..engines.disk_usage import size
from ..leases import repository as leases_repository
from ..leases.sessions import goes_on, order_end
from ..notifications import repository as notifications_repository
from ..notifications.models import NoticeKind
from ..notifications.service import compose

OUTCOME = "disk"


@dataclass(eq=False)
class DiskLimitService:
    """Warns members of their containers' size, and orders the end of those that are too large."""

    store: Store
    clock: Callable[[], datetime]
    log: logging.Logger

    def warn_of_disk(
        self,
        lease_id: str,
        *,
        written_bytes: int,
        limit_bytes: int,
        is_enforced: bool,
        folders: Sequence[str] = (),
    ) -> bool:
        """Warn a member that their container is nearly full, once per server.

        ``is_enforced``: the engine refuses further writes, so the server is not stopped for it.
        ``folders``: where in the container files are kept. Returns False if the member was told
        before, or the server ends.
        """
        now = self.clock()
        with self.store.write() as connection:
            lease = leases_repository.get(connection, lease_id, lock=True)
            if not goes_on(lease):
                return False
            told = compose(
                "disk_nearly_full",
                NoticeKind.DISK_LOW,
                f"disk:{lease.id}",
                lease.server.user,
                now,
                lease=lease,
                written=size(written_bytes),
                limit=size(limit_bytes),
                is_enforced=is_enforced,
                folders=folders,
            )
            return notifications_repository.add(connection, told)

    def stop_for_disk(
        self,
        lease_id: str,
        *,
        written_bytes: int,
        limit_bytes: int,
        folders: Sequence[str] = (),
    ) -> bool:
        """Order the stop of a server that wrote more into its container than allowed.

        Also tells its member. Returns False if it ends anyway.
        """
        now, written, limit = self.clock(), size(written_bytes), size(limit_bytes)
        with self.store.write() as connection:
            lease = leases_repository.get(connection, lease_id, lock=True)
            if not goes_on(lease):
                return False
            reason = f"it wrote {written} into its own container, and may write {limit}"
            told = compose(
                "disk_full",
                NoticeKind.STOPPED,
                f"stopped:{lease.id}",
                lease.server.user,
                now,
                lease=lease,
                written=written,
                limit=limit,
                folders=folders,
            )
            order_end(connection, lease, OUTCOME, reason, told, self.log)
        return True
