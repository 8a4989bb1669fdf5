"""Recurring refills as pages and JSON, with a preview, for admins."""

from __future__ import annotations

from tornado import web

from ..core.errors import GPUSpawnerError
from ..web import base as web_base
from ..web.api import ChangingAPI, Parameter, operation
from ..web.base import ServiceHandler
from ..web.pages import FormPage
from ..web.schemas import WhyBody
from . import schemas
from .refills import Mode, Refill

SCHEDULE = ("every", "weekday", "monthday", "at")
FIELDS = (*SCHEDULE, "rule", "zone", "mode", "amount", "cap", "keep", "audience", "reason")

WEEKDAYS = {
    "MO": "Monday",
    "TU": "Tuesday",
    "WE": "Wednesday",
    "TH": "Thursday",
    "FR": "Friday",
    "SA": "Saturday",
    "SU": "Sunday",
}
"""Weekdays by their names in a rule."""


class RefillsPage(FormPage):
    """All refills and the form for a new one, for admins."""

    @web.authenticated
    async def get(self) -> None:
        """Send the page."""
        self.need_admin()
        await self.show_refills()

    async def show_refills(self, refusal: GPUSpawnerError | None = None, **typed: str) -> None:
        """Send the page; ``typed`` is the content of a refused form."""
        self.show(
            "refills.html",
            now=self.services.clock(),
            refills=await self.read(self.services.refills.all_refills),
            done=self.get_query_argument("done", ""),
            refusal=refusal,
            typed={**dict.fromkeys(FIELDS, ""), "zone": self.services.settings.rates.zone, **typed},
            modes=tuple(Mode),
            weekdays=WEEKDAYS,
            schedule=schedule,
            xsrf=self.xsrf,
        )

    def field(self, name: str) -> str:
        """Return a field; the rule is what was chosen as a schedule unless one was written."""
        text = super().field(name)
        return text or self._chosen() if name == "rule" else text

    def _chosen(self) -> str:
        """Return the schedule that was chosen as a rule; empty if none was."""
        every, at = super().field("every"), super().field("at")
        days = {
            "day": "FREQ=DAILY",
            "week": f"FREQ=WEEKLY;BYDAY={super().field('weekday')}",
            "month": f"FREQ=MONTHLY;BYMONTHDAY={super().field('monthday')}",
        }
        if every not in days:
            return ""
        hour, _, minute = at.partition(":")
        return f"{days[every]};BYHOUR={hour.lstrip('0') or 0};BYMINUTE={minute.lstrip('0') or 0}"

    @web.authenticated
    async def post(self) -> None:
        """Add a refill, after a preview and a confirmation."""
        self.need_admin()
        typed = {name: self.get_body_argument(name, "")[:2000] for name in FIELDS}
        try:
            wanted = self.typed(schemas.RefillBody).planned()
            wanted |= {"actor": self.actor, "key": self.key if self.confirmed else ""}
            planned = await self.services.read(self.services.refills.plan_refill, **wanted)
            if not self.confirmed:
                await self._ask(planned, typed)
                return
            await self.services.run(self.services.refills.add_refill, planned)
        except GPUSpawnerError as refusal:
            await self.show_refills(refusal, **typed)
            return
        self.go("refills?done=added")

    async def _ask(self, planned: Refill, typed: dict[str, str]) -> None:
        members = {group: await web_base.members_of(self, group) for group in planned.groups}
        coming, gifts = await self.services.read(
            self.services.refills.preview_refill, planned, members
        )
        self.confirm(
            "refill",
            action="refills",
            back="refills",
            fields=typed | {"rule": planned.recurrence.rule},
            refill=planned,
            coming=coming,
            gifts=gifts,
            schedule=schedule,
            now=self.services.clock(),
        )


class EndRefillPage(RefillsPage):
    """The form that ends a refill."""

    async def get(self, refill_id: str) -> None:
        """Redirect to the refills."""
        self.go("refills")

    @web.authenticated
    async def post(self, refill_id: str) -> None:
        """End the refill, after a confirmation."""
        self.need_admin()
        try:
            found = await self.services.read(self.services.refills.refill, refill_id)
            if not self.confirmed:
                end = f"refills/{found.id}/end"
                self.confirm(
                    "refill_end", action=end, back="refills", refill=found, schedule=schedule
                )
                return
            await self.services.run(self.services.refills.end_refill, found.id, actor=self.actor)
        except GPUSpawnerError as refusal:
            await self.show_refills(refusal)
            return
        self.go("refills?done=ended")


