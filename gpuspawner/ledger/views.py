"""Accounts, statements and receipts as pages, CSV and JSON."""

from __future__ import annotations

import csv
import io
import secrets
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime

from tornado import web

from ..core.errors import (
    GPUSpawnerError,
    InvalidRequest,
    LedgerError,
    NotAllowed,
    UnknownAccount,
    UnknownLease,
)
from ..core.scopes import GRANT, READ_ACCOUNTS
from ..core.text import LONGEST_REASON
from ..core.units import format_credits, round_credits
from ..db.search import LONGEST
from ..leases.models import Lease, LeaseState
from ..leases.sessions import goes_on
from ..monitoring.models import DeviceUse
from ..web import base as web_base
from ..web import view_models
from ..web.api import AFTER, AFTER_NAME, BEFORE, LIMIT, SEARCH, APIHandler, ChangingAPI, operation
from ..web.base import ServiceHandler
from ..web.fields import LAST, account_of, key_of, text_of, whole
from ..web.pages import BillingPage, FormPage, Page, part
from ..web.schemas import Answer, EntryAnswer
from . import schemas
from .correction_views import refundable
from .models import member_account
from .reports import StatementEntry

ITEMS = 100
"""Items of a receipt per page."""

COLUMNS = ("at", "kind", "amount", "balance", "reason", "actor", "lease", "transfer")
"""Columns of a statement as CSV."""

ITEM_COLUMNS = ("at", "kind", "amount", "cost", "reason", "transfer")
"""Columns of a receipt as CSV."""

NOT_YOUR_SESSION = "This session is not yours: its receipt is for its member, and for admins."


async def readable_account(handler: ServiceHandler, name: str) -> str:
    """Return an account that the user may read, by default their own, which may not be open yet."""
    account = account_of(name) if name else member_account(handler.user)
    await web_base.must_read(handler, account)
    if name:
        await handler.read(handler.services.ledger.account, account)  # raises if it is unknown
    return account


class StatementPage(Page):
    """The statement of the member's own account, or of another one that they may see."""

    @web.authenticated
    async def get(self, name: str = "") -> None:
        """Send one page of the statement."""
        account = await readable_account(self, name)
        text = self.get_query_argument("before", "")
        before = whole(text, "before", 1, LAST) if text else None
        own = account == member_account(self.user)
        now = self.services.clock()
        statement = view_models.account_statement
        self.show(
            "statement.html",
            account=account,
            own=own,
            base="statement" if own and not name else f"accounts/{part(account)}/statement",
            now=now,
            page=await self.read(statement, self.services, account, now, before),
            first=before is None,
        )


class CSVHandler(Page):
    """The base of handlers that send CSV tables of any length, in portions."""

    def begin(self, name: str) -> None:
        """Set the headers of a file to download."""
        safe = "".join(c if c.isalnum() and c.isascii() else "-" for c in name)
        self.set_header("Content-Type", "text/csv; charset=utf-8")
        self.set_header("Content-Disposition", f'attachment; filename="{safe}.csv"')

    async def send(self, columns: Sequence[str], rows: Iterator[list[Sequence[str]]]) -> None:
        """Send the table; ``rows`` yields portions, which are read off the event loop."""
        self.write(table([columns]))
        while True:
            portion = await self.services.report(next, rows, None)
            if portion is None:
                return
            self.write(table(portion))
            await self.flush()


class StatementCSV(CSVHandler):
    """The whole statement as CSV, with every charge on its own line."""

    @web.authenticated
    async def get(self, name: str = "") -> None:
        """Send the file."""
        account = await readable_account(self, name)
        self.begin(f"statement-{account}")
        await self.send(COLUMNS, self._rows(account))

    def _rows(self, account: str) -> Iterator[list[Sequence[str]]]:
        before: int | None = None
        while True:  # one transaction per page, so that slow readers keep none open
            try:
                page = self.services.reports.statement_page(account, before, 2000)
            except UnknownAccount:
                return
            yield [cells(EntryAnswer.of(entry), COLUMNS) for entry in page.entries]
            before = page.older
            if before is None:
                return


class ReceiptPage(Page):
    """One session: its devices, times and rate, and each charge and refund."""

    @web.authenticated
    async def get(self, lease_id: str) -> None:
        """Send one page of the receipt."""
        await may_see(self, lease_id)
        text = self.get_query_argument("after", "0")
        after = whole(text, "after", 0, LAST)
        receipt = await self.read(self.services.reports.receipt, lease_id, after, ITEMS)
        now = self.services.clock()
        figures = view_models.lease_figures
        (some,) = await self.read(figures, self.services, [receipt.lease], now)
        use = await self.read(self.services.monitoring.session_use, receipt.lease)
        items, due = receipt.items, some.cost - receipt.lease.charged
        back = sum(round_credits(item.amount) for item in items.back)
        self.show(
            "receipt.html",
            now=now,
            some=some,
            items=items,
            due=due,
            # What came back is in rows of its own: with them, it adds up to the total as shown.
            charged=round_credits(items.total + due) + back,
            use=use,
            first=after == 0,
            ended=receipt.lease.state is LeaseState.ENDED,
            refundable=self.admin and refundable(receipt.lease),
            goes_on=self.admin and goes_on(receipt.lease),
            refunded=self.get_query_argument("refunded", ""),
            xsrf=self.xsrf,
            account_page=f"accounts/{part(receipt.lease.account)}",
        )


