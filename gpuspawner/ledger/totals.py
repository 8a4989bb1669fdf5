"""Totals of leases and postings by day and month, the usage read from them, and their check.

:func:`add_up` adds ended leases later, some at a time, and marks them; readers use the totals plus
each unmarked lease. A lease that is changed after its end is first taken out again. Postings are
append-only and writers come one at a time, so a posting's number shows if it is new.

Totals are per day of UTC; for days of another zone, what was used between the two midnights is
added or subtracted, lease by lease.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from ..db.schema import (
    LONG_LEASE,
    TO_ADD_UP,
    UTCDateTime,
    accounts,
    leases,
    moved,
    postings,
    totals,
)
from ..leases import repository as leases_repository
from ..leases.models import Lease
from ..queue import repository as queue_repository
from .models import SYSTEM_USAGE
from .usage import DAY, Kind, LeaseUse, add_use, days_of, kind_of, midnight, use_of_lease

LEASES_AT_ONCE, POSTINGS_AT_ONCE = 200, 50_000
"""How many are added up in one transaction."""

RECENT = timedelta(days=1)
"""The period for which the metrics report waits."""

PER_DAY, PER_MONTH, PER_EVER = "day", "month", "ever"
"""The spans of time that have totals."""

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
"""The start of the span "ever"."""

OUTCOME, MODEL_AND_GROUP = "outcome", "model and group"
"""What the totals of "ever" are grouped by. A lease of two models counts in both of them."""

_IDS = (
    sa.select(leases.c.id)
    .where(TO_ADD_UP)
    .order_by(leases.c.id)
    .limit(sa.bindparam("most", type_=sa.Integer))
)
_MARK = sa.update(leases).where(leases.c.id == sa.bindparam("lease"))
"""The values name the columns that it sets."""
_DAYS = sa.select(leases.c.days).where(leases.c.id == sa.bindparam("lease"))
_EVER = sa.select(totals.c.name, totals.c.micros, totals.c.sessions).where(
    totals.c.by == sa.bindparam("what"), totals.c.span == PER_EVER
)
_amount = postings.c.amount
_NEW = sa.select(
    sa.func.coalesce(sa.func.sum(sa.case((_amount > 0, _amount), else_=0)), 0),
    sa.func.coalesce(sa.func.sum(sa.case((_amount < 0, -_amount), else_=0)), 0),
).where(
    postings.c.account == sa.bindparam("account"),
    postings.c.id > sa.bindparam("since"),
    postings.c.id <= sa.bindparam("until"),
)
_NEWEST = sa.select(sa.func.coalesce(sa.func.max(postings.c.id), 0))
_OWN = (
    sa.select(accounts.c.name, accounts.c.balance, moved.c.came, moved.c.went, moved.c.last)
    .select_from(accounts.outerjoin(moved, moved.c.account == accounts.c.name))
    .where(accounts.c.name.startswith("system:"))
)


class Key(NamedTuple):
    """The key of a total that a lease is part of."""

    by: str
    span: str
    since: datetime
    name: str


# Adding up.


def parts(lease: Lease) -> Iterator[tuple[Key, LeaseUse]]:
    """Yield all that an ended lease adds to the totals."""
    for day, use in days_of(lease):
        for by, name in zip(Kind._fields, kind_of(lease), strict=True) if any(use) else ():
            yield Key(by, PER_DAY, day, name), use
            yield Key(by, PER_MONTH, day.replace(day=1), name), use
    yield Key(OUTCOME, PER_EVER, EPOCH, lease.outcome), LeaseUse(sessions=1)
    if lease.started_at and lease.ended_at:
        lasted = (lease.ended_at - lease.started_at) // timedelta(microseconds=1)
        for device in lease.devices:
            name = json.dumps([device.model, lease.group])
            micros = int(lasted * device.equivalent)
            yield Key(MODEL_AND_GROUP, PER_EVER, EPOCH, name), LeaseUse(micros=micros)


def add_up(connection: sa.Connection, most: int = LEASES_AT_ONCE) -> int:
    """Add up ended leases, and what moved since, and return the number of leases.

    If it is ``most``, there may be more to do.
    """
    ids = connection.execute(_IDS, {"most": most}).scalars().all()
    found = leases_repository.where(connection, leases.c.id.in_(ids)) if ids else []
    _add_to_totals(connection, (part for lease in found for part in parts(lease)))
    if found:
        marks = [{"lease": lease.id, "days": sum(1 for _ in days_of(lease))} for lease in found]
        connection.execute(_MARK, marks)
    return len(found) if _add_up_moved(connection) else most


def _add_up_moved(connection: sa.Connection) -> bool:
    """Add up what some postings moved, and return True if those were all."""
    newest = connection.execute(_NEWEST).scalar_one()
    done = True
    for name, _, came, went, last in connection.execute(_OWN).all():
        until = min(newest, (last or 0) + POSTINGS_AT_ONCE)
        done = done and until == newest
        if until == last:
            continue
        values = {"account": name, "since": last or 0, "until": until}
        more, less = connection.execute(_NEW, values).one()
        row = {"came": (came or 0) + int(more), "went": (went or 0) + int(less), "last": until}
        _upsert(connection, moved, [{"account": name, **row}])
    return done


def take_out(connection: sa.Connection, lease: Lease) -> None:
    """Take an ended lease out of the totals before it is changed. ``lease`` is as it was."""
    if connection.execute(_DAYS, {"lease": lease.id}).scalar_one() is not None:
        _add_to_totals(connection, ((key, LeaseUse().less(use)) for key, use in parts(lease)))
        connection.execute(_MARK, {"lease": lease.id, "days": None})


def rename(connection: sa.Connection, by: str, old: str, new: str) -> None:
    """Add the totals of one name to those of its new name."""
    named = (totals.c.by == by) & (totals.c.name == old)
    rows = connection.execute(sa.select(totals).where(named)).mappings().all()
    if rows:
        added = [{**row, "name": new} for row in rows]
        _upsert(connection, totals, added, add=("micros", "cost", "sessions"))
        connection.execute(sa.delete(totals).where(named))


def left(connection: sa.Connection, most: int) -> int:
    """Return how many leases are still to be added up, counting up to ``most``."""
    return len(connection.execute(_IDS, {"most": most}).all())


def _add_to_totals(connection: sa.Connection, some: Iterable[tuple[Key, LeaseUse]]) -> None:
    sums: dict[Key, LeaseUse] = {}
    add_use(sums, some)
    rows = [{**key._asdict(), **sums[key]._asdict()} for key in sorted(sums)]
    if rows:
        _upsert(connection, totals, rows, add=("micros", "cost", "sessions"))


def _upsert(
    connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]], add: Iterable[str] = ()
) -> None:
    """Insert or replace these rows by their keys; the columns in ``add`` are added instead."""
    makers = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
    statement: Any = makers[connection.dialect.name](table)
    keys = {column.name for column in table.primary_key}
    new = {name: statement.excluded[name] for name in rows[0] if name not in keys}
    new |= {name: table.c[name] + statement.excluded[name] for name in add}
    connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=new), rows)


# Reading for the metrics.


class SystemTotals(NamedTuple):
    """Microcredits that ever went from and to the ledger's own accounts."""

    granted: int = 0
    taken: int = 0
    """Taken back by admins, or expired."""
    charged: int = 0
    refunded: int = 0
    left: int = 0
    """On all members' and groups' accounts together."""


