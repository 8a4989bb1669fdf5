"""What is closed to new leases, and the trail of who changed what."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from urllib.parse import quote, unquote

import sqlalchemy as sa

from ..db import hash_chain
from ..db.schema import audit, closures
from ..leases.models import ServerRef

GRANTING = "granting"
"""The subject that stands for every device: maintenance."""

HEALTH = "health"
"""The actor of what is closed because a device is sick, and of its return."""

LEAK = "leak"
"""The actor of what is closed because something of nobody's is on a device, until it is gone."""

KEEPER = "restart:"
"""How the actor begins that keeps devices for a server which starts again; see :func:`keeper`."""

_NOTE = sa.insert(audit).returning(audit.c.id)
_ALL = sa.select(closures).order_by(closures.c.at, closures.c.subject)


@dataclass(frozen=True, slots=True)
class Closure:
    """Something that is closed to new leases; those that are there go on."""

    subject: str
    """A device's UUID, or :data:`GRANTING`."""
    at: datetime
    actor: str
    reason: str


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One line of the audit trail."""

    at: datetime
    actor: str
    action: str
    subject: str
    detail: str
    id: int = 0


def load(connection: sa.Connection) -> dict[str, Closure]:
    """Everything that is closed, by subject."""
    return {row[0]: Closure(*row) for row in connection.execute(_ALL)}


def close(connection: sa.Connection, closure: Closure) -> bool:
    """Close something. False when it was closed already; then nothing changes."""
    if connection.execute(sa.select(closures).filter_by(subject=closure.subject)).first():
        return False
    row = {name: getattr(closure, name) for name in Closure.__dataclass_fields__}
    connection.execute(sa.insert(closures).values(row))
    return True


def reopen(connection: sa.Connection, subject: str) -> bool:
    """Open something again. False when it was not closed."""
    done = connection.execute(sa.delete(closures).where(closures.c.subject == subject))
    return done.rowcount > 0


def keeper(server: ServerRef) -> str:
    """Who keeps devices for this server while it starts again, as an actor of closures."""
    return f"{KEEPER}{quote(server.user, safe='')}/{quote(server.name, safe='')}"


def kept_for(closure: Closure) -> ServerRef | None:
    """For which server a device is kept; None when it is closed for another reason."""
    if not closure.actor.startswith(KEEPER):
        return None
    user, _, name = closure.actor.removeprefix(KEEPER).partition("/")
    return ServerRef(unquote(user), unquote(name))


def note(
    connection: sa.Connection,
    *,
    at: datetime,
    actor: str,
    action: str,
    subject: str,
    detail: str = "",
) -> None:
    """Add a line to the audit trail, in the transaction of the change itself."""
    row = {"at": at, "actor": actor, "action": action, "subject": subject, "detail": detail}
    line = connection.execute(_NOTE, row).scalar_one()
    hash_chain.seal_change(connection, line, [*row.values()])


def trail(connection: sa.Connection, limit: int = 100) -> list[AuditEntry]:
    """The newest lines of the audit trail, newest first."""
    columns = (audit.c.at, audit.c.actor, audit.c.action, audit.c.subject, audit.c.detail)
    query = sa.select(*columns, audit.c.id).order_by(audit.c.id.desc()).limit(limit)
    return [AuditEntry(*row) for row in connection.execute(query)]
