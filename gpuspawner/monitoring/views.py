"""Reports of usage and utilization as pages, CSV and JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import reduce
from typing import Any
from urllib.parse import urlencode

from tornado import web

from ..core import times as core_times
from ..core.errors import InvalidRequest, NotAllowed
from ..core.scopes import READ_USAGE
from ..ledger.totals import LEASES_AT_ONCE
from ..ledger.usage import LeaseUse
from ..ledger.views import CSVHandler, cells, table
from ..services import Services
from ..web.api import DAY, FROM_DAY, APIHandler, Parameter, operation
from ..web.base import ServiceHandler
from ..web.fields import one_of
from ..web.pages import Page
from .repository import LeaseUtilization
from .resource_totals import ResourceSum
from .schemas import (
    JobTimeAnswer,
    JobUseAnswer,
    NamedUseAnswer,
    ResourceSumAnswer,
    UsageAnswer,
    UseAnswer,
    UsedAnswer,
)

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

USE_COLUMNS = ("gpu_seconds", "gpu_hours", "credits", "sessions")
JOB_COLUMNS = ("gpu_hours", "credits", "jobs")
RESOURCE_COLUMNS = ("cpu_seconds", "memory_peak_bytes")
"""Columns of a usage report as CSV, after the name."""

PAUSE = 0.1
"""Seconds between two portions of leases that are added up."""

NO_SCOPE = (
    f"Reports of use are for admins and for users with the scope {READ_USAGE}. Your own use is "
    "on your page."
)


@dataclass(frozen=True, slots=True)
class UsageRow:
    """One line of a report."""

    name: str
    use: LeaseUse
    batch: LeaseUse
    """Usage of cluster jobs; its sessions are the jobs."""
    resources: ResourceSum
    """CPU time and memory of the sessions that started in the period."""


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
    resources: ResourceSum
    """CPU time and memory of all sessions that started in the period."""


def usage_report(services: Services, by: str, first: date, last: date) -> UsageReport:
    """Add up usage, grouped by one property. Blocks."""
    starts = [start for start, _ in core_times.split(first, last)] if by == "week" else [first]
    bounds = [core_times.midnight(day) for day in (*starts, last + timedelta(days=1))]
    found = services.reports.use_by(bounds, USAGE_BY[by])
    jobs = services.reports.use_of_jobs(bounds, USAGE_BY[by])
    resources = services.resources.sums_between(bounds, USAGE_BY[by])
    if by == "week":
        rows = [
            UsageRow(
                day.isoformat(), together(used.values()), together(batch.values()), sum_of(some)
            )
            for day, used, batch, some in zip(starts, found, jobs, resources, strict=True)
        ]
    else:
        (sums,), (beside,), (some,) = found, jobs, resources
        nothing = LeaseUse(), ResourceSum()
        rows = [
            UsageRow(
                name,
                sums.get(name, nothing[0]),
                beside.get(name, nothing[0]),
                some.get(name, nothing[1]),
            )
            for name in {**sums, **beside}
        ]
        rows.sort(key=lambda row: (-row.use.micros, -row.use.cost, -row.batch.micros, row.name))
    total, batch = together(row.use for row in rows), together(row.batch for row in rows)
    used = sum_of({row.name: row.resources for row in rows})
    return UsageReport(by, first, last, tuple(rows), total, batch, used)


async def remember(services: Services) -> None:
    """Compute what pages show of the past before a page needs it.

    Leases that have ended are added up in small portions, so that a hub never waits for them.
    """
    await services.report(services.positions.standings)
    while await services.report(services.reports.add_up) == LEASES_AT_ONCE:
        await asyncio.sleep(PAUSE)


class ReportHandler(ServiceHandler):
    """What the page, the CSV file and the API of a report have in common."""

    groupings: tuple[str, ...]
    make_report: Callable[[Services, str, date, date], Any]
    longest = timedelta.max
    template: str
    file: str
    columns: tuple[str, ...]
    """The columns of the CSV file, after the name."""
    row: Callable[[Any], Sequence[str]]
    """Returns the row of the CSV file for a row of the report."""

    async def asked(self) -> Any:
        """Return the requested report. Raises HTTPError 400 or 403.

        A form sends empty fields; they mean the defaults.
        """
        if not self.reach(READ_USAGE).everybody:
            raise web.HTTPError(403) from NotAllowed(NO_SCOPE)
        by = one_of(self.get_query_argument("by", "member"), "by", self.groupings)
        since, until = (self.get_query_argument(name, "") for name in ("from", "to"))
        try:
            first, last = core_times.period(since, until, self.services.clock())
            if last - first > self.longest:
                sentence = f"From {first} to {last} is too long: ask for three months at most."
                raise InvalidRequest(sentence, field="from")
        except InvalidRequest as error:
            raise web.HTTPError(400) from error
        return await self.report(self.make_report, self.services, by, first, last)


class ReportPage(ReportHandler, Page):
    """A report as a page, with a form for another one."""

    @web.authenticated
    async def get(self) -> None:
        """Send the page."""
        found = await self.asked()
        query = {"by": found.by, "from": found.first.isoformat(), "to": found.last.isoformat()}
        self.show(
            self.template,
            now=self.services.clock(),
            report=found,
            choices=self.groupings,
            query=urlencode(query),
        )


class ReportCSV(ReportHandler, CSVHandler):
    """A report as CSV."""

    @web.authenticated
    async def get(self) -> None:
        """Send the file."""
        found = await self.asked()
        self.begin(f"{self.file}-by-{found.by}-{found.first}-{found.last}")
        self.finish(table([(found.by, *self.columns), *map(self.row, found.rows)]))


class ReportAPI(ReportHandler, APIHandler):
    """A report as JSON."""

    for_services = True

    async def asked(self) -> Any:
        """Return the requested report. Raises HTTPError 400 or 403, also for empty days."""
        for name in ("from", "to"):
            if self.get_query_argument(name, None) == "":
                sentence = f"The field {name!r} is empty: write a day, or leave the field out."
                raise web.HTTPError(400) from InvalidRequest(sentence, field=name)
        return await super().asked()


def usage_cells(row: UsageRow) -> Sequence[str]:
    """Return a row of the report as a row of the CSV file."""
    used = cells(NamedUseAnswer.of(row), ("name", *USE_COLUMNS))
    resources = cells(ResourceSumAnswer.of(row.resources), RESOURCE_COLUMNS)
    return [*used, *cells(JobUseAnswer.of(row.batch), JOB_COLUMNS), *resources]


class UsageHandler(ReportHandler):
    """What was used, and what it cost."""

    groupings = tuple(USAGE_BY)
    make_report = staticmethod(usage_report)
    template, file = "usage.html", "usage"
    columns = (*USE_COLUMNS, *(f"batch_{name}" for name in JOB_COLUMNS), *RESOURCE_COLUMNS)
    row = staticmethod(usage_cells)


class UsagePage(UsageHandler, ReportPage):
    """A usage report as a page."""


class UsageCSV(UsageHandler, ReportCSV):
    """A usage report as CSV."""


class UsageAPI(UsageHandler, ReportAPI):
    """A usage report as JSON."""

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
        found = await self.asked()
        self.answer(
            UsageAnswer,
            found,
            start=core_times.midnight(found.first),
            end=core_times.midnight(found.last + timedelta(days=1)),
            as_of=self.services.clock(),
            total=UseAnswer.of(use=found.total, batch=found.batch, resources=found.resources),
        )


def together(uses: Iterable[LeaseUse]) -> LeaseUse:
    """Return the sum of all uses."""
    total = LeaseUse()
    for use in uses:
        total = total.plus(use)
    return total


def sum_of(found: Mapping[str, ResourceSum]) -> ResourceSum:
    """Return what all of these used together."""
    return reduce(ResourceSum.plus, found.values(), ResourceSum())


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
    """Allocated and used time from the first to the last day in the hub's own zone, inclusive."""

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
    start, end = core_times.midnight(first), core_times.midnight(last + timedelta(days=1))
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


def utilization_cells(row: UtilizationRow) -> Sequence[str]:
    """Return a row of the report as a row of the CSV file."""
    times = (row.held, row.measured, row.busy, row.rested)
    return [row.name, str(row.sessions), *map(hours, times)]


class UtilizationHandler(ReportHandler):
    """How much of what was held was used."""

    groupings = UTILIZATION_BY
    make_report = staticmethod(utilization_report)
    longest = LONGEST
    template, file = "worked.html", "used"
    columns = UTILIZATION_COLUMNS
    row = staticmethod(utilization_cells)


class UtilizationPage(UtilizationHandler, ReportPage):
    """A utilization report as a page."""


class UtilizationCSV(UtilizationHandler, ReportCSV):
    """A utilization report as CSV."""


class UtilizationAPI(UtilizationHandler, ReportAPI):
    """A utilization report as JSON."""

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