class TotalUse(NamedTuple):
    """The use of leases that ended."""

    seconds: dict[tuple[str, str], float]
    """GPU-seconds of leased devices, by model and group."""
    ended: dict[str, int]
    """How many leases, by outcome."""
    waits: list[float]
    """How many seconds each lease of the last day was waited for, in order."""


def all_moved(connection: sa.Connection) -> SystemTotals:
    """Return what moved until now."""
    found = SystemTotals()
    newest = connection.execute(_NEWEST).scalar_one()
    for name, balance, came, went, last in connection.execute(_OWN).all():
        values = {"account": name, "since": last or 0, "until": newest}
        more, less = connection.execute(_NEW, values).one()
        came, went = (came or 0) + int(more), (went or 0) + int(less)
        names = ("charged", "refunded") if name == SYSTEM_USAGE else ("taken", "granted")
        sums = {names[0]: came, names[1]: went}
        changes = {each: getattr(found, each) + amount for each, amount in sums.items()}
        found = found._replace(left=found.left - balance, **changes)
    return found


def all_used(connection: sa.Connection, now: datetime) -> TotalUse:
    """Return the use of ended leases until now."""
    outcomes = connection.execute(_EVER, {"what": OUTCOME})
    ended = {name: int(count) for name, _, count in outcomes if count}
    models = connection.execute(_EVER, {"what": MODEL_AND_GROUP})
    micros = {name: int(sum_) for name, sum_, _ in models}
    for lease in leases_repository.where(connection, TO_ADD_UP):
        for key, use in parts(lease):
            if key.by == OUTCOME:
                ended[key.name] = ended.get(key.name, 0) + 1
            elif key.by == MODEL_AND_GROUP:
                micros[key.name] = micros.get(key.name, 0) + use.micros
    seconds = {tuple(json.loads(name)): each / 1e6 for name, each in micros.items()}
    starts = queue_repository.starts_since(connection, now - RECENT)
    waits = (max(0.0, (x.granted_at - x.asked_at).total_seconds()) for x in starts)
    return TotalUse(seconds, ended, sorted(waits))


