"""Pages and JSON of the queue."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

from tornado import web

from ..core.errors import GPUSpawnerError, InvalidRequest, TicketEnded, UnknownTicket
from ..devices.closures import GRANTING, AuditEntry, Closure
from ..devices.service import LONGEST_REASON
from ..devices.snapshots import Overview
from ..services import Broker
from ..web import view_models
from ..web.api import APIHandler, ChangingAPI, _refused, instant
from ..web.pages import Page
from .models import Estimate, Priority, Ticket
from .standing import Comparison, Standing, compare

MOST = 200
"""Tickets on the page."""

GIVEN_UP = "it was given up on the member's page"
"""Why a ticket ended that its own member cancelled."""

DONE = {
    "move": "The ticket is moved.",
    "boost": "The boost of the ticket is set.",
    "cancel": "The ticket is cancelled, and its member is told why.",
    "pause": "Granting is paused.",
    "resume": "GPUs are given out again.",
    "drain": "The GPU is drained: nobody new gets it.",
    "drain-machine": "The whole machine is drained: nobody new gets any of its GPUs.",
    "undrain": "The GPU is given out again.",
    "undrain-machine": "The whole machine is given out again.",
    "nothing": "It was so already: nothing was changed.",
}
"""What a page says after a change."""


class QueueForms(Page):
    """What the pages of admins share: fields of forms, and refusals on the page itself."""

    async def change(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Change something through the broker. Raises GPUSpawnerError."""
        return await self.broker.run(work, *args, actor=self.user, **kwargs)

    def field(self, name: str) -> str:
        """A field of the form; empty when it is not there."""
        return str(self.get_body_argument(name, ""))

    def yes(self, name: str) -> bool:
        """A yes or no of the form. Raises InvalidRequest."""
        answers = {"yes": True, "no": False}
        if self.field(name) not in answers:
            raise InvalidRequest(f"The field {name!r} is yes or no.", field=name)
        return answers[self.field(name)]

    def say(self, done: str) -> None:
        """Show the line anew, with what was done."""
        self.redirect(f"{self.context.prefix}queue?done={done}", status=303)


class QueuePage(QueueForms):
    """The whole line, why it is so, and what is closed."""

    @web.authenticated
    async def get(self) -> None:
        self.need_admin()
        await self.show_line()

    async def show_line(self, refusal: GPUSpawnerError | None = None, **typed: str) -> None:
        """Send the page; ``typed`` is what a refused form had in it."""
        line = await self.read(view_models.whole_line, self.broker)
        overview: Overview = await self.read(self.broker.overview)
        states = {view.device.uuid: view for view in overview.devices}
        one, other = (self.get_query_argument(name, "") for name in ("a", "b"))
        try:
            comparison = _comparison(line, one, other)
        except InvalidRequest as error:
            refusal, comparison = refusal or error, None
        if refusal:
            self.set_status(refusal.status_code)
        self.show(
            "queue.html",
            user=self.user,
            admin=True,
            line=line,
            a=one,
            b=other,
            comparison=comparison,
            most=MOST,
            devices=overview.devices,
            drained=[
                (states[uuid], closure) for uuid, closure in line.closed.items() if uuid in states
            ],
            machines=any(view.machine for view in overview.devices),
            open_devices=[view for view in overview.devices if view.device.uuid not in line.closed],
            live=bool(self.get_query_argument("live", "")) and self.request.method == "GET",
            done=DONE.get(self.get_query_argument("done", ""), ""),
            error=refusal.message if refusal else "",
            typed=defaultdict(str, typed),
            longest=LONGEST_REASON,
            xsrf=self.xsrf,
        )


class GrantingForm(QueuePage):
    """Pause granting, and go on with it."""

    async def get(self) -> None:
        self.redirect(f"{self.context.prefix}queue")

    @web.authenticated
    async def post(self) -> None:
        self.need_admin()
        reason = self.field("reason")
        try:
            action = "pause" if self.yes("paused") else "resume"
            work = self.broker.devices.pause if action == "pause" else self.broker.devices.resume
            done = await self.change(work, reason=reason)
        except GPUSpawnerError as refusal:
            await self.show_line(refusal, granting=reason[: 2 * LONGEST_REASON])
            return
        self.say(action if done else "nothing")


