"""Reports of how much of what was held was used: by member, group or model; and who rested most."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from tornado import web

from ..broker import Broker
from ..errors import InvalidRequest, NotAllowed
from ..scopes import READ_USAGE
from ..store.worked import Worked
from . import weeks
from .account import CSVHandler, table
from .api import APIHandler, instant
from .base import Handler
from .fields import one_of
from .pages import Page
from .usage import NAMELESS, NO_SCOPE, need_days, together

BY = ("member", "group", "model")
LONGEST = timedelta(days=93)
"""The most that one report is about: minute by minute it is read anew each time."""
MOST_SESSIONS = 10
COLUMNS = ("sessions", "held_gpu_hours", "measured_gpu_hours", "used_gpu_hours", "rested_gpu_hours")
"""Of a report as CSV, after what it is by."""


@dataclass(frozen=True, slots=True)
class Row:
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

    def plus(self, some: Worked) -> Row:
        """The same with a session more."""
        return Row(
            self.name,
            self.sessions + 1,
            self.held + some.held,
            self.measured + some.measured,
            self.busy + some.busy,
        )


@dataclass(frozen=True, slots=True)
class Report:
    """What was held and used in some days of the hub's own zone, both counted."""

    by: str
    first: date
    last: date
    until: datetime
    rows: tuple[Row, ...]
    """What rested most first."""
    total: Row
    batch: int
    """Seconds of one GPU that jobs beside servers held: nobody measures how they use it."""
    sessions: tuple[Worked, ...]
    """Those that rested longest, first the longest."""


def report(broker: Broker, by: str, first: date, last: date) -> Report:
    """Add up who held and used what. Blocks."""
    start, end = weeks.midnight(first), weeks.midnight(last + timedelta(days=1))
    found = broker.worked_between(start, end)
    (beside,) = broker.use_of_jobs([start, end], "user")
    rows: dict[str, Row] = {}
    total = Row("")
    for some in found:
        name = {"member": some.server.user, "group": some.group, "model": some.model}[by]
        rows[name] = rows.get(name, Row(name)).plus(some)
        total = total.plus(some)
    most = sorted(found, key=lambda some: (-some.rested, some.since))[:MOST_SESSIONS]
    return Report(
        by=by,
        first=first,
        last=last,
        until=min(end, broker.clock()),
        rows=tuple(sorted(rows.values(), key=lambda row: (-row.rested, -row.held, row.name))),
        total=total,
        batch=together(beside.values()).gpu_seconds,
        sessions=tuple(some for some in most if some.rested >= 1),
    )


class WorkedHandler(Handler):
    """What the page, the CSV and the JSON share."""

    async def asked(self) -> Report:
        """The report that was asked for. Raises HTTPError for who may not see it, or 400."""
        if not self.reach(READ_USAGE).everybody:
            raise web.HTTPError(403) from NotAllowed(NO_SCOPE)
        by = one_of(self.get_query_argument("by", "member"), "by", BY)
        since, until = (self.get_query_argument(name, "") for name in ("from", "to"))
        try:
            first, last = weeks.period(since, until, self.broker.clock())
            if last - first > LONGEST:
                sentence = f"From {first} to {last} is too long: ask for three months at the most."
                raise InvalidRequest(sentence, field="from")
        except InvalidRequest as error:
            raise web.HTTPError(400) from error
        return await self.report(report, self.broker, by, first, last)


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
            choices=BY,
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
        self.finish(table([(found.by, *COLUMNS), *lines]))


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


def _seconds(row: Row) -> dict[str, Any]:
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


HANDLERS: list[tuple[str, type[Handler]]] = [
    ("used", WorkedPage),
    (r"used\.csv", WorkedCSV),
    ("api/used", WorkedAPI),
]
