"""Statements of an account, page by page, however long they are.

A page starts where the one before ended, so each costs the same, and new postings shift none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from ..db.schema import postings, transfers
from . import repository
from .models import TransferKind

USE = (TransferKind.CHARGE.value, TransferKind.REFUND.value)
"""The kinds of lines that a lease makes, one a minute."""

MOST_READ = 5000
"""How many postings are combined into one page for people, at most."""

AT_FIRST = 200
"""How many of these are read before it is known how many are needed."""

_JOINED = postings.join(transfers, transfers.c.id == postings.c.transfer_id)
_account = postings.c.account == sa.bindparam("account")
# Hidden from the index of accounts: a lease has few transfers, an account many.
_of_account = sa.func.coalesce(postings.c.account, "") == sa.bindparam("account")
_SELECTED = (
    postings.c.id,
    transfers.c.id.label("transfer"),
    transfers.c.at,
    transfers.c.kind,
    transfers.c.reason,
    transfers.c.actor,
    postings.c.amount,
    transfers.c.lease_id,
)
_PAGE = (
    sa.select(*_SELECTED)
    .select_from(_JOINED)
    .where(_account, postings.c.id < sa.bindparam("before"))
    .order_by(postings.c.id.desc())
    .limit(sa.bindparam("most", type_=sa.Integer))
)
_MARKS = _PAGE.with_only_columns(
    postings.c.id, postings.c.amount, transfers.c.kind, transfers.c.lease_id
)
_SINCE = sa.select(sa.func.coalesce(sa.func.sum(postings.c.amount), 0)).where(
    _account, postings.c.id >= sa.bindparam("before")
)
_LEASE = sa.and_(transfers.c.lease_id == sa.bindparam("lease"), _of_account)
_OF_LEASE = (
    sa.select(*_SELECTED)
    .select_from(_JOINED)
    .where(_LEASE, postings.c.id > sa.bindparam("after"))
    .order_by(postings.c.id)
    .limit(sa.bindparam("most", type_=sa.Integer))
)
_upto = sa.case((postings.c.id <= sa.bindparam("after"), postings.c.amount), else_=0)
_SUMS_OF_LEASE = (
    sa.select(
        sa.func.count(),
        sa.func.coalesce(sa.func.sum(postings.c.amount), 0),
        sa.func.coalesce(sa.func.sum(_upto), 0),
    )
    .select_from(_JOINED)
    .where(_LEASE)
)

NEWEST = 2**62
"""A posting id that is larger than all others."""


@dataclass(frozen=True, slots=True)
class StatementEntry:
    """One line of a statement; for people, all charges of a lease between two other events."""

    id: int
    """The id of its posting, the oldest one of those combined."""
    transfer: str
    """The newest transfer of those combined."""
    at: datetime
    kind: str
    reason: str
    actor: str
    amount: int
    """Microcredits into (minus: out of) the account."""
    balance: int
    """The balance after it."""
    lease_id: str | None
    count: int = 1
    """How many lines are combined."""


@dataclass(frozen=True, slots=True)
class EntryPage:
    """Some lines, newest first."""

    entries: tuple[StatementEntry, ...]
    older: int | None
    """The start of the next page; None on the last one."""


@dataclass(frozen=True, slots=True)
class ReceiptItems:
    """Some of what a lease paid, oldest first, and the total."""

    entries: tuple[StatementEntry, ...]
    """``balance`` is the cost of the lease up to and including this one."""
    newer: int | None
    """The start of the next page; None on the last one."""
    count: int
    total: int
    """Microcredits that the lease cost: its charges less its refunds."""


def page(
    connection: sa.Connection, account: str, before: int | None = None, limit: int = 50
) -> EntryPage:
    """Return the lines of an account one by one. Raises UnknownAccount."""
    balance = _balance_before(connection, account, before)
    values = {"account": account, "before": before or NEWEST, "most": limit + 1}
    rows = connection.execute(_PAGE, values).all()
    entries = []
    for row in rows[:limit]:
        entries.append(_entry(row, balance))
        balance -= row[6]
    return EntryPage(tuple(entries), entries[-1].id if len(rows) > limit else None)


def folded(
    connection: sa.Connection, account: str, before: int | None = None, limit: int = 50
) -> EntryPage:
    """Return the lines for people: a lease's charges with no other event between them are one.

    Raises UnknownAccount.
    """
    balance = _balance_before(connection, account, before)
    groups, cut = _together(_marks(connection, account, before or NEWEST), limit)
    newest = _details(connection, [group[0][0] for group in groups])
    entries = []
    for group in groups:
        amount = sum(mark[1] for mark in group)
        line = _entry(newest[group[0][0]], balance)
        entries.append(replace(line, id=group[-1][0], amount=amount, count=len(group)))
        balance -= amount
    oldest = min((entry.id for entry in entries), default=None)
    if oldest is not None and not cut:  # there are no more, or too many were read
        values = {"account": account, "before": oldest, "most": 1}
        cut = connection.execute(_MARKS, values).first() is not None
    return EntryPage(tuple(entries), oldest if cut else None)


def items_of_account(
    connection: sa.Connection, lease_id: str, account: str, after: int = 0, limit: int = 100
) -> ReceiptItems:
    """Return what a lease paid from its account, and got back."""
    named = {"lease": lease_id, "account": account, "after": after}
    count, total, upto = connection.execute(_SUMS_OF_LEASE, named).one()
    rows = connection.execute(_OF_LEASE, {**named, "most": limit + 1}).all()
    cost = -int(upto)
    entries = []
    for row in rows[:limit]:
        cost -= row[6]
        entries.append(_entry(row, cost))
    newer = entries[-1].id if len(rows) > limit else None
    return ReceiptItems(tuple(entries), newer, int(count), -int(total))


def _balance_before(connection: sa.Connection, account: str, before: int | None) -> int:
    """Return the balance after the newest line of the page."""
    balance = repository.get_account(connection, account).balance
    if before is None:
        return balance
    values = {"account": account, "before": before}
    return balance - int(connection.execute(_SINCE, values).scalar_one())


def _entry(row: Sequence[Any], balance: int) -> StatementEntry:
    posting, transfer, at, kind, reason, actor, amount, lease_id = row
    return StatementEntry(posting, transfer, at, kind, reason, actor, amount, balance, lease_id)


def _marks(connection: sa.Connection, account: str, before: int) -> Iterator[Sequence[Any]]:
    """Yield what lines are combined from, newest first, for as long as more is needed."""
    size, left = AT_FIRST, MOST_READ
    while left:
        most = min(size, left)
        values = {"account": account, "before": before, "most": most}
        rows = connection.execute(_MARKS, values).all()
        yield from rows
        if len(rows) < most:
            return
        before, left, size = rows[-1][0], left - most, 4 * size


def _together(marks: Iterable[Sequence[Any]], limit: int) -> tuple[list[list[Sequence[Any]]], bool]:
    """Return the postings of each line, newest line first, and True if there are more lines.

    A stretch of nothing but use is one line for each lease, in the order of their newest charges.
    """
    groups: list[list[Sequence[Any]]] = []
    stretch: dict[str | None, list[Sequence[Any]]] = {}
    for mark in marks:
        _, _, kind, lease_id = mark
        use = kind in USE
        if not use:
            stretch = {}
        if use and lease_id in stretch:
            stretch[lease_id].append(mark)
            continue
        if len(groups) == limit:
            return groups, True
        groups.append([mark])
        if use:
            stretch[lease_id] = groups[-1]
    return groups, False


def _details(connection: sa.Connection, ids: Sequence[int]) -> dict[int, Sequence[Any]]:
    query = sa.select(*_SELECTED).select_from(_JOINED).where(postings.c.id.in_(ids))
    return {row[0]: tuple(row) for row in connection.execute(query)}
