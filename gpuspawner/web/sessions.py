"""Sessions with an end: the form and the JSON with which they are extended."""

from __future__ import annotations

from tornado import web

from ..errors import CannotExtend, UnknownLease
from ..model import Lease
from . import figures
from .api import APIHandler, lease
from .base import Handler
from .pages import MemberPage


class ExtendForm(MemberPage):
    """The button on the member's page: the session begins its whole length anew."""

    async def get(self, lease_id: str) -> None:
        self.redirect(self.context.prefix)

    @web.authenticated
    async def post(self, lease_id: str) -> None:
        await own_lease(self, lease_id)
        try:
            await self.broker.run(self.broker.extend, lease_id, actor=self.user)
        except CannotExtend as refusal:
            await self.show_mine(refusal)
            return
        self.redirect(f"{self.context.prefix}?extended={lease_id}", status=303)


class ExtendAPI(APIHandler):
    """The same for scripts; an admin may extend any session."""

    @web.authenticated
    async def post(self, lease_id: str) -> None:
        await own_lease(self, lease_id, or_admin=True)
        extended = await self.read(self._extend, lease_id)
        (told,) = figures.lease_figures(self.broker, [extended], self.broker.clock())
        self.answer(lease(told))

    def _extend(self, lease_id: str) -> Lease:
        return self.broker.extend(lease_id, actor=self.user)


async def own_lease(handler: Handler, lease_id: str, *, or_admin: bool = False) -> Lease:
    """A lease of the one who asks; of anybody else's, only an admin hears that it exists."""
    found: Lease = await handler.read(handler.broker.lease, lease_id)
    if found.server.user != handler.user and not (or_admin and handler.admin):
        raise web.HTTPError(404) from UnknownLease(lease=lease_id)
    return found


HANDLERS: list[tuple[str, type[Handler]]] = [
    ("leases/([0-9a-f]+)/extend", ExtendForm),
    ("api/leases/([0-9a-f]+)/extend", ExtendAPI),
]
