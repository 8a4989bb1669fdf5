"""Reports of use and of utilization as pages, CSV and JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from tornado import web

from ..core import weeks
from ..core.errors import InvalidRequest, NotAllowed
from ..core.scopes import READ_USAGE
from ..ledger.totals import LEASES_AT_ONCE
from ..ledger.usage import LeaseUse
from ..ledger.views import CSVHandler, table
from ..services import Broker
from ..web.api import APIHandler, amount, instant
from ..web.base import ServiceHandler
from ..web.fields import one_of
from ..web.pages import Page
from .repository import Worked

USAGE_BY = {
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
USAGE_COLUMNS = ("gpu_seconds", "gpu_hours", "credits", "sessions", *BATCH_COLUMNS)
"""Of a report as CSV, after what it is by."""

PAUSE = 0.1
"""Seconds between two portions of leases that are added up."""

NO_SCOPE = (
    f"Reports of use are for admins and for whoever has the scope {READ_USAGE}. Your own use is "
    "on your page."
)


@dataclass(frozen=True, slots=True)
class UsageRow:
    """One line of a report."""

    name: str
    use: LeaseUse
    batch: LeaseUse
    """What jobs beside servers used, whose sessions are the jobs."""


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Who used what in some days of the hub's own zone, both counted."""

    by: str
    first: date
    last: date
    rows: tuple[UsageRow, ...]
    total: LeaseUse
    batch: LeaseUse
    """What jobs beside servers used together."""


def usage_report(broker: Broker, by: str, first: date, last: date) -> UsageReport:
    """Add use up by one thing. Blocks."""
    starts = [start for start, _ in weeks.split(first, last)] if by == "week" else [first]
    bounds = [weeks.midnight(day) for day in (*starts, last + timedelta(days=1))]
    found, jobs = (
        broker.reports.use_by(bounds, USAGE_BY[by]),
        broker.reports.use_of_jobs(bounds, USAGE_BY[by]),
    )
    if by == "week":
        used = zip(starts, found, jobs, strict=True)
        rows = [
            UsageRow(day.isoformat(), together(a.values()), together(b.values()))
            for day, a, b in used
        ]
    else:
        (sums,), (beside,) = found, jobs
        names = {**sums, **beside}
        rows = [
            UsageRow(name, sums.get(name, LeaseUse()), beside.get(name, LeaseUse()))
            for name in names
        ]
        rows.sort(key=lambda row: (-row.use.micros, -row.use.cost, -row.batch.micros, row.name))
    total, batch = together(row.use for row in rows), together(row.batch for row in rows)
    return UsageReport(by, first, last, tuple(rows), total, batch)


async def remember(broker: Broker) -> None:
    """Have at hand what pages tell of the past, before anybody asks: what the line learns from it,
    and totals of what has ended since the last time, a few leases at once: a hub waits for none."""
    await broker.report(broker.standings)
    while await broker.report(broker.reports.add_up) == LEASES_AT_ONCE:
        await asyncio.sleep(PAUSE)


class UsageHandler(ServiceHandler):
    """What the page, the CSV and the JSON share."""

    async def asked(self) -> UsageReport:
        """The report that was asked for. Raises HTTPError for who may not see it, or 400.

        A form sends fields that are left empty, which means the usual.
        """
        if not self.reach(READ_USAGE):
            raise web.HTTPError(403) from NotAllowed(NO_SCOPE)
        by = one_of(self.get_query_argument("by", "member"), "by", tuple(USAGE_BY))
        since, until = (self.get_query_argument(name, "") for name in ("from", "to"))
        try:
            first, last = weeks.period(since, until, self.broker.clock())
        except InvalidRequest as error:
            raise web.HTTPError(400) from error
        return await self.report(usage_report, self.broker, by, first, last)


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
            choices=tuple(USAGE_BY),
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
        self.finish(table([(found.by, *USAGE_COLUMNS), *lines]))


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


