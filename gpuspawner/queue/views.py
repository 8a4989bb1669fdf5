"""The queue as pages and JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

from tornado import web

from ..core.errors import GPUSpawnerError, InvalidRequest, TicketEnded, UnknownTicket
from ..core.text import LONGEST_REASON
from ..devices.closures import GRANTING
from ..devices.snapshots import Overview
from ..services import Services
from ..web import view_models
from ..web.api import Action, APIHandler, ChangingAPI, each_action, operation
from ..web.pages import FormPage
from ..web.schemas import WhyBody
from . import schemas
from .models import Ticket
from .rank import TicketComparison, compare

MOST = 200
"""Maximum number of tickets on the page."""

GIVEN_UP = "the member left the queue"
"""End reason of a ticket that its own member cancelled."""


class QueueForms(FormPage):
    """The base of admin pages with forms that change the queue."""

    async def change(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a service method that changes something. Raises GPUSpawnerError."""
        return await self.services.run(work, *args, actor=self.user, **kwargs)

    def say(self, done: str) -> None:
        """Redirect to the queue, with a message about the change."""
        self.redirect(f"{self.context.prefix}queue?done={done}", status=303)


class QueuePage(QueueForms):
    """The whole queue with its scores, for admins."""

    @web.authenticated
    async def get(self) -> None:
        """Send the page."""
        self.need_admin()
        await self.show_line()

    async def show_line(self, refusal: GPUSpawnerError | None = None, **typed: str) -> None:
        """Send the page; ``typed`` is the content of a refused form."""
        line = await self.read(view_models.whole_line, self.services)
        overview: Overview = await self.read(self.services.monitoring.overview)
        one, other = (self.get_query_argument(name, "") for name in ("a", "b"))
        try:
            comparison = _comparison(line, one, other)
        except InvalidRequest as error:
            refusal, comparison = refusal or error, None
        self.show(
            "queue.html",
            line=line,
            a=one,
            b=other,
            comparison=comparison,
            most=MOST,
            devices=overview.devices,
            drained=sum(view.device.uuid in line.closed for view in overview.devices),
            live=bool(self.get_query_argument("live", "")) and self.request.method == "GET",
            done=self.get_query_argument("done", ""),
            refusal=refusal,
            typed=defaultdict(str, typed),
            xsrf=self.xsrf,
        )


class GrantingForm(QueuePage):
    """The form that pauses and resumes granting."""

    async def get(self) -> None:
        """Redirect to the queue."""
        self.redirect(f"{self.context.prefix}queue")

    @web.authenticated
    async def post(self) -> None:
        """Pause or resume granting."""
        self.need_admin()
        reason = self.field("reason")
        try:
            action = "pause" if self.is_yes("paused") else "resume"
            done = await self.change(getattr(self.services.devices, action), reason=reason)
        except GPUSpawnerError as refusal:
            await self.show_line(refusal, granting=reason[: 2 * LONGEST_REASON])
            return
        self.say(action if done else "nothing")


class TicketPage(QueueForms):
    """One ticket with the parts of its score, and the forms that change it, for admins."""

    @web.authenticated
    async def get(self, ticket_id: str, action: str = "") -> None:
        """Send the page."""
        self.need_admin()
        if action:  # the user had to sign in again to send this form
            self.redirect(f"{self.context.prefix}queue/{ticket_id}")
            return
        await self.show_ticket(ticket_id)

    @web.authenticated
    async def post(self, ticket_id: str, action: str = "") -> None:
        """Move, boost or cancel the ticket."""
        self.need_admin()
        try:
            await self.change(change_of(self.services, action, self.typed), ticket_id)
        except UnknownTicket as error:
            raise web.HTTPError(404) from error
        except GPUSpawnerError as refusal:
            fields = {name: self.field(name)[:1000] for name in ("position", "points", "reason")}
            await self.show_ticket(ticket_id, refusal, action=action, **fields)
            return
        self.say(action)

    async def show_ticket(
        self, ticket_id: str, refusal: GPUSpawnerError | None = None, **typed: str
    ) -> None:
        """Send the page; ``typed`` is the content of a refused form."""
        line = await self.read(view_models.whole_line, self.services)
        some = line.find(ticket_id)
        ticket = some.ticket if some else await self.read(self.services.queue.ticket, ticket_id)
        self.show(
            "ticket.html",
            now=line.now,
            ticket=ticket,
            some=some,
            hours_a_point=self.services.queue.hours_a_point,
            refusal=refusal,
            typed=defaultdict(str, typed),
            xsrf=self.xsrf,
        )


