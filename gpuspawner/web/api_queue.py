"""The line as JSON, and what may be changed of it. Scripts send a token, pages an XSRF token."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

from tornado import web

from ..broker import Standing
from ..broker.admin import LONGEST_REASON
from ..errors import GPUSpawnerError, InvalidRequest, LedgerError, UnknownTicket
from ..model import Ticket
from ..scheduler import Estimate, Priority
from ..store.closures import GRANTING, Change, Closure
from . import figures
from .api import APIHandler, instant
from .queue import give_up

LONGEST = 64 * 1024
"""Bytes of a request that changes something."""


class QueueAPI(APIHandler):
    """The line: all of it for admins; for members their own tickets, and how many wait in all."""

    @web.authenticated
    async def get(self) -> None:
        self.answer(await (self._everything() if self.admin else self._own()))

    async def _everything(self) -> dict[str, Any]:
        line = await self.read(figures.whole_line, self.broker)
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
        mine = await self.read(figures.own_tickets, self.broker, self.user)
        paused = (await self.read(self.broker.closures)).get(GRANTING)
        return {
            "as_of": instant(mine.now),
            "paused": {"reason": paused.reason} if paused else None,
            "waiting": mine.of,
            "tickets": [ticket_json(*entry) for entry in mine.waiting],
            "ended": [ended_json(ticket) for ticket in mine.ended],
        }


class ChangingAPI(APIHandler):
    """What changes share: the object that was sent, and refusals as sentences."""

    def sent(self, *fields: str, longest: int = LONGEST) -> dict[str, Any]:
        """The JSON object that was sent, of so many bytes at the most; none of other fields.

        Raises HTTPError 400.
        """
        body = self.request.body
        try:
            found = json.loads(body or b"{}") if len(body) <= longest else None
        except (ValueError, RecursionError):
            found = None
        there_are = ", ".join(fields)
        if not isinstance(found, dict):
            raise _refused(f"Send one JSON object; its fields are {there_are}.")
        for name in found.keys() - set(fields):
            raise _refused(f"There is no field {name[:60]!r}; there are {there_are}.", name)
        if not isinstance(found.setdefault("reason", ""), str):
            raise _refused("The field 'reason' is text.", "reason")
        if len(found["reason"]) > LONGEST_REASON:
            raise _refused(f"The field 'reason' has {LONGEST_REASON} characters at most.", "reason")
        return found

    async def change(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Change something through the broker, as the one who asks."""

        def call() -> Any:
            return work(*args, actor=self.user, **kwargs)

        return await self.read(call)

    async def do(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The same, of what was checked before: it cannot be done as things are, if it cannot."""
        try:
            return await self.broker.run(work, *args, actor=self.actor, **kwargs)
        except (InvalidRequest, LedgerError) as error:
            raise web.HTTPError(409) from error
        except GPUSpawnerError as error:
            raise web.HTTPError(error.status_code) from error


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
        work = self.broker.pause if paused else self.broker.resume
        changed = await self.change(work, reason=sent["reason"])
        closure = (await self.read(self.broker.closures)).get(GRANTING)
        self.answer({"changed": changed, "paused": closure_json(closure) if closure else None})


class DrainAPI(ChangingAPI):
    """Drain a device, named by UUID or index, and give it out again."""

    @web.authenticated
    async def post(self, device: str, action: str) -> None:
        self.need_admin()
        reason = self.sent("reason")["reason"]
        work = self.broker.drain if action == "drain" else self.broker.undrain
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
                "whole_machine": self.broker.machine_of(uuid),
            }
        )

    def _uuid(self, device: str) -> str:
        return self.broker.find_device(device).uuid


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


def in_line_json(some: figures.InLine) -> dict[str, Any]:
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


def change_json(change: Change) -> dict[str, Any]:
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


def _refused(sentence: str, field: str = "") -> web.HTTPError:
    error = web.HTTPError(400)
    error.__cause__ = InvalidRequest(sentence, field=field)
    return error


HANDLERS = [
    ("api/queue", QueueAPI),
    ("api/queue/([0-9A-Za-z-]{1,64})/(cancel|boost|move)", TicketAPI),
    ("api/granting", GrantingAPI),
    ("api/devices/([^/]{1,200})/(drain|undrain)", DrainAPI),
]
