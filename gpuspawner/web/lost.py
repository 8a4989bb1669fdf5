"""Servers that do not reach their GPUs any more, and the button that starts them again."""

from __future__ import annotations

from tornado import web

from ..errors import GPUSpawnerError
from ..model import Lease
from .api import APIHandler, lease
from .base import Handler
from .figures import lease_figures
from .forms import FormPage
from .pages import device_names
from .sessions import own_lease


class RestartPage(FormPage):
    """The button on the member's page. Asked once more, then done."""

    async def get(self, lease_id: str) -> None:
        self.redirect(self.context.prefix)

    @web.authenticated
    async def post(self, lease_id: str) -> None:
        found = await own_lease(self, lease_id)
        if not self.confirmed:
            self._ask(found)
            return
        try:
            await self.broker.run(self.broker.restart, lease_id, actor=self.user)
        except GPUSpawnerError as refusal:
            raise web.HTTPError(refusal.status_code) from refusal
        self.context.poke()
        self.go(f"?restarted={lease_id}")

    def _ask(self, found: Lease) -> None:
        name = found.server.name or "My server"
        same = "the same GPU" if len(found.devices) == 1 else "the same GPUs"
        self.ask(
            f"Restart {found.server.name or 'my server'} with {same}?",
            [
                ("Server", name),
                ("Environment", found.environment or "the hub's own"),
                ("GPUs", device_names(found.devices)),
            ],
            action=f"leases/{found.id}/restart",
            button="Restart it",
            back="",
            note="What runs in it ends now. Your files stay. It starts by itself in a moment, for "
            "the hours that are left, at the prices of now.",
            danger=True,
        )


class RestartAPI(APIHandler):
    """The same for scripts; an admin may do it for any server that lost its GPUs."""

    @web.authenticated
    async def post(self, lease_id: str) -> None:
        await own_lease(self, lease_id, or_admin=True)
        ordered = await self.read(self._restart, lease_id)
        self.context.poke()
        (told,) = lease_figures(self.broker, [ordered], self.broker.clock())
        self.answer(lease(told))

    def _restart(self, lease_id: str) -> Lease:
        return self.broker.restart(lease_id, actor=self.actor)


HANDLERS: list[tuple[str, type[Handler]]] = [
    ("leases/([0-9a-f]{1,64})/restart", RestartPage),
    ("api/leases/([0-9a-f]{1,64})/restart", RestartAPI),
]
