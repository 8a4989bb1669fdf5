"""Devices that are kept for a server while it stops and starts again.

Each is closed to new leases (see :mod:`gpuspawner.store.closures`) by an actor that names the
server. So nobody else is granted one, whoever is killed meanwhile, and an admin sees why and can
end it; the grant to the server itself opens them, in its own transaction.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import sqlalchemy as sa

from ..model import Lease, ServerRef
from . import closures, idle, leases
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


def ending(connection: sa.Connection) -> list[Lease]:
    """The leases, ended or not, of all servers that start again."""
    found = (last_lease(connection, server) for server in all_kept(connection))
    return [lease for lease in found if lease]


def go_on_resting(connection: sa.Connection, lease: Lease) -> None:
    """A server that starts again is as idle as it was: nobody gains time by that."""
    before = last_lease(connection, lease.server)
    watched = idle.get(connection, before.id) if before else None
    if watched:
        until = max(watched.judged_until, lease.granted_at)
        idle.put(connection, lease.id, replace(watched, judged_until=until))


def left_of(connection: sa.Connection, server: ServerRef, now: datetime) -> int | None:
    """How many seconds are left of the session that goes on; None when it has no end."""
    before = last_lease(connection, server)
    if before is None or before.ends_at is None:
        return None
    return max(LEAST_SECONDS, int((before.ends_at - now).total_seconds()))
