"""A member's own credits: statement, receipts, CSV, and who pays."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial

from tornado import web

from ..errors import (
    GPUSpawnerError,
    InvalidRequest,
    LedgerError,
    NotAllowed,
    UnknownAccount,
    UnknownLease,
)
from ..model import Lease, LeaseState, member_account
from ..scopes import READ_ACCOUNTS
from ..store.statements import Entry
from . import access, credits, figures
from .api import amount, instant
from .base import Handler
from .corrections import refundable
from .fields import LAST, account_of, whole
from .forms import part
from .pages import MemberPage, Page
from .sessions import goes_on

ITEMS = 100
"""Items of a receipt on a page."""

COLUMNS = (
    "at",
    "kind",
    "amount",
    "balance",
    "reason",
    "actor",
    "lease",
    "transfer",
)
"""Of a statement as CSV."""

ITEM_COLUMNS = ("at", "kind", "amount", "cost", "reason", "transfer")
"""Of a receipt as CSV."""

NOT_YOUR_SESSION = "This session is not yours: its receipt is for its member, and for admins."


class StatementPage(Page):
    """One page of a statement: my own, or of an account that I may see."""

    @web.authenticated
    async def get(self, name: str = "") -> None:
        account = account_of(name) if name else member_account(self.user)
        await access.must_read(self, account)
        text = self.get_query_argument("before", "")
        before = whole(text, "before", 1, LAST) if text else None
        if name:
            await self.read(self.broker.account, account)  # which must be there
        own = account == member_account(self.user)
        self.show(
            "statement.html",
            user=self.user,
            admin=self.admin,
            account=account,
            own=own,
            base="statement" if own and not name else f"accounts/{part(account)}/statement",
            now=self.broker.clock(),
            page=await self.read(credits.statement, self.broker, account, before),
            first=before is None,
        )


class CSVHandler(Page):
    """A table that is sent line by line, however long it is."""

    def begin(self, name: str) -> None:
        """Headers of a file to save."""
        safe = "".join(c if c.isalnum() and c.isascii() else "-" for c in name)
        self.set_header("Content-Type", "text/csv; charset=utf-8")
        self.set_header("Content-Disposition", f'attachment; filename="{safe}.csv"')

    async def send(self, columns: Sequence[str], rows: Iterator[list[Sequence[str]]]) -> None:
        """Send the table; the rows come in portions, each read off the event loop."""
        self.write(table([columns]))
        while True:
            portion = await self.broker.report(next, rows, None)
            if portion is None:
                return
            self.write(table(portion))
            await self.flush()


class StatementCSV(CSVHandler):
    """The whole statement, every charge by itself."""

    @web.authenticated
    async def get(self, name: str = "") -> None:
        account = account_of(name) if name else member_account(self.user)
        await access.must_read(self, account)
        if name:
            await self.read(self.broker.account, account)
        self.begin(f"statement-{account}")
        await self.send(COLUMNS, self._rows(account))

    def _rows(self, account: str) -> Iterator[list[Sequence[str]]]:
        before: int | None = None
        while True:  # a transaction each: a slow reader keeps none open
            try:
                page = self.broker.statement_page(account, before, 2000)
            except UnknownAccount:
                return
            yield [line(entry) for entry in page.entries]
            before = page.older
            if before is None:
                return


class ReceiptPage(Page):
    """One session: its devices, times and rate, and each charge and refund."""

    @web.authenticated
    async def get(self, lease_id: str) -> None:
        await may_see(self, lease_id)
        text = self.get_query_argument("after", "0")
        after = whole(text, "after", 0, LAST)
        receipt = await self.read(self.broker.receipt, lease_id, after, ITEMS)
        now = self.broker.clock()
        (some,) = figures.lease_figures(self.broker, [receipt.lease], now)
        use = await self.read(self.broker.session_use, receipt.lease)
        self.show(
            "receipt.html",
            user=self.user,
            admin=self.admin,
            now=now,
            some=some,
            items=receipt.items,
            use=use,
            first=after == 0,
            back=receipt.lease.charged + receipt.lease.refunded - receipt.items.total,
            ended=receipt.lease.state is LeaseState.ENDED,
            refundable=self.admin and refundable(receipt.lease),
            goes_on=self.admin and goes_on(receipt.lease),
            refunded=self.get_query_argument("refunded", ""),
            xsrf=self.xsrf,
            account_page=f"accounts/{part(receipt.lease.account)}",
        )


class ReceiptCSV(CSVHandler):
    """Each charge and refund of one session."""

    @web.authenticated
    async def get(self, lease_id: str) -> None:
        await may_see(self, lease_id)
        self.begin(f"receipt-{lease_id}")
        await self.send(ITEM_COLUMNS, self._rows(lease_id))

    def _rows(self, lease_id: str) -> Iterator[list[Sequence[str]]]:
        after: int | None = 0
        while after is not None:
            items = self.broker.receipt(lease_id, after, 2000).items
            yield [item(entry) for entry in items.entries]
            after = items.newer


class PayerForm(MemberPage):
    """Which account pays for me when I do not say it."""

    async def get(self) -> None:
        self.redirect(self.context.prefix)

    @web.authenticated
    async def post(self) -> None:
        keep = partial(
            self.broker.keep_payer,
            self.user,
            str(self.get_body_argument("account", ""))[:300],
            actor=self.user,
            groups=self.groups,
        )
        try:
            await self.broker.run(keep)
        except LedgerError:  # not even the name of an account
            await self.show_mine(InvalidRequest("Choose one of the accounts.", field="account"))
            return
        except GPUSpawnerError as refusal:
            await self.show_mine(refusal)
            return
        self.redirect(f"{self.context.prefix}?kept=1", status=303)


async def may_see(handler: Handler, lease_id: str) -> Lease:
    """A session of the one who asks, or of an account whose statement they may see.

    Whether there is a session of this id, nobody else hears.
    """
    lease: Lease | None = None
    try:
        lease = await handler.broker.read(handler.broker.lease, lease_id)
    except UnknownLease as error:
        if handler.reach(READ_ACCOUNTS).everybody:
            raise web.HTTPError(404) from error
    if lease and not handler.is_service and lease.server.user == handler.user:
        return lease
    whom = handler.reach(READ_ACCOUNTS)
    if lease and await access.reaches(handler, whom, lease.account):
        return lease
    raise web.HTTPError(403) from NotAllowed(NOT_YOUR_SESSION)


# Lines of CSV.


def table(rows: Iterable[Sequence[str]]) -> str:
    """Rows as CSV. Text that a spreadsheet would take for a formula is not one any more."""
    out = io.StringIO()
    csv.writer(out).writerows([[_harmless(cell) for cell in row] for row in rows])
    return out.getvalue()


def line(entry: Entry) -> Sequence[str]:
    """A line of a statement."""
    return (
        _time(entry.at),
        entry.kind,
        amount(entry.amount),
        amount(entry.balance),
        entry.reason,
        entry.actor,
        entry.lease_id or "",
        entry.transfer,
    )


def item(entry: Entry) -> Sequence[str]:
    """A line of a receipt; what the session paid is above zero."""
    return (
        _time(entry.at),
        entry.kind,
        amount(-entry.amount),
        amount(entry.balance),
        entry.reason,
        entry.transfer,
    )


def _time(at: datetime) -> str:
    return instant(at) or ""


def _harmless(cell: str) -> str:
    """An amount such as -1.5 stays one; other text that begins a formula gets an apostrophe."""
    if cell[:1] in ("=", "+", "-", "@", "\t", "\r") and not _is_number(cell):
        return "'" + cell
    return cell


def _is_number(cell: str) -> bool:
    return cell.removeprefix("-").replace(".", "", 1).isdecimal()


_LEASE = "([0-9a-f]{1,64})"

HANDLERS: list[tuple[str, type[Handler]]] = [
    ("payer", PayerForm),
    ("statement", StatementPage),
    (r"statement\.csv", StatementCSV),
    (f"leases/{_LEASE}", ReceiptPage),
    (rf"leases/{_LEASE}\.csv", ReceiptCSV),
    ("accounts/([^/]+)/statement", StatementPage),
    (r"accounts/([^/]+)/statement\.csv", StatementCSV),
]
