"""The audit log for admins, as a page, CSV and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tornado import web

from ..ledger.views import CSVHandler, cells
from ..web.api import BEFORE, LIMIT, SEARCH, APIHandler, operation
from ..web.base import ServiceHandler
from ..web.fields import text_of
from ..web.pages import Page
from ..web.schemas import Answer, ChangeAnswer, DatedAnswer
from .search import LONGEST, Trail

ROWS = 50
"""Changes per page."""

COLUMNS = ("at", "actor", "action", "subject", "detail")
"""Columns of the CSV file."""


class NumberedAnswer(Answer):
    id: int


class TrailChangeAnswer(ChangeAnswer, NumberedAnswer):
    """A line of the audit log, by its number."""


class TrailAnswer(DatedAnswer):
    changes: tuple[TrailChangeAnswer, ...]
    next: int | None


class TrailHandler(ServiceHandler):
    """What the page and the API have in common."""

    async def found(self, limit: int) -> Trail:
        """Return the requested changes. Raises HTTPError 403 unless the user is an admin."""
        self.need_admin()
        search = text_of(self.get_query_argument("search", ""), "search", LONGEST)
        return await self.read(self.services.reports.find_changes, search, self.before, limit)


class TrailPage(TrailHandler, Page):
    """The audit log as a page."""

    @web.authenticated
    async def get(self) -> None:
        """Send the page."""
        found = await self.found(ROWS)
        overview = await self.read(self.services.monitoring.overview)
        self.show(
            "trail.html",
            now=self.services.clock(),
            trail=found,
            devices=overview.devices,
            search=self.get_query_argument("search", ""),
            first=not self.get_query_argument("before", ""),
        )


class TrailCSV(CSVHandler):
    """The whole audit log as CSV."""

    @web.authenticated
    async def get(self) -> None:
        """Send all changes that match the search."""
        self.need_admin()
        search = text_of(self.get_query_argument("search", ""), "search", LONGEST)
        self.begin("trail")
        await self.send(COLUMNS, self._rows(search))

    def _rows(self, search: str) -> Iterator[list[Sequence[str]]]:
        before: int | None = None
        while True:
            found = self.services.reports.find_changes(search, before, 1000)
            yield [cells(ChangeAnswer.of(change), COLUMNS) for change in found.changes]
            before = found.older
            if before is None:
                return


class TrailAPI(TrailHandler, APIHandler):
    """The audit log as JSON."""

    @operation("trail", TrailAnswer, SEARCH, BEFORE, LIMIT)
    @web.authenticated
    async def get(self) -> None:
        """Return the audit log, newest first."""
        found = await self.found(self.limit)
        self.answer(TrailAnswer, found, as_of=self.services.clock(), next=found.older)


HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("trail", TrailPage),
    (r"trail\.csv", TrailCSV),
    ("api/trail", TrailAPI),
]
