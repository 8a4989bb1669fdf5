"""Servers that write much into their own container: warned, and stopped beyond their limit.

As with every stop order, the accounting service asks the Hub until the server is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime

from ..db.engine import Store
from ..engines.disk_usage import size
from ..leases import repository as leases_repository
from ..leases.models import Lease
from ..leases.sessions import goes_on, order_end
from ..notifications import repository as notifications_repository
from ..notifications.messages import compose
from ..notifications.models import Notice, NoticeKind

OUTCOME = "disk"


class DiskLimitService:
    """Warns members of their containers' size, and orders the end of those that are too large."""

    def __init__(self, store: Store, clock: Callable[[], datetime], log: logging.Logger) -> None:
        self.store = store
        self.clock = clock
        self.log = log

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
            told = _nearly_full(lease, written_bytes, limit_bytes, is_enforced, folders, now)
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
        now = self.clock()
        with self.store.write() as connection:
            lease = leases_repository.get(connection, lease_id, lock=True)
            if not goes_on(lease):
                return False
            reason = f"it wrote {size(written_bytes)} into its own container, and may write "
            reason += size(limit_bytes)
            told = _too_full(lease, written_bytes, limit_bytes, folders, now)
            order_end(connection, lease, OUTCOME, reason, told, self.log)
        return True


# Notices to members.


def _nearly_full(
    lease: Lease,
    written: int,
    limit: int,
    is_enforced: bool,
    folders: Sequence[str],
    now: datetime,
) -> Notice:
    return compose(
        "disk_nearly_full",
        NoticeKind.DISK_LOW,
        f"disk:{lease.id}",
        lease.server.user,
        now,
        lease=lease,
        written=size(written),
        limit=size(limit),
        is_enforced=is_enforced,
        folders=folders,
    )


def _too_full(
    lease: Lease, written: int, limit: int, folders: Sequence[str], now: datetime
) -> Notice:
    return compose(
        "disk_full",
        NoticeKind.STOPPED,
        f"stopped:{lease.id}",
        lease.server.user,
        now,
        lease=lease,
        written=size(written),
        limit=size(limit),
        folders=folders,
    )
