"""Rows of tickets, and of the leases that the queue learns from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from fractions import Fraction
from itertools import chain, islice
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from ..core.errors import ServerWaits, UnknownTicket
from ..core.times import at_second
from ..core.units import DeviceCount
from ..db.schema import (
    COUNTED_PLACE,
    OPEN_LEASE,
    OPEN_PLACE,
    OPEN_TICKET,
    lease_places,
    leases,
    tickets,
)
from ..leases import repository as leases_repository
from ..leases.models import Lease, Request, ServerRef, Sharing
from .models import Estimate, StoredEstimate, Ticket

_FIELDS = tuple(n for n in Ticket.__dataclass_fields__ if n not in ("server", "request", "options"))
_REQUEST_FIELDS = tuple(Request.__dataclass_fields__)
_TEXTS = ("user", "server_name", "request", "options")
_COLUMNS = (*_TEXTS, *_FIELDS)

_ALL = sa.select(*(tickets.c[n] for n in _COLUMNS)).order_by(tickets.c.created_at, tickets.c.id)
_ONE = _ALL.where(tickets.c.id == sa.bindparam("ticket"))
_ONE_LOCKED = _ONE.with_for_update()
# One text instead of ten thousand rows: it is read every second while somebody waits.
_VERSIONS = sa.select(
    sa.func.aggregate_strings(tickets.c.id + ":" + sa.cast(tickets.c.version, sa.Text), " ")
).where(OPEN_TICKET)
_COUNT = sa.select(sa.func.count()).select_from(tickets).where(OPEN_TICKET)
_ESTIMATES = sa.select(
    tickets.c.id,
    tickets.c.estimated_at,
    tickets.c.estimate_low,
    tickets.c.estimate_likely,
    tickets.c.estimate_high,
).where(OPEN_TICKET, tickets.c.estimated_at >= sa.bindparam("since"))
_STORE_ESTIMATE = (
    sa.update(tickets)
    .where(
        tickets.c.id == sa.bindparam("ticket"),
        OPEN_TICKET,
        tickets.c.estimated_at.is_(None) | (tickets.c.estimated_at <= sa.bindparam("based_on")),
    )
    .values(
        estimated_at=sa.bindparam("at"),
        estimate_low=sa.bindparam("low"),
        estimate_likely=sa.bindparam("likely"),
        estimate_high=sa.bindparam("high"),
    )
)
_HAD_DEVICES = sa.exists().where(lease_places.c.lease_id == leases.c.id)


def insert_ticket(
    connection: sa.Connection, ticket: Ticket, first: StoredEstimate | None = None
) -> None:
    """Insert a ticket with its first estimate. Raises ServerWaits if the server has one already.

    The caller must then roll the transaction back.
    """
    row = {name: getattr(ticket, name) for name in _FIELDS}
    row |= {"user": ticket.server.user, "server_name": ticket.server.name, "state": "waiting"}
    row["request"] = _request_text(ticket.request)
    row["options"] = json.dumps(dict(ticket.options))
    if first is not None:
        low, likely, high = _moments(first.estimate)
        row |= {"estimated_at": at_second(first.at)}
        row |= {"estimate_low": low, "estimate_likely": likely, "estimate_high": high}
    try:
        connection.execute(sa.insert(tickets), row)
    except IntegrityError as error:
        if "one_open_ticket_a_server" in str(error) or "tickets.user" in str(error):
            raise ServerWaits() from None
        raise


def get_ticket(connection: sa.Connection, ticket_id: str, *, lock: bool = False) -> Ticket:
    """Return a ticket, waiting or ended. Raises UnknownTicket."""
    statement = _ONE_LOCKED if lock else _ONE
    row = connection.execute(statement, {"ticket": ticket_id}).one_or_none()
    if row is None:
        raise UnknownTicket(ticket=ticket_id)
    return _ticket(row)


def open_of_member(connection: sa.Connection, user: str) -> list[Ticket]:
    """Return the waiting tickets of a member's servers, oldest first."""
    return _where(connection, OPEN_TICKET & (tickets.c.user == user))


def count_of_group(connection: sa.Connection, group: str) -> int:
    """Return how many waiting tickets count against a group."""
    return int(connection.execute(_COUNT.where(tickets.c.group == group)).scalar_one())


def count_tickets(connection: sa.Connection) -> int:
    """Return how many tickets wait."""
    return int(connection.execute(_COUNT).scalar_one())


def waiting_tickets(connection: sa.Connection) -> list[Ticket]:
    """Return all waiting tickets, oldest first."""
    return _where(connection, OPEN_TICKET)


