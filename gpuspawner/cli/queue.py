"""``gpuspawner queue``: who waits, why in this order, and what an admin changes about it."""

from __future__ import annotations

import argparse
from datetime import datetime, timezone
from typing import Any

from ..broker import Broker, Standing
from ..broker.admin import LAST_POSITION
from ..broker.compare import Comparison, Difference, compare
from ..errors import InvalidRequest, TicketEnded, UnknownTicket
from ..model import Ticket
from ..scheduler import Estimate, Part, Priority, Ranked
from ..store.closures import GRANTING, Closure
from .config import Settings
from .credits import default_actor
from .known import line_broker
from .output import count, local, show, table, utc

InLine = tuple[Ticket, Ranked, Standing]


def queue(arguments: argparse.Namespace, settings: Settings) -> int:
    """List the line, or say why one ticket goes before another."""
    broker = line_broker(settings)
    line = broker.order()
    if arguments.why:
        one, other = (_in_line(broker, line, name) for name in arguments.why)
        if one is other:
            raise InvalidRequest("Both are the same ticket: name two.", field="why")
        tickets = {ranked.id: ticket for ticket, ranked, _ in (one, other)}
        found = compare(one[1], other[1])
        show(arguments.json, _plain_comparison(found), _compared(found, tickets))
        return 0
    paused = broker.closures().get(GRANTING)
    value = {
        "as_of": utc(broker.clock()),
        "paused": plain_closure(paused) if paused else None,
        "tickets": [plain(*entry) for entry in line],
    }
    show(arguments.json, value, _text(line, paused, broker.clock()))
    return 0


def move(arguments: argparse.Namespace, settings: Settings) -> int:
    """Put a ticket at a place of the admin's own, or give it back to the order."""
    broker = line_broker(settings)
    ticket = _find(broker, arguments.ticket)
    position: int | None = arguments.place
    moved = broker.move(ticket.id, position, actor=actor(), reason=arguments.reason)
    where = f"is moved to position {position}" if position else "is back in the order"
    return _changed(arguments, broker, moved, where)


def boost(arguments: argparse.Namespace, settings: Settings) -> int:
    """Set the points that an admin adds to a ticket's score."""
    broker = line_broker(settings)
    ticket = _find(broker, arguments.ticket)
    boosted = broker.boost(ticket.id, arguments.points, actor=actor(), reason=arguments.reason)
    what = f"has a boost of {boosted.boost:+g} points" if boosted.boost else "has no boost any more"
    return _changed(arguments, broker, boosted, what)


def cancel(arguments: argparse.Namespace, settings: Settings) -> int:
    """Take a ticket out of the line; its member is told why."""
    broker = line_broker(settings)
    ticket = _find(broker, arguments.ticket)
    ended = broker.cancel(ticket.id, actor=actor(), reason=arguments.reason)
    value = {"id": ended.id, "outcome": ended.outcome, "end_reason": ended.end_reason}
    show(arguments.json, value, f"Ticket {ended.id} of {ended.server} is cancelled.")
    return 0


def actor() -> str:
    """Who types this, as the audit trail names them: no member of the hub."""
    return f"cli:{default_actor()}"


def place_of(text: str) -> int | None:
    """A position on the command line, None for ``back``; for argparse."""
    if text == "back":
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= LAST_POSITION):
        raise argparse.ArgumentTypeError(
            f"{text[:60]!r} is no position: write 1 for next, 2 for the one after it, or back"
        )
    return int(text)


