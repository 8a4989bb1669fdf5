"""Servers that write much into their own container: warned, and stopped beyond their limit.

As with every other order, the accounting service has the Hub stop the server until it is gone.
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
from ..notifications.models import Notice, NoticeKind

OUTCOME = "disk"


class DiskLimitService:
    """Tells members of their containers' size, and orders the end of those that are too large."""

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
        """Tell a member that their container is nearly full, once for each server.

        ``is_enforced``: the engine refuses what is too much, so the server is not stopped for it.
        ``folders``: where in the container files are kept. Return False if the member was told
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
        """Have a server stopped that wrote more into its container than it may, and tell its
        member. Return False if it ends anyway."""
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


# What members are told.


def _nearly_full(
    lease: Lease,
    written: int,
    limit: int,
    is_enforced: bool,
    folders: Sequence[str],
    now: datetime,
) -> Notice:
    then = f"If it grows beyond {size(limit)}, it is stopped"
    if is_enforced:
        then = (
            f"At {size(limit)} its programs find no space left on the device. That is about this "
            "server's own container alone, and the server goes on"
        )
    return Notice(
        key=f"disk:{lease.id}",
        user=lease.server.user,
        kind=NoticeKind.DISK_LOW,
        title=f"{_named(lease)} has little room left outside of its workspace",
        body=(
            f"It wrote {size(written)} of {size(limit)} into its own container, where installed "
            f"packages, caches and /tmp are. {then}. {_advice(folders)}"
        ),
        at=now,
    )


def _too_full(
    lease: Lease, written: int, limit: int, folders: Sequence[str], now: datetime
) -> Notice:
    return Notice(
        key=f"stopped:{lease.id}",
        user=lease.server.user,
        kind=NoticeKind.STOPPED,
        title=f"{_named(lease)} is stopped: it filled its own container",
        body=(
            f"It wrote {size(written)} outside of its workspace, where {size(limit)} are allowed, "
            f"on a disk that all members share. {_kept(folders)} You can start it again. "
            f"{_advice(folders)}"
        ),
        at=now,
    )


def _kept(folders: Sequence[str]) -> str:
    if not folders:
        return "What it wrote into its container may be gone."
    return f"What is in {_all(folders)} is kept; what it wrote elsewhere may be gone."


def _advice(folders: Sequence[str]) -> str:
    if not folders:
        return "Delete what you do not need, or ask your admin for a workspace or for more room."
    where = folders[0] if len(folders) == 1 else f"one of {_all(folders)}"
    return f"Write large files to {where}, or ask your admin for more room."


def _all(folders: Sequence[str]) -> str:
    *most, last = folders
    return f"{', '.join(most)} and {last}" if most else last


def _named(lease: Lease) -> str:
    return f"Your server {lease.server.name}".rstrip()
