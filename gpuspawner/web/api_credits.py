"""Accounts, statements, receipts and grants as JSON, for scripts and for a course's bot."""

from __future__ import annotations

import secrets
from typing import Any

from tornado import web

from ..broker.admin import checked_reason
from ..errors import NotAllowed
from ..scopes import READ_ACCOUNTS
from ..store.search import LONGEST, Accounts
from ..store.statements import Entry
from ..telemetry import DeviceUse
from . import access, credits, figures
from .account import may_see
from .api import APIHandler, amount, entry, funds, instant, lease
from .api_queue import ChangingAPI, refusals
from .base import Handler
from .fields import (
    LAST,
    MOST_LINES,
    account_of,
    exact_amount,
    instant_of,
    key_of,
    text_of,
    whole,
)

NOT_ALL = (
    f"The list of accounts is for admins and for whoever has the scope {READ_ACCOUNTS}. Your own "
    "is at api/me."
)


class AccountsAPI(APIHandler):
    """The accounts that I may see, by name: everybody's, for admins; those that my scopes reach."""

    for_services = True

    @web.authenticated
    async def get(self) -> None:
        whom = self.reach(READ_ACCOUNTS)
        if not whom:
            raise web.HTTPError(403) from NotAllowed(NOT_ALL)
        among = None if whom.everybody else await access.accounts_of(self, whom)
        limit = whole(self.get_query_argument("limit", "50"), "limit", 1, MOST_LINES)
        text = text_of(self.get_query_argument("search", ""), "search", LONGEST)
        after = self.get_query_argument("after", "")

        def find() -> Accounts:
            return self.broker.find_accounts(text, after, limit, among)

        found = await self.read(find)
        opened = await self.read(self.broker.open_leases)
        now, minutes = self.broker.clock(), self.context.warn_minutes
        told = await self.read(figures.all_funds, self.broker, found.found, opened, now, minutes)
        self.answer(
            {
                "as_of": instant(now),
                "accounts": [funds(each) for each in told],
                "next": found.following,
            }
        )


class AccountAPI(APIHandler):
    """One account: mine, a group's that I may draw on, or one that my scopes reach."""

    for_services = True

    @web.authenticated
    async def get(self, name: str) -> None:
        account = account_of(name)
        if not access.may_see_balance(self, account):
            await access.must_read(self, account)
        minutes = self.context.warn_minutes
        found = await self.read(credits.funds_of, self.broker, account, minutes)
        self.answer({"as_of": instant(self.broker.clock()), **funds(found)})


class StatementAPI(APIHandler):
    """An account's statement, newest first, page by page."""

    for_services = True

    @web.authenticated
    async def get(self, name: str) -> None:
        account = account_of(name)
        await access.must_read(self, account)
        limit = whole(self.get_query_argument("limit", "50"), "limit", 1, MOST_LINES)
        text = self.get_query_argument("before", "")
        before = whole(text, "before", 1, LAST) if text else None
        page = await self.read(self.broker.statement_page, account, before, limit)
        self.answer(
            {
                "account": account,
                "as_of": instant(self.broker.clock()),
                "entries": [entry(some) for some in page.entries],
                "next": page.older,
            }
        )


class GrantAPI(ChangingAPI):
    """Give credits to an account: ``{"amount": "25", "reason": "week 3", "key": "week-3"}``.

    The same key with the same amount is given once, however often it is sent. ``until`` is when
    they end. An amount below zero takes back, which is for admins.
    """

    for_services = True

    @web.authenticated
    async def post(self, name: str) -> None:
        account = account_of(name)
        await access.must_grant(self, account)
        sent = self.sent("amount", "reason", "key", "until")
        with refusals():
            micro = exact_amount(sent.get("amount"))
            until = sent.get("until")
            ends = None if until is None else instant_of(until, "until")
            reason = checked_reason(sent["reason"], needed=True)
            key = key_of(sent["key"]) if "key" in sent else secrets.token_hex(8)
        if micro < 0:
            access.must_take(self, account)
        # Whose key it is: nobody uses up another's.
        its_key = f"api:{self.actor}:{account}:{key}"
        done = await self.do(
            self.broker.grant, account, micro, reason=reason, key=its_key, until=ends
        )
        found = await self.read(self.broker.account, account)
        self.answer(
            {
                "granted": done,
                "account": account,
                "amount": amount(micro),
                "key": key,
                "until": instant(ends),
                "balance": amount(found.balance),
            }
        )


class ReceiptAPI(APIHandler):
    """What a session cost, item by item, oldest first."""

    for_services = True

    @web.authenticated
    async def get(self, lease_id: str) -> None:
        await may_see(self, lease_id)
        limit = whole(self.get_query_argument("limit", "50"), "limit", 1, MOST_LINES)
        after = whole(self.get_query_argument("after", "0"), "after", 0, LAST)
        receipt = await self.read(self.broker.receipt, lease_id, after, limit)
        now = self.broker.clock()
        (told,) = figures.lease_figures(self.broker, [receipt.lease], now)
        use = await self.read(self.broker.session_use, receipt.lease)
        self.answer(
            {
                "as_of": instant(now),
                "lease": lease(told),
                "use": [_use(use[uuid]) for uuid in receipt.lease.uuids if uuid in use],
                "total": amount(receipt.items.total),
                "count": receipt.items.count,
                "items": [_item(some) for some in receipt.items.entries],
                "next": receipt.items.newer,
            }
        )


def _use(device: DeviceUse) -> dict[str, Any]:
    """What a device did in a session; percents are null where nothing tells them, as of MIG."""
    return {
        "uuid": device.uuid,
        "mean_percent": None if device.use is None else round(device.use, 1),
        "peak_percent": device.use_max if device.measured else None,
        "memory_peak_bytes": device.memory_max,
    }


def _item(some: Entry) -> dict[str, Any]:
    """A charge is above zero, a refund below, and beside it stands the cost up to then."""
    return {
        "id": some.id,
        "transfer": some.transfer,
        "at": instant(some.at),
        "kind": some.kind,
        "reason": some.reason,
        "amount": amount(-some.amount),
        "cost": amount(some.balance),
    }


HANDLERS: list[tuple[str, type[Handler]]] = [
    ("api/accounts", AccountsAPI),
    ("api/accounts/([^/]+)", AccountAPI),
    ("api/accounts/([^/]+)/statement", StatementAPI),
    ("api/accounts/([^/]+)/grants", GrantAPI),
    ("api/leases/([0-9a-f]{1,64})/receipt", ReceiptAPI),
]
