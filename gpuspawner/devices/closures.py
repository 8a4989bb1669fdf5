"""Devices that are closed to new leases."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from urllib.parse import quote, unquote

import sqlalchemy as sa

from ..db.schema import closures
from ..leases.models import ServerRef

GRANTING = "granting"
"""The subject that stands for all devices: granting is paused for maintenance."""

HEALTH = "health"
"""The actor of closures (and reopenings) of sick devices."""

LEAK = "leak"
"""The actor of closures of devices that are occupied without a lease, until they are empty."""

KEEPER = "restart:"
"""Prefix of the actor that reserves devices for a restarting server; see :func:`keeper`."""

_ALL = sa.select(closures).order_by(closures.c.at, closures.c.subject)


@dataclass(frozen=True, slots=True)
class Closure:
    """Something that is closed to new leases; existing leases continue."""

    subject: str
    """A device's UUID, or :data:`GRANTING`."""
    at: datetime
    actor: str
    reason: str


def load(connection: sa.Connection) -> dict[str, Closure]:
    """Return everything that is closed, by subject."""
    return {row[0]: Closure(*row) for row in connection.execute(_ALL)}


def close(connection: sa.Connection, closure: Closure) -> bool:
    """Close a subject. Returns False, and changes nothing, if it was already closed."""
    if connection.execute(sa.select(closures).filter_by(subject=closure.subject)).first():
        return False
    connection.execute(sa.insert(closures).values(asdict(closure)))
    return True


def reopen(connection: sa.Connection, subject: str) -> bool:
    """Reopen a subject. Returns False if it was not closed."""
    done = connection.execute(sa.delete(closures).where(closures.c.subject == subject))
    return done.rowcount > 0


def keeper(server: ServerRef) -> str:
    """Return the actor that reserves devices for this server while it restarts."""
    return f"{KEEPER}{quote(server.user, safe='')}/{quote(server.name, safe='')}"


def kept_for(closure: Closure) -> ServerRef | None:
    """Return the server that a device is reserved for; None if it is closed for another reason."""
    if not closure.actor.startswith(KEEPER):
        return None
    user, _, name = closure.actor.removeprefix(KEEPER).partition("/")
    return ServerRef(unquote(user), unquote(name))
