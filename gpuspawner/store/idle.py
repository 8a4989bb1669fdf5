"""Rows of how long the GPUs of open leases have rested."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from ..telemetry.idle import IdleState
from .schema_use import idle


@dataclass(frozen=True, slots=True)
class Watched:
    """A lease, as it was judged last."""

    state: IdleState
    judged_until: datetime
    """What began before this is in it."""


def load(connection: sa.Connection) -> dict[str, Watched]:
    """All of them, by the id of the lease."""
    rows = connection.execute(sa.select(idle)).mappings()
    return {row["lease_id"]: _watched(row) for row in rows}


def get(connection: sa.Connection, lease_id: str) -> Watched | None:
    """One; None when its GPUs were not seen yet."""
    query = sa.select(idle).where(idle.c.lease_id == lease_id)
    row = connection.execute(query).mappings().first()
    return _watched(row) if row else None


def put(connection: sa.Connection, lease_id: str, watched: Watched) -> None:
    """Write one, in the place of what was there."""
    connection.execute(sa.delete(idle).where(idle.c.lease_id == lease_id))
    state = watched.state
    row = {
        "lease_id": lease_id,
        "credit": state.credit,
        "judged_until": watched.judged_until,
        "warned_at": state.warned_at,
        "stops_at": state.stops_at,
        "snoozes": state.snoozes,
    }
    connection.execute(sa.insert(idle).values(row))


def keep_only(connection: sa.Connection, lease_ids: Collection[str]) -> None:
    """Forget all others: their leases have ended."""
    known = set(connection.execute(sa.select(idle.c.lease_id)).scalars())
    for lease_id in known - set(lease_ids):
        connection.execute(sa.delete(idle).where(idle.c.lease_id == lease_id))


def _watched(row: sa.RowMapping) -> Watched:
    names = ("credit", "warned_at", "stops_at", "snoozes")
    return Watched(IdleState(**{name: row[name] for name in names}), row["judged_until"])