class CancelTicketPage(FormPage):
    """The form by which members leave the queue, after a confirmation."""

    @web.authenticated
    async def get(self, ticket_id: str) -> None:
        """Ask for confirmation."""
        await self._confirm(ticket_id)

    async def _confirm(self, ticket_id: str) -> None:
        ticket = await self.read(waiting_ticket, self.services, ticket_id, self.user)
        action = f"tickets/{ticket.id}/cancel"
        self.confirm("leave_queue", action=action, back="cluster", ticket=ticket)

    @web.authenticated
    async def post(self, ticket_id: str) -> None:
        """Ask for confirmation, or cancel the ticket."""
        if not self.confirmed:
            await self._confirm(ticket_id)
            return
        await self.read(leave, self.services, ticket_id, self.user)
        self.go("?given_up=1")


def waiting_ticket(services: Services, ticket_id: str, user: str) -> Ticket:
    """Return a member's own ticket. Blocks.

    Raises UnknownTicket, also for another member's ticket, and TicketEnded if it no longer waits.
    """
    ticket = services.queue.ticket(ticket_id)
    if ticket.server.user != user:
        raise UnknownTicket(ticket=ticket_id)
    if ticket.outcome:
        raise _ended(ticket)
    return ticket


def leave(services: Services, ticket_id: str, user: str) -> Ticket:
    """Cancel a member's own ticket. Blocks. Raises as :func:`waiting_ticket` does."""
    waiting_ticket(services, ticket_id, user)
    ticket = services.queue.end_ticket(ticket_id, "cancelled", GIVEN_UP, tell=False)
    if ticket.end_reason != GIVEN_UP:
        raise _ended(ticket)
    return ticket


def _ended(ticket: Ticket) -> TicketEnded:
    if ticket.outcome == "granted":
        return TicketEnded(
            "Its turn has just come, and the server is starting. Stop the server instead."
        )
    return TicketEnded(f"This ticket is no longer waiting: {ticket.end_reason}")


def change_of(
    services: Services, action: str, sent: Callable[[type[Any]], Any]
) -> Callable[..., Ticket]:
    """Return the function that performs an action, called with a ticket id and the actor.

    ``sent`` parses the request's body.
    """
    if action == "move":
        move = sent(schemas.MoveBody)
        return partial(services.queue.move, position=move.position, reason=move.reason)
    if action == "boost":
        boost = sent(schemas.BoostBody)
        return partial(services.queue.boost, points=boost.points, reason=boost.reason)
    return partial(services.queue.cancel, reason=sent(WhyBody).reason)


def _comparison(line: view_models.QueueView, one: str, other: str) -> TicketComparison | None:
    if not one and not other:
        return None
    first, second = line.find(one), line.find(other)
    if first is None or second is None:
        raise InvalidRequest("One of the two tickets is no longer waiting.", field="a")
    if first is second:
        raise InvalidRequest("Both are the same ticket: choose two.", field="b")
    return compare(first.ranked, second.ranked)


class QueueAPI(APIHandler):
    """Return the queue to admins; to members their own tickets and the number waiting."""

    @operation("queue", schemas.QueueAnswer | schemas.OwnQueueAnswer)
    @web.authenticated
    async def get(self) -> None:  # noqa: D102 - the class docstring is the summary
        await (self._tell_everything() if self.admin else self._tell_own())

    async def _tell_everything(self) -> None:
        line = await self.read(view_models.whole_line, self.services)
        self.answer(
            schemas.QueueAnswer,
            line,
            as_of=line.now,
            drained={uuid: some for uuid, some in line.closed.items() if uuid != GRANTING},
            waiting=len(line.tickets),
        )

    async def _tell_own(self) -> None:
        mine = await self.read(view_models.own_tickets, self.services, self.user)
        own = [schemas.TicketAnswer.of(ticket=some, standing=its) for some, its in mine.waiting]
        self.answer(
            schemas.OwnQueueAnswer,
            mine,
            as_of=mine.now,
            paused=(await self.read(self.services.devices.closures)).get(GRANTING),
            waiting=mine.of,
            tickets=own,
        )


