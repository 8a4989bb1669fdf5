"""The charges of a tick, all at once: what thousands of leases owe is a few statements.

What is written is what :func:`gpuspawner.store.book.post` writes of one charge after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
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

_RUNNING = Prepared(
    sa.select(
        leases.c.id,
        leases.c.user,
        leases.c.server_name,
        leases.c.account,
        leases.c.rate,
        leases.c.charged,
        leases.c.started_at,
    ).where(
        OPEN_LEASE,
        leases.c.state == LeaseState.RUNNING.value,
        leases.c.rate > 0,
        leases.c.when_dry != OVERDRAFT,  # whose charges have a bound, one by one
    )
)
_MODELS = Prepared(sa.select(lease_places.c.lease_id, lease_places.c.model).where(OPEN_PLACE))


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
    found = []
    for lease_id, user, name, account, rate, charged, started in _RUNNING.rows(connection):
        amount = rules.owed(rate, started, until) - charged
        if amount > 0:
            server = ServerRef(user, name)
            reason = rules.charge_reason(models.get(lease_id, ()), server)
            found.append(Due(lease_id, account, charged, amount, reason))
    return found


def bounded(connection: sa.Connection) -> list[Lease]:
    """The open leases with an overdraft, whose charges depend on what is left; oldest first."""
    return lease_rows.where(connection, OPEN_LEASE & (leases.c.when_dry == OVERDRAFT))


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
        f"{columns} SELECT given.a, given.b, given.c, given.d, %s, %s, %s FROM {{given}}",
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