class DrainForm(QueuePage):
    """Drain a device, and give it out again."""

    async def get(self) -> None:
        self.redirect(f"{self.context.prefix}queue")

    @web.authenticated
    async def post(self) -> None:
        self.need_admin()
        device, reason = self.field("device"), self.field("reason")
        try:
            action = "drain" if self.yes("drained") else "undrain"
            work = self.broker.devices.drain if action == "drain" else self.broker.devices.undrain
            done = await self.change(work, device, reason=reason)
        except GPUSpawnerError as refusal:
            await self.show_line(refusal, device=device, drain=reason[: 2 * LONGEST_REASON])
            return
        whole = "-machine" if self.broker.machines.machine_of(device) else ""
        self.say(f"{action}{whole}" if done else "nothing")


class TicketPage(QueueForms):
    """One ticket with the arithmetic of its score, and the forms that change it."""

    @web.authenticated
    async def get(self, ticket_id: str, action: str = "") -> None:
        self.need_admin()
        if action:  # a form that was sent before the member had signed in again
            self.redirect(f"{self.context.prefix}queue/{ticket_id}")
            return
        await self.show_ticket(ticket_id)

    @web.authenticated
    async def post(self, ticket_id: str, action: str = "") -> None:
        self.need_admin()
        try:
            await self._act(ticket_id, action)
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
        """Send the page; ``typed`` is what a refused form had in it."""
        line = await self.read(view_models.whole_line, self.broker)
        some = line.find(ticket_id)
        ticket = some.ticket if some else await self.read(self.broker.ticket, ticket_id)
        if refusal:
            self.set_status(refusal.status_code)
        self.show(
            "ticket.html",
            user=self.user,
            admin=True,
            now=line.now,
            ticket=ticket,
            some=some,
            hours_a_point=self.broker.hours_a_point,
            error=refusal.message if refusal else "",
            typed=defaultdict(str, typed),
            longest=LONGEST_REASON,
            xsrf=self.xsrf,
        )

    async def _act(self, ticket_id: str, action: str) -> None:
        reason = self.field("reason")
        if action == "move":
            text = self.field("position").strip()
            position = whole_number(text, "position") if text else None
            await self.change(self.broker.move, ticket_id, position, reason=reason)
        elif action == "boost":
            points = number(self.field("points"), "points")
            await self.change(self.broker.boost, ticket_id, points, reason=reason)
        else:
            await self.change(self.broker.cancel, ticket_id, reason=reason)


class GiveUp(Page):
    """A member's own ticket, given up."""

    async def get(self, ticket_id: str) -> None:
        self.redirect(self.context.prefix)

    @web.authenticated
    async def post(self, ticket_id: str) -> None:
        await self.read(give_up, self.broker, ticket_id, self.user)
        self.redirect(f"{self.context.prefix}?given_up=1", status=303)


def give_up(broker: Broker, ticket_id: str, user: str) -> Ticket:
    """End a member's own ticket. Blocks. Raises UnknownTicket, also for somebody else's, and
    TicketEnded when it does not wait any more."""
    ticket = broker.ticket(ticket_id)
    if ticket.server.user != user:
        raise UnknownTicket(ticket=ticket_id)
    if not ticket.outcome:
        ticket = broker.end_ticket(ticket_id, "cancelled", GIVEN_UP, tell=False)
        if ticket.end_reason == GIVEN_UP:
            return ticket
    if ticket.outcome == "granted":
        raise TicketEnded("It was its turn a moment ago: the server starts. Stop that instead.")
    raise TicketEnded(f"This ticket does not wait any more: {ticket.end_reason}")


def whole_number(text: str, field: str) -> int:
    """A whole number of a form. Raises InvalidRequest."""
    try:
        return int(text[:20])
    except ValueError:
        raise InvalidRequest(
            f"The field {field!r} is {text[:60]!r}: write a whole number.", field=field
        ) from None


def number(text: str, field: str) -> float:
    """A number of a form. Raises InvalidRequest."""
    try:
        return float(text[:60])
    except ValueError:
        raise InvalidRequest(
            f"The field {field!r} is {text[:60]!r}: write a number, such as 12.5.", field=field
        ) from None


