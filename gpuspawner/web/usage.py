"""Reports of use: by member, group, account, model, environment or week; pages, CSV, JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any
from urllib.parse import urlencode

from tornado import web

from ..broker import Broker
from ..errors import InvalidRequest, NotAllowed
from ..ledger.usage import Use
from ..scopes import READ_USAGE
from ..store.totals import AT_ONCE
from . import weeks
from .account import CSVHandler, table
from .api import APIHandler, amount, instant
from .base import Handler
from .fields import one_of
from .pages import Page

BY = {
    "member": "user",
    "group": "group",
    "account": "account",
    "model": "model",
    "environment": "environment",
    "week": "model",
}
"""What use can be added up by, and the name of that in a kind; weeks by the fewest names."""

NAMELESS = {
    "member": "no member",
    "account": "nobody",
    "group": "no group",
    "model": "no GPU",
    "environment": "the hub's own",
}
"""What people read where a name is empty."""

BATCH_COLUMNS = ("batch_gpu_hours", "batch_credits", "batch_jobs")
COLUMNS = ("gpu_seconds", "gpu_hours", "credits", "sessions", *BATCH_COLUMNS)
"""Of a report as CSV, after what it is by."""

PAUSE = 0.1
"""Seconds between two portions of leases that are added up."""

NO_SCOPE = (
    f"Reports of use are for admins and for whoever has the scope {READ_USAGE}. Your own use is "
    "on your page."
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a report."""

    name: str
    use: Use
    batch: Use
    """What jobs beside servers used, whose sessions are the jobs."""


@dataclass(frozen=True, slots=True)
class Report:
    """Who used what in some days of the hub's own zone, both counted."""

    by: str
    first: date
    last: date
    rows: tuple[Row, ...]
    total: Use
    batch: Use
    """What jobs beside servers used together."""


def report(broker: Broker, by: str, first: date, last: date) -> Report:
    """Add use up by one thing. Blocks."""
    starts = [start for start, _ in weeks.split(first, last)] if by == "week" else [first]
    bounds = [weeks.midnight(day) for day in (*starts, last + timedelta(days=1))]
    found, jobs = broker.use_by(bounds, BY[by]), broker.use_of_jobs(bounds, BY[by])
    if by == "week":
        used = zip(starts, found, jobs, strict=True)
        rows = [
            Row(day.isoformat(), together(a.values()), together(b.values())) for day, a, b in used
        ]
    else:
        (sums,), (beside,) = found, jobs
        names = {**sums, **beside}
        rows = [Row(name, sums.get(name, Use()), beside.get(name, Use())) for name in names]
        rows.sort(key=lambda row: (-row.use.micros, -row.use.cost, -row.batch.micros, row.name))
    total, batch = together(row.use for row in rows), together(row.batch for row in rows)
    return Report(by, first, last, tuple(rows), total, batch)


async def remember(broker: Broker) -> None:
    """Have at hand what pages tell of the past, before anybody asks: what the line learns from it,
    and totals of what has ended since the last time, a few leases at once: a hub waits for none."""
    await broker.report(broker.standings)
    while await broker.report(broker.add_up) == AT_ONCE:
        await asyncio.sleep(PAUSE)


class UsageHandler(Handler):
    """What the page, the CSV and the JSON share."""

    async def asked(self) -> Report:
        """The report that was asked for. Raises HTTPError for who may not see it, or 400.

        A form sends fields that are left empty, which means the usual.
        """
        if not self.reach(READ_USAGE):
            raise web.HTTPError(403) from NotAllowed(NO_SCOPE)
        by = one_of(self.get_query_argument("by", "member"), "by", tuple(BY))
        since, until = (self.get_query_argument(name, "") for name in ("from", "to"))
        try:
            first, last = weeks.period(since, until, self.broker.clock())
        except InvalidRequest as error:
            raise web.HTTPError(400) from error
        return await self.report(report, self.broker, by, first, last)


class UsagePage(UsageHandler, Page):
    """A report for people, with a form to ask for another."""

    @web.authenticated
    async def get(self) -> None:
        found = await self.asked()
        query = {"by": found.by, "from": found.first.isoformat(), "to": found.last.isoformat()}
        self.show(
            "usage.html",
            user=self.user,
            admin=self.admin,
            now=self.broker.clock(),
            report=found,
            choices=tuple(BY),
            nameless=NAMELESS.get(found.by, ""),
            query=urlencode(query),
        )


class UsageCSV(UsageHandler, CSVHandler):
    """A report as CSV."""

    @web.authenticated
    async def get(self) -> None:
        found = await self.asked()
        self.begin(f"usage-by-{found.by}-{found.first}-{found.last}")
        lines = [
            (
                row.name,
                str(row.use.gpu_seconds),
                gpu_hours(row.use),
                amount(row.use.cost),
                str(row.use.sessions),
                gpu_hours(row.batch),
                amount(row.batch.cost),
                str(row.batch.sessions),
            )
            for row in found.rows
        ]
        self.finish(table([(found.by, *COLUMNS), *lines]))


class UsageAPI(UsageHandler, APIHandler):
    """A report as JSON."""

    for_services = True

    @web.authenticated
    async def get(self) -> None:
        need_days(self)
        found = await self.asked()
        end = found.last + timedelta(days=1)
        self.answer(
            {
                "by": found.by,
                "first_day": found.first.isoformat(),
                "last_day": found.last.isoformat(),
                "from": instant(weeks.midnight(found.first)),
                "to": instant(weeks.midnight(end)),
                "as_of": instant(self.broker.clock()),
                "rows": [
                    {"name": row.name, **use_json(row.use), "batch": batch_json(row.batch)}
                    for row in found.rows
                ],
                "total": {**use_json(found.total), "batch": batch_json(found.batch)},
            }
        )


def need_days(handler: Handler) -> None:
    """Refuse days that are left empty, which only a form sends. Raises HTTPError 400."""
    for name in ("from", "to"):
        if handler.get_query_argument(name, None) == "":
            sentence = f"The field {name!r} is empty: write a day, or leave the field out."
            raise web.HTTPError(400) from InvalidRequest(sentence, field=name)


def use_json(use: Use) -> dict[str, Any]:
    """What was used, as JSON."""
    return {
        "gpu_seconds": use.gpu_seconds,
        "gpu_hours": gpu_hours(use),
        "credits": amount(use.cost),
        "sessions": use.sessions,
    }


def batch_json(use: Use) -> dict[str, Any]:
    """The same of jobs beside servers."""
    found = use_json(use)
    found["jobs"] = found.pop("sessions")
    return found


def gpu_hours(use: Use) -> str:
    """GPU time in hours with six decimals, rounded down."""
    millionths = use.micros // 3600
    return f"{millionths // 1_000_000}.{millionths % 1_000_000:06}"


def together(uses: Iterable[Use]) -> Use:
    """All of these added up."""
    total = Use()
    for use in uses:
        total = total.plus(use)
    return total


HANDLERS: list[tuple[str, type[Handler]]] = [
    ("usage", UsagePage),
    (r"usage\.csv", UsageCSV),
    ("api/usage", UsageAPI),
]
