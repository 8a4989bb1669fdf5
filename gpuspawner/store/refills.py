"""Rows of recurring refills, and of the occurrences that were given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from ..errors import UnknownRefill
from ..ledger.recurrence import Recurrence
from ..ledger.refills import Mode, Refill
from ..model import Account
from .schema import accounts, refill_runs, refills


@dataclass(frozen=True, slots=True)
class Run:
    """An occurrence that was given."""

    occurrence: datetime
    at: datetime
    """When it was given: later than the occurrence when the service was down."""
    accounts: int
    """How many got something."""
    total: int
    """Microcredits together."""


def insert(connection: sa.Connection, refill: Refill) -> None:
    """Write a new refill."""
    recurrence = refill.recurrence
    row = {
        "id": refill.id,
        "rule": recurrence.rule,
        "zone": recurrence.zone,
        "starts_at": recurrence.starts_at,
        "mode": refill.mode.value,
        "amount": refill.amount,
        "cap": refill.cap,
        "audience": json.dumps(refill.audience),
        "keep_seconds": None if refill.keep is None else round(refill.keep.total_seconds()),
        "reason": refill.reason,
        "made_at": refill.made_at,
        "made_by": refill.made_by,
        "next_at": refill.next_at,
    }
    connection.execute(sa.insert(refills).values(row))


def find(connection: sa.Connection, refill_id: str, *, lock: bool = False) -> Refill | None:
    """One refill, if there is one of this id."""
    query = sa.select(refills).where(refills.c.id == refill_id)
    row = connection.execute(query.with_for_update() if lock else query).mappings().first()
    return _refill(row) if row is not None else None


def get(connection: sa.Connection, refill_id: str, *, lock: bool = False) -> Refill:
    """One refill. Raises UnknownRefill."""
    if found := find(connection, refill_id, lock=lock):
        return found
    raise UnknownRefill(refill=refill_id)


def all_refills(connection: sa.Connection, *, ended: bool = False) -> list[Refill]:
    """Every refill, the oldest first; those that an admin ended only when asked for."""
    query = sa.select(refills).order_by(refills.c.made_at, refills.c.id)
    if not ended:
        query = query.where(refills.c.ended_at.is_(None))
    return [_refill(row) for row in connection.execute(query).mappings()]


def due(connection: sa.Connection, now: datetime) -> list[Refill]:
    """The refills of which an occurrence has come, the one that waits longest being first."""
    query = (
        sa.select(refills)
        .where(refills.c.ended_at.is_(None), refills.c.next_at <= now)
        .order_by(refills.c.next_at, refills.c.id)
    )
    return [_refill(row) for row in connection.execute(query).mappings()]


def end(connection: sa.Connection, refill_id: str, at: datetime) -> None:
    """Give no further occurrence."""
    connection.execute(sa.update(refills).where(refills.c.id == refill_id).values(ended_at=at))


def given(connection: sa.Connection, refill_id: str, run: Run, next_at: datetime | None) -> None:
    """Write that an occurrence was given, and which one is next."""
    row = {name: getattr(run, name) for name in Run.__dataclass_fields__}
    connection.execute(sa.insert(refill_runs).values(refill_id=refill_id, **row))
    connection.execute(sa.update(refills).where(refills.c.id == refill_id).values(next_at=next_at))


def runs(connection: sa.Connection, refill_id: str, limit: int = 20) -> list[Run]:
    """The newest occurrences that were given, newest first."""
    query = (
        sa.select(*(refill_runs.c[name] for name in Run.__dataclass_fields__))
        .where(refill_runs.c.refill_id == refill_id)
        .order_by(refill_runs.c.occurrence.desc())
        .limit(limit)
    )
    return [Run(*row) for row in connection.execute(query)]


def opened(connection: sa.Connection) -> Sequence[tuple[Account, datetime]]:
    """Every account but the ledger's own, with when it was opened, by name; no holds are said."""
    query = sa.select(accounts).order_by(accounts.c.name)
    return [
        (Account(name=row["name"], balance=row["balance"]), row["opened_at"])
        for row in connection.execute(query).mappings()
        if not row["name"].startswith("system:")
    ]


def _refill(row: Any) -> Refill:
    keep = row["keep_seconds"]
    return Refill(
        id=row["id"],
        recurrence=Recurrence(row["rule"], row["zone"], row["starts_at"]),
        mode=Mode(row["mode"]),
        amount=row["amount"],
        audience=tuple(json.loads(row["audience"])),
        cap=row["cap"],
        keep=None if keep is None else timedelta(seconds=keep),
        reason=row["reason"],
        made_at=row["made_at"],
        made_by=row["made_by"],
        next_at=row["next_at"],
        ended_at=row["ended_at"],
    )