def points_of(text: str) -> float:
    """Points on the command line; for argparse."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text[:60]!r} is no number of points: write it like 5 or -2.5"
        ) from None


def plain(ticket: Ticket, ranked: Ranked, standing: Standing) -> dict[str, Any]:
    """A ticket that waits, for scripts."""
    request = ticket.request
    return {
        "id": ticket.id,
        "place": ranked.place,
        "member": ticket.server.user,
        "server": ticket.server.name,
        "group": ticket.group,
        "devices": request.devices,
        "model": request.model,
        "memory_bytes": request.memory_bytes,
        "environment": request.environment,
        "seconds": ticket.seconds,
        "waits_for": standing.why,
        "since": utc(ticket.created_at),
        "planned": utc(standing.planned),
        "estimate": _plain_estimate(standing.estimate) if standing.estimate else None,
        "priority": Priority(ticket.priority).name.lower(),
        "boost": ticket.boost,
        "position": ticket.position,
        "last": ticket.last,
        "score": ranked.score,
        "parts": [_plain_part(part) for part in ranked.parts],
    }


def plain_closure(closure: Closure) -> dict[str, Any]:
    """A pause or a drain, for scripts."""
    return {"since": utc(closure.at), "actor": closure.actor, "reason": closure.reason}


# Finding tickets.


def _find(broker: Broker, name: str) -> Ticket:
    return _in_line(broker, broker.order(), name)[0]


def _in_line(broker: Broker, line: list[InLine], name: str) -> InLine:
    """The ticket with this id, or the one whose id or server begins or is called so."""
    exact = [entry for entry in line if name in (entry[0].id, str(entry[0].server))]
    found = exact or [entry for entry in line if name and entry[0].id.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        some = ", ".join(entry[0].id for entry in found[:5])
        raise UnknownTicket(f"Several tickets begin with {name!r}: {some}.", ticket=name)
    try:
        ended = broker.ticket(name)
    except UnknownTicket:
        sentence = f"No ticket {name!r} waits in line. List those that do with: gpuspawner queue"
        raise UnknownTicket(sentence, ticket=name) from None
    why = ended.end_reason.rstrip(".")
    raise TicketEnded(
        f"Ticket {ended.id} of {ended.server} does not wait any more "
        f"({ended.outcome or 'waiting'}: {why}). Nothing was changed."
    )


# What it looks like.


def _text(line: list[InLine], paused: Closure | None, now: datetime) -> str:
    lines = []
    if line:
        headers = ("PLACE", "TICKET", "SERVER", "GROUP", "WAITS FOR", "SINCE", "START", "SCORE")
        rows = [_row(*entry, now) for entry in line]
        lines += [table(headers, rows, right=("PLACE", "SCORE")), ""]
    verb = "waits" if len(line) == 1 else "wait"
    lines.append(f"{count(len(line), 'ticket')} {verb}" if line else "Nobody waits in line.")
    if paused:
        why = f": {paused.reason}" if paused.reason else ""
        lines.append(f"Granting is paused by {paused.actor} since {local(paused.at)}{why}")
    return "\n".join(lines)


def _row(ticket: Ticket, ranked: Ranked, standing: Standing, now: datetime) -> list[str]:
    return [
        str(ranked.place),
        ticket.id,
        str(ticket.server),
        ticket.group or "-",
        standing.why,
        local(ticket.created_at),
        standing.start(now) or "-",
        _points(ranked.score),
    ]


def _compared(found: Comparison, tickets: dict[str, Ticket]) -> str:
    first, second = found.first, found.second
    ahead, behind = str(tickets[first.id].server), str(tickets[second.id].server)
    lines = [
        f"{ahead} (ticket {first.id}, place {first.place}) goes before "
        f"{behind} (ticket {second.id}, place {second.place}).",
        "",
    ]
    headers = ("PART", "FIRST", "SECOND", "DIFFERENCE", "WHY FIRST", "WHY SECOND")
    rows = [_difference(difference) for difference in found.differences]
    rows.append(
        ("score", _points(first.score), _points(second.score), _ahead(found.points), "", "")
    )
    lines.append(table(headers, rows, right=headers[1:4]))
    if _points(found.points) == "0.00":
        lines += ["", "Their scores are as good as equal: who asked first goes first."]
    return "\n".join(lines)


def _difference(difference: Difference) -> tuple[str, ...]:
    first, second = difference.first, difference.second
    return (
        difference.name,
        _points(first.points) if first else "-",
        _points(second.points) if second else "-",
        _ahead(difference.points),
        first.why if first else "-",
        second.why if second else "-",
    )


def _points(points: float) -> str:
    """Two decimals, and no minus before a zero."""
    return f"{round(points, 2) + 0.0:.2f}"


def _ahead(points: float) -> str:
    return f"{round(points, 2) + 0.0:+.2f}"


def _plain_estimate(estimate: Estimate) -> dict[str, str | None]:
    moments = {"low": estimate.low, "likely": estimate.likely, "high": estimate.high}
    return {name: utc(datetime.fromtimestamp(at, timezone.utc)) for name, at in moments.items()}


def _plain_part(part: Part) -> dict[str, Any]:
    return {"name": part.name, "points": part.points, "why": part.why}


def _plain_comparison(found: Comparison) -> dict[str, Any]:
    return {
        "first": found.first.id,
        "second": found.second.id,
        "points": found.points,
        "differences": [
            {
                "name": difference.name,
                "points": difference.points,
                "first": _plain_part(difference.first) if difference.first else None,
                "second": _plain_part(difference.second) if difference.second else None,
            }
            for difference in found.differences
        ],
    }


def _changed(arguments: argparse.Namespace, broker: Broker, ticket: Ticket, what: str) -> int:
    """Say what was changed and where the ticket stands now."""
    standing = broker.standings().get(ticket.id)
    place = standing.place if standing else 0  # it may have got its turn just now
    value = {"id": ticket.id, "place": place, "boost": ticket.boost, "position": ticket.position}
    where = f"it is number {place} in line now" if place else "it does not wait any more"
    text = f"Ticket {ticket.id} of {ticket.server} {what}: {where}."
    show(arguments.json, value, text)
    return 0
