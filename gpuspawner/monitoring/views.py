"""Reports of use and of utilization as pages, CSV and JSON."""

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
from .repository import Worked
from .schemas import JobTimeAnswer, JobUseAnswer, NamedUseAnswer, UsageAnswer, UseAnswer, UsedAnswer

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

USE_COLUMNS = ("gpu_seconds", "gpu_hours", "credits", "sessions")
JOB_COLUMNS = ("gpu_hours", "credits", "jobs")
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


def usage_report(services: Services, by: str, first: date, last: date) -> UsageReport:
    """Add use up by one thing. Blocks."""
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
    """Have at hand what pages tell of the past, before anybody asks: what the line learns from it,
    and totals of what has ended since the last time, a few leases at once: a hub waits for none."""
    await services.report(services.positions.standings)
    while await services.report(services.reports.add_up) == LEASES_AT_ONCE:
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
            first, last = weeks.period(since, until, self.services.clock())
        except InvalidRequest as error:
            raise web.HTTPError(400) from error
        return await self.report(usage_report, self.services, by, first, last)


class UsagePage(UsageHandler, Page):
    """A report for people, with a form to ask for another."""

    @web.authenticated
    async def get(self) -> None:
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
    """A report as CSV."""

    @web.authenticated
    async def get(self) -> None:
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
    """Who used what, added up."""

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
    """Refuse days that are left empty, which only a form sends. Raises HTTPError 400."""
    for name in ("from", "to"):
        if handler.get_query_argument(name, None) == "":
            sentence = f"The field {name!r} is empty: write a day, or leave the field out."
            raise web.HTTPError(400) from InvalidRequest(sentence, field=name)


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


def utilization_report(services: Services, by: str, first: date, last: date) -> UtilizationReport:
    """Add up who held and used what. Blocks."""
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


class WorkedHandler(ServiceHandler):
    """What the page, the CSV and the JSON share."""

    async def asked(self) -> UtilizationReport:
        """The report that was asked for. Raises HTTPError for who may not see it, or 400."""
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


class WorkedPage(WorkedHandler, Page):
    """A report for people, with a form to ask for another."""

    @web.authenticated
    async def get(self) -> None:
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
    """How much of what was held was used, and the sessions that rested most."""

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
        need_days(self)
        found = await self.asked()
        batch = JobTimeAnswer(held_gpu_seconds=found.batch)
        self.answer(UsedAnswer, found, as_of=self.services.clock(), batch=batch)


def hours(seconds: float) -> str:
    """Seconds as hours with three decimals, rounded down."""
    thousandths = int(seconds) * 1000 // 3600
    return f"{thousandths // 1000}.{thousandths % 1000:03}"


UTILIZATION_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("used", WorkedPage),
    (r"used\.csv", WorkedCSV),
    ("api/used", WorkedAPI),
]
