"""Servers that are to be stopped because their GPUs rest, and the button that puts it off."""

from __future__ import annotations

from typing import Any

from tornado import web

from ..errors import CannotSnooze
from .api import APIHandler, lease
from .base import Handler
from .figures import lease_figures
from .pages import MemberPage
from .sessions import own_lease


class SnoozeForm(MemberPage):
    """The button on the member's page."""

    async def get(self, lease_id: str) -> None:
        self.redirect(self.context.prefix)

    @web.authenticated
    async def post(self, lease_id: str) -> None:
        await own_lease(self, lease_id)
        try:
            await self.broker.run(self.broker.snooze, lease_id)
        except CannotSnooze as refusal:
            await self.show_mine(refusal)
            return
        self.redirect(f"{self.context.prefix}?snoozed={lease_id}", status=303)


class SnoozeAPI(APIHandler):
    """The same for scripts; an admin may do it for any server."""

    for_servers = True

    @web.authenticated
    async def post(self, lease_id: str) -> None:
        await own_lease(self, lease_id, or_admin=True)
        snoozed: Any = await self.read(self.broker.snooze, lease_id)
        (told,) = lease_figures(self.broker, [snoozed], self.broker.clock())
        self.answer(lease(told))


HANDLERS: list[tuple[str, type[Handler]]] = [
    ("leases/([0-9a-f]{1,64})/snooze", SnoozeForm),
    ("api/leases/([0-9a-f]{1,64})/snooze", SnoozeAPI),
]