class ReceiptCSV(CSVHandler):
    """Each charge and refund of one session, as CSV."""

    @web.authenticated
    async def get(self, lease_id: str) -> None:
        """Send the file."""
        await may_see(self, lease_id)
        self.begin(f"receipt-{lease_id}")
        await self.send(ITEM_COLUMNS, self._rows(lease_id))

    def _rows(self, lease_id: str) -> Iterator[list[Sequence[str]]]:
        after: int | None = 0
        while after is not None:
            items = self.services.reports.receipt(lease_id, after, 2000).items
            yield [cells(_item(entry), ITEM_COLUMNS) for entry in items.entries]
            after = items.newer


class PayerForm(BillingPage):
    """The form that chooses the member's default account."""

    async def get(self) -> None:
        """Redirect to the page with the form."""
        self.redirect(f"{self.context.prefix}billing")

    @web.authenticated
    async def post(self) -> None:
        """Store the choice."""
        account, who = str(self.get_body_argument("account", ""))[:300], self.user
        keep = self.services.ledger.keep_payer
        try:
            await self.services.run(keep, who, account, actor=who, groups=self.groups)
        except LedgerError:  # not a valid account name
            await self.show_mine(InvalidRequest("Choose one of the accounts.", field="account"))
            return
        except GPUSpawnerError as refusal:
            await self.show_mine(refusal)
            return
        self.redirect(f"{self.context.prefix}billing?kept=1", status=303)


async def may_see(handler: ServiceHandler, lease_id: str) -> Lease:
    """Return the user's own session, or one whose account's statement they may see.

    Raises HTTPError 403 for everybody else, which does not reveal if the session exists.
    """
    lease: Lease | None = None
    try:
        lease = await handler.services.read(handler.services.leases.get, lease_id)
    except UnknownLease as error:
        if handler.reach(READ_ACCOUNTS).everybody:
            raise web.HTTPError(404) from error
    if lease and not handler.is_service and lease.server.user == handler.user:
        return lease
    whom = handler.reach(READ_ACCOUNTS)
    if lease and await web_base.reaches(handler, whom, lease.account):
        return lease
    raise web.HTTPError(403) from NotAllowed(NOT_YOUR_SESSION)


# CSV.


def table(rows: Iterable[Sequence[str]]) -> str:
    """Format rows as CSV, with text that spreadsheets would run as a formula made harmless."""
    out = io.StringIO()
    csv.writer(out).writerows([[_harmless(cell) for cell in row] for row in rows])
    return out.getvalue()


def cells(answer: Answer, columns: Sequence[str]) -> Sequence[str]:
    """Return an answer's JSON values for these columns, as one CSV row."""
    told = answer.as_json()
    return ["" if told[name] is None else str(told[name]) for name in columns]


def _harmless(cell: str) -> str:
    """Put an apostrophe before text that starts a formula, but not before numbers like -1.5."""
    is_number = cell.removeprefix("-").replace(".", "", 1).isdecimal()
    if cell[:1] in ("=", "+", "-", "@", "\t", "\r") and not is_number:
        return "'" + cell
    return cell


_LEASE = "([0-9a-f]{1,64})"

STATEMENT_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("payer", PayerForm),
    ("statement", StatementPage),
    (r"statement\.csv", StatementCSV),
    (f"leases/{_LEASE}", ReceiptPage),
    (rf"leases/{_LEASE}\.csv", ReceiptCSV),
    ("accounts/([^/]+)/statement", StatementPage),
    (r"accounts/([^/]+)/statement\.csv", StatementCSV),
]


ROWS = 50
"""Accounts per page."""


async def find_accounts(
    handler: ServiceHandler,
    text: str,
    after: str,
    limit: int,
    among: Collection[str] | None = None,
) -> tuple[datetime, tuple[view_models.Funds, ...], str | None]:
    """Return the time, the accounts with this text in their names, and where the next ones begin.

    ``among``: only those of these names.
    """
    services, minutes = handler.services, handler.context.warn_minutes
    found = await handler.read(services.reports.find_accounts, text, after, limit, among)
    opened = await handler.read(services.leases.open_leases)
    now = services.clock()
    funds = await handler.read(view_models.all_funds, services, found.found, opened, now, minutes)
    return now, funds, found.following


