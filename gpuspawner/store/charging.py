"""The charges of a tick, many at once: what thousands of leases owe is a few statements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa

from ..ledger import rules
from ..ledger.dry import OVERDRAFT
from ..model import Lease, LeaseState, ServerRef
from . import book
from . import leases as lease_rows
from .schema import OPEN_LEASE, OPEN_PLACE, lease_places, leases

_SELECTED = (
    leases.c.id,
    leases.c.user,
    leases.c.server_name,
    leases.c.account,
    leases.c.rate,
    leases.c.charged,
    leases.c.started_at,
)
_bounded = leases.c.when_dry == OVERDRAFT
"""Whose charges have a bound, one by one."""
_costs = sa.and_(
    OPEN_LEASE,
    leases.c.state == LeaseState.RUNNING.value,
    leases.c.rate > 0,
)
_RUNNING = sa.select(*_SELECTED).where(_costs, ~_bounded)
_MODELS = sa.select(lease_places.c.lease_id, lease_places.c.model).where(OPEN_PLACE)
_CHARGED = sa.update(leases).where(leases.c.id == sa.bindparam("lease"))
_TOO_MUCH = "an account would have more than an account can hold; refund what was charged"

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
    _PORTION[_name] = (
        sa.select(*_SELECTED, lease_places.c.model)
        .select_from(leases.outerjoin(lease_places))
        .where(leases.c.id.in_(_some.limit(sa.bindparam("most", type_=sa.Integer))))
    )
    _ACCOUNTS[_name] = sa.select(leases.c.account).where(_costs, _bounded, _begun).distinct()


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
    for lease_id, model in connection.execute(_MODELS):
        models.setdefault(lease_id, []).append(model)
    rows = connection.execute(_RUNNING).all()
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
    for row in connection.execute(_PORTION[name], {**asked, "most": most}):
        _, models = found.setdefault(row[0], (row[:-1], []))
        if row[-1] is not None:
            models.append(row[-1])
    paying = connection.execute(_ACCOUNTS[name], asked).scalars().all()
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

    One that was posted before is taken once. Raises LedgerError when it was of another amount, or
    an account would have more than it can hold; then the transaction is to be given up.
    """
    if not found:
        return
    made = [
        rules.charge_transfer(one.lease_id, one.account, one.charged, one.amount, until, one.reason)
        for one in found
    ]
    book.post_many(connection, made, _TOO_MUCH)
    sums = [{"lease": one.lease_id, "charged": one.charged + one.amount} for one in found]
    connection.execute(_CHARGED, sums)
