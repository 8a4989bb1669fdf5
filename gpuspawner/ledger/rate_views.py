"""Rates as a page and JSON, with an admin's changes of them."""

from __future__ import annotations

from datetime import datetime

from tornado import web

from ..core.errors import GPUSpawnerError, InvalidRequest, UnknownRate
from ..web.api import ChangingAPI, operation
from ..web.base import ServiceHandler
from ..web.pages import FormPage
from ..web.schemas import WhyBody
from .prices import PART_OF_A_GPU, unnamed_instances, words
from .pricing import ANY
from .schemas import FullRateAnswer, RateAnswer, RateBody, RatesAnswer

FIELDS = ("rate", "model", "environment", "hours", "since", "reason")


class RatesPage(FormPage):
    """All rates in the order in which they are matched, and the form for a new one, for admins."""

    @web.authenticated
    async def get(self) -> None:
        """Send the page."""
        self.need_admin()
        await self.show_rates()

    async def show_rates(self, refusal: GPUSpawnerError | None = None, **typed: str) -> None:
        """Send the page; ``typed`` is the content of a refused form."""
        found = await self.read(self.services.prices.all_rates)
        now: datetime = self.services.clock()
        seen = await self.read(self.services.monitoring.overview)
        devices = [view.device for view in seen.devices]
        self.show(
            "rates.html",
            now=now,
            rates=found.rates,
            next_change=found.next_change(now),
            instances=unnamed_instances(found.card(now), devices),
            part_of_a_gpu=PART_OF_A_GPU,
            zone_name=self.services.settings.rates.zone,
            any=ANY,
            done=self.get_query_argument("done", ""),
            refusal=refusal,
            typed={**dict.fromkeys(FIELDS, ""), **typed},
            xsrf=self.xsrf,
        )

    @web.authenticated
    async def post(self) -> None:
        """Set a rate, after a confirmation."""
        self.need_admin()
        typed = {name: self.field(name).strip()[:1000] for name in FIELDS}
        try:
            wanted = self.typed(RateBody).wanted()
            wanted |= {"since": typed["since"].replace("T", " "), "dry_run": not self.confirmed}
            await self.services.run(self.services.prices.set_rate, **wanted, actor=self.actor)
            if not self.confirmed:
                zone = self.services.settings.rates.zone
                self.confirm(
                    "rate", action="rates", back="rates", fields=typed, typed=typed, zone_name=zone
                )
                return
        except GPUSpawnerError as refusal:
            await self.show_rates(refusal, **typed)
            return
        self.go("rates?done=set")


class RemoveRatePage(RatesPage):
    """The form that removes a rate which an admin set."""

    async def get(self, rate_id: str) -> None:
        """Redirect to the rates."""
        self.go("rates")

    @web.authenticated
    async def post(self, rate_id: str) -> None:
        """Remove the rate, after a confirmation."""
        self.need_admin()
        try:
            if not self.confirmed:
                await self._ask_first(int(rate_id))
                return
            remove = self.services.prices.remove_rate
            await self.services.run(remove, int(rate_id), actor=self.actor)
        except GPUSpawnerError as refusal:
            await self.show_rates(refusal)
            return
        self.go("rates?done=removed")

    async def _ask_first(self, rate_id: int) -> None:
        rates = (await self.read(self.services.prices.all_rates)).rates
        rate = next((each for each in rates if each.id == rate_id), None)
        if rate is None:
            raise InvalidRequest("This rate was removed before: nothing was changed.", field="id")
        told = words(rate, self.services.settings.rates.zone)
        self.confirm("rate_removal", action=f"rates/{rate_id}/remove", back="rates", rate=told)


class RatesAPI(ChangingAPI):
    """The rates as JSON, and a new one."""

    @operation("rates", RatesAnswer)
    @web.authenticated
    async def get(self) -> None:
        """List the rates. A new server pays the first that matches."""
        found = await self.read(self.services.prices.all_rates)
        now = self.services.clock()
        model = FullRateAnswer if self.admin else RateAnswer
        rates = [model.of(rate) for rate in found.rates]
        self.answer(RatesAnswer, as_of=now, next_change=found.next_change(now), rates=rates)

    @operation("rates", FullRateAnswer, name="setRate", body=RateBody)
    @web.authenticated
    async def post(self) -> None:
        """Add a rate for new servers; for admins.

        ``{"rate": "2.5", "model": "A100", "from": "2026-12-01T00:00:00Z"}``
        """
        self.need_admin()
        wanted = self.sent(RateBody).wanted()
        self.answer(FullRateAnswer, await self.change(self.services.prices.set_rate, **wanted))


class RemoveRateAPI(ChangingAPI):
    """The API operation that removes a rate which an admin set."""

    @operation("rates/{rate}/remove", FullRateAnswer, name="removeRate", body=WhyBody)
    @web.authenticated
    async def post(self, rate_id: str) -> None:
        """Remove a rate that an admin added: ``{"reason": "the contract is over"}``."""
        self.need_admin()
        reason = self.sent(WhyBody).reason
        rates = (await self.read(self.services.prices.all_rates)).rates
        if not any(rate.id == int(rate_id) for rate in rates):
            raise web.HTTPError(404) from UnknownRate(rate=rate_id)
        removed = await self.do(self.services.prices.remove_rate, int(rate_id), reason=reason)
        self.answer(FullRateAnswer, removed)


RATE_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("rates", RatesPage),
    ("rates/([0-9]{1,18})/remove", RemoveRatePage),
    ("api/rates", RatesAPI),
    ("api/rates/([0-9]{1,18})/remove", RemoveRateAPI),
]
