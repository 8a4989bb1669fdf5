"""Leases as the line needs them: what changed since the last look, and what was before."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

import sqlalchemy as sa

from ..model import Lease
from . import leases as lease_rows
from .schema import OPEN_LEASE, OPEN_PLACE, lease_places, leases, tickets

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


def marks(connection: sa.Connection) -> dict[str, str]:
    """What can change of every open lease with devices (its state and end), by id."""
    text = connection.execute(_MARKS).scalar_one()
    return dict(part.split(":", 1) for part in text.split(" ")) if text else {}


def some(connection: sa.Connection, ids: Iterable[str]) -> list[Lease]:
    """Those of the leases that are there, oldest first."""
    wanted = list(ids)
    found: list[Lease] = []
    for start in range(0, len(wanted), 500):  # SQLite takes so many parameters, and not many more
        found += lease_rows.where(connection, leases.c.id.in_(wanted[start : start + 500]))
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
    found = lease_rows.where(connection, leases.c.id.in_(newest))
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
    found = {lease.id: lease for lease in some(connection, moments)}
    return [(moments[name] or found[name].granted_at, found[name]) for name in moments]
