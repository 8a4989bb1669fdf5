"""Rows of tickets, and the leases that the queue learns from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from ..core.errors import ServerWaits, UnknownTicket
from ..db.schema import OPEN_LEASE, OPEN_PLACE, OPEN_TICKET, lease_places, leases, tickets
from ..leases import repository as leases_repository
from ..leases.models import Lease, Request, ServerRef
from .models import Ticket

_FIELDS = tuple(n for n in Ticket.__dataclass_fields__ if n not in ("server", "request", "options"))
_REQUEST_FIELDS = tuple(Request.__dataclass_fields__)
_TEXTS = ("user", "server_name", "request", "options")
_COLUMNS = (*_TEXTS, *_FIELDS)

_ALL = sa.select(*(tickets.c[n] for n in _COLUMNS)).order_by(tickets.c.created_at, tickets.c.id)
_ONE = _ALL.where(tickets.c.id == sa.bindparam("ticket"))
_ONE_LOCKED = _ONE.with_for_update()
_OPEN_OF_MEMBER = _ALL.where(tickets.c.user == sa.bindparam("member"), OPEN_TICKET)
_OPEN_OF_GROUP = sa.select(sa.func.count()).where(
    tickets.c.group == sa.bindparam("name"), OPEN_TICKET
)
# One text and not ten thousand rows: it is read every second while somebody waits.
_VERSIONS = sa.select(
    sa.func.aggregate_strings(tickets.c.id + ":" + sa.cast(tickets.c.version, sa.Text), " ")
).where(OPEN_TICKET)
_COUNT = sa.select(sa.func.count()).select_from(tickets).where(OPEN_TICKET)


def insert_ticket(connection: sa.Connection, ticket: Ticket) -> None:
    """Write a new ticket. Raises ServerWaits when the server has one already; the transaction
    is then to be given up."""
    row = {name: getattr(ticket, name) for name in _FIELDS}
    row |= {"user": ticket.server.user, "server_name": ticket.server.name, "state": "waiting"}
    row["request"] = json.dumps({n: getattr(ticket.request, n) for n in _REQUEST_FIELDS})
    row["options"] = json.dumps(dict(ticket.options))
    try:
        connection.execute(sa.insert(tickets), row)
    except IntegrityError as error:
        if "one_open_ticket_a_server" in str(error) or "tickets.user" in str(error):
            raise ServerWaits() from None
        raise


def get_ticket(connection: sa.Connection, ticket_id: str, *, lock: bool = False) -> Ticket:
    """One ticket, waiting or ended. Raises UnknownTicket."""
    statement = _ONE_LOCKED if lock else _ONE
    row = connection.execute(statement, {"ticket": ticket_id}).one_or_none()
    if row is None:
        raise UnknownTicket(ticket=ticket_id)
    return _ticket(row)


def open_ticket_of(connection: sa.Connection, server: ServerRef) -> Ticket | None:
    """The ticket with which a server waits, if it does."""
    mine = open_of_member(connection, server.user)
    return next((ticket for ticket in mine if ticket.server == server), None)


def open_of_member(connection: sa.Connection, user: str) -> list[Ticket]:
    """The tickets with which a member's servers wait, oldest first."""
    return [_ticket(row) for row in connection.execute(_OPEN_OF_MEMBER, {"member": user})]


def count_of_group(connection: sa.Connection, group: str) -> int:
    """How many tickets wait that count on a group."""
    return int(connection.execute(_OPEN_OF_GROUP, {"name": group}).scalar_one())


def count_tickets(connection: sa.Connection) -> int:
    """How many tickets wait."""
    return int(connection.execute(_COUNT).scalar_one())


def waiting_tickets(connection: sa.Connection) -> list[Ticket]:
    """Every ticket that waits, oldest first."""
    return [_ticket(row) for row in connection.execute(_ALL.where(OPEN_TICKET))]


def some_tickets(connection: sa.Connection, ids: Iterable[str]) -> list[Ticket]:
    """Those of the tickets that are there, oldest first."""
    wanted = list(ids)
    found: list[Ticket] = []
    for start in range(0, len(wanted), 500):  # SQLite takes so many parameters, and not many more
        part = _ALL.where(tickets.c.id.in_(wanted[start : start + 500]))
        found += [_ticket(row) for row in connection.execute(part)]
    return found


def ticket_versions(connection: sa.Connection) -> dict[str, str]:
    """The version of every ticket that waits, by id: another process may have changed one."""
    text = connection.execute(_VERSIONS).scalar_one()
    return dict(part.split(":", 1) for part in text.split(" ")) if text else {}


def tickets_of_user(connection: sa.Connection, user: str, limit: int = 20) -> list[Ticket]:
    """A member's newest tickets, newest first."""
    newest = _ALL.order_by(None).order_by(tickets.c.created_at.desc())
    rows = connection.execute(newest.where(tickets.c.user == user).limit(limit))
    return [_ticket(row) for row in rows]


def update_ticket(connection: sa.Connection, ticket_id: str, **values: Any) -> None:
    """Change fields of a ticket that waits; others see its new version."""
    values["version"] = tickets.c.version + 1
    if "options" in values:
        values["options"] = json.dumps(dict(values["options"]))
    where = (tickets.c.id == ticket_id) & OPEN_TICKET
    connection.execute(sa.update(tickets).where(where).values(values))


def end_ticket(
    connection: sa.Connection,
    ticket_id: str,
    at: datetime,
    outcome: str,
    reason: str,
    lease_id: str | None = None,
) -> None:
    """Take a ticket out of the line; what became of it stays written."""
    changes = {"state": "ended", "ended_at": at, "outcome": outcome, "end_reason": reason}
    update_ticket(connection, ticket_id, **changes, lease_id=lease_id)


