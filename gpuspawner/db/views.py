"""The audit trail: who changed what, and when. A page, CSV and JSON, for admins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tornado import web

from ..ledger.views import CSVHandler
from ..queue.views import change_json
from ..web.api import APIHandler, instant
from ..web.base import ServiceHandler
from ..web.fields import LAST, MOST_LINES, text_of, whole
from ..web.pages import Page
from .search import LONGEST, Trail

ROWS = 50
"""Changes on a page."""

COLUMNS = ("at", "actor", "action", "subject", "detail")
"""Of the trail as CSV."""


class TrailHandler(ServiceHandler):
    """What the page and the JSON share."""

    async def found(self, limit: int) -> Trail:
        """The changes that were asked for; only an admin hears of them."""
        self.need_admin()
        text = self.get_query_argument("before", "")
        before = whole(text, "before", 1, LAST) if text else None
        search = text_of(self.get_query_argument("search", ""), "search", LONGEST)
        return await self.read(self.broker.reports.find_changes, search, before, limit)


class TrailPage(TrailHandler, Page):
    """The trail for people."""

    @web.authenticated
    async def get(self) -> None:
        found = await self.found(ROWS)
        overview = await self.read(self.broker.overview)
        self.show(
            "trail.html",
            user=self.user,
            admin=True,
            now=self.broker.clock(),
            trail=found,
            devices=overview.devices,
            search=self.get_query_argument("search", ""),
            first=not self.get_query_argument("before", ""),
        )


class TrailCSV(CSVHandler):
    """The whole trail."""

    @web.authenticated
    async def get(self) -> None:
        self.need_admin()
        search = text_of(self.get_query_argument("search", ""), "search", LONGEST)
        self.begin("trail")
        await self.send(COLUMNS, self._rows(search))

    def _rows(self, search: str) -> Iterator[list[Sequence[str]]]:
        before: int | None = None
        while True:
            found = self.broker.reports.find_changes(search, before, 1000)
            yield [
                (instant(c.at) or "", c.actor, c.action, c.subject, c.detail) for c in found.changes
            ]
            before = found.older
            if before is None:
                return


class TrailAPI(TrailHandler, APIHandler):
    """The trail as JSON."""

    @web.authenticated
    async def get(self) -> None:
        limit = whole(self.get_query_argument("limit", "50"), "limit", 1, MOST_LINES)
        found = await self.found(limit)
        self.answer(
            {
                "as_of": instant(self.broker.clock()),
                "changes": [{"id": change.id, **change_json(change)} for change in found.changes],
                "next": found.older,
            }
        )


HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("trail", TrailPage),
    (r"trail\.csv", TrailCSV),
    ("api/trail", TrailAPI),
]
