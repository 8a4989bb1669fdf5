"""Devices that are closed to new leases."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from urllib.parse import quote, unquote

import sqlalchemy as sa

from ..db.schema import closures, devices, mig_changes
from ..leases.models import ServerRef

GRANTING = "granting"
"""The subject that stands for all devices: granting is paused for maintenance."""

HEALTH = "health"
"""The actor of closures (and reopenings) of sick devices."""

LEAK = "leak"
"""The actor of closures of devices that are occupied without a lease, until they are empty."""

MIG = "mig"
"""The actor of closures of instances whose GPU gets another MIG layout."""

KEEPER = "restart:"
"""Prefix of the actor that reserves devices for a restarting server; see :func:`keeper`."""

_ALL = sa.select(closures).order_by(closures.c.at, closures.c.subject)
_OF_CLOSED_GPUS = sa.select(
    devices.c.uuid, closures.c.at, closures.c.actor, closures.c.reason
).join(closures, closures.c.subject == devices.c.parent_uuid)
_OF_CHANGING_GPUS = sa.select(
    devices.c.uuid,
    mig_changes.c.started_at,
    sa.literal(MIG),
    sa.literal("the MIG layout of its GPU is being changed"),
).join(mig_changes, mig_changes.c.gpu_uuid == devices.c.parent_uuid)
_closed_gpus = sa.select(closures.c.subject).union_all(sa.select(mig_changes.c.gpu_uuid))
SUBJECTS = (
    sa.select(closures.c.subject)
    .union_all(sa.select(devices.c.uuid).where(devices.c.parent_uuid.in_(_closed_gpus)))
    .subquery("closed")
)
"""What is closed: an instance is, if its GPU is closed or gets another MIG layout."""


@dataclass(frozen=True, slots=True)
class Closure:
    """Something that is closed to new leases; existing leases continue."""

    subject: str
    """A device's UUID, or :data:`GRANTING`."""
    at: datetime
    actor: str
    reason: str


def load(connection: sa.Connection) -> dict[str, Closure]:
    """Return everything that is closed, by subject.

    An instance of a closed GPU is closed as its GPU is, and so is one whose GPU gets another
    layout.
    """
    found = {row[0]: Closure(*row) for row in connection.execute(_ALL)}
    for query in (_OF_CLOSED_GPUS, _OF_CHANGING_GPUS):
        for row in connection.execute(query):
            found.setdefault(row[0], Closure(*row))
    return found


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
