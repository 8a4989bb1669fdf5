"""Rows of rates that admins set. A row is written once, and removed by saying when."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from ..ledger.pricing import Rate
from ..ledger.week import WeekHours
from .schema import rates

_COLUMNS = (
    *(rates.c.amount, rates.c.model, rates.c.environment, rates.c.slots, rates.c.hours),
    *(rates.c.zone, rates.c.since, rates.c.id, rates.c.set_at, rates.c.actor, rates.c.reason),
)
HOLDS = rates.c.removed_at.is_(None)
"""True of the rates that were not removed."""
_HELD = sa.select(*_COLUMNS).where(HOLDS).order_by(rates.c.id)


def load(connection: sa.Connection) -> list[Rate]:
    """The rates that hold or will, in the order in which they were set."""
    return [_rate(row) for row in connection.execute(_HELD)]


def insert(connection: sa.Connection, rate: Rate, zone: str) -> Rate:
    """Write a new rate; the one that comes back has its id. ``zone`` is the admin's."""
    row = {
        "amount": rate.amount,
        "model": rate.model,
        "environment": rate.environment,
        "slots": rate.slots,
        "hours": rate.hours.text if rate.hours else "",
        "zone": zone,
        "since": rate.since,
        "set_at": rate.set_at,
        "actor": rate.actor,
        "reason": rate.reason,
    }
    connection.execute(sa.insert(rates).values(row))
    return load(connection)[-1]


def remove(connection: sa.Connection, rate_id: int, at: datetime) -> None:
    """Have a rate hold no more."""
    changed = sa.update(rates).where(rates.c.id == rate_id).values(removed_at=at)
    connection.execute(changed)


def _rate(row: Sequence[Any]) -> Rate:
    amount, model, environment, slots, hours, zone, since, rate_id, set_at, actor, reason = row
    return Rate(
        amount=amount,
        model=model,
        environment=environment,
        slots=slots,
        hours=_hours(hours, zone) if hours else None,
        since=since,
        id=rate_id,
        set_at=set_at,
        actor=actor,
        reason=reason,
    )


@lru_cache(maxsize=256)
def _hours(text: str, zone: str) -> WeekHours:
    return WeekHours.parse(text, zone)
