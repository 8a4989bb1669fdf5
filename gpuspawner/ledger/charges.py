"""Charges of leases that go on or end. In the caller's transaction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import sqlalchemy as sa

from ..leases import repository as leases_repository
from ..leases.models import Lease
from . import credit_policy, repository, rules
from .credit_policy import OVERDRAFT


def charge_due_leases(
    connection: sa.Connection,
    due: Sequence[repository.DueCharge],
    bounded: Sequence[Lease],
    now: datetime,
) -> int:
    """Charge what is due, and leases with an overdraft what can be paid; how many were."""
    payable_by_lease = shares_of(connection, bounded, now)
    repository.charge_leases(connection, due, now)
    return len(due) + charge_each(connection, bounded, now, payable_by_lease)


def charge_each(
    connection: sa.Connection,
    some: Sequence[Lease],
    now: datetime,
    shares: Mapping[str, int],
) -> int:
    """Charge these leases one after the other; how many were. ``shares`` is what the accounts
    can pay of those that have an overdraft, in microcredits by lease.
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
    """What of it the account can pay at the end of a lease: an overdraft has a bound.

    Whoever shares it is charged up to then too: no other end takes that from them.
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
    """What the accounts can pay of those of these leases that have an overdraft."""
    found: dict[str, int] = {}
    for account in dict.fromkeys(x.account for x in some if x.when_dry == OVERDRAFT):
        if paid_for := leases_repository.paying(connection, account):
            found |= credit_policy.shares([lease for lease, _ in paid_for], paid_for[0][1], until)
    return found