def some_tickets(connection: sa.Connection, ids: Iterable[str]) -> list[Ticket]:
    """Return those of the tickets that exist, oldest first."""
    parts = (_where(connection, tickets.c.id.in_(some)) for some in _parts(ids))
    return list(chain.from_iterable(parts))


def ticket_versions(connection: sa.Connection) -> dict[str, str]:
    """Return the version of every waiting ticket by id; other processes may change them."""
    text = connection.execute(_VERSIONS).scalar_one()
    return dict(part.split(":", 1) for part in text.split(" ")) if text else {}


def tickets_of_user(connection: sa.Connection, user: str, limit: int = 20) -> list[Ticket]:
    """Return a member's newest tickets, newest first."""
    newest = _ALL.order_by(None).order_by(tickets.c.created_at.desc())
    rows = connection.execute(newest.where(tickets.c.user == user).limit(limit))
    return [_ticket(row) for row in rows]


def newest_of_server(connection: sa.Connection, server: ServerRef) -> Ticket | None:
    """Return the newest ticket of a server or a run, open or ended; None if it never had one."""
    newest = _ALL.order_by(None).order_by(tickets.c.created_at.desc()).limit(1)
    its = (tickets.c.user == server.user) & (tickets.c.server_name == server.name)
    row = connection.execute(newest.where(its)).one_or_none()
    return None if row is None else _ticket(row)


def update_ticket(connection: sa.Connection, ticket_id: str, **values: Any) -> None:
    """Change fields of a waiting ticket and increase its version."""
    values["version"] = tickets.c.version + 1
    if "request" in values:
        values["request"] = _request_text(values["request"])
    if "options" in values:
        values["options"] = json.dumps(dict(values["options"]))
    where = (tickets.c.id == ticket_id) & OPEN_TICKET
    connection.execute(sa.update(tickets).where(where).values(values))


def store_estimates(
    connection: sa.Connection,
    estimates: Mapping[str, Estimate | None],
    at: datetime,
    based_on: datetime,
) -> None:
    """Store the estimates of waiting tickets; their versions stay as they are.

    A ticket whose stored estimate is newer than what these are ``based_on`` keeps it.
    """
    common = {"at": at, "based_on": based_on}
    rows = []
    for ticket_id, estimate in estimates.items():
        low, likely, high = _moments(estimate)
        rows.append({"ticket": ticket_id, "low": low, "likely": likely, "high": high, **common})
    if rows:
        connection.execute(_STORE_ESTIMATE, rows)


def estimates_since(
    connection: sa.Connection, since: datetime
) -> tuple[dict[str, StoredEstimate], datetime]:
    """Return the estimates of waiting tickets stored since then, and when the last one was."""
    found, newest = {}, since
    for ticket_id, at, low, likely, high in connection.execute(_ESTIMATES, {"since": since}):
        estimate = None
        if low is not None:
            estimate = Estimate(low.timestamp(), likely.timestamp(), high.timestamp())
        found[ticket_id] = StoredEstimate(at.timestamp(), estimate)
        newest = max(newest, at)
    return found, newest


def end_ticket(
    connection: sa.Connection,
    ticket_id: str,
    at: datetime,
    outcome: str,
    reason: str,
    lease_id: str | None = None,
) -> None:
    """Take a ticket out of the queue; its outcome stays recorded."""
    changes = {"state": "ended", "ended_at": at, "outcome": outcome, "end_reason": reason}
    update_ticket(connection, ticket_id, **changes, lease_id=lease_id)


def _where(connection: sa.Connection, condition: sa.ColumnElement[bool]) -> list[Ticket]:
    return [_ticket(row) for row in connection.execute(_ALL.where(condition))]


def _parts(ids: Iterable[str]) -> Iterator[list[str]]:
    """Split ids into lists of at most 500: SQLite limits the number of parameters."""
    rest = iter(ids)
    while part := list(islice(rest, 500)):
        yield part


def _moments(estimate: Estimate | None) -> tuple[datetime | None, datetime | None, datetime | None]:
    if estimate is None:
        return None, None, None
    return at_second(estimate.low), at_second(estimate.likely), at_second(estimate.high)


def _request_text(request: Request) -> str:
    return json.dumps({name: getattr(request, name) for name in _REQUEST_FIELDS})


def _ticket(row: Sequence[Any]) -> Ticket:
    user, server_name, request_text, options_text, *values = row
    request = json.loads(request_text)
    request["models"] = tuple(request["models"])
    request["groups"] = tuple(request.get("groups", ()))
    request["sharing"] = Sharing(request.get("sharing", Sharing.WHOLE))
    return Ticket(
        server=ServerRef(user, server_name),
        request=Request(**request),
        options=json.loads(options_text),
        **dict(zip(_FIELDS, values, strict=True)),
    )


