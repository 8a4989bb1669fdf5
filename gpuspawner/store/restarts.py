"""Devices that are kept for a server while it stops and starts again.

Each is closed to new leases (see :mod:`gpuspawner.store.closures`) by an actor that names the
server. So nobody else is granted one, whoever is killed meanwhile, and an admin sees why and can
end it; the grant to the server itself opens them, in its own transaction.
"""

from __future__ import annotations

from datetime import datetime

import sqlalchemy as sa

from ..model import Lease, ServerRef
from . import closures, leases
from .closures import Closure, keeper, kept_for
from .schema import leases as rows

OUTCOME = "restart"
"""Of the lease that ends for it."""

LEAST_SECONDS = 60
"""A session that goes on is this long at least."""


def kept(connection: sa.Connection, server: ServerRef) -> list[Closure]:
    """What is kept for a server."""
    found = closures.load(connection).values()
    return [closure for closure in found if closure.actor == keeper(server)]


def all_kept(connection: sa.Connection) -> dict[ServerRef, list[Closure]]:
    """Everything that is kept, by server."""
    found: dict[ServerRef, list[Closure]] = {}
    for closure in closures.load(connection).values():
        if server := kept_for(closure):
            found.setdefault(server, []).append(closure)
    return found


def last_lease(connection: sa.Connection, server: ServerRef) -> Lease | None:
    """The newest lease of a server that ended for a restart, or is about to."""
    newest = (
        sa.select(rows.c.id)
        .where(rows.c.user == server.user, rows.c.server_name == server.name)
        .where(rows.c.outcome == OUTCOME)
        .order_by(rows.c.granted_at.desc(), rows.c.id)
        .limit(1)
    )
    found = leases.where(connection, rows.c.id.in_(newest))
    return found[0] if found else None


def left_of(connection: sa.Connection, server: ServerRef, now: datetime) -> int | None:
    """How many seconds are left of the session that goes on; None when it has no end."""
    before = last_lease(connection, server)
    if before is None or before.ends_at is None:
        return None
    return max(LEAST_SECONDS, int((before.ends_at - now).total_seconds()))
