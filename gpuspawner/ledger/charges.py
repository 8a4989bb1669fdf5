"""Charges of running and ended leases, and the settlement of credits that expire.

Everything here happens in the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from ..leases import repository as leases_repository
from ..leases.models import Lease
from . import credit_policy, credit_repository, lots, repository, rules
from .credit_policy import OVERDRAFT
from .lots import Lot


def charge_due_leases(
    connection: sa.Connection,
    due: Sequence[repository.DueCharge],
    bounded: Sequence[Lease],
    now: datetime,
) -> int:
    """Charge what is due; for leases with an overdraft, only what can be paid.

    Returns the number of leases charged.
    """
    payable_by_lease = shares_of(connection, bounded, now)
    repository.charge_leases(connection, due, now)
    return len(due) + charge_each(connection, bounded, now, payable_by_lease)


def charge_each(
    connection: sa.Connection,
    some: Sequence[Lease],
    now: datetime,
    shares: Mapping[str, int],
) -> int:
    """Charge these leases one after the other and return how many were charged.

    ``shares``: what the accounts can pay for leases with an overdraft, in microcredits by lease.
    """
    count = 0
    for lease in some:
        due = shares.get(lease.id, rules.charge_due(lease, now))
        if transfer := rules.charge(lease, due, now):
            repository.post(connection, transfer)
            leases_repository.update(connection, lease.id, charged=lease.charged + due)
            count += 1
    return count


def payable(connection: sa.Connection, lease: Lease, due: int, until: datetime) -> int:
    """Return how much of ``due`` the account can pay at a lease's end: an overdraft has a limit.

    Leases that share the overdraft are charged up to the same moment, so that no other end takes it
    from them.
    """
    if due <= 0 or lease.when_dry != OVERDRAFT:
        return due
    shares = shares_of(connection, [lease], until)
    others = [
        each
        for each in repository.bounded(connection)
        if each.account == lease.account and each.id != lease.id
    ]
    charge_each(connection, others, until, shares)
    return min(due, shares.get(lease.id, 0))


def shares_of(connection: sa.Connection, some: Iterable[Lease], until: datetime) -> dict[str, int]:
    """Return what the accounts can pay for those of these leases that have an overdraft."""
    found: dict[str, int] = {}
    for account in dict.fromkeys(x.account for x in some if x.when_dry == OVERDRAFT):
        if paid_for := leases_repository.paying(connection, account):
            found |= credit_policy.shares([lease for lease, _ in paid_for], paid_for[0][1], until)
    return found


def lots_left(connection: sa.Connection, account: str, now: datetime) -> list[tuple[Lot, int]]:
    """Return the lots of an account that have not ended, with the microcredits left of each."""
    known = credit_repository.lots_of_account(connection, account)
    if not known:
        return []
    left = lots.left_of(known, credit_repository.flow_of_account(connection, account), now)
    return [(lot, left[lot.id]) for lot in known if lot.starts_at <= now < lot.over_at]


def ending_credits(
    connection: sa.Connection, account: str, now: datetime
) -> tuple[tuple[datetime, int], ...]:
    """Return when credits of an account expire, and what is left of them.

    Fast if there are none.
    """
    if credit_repository.first_lot_due(connection, account) is None:
        return ()
    found = lots_left(connection, account, now)
    return tuple((lot.ends_at, left) for lot, left in found if left)


def settle_lots(connection: sa.Connection, account: str, now: datetime) -> None:
    """Correct what was taken back from the account's lots by what is known now."""
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
    """Settle expired lots before the balance is used: nobody starts on expired credits."""
    due = credit_repository.first_lot_due(connection, account)
    if due is not None and due <= now:
        settle_lots(connection, account, now)


def settle_lots_since(
    connection: sa.Connection, lease: Lease, now: datetime, newest: datetime | None
) -> None:
    """Settle lots that ended after an ended lease started: it may have spent less from them.

    ``newest`` is the latest end of the account's lots.
    """
    if newest is not None and lease.started_at is not None and lease.started_at < newest:
        settle_lots(connection, lease.account, now)
