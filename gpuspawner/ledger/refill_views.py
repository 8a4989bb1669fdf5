"""Recurring refills: those that there are, what the next would give, made and ended by admins."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

from tornado import web

from ..core.errors import GPUSpawnerError, InvalidRequest
from ..core.units import format_credits
from ..devices.service import LONGEST_REASON, checked_reason
from ..queue.views import refusals
from ..web import base as web_base
from ..web.api import ChangingAPI, amount, instant
from ..web.base import ServiceHandler
from ..web.fields import amount_of, exact_amount, instant_of, key_of, of_type
from ..web.pages import FormPage, credit, moment
from .models import Account
from .refills import LONGEST_KEPT, Mode, Refill

FIELDS = ("rule", "zone", "mode", "amount", "cap", "keep", "audience", "reason")

SENT = (
    *("rule", "zone", "from", "mode", "amount", "cap", "keep_days", "audience", "reason"),
    *("key", "dry_run"),
)
"""Fields of a refill as a script sends it."""

DONE = {"added": "The refill is made.", "ended": "The refill is ended: what was given stays."}

SHOWN = 20
"""Accounts in a preview."""


class RefillsPage(FormPage):
    """Every refill, and the form that makes one; for admins."""

    @web.authenticated
    async def get(self) -> None:
        self.need_admin()
        await self.show_refills()

    async def show_refills(self, refusal: GPUSpawnerError | None = None, **typed: str) -> None:
        """Send the page; ``typed`` is what a refused form had in it."""
        if refusal:
            self.set_status(refusal.status_code)
        self.show(
            "refills.html",
            user=self.user,
            admin=True,
            now=self.broker.clock(),
            refills=await self.read(self.broker.refills.all_refills),
            done=DONE.get(self.get_query_argument("done", ""), ""),
            error=refusal.message if refusal else "",
            typed={**dict.fromkeys(FIELDS, ""), "zone": self.broker.settings.rates.zone, **typed},
            modes=tuple(Mode),
            longest=LONGEST_REASON,
            xsrf=self.xsrf,
        )

    @web.authenticated
    async def post(self) -> None:
        self.need_admin()
        typed = {name: self.field(name).strip()[:2000] for name in FIELDS}
        try:
            plan = partial(self.broker.refills.plan_refill, actor=self.actor, **_wanted(typed))
            planned = await self.broker.read(plan, key=self.key if self.confirmed else "")
            if not self.confirmed:
                await self._ask(planned, typed)
                return
            await self.broker.run(self.broker.refills.add_refill, planned)
        except GPUSpawnerError as refusal:
            await self.show_refills(refusal, **typed)
            return
        self.go("refills?done=added")

    async def _ask(self, planned: Refill, typed: dict[str, str]) -> None:
        members = {group: await web_base.members_of(self, group) for group in planned.groups}
        coming, gifts = await self.broker.read(self.broker.refills.preview_refill, planned, members)
        now = self.broker.clock()
        facts: list[tuple[str, Any]] = [
            ("Rule", f"{planned.recurrence.rule} ({planned.recurrence.zone})"),
            ("Next times", ", ".join(moment(at, now).striptags() for at in coming)),
            ("If it came now", _told(gifts)),
            ("Reason", planned.reason),
        ]
        self.ask(
            "Make this refill?",
            facts,
            action="refills",
            button="Make it",
            back="refills",
            fields=typed,
            note="Each occurrence is given once, also when the service was down meanwhile.",
            here="accounts",
        )


class EndRefillPage(RefillsPage):
    """A refill, ended."""

    async def get(self, refill_id: str) -> None:
        self.go("refills")

    @web.authenticated
    async def post(self, refill_id: str) -> None:
        self.need_admin()
        try:
            found = await self.broker.read(self.broker.refills.refill, refill_id)
            if not self.confirmed:
                self.ask(
                    "End this refill?",
                    [("Rule", found.recurrence.rule), ("For", ", ".join(found.audience))],
                    action=f"refills/{found.id}/end",
                    button="End it",
                    back="refills",
                    note="What was given stays.",
                    danger=True,
                    here="accounts",
                )
                return
            await self.broker.run(
                partial(self.broker.refills.end_refill, found.id, actor=self.actor)
            )
        except GPUSpawnerError as refusal:
            await self.show_refills(refusal)
            return
        self.go("refills?done=ended")


class RefillsAPI(ChangingAPI):
    """Every refill that is not ended, for admins; and a new one, or what it would be:
    ``{"rule": "FREQ=WEEKLY;BYDAY=MO", "amount": "5", "audience": ["everybody"],
    "reason": "the week", "dry_run": true}``."""

    @web.authenticated
    async def get(self) -> None:
        self.need_admin()
        found = await self.read(self.broker.refills.all_refills)
        self.answer(
            {
                "as_of": instant(self.broker.clock()),
                "refills": [refill_json(refill) for refill in found],
            }
        )

    @web.authenticated
    async def post(self) -> None:
        self.need_admin()
        sent = self.sent(*SENT)
        with refusals():
            dry_run = of_type(sent.get("dry_run", False), bool, "dry_run")
            key = f"api:{key_of(sent['key'])}" if "key" in sent else ""
            plan = partial(self.broker.refills.plan_refill, key=key, **_sent(sent))
        made: Refill = await self.change(plan, reason=sent["reason"])
        if not dry_run:
            made = await self.read(self.broker.refills.add_refill, made)
        await answer_with(self, made, made=not dry_run)


class RefillAPI(ChangingAPI):
    """One refill, with what the next occurrence would give; for admins."""

    @web.authenticated
    async def get(self, refill_id: str) -> None:
        self.need_admin()
        await answer_with(self, await self.read(self.broker.refills.refill, refill_id), made=True)


class EndRefillAPI(ChangingAPI):
    """Give a refill no more: ``{"reason": "the term is over"}``."""

    @web.authenticated
    async def post(self, refill_id: str) -> None:
        self.need_admin()
        with refusals():
            reason = checked_reason(self.sent("reason")["reason"])
        found = await self.read(self.broker.refills.refill, refill_id)
        ended = await self.do(self.broker.refills.end_refill, found.id, reason=reason)
        await answer_with(self, ended, made=True)


async def answer_with(handler: ChangingAPI, refill: Refill, *, made: bool) -> None:
    """Send a refill as JSON, with when it comes and what the first time would give now."""
    members = {group: await web_base.members_of(handler, group) for group in refill.groups}
    coming, gifts = await handler.read(handler.broker.refills.preview_refill, refill, members)
    handler.answer(
        {
            **refill_json(refill),
            "made": made,
            "comes_at": [instant(at) for at in coming],
            "gifts": [
                {
                    "account": account.name,
                    "balance": amount(account.balance),
                    "amount": amount(gift),
                }
                for account, gift in gifts
            ],
        }
    )


def refill_json(refill: Refill) -> dict[str, Any]:
    """A refill as JSON."""
    return {
        "id": refill.id,
        "rule": refill.recurrence.rule,
        "zone": refill.recurrence.zone,
        "starts_at": instant(refill.recurrence.starts_at),
        "mode": refill.mode.value,
        "amount": amount(refill.amount),
        "cap": amount(refill.cap) if refill.cap is not None else None,
        "keep_seconds": int(refill.keep.total_seconds()) if refill.keep is not None else None,
        "audience": list(refill.audience),
        "reason": refill.reason,
        "made_at": instant(refill.made_at),
        "made_by": refill.made_by,
        "next_at": instant(refill.next_at),
    }


def _sent(sent: dict[str, Any]) -> dict[str, Any]:
    """What a script asks for. Raises InvalidRequest naming the field."""
    audience = of_type(sent.get("audience"), list, "audience")
    keep, cap, since = (sent.get(name) for name in ("keep_days", "cap", "from"))
    return {
        "rule": of_type(sent.get("rule"), str, "rule"),
        "zone": of_type(sent.get("zone", "UTC"), str, "zone"),
        "mode": _mode(sent.get("mode", Mode.ADD.value)),
        "amount": exact_amount(sent.get("amount")),
        "cap": None if cap is None else exact_amount(cap, "cap"),
        "keep": None if keep is None else _days(of_type(keep, int, "keep_days")),
        "audience": [of_type(name, str, "audience") for name in audience],
        "starts_at": None if since is None else instant_of(since, "from"),
    }


def _days(number: int) -> timedelta:
    """Raises InvalidRequest."""
    if not 0 < number <= LONGEST_KEPT.days:
        raise InvalidRequest(
            f"The field 'keep_days' is not valid: write from 1 to {LONGEST_KEPT.days}.",
            field="keep_days",
        )
    return timedelta(days=number)


def _mode(text: object) -> Mode:
    """Raises InvalidRequest."""
    try:
        return Mode(text)
    except ValueError:
        raise InvalidRequest("The field 'mode' is add or top_up.", field="mode") from None


def _wanted(typed: dict[str, str]) -> dict[str, Any]:
    """What the form asks for. Raises InvalidRequest naming the field."""
    keep = typed["keep"]
    if keep and not (keep.isascii() and keep.isdigit() and len(keep) < 6):
        raise InvalidRequest(
            f"The field 'keep' is {keep[:60]!r}: write a whole number of days, or nothing.",
            field="keep",
        )
    return {
        "rule": typed["rule"],
        "zone": typed["zone"] or "UTC",
        "mode": _mode(typed["mode"] or Mode.ADD.value),
        "amount": amount_of(typed["amount"]),
        "cap": amount_of(typed["cap"], "cap") if typed["cap"] else None,
        "keep": timedelta(days=int(keep)) if keep else None,
        "audience": [name for name in typed["audience"].replace(",", " ").split() if name],
        "reason": typed["reason"],
    }


def _told(gifts: list[tuple[Account, int]]) -> str:
    """What would be given to whom, in a line."""
    total = sum(gift for _, gift in gifts)
    some = ", ".join(f"{account.name} {credit(gift)}" for account, gift in gifts[:SHOWN])
    more = f", and {len(gifts) - SHOWN} more" if len(gifts) > SHOWN else ""
    return f"{format_credits(total)} credits to {len(gifts)} accounts: {some}{more}"


REFILL_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("refills", RefillsPage),
    ("refills/([0-9a-f]{1,32})/end", EndRefillPage),
    ("api/refills", RefillsAPI),
    ("api/refills/([0-9a-f]{1,32})", RefillAPI),
    ("api/refills/([0-9a-f]{1,32})/end", EndRefillAPI),
]