Sums = dict[str, LeaseUse]
"""Use by name."""
_start, _end = (sa.bindparam(name, type_=UTCDateTime()) for name in ("start", "end"))
_SUMS = (
    sa.select(
        totals.c.name,
        sa.func.sum(totals.c.micros),
        sa.func.sum(totals.c.cost),
        sa.func.sum(totals.c.sessions),
    )
    .where(totals.c.by == sa.bindparam("what"), totals.c.span == sa.bindparam("span"))
    .group_by(totals.c.name)
)
_BY_NAME = _SUMS.where(totals.c.since >= _start, totals.c.since < _end)


def use_between(
    connection: sa.Connection,
    bounds: Sequence[datetime],
    by: str,
    now: datetime,
    name: str | None = None,
) -> list[Sums]:
    """Return what was used between each two of the times, by a field of Kind.

    Open leases count up to ``now``. ``name``: only what has this value.
    """
    late = leases_repository.open_leases(connection)
    late += leases_repository.where(connection, TO_ADD_UP)
    late = [lease for lease in late if name is None or getattr(kind_of(lease), by) == name]
    before = {moment: _since_midnight(connection, moment, by, name) for moment in set(bounds)}
    found = []
    for start, end in pairwise(bounds):
        sums = _whole_days(connection, midnight(start), midnight(end), by, name)
        add_use(sums, before[end].items())
        add_use(sums, ((each, LeaseUse().less(part)) for each, part in before[start].items()))
        add_use(sums, _use_parts(late, start, end, now, by))
        found.append({each: part for each, part in sums.items() if any(part)})
    return found


def _whole_days(
    connection: sa.Connection, start: datetime, end: datetime, by: str, name: str | None
) -> Sums:
    """Return the totals of the days from ``start`` up to ``end``, by months if that is faster."""
    first, last = _month_from(start), end.replace(day=1)
    spans = [(PER_DAY, start, end)]
    if first < last:
        spans = [(PER_DAY, start, first), (PER_MONTH, first, last), (PER_DAY, last, end)]
    sums: Sums = {}
    for span, since, until in spans:
        if name is None:
            values = {"what": by, "span": span, "start": since, "end": until}
            rows: Sequence[Sequence[Any]] = connection.execute(_BY_NAME, values).all()
        else:
            rows = _of_name(connection, by, span, since, until, name)
        add_use(sums, ((row[0], LeaseUse(*map(int, row[1:]))) for row in rows))
    return sums


def _of_name(
    connection: sa.Connection, by: str, span: str, since: datetime, until: datetime, name: str
) -> Sequence[Sequence[Any]]:
    """Return the same totals of one name: each day is looked up, and other names are not read."""
    moments = []
    while since < until:
        moments.append(since)
        since = since + DAY if span == PER_DAY else _month_from(since + DAY)
    query = _SUMS.where(totals.c.since.in_(moments), totals.c.name == name)
    return connection.execute(query, {"what": by, "span": span}).all() if moments else []


def _since_midnight(connection: sa.Connection, moment: datetime, by: str, name: str | None) -> Sums:
    """Return the totals of a day until ``moment``; for its shorter part, leases are read."""
    day = midnight(moment)
    if moment == day:
        return {}
    early = moment - day <= timedelta(hours=12)
    start, end = (day, moment) if early else (moment, day + DAY)
    some = _where(connection, _added_up_between(day, start, end), by, name)
    sums: Sums = {}
    add_use(sums, _use_parts(some, start, end, moment, by))
    if early:
        return sums
    whole = _whole_days(connection, day, day + DAY, by, name)
    add_use(whole, ((each, LeaseUse().less(part)) for each, part in sums.items()))
    return whole


