"""Reports about the past for pages and exports: statements, receipts, usage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from ..db import search
from ..db.engine import Store
from ..db.schema import postings, transfers
from ..db.search import Accounts, Leases, Trail
from ..leases import repository as leases_repository
from ..leases.models import Lease
from ..monitoring import repository as monitoring_repository
from . import repository, rules, totals
from .models import Transfer, TransferKind
from .totals import SystemTotals, TotalUse
from .usage import LeaseUse

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


def entry_page(
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


def folded_page(
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


MOST_LEFT = 1000
"""How many unsummed ended leases are read one by one before they are added up."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """A session, and some of what it paid."""

    lease: Lease
    items: ReceiptItems


class ReportService:
    """Queries about the past; each one is answered from one consistent view."""

    def __init__(self, store: Store, clock: Callable[[], datetime]) -> None:
        self.store = store
        self.clock = clock

    def statement_page(
        self, account: str, before: int | None = None, limit: int = 50, *, folded: bool = False
    ) -> EntryPage:
        """Return lines of an account, newest first; ``folded``: a session's charges as one.

        Raises UnknownAccount.
        """
        read = folded_page if folded else entry_page
        return self.store.run(lambda connection: read(connection, account, before, limit))

    def receipt(self, lease_id: str, after: int = 0, limit: int = 100) -> Receipt:
        """Return what a session cost, item by item, oldest first. Raises UnknownLease."""
        read = items_of_account
        with self.store.read() as connection:
            lease = leases_repository.get(connection, lease_id)
            return Receipt(lease, read(connection, lease_id, lease.account, after, limit))

    def reversal_of(self, transfer_id: str) -> Transfer | None:
        """Return the transfer that reversed another one, if any."""
        key = rules.reversal_key(transfer_id)
        return self.store.run(lambda connection: repository.of_key(connection, key))

    def find_accounts(
        self,
        text: str = "",
        after: str = "",
        limit: int = 50,
        among: Collection[str] | None = None,
    ) -> Accounts:
        """Return members' and groups' accounts with this text in their names, by name."""
        with self.store.read() as connection:
            return search.find_accounts(connection, text, after, limit, among)

    def find_leases(
        self,
        *,
        user: str | None = None,
        account: str | None = None,
        text: str = "",
        before: str | None = None,
        limit: int = 50,
    ) -> Leases:
        """Return the newest leases of a member's servers or paid by an account.

        ``text``: only those with this in the member, server, account or environment. Raises
        UnknownLease.
        """
        with self.store.read() as connection:
            return search.find_leases(
                connection, user=user, account=account, text=text, before=before, limit=limit
            )

    def find_changes(self, text: str = "", before: int | None = None, limit: int = 50) -> Trail:
        """Return the admins' changes that contain this text, newest first."""
        with self.store.read() as connection:
            return search.find_changes(connection, text, before, limit)

    # Usage.

    def use_of_account(self, account: str, bounds: Sequence[datetime]) -> list[LeaseUse]:
        """Return what an account paid for between each two times: sessions and batch jobs."""
        found = [_sum(used.values()) for used in self.use_by(bounds, "account", account)]
        with self.store.read() as connection:
            jobs = monitoring_repository.job_use_between(connection, bounds, "account", account)
        beside = (_sum(each.values())._replace(sessions=0) for each in jobs)
        return [use.plus(more) for use, more in zip(found, beside, strict=True)]

    def use_of_jobs(self, bounds: Sequence[datetime], by: str) -> list[dict[str, LeaseUse]]:
        """Return what batch jobs used between each two of the times, by a field of Kind.

        A job counts as a session.
        """
        with self.store.read() as connection:
            return monitoring_repository.job_use_between(connection, bounds, by)

    def use_of_all_jobs(self) -> dict[str, monitoring_repository.JobUse]:
        """Return the use of all batch jobs ever, by model."""
        return self.store.run(monitoring_repository.all_job_use)

    def use_by(
        self, bounds: Sequence[datetime], by: str, name: str | None = None
    ) -> list[dict[str, LeaseUse]]:
        """Return what was used between each two of the times, by a field of Kind such as ``user``.

        With ``name``, only what has this value.
        """
        self._catch_up()
        now = self.clock()
        with self.store.read() as connection:
            return totals.use_between(connection, bounds, by, now, name)

    def until_now(self) -> tuple[SystemTotals, TotalUse, list[Lease]]:
        """Return all credits ever moved, all use of ended leases, and the open leases."""
        self._catch_up()
        now = self.clock()
        with self.store.read() as connection:
            used = totals.all_used(connection, now)
            return totals.all_moved(connection), used, leases_repository.open_leases(connection)

    def add_up(self) -> int:
        """Add some ended leases to the totals and return how many."""
        return self.store.run(totals.add_up, write=True)

    def _catch_up(self) -> None:
        """Add up leases if too many are pending, such as after an upgrade of an old site."""
        if self.store.run(lambda connection: totals.left(connection, MOST_LEFT)) < MOST_LEFT:
            return
        while self.add_up() == totals.LEASES_AT_ONCE:
            pass


def _sum(uses: Iterable[LeaseUse]) -> LeaseUse:
    total = LeaseUse()
    for use in uses:
        total = total.plus(use)
    return total