TICKET_ACTIONS = {
    "cancel": Action("Cancel a ticket.", WhyBody),
    "boost": Action("Add points to a ticket's score.", schemas.BoostBody),
    "move": Action("Move a ticket to a position; null ends that.", schemas.MoveBody),
}

DEVICE_ACTIONS = {
    "drain": Action("Drain a device: no new session starts on it.", schemas.DrainBody),
    "undrain": Action("Undrain a device.", WhyBody),
}


class TicketAPI(ChangingAPI):
    """The API operations that change a ticket: members may cancel their own, admins change any."""

    @each_action("queue/{ticket}", TICKET_ACTIONS, schemas.TicketAnswer | schemas.EndedTicketAnswer)
    @web.authenticated
    async def post(self, ticket_id: str, action: str) -> None:
        """Make the change and answer with the ticket."""
        ticket = await self.read(self.services.queue.ticket, ticket_id)
        mine = ticket.server.user == self.user
        if not self.admin and not mine:  # do not reveal that it exists
            raise web.HTTPError(404) from UnknownTicket(ticket=ticket_id)
        if action == "cancel" and mine:
            self.sent(WhyBody)
            await self.read(leave, self.services, ticket_id, self.user)
        else:
            self.need_admin()
            await self.change(change_of(self.services, action, self.sent), ticket_id)
        await self._tell(ticket_id)

    async def _tell(self, ticket_id: str) -> None:
        ticket = await self.read(self.services.queue.ticket, ticket_id)
        if ticket.outcome:
            self.answer(schemas.EndedTicketAnswer, ticket)
            return
        standings = await self.read(self.services.positions.standings)
        self.answer(schemas.TicketAnswer, ticket=ticket, standing=standings.get(ticket_id))


class GrantingAPI(ChangingAPI):
    """The API operation that pauses or resumes granting."""

    @operation("granting", schemas.PausedAnswer, name="pause", body=schemas.PauseBody)
    @web.authenticated
    async def post(self) -> None:
        """Pause or resume granting: ``{"paused": true, "reason": "new fans"}``."""
        self.need_admin()
        sent = self.sent(schemas.PauseBody)
        work = self.services.devices.pause if sent.paused else self.services.devices.resume
        changed = await self.change(work, reason=sent.reason)
        closed = await self.read(self.services.devices.closures)
        self.answer(schemas.PausedAnswer, changed=changed, paused=closed.get(GRANTING))


class DrainAPI(ChangingAPI):
    """The API operations that drain a device, named by UUID or index, or end its drain."""

    @each_action("devices/{device}", DEVICE_ACTIONS, schemas.DrainedAnswer)
    @web.authenticated
    async def post(self, device: str, action: str) -> None:
        """Make the change and answer with the device's state."""
        self.need_admin()
        work = self.services.devices.undrain
        sent = self.sent(schemas.DrainBody if action == "drain" else WhyBody)
        if isinstance(sent, schemas.DrainBody):
            work = partial(self.services.drains.drain, anyway=sent.anyway)
        try:
            changed = await self.change(work, device, reason=sent.reason)
        except web.HTTPError as error:
            cause = error.__cause__
            if isinstance(cause, InvalidRequest) and cause.fields.get("field") == "device":
                error.status_code = 404  # the device is part of the path
            raise
        closed = await self.read(self.services.devices.closures)
        uuid = device if device in closed else (await self.read(self._uuid, device))
        self.answer(
            schemas.DrainedAnswer,
            uuid=uuid,
            changed=changed,
            drained=closed.get(uuid),
            whole_machine=self.services.machines.machine_of(uuid),
        )

    def _uuid(self, device: str) -> str:
        return self.services.devices.find_device(device).uuid


_TICKET = "([0-9A-Za-z-]{1,64})"

QUEUE_HANDLERS = [
    ("queue", QueuePage),
    ("queue/granting", GrantingForm),
    (f"queue/{_TICKET}", TicketPage),
    (f"queue/{_TICKET}/(move|boost|cancel)", TicketPage),
    (f"tickets/{_TICKET}/cancel", CancelTicketPage),
    ("api/queue", QueueAPI),
    (f"api/queue/{_TICKET}/(cancel|boost|move)", TicketAPI),
    ("api/granting", GrantingAPI),
    ("api/devices/([^/]{1,200})/(drain|undrain)", DrainAPI),
]
