"""Reports of usage and utilization as pages, CSV and JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from urllib.parse import urlencode

from tornado import web

from ..core import weeks
from ..core.errors import InvalidRequest, NotAllowed
from ..core.scopes import READ_USAGE
from ..ledger.totals import LEASES_AT_ONCE
from ..ledger.usage import LeaseUse
from ..ledger.views import CSVHandler, cells, table
from ..services import Services
from ..web.api import APIHandler
from ..web.base import ServiceHandler
from ..web.fields import one_of
from ..web.operations import DAY, FROM_DAY, Parameter, operation
from ..web.pages import Page
from .repository import LeaseUtilization
from .schemas import JobTimeAnswer, JobUseAnswer, NamedUseAnswer, UsageAnswer, UseAnswer, UsedAnswer

USAGE_BY = {
    "member": "user",
    "group": "group",
    "account": "account",
    "model": "model",
    "environment": "environment",
    "week": "model",
}
"""Groupings of a usage report, and the field of ``Kind`` that each one uses.

Weeks use the field with the fewest values.
"""

NAMELESS = {
    "member": "no member",
    "account": "nobody",
    "group": "no group",
    "model": "no GPU",
    "environment": "the hub's own",
}
"""Labels for rows whose name is empty."""

USE_COLUMNS = ("gpu_seconds", "gpu_hours", "credits", "sessions")
JOB_COLUMNS = ("gpu_hours", "credits", "jobs")
"""Columns of a usage report as CSV, after the name."""

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
    """Usage of cluster jobs; its sessions are the jobs."""


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Usage from the first to the last day in the hub's own zone, inclusive."""

    by: str
    first: date
    last: date
    rows: tuple[UsageRow, ...]
    total: LeaseUse
    batch: LeaseUse
    """Usage of all cluster jobs."""


def usage_report(services: Services, by: str, first: date, last: date) -> UsageReport:
    """Add up usage, grouped by one property. Blocks."""
    starts = [start for start, _ in weeks.split(first, last)] if by == "week" else [first]
    bounds = [weeks.midnight(day) for day in (*starts, last + timedelta(days=1))]
    found, jobs = (
        services.reports.use_by(bounds, USAGE_BY[by]),
        services.reports.use_of_jobs(bounds, USAGE_BY[by]),
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


async def remember(services: Services) -> None:
    """Compute what pages show of the past before a page needs it.

    This covers what the queue learns from past sessions, and the totals of leases that have ended
    since the last call. Leases are added up in small portions, so that a hub never waits for them.
    """
    await services.report(services.positions.standings)
    while await services.report(services.reports.add_up) == LEASES_AT_ONCE:
        await asyncio.sleep(PAUSE)


class UsageHandler(ServiceHandler):
    """What the page, the CSV file and the API have in common."""

    async def asked(self) -> UsageReport:
        """Return the requested report. Raises HTTPError 400 or 403.

        A form sends empty fields; they mean the defaults.
        """
        if not self.reach(READ_USAGE):
            raise web.HTTPError(403) from NotAllowed(NO_SCOPE)
        by = one_of(self.get_query_argument("by", "member"), "by", tuple(USAGE_BY))
        since, until = (self.get_query_argument(name, "") for name in ("from", "to"))
        try:
            first, last = weeks.period(since, until, self.services.clock())
        except InvalidRequest as error:
            raise web.HTTPError(400) from error
        return await self.report(usage_report, self.services, by, first, last)


class UsagePage(UsageHandler, Page):
    """A usage report as a page, with a form for another one."""

    @web.authenticated
    async def get(self) -> None:
        """Send the page."""
        found = await self.asked()
        query = {"by": found.by, "from": found.first.isoformat(), "to": found.last.isoformat()}
        self.show(
            "usage.html",
            now=self.services.clock(),
            report=found,
            choices=tuple(USAGE_BY),
            nameless=NAMELESS.get(found.by, ""),
            query=urlencode(query),
        )


class UsageCSV(UsageHandler, CSVHandler):
    """A usage report as CSV."""

    @web.authenticated
    async def get(self) -> None:
        """Send the file."""
        found = await self.asked()
        self.begin(f"usage-by-{found.by}-{found.first}-{found.last}")
        lines = [
            [
                *cells(NamedUseAnswer.of(row), ("name", *USE_COLUMNS)),
                *cells(JobUseAnswer.of(row.batch), JOB_COLUMNS),
            ]
            for row in found.rows
        ]
        beside = [f"batch_{name}" for name in JOB_COLUMNS]
        self.finish(table([(found.by, *USE_COLUMNS, *beside), *lines]))


class UsageAPI(UsageHandler, APIHandler):
    """A usage report as JSON."""

    for_services = True

    @operation(
        "usage",
        UsageAnswer,
        Parameter("by", {"enum": list(USAGE_BY)}, "What it is added up by."),
        FROM_DAY,
        Parameter("to", DAY, "The last day, which is counted."),
        scope=READ_USAGE,
    )
    @web.authenticated
    async def get(self) -> None:
        """Report the use of GPUs, added up."""
        need_days(self)
        found = await self.asked()
        self.answer(
            UsageAnswer,
            found,
            start=weeks.midnight(found.first),
            end=weeks.midnight(found.last + timedelta(days=1)),
            as_of=self.services.clock(),
            total=UseAnswer.of(use=found.total, batch=found.batch),
        )


def need_days(handler: ServiceHandler) -> None:
    """Raise HTTPError 400 for empty days; only forms may send them."""
    for name in ("from", "to"):
        if handler.get_query_argument(name, None) == "":
            sentence = f"The field {name!r} is empty: write a day, or leave the field out."
            raise web.HTTPError(400) from InvalidRequest(sentence, field=name)


def together(uses: Iterable[LeaseUse]) -> LeaseUse:
    """Return the sum of all uses."""
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
"""The longest period of one report, because its minutes are read anew each time."""
MOST_SESSIONS = 10
UTILIZATION_COLUMNS = (
    "sessions",
    "held_gpu_hours",
    "measured_gpu_hours",
    "used_gpu_hours",
    "rested_gpu_hours",
)
"""Columns of a utilization report as CSV, after the name."""


@dataclass(frozen=True, slots=True)
class UtilizationRow:
    """One line of a report. All times are in GPU-seconds."""

    name: str
    sessions: int = 0
    held: float = 0.0
    measured: float = 0.0
    busy: float = 0.0

    @property
    def rested(self) -> float:
        """GPU-seconds that are known to be idle."""
        return max(0.0, self.measured - self.busy)

    @property
    def percent(self) -> float | None:
        """Percent of the measured time that was busy; None if nothing was measured."""
        return 100 * self.busy / self.measured if self.measured else None

    def plus(self, some: LeaseUtilization) -> UtilizationRow:
        """Return a copy with the session's figures added."""
        return UtilizationRow(
            self.name,
            self.sessions + 1,
            self.held + some.held,
            self.measured + some.measured,
            self.busy + some.busy,
        )


@dataclass(frozen=True, slots=True)
class UtilizationReport:
    """Held and used time from the first to the last day in the hub's own zone, inclusive."""

    by: str
    first: date
    last: date
    until: datetime
    rows: tuple[UtilizationRow, ...]
    """The most idle first."""
    total: UtilizationRow
    batch: int
    """GPU-seconds that cluster jobs held; their utilization is not measured."""
    sessions: tuple[LeaseUtilization, ...]
    """The sessions with the longest idle times, the longest first."""


def utilization_report(services: Services, by: str, first: date, last: date) -> UtilizationReport:
    """Add up held and used time, grouped by one property. Blocks."""
    start, end = weeks.midnight(first), weeks.midnight(last + timedelta(days=1))
    found = services.monitoring.worked_between(start, end)
    (beside,) = services.reports.use_of_jobs([start, end], "user")
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
        until=min(end, services.clock()),
        rows=tuple(sorted(rows.values(), key=lambda row: (-row.rested, -row.held, row.name))),
        total=total,
        batch=together(beside.values()).gpu_seconds,
        sessions=tuple(some for some in most if some.rested >= 1),
    )


