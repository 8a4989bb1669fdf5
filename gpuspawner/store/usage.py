"""Who used what between two moments, from the totals of days and months, to the microcredit.

Totals are of days of UTC, and people ask for days of their own zone: so what was used between the
two midnights is added or taken away, lease by lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from itertools import pairwise

import sqlalchemy as sa

from ..ledger.usage import DAY, Use, kind_of, midnight, use_of
from ..model import Lease
from . import leases as lease_rows
from .schema import LONG_LEASE, TO_ADD_UP, UTCDateTime, leases
from .schema_totals import totals
from .totals import DAY as OF_DAY
from .totals import MONTH as OF_MONTH

Sums = dict[str, Use]
"""What was used, by name."""

_start, _end = (sa.bindparam(name, type_=UTCDateTime()) for name in ("start", "end"))
_SUMS = (
    sa.select(
        totals.c.name,
        sa.func.sum(totals.c.micros),
        sa.func.sum(totals.c.cost),
        sa.func.sum(totals.c.sessions),
    )
    .where(
        totals.c.by == sa.bindparam("what"),
        totals.c.span == sa.bindparam("span"),
    )
    .group_by(totals.c.name)
)
_BY_NAME = _SUMS.where(totals.c.since >= _start, totals.c.since < _end)


def use(
    connection: sa.Connection,
    bounds: Sequence[datetime],
    by: str,
    now: datetime,
    name: str | None = None,
) -> list[Sums]:
    """What was used between each two of the moments, by one of the names of a kind.

    What is still open counts up to ``now``. ``name``: only what has this one.
    """
    late = [*lease_rows.open_leases(connection), *lease_rows.where(connection, TO_ADD_UP)]
    late = [lease for lease in late if name is None or getattr(kind_of(lease), by) == name]
    before = {moment: _since_midnight(connection, moment, by, name) for moment in set(bounds)}
    found = []
    for start, end in pairwise(bounds):
        sums = _whole_days(connection, midnight(start), midnight(end), by, name)
        _add(sums, before[end].items())
        _add(sums, ((each, Use().less(part)) for each, part in before[start].items()))
        _add(sums, _parts(late, start, end, now, by))
        found.append({each: part for each, part in sums.items() if any(part)})
    return found


def _whole_days(
    connection: sa.Connection, start: datetime, end: datetime, by: str, name: str | None
) -> Sums:
    """What was added up of the days from ``start`` up to ``end``; by months where that is less."""
    first, last = _month_from(start), end.replace(day=1)
    spans = [(OF_DAY, start, end)]
    if first < last:
        spans = [(OF_DAY, start, first), (OF_MONTH, first, last), (OF_DAY, last, end)]
    sums: Sums = {}
    for span, since, until in spans:
        if name is None:
            values = {"what": by, "span": span, "start": since, "end": until}
            rows = [(n, m, c, s) for n, m, c, s in connection.execute(_BY_NAME, values)]
        else:
            rows = _of_name(connection, by, span, since, until, name)
        _add(sums, ((row[0], Use(*map(int, row[1:]))) for row in rows))
    return sums


def _of_name(
    connection: sa.Connection, by: str, span: str, since: datetime, until: datetime, name: str
) -> list[tuple[str, int, int, int]]:
    """The same of one name: each day is looked up, and nobody else's are read."""
    moments = []
    while since < until:
        moments.append(since)
        since = since + DAY if span == OF_DAY else _month_from(since + DAY)
    query = _SUMS.where(totals.c.since.in_(moments), totals.c.name == name)
    values = {"what": by, "span": span}
    return [(n, m, c, s) for n, m, c, s in connection.execute(query, values)] if moments else []


def _since_midnight(connection: sa.Connection, moment: datetime, by: str, name: str | None) -> Sums:
    """What was added up of a day until ``moment``; of its shorter part the leases are read."""
    day = midnight(moment)
    if moment == day:
        return {}
    early = moment - day <= timedelta(hours=12)
    start, end = (day, moment) if early else (moment, day + DAY)
    some = _where(connection, _added_up_between(day, start, end), by, name)
    sums: Sums = {}
    _add(sums, _parts(some, start, end, moment, by))
    if early:
        return sums
    whole = _whole_days(connection, day, day + DAY, by, name)
    _add(whole, ((each, Use().less(part)) for each, part in sums.items()))
    return whole


def _added_up_between(day: datetime, start: datetime, end: datetime) -> sa.ColumnElement[bool]:
    """True of the leases in the totals that ran between two moments of a day.

    Those that lasted no longer than two days ended soon after, which their index finds.
    """
    soon = sa.and_(leases.c.ended_at >= start, leases.c.ended_at < day + 2 * DAY)
    longer = sa.and_(LONG_LEASE, leases.c.ended_at >= start, leases.c.started_at < end)
    ids = sa.union(
        sa.select(leases.c.id).where(soon, leases.c.started_at < end, leases.c.days <= 2),
        sa.select(leases.c.id).where(longer),
    )
    return leases.c.id.in_(ids)


def _where(
    connection: sa.Connection, condition: sa.ColumnElement[bool], by: str, name: str | None
) -> list[Lease]:
    """The leases of which it is true, of this name only."""
    if name is not None and by in leases.c:
        condition = condition & (leases.c[by] == name)
    return lease_rows.where(connection, condition)


def _parts(
    some: Iterable[Lease], start: datetime, end: datetime, now: datetime, by: str
) -> Iterable[tuple[str, Use]]:
    return ((getattr(kind_of(lease), by), use_of(lease, start, end, now)) for lease in some)


def _add(sums: Sums, some: Iterable[tuple[str, Use]]) -> None:
    for name, part in some:
        sums[name] = sums[name].plus(part) if name in sums else part


def _month_from(moment: datetime) -> datetime:
    """The first moment of a month that is not before ``moment``, which is a midnight."""
    if moment.day == 1:
        return moment
    return (moment.replace(day=1) + 32 * DAY).replace(day=1)
