"""The roster and former members as a page, for admins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType

from tornado import web

from ..core.errors import GPUSpawnerError, InvalidRequest
from ..core.text import LONGEST_REASON
from ..web.base import ServiceHandler
from ..web.fields import text_of
from ..web.pages import FormPage, part
from .repository import Membership, RosterEntry
from .roster import LONGEST, RosterImport

SHOWN = 200
"""Roster entries and former members on the page; the search finds the others."""


class MembersPage(FormPage):
    """Who is on the roster and who is no member any more, with an import and its preview."""

    takes_files = True

    @web.authenticated
    async def get(self) -> None:
        """Send the page."""
        self.need_admin()
        await self.show_members()

    async def show_members(
        self,
        found: RosterImport | None = None,
        refusal: GPUSpawnerError | None = None,
        typed: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Send the page; ``found`` is the preview or the result of an import."""
        if refusal or (found and found.problems):
            self.set_status(400)
        search = text_of(self.get_query_argument("search", ""), "search", LONGEST).lower()
        entries, former = await self.read(self._known)
        listed = [x for x in entries if _has(search, x.user, x.course, *x.groups)]
        ended = [x for x in former if _has(search, x.user, x.reason)]
        self.show(
            "members.html",
            now=self.services.clock(),
            search=search,
            entries=listed[:SHOWN],
            entry_count=len(listed),
            former=ended[:SHOWN],
            former_count=len(ended),
            found=found,
            cells=self.services.roster.cells,
            changed=self._changed,
            state_of=state_of,
            shown=SHOWN,
            error=refusal.message if refusal else "",
            done=self.get_query_argument("ended", ""),
            typed={"lines": "", "whole": "", **typed},
            xsrf=self.xsrf,
        )

    def _known(self) -> tuple[Sequence[RosterEntry], Sequence[Membership]]:
        return self.services.roster.entries(), self.services.members.former_members()

    @web.authenticated
    async def post(self) -> None:
        """Preview an import, or do it if it is confirmed."""
        self.need_admin()
        typed = {name: self.field(name) for name in ("lines", "whole")}
        try:
            data = self.uploaded(typed["lines"])
            typed["lines"] = data.decode("utf-8-sig", errors="replace")
            found = await self.services.run(
                self.services.roster.import_roster,
                data,
                actor=self.actor,
                dry_run=not self.confirmed,
                whole=bool(typed["whole"]),
            )
        except GPUSpawnerError as refusal:
            await self.show_members(refusal=refusal, typed=typed)
            return
        await self.show_members(found, typed=typed)

    def _changed(self, before: RosterEntry, after: RosterEntry) -> str:
        """Say what an import changes in an entry: ``ends was 2025-02-28``."""
        changed = self.services.roster.changed_cells(before, after)
        return ", ".join(f"{name} was {old or 'empty'}" for name, old in changed)


class EndRosterEntryPage(FormPage):
    """The form that ends a roster entry, after a confirmation with a reason."""

    async def get(self, name: str) -> None:
        """Redirect to the members."""
        self.redirect(f"{self.context.prefix}members")

    @web.authenticated
    async def post(self, name: str) -> None:
        """Ask for a reason, or end the entry."""
        self.need_admin()
        course, reason = self.field("course"), self.field("reason")
        if not self.confirmed:
            self._ask_why(name, course, reason)
            return
        end = self.services.roster.end_on_roster
        try:
            await self.services.run(end, name, actor=self.actor, reason=reason, course=course)
        except InvalidRequest as refusal:
            self._ask_why(name, course, reason[: 2 * LONGEST_REASON], refusal)
            return
        self.go("members?ended=1")

    def _ask_why(
        self, name: str, course: str, why: str, refusal: InvalidRequest | None = None
    ) -> None:
        self.confirm(
            "roster_end",
            action=f"members/{part(name)}/end",
            back="members",
            fields={"course": course},
            name=name,
            course=course,
            minutes=self.services.settings.members.grace_minutes,
            why=why,
            refusal=refusal,
        )


def _has(search: str, *texts: str) -> bool:
    return any(search in text.lower() for text in texts)


def state_of(entry: RosterEntry, now: datetime) -> str:
    """Return ``current``, ``ended`` or ``upcoming``."""
    if entry.holds(now):
        return "current"
    return "ended" if entry.ends_at and entry.ends_at <= now else "upcoming"


HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("members", MembersPage),
    (r"members/([^/]{1,200})/end", EndRosterEntryPage),
]