class UtilizationHandler(ServiceHandler):
    """What the page, the CSV file and the API have in common."""

    async def asked(self) -> UtilizationReport:
        """Return the requested report. Raises HTTPError 400 or 403."""
        if not self.reach(READ_USAGE).everybody:
            raise web.HTTPError(403) from NotAllowed(NO_SCOPE)
        by = one_of(self.get_query_argument("by", "member"), "by", UTILIZATION_BY)
        since, until = (self.get_query_argument(name, "") for name in ("from", "to"))
        try:
            first, last = weeks.period(since, until, self.services.clock())
            if last - first > LONGEST:
                sentence = f"From {first} to {last} is too long: ask for three months at the most."
                raise InvalidRequest(sentence, field="from")
        except InvalidRequest as error:
            raise web.HTTPError(400) from error
        return await self.report(utilization_report, self.services, by, first, last)


class UtilizationPage(UtilizationHandler, Page):
    """A utilization report as a page, with a form for another one."""

    @web.authenticated
    async def get(self) -> None:
        """Send the page."""
        found = await self.asked()
        query = {"by": found.by, "from": found.first.isoformat(), "to": found.last.isoformat()}
        self.show(
            "worked.html",
            now=self.services.clock(),
            report=found,
            choices=UTILIZATION_BY,
            nameless=NAMELESS.get(found.by, ""),
            query=urlencode(query),
        )


class UtilizationCSV(UtilizationHandler, CSVHandler):
    """A utilization report as CSV."""

    @web.authenticated
    async def get(self) -> None:
        """Send the file."""
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


class UtilizationAPI(UtilizationHandler, APIHandler):
    """A utilization report as JSON."""

    for_services = True

    @operation(
        "used",
        UsedAnswer,
        Parameter("by", {"enum": list(UTILIZATION_BY)}, "What it is added up by."),
        FROM_DAY,
        Parameter("to", DAY, "The last day, at most three months after it."),
        scope=READ_USAGE,
    )
    @web.authenticated
    async def get(self) -> None:
        """Report how much of the held GPU time was used, and the sessions that were idle most."""
        need_days(self)
        found = await self.asked()
        batch = JobTimeAnswer(held_gpu_seconds=found.batch)
        self.answer(UsedAnswer, found, as_of=self.services.clock(), batch=batch)


def hours(seconds: float) -> str:
    """Format seconds as hours with three decimals, rounded down."""
    thousandths = int(seconds) * 1000 // 3600
    return f"{thousandths // 1000}.{thousandths % 1000:03}"


UTILIZATION_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("used", UtilizationPage),
    (r"used\.csv", UtilizationCSV),
    ("api/used", UtilizationAPI),
]
