"""Credits that end: what is left of them, and what is taken back. In the caller's transaction."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import sqlalchemy as sa

from ..leases.models import Lease
from . import credit_repository, lots, repository
from .lots import Lot


def lots_left(connection: sa.Connection, account: str, now: datetime) -> list[tuple[Lot, int]]:
    """Lots of an account that have not ended, and the microcredits left of each."""
    known = credit_repository.lots_of_account(connection, account)
    if not known:
        return []
    left = lots.left_of(known, credit_repository.flow_of_account(connection, account), now)
    return [(lot, left[lot.id]) for lot in known if lot.starts_at <= now < lot.over_at]


def ending_credits(
    connection: sa.Connection, account: str, now: datetime
) -> tuple[tuple[datetime, int], ...]:
    """When credits of an account end, and what is left of them. Quick where none do."""
    if credit_repository.first_lot_due(connection, account) is None:
        return ()
    found = lots_left(connection, account, now)
    return tuple((lot.ends_at, left) for lot, left in found if left)


def settle_lots(connection: sa.Connection, account: str, now: datetime) -> None:
    """Bring what was taken back from the account's lots in line with what is known now."""
    known = credit_repository.lots_of_account(connection, account)
    if not known:
        return
    left = lots.left_of(known, credit_repository.flow_of_account(connection, account), now)
    for lot in known:
        if now < lot.over_at:
            continue
        taken = 0 if lot.cancelled_at else left[lot.id]
        changes: dict[str, Any] = {} if lot.closed_at else {"closed_at": now}
        if transfer := lots.expiry(lot, taken, now if lot.closed_at else lot.over_at):
            repository.post(connection, transfer)
            changes |= {"taken": taken, "takes": lot.takes + 1}
        if changes:
            credit_repository.update_lot(connection, lot.id, **changes)


def end_due_lots(connection: sa.Connection, account: str, now: datetime) -> None:
    """Before a balance is relied on: nobody starts on credits that have ended."""
    due = credit_repository.first_lot_due(connection, account)
    if due is not None and due <= now:
        settle_lots(connection, account, now)


def settle_lots_since(
    connection: sa.Connection, lease: Lease, now: datetime, newest: datetime | None
) -> None:
    """A lease has ended, maybe before lots ended that it was believed to spend from; the
    ``newest`` of its account is the one that ends last."""
    if newest is not None and lease.started_at is not None and lease.started_at < newest:
        settle_lots(connection, lease.account, now)
