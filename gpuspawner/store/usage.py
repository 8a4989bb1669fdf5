"""Who used what between two moments, added up by the database where that can be done exactly."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FunctionElement

from ..ledger.usage import SEVERAL, Kind, Use
from ..model import Lease
from . import leases as lease_rows
from .prepared import Prepared
from .schema import OPEN_LEASE, UTCDateTime, audit, lease_places, leases


class _Span(FunctionElement[int]):
    """Microseconds between two times; SQLite counts them to the millisecond."""

    type = sa.BigInteger()
    inherit_cache = True


@compiles(_Span, "sqlite")
def _sqlite(element: Any, compiler: Any, **kwargs: Any) -> str:
    since, until = (f"julianday({compiler.process(c, **kwargs)})" for c in element.clauses)
    return f"CAST(ROUND(({until} - {since}) * 86400000.0) AS INTEGER) * 1000"


@compiles(_Span)
def _postgresql(element: Any, compiler: Any, **kwargs: Any) -> str:
    since, until = (compiler.process(c, **kwargs) for c in element.clauses)
    return f"CAST(EXTRACT(EPOCH FROM ({until} - {since})) * 1000000 AS BIGINT)"


_of_lease = lease_places.c.lease_id == leases.c.id
_devices = sa.select(sa.func.count()).where(_of_lease).scalar_subquery()
_first, _last = sa.func.min(lease_places.c.model), sa.func.max(lease_places.c.model)
_model = sa.select(sa.case((_first != _last, SEVERAL), else_=_first)).where(_of_lease)
_start, _end = (sa.bindparam(name, type_=UTCDateTime()) for name in ("start", "end"))
_ended = sa.and_(leases.c.ended_at > _start, leases.c.started_at < _end)
_inside = sa.and_(_ended, leases.c.started_at >= _start, leases.c.ended_at <= _end)
_EACH = (
    sa.select(
        leases.c.user,
        leases.c.group,
        leases.c.account,
        leases.c.environment,
        sa.func.coalesce(_model.scalar_subquery(), "").label("model"),
        (_devices * _Span(leases.c.started_at, leases.c.ended_at)).label("span"),
        leases.c.charged,
    )
    .where(_inside)
    # With a limit SQLite works each lease out once, and not again for every column of the sum.
    .limit(2**62)
    .subquery()
)
_KEY = (_EACH.c.user, _EACH.c.group, _EACH.c.account, _EACH.c.environment, _EACH.c.model)
_INSIDE = Prepared(
    sa.select(*_KEY, sa.func.sum(_EACH.c.span), sa.func.sum(_EACH.c.charged), sa.func.count())
    .select_from(_EACH)
    .group_by(*_KEY)
)


class Window(NamedTuple):
    """All that is needed to say who used what between two moments."""

    inside: dict[Kind, Use]
    """Of the leases that began and ended between them."""
    crossing: list[Lease]
    """The others: those that began before it or ended after it, or have not ended yet."""

    @property
    def is_open(self) -> bool:
        """Whether the sum may still change: something has not ended yet."""
        return any(lease.ended_at is None for lease in self.crossing)


def window(connection: sa.Connection, start: datetime, end: datetime) -> Window:
    """What was used from ``start`` up to ``end``."""
    inside = {
        Kind(*row[:5]): Use(int(row[5]), int(row[6]), int(row[7]))
        for row in _INSIDE.rows(connection, start=start, end=end)
    }
    crosses = sa.and_(
        leases.c.ended_at > start,
        leases.c.started_at < end,
        sa.or_(leases.c.started_at < start, leases.c.ended_at > end),
    )
    return Window(inside, [*lease_rows.where(connection, crosses), *_opened(connection, end)])


def corrections(connection: sa.Connection) -> int:
    """A number that is another one once a session of the past was refunded or a charge reversed."""
    query = sa.select(sa.func.max(audit.c.id)).where(audit.c.action.in_(("refund", "reverse")))
    return int(connection.execute(query).scalar() or 0)


def of_account(connection: sa.Connection, account: str, since: datetime) -> list[Lease]:
    """The account's leases that ran after ``since``, oldest first."""
    late = sa.or_(OPEN_LEASE, leases.c.ended_at > since)
    mine = sa.and_(leases.c.account == account, leases.c.started_at.isnot(None), late)
    return lease_rows.where(connection, mine)


def _opened(connection: sa.Connection, end: datetime) -> list[Lease]:
    running = lease_rows.open_leases(connection)
    return [lease for lease in running if lease.started_at and lease.started_at < end]
