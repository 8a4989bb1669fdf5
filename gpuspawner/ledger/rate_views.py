"""What GPU time costs: the rates that hold, and an admin's changes of them. Page and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any

from tornado import web

from ..core.errors import GPUSpawnerError, InvalidRequest, UnknownRate
from ..devices.service import LONGEST_REASON, checked_reason
from ..queue.views import refusals
from ..web.api import ChangingAPI, amount, instant
from ..web.base import ServiceHandler
from ..web.fields import instant_of, of_type
from ..web.pages import FormPage
from .prices import words
from .pricing import ANY, Rate

FIELDS = ("rate", "model", "environment", "hours", "since", "reason")

DONE = {"set": "The rate is set: servers that start from then on pay it.", "removed": "Removed."}


class RatesPage(FormPage):
    """Every rate, in the order in which they are looked through; for admins."""

    @web.authenticated
    async def get(self) -> None:
        self.need_admin()
        await self.show_rates()

    async def show_rates(self, refusal: GPUSpawnerError | None = None, **typed: str) -> None:
        """Send the page; ``typed`` is what a refused form had in it."""
        if refusal:
            self.set_status(refusal.status_code)
        found = await self.read(self.broker.prices.all_rates)
        now: datetime = self.broker.clock()
        self.show(
            "rates.html",
            user=self.user,
            admin=True,
            now=now,
            rates=found.rates,
            next_change=found.next_change(now),
            zone_name=self.broker.settings.rates.zone,
            any=ANY,
            done=DONE.get(self.get_query_argument("done", ""), ""),
            error=refusal.message if refusal else "",
            typed={**dict.fromkeys(FIELDS, ""), **typed},
            longest=LONGEST_REASON,
            xsrf=self.xsrf,
        )

    @web.authenticated
    async def post(self) -> None:
        self.need_admin()
        typed = {name: self.field(name).strip()[:1000] for name in FIELDS}
        try:
            reason = checked_reason(typed["reason"])
            if not self.confirmed:
                if not typed["rate"]:
                    raise InvalidRequest("The field 'rate' is empty: write credits an hour.")
                self._ask(typed)
                return
            await self.broker.run(
                partial(
                    self.broker.prices.set_rate,
                    typed["rate"],
                    model=typed["model"] or ANY,
                    environment=typed["environment"] or ANY,
                    hours=typed["hours"],
                    since=typed["since"].replace("T", " "),
                    actor=self.actor,
                    reason=reason,
                )
            )
        except GPUSpawnerError as refusal:
            await self.show_rates(refusal, **typed)
            return
        self.go("rates?done=set")

    def _ask(self, typed: dict[str, str]) -> None:
        facts: Sequence[tuple[str, str]] = [
            ("Credits an hour", typed["rate"]),
            ("Model", typed["model"] or "any"),
            ("Environment", typed["environment"] or "any"),
            ("Hours", typed["hours"] or "always"),
            ("From", f"{typed['since'] or 'now'} ({self.broker.settings.rates.zone})"),
        ]
        self.ask(
            "Set this rate?",
            facts,
            action="rates",
            button="Set it",
            back="rates",
            fields=typed,
            note="Servers that run keep the price that they started with.",
            here="accounts",
        )


class RemoveRatePage(RatesPage):
    """One of an admin's rates, removed."""

    async def get(self, rate_id: str) -> None:
        self.go("rates")

    @web.authenticated
    async def post(self, rate_id: str) -> None:
        self.need_admin()
        try:
            if not self.confirmed:
                await self._ask_first(int(rate_id))
                return
            await self.broker.run(
                partial(self.broker.prices.remove_rate, int(rate_id), actor=self.actor)
            )
        except GPUSpawnerError as refusal:
            await self.show_rates(refusal)
            return
        self.go("rates?done=removed")

    async def _ask_first(self, rate_id: int) -> None:
        rates = (await self.read(self.broker.prices.all_rates)).rates
        rate = next((each for each in rates if each.id == rate_id), None)
        if rate is None:
            raise InvalidRequest("This rate holds no more: nothing was changed.", field="id")
        self.ask(
            "Remove this rate?",
            [("Rate", words(rate, self.broker.settings.rates.zone))],
            action=f"rates/{rate_id}/remove",
            button="Remove it",
            back="rates",
            note="Servers that run keep the price that they started with.",
            danger=True,
            here="accounts",
        )


class RatesAPI(ChangingAPI):
    """The rates, the first that fits being what a new server pays; for everybody who signs in.

    Admins set one: ``{"rate": "2.5", "model": "A100", "from": "2026-12-01T00:00:00Z"}``.
    """

    @web.authenticated
    async def get(self) -> None:
        found = await self.read(self.broker.prices.all_rates)
        now = self.broker.clock()
        self.answer(
            {
                "as_of": instant(now),
                "next_change": instant(found.next_change(now)),
                "rates": [rate_json(rate, self.admin) for rate in found.rates],
            }
        )

    @web.authenticated
    async def post(self) -> None:
        self.need_admin()
        sent = self.sent("rate", "model", "environment", "slots", "hours", "zone", "from", "reason")
        with refusals():
            wanted: dict[str, Any] = {
                name: of_type(sent[name], str, name)
                for name in ("model", "environment", "hours", "zone")
                if name in sent
            }
            if (slots := sent.get("slots")) is not None:
                wanted["slots"] = of_type(slots, int, "slots")
            if (since := sent.get("from")) is not None:
                wanted["since"] = instant_of(since, "from").isoformat()
            rate = of_type(sent.get("rate"), str, "rate")
            reason = checked_reason(sent["reason"])
        work = partial(self.broker.prices.set_rate, rate, **wanted)
        set_ = await self.change(work, reason=reason)
        self.answer(rate_json(set_, admin=True))


class RemoveRateAPI(ChangingAPI):
    """Have one of an admin's rates hold no more: ``{"reason": "the contract is over"}``."""

    @web.authenticated
    async def post(self, rate_id: str) -> None:
        self.need_admin()
        with refusals():
            reason = checked_reason(self.sent("reason")["reason"])
        rates = (await self.read(self.broker.prices.all_rates)).rates
        if not any(rate.id == int(rate_id) for rate in rates):
            raise web.HTTPError(404) from UnknownRate(rate=rate_id)
        removed = await self.do(self.broker.prices.remove_rate, int(rate_id), reason=reason)
        self.answer(rate_json(removed, admin=True))


def rate_json(rate: Rate, admin: bool) -> dict[str, Any]:
    """A rate as JSON; who set it, and why, only for admins."""
    told = {
        "id": rate.id,
        "rate_per_hour": amount(rate.amount),
        "model": rate.model,
        "environment": rate.environment,
        "slots": rate.slots,
        "hours": rate.hours.text if rate.hours else None,
        "zone": rate.hours.zone if rate.hours else None,
        "from": instant(rate.since),
    }
    return {**told, "actor": rate.actor, "reason": rate.reason} if admin else told


RATE_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("rates", RatesPage),
    ("rates/([0-9]{1,18})/remove", RemoveRatePage),
    ("api/rates", RatesAPI),
    ("api/rates/([0-9]{1,18})/remove", RemoveRateAPI),
]