def _added_up_between(day: datetime, start: datetime, end: datetime) -> sa.ColumnElement[bool]:
    """Return the condition for leases in the totals that ran between two times of a day.

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
    if name is not None and by in leases.c:
        condition = condition & (leases.c[by] == name)
    return leases_repository.where(connection, condition)


def _use_parts(
    some: Iterable[Lease], start: datetime, end: datetime, now: datetime, by: str
) -> Iterable[tuple[str, LeaseUse]]:
    return ((getattr(kind_of(lease), by), use_of_lease(lease, start, end, now)) for lease in some)


def _month_from(moment: datetime) -> datetime:
    """Return the first start of a month that is not before ``moment``, which is a midnight."""
    if moment.day == 1:
        return moment
    return (moment.replace(day=1) + 32 * DAY).replace(day=1)


CHECKED_AT_ONCE = 500
"""How many leases are held in memory at a time."""

_ADDED_UP = leases.c.days.isnot(None)


def check_use(connection: sa.Connection) -> Iterator[str]:
    """What was added up of the leases that ended is what they used, day by day."""
    ever: dict[Key, LeaseUse] = {}
    for start, end in _months(connection):
        month: dict[Key, LeaseUse] = {}
        running = sa.or_(leases.c.started_at < end, leases.c.ended_at < end)
        ids = sa.select(leases.c.id).where(_ADDED_UP, leases.c.ended_at >= start, running)
        for ended_at, key, part in _checked_parts(connection, ids):
            if key.span == PER_EVER and start <= ended_at < end:
                ever[key] = ever.get(key, LeaseUse()).plus(part)
            elif key.span != PER_EVER and start <= key.since < end:
                month[key] = month.get(key, LeaseUse()).plus(part)
        yield from _compared(connection, month, totals.c.since.between(start, end - DAY))
    yield from _compared(connection, ever, totals.c.span == PER_EVER)


def check_credits(connection: sa.Connection) -> Iterator[str]:
    """What came to and went from the ledger's own accounts is what their postings moved."""
    for name, came, went, last in connection.execute(sa.select(*moved.c)).all():
        values = {"account": name, "since": 0, "until": last}
        plus, minus = map(int, connection.execute(_NEW, values).one())
        if (plus, minus) != (came, went):
            yield (
                f"The totals of {name} say that {came} microcredits came and {went} went, but its "
                f"postings say {plus} and {minus}."
            )


def _months(connection: sa.Connection) -> Iterator[tuple[datetime, datetime]]:
    """Yield each month of UTC in which a lease ran or which has totals."""
    of_leases = sa.select(
        sa.func.min(sa.func.coalesce(leases.c.started_at, leases.c.ended_at)),
        sa.func.max(leases.c.ended_at),
    )
    of_totals = sa.select(sa.func.min(totals.c.since), sa.func.max(totals.c.since))
    bounds = [
        *connection.execute(of_leases.where(_ADDED_UP)).one(),
        *connection.execute(of_totals.where(totals.c.span != PER_EVER)).one(),
    ]
    known = [moment for moment in bounds if moment is not None]
    if not known:
        return
    start, last = midnight(min(known)).replace(day=1), max(known)
    while start <= last:
        end = _month_from(start + DAY)
        yield start, end
        start = end


def _checked_parts(
    connection: sa.Connection, query: sa.Select[tuple[str]]
) -> Iterator[tuple[datetime, Key, LeaseUse]]:
    """Yield all parts of these leases, each with the end of its lease."""
    ids = connection.execute(query.order_by(leases.c.id)).scalars().all()
    for first in range(0, len(ids), CHECKED_AT_ONCE):
        some = leases.c.id.in_(ids[first : first + CHECKED_AT_ONCE])
        for lease in leases_repository.where(connection, some):
            for key, part in parts(lease):
                if lease.ended_at:
                    yield lease.ended_at, key, part


def _compared(
    connection: sa.Connection, sums: dict[Key, LeaseUse], which: sa.ColumnElement[bool]
) -> Iterator[str]:
    """Yield a sentence for the first total that differs from the sum."""
    key = (totals.c.by, totals.c.span, totals.c.since, totals.c.name)
    query = sa.select(*key, totals.c.micros, totals.c.cost, totals.c.sessions)
    for row in connection.execute(query.where(which).order_by(*key)):
        found, expected = LeaseUse(*row[4:]), sums.pop(Key(*row[:4]), LeaseUse())
        if found != expected:
            yield _sentence(Key(*row[:4]), found, expected)
    for missing, expected in sorted(sums.items()):
        if any(expected):
            yield _sentence(missing, LeaseUse(), expected)


def _sentence(key: Key, found: LeaseUse, expected: LeaseUse) -> str:
    when = "" if key.span == PER_EVER else f" in the {key.span} of {key.since:%Y-%m-%d}"
    return (
        f"The total by {key.by} of {key.name!r}{when} says {_said(found)}, but its leases say "
        f"{_said(expected)}."
    )


def _said(use: LeaseUse) -> str:
    return f"{use.micros} GPU-microseconds, {use.cost} microcredits, {use.sessions} sessions"
