"""The totals held against what they were made of, a month at a time."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import sqlalchemy as sa

from ..ledger.usage import DAY, Use, midnight
from . import leases as lease_rows
from .schema import leases, postings
from .schema_totals import moved, totals
from .totals import EVER, Key, parts

AT_ONCE = 500
"""Leases that are held in memory at one time."""

_ADDED_UP = leases.c.days.isnot(None)


def use(connection: sa.Connection) -> Iterator[str]:
    """What was added up of the leases that ended is what they used, day by day."""
    ever: dict[Key, Use] = {}
    for start, end in _months(connection):
        month: dict[Key, Use] = {}
        running = sa.or_(leases.c.started_at < end, leases.c.ended_at < end)
        ids = sa.select(leases.c.id).where(_ADDED_UP, leases.c.ended_at >= start, running)
        for ended_at, key, part in _parts(connection, ids):
            if key.span == EVER and start <= ended_at < end:
                ever[key] = ever.get(key, Use()).plus(part)
            elif key.span != EVER and start <= key.since < end:
                month[key] = month.get(key, Use()).plus(part)
        yield from _compared(connection, month, totals.c.since.between(start, end - DAY))
    yield from _compared(connection, ever, totals.c.span == EVER)


def credits(connection: sa.Connection) -> Iterator[str]:
    """What came to and went from the ledger's own accounts is what their postings moved."""
    amount = postings.c.amount
    sums = (
        sa.func.sum(sa.case((amount > 0, amount), else_=0)),
        sa.func.sum(sa.case((amount < 0, -amount), else_=0)),
    )
    for name, came, went, last in connection.execute(sa.select(*moved.c)).all():
        mine = sa.select(*sums).where(postings.c.account == name, postings.c.id <= last)
        plus, minus = (int(found or 0) for found in connection.execute(mine).one())
        if (plus, minus) != (came, went):
            yield (
                f"The totals of {name} say that {came} microcredits came and {went} went, but its "
                f"postings say {plus} and {minus}."
            )


def _months(connection: sa.Connection) -> Iterator[tuple[datetime, datetime]]:
    """Each month of UTC in which a lease ran or of which there are totals."""
    of_leases = sa.select(
        sa.func.min(sa.func.coalesce(leases.c.started_at, leases.c.ended_at)),
        sa.func.max(leases.c.ended_at),
    )
    of_totals = sa.select(sa.func.min(totals.c.since), sa.func.max(totals.c.since))
    bounds = [
        *connection.execute(of_leases.where(_ADDED_UP)).one(),
        *connection.execute(of_totals.where(totals.c.span != EVER)).one(),
    ]
    known = [moment for moment in bounds if moment is not None]
    if not known:
        return
    start, last = midnight(min(known)).replace(day=1), max(known)
    while start <= last:
        end = (start + 32 * DAY).replace(day=1)
        yield start, end
        start = end


def _parts(
    connection: sa.Connection, query: sa.Select[tuple[str]]
) -> Iterator[tuple[datetime, Key, Use]]:
    """All parts of these leases, each with the end of its lease."""
    ids = connection.execute(query.order_by(leases.c.id)).scalars().all()
    for first in range(0, len(ids), AT_ONCE):
        some = leases.c.id.in_(ids[first : first + AT_ONCE])
        for lease in lease_rows.where(connection, some):
            for key, part in parts(lease):
                if lease.ended_at:
                    yield lease.ended_at, key, part


def _compared(
    connection: sa.Connection, sums: dict[Key, Use], which: sa.ColumnElement[bool]
) -> Iterator[str]:
    """A sentence for the first total that is another one than the sum."""
    key = (totals.c.by, totals.c.span, totals.c.since, totals.c.name)
    query = sa.select(*key, totals.c.micros, totals.c.cost, totals.c.sessions)
    for row in connection.execute(query.where(which).order_by(*key)):
        found, expected = Use(*row[4:]), sums.pop(Key(*row[:4]), Use())
        if found != expected:
            yield _sentence(Key(*row[:4]), found, expected)
    for missing, expected in sorted(sums.items()):
        if any(expected):
            yield _sentence(missing, Use(), expected)


def _sentence(key: Key, found: Use, expected: Use) -> str:
    when = "" if key.span == EVER else f" in the {key.span} of {key.since:%Y-%m-%d}"
    return (
        f"The total by {key.by} of {key.name!r}{when} says {_said(found)}, but its leases say "
        f"{_said(expected)}."
    )


def _said(use: Use) -> str:
    return f"{use.micros} GPU-microseconds, {use.cost} microcredits, {use.sessions} sessions"
