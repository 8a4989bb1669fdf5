"""How a spawn gets its lease: at once, or in line when its turn has come."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from traitlets import Any as AnyTrait
from traitlets import default

from ..broker import Broker, Terms
from ..broker.hub import hub_broker
from ..catalog import Environment
from ..errors import MemberGone, ServerHasLease, TicketEnded
from ..ledger.payers import check_payer
from ..model import Lease, Request, ServerRef, Ticket
from .form import GPUSpawnerForm
from .progress import Progress
from .queueing import Queueing
from .removal import end_waits_first


class Acquiring(GPUSpawnerForm):
    """The part of the mixin that asks the broker. Use :class:`GPUSpawnerMixin`, not this."""

    broker = AnyTrait(help="The broker; shared by all spawners of a hub through its settings.")

    @default("broker")
    def _default_broker(self) -> Broker:
        return hub_broker(self.hub_settings, self.config, self.log)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lease: Lease | None = None
        self.lease_id = ""
        self.touched = True
        """Whether the engine was asked to create anything since the last acquire."""
        self.said = Progress()
        self._acquiring: asyncio.Future[Lease | Ticket] | None = None
        self._asked: asyncio.Future[Lease | Ticket] | None = None
        """The same as long as nobody has come for the answer."""
        self._left_ticket = ""
        """The ticket of a wait that was cancelled; whoever stops the server ends it."""

    if TYPE_CHECKING:  # what the mixin has, which builds on this

        async def _release(self, reason: str) -> bool:
            """Release the lease once the server is proved gone. Whether it was."""

    def engine_for(self, request: Request) -> str:
        """The name of the engine that a server of this request is to run on."""
        return self.engine_name

    # Shared by all spawners of this hub.

    @property
    def hub_settings(self) -> MutableMapping[str, Any]:
        settings: MutableMapping[str, Any] = self.user.settings
        return settings

    def shared(self, key: str, make: Any) -> Any:
        """One object a hub, made by whoever needs it first."""
        if key not in self.hub_settings:
            self.hub_settings[key] = make()
        return self.hub_settings[key]

    @property
    def queueing(self) -> Queueing:
        """Where the spawns of this hub wait."""
        found: Queueing = self.shared(
            "gpuspawner_queueing", lambda: Queueing(self.broker, self.log)
        )
        return found

    @property
    def server_ref(self) -> ServerRef:
        """This server, as the store names it."""
        return ServerRef(self.user.name, self.name or "")

    async def _acquire(self, request: Request, terms: Terms) -> Lease:
        try:
            return await self._grant(request, terms)
        except ServerHasLease:
            await self._settle_previous()
        return await self._grant(request, terms)

    def _ask(self, request: Request, terms: Terms) -> asyncio.Future[Lease | Ticket]:
        """Begin to ask the broker; :meth:`_grant` takes the answer."""
        self._left_ticket = ""
        self._asked = self._acquiring = self.queueing.ask(
            self.server_ref, request, engine=self.engine_for(request), terms=terms, said=self.said
        )
        return self._asked

    async def _grant(self, request: Request, terms: Terms) -> Lease:
        """The lease, at once or when the turn has come."""
        asked = self._asked or self._ask(request, terms)
        self._asked = None
        # The transaction ends even if this spawn is cancelled: what it granted is then
        # released by whoever comes first, the hook after the stop or this callback.
        try:
            got = await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(self._give_back)
            raise
        lease = await self._wait_in_line(got) if isinstance(got, Ticket) else got
        self.touched = False
        return lease

    def _give_back(self, acquired: asyncio.Future[Lease | Ticket]) -> None:
        if acquired.cancelled() or acquired.exception():
            return
        got = acquired.result()
        if isinstance(got, Ticket):
            self._left_ticket = got.id
            return
        give_back = partial(self.broker.release, got.id, reason="the start was cancelled")
        self.broker.store.executor.submit(give_back)

    async def _wait_in_line(self, ticket: Ticket) -> Lease:
        """Wait for the turn, with place and estimate on the pending page."""
        chosen: Environment | None = None

        def still_allowed() -> Terms:
            nonlocal chosen
            self._must_be_there(ticket.server)
            chosen, request = self.resolve_options()
            # What the environment needs of the driver may be edited meanwhile: nobody asked for it.
            asked = ticket.request
            if request != replace(asked, min_driver=request.min_driver, min_cuda=request.min_cuda):
                raise TicketEnded(why="what you asked for is not what you may have any more")
            terms = self.terms(chosen, request)
            check_payer(ticket.account, ticket.server.user, terms.groups)
            return terms

        end_waits_first(self.authenticator, self.queueing)
        try:
            lease = await self.queueing.wait(ticket, still_allowed, self.said)
        except asyncio.CancelledError:
            # By the member's stop, which ends the ticket, or by a hub that shuts down, which
            # does not: the next one goes on with it.
            self._left_ticket = ticket.id
            raise
        if chosen is not None:
            self.apply_environment(chosen)  # the catalog may have changed since they asked
        return lease

    def _must_be_there(self, server: ServerRef) -> None:
        """Raises MemberGone when the server's member was renamed or removed at the Hub."""
        if self.server_ref != server:
            raise MemberGone(why="the member was renamed")
        if not sa.inspect(self.orm_spawner).persistent:
            raise MemberGone(why="the member was removed")

    async def _leave_line(self) -> None:
        """The member stopped a start that waited in line: the place is given up."""
        if self._acquiring is not None and not self._acquiring.done():
            await asyncio.wait([self._acquiring])
        if self._asked is not None:  # stopped before it came for the answer
            self._give_back(self._asked)
            self._asked = None
        ticket, self._left_ticket = self._left_ticket, ""
        if ticket:
            await self.queueing.end(ticket, "cancelled", "the start was stopped", tell=False)

    async def _settle_previous(self) -> None:
        """End what an earlier start of this very server left behind."""
        self.lease = await self.broker.run(self.broker.lease_of, self.server_ref)
        if self.lease is None:
            return
        self.log.warning("%s still has lease %s: settling it", self.server_ref, self.lease.id)
        await self._release("left over from an earlier start")
        if self.lease is not None:
            raise ServerHasLease()
