"""Rows of tickets: requests that wait, and what became of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from ..errors import ServerWaits, UnknownTicket
from ..model import Request, ServerRef, Ticket
from .schema import OPEN_TICKET, tickets

_FIELDS = tuple(n for n in Ticket.__dataclass_fields__ if n not in ("server", "request", "options"))

_ALL = sa.select(tickets).order_by(tickets.c.created_at, tickets.c.id)
_ONE = sa.select(tickets).where(tickets.c.id == sa.bindparam("ticket"))
_ONE_LOCKED = _ONE.with_for_update()
_OPEN_OF_SERVER = sa.select(tickets).where(
    tickets.c.user == sa.bindparam("member"),
    tickets.c.server_name == sa.bindparam("server"),
    OPEN_TICKET,
)
_INSERT = sa.insert(tickets)
# One text and not ten thousand rows: it is read every second while somebody waits.
_VERSIONS = sa.select(
    sa.func.aggregate_strings(tickets.c.id + ":" + sa.cast(tickets.c.version, sa.Text), " ")
).where(OPEN_TICKET)


def insert(connection: sa.Connection, ticket: Ticket) -> None:
    """Write a new ticket. Raises ServerWaits when the server has one already."""
    row = {name: getattr(ticket, name) for name in _FIELDS}
    row |= {"user": ticket.server.user, "server_name": ticket.server.name, "state": "waiting"}
    row["request"] = json.dumps(asdict(ticket.request))
    row["options"] = json.dumps(dict(ticket.options))
    try:
        with connection.begin_nested():
            connection.execute(_INSERT, row)
    except IntegrityError as error:
        if "one_open_ticket_a_server" in str(error) or "tickets.user" in str(error):
            raise ServerWaits() from None
        raise


def get(connection: sa.Connection, ticket_id: str, *, lock: bool = False) -> Ticket:
    """One ticket, waiting or ended. Raises UnknownTicket."""
    row = connection.execute(_ONE_LOCKED if lock else _ONE, {"ticket": ticket_id}).mappings()
    if found := row.first():
        return _ticket(found)
    raise UnknownTicket(ticket=ticket_id)


def open_of(connection: sa.Connection, server: ServerRef) -> Ticket | None:
    """The ticket with which a server waits, if it does."""
    mine = {"member": server.user, "server": server.name}
    row = connection.execute(_OPEN_OF_SERVER, mine).mappings().first()
    return _ticket(row) if row else None


def waiting(connection: sa.Connection) -> list[Ticket]:
    """Every ticket that waits, oldest first."""
    return [_ticket(row) for row in connection.execute(_ALL.where(OPEN_TICKET)).mappings()]


def some(connection: sa.Connection, ids: Iterable[str]) -> list[Ticket]:
    """Those of the tickets that are there, oldest first."""
    wanted = list(ids)
    found: list[Ticket] = []
    for start in range(0, len(wanted), 500):  # SQLite takes so many parameters, and not many more
        part = _ALL.where(tickets.c.id.in_(wanted[start : start + 500]))
        found += [_ticket(row) for row in connection.execute(part).mappings()]
    return found


def versions(connection: sa.Connection) -> dict[str, str]:
    """The version of every ticket that waits, by id: another process may have changed one."""
    text: str | None = connection.execute(_VERSIONS).scalar_one()
    return dict(part.split(":", 1) for part in text.split(" ")) if text else {}


def of_user(connection: sa.Connection, user: str, limit: int = 20) -> list[Ticket]:
    """A member's newest tickets, newest first."""
    query = sa.select(tickets).where(tickets.c.user == user)
    rows = connection.execute(query.order_by(tickets.c.created_at.desc()).limit(limit))
    return [_ticket(row) for row in rows.mappings()]


def update(connection: sa.Connection, ticket_id: str, **values: Any) -> None:
    """Change fields of a ticket that waits; others see its new version."""
    values["version"] = tickets.c.version + 1
    where = (tickets.c.id == ticket_id) & OPEN_TICKET
    connection.execute(sa.update(tickets).where(where).values(values))


def end(
    connection: sa.Connection,
    ticket_id: str,
    at: datetime,
    outcome: str,
    reason: str,
    lease_id: str | None = None,
) -> None:
    """Take a ticket out of the line; what became of it stays written."""
    changes = {"state": "ended", "ended_at": at, "outcome": outcome, "end_reason": reason}
    update(connection, ticket_id, **changes, lease_id=lease_id)


def reopen(connection: sa.Connection, ticket_id: str) -> bool:
    """Put a ticket whose grant came to nothing back at its place. False when it was not granted,
    or its server has another ticket by now."""
    ticket = get(connection, ticket_id, lock=True)
    if ticket.outcome != "granted" or open_of(connection, ticket.server):
        return False
    back = {"state": "waiting", "ended_at": None, "outcome": "", "end_reason": "", "lease_id": None}
    where = tickets.c.id == ticket_id
    changed = sa.update(tickets).where(where).values(version=tickets.c.version + 1, **back)
    connection.execute(changed)
    return True


def _ticket(row: Any) -> Ticket:
    request = json.loads(row["request"])
    request["models"] = tuple(request["models"])
    return Ticket(
        server=ServerRef(row["user"], row["server_name"]),
        request=Request(**request),
        options=json.loads(row["options"]),
        **{name: row[name] for name in _FIELDS},
    )