def need_days(handler: ServiceHandler) -> None:
    """Refuse days that are left empty, which only a form sends. Raises HTTPError 400."""
    for name in ("from", "to"):
        if handler.get_query_argument(name, None) == "":
            sentence = f"The field {name!r} is empty: write a day, or leave the field out."
            raise web.HTTPError(400) from InvalidRequest(sentence, field=name)


def use_json(use: LeaseUse) -> dict[str, Any]:
    """What was used, as JSON."""
    return {
        "gpu_seconds": use.gpu_seconds,
        "gpu_hours": gpu_hours(use),
        "credits": amount(use.cost),
        "sessions": use.sessions,
    }


def batch_json(use: LeaseUse) -> dict[str, Any]:
    """The same of jobs beside servers."""
    found = use_json(use)
    found["jobs"] = found.pop("sessions")
    return found


def gpu_hours(use: LeaseUse) -> str:
    """GPU time in hours with six decimals, rounded down."""
    millionths = use.micros // 3600
    return f"{millionths // 1_000_000}.{millionths % 1_000_000:06}"


def together(uses: Iterable[LeaseUse]) -> LeaseUse:
    """All of these added up."""
    total = LeaseUse()
    for use in uses:
        total = total.plus(use)
    return total


USAGE_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("usage", UsagePage),
    (r"usage\.csv", UsageCSV),
    ("api/usage", UsageAPI),
]


UTILIZATION_BY = ("member", "group", "model")
LONGEST = timedelta(days=93)
"""The most that one report is about: minute by minute it is read anew each time."""
MOST_SESSIONS = 10
UTILIZATION_COLUMNS = (
    "sessions",
    "held_gpu_hours",
    "measured_gpu_hours",
    "used_gpu_hours",
    "rested_gpu_hours",
)
"""Of a report as CSV, after what it is by."""


@dataclass(frozen=True, slots=True)
class UtilizationRow:
    """One line. All in seconds of one GPU."""

    name: str
    sessions: int = 0
    held: float = 0.0
    measured: float = 0.0
    busy: float = 0.0

    @property
    def rested(self) -> float:
        """How long it is known that nothing worked."""
        return max(0.0, self.measured - self.busy)

    @property
    def percent(self) -> float | None:
        """How much of what is known was used; None when nothing is known."""
        return 100 * self.busy / self.measured if self.measured else None

    def plus(self, some: Worked) -> UtilizationRow:
        """The same with a session more."""
        return UtilizationRow(
            self.name,
            self.sessions + 1,
            self.held + some.held,
            self.measured + some.measured,
            self.busy + some.busy,
        )


@dataclass(frozen=True, slots=True)
class UtilizationReport:
    """What was held and used in some days of the hub's own zone, both counted."""

    by: str
    first: date
    last: date
    until: datetime
    rows: tuple[UtilizationRow, ...]
    """What rested most first."""
    total: UtilizationRow
    batch: int
    """Seconds of one GPU that jobs beside servers held: nobody measures how they use it."""
    sessions: tuple[Worked, ...]
    """Those that rested longest, first the longest."""


def utilization_report(broker: Broker, by: str, first: date, last: date) -> UtilizationReport:
    """Add up who held and used what. Blocks."""
    start, end = weeks.midnight(first), weeks.midnight(last + timedelta(days=1))
    found = broker.monitoring.worked_between(start, end)
    (beside,) = broker.reports.use_of_jobs([start, end], "user")
    rows: dict[str, UtilizationRow] = {}
    total = UtilizationRow("")
    for some in found:
        name = {"member": some.server.user, "group": some.group, "model": some.model}[by]
        rows[name] = rows.get(name, UtilizationRow(name)).plus(some)
        total = total.plus(some)
    most = sorted(found, key=lambda some: (-some.rested, some.since))[:MOST_SESSIONS]
    return UtilizationReport(
        by=by,
        first=first,
        last=last,
        until=min(end, broker.clock()),
        rows=tuple(sorted(rows.values(), key=lambda row: (-row.rested, -row.held, row.name))),
        total=total,
        batch=together(beside.values()).gpu_seconds,
        sessions=tuple(some for some in most if some.rested >= 1),
    )