def schedule(rule: str) -> str:
    """Format a rule for people: ``every Monday at 06:00``; a rule that is less simple as it is."""
    parts = dict(part.split("=", 1) for part in rule.split(";") if "=" in part)
    hour, minute = parts.pop("BYHOUR", ""), parts.pop("BYMINUTE", "0")
    if not (hour.isdigit() and minute.isdigit()):
        return rule
    at = f"at {int(hour):02}:{int(minute):02}"
    match parts:
        case {"FREQ": "DAILY", **more} if not more:
            return f"every day {at}"
        case {"FREQ": "WEEKLY", "BYDAY": day, **more} if not more and day in WEEKDAYS:
            return f"every {WEEKDAYS[day]} {at}"
        case {"FREQ": "MONTHLY", "BYMONTHDAY": day, **more} if not more and day.isdigit():
            return f"on day {day} of every month {at}"
    return rule


REFILL = Parameter("refill", {"type": "string", "pattern": "^[0-9a-f]{1,32}$"}, "Its id.")


class RefillsAPI(ChangingAPI):
    """The refills as JSON, and a new one, for admins."""

    @operation("refills", schemas.RefillsAnswer)
    @web.authenticated
    async def get(self) -> None:
        """List every refill that has not ended."""
        self.need_admin()
        found = await self.read(self.services.refills.all_refills)
        self.answer(schemas.RefillsAnswer, as_of=self.services.clock(), refills=found)

    @operation("refills", schemas.FullRefillAnswer, name="makeRefill", body=schemas.RefillBody)
    @web.authenticated
    async def post(self) -> None:
        """Add a refill, or preview what it would do.

        ``{"rule": "FREQ=WEEKLY;BYDAY=MO", "amount": "5", "audience": ["everybody"], "reason":
        "the week", "dry_run": true}``
        """
        self.need_admin()
        sent = self.sent(schemas.RefillBody)
        made: Refill = await self.change(self.services.refills.plan_refill, **sent.planned())
        if not sent.dry_run:
            made = await self.read(self.services.refills.add_refill, made)
        await answer_with(self, made, made=not sent.dry_run)


class RefillAPI(ChangingAPI):
    """One refill as JSON."""

    @operation("refills/{refill}", schemas.FullRefillAnswer)
    @web.authenticated
    async def get(self, refill_id: str) -> None:
        """Return one refill, with what its next occurrence would give; for admins."""
        self.need_admin()
        await answer_with(self, await self.read(self.services.refills.refill, refill_id), made=True)


class EndRefillAPI(ChangingAPI):
    """The API operation that ends a refill."""

    @operation("refills/{refill}/end", schemas.FullRefillAnswer, name="endRefill", body=WhyBody)
    @web.authenticated
    async def post(self, refill_id: str) -> None:
        """End a refill; what it gave stays: ``{"reason": "the term is over"}``."""
        self.need_admin()
        reason = self.sent(WhyBody).reason
        found = await self.read(self.services.refills.refill, refill_id)
        ended = await self.do(self.services.refills.end_refill, found.id, reason=reason)
        await answer_with(self, ended, made=True)


async def answer_with(handler: ChangingAPI, refill: Refill, *, made: bool) -> None:
    """Send a refill as JSON, with its next occurrences and what the first would grant now."""
    members = {group: await web_base.members_of(handler, group) for group in refill.groups}
    coming, gifts = await handler.read(handler.services.refills.preview_refill, refill, members)
    given = [schemas.RefillGiftAnswer.of(account, amount=gift) for account, gift in gifts]
    handler.answer(schemas.FullRefillAnswer, refill, made=made, comes_at=coming, gifts=given)


REFILL_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("refills", RefillsPage),
    ("refills/([0-9a-f]{1,32})/end", EndRefillPage),
    ("api/refills", RefillsAPI),
    ("api/refills/([0-9a-f]{1,32})", RefillAPI),
    ("api/refills/([0-9a-f]{1,32})/end", EndRefillAPI),
]