def _comparison(line: view_models.WholeLine, one: str, other: str) -> Comparison | None:
    """What makes the difference between two tickets; None when none are named."""
    if not one and not other:
        return None
    first, second = line.find(one), line.find(other)
    if first is None or second is None:
        raise InvalidRequest("One of the two tickets does not wait any more.", field="a")
    if first is second:
        raise InvalidRequest("Both are the same ticket: choose two.", field="b")
    return compare(first.ranked, second.ranked)


_TICKET = "([0-9A-Za-z-]{1,64})"

QUEUE_HANDLERS = [
    ("queue", QueuePage),
    ("queue/granting", GrantingForm),
    ("queue/devices", DrainForm),
    (f"queue/{_TICKET}", TicketPage),
    (f"queue/{_TICKET}/(move|boost|cancel)", TicketPage),
    (f"tickets/{_TICKET}/cancel", GiveUp),
]


class QueueAPI(APIHandler):
    """The line: all of it for admins; for members their own tickets, and how many wait in all."""

    @web.authenticated
    async def get(self) -> None:
        self.answer(await (self._everything() if self.admin else self._own()))

    async def _everything(self) -> dict[str, Any]:
        line = await self.read(view_models.whole_line, self.broker)
        drained = {uuid: some for uuid, some in line.closed.items() if uuid != GRANTING}
        return {
            "as_of": instant(line.now),
            "paused": closure_json(line.paused) if line.paused else None,
            "drained": {uuid: closure_json(some) for uuid, some in drained.items()},
            "waiting": len(line.tickets),
            "tickets": [in_line_json(some) for some in line.tickets],
            "trail": [change_json(change) for change in line.trail],
        }

    async def _own(self) -> dict[str, Any]:
        mine = await self.read(view_models.own_tickets, self.broker, self.user)
        paused = (await self.read(self.broker.closures)).get(GRANTING)
        return {
            "as_of": instant(mine.now),
            "paused": {"reason": paused.reason} if paused else None,
            "waiting": mine.of,
            "tickets": [ticket_json(*entry) for entry in mine.waiting],
            "ended": [ended_json(ticket) for ticket in mine.ended],
        }


@contextmanager
def refusals() -> Iterator[None]:
    """What is sent is checked here: a mistake is the answer. Raises HTTPError."""
    try:
        yield
    except GPUSpawnerError as error:
        raise web.HTTPError(error.status_code) from error


class TicketAPI(ChangingAPI):
    """Change one ticket: a member may cancel their own, an admin move, boost and cancel any."""

    @web.authenticated
    async def post(self, ticket_id: str, action: str) -> None:
        ticket = await self.read(self.broker.ticket, ticket_id)
        mine = ticket.server.user == self.user
        if not self.admin and not mine:  # whose it is, is nobody else's business
            raise web.HTTPError(404) from UnknownTicket(ticket=ticket_id)
        if action == "cancel":
            reason = self.sent("reason")["reason"]
            if mine:
                await self.read(give_up, self.broker, ticket_id, self.user)
            else:
                await self.change(self.broker.cancel, ticket_id, reason=reason)
        else:
            self.need_admin()
            field = "position" if action == "move" else "points"
            sent = self.sent(field, "reason")
            if field not in sent:
                raise _refused(f"The field {field!r} is missing.", field)
            work = self.broker.move if action == "move" else self.broker.boost
            await self.change(work, ticket_id, sent[field], reason=sent["reason"])
        await self._tell(ticket_id)

    async def _tell(self, ticket_id: str) -> None:
        """Answer with the ticket as it is now."""
        ticket = await self.read(self.broker.ticket, ticket_id)
        if ticket.outcome:
            self.answer(ended_json(ticket))
            return
        standings = await self.read(self.broker.standings)
        self.answer(ticket_json(ticket, standings.get(ticket_id)))