def reopen_ticket(connection: sa.Connection, ticket_id: str) -> bool:
    """Put a ticket whose grant came to nothing back at its place. False when it was not granted,
    or its server has another ticket by now."""
    ticket = get_ticket(connection, ticket_id, lock=True)
    if ticket.outcome != "granted" or open_ticket_of(connection, ticket.server):
        return False
    back = {"state": "waiting", "ended_at": None, "outcome": "", "end_reason": "", "lease_id": None}
    where = tickets.c.id == ticket_id
    changed = sa.update(tickets).where(where).values(version=tickets.c.version + 1, **back)
    connection.execute(changed)
    return True


def _ticket(row: Sequence[Any]) -> Ticket:
    user, server_name, request_text, options_text, *values = row
    request = json.loads(request_text)
    request["models"] = tuple(request["models"])
    return Ticket(
        server=ServerRef(user, server_name),
        request=Request(**request),
        options=json.loads(options_text),
        **dict(zip(_FIELDS, values, strict=True)),
    )


MOST = 5000
"""Leases of the past that are read at once: the newest."""

# As one text and not as rows, like the places: it is read every second while somebody waits.
_MARK = (
    leases.c.id
    + ":"
    + leases.c.state
    + ":"
    + sa.cast(sa.func.coalesce(leases.c.seconds + leases.c.extended, -1), sa.Text)
)
_MARKS = sa.select(sa.func.aggregate_strings(_MARK, " ")).where(
    OPEN_LEASE,
    sa.exists().where(lease_places.c.lease_id == leases.c.id, OPEN_PLACE),
)
_OUTCOMES = (
    sa.select(leases.c.outcome)
    .where(leases.c.user == sa.bindparam("member"), leases.c.claim_seconds.isnot(None), ~OPEN_LEASE)
    .order_by(leases.c.granted_at.desc())
    .limit(10)
)


def lease_marks(connection: sa.Connection) -> dict[str, str]:
    """What can change of every open lease with devices (its state and end), by id."""
    text = connection.execute(_MARKS).scalar_one()
    return dict(part.split(":", 1) for part in text.split(" ")) if text else {}


def some_leases(connection: sa.Connection, ids: Iterable[str]) -> list[Lease]:
    """Those of the leases that are there, oldest first."""
    wanted = list(ids)
    found: list[Lease] = []
    for start in range(0, len(wanted), 500):  # SQLite takes so many parameters, and not many more
        found += leases_repository.where(connection, leases.c.id.in_(wanted[start : start + 500]))
    return found


def ended_since(connection: sa.Connection, since: datetime) -> list[Lease]:
    """The newest leases with devices that ran and ended since then, the oldest first."""
    had_devices = sa.exists().where(lease_places.c.lease_id == leases.c.id)
    newest = (
        sa.select(leases.c.id)
        .where(leases.c.ended_at >= since, leases.c.started_at.isnot(None), had_devices)
        .order_by(leases.c.ended_at.desc())
        .limit(MOST)
    )
    found = leases_repository.where(connection, leases.c.id.in_(newest))
    return sorted(found, key=lambda lease: lease.ended_at or since)


class Start(NamedTuple):
    """Devices of one kind that were given out, and since when they had been asked for."""

    asked_at: datetime
    granted_at: datetime
    group: str
    devices: int
    model: str
    memory_bytes: int


def starts_since(connection: sa.Connection, since: datetime) -> list[Start]:
    """The newest leases with devices that were granted since then, the newest first."""
    query = (
        sa.select(
            sa.func.coalesce(tickets.c.created_at, leases.c.granted_at),
            leases.c.granted_at,
            leases.c.group,
            sa.func.count(),
            sa.func.min(lease_places.c.model),
            sa.func.min(lease_places.c.memory_bytes),
        )
        .select_from(
            leases.join(lease_places, lease_places.c.lease_id == leases.c.id).outerjoin(
                tickets, tickets.c.id == leases.c.ticket_id
            )
        )
        .where(leases.c.granted_at >= since)
        .group_by(leases.c.id, tickets.c.created_at)
        .order_by(leases.c.granted_at.desc())
        .limit(MOST)
    )
    return [Start(*row) for row in connection.execute(query)]


def no_shows_in_a_row(connection: sa.Connection, user: str) -> int:
    """How many of a member's newest leases from the queue ended because nobody connected."""
    count = 0
    for outcome in connection.execute(_OUTCOMES, {"member": user}).scalars():
        if outcome not in ("no_show", "lost"):
            break
        count += outcome == "no_show"
    return count


def asked_for(connection: sa.Connection, since: datetime) -> list[tuple[datetime, Lease]]:
    """Leases with devices that ran and ended, with when they were asked for, in that order."""
    asked = sa.func.coalesce(tickets.c.created_at, leases.c.granted_at)
    had_devices = sa.exists().where(lease_places.c.lease_id == leases.c.id)
    query = (
        sa.select(leases.c.id, tickets.c.created_at)
        .select_from(leases.outerjoin(tickets, tickets.c.id == leases.c.ticket_id))
        .where(leases.c.ended_at >= since, leases.c.started_at.isnot(None), had_devices)
        .order_by(asked)
    )
    moments = {row.id: row.created_at for row in connection.execute(query)}
    found = {lease.id: lease for lease in some_leases(connection, moments)}
    return [(moments[name] or found[name].granted_at, found[name]) for name in moments]
