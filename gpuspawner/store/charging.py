"""The charges of a tick, many at once: what thousands of leases owe is a few statements.

What is written is what :func:`gpuspawner.store.book.post` writes of one charge after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.exc import DataError, IntegrityError

from ..errors import LedgerError
from ..ledger import rules
from ..ledger.dry import OVERDRAFT
from ..ledger.entries import SYSTEM_USAGE, Posting, TransferKind
from ..model import Lease, LeaseState, ServerRef
from . import book
from . import leases as lease_rows
from .prepared import Prepared
from .schema import OPEN_LEASE, OPEN_PLACE, lease_places, leases, transfers

_SELECTED = (
    leases.c.id,
    leases.c.user,
    leases.c.server_name,
    leases.c.account,
    leases.c.rate,
    leases.c.charged,
    leases.c.started_at,
)
_bounded = leases.c.when_dry == sa.literal_column(f"'{OVERDRAFT}'")
"""Whose charges have a bound, one by one."""
_costs = sa.and_(
    OPEN_LEASE,
    leases.c.state == sa.literal_column(f"'{LeaseState.RUNNING.value}'"),
    leases.c.rate > sa.literal_column("0"),
)
_RUNNING = Prepared(sa.select(*_SELECTED).where(_costs, ~_bounded))
_MODELS = Prepared(sa.select(lease_places.c.lease_id, lease_places.c.model).where(OPEN_PLACE))

# A portion: leases of which a period has begun that they were not charged in. Each counts its
# periods from its own start, so that those of many leases begin at many moments. Only what is
# looked at depends on this, to the millisecond; what is owed is worked out exactly, as ever.
_until = sa.bindparam("until", type_=leases.c.started_at.type)
_period = sa.bindparam("period", type_=sa.BigInteger)
_RAN: dict[str, sa.ColumnElement[Any]] = {
    "sqlite": (sa.func.julianday(_until) - sa.func.julianday(leases.c.started_at))
    * sa.literal_column("86400000")
    + sa.literal_column("0.5"),  # a cast cuts off there
    "postgresql": sa.extract("epoch", _until - leases.c.started_at) * sa.literal_column("1000"),
}
"""Milliseconds since the start."""
_PAID: sa.ColumnElement[Any] = (
    (leases.c.charged + sa.literal_column("1.0"))
    * sa.literal_column("3600000.0")
    / sa.func.nullif(leases.c.rate, sa.literal_column("0"))
)
"""Milliseconds from the start up to which nothing more is owed than was charged."""
_BEGUN = {
    name: sa.cast(ran, sa.BigInteger) // _period > sa.cast(_PAID, sa.BigInteger) // _period
    for name, ran in _RAN.items()
}
_PORTION = {}
_ACCOUNTS = {}
for _name, _begun in _BEGUN.items():
    _some = sa.select(leases.c.id).where(_costs, ~_bounded, _begun)
    _PORTION[_name] = Prepared(
        sa.select(*_SELECTED, lease_places.c.model)
        .select_from(leases.outerjoin(lease_places))
        .where(leases.c.id.in_(_some.limit(sa.bindparam("most", type_=sa.Integer))))
    )
    _ACCOUNTS[_name] = Prepared(
        sa.select(leases.c.account).where(_costs, _bounded, _begun).distinct()
    )


class Due(NamedTuple):
    """What one lease is to be charged."""

    lease_id: str
    account: str
    charged: int
    """Microcredits so far."""
    amount: int
    reason: str


def due(connection: sa.Connection, until: datetime) -> list[Due]:
    """What every running lease without an overdraft owes, less what it was charged."""
    models: dict[str, list[str]] = {}
    for lease_id, model in _MODELS.rows(connection):
        models.setdefault(lease_id, []).append(model)
    rows = _RUNNING.rows(connection)
    return _owing(((row, models.get(row[0], ())) for row in rows), until)


def portion(
    connection: sa.Connection, until: datetime, every: timedelta, most: int
) -> tuple[list[Due], list[Lease]]:
    """The same of the leases that were not charged in their period that goes on, ``most`` of
    them; and, whole, those with an overdraft of the accounts of which one was not."""
    period = max(1, every // timedelta(milliseconds=1))
    asked = {"until": until, "period": period}
    name = connection.dialect.name
    found: dict[str, tuple[Sequence[Any], list[str]]] = {}
    for row in _PORTION[name].rows(connection, **asked, most=most):
        _, models = found.setdefault(row[0], (row[:-1], []))
        if row[-1] is not None:
            models.append(row[-1])
    paying = [account for (account,) in _ACCOUNTS[name].rows(connection, **asked)]
    whole = bounded(connection, paying) if paying else []
    return _owing(found.values(), until), whole


def bounded(connection: sa.Connection, accounts: Sequence[str] | None = None) -> list[Lease]:
    """The open leases with an overdraft (of these accounts; None: of all), whose charges depend
    on what is left; oldest first."""
    some = OPEN_LEASE & _bounded
    if accounts is not None:
        some &= leases.c.account.in_(accounts)
    return lease_rows.where(connection, some)


def _owing(some: Iterable[tuple[Sequence[Any], Sequence[str]]], until: datetime) -> list[Due]:
    """What rows of leases, each with the models of its devices, owe."""
    found = []
    for (lease_id, user, name, account, rate, charged, started), models in some:
        amount = rules.owed(rate, started, until) - charged
        if amount > 0:
            reason = rules.charge_reason(models, ServerRef(user, name))
            found.append(Due(lease_id, account, charged, amount, reason))
    return found


def charge(connection: sa.Connection, found: Sequence[Due], until: datetime) -> None:
    """Post these charges: a transfer and two postings each, and what they make of the sums.

    Raises IntegrityError when one of them was posted before, and LedgerError when an account
    would have more than it can hold; then the transaction is to be given up.
    """
    if not found:
        return
    keys = [rules.charge_key(one.lease_id, one.charged) for one in found]
    ids = [rules.transfer_id(key) for key in keys]
    moved: dict[str, int] = {}
    for one in found:
        moved[one.account] = moved.get(one.account, 0) - one.amount
    try:
        book.move(connection, Posting(SYSTEM_USAGE, -sum(moved.values())), until)
        _many(connection, _MOVE, list(moved), list(moved.values()))
    except (IntegrityError, DataError):
        what = "an account would have more than an account can hold; refund what was charged"
        raise LedgerError(what=what) from None
    names, reasons = [one.lease_id for one in found], [one.reason for one in found]
    _many(connection, _transfers(until), ids, keys, reasons, names)
    lines = [
        (name, account, amount)
        for one, name in zip(found, ids, strict=True)
        for account, amount in ((SYSTEM_USAGE, one.amount), (one.account, -one.amount))
    ]
    _many(connection, _POSTINGS, *map(list, zip(*lines, strict=True)))
    _many(connection, _CHARGED, names, [one.charged + one.amount for one in found])


# Statements over many rows. SQLite is given row after row, which costs it nothing; PostgreSQL all
# of them in one statement, as arrays.


class _Statement(NamedTuple):
    """One statement for both databases, and the types of its columns."""

    rows: str
    """For one row of SQLite, with the columns in their order."""
    arrays: str
    """For all rows of PostgreSQL, from ``given (a, b, ...)``."""
    types: tuple[str, ...]
    constants: tuple[Any, ...] = ()
    """Parameters that are the same for all rows, after the others."""


_MOVE = _Statement(
    "UPDATE accounts SET balance = balance + ?2 WHERE name = ?1",
    "UPDATE accounts SET balance = balance + given.b FROM {given} WHERE name = given.a",
    ("text", "bigint"),
)
_CHARGED = _Statement(
    "UPDATE leases SET charged = ?2 WHERE id = ?1",
    "UPDATE leases SET charged = given.b FROM {given} WHERE id = given.a",
    ("text", "bigint"),
)
_POSTINGS = _Statement(
    "INSERT INTO postings (transfer_id, account, amount) VALUES (?1, ?2, ?3)",
    "INSERT INTO postings (transfer_id, account, amount) "
    "SELECT given.a, given.b, given.c FROM {given} ORDER BY given.n",
    ("text", "text", "bigint"),
)


def _transfers(until: datetime) -> _Statement:
    """Charges at a moment."""
    columns = "INSERT INTO transfers (id, key, reason, lease_id, at, kind, actor)"
    return _Statement(
        f"{columns} VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
        f"{columns} SELECT given.a, given.b, given.c, given.d, %s, %s, %s FROM {{given}}",  # nosec B608
        ("text", "text", "text", "text"),
        (until, TransferKind.CHARGE.value, rules.ACTOR_ACCOUNTING),
    )


def _many(connection: sa.Connection, statement: _Statement, *columns: list[Any]) -> None:
    """Run a statement for every row of these columns."""
    dialect = connection.dialect
    constants = [_as_driver(value, dialect) for value in statement.constants]
    if dialect.name == "sqlite":
        rows = zip(*columns, *([value] * len(columns[0]) for value in constants), strict=True)
        connection.exec_driver_sql(statement.rows, list(rows))
        return
    arrays = ", ".join(f"%s::{type_}[]" for type_ in statement.types)
    names = ", ".join("abcd"[: len(columns)])
    given = f"unnest({arrays}) WITH ORDINALITY AS given ({names}, n)"
    # The constants stand before the arrays, as the columns before the table.
    text = statement.arrays.format(given=given)
    connection.exec_driver_sql(text, (*constants, *columns))


def _as_driver(value: Any, dialect: sa.Dialect) -> Any:
    if not isinstance(value, datetime):
        return value
    convert = transfers.c.at.type.dialect_impl(dialect).bind_processor(dialect)
    return convert(value) if convert else value