class AccountsPage(Page):
    """All accounts, or those whose names match a search, for admins."""

    @web.authenticated
    async def get(self) -> None:
        """Send one page of accounts."""
        self.need_admin()
        text = text_of(self.get_query_argument("search", ""), "search", LONGEST)
        after = self.get_query_argument("after", "")[:300]
        now, accounts, following = await find_accounts(self, text, after, ROWS)
        self.show(
            "accounts.html",
            now=now,
            search=text,
            accounts=accounts,
            following=following,
            first=not after,
        )


class AccountPage(FormPage):
    """One account: its balance, its use, and the form that grants credits.

    Holders of a scope that covers the account see the page too, without the form.
    """

    @web.authenticated
    async def get(self, name: str) -> None:
        """Send the page; members who are not admins see their own account on "Billing"."""
        account = account_of(name)
        if account == member_account(self.user) and not self.admin:
            self.go("billing")
            return
        await web_base.must_read(self, account)
        await self.show_account(account)

    async def show_account(
        self, account: str, refusal: GPUSpawnerError | None = None, **typed: str
    ) -> None:
        """Send the page; ``typed`` is the content of a refused form."""
        minutes = self.context.warn_minutes
        found = await self.read(view_models.account_figures, self.services, account, minutes)
        overview = await self.read(self.services.monitoring.overview)
        kind, _, owner = account.partition(":")
        members = await web_base.members_of(self, owner) if kind == "group" else frozenset()
        self.show(
            "account.html",
            now=found.now,
            account=account,
            path=f"accounts/{part(account)}",
            funds=found.funds,
            members=sorted(members) if kind == "group" else None,
            lasting=view_models.lasting(found.funds, overview, found.now),
            running=found.running,
            past=found.past,
            done=self.get_query_argument("done", ""),
            refusal=refusal,
            typed={"amount": "", "reason": "", "until": "", **typed},
            zone_name=self.services.settings.rates.zone,
            xsrf=self.xsrf,
        )


class GrantForm(AccountPage):
    """The form that grants credits to an account or takes them back."""

    async def get(self, name: str) -> None:
        """Redirect to the account."""
        self.go(f"accounts/{part(account_of(name))}")

    @web.authenticated
    async def post(self, name: str) -> None:
        """Preview the change; if it is confirmed, make it once."""
        account = account_of(name)
        await web_base.must_grant(self, account)
        names = ("amount", "reason", "until")
        typed = {field: self.field(field)[: 2 * LONGEST_REASON] for field in names}
        try:
            sent = self.typed(schemas.GrantBody)
            if sent.amount < 0:
                web_base.must_take(self, account)
            before = await self.services.read(self.services.ledger.current_account, account)
            if not self.confirmed:
                self._ask(account, sent, before.balance)
                return
            key = key_of(self.field("key"))
            done = await self.services.run(
                self.services.ledger.grant,
                account,
                sent.amount,
                actor=self.actor,
                reason=sent.reason,
                key=f"page:{self.actor}:{key}",
                until=sent.until,
            )
        except UnknownAccount as error:
            raise web.HTTPError(404) from error
        except GPUSpawnerError as refusal:
            await self.show_account(account, refusal, **typed)
            return
        became = ("granted" if sent.amount > 0 else "taken") if done else "nothing"
        self.go(f"accounts/{part(account)}?done={became}")

    def _ask(self, account: str, sent: schemas.GrantBody, balance: int) -> None:
        self.confirm(
            "grant",
            action=f"accounts/{part(account)}/grant",
            back=f"accounts/{part(account)}",
            fields={
                "amount": format_credits(sent.amount, 6),
                "reason": sent.reason,
                "until": sent.until.isoformat() if sent.until else "",
            },
            account=account,
            sent=sent,
            balance=balance,
        )


ACCOUNT_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("accounts", AccountsPage),
    ("accounts/([^/]+)", AccountPage),
    ("accounts/([^/]+)/grant", GrantForm),
]


NOT_ALL = (
    f"The list of accounts is for admins and for users with the scope {READ_ACCOUNTS}. Your own "
    "is at api/me."
)


class AccountsAPI(APIHandler):
    """List the accounts that I may see by name: all for admins, else those my scopes reach."""

    for_services = True

    @operation("accounts", schemas.AccountsAnswer, SEARCH, AFTER_NAME, LIMIT, scope=READ_ACCOUNTS)
    @web.authenticated
    async def get(self) -> None:  # noqa: D102 - the class docstring is the summary
        whom = self.reach(READ_ACCOUNTS)
        if not whom:
            raise web.HTTPError(403) from NotAllowed(NOT_ALL)
        among = None if whom.everybody else await web_base.accounts_of(self, whom)
        limit = self.limit
        text = text_of(self.get_query_argument("search", ""), "search", LONGEST)
        after = self.get_query_argument("after", "")
        now, told, following = await find_accounts(self, text, after, limit, among)
        self.answer(schemas.AccountsAnswer, as_of=now, accounts=told, next=following)