MOST = 5000
"""How many past leases are read at most: the newest."""

# One text instead of rows, like the slots: it is read every second while somebody waits.
_MARK = (
    leases.c.id
    + ":"
    + leases.c.state
    + ":"
    + sa.cast(sa.func.coalesce(leases.c.seconds + leases.c.extended, -1), sa.Text)
    + sa.case((leases.c.yields_at.is_(None), ""), else_=":yields")
)
_MARKS = sa.select(sa.func.aggregate_strings(_MARK, " ")).where(
    OPEN_LEASE,
    sa.exists().where(lease_places.c.lease_id == leases.c.id, OPEN_PLACE),
)


def lease_marks(connection: sa.Connection) -> dict[str, str]:
    """Return what can change in every open lease with devices (state and ends), by id."""
    text = connection.execute(_MARKS).scalar_one()
    return dict(part.split(":", 1) for part in text.split(" ")) if text else {}


def some_leases(connection: sa.Connection, ids: Iterable[str]) -> list[Lease]:
    """Return those of the leases that exist, oldest first."""
    found = (leases_repository.where(connection, leases.c.id.in_(some)) for some in _parts(ids))
    return list(chain.from_iterable(found))


def ended_since(connection: sa.Connection, since: datetime) -> list[Lease]:
    """Return the newest leases with devices that ran and ended since then, oldest first."""
    newest = (
        sa.select(leases.c.id)
        .where(
            leases.c.ended_at >= since,
            leases.c.started_at.isnot(None),
            ~leases.c.preemptible,
            _HAD_DEVICES,
        )
        .order_by(leases.c.ended_at.desc())
        .limit(MOST)
    )
    found = leases_repository.where(connection, leases.c.id.in_(newest))
    return sorted(found, key=lambda lease: lease.ended_at or since)


class Start(NamedTuple):
    """Granted devices of one kind, and when they were requested."""

    asked_at: datetime
    granted_at: datetime
    group: str
    devices: DeviceCount
    model: str
    memory_bytes: int
    slots: int = 1
    """How many slots each of the devices has."""
    uuid: str = ""
    """One of the devices."""
    part: DeviceCount = 1
    """How much of a GPU each of them is."""


def starts_since(connection: sa.Connection, since: datetime) -> list[Start]:
    """Return the newest leases with devices that were granted since then, newest first."""
    query = (
        sa.select(
            sa.func.coalesce(tickets.c.created_at, leases.c.granted_at),
            leases.c.granted_at,
            leases.c.group,
            sa.func.count(),
            sa.func.min(lease_places.c.model),
            sa.func.min(lease_places.c.memory_bytes),
            sa.func.max(lease_places.c.slots),
            sa.func.min(lease_places.c.held_slots),
            sa.func.min(lease_places.c.uuid),
            sa.func.min(lease_places.c.part),
        )
        .select_from(
            leases.join(
                lease_places, (lease_places.c.lease_id == leases.c.id) & COUNTED_PLACE
            ).outerjoin(tickets, tickets.c.id == leases.c.ticket_id)
        )
        .where(leases.c.granted_at >= since, ~leases.c.preemptible)
        .group_by(leases.c.id, tickets.c.created_at)
        .order_by(leases.c.granted_at.desc())
        .limit(MOST)
    )
    found = []
    for row in connection.execute(query):
        asked_at, granted_at, group, devices, model, memory, slots, held, uuid, part = row
        share: DeviceCount = Fraction(held, slots) if held < slots else 1
        device = model, memory, slots, uuid, part
        start = Start(asked_at, granted_at, group, devices * share, *device)
        found.append(start)
    return found


def asked_for(connection: sa.Connection, since: datetime) -> list[tuple[datetime, Lease]]:
    """Return leases with devices that ran and ended, with and in order of their request time."""
    asked = sa.func.coalesce(tickets.c.created_at, leases.c.granted_at)
    query = (
        sa.select(leases.c.id, tickets.c.created_at)
        .select_from(leases.outerjoin(tickets, tickets.c.id == leases.c.ticket_id))
        .where(
            leases.c.ended_at >= since,
            leases.c.started_at.isnot(None),
            ~leases.c.preemptible,
            _HAD_DEVICES,
        )
        .order_by(asked)
    )
    moments = {row.id: row.created_at for row in connection.execute(query)}
    found = {lease.id: lease for lease in some_leases(connection, moments)}
    return [(moments[name] or found[name].granted_at, found[name]) for name in moments]
