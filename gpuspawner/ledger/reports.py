"""Reports about the past for pages and exports: statements, receipts, usage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
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

DUE = "due"
"""The kind of a part that was not charged yet."""

MOST_READ = 5000
"""How many postings are combined into one page for people, at most."""

MOST_PARTS = 20
"""How many of a line's newest charges are shown one by one; the earlier ones are one sum."""

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
    postings.c.id, postings.c.amount, transfers.c.kind, transfers.c.lease_id, transfers.c.at
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
_BACK_OF_LEASE = (
    sa.select(*_SELECTED)
    .select_from(_JOINED)
    .where(_LEASE, transfers.c.kind != TransferKind.CHARGE.value)
    .order_by(postings.c.id)
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
class StatementPart:
    """What a line for people opens to: a charge, a refund, or the sum of the earlier ones."""

    at: datetime
    kind: str
    """A transfer's kind, or ``due`` for what was not charged yet."""
    amount: int
    count: int = 1
    """How many lines it sums up."""


@dataclass(frozen=True, slots=True)
class StatementEntry:
    """One line of a statement; for people, all charges and refunds of a lease on the page."""

    id: int
    """The id of its posting, the oldest one of those combined; 0 if nothing was charged yet."""
    transfer: str
    """The transfer that gives it its reason: of those combined, the oldest charge."""
    at: datetime
    """Of those combined, the newest one's."""
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
    refunded: int = 0
    """Microcredits that came back, which ``amount`` includes."""
    parts: tuple[StatementPart, ...] = ()
    """What a line for people opens to, newest first: exactly its amount."""


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
    back: tuple[StatementEntry, ...] = ()
    """All that came back, on whichever page it is."""


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
    connection: sa.Connection,
    account: str,
    now: datetime,
    before: int | None = None,
    limit: int = 50,
) -> EntryPage:
    """Return the lines for people: all charges and refunds of a lease on the page are one.

    The first page includes what is due until ``now``, so that its balance is the current one.
    Raises UnknownAccount.
    """
    balance = _balance_before(connection, account, before)
    open_leases = leases_repository.open_leases(connection) if before is None else []
    due = {
        lease.id: (lease, amount)
        for lease in open_leases
        if lease.account == account and (amount := rules.charge_due(lease, now))
    }
    balance -= sum(amount for _, amount in due.values())
    marks = [(0, -amount, DUE, lease_id, now) for lease_id, (_, amount) in due.items()]
    read = _marks(connection, account, before or NEWEST)
    # What is due takes no place from what was posted: each page must have a posting to go on from.
    groups, cut = _together(chain(marks, read), max(limit, len(due) + 1))
    named = [_naming(group) for group in groups]
    details = _details(connection, [mark[0] for mark in named if mark[0]])
    entries = []
    for group, (posting, _, _, lease_id, _) in zip(groups, named, strict=True):
        if posting:
            line = _entry(details[posting], balance)
        else:
            line = _due_entry(due[lease_id][0], now, balance)
        entries.append(_combined(line, group))
        balance -= entries[-1].amount
    oldest = min((entry.id for entry in entries if entry.id), default=None)
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
    returned = connection.execute(_BACK_OF_LEASE, {"lease": lease_id, "account": account})
    back = tuple(_entry(row, 0) for row in returned)
    return ReceiptItems(tuple(entries), newer, int(count), -int(total), back)


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

    The use of a lease is one line, at the time of its newest charge.
    """
    groups: list[list[Sequence[Any]]] = []
    of_lease: dict[str | None, list[Sequence[Any]]] = {}
    for mark in marks:
        _, _, kind, lease_id, _ = mark
        use = kind in (*USE, DUE)
        if use and lease_id in of_lease:
            of_lease[lease_id].append(mark)
            continue
        if len(groups) == limit:
            return groups, True
        groups.append([mark])
        if use:
            of_lease[lease_id] = groups[-1]
    return groups, False


def _naming(group: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """Return the posting that says what a line is for: its oldest charge, if it has one.

    The newest charge of an ended session says "up to its end", and a refund why it was made.
    """
    charges = [mark for mark in group if mark[2] == TransferKind.CHARGE.value]
    return charges[-1] if charges else group[0]


def _due_entry(lease: Lease, now: datetime, balance: int) -> StatementEntry:
    """Return the line of a lease that was not charged yet."""
    kind, actor = TransferKind.CHARGE.value, rules.ACTOR_ACCOUNTING
    reason = rules.charge_reason([device.model for device in lease.devices], lease.server)
    return StatementEntry(0, "", now, kind, reason, actor, 0, balance, lease.id)


def _combined(line: StatementEntry, group: Sequence[Sequence[Any]]) -> StatementEntry:
    """Return a line with the figures of all postings that it combines, newest first."""
    amount = sum(mark[1] for mark in group)
    shown, earlier = group[:MOST_PARTS], group[MOST_PARTS:]
    parts = [StatementPart(mark[4], mark[2], mark[1]) for mark in shown]
    if earlier:
        left = sum(mark[1] for mark in earlier)
        parts.append(StatementPart(earlier[0][4], earlier[0][2], left, len(earlier)))
    posted = [mark[0] for mark in group if mark[0]]
    refund = TransferKind.REFUND.value
    return replace(
        line,
        id=posted[-1] if posted else 0,
        at=group[0][4],
        amount=amount,
        count=len(posted),
        refunded=sum(mark[1] for mark in group if mark[2] == refund),
        parts=tuple(parts) if group[0][2] in (*USE, DUE) else (),
    )


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

    def statement_page(self, account: str, before: int | None = None, limit: int = 50) -> EntryPage:
        """Return lines of an account one by one, newest first. Raises UnknownAccount."""
        return self.store.run(lambda connection: entry_page(connection, account, before, limit))

    def folded_page(
        self, account: str, now: datetime, before: int | None = None, limit: int = 50
    ) -> EntryPage:
        """Return lines for people: a session's charges as one, with what is due until ``now``.

        Raises UnknownAccount.
        """
        return self.store.run(lambda x: folded_page(x, account, now, before, limit))

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