class AccountAPI(APIHandler):
    """One account as JSON."""

    for_services = True

    @operation("accounts/{account}", schemas.AccountAnswer, scope=READ_ACCOUNTS)
    @web.authenticated
    async def get(self, name: str) -> None:
        """Return one account: mine, a group's that I may draw on, or one that my scopes reach."""
        account = account_of(name)
        if not web_base.may_see_balance(self, account):
            await web_base.must_read(self, account)
        minutes = self.context.warn_minutes
        found = await self.read(view_models.funds_of, self.services, account, minutes)
        self.answer(schemas.AccountAnswer, found, as_of=self.services.clock())


class StatementAPI(APIHandler):
    """A statement as JSON."""

    for_services = True

    @operation(
        "accounts/{account}/statement", schemas.StatementAnswer, BEFORE, LIMIT, scope=READ_ACCOUNTS
    )
    @web.authenticated
    async def get(self, name: str) -> None:
        """Return an account's statement, newest first, page by page."""
        account = account_of(name)
        await web_base.must_read(self, account)
        limit, before = self.limit, self.before
        page = await self.read(self.services.reports.statement_page, account, before, limit)
        now = self.services.clock()
        self.answer(schemas.StatementAnswer, page, account=account, as_of=now, next=page.older)


class GrantAPI(ChangingAPI):
    """The API operation that grants credits to an account or takes them back."""

    for_services = True

    @operation(
        "accounts/{account}/grants",
        schemas.GrantedAnswer,
        name="grant",
        body=schemas.GrantBody,
        scope=GRANT,
    )
    @web.authenticated
    async def post(self, name: str) -> None:
        """Grant credits to an account, optionally until a given time.

        ``{"amount": "25", "reason": "week 3", "key": "week-3"}``: the same key with the same amount
        is given once, however often it is sent. ``until`` is when they end. An amount below zero
        takes back, which is for admins; for others that is 403.
        """
        account = account_of(name)
        await web_base.must_grant(self, account)
        sent = self.sent(schemas.GrantBody)
        if sent.amount < 0:
            web_base.must_take(self, account)
        key = sent.key or secrets.token_hex(8)
        done = await self.do(
            self.services.ledger.grant,
            account,
            sent.amount,
            reason=sent.reason,
            key=f"api:{self.actor}:{account}:{key}",  # separate for each actor and account
            until=sent.until,
        )
        found = await self.read(self.services.ledger.account, account)
        self.answer(
            schemas.GrantedAnswer,
            sent,
            granted=done,
            account=account,
            key=key,
            balance=found.balance,
        )


class ReceiptAPI(APIHandler):
    """A receipt as JSON."""

    for_services = True

    @operation("leases/{lease}/receipt", schemas.ReceiptAnswer, AFTER, LIMIT, scope=READ_ACCOUNTS)
    @web.authenticated
    async def get(self, lease_id: str) -> None:
        """Return what a session cost, item by item, oldest first."""
        await may_see(self, lease_id)
        limit = self.limit
        after = whole(self.get_query_argument("after", "0"), "after", 0, LAST)
        receipt = await self.read(self.services.reports.receipt, lease_id, after, limit)
        now = self.services.clock()
        figures = view_models.lease_figures
        (told,) = await self.read(figures, self.services, [receipt.lease], now)
        use = await self.read(self.services.monitoring.session_use, receipt.lease)
        items = receipt.items
        self.answer(
            schemas.ReceiptAnswer,
            as_of=now,
            lease=told,
            use=[_use(use[uuid]) for uuid in receipt.lease.uuids if uuid in use],
            total=items.total,
            count=items.count,
            items=[_item(some) for some in items.entries],
            next=items.newer,
        )


def _item(some: StatementEntry) -> schemas.ItemAnswer:
    """Return a receipt item; what the session paid is positive."""
    return schemas.ItemAnswer.of(some, amount=-some.amount)


def _use(device: DeviceUse) -> schemas.SessionUseAnswer:
    return schemas.SessionUseAnswer.of(
        device,
        mean_percent=None if device.use is None else round(device.use, 1),
        peak_percent=device.use_max if device.measured else None,
    )


ACCOUNT_API_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("api/accounts", AccountsAPI),
    ("api/accounts/([^/]+)", AccountAPI),
    ("api/accounts/([^/]+)/statement", StatementAPI),
    ("api/accounts/([^/]+)/grants", GrantAPI),
    ("api/leases/([0-9a-f]{1,64})/receipt", ReceiptAPI),
]
