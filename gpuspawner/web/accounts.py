"""Accounts, as admins see them: found by name, looked into, given credits."""

from __future__ import annotations

from datetime import datetime

from tornado import web

from ..broker.admin import LONGEST_REASON, checked_reason
from ..errors import GPUSpawnerError, UnknownAccount
from ..model import format_credits, member_account
from ..store.search import LONGEST
from . import access, credits, figures
from .base import Handler
from .fields import account_of, amount_of, date_of, key_of, text_of
from .forms import FormPage, part
from .pages import Page, credit, exactly

ROWS = 50
"""Accounts on a page."""

DONE = {
    "granted": "The credits were given.",
    "taken": "The credits were taken back.",
    "nothing": "This was done before: nothing was changed.",
    "opened": "The account is open.",
}
"""What a page says after a change."""


class AccountsPage(Page):
    """Every account, or those with a text in their names."""

    @web.authenticated
    async def get(self) -> None:
        self.need_admin()
        text = text_of(self.get_query_argument("search", ""), "search", LONGEST)
        after = self.get_query_argument("after", "")[:300]
        found = await self.read(self.broker.find_accounts, text, after, ROWS)
        opened = await self.read(self.broker.open_leases)
        now = self.broker.clock()
        minutes = self.context.warn_minutes
        self.show(
            "accounts.html",
            user=self.user,
            admin=True,
            now=now,
            search=text,
            accounts=await self.read(
                figures.all_funds, self.broker, found.found, opened, now, minutes
            ),
            following=found.following,
            first=not after,
        )


class AccountPage(FormPage):
    """One account: what is left, who used it, and the form that gives credits.

    Whose account it is, and who may draw on a group's, sees it too, without the forms.
    """

    @web.authenticated
    async def get(self, name: str) -> None:
        account = account_of(name)
        if account == member_account(self.user) and not self.admin:
            self.go("")
            return
        await access.must_read(self, account)
        await self.show_account(account)

    async def show_account(
        self, account: str, refusal: GPUSpawnerError | None = None, **typed: str
    ) -> None:
        """Send the page; ``typed`` is what a refused form had in it."""
        if refusal:
            self.set_status(refusal.status_code)
        minutes = self.context.warn_minutes
        funds = await self.read(credits.funds_of, self.broker, account, minutes)
        overview = await self.read(self.broker.overview)
        kind, _, owner = account.partition(":")
        members = await access.members_of(self, owner) if kind == "group" else frozenset()
        self.show(
            "account.html",
            user=self.user,
            admin=self.admin,
            now=self.broker.clock(),
            account=account,
            path=f"accounts/{part(account)}",
            funds=funds,
            members=sorted(members) if kind == "group" else None,
            lasting=credits.lasting(funds, overview, self.broker.clock()),
            running=await self.read(credits.running_of, self.broker, account),
            past=await self.read(credits.of_account, self.broker, account),
            done=DONE.get(self.get_query_argument("done", ""), ""),
            error=refusal.message if refusal else "",
            typed={"amount": "", "reason": "", "until": "", **typed},
            zone_name=self.broker.rate_zone,
            longest=LONGEST_REASON,
            xsrf=self.xsrf,
        )


class GrantForm(AccountPage):
    """Credits given to an account, or taken back: shown first, then confirmed, then done once."""

    async def get(self, name: str) -> None:
        self.go(f"accounts/{part(account_of(name))}")

    @web.authenticated
    async def post(self, name: str) -> None:
        account = account_of(name)
        await access.must_grant(self, account)
        names = ("amount", "reason", "until")
        typed = {field: self.field(field)[: 2 * LONGEST_REASON] for field in names}
        try:
            amount = amount_of(typed["amount"])
            if amount < 0:
                access.must_take(self, account)
            reason = checked_reason(self.field("reason"), needed=True)
            until = date_of(typed["until"], "until", self.broker.rate_zone)
            before = await self.broker.read(self.broker.account, account)
            if not self.confirmed:
                self._ask(account, amount, reason, before.balance, until)
                return
            key = key_of(self.field("key"))
            done = await self.broker.run(
                self.broker.grant,
                account,
                amount,
                actor=self.actor,
                reason=reason,
                key=f"page:{self.actor}:{key}",
                until=until,
            )
        except UnknownAccount as error:
            raise web.HTTPError(404) from error
        except GPUSpawnerError as refusal:
            await self.show_account(account, refusal, **typed)
            return
        became = ("granted" if amount > 0 else "taken") if done else "nothing"
        self.go(f"accounts/{part(account)}?done={became}")

    def _ask(
        self, account: str, amount: int, reason: str, balance: int, until: datetime | None
    ) -> None:
        giving = amount > 0
        end = f"{exactly(until).striptags()} ({until.astimezone():%Z})" if until else "never"
        self.ask(
            f"Give credits to {account}?" if giving else f"Take credits back from {account}?",
            [
                ("Credits", credit(abs(amount))),
                ("Reason", reason),
                ("Balance now", credit(balance)),
                ("Balance then", credit(balance + amount)),
                *([("They end", end)] if giving else []),
            ],
            action=f"accounts/{part(account)}/grant",
            button="Give them" if giving else "Take them back",
            back=f"accounts/{part(account)}",
            fields={
                "amount": format_credits(amount, 6),
                "reason": reason,
                "until": until.isoformat() if until else "",
            },
            note="It stays in the statement, with your name and the reason.",
            danger=not giving,
            here="accounts",
        )


HANDLERS: list[tuple[str, type[Handler]]] = [
    ("accounts", AccountsPage),
    ("accounts/([^/]+)", AccountPage),
    ("accounts/([^/]+)/grant", GrantForm),
]