class WorkedHandler(ServiceHandler):
    """What the page, the CSV and the JSON share."""

    async def asked(self) -> UtilizationReport:
        """The report that was asked for. Raises HTTPError for who may not see it, or 400."""
        if not self.reach(READ_USAGE).everybody:
            raise web.HTTPError(403) from NotAllowed(NO_SCOPE)
        by = one_of(self.get_query_argument("by", "member"), "by", UTILIZATION_BY)
        since, until = (self.get_query_argument(name, "") for name in ("from", "to"))
        try:
            first, last = weeks.period(since, until, self.broker.clock())
            if last - first > LONGEST:
                sentence = f"From {first} to {last} is too long: ask for three months at the most."
                raise InvalidRequest(sentence, field="from")
        except InvalidRequest as error:
            raise web.HTTPError(400) from error
        return await self.report(utilization_report, self.broker, by, first, last)


class WorkedPage(WorkedHandler, Page):
    """A report for people, with a form to ask for another."""

    @web.authenticated
    async def get(self) -> None:
        found = await self.asked()
        query = {"by": found.by, "from": found.first.isoformat(), "to": found.last.isoformat()}
        self.show(
            "worked.html",
            user=self.user,
            admin=self.admin,
            now=self.broker.clock(),
            report=found,
            choices=UTILIZATION_BY,
            nameless=NAMELESS.get(found.by, ""),
            query=urlencode(query),
        )


class WorkedCSV(WorkedHandler, CSVHandler):
    """A report as CSV."""

    @web.authenticated
    async def get(self) -> None:
        found = await self.asked()
        self.begin(f"used-by-{found.by}-{found.first}-{found.last}")
        lines = [
            (
                row.name,
                str(row.sessions),
                *map(hours, (row.held, row.measured, row.busy, row.rested)),
            )
            for row in found.rows
        ]
        self.finish(table([(found.by, *UTILIZATION_COLUMNS), *lines]))


class WorkedAPI(WorkedHandler, APIHandler):
    """A report as JSON."""

    for_services = True

    @web.authenticated
    async def get(self) -> None:
        need_days(self)
        found = await self.asked()
        self.answer(
            {
                "by": found.by,
                "first_day": found.first.isoformat(),
                "last_day": found.last.isoformat(),
                "as_of": instant(self.broker.clock()),
                "rows": [{"name": row.name, **_seconds(row)} for row in found.rows],
                "total": _seconds(found.total),
                "batch": {"held_gpu_seconds": found.batch},
                "most_rested": [_session(some) for some in found.sessions],
            }
        )


def hours(seconds: float) -> str:
    """Seconds as hours with three decimals, rounded down."""
    thousandths = int(seconds) * 1000 // 3600
    return f"{thousandths // 1000}.{thousandths % 1000:03}"


def _seconds(row: UtilizationRow) -> dict[str, Any]:
    return {
        "sessions": row.sessions,
        "held_gpu_seconds": int(row.held),
        "measured_gpu_seconds": int(row.measured),
        "used_gpu_seconds": int(row.busy),
        "rested_gpu_seconds": int(row.rested),
    }


def _session(some: Worked) -> dict[str, Any]:
    return {
        "lease": some.lease_id,
        "user": some.server.user,
        "server": some.server.name,
        "group": some.group,
        "model": some.model,
        "devices": some.devices,
        "started_at": instant(some.since),
        "ended_at": instant(some.until),
        "held_gpu_seconds": int(some.held),
        "measured_gpu_seconds": int(some.measured),
        "used_gpu_seconds": int(some.busy),
        "rested_gpu_seconds": int(some.rested),
    }


UTILIZATION_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("used", WorkedPage),
    (r"used\.csv", WorkedCSV),
    ("api/used", WorkedAPI),
]