class GrantingAPI(ChangingAPI):
    """Pause granting, and go on with it: ``{"paused": true, "reason": "new fans"}``."""

    @web.authenticated
    async def post(self) -> None:
        self.need_admin()
        sent = self.sent("paused", "reason")
        paused = sent.get("paused")
        if not isinstance(paused, bool):
            raise _refused("The field 'paused' is true or false.", "paused")
        work = self.broker.devices.pause if paused else self.broker.devices.resume
        changed = await self.change(work, reason=sent["reason"])
        closure = (await self.read(self.broker.closures)).get(GRANTING)
        self.answer({"changed": changed, "paused": closure_json(closure) if closure else None})


class DrainAPI(ChangingAPI):
    """Drain a device, named by UUID or index, and give it out again."""

    @web.authenticated
    async def post(self, device: str, action: str) -> None:
        self.need_admin()
        reason = self.sent("reason")["reason"]
        work = self.broker.devices.drain if action == "drain" else self.broker.devices.undrain
        try:
            changed = await self.change(work, device, reason=reason)
        except web.HTTPError as error:
            cause = error.__cause__
            if isinstance(cause, InvalidRequest) and cause.fields.get("field") == "device":
                error.status_code = 404  # it is in the path
            raise
        closed = await self.read(self.broker.closures)
        uuid = device if device in closed else (await self.read(self._uuid, device))
        closure = closed.get(uuid)
        self.answer(
            {
                "uuid": uuid,
                "changed": changed,
                "drained": closure_json(closure) if closure else None,
                "whole_machine": self.broker.machines.machine_of(uuid),
            }
        )

    def _uuid(self, device: str) -> str:
        return self.broker.devices.find_device(device).uuid


# Values to JSON.


def ticket_json(ticket: Ticket, standing: Standing | None) -> dict[str, Any]:
    """A ticket that waits, as its member may see it."""
    return {
        "id": ticket.id,
        "user": ticket.server.user,
        "server": ticket.server.name,
        "group": ticket.group,
        "gpus": ticket.request.devices,
        "gpu_model": ticket.request.model,
        "gpu_memory_bytes": ticket.request.memory_bytes,
        "environment": ticket.request.environment,
        "session_seconds": ticket.seconds,
        "since": instant(ticket.created_at),
        "place": standing.place if standing else None,
        "of": standing.of if standing else None,
        "waits_for": standing.why if standing else None,
        "estimate": _estimate(standing.estimate) if standing and standing.estimate else None,
        "planned": instant(standing.planned) if standing else None,
    }


def in_line_json(some: view_models.InLine) -> dict[str, Any]:
    """A ticket that waits, with the arithmetic of its score."""
    ticket = some.ticket
    return ticket_json(ticket, some.standing) | {
        "priority": Priority(ticket.priority).name.lower(),
        "boost": ticket.boost,
        "position": ticket.position,
        "last": ticket.last,
        "score": some.ranked.score,
        "parts": [
            {"name": part.name, "points": part.points, "why": part.why}
            for part in some.ranked.parts
        ],
    }


def ended_json(ticket: Ticket) -> dict[str, Any]:
    """A ticket that waits no more, and why."""
    return {
        "id": ticket.id,
        "user": ticket.server.user,
        "server": ticket.server.name,
        "since": instant(ticket.created_at),
        "ended_at": instant(ticket.ended_at),
        "outcome": ticket.outcome,
        "end_reason": ticket.end_reason,
        "lease": ticket.lease_id,
    }


def closure_json(some: Closure) -> dict[str, Any]:
    """A pause or a drain."""
    return {"since": instant(some.at), "actor": some.actor, "reason": some.reason}


def change_json(change: AuditEntry) -> dict[str, Any]:
    """A line of the audit trail."""
    return {
        "at": instant(change.at),
        "actor": change.actor,
        "action": change.action,
        "subject": change.subject,
        "detail": change.detail,
    }


def _estimate(estimate: Estimate) -> dict[str, str | None]:
    moments = {"low": estimate.low, "likely": estimate.likely, "high": estimate.high}
    return {name: instant(datetime.fromtimestamp(at, timezone.utc)) for name, at in moments.items()}


QUEUE_API_HANDLERS = [
    ("api/queue", QueueAPI),
    ("api/queue/([0-9A-Za-z-]{1,64})/(cancel|boost|move)", TicketAPI),
    ("api/granting", GrantingAPI),
    ("api/devices/([^/]{1,200})/(drain|undrain)", DrainAPI),
]
