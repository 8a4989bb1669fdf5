"""Sessions as they are extended and stopped: by their member, and by admins for a reason."""

from __future__ import annotations

from tornado import web

from ..broker.admin import checked_reason
from ..errors import CannotExtend, CannotStop, GPUSpawnerError, InvalidRequest, UnknownLease
from ..model import Lease, LeaseState
from . import figures
from .api import APIHandler, lease
from .api_queue import ChangingAPI
from .base import Handler
from .corrections import needed_reason
from .forms import FormPage
from .pages import MemberPage, device_names


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

    for_servers = True

    @web.authenticated
    async def post(self, lease_id: str) -> None:
        await own_lease(self, lease_id, or_admin=True)
        extended = await self.read(self._extend, lease_id)
        (told,) = figures.lease_figures(self.broker, [extended], self.broker.clock())
        self.answer(lease(told))

    def _extend(self, lease_id: str) -> Lease:
        return self.broker.extend(lease_id, actor=self.user)


class StopPage(FormPage):
    """The button that stops a server: a member's own, or any for an admin's reason. Asked once
    more, then done."""

    async def get(self, lease_id: str) -> None:
        self.redirect(self.context.prefix)

    @web.authenticated
    async def post(self, lease_id: str) -> None:
        lease = await own_lease(self, lease_id, or_admin=True)
        if lease.state is LeaseState.ENDED:
            raise web.HTTPError(409) from CannotStop(why="it has stopped already")
        if lease.server.user == self.user:
            await self._stop_own(lease)
        else:
            await self._order(lease)

    async def _stop_own(self, lease: Lease) -> None:
        name = lease.server.name or "My server"
        if not self.confirmed:
            self.ask(
                f"Stop {name if lease.server.name else 'my server'}?",
                [("Server", name), ("Environment", lease.environment or "the hub's own")],
                action=f"leases/{lease.id}/stop",
                button="Stop it",
                back="",
                note="What runs in it ends now. Your files stay, and it costs nothing more.",
                danger=True,
            )
            return
        await stop_own(self, lease)
        self.go(f"?stopped={lease.id}")

    async def _order(self, lease: Lease) -> None:
        """An admin's order, which the service carries out until the server is gone."""
        why = self.field("reason")
        if not self.confirmed:
            self._ask_why(lease, why)
            return
        try:
            reason = checked_reason(why, needed=True)
            await self.broker.run(self.broker.stop, lease.id, actor=self.actor, reason=reason)
        except InvalidRequest as refusal:
            self._ask_why(lease, why[:LONGEST_SHOWN], refusal)
            return
        except GPUSpawnerError as refusal:
            raise web.HTTPError(refusal.status_code) from refusal
        self.go(f"admin?stopped={lease.id}")

    def _ask_why(self, lease: Lease, why: str, refusal: InvalidRequest | None = None) -> None:
        if refusal:
            self.set_status(refusal.status_code)
        self.ask(
            f"Stop the server of {lease.server.user}?",
            [
                ("Server", str(lease.server)),
                ("Environment", lease.environment or "the hub's own"),
                ("GPUs", device_names(lease.devices)),
            ],
            action=f"leases/{lease.id}/stop",
            button="Stop it",
            back="admin",
            note="What runs in it ends now. The files stay, and it costs nothing more. Its member "
            "is told the reason.",
            danger=True,
            why=why,
            error=refusal.message if refusal else "",
            here="admin",
        )


class StopAPI(ChangingAPI):
    """Have any server stopped, for admins: ``{"reason": "the machine gets a new fan"}``."""

    @web.authenticated
    async def post(self, lease_id: str) -> None:
        self.need_admin()
        reason = needed_reason(self.sent("reason"))
        ordered = await self.do(self.broker.stop, lease_id, reason=reason)
        (told,) = figures.lease_figures(self.broker, [ordered], self.broker.clock())
        self.answer(lease(told))


class EndAPI(APIHandler):
    """Stop a server of one's own."""

    for_servers = True

    @web.authenticated
    async def post(self, lease_id: str) -> None:
        found = await own_lease(self, lease_id)
        if found.state is LeaseState.ENDED:
            raise web.HTTPError(409) from CannotStop(why="it has stopped already")
        await stop_own(self, found)
        found = await self.read(self.broker.lease, lease_id)
        (told,) = figures.lease_figures(self.broker, [found], self.broker.clock())
        self.answer(lease(told))


def goes_on(lease: Lease) -> bool:
    """Whether there is a stop to order."""
    return lease.state is not LeaseState.ENDED and not lease.outcome


async def own_lease(handler: Handler, lease_id: str, *, or_admin: bool = False) -> Lease:
    """A lease of the one who asks; of anybody else's, only an admin hears that it exists."""
    found: Lease = await handler.read(handler.broker.lease, lease_id)
    own = found.server.user == handler.user and handler.concerns(found.server)
    if not own and not (or_admin and handler.admin):
        raise web.HTTPError(404) from UnknownLease(lease=lease_id)
    return found


async def stop_own(handler: Handler, lease: Lease) -> None:
    """Have the Hub stop a member's own server, as its own button does. Raises HTTPError."""
    hub = handler.context.hub
    if hub is None:
        raise web.HTTPError(503) from CannotStop(why="the Hub cannot be asked just now")
    try:
        await hub.stop_server(lease.server)
    except GPUSpawnerError as error:
        raise web.HTTPError(error.status_code, "%s", error.message) from error


LONGEST_SHOWN = 1000
"""Characters of a reason that are shown again."""

HANDLERS: list[tuple[str, type[Handler]]] = [
    ("leases/([0-9a-f]{1,64})/stop", StopPage),
    ("api/leases/([0-9a-f]{1,64})/stop", StopAPI),
    ("api/leases/([0-9a-f]{1,64})/end", EndAPI),
    ("leases/([0-9a-f]+)/extend", ExtendForm),
    ("api/leases/([0-9a-f]+)/extend", ExtendAPI),
]
