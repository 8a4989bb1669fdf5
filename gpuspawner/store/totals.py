"""Totals over everything that has ended, so that reports and metrics never read all leases.

They are no part of what ends a lease, which a hub waits for: :func:`add_up` does it some time
later, so many leases at once, and marks those that it has added up. Whoever asks reads the totals,
and each lease that is not marked. A lease that is changed after its end is taken out again first.

Postings are append-only and writers come one at a time, so a posting's number says which are new.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from ..ledger.entries import SYSTEM_USAGE
from ..ledger.usage import Kind, Use, days_of, kind_of
from ..model import Lease
from . import history
from . import leases as lease_rows
from .schema import TO_ADD_UP, accounts, leases, postings
from .schema_totals import moved, totals

AT_ONCE = 200
"""Leases that are added up in one transaction."""

POSTINGS_AT_ONCE = 50_000
"""The same of postings."""

RECENT = timedelta(days=1)
"""The time of which the metrics tell how long people waited."""

DAY, MONTH, EVER = "day", "month", "ever"
"""The spans of time that totals are kept of."""

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
"""When the span "ever" begins."""

OUTCOME, MODEL_AND_GROUP = "outcome", "model and group"
"""What there are totals of "ever" by. A lease of two models is in both of them here."""

_IDS = (
    sa.select(leases.c.id)
    .where(TO_ADD_UP)
    .order_by(leases.c.id)
    .limit(sa.bindparam("most", type_=sa.Integer))
)
_MARK = sa.update(leases).where(leases.c.id == sa.bindparam("lease"))
"""The columns that it sets are named by the values."""
_DAYS = sa.select(leases.c.days).where(leases.c.id == sa.bindparam("lease"))
_EVER = sa.select(totals.c.name, totals.c.micros, totals.c.sessions).where(
    totals.c.by == sa.bindparam("what"), totals.c.span == EVER
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
    """Of which total a lease is a part."""

    by: str
    span: str
    since: datetime
    name: str


# Adding up.


def parts(lease: Lease) -> Iterator[tuple[Key, Use]]:
    """All of what a lease that has ended adds to the totals."""
    for day, use in days_of(lease):
        for by, name in zip(Kind._fields, kind_of(lease), strict=True) if any(use) else ():
            yield Key(by, DAY, day, name), use
            yield Key(by, MONTH, day.replace(day=1), name), use
    yield Key(OUTCOME, EVER, EPOCH, lease.outcome), Use(sessions=1)
    if lease.started_at and lease.ended_at:
        lasted = (lease.ended_at - lease.started_at) // timedelta(microseconds=1)
        for device in lease.devices:
            name = json.dumps([device.model, lease.group])
            yield Key(MODEL_AND_GROUP, EVER, EPOCH, name), Use(micros=lasted)


def add_up(connection: sa.Connection, most: int = AT_ONCE) -> int:
    """Add up so many leases that have ended, and what moved since.

    The number of leases; when it is ``most``, there may be more to do.
    """
    ids = connection.execute(_IDS, {"most": most}).scalars().all()
    found = lease_rows.where(connection, leases.c.id.in_(ids)) if ids else []
    _add(connection, (part for lease in found for part in parts(lease)))
    if found:
        marks = [{"lease": lease.id, "days": _number_of_days(lease)} for lease in found]
        connection.execute(_MARK, marks)
    return len(found) if _add_up_moved(connection) else most


def _add_up_moved(connection: sa.Connection) -> bool:
    """Add up what so many postings moved; whether those were all."""
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
    """Before a lease is changed that has ended: it is added up anew. ``lease`` is as it was."""
    if connection.execute(_DAYS, {"lease": lease.id}).scalar_one() is not None:
        _add(connection, ((key, Use().less(use)) for key, use in parts(lease)))
        connection.execute(_MARK, {"lease": lease.id, "days": None})


def left(connection: sa.Connection, most: int) -> int:
    """How many leases are still to be added up; counted up to ``most``."""
    return len(connection.execute(_IDS, {"most": most}).all())


def _number_of_days(lease: Lease) -> int:
    return sum(1 for _ in days_of(lease))


def _add(connection: sa.Connection, some: Iterable[tuple[Key, Use]]) -> None:
    sums: dict[Key, Use] = {}
    for key, use in some:
        sums[key] = sums[key].plus(use) if key in sums else use
    rows = [{**key._asdict(), **sums[key]._asdict()} for key in sorted(sums)]
    if rows:
        _upsert(connection, totals, rows, add=("micros", "cost", "sessions"))


def _upsert(
    connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]], add: Iterable[str] = ()
) -> None:
    """Write these rows in the place of those with the same keys; numbers may be added to them."""
    makers = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
    statement: Any = makers[connection.dialect.name](table)
    keys = {column.name for column in table.primary_key}
    new = {name: statement.excluded[name] for name in rows[0] if name not in keys}
    new |= {name: table.c[name] + statement.excluded[name] for name in add}
    connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=new), rows)


# What the metrics tell.


class Moved(NamedTuple):
    """Microcredits that went from and to the ledger's own accounts, ever."""

    granted: int = 0
    taken: int = 0
    """Taken back by admins, or when they expired."""
    charged: int = 0
    refunded: int = 0
    left: int = 0
    """On all members' and groups' accounts together."""


class Used(NamedTuple):
    """Leases that ended, and the GPU-seconds of those."""

    seconds: dict[tuple[str, str], float]
    """Of leased devices, by model and group."""
    ended: dict[str, int]
    """How many, by outcome."""
    waits: list[float]
    """Seconds that each lease of the last day had been asked for before, in order."""


def all_moved(connection: sa.Connection) -> Moved:
    """What moved until now."""
    found = Moved()
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


def all_used(connection: sa.Connection, now: datetime) -> Used:
    """What was used until now by leases that have ended."""
    outcomes = connection.execute(_EVER, {"what": OUTCOME})
    ended = {name: int(count) for name, _, count in outcomes if count}
    models = connection.execute(_EVER, {"what": MODEL_AND_GROUP})
    micros = {name: int(sum_) for name, sum_, _ in models}
    for lease in lease_rows.where(connection, TO_ADD_UP):
        for key, use in parts(lease):
            if key.by == OUTCOME:
                ended[key.name] = ended.get(key.name, 0) + 1
            elif key.by == MODEL_AND_GROUP:
                micros[key.name] = micros.get(key.name, 0) + use.micros
    seconds = {_model_and_group(name): each / 1e6 for name, each in micros.items()}
    starts = history.starts_since(connection, now - RECENT)
    waits = (max(0.0, (x.granted_at - x.asked_at).total_seconds()) for x in starts)
    return Used(seconds, ended, sorted(waits))


def _model_and_group(name: str) -> tuple[str, str]:
    model, group = json.loads(name)
    return model, group
