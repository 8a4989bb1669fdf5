"""The row that says which hub the database belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from .schema import OPEN_LEASE, OPEN_TICKET, leases, owner, tickets

_ANYTHING = sa.select(
    sa.exists(sa.select(leases.c.id).where(OPEN_LEASE))
    | sa.exists(sa.select(tickets.c.id).where(OPEN_TICKET))
)


@dataclass(frozen=True, slots=True)
class Owner:
    """The one hub that may change leases and tickets."""

    hub: str
    """Its identity; see :mod:`gpuspawner.store.identity`."""
    machine: str
    """The host name it had, for people."""
    since: datetime


def load(connection: sa.Connection) -> Owner | None:
    """The owner; None of a database that had none yet."""
    row = connection.execute(sa.select(owner.c.hub, owner.c.machine, owner.c.since)).first()
    return Owner(*row) if row else None


def replace(connection: sa.Connection, new: Owner) -> None:
    """Make another hub the owner, or the first one."""
    connection.execute(sa.delete(owner))
    row = {"id": 1, "hub": new.hub, "machine": new.machine, "since": new.since}
    connection.execute(sa.insert(owner).values(row))


def has_something(connection: sa.Connection) -> bool:
    """Return True if the owner has open leases or waiting tickets."""
    return bool(connection.execute(_ANYTHING).scalar_one())
