"""Rows of lots: credits that end, and what moves on an account beside them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import sqlalchemy as sa

from ..ledger.entries import TransferKind
from ..ledger.lots import Flow, Lot, Use
from ..ledger.rules import reversal_key
from ..model import LeaseState
from .schema import APART, OPEN_LOT, leases, lots, postings, transfers

_FIELDS = (
    "transfer_id",
    "account",
    "amount",
    "starts_at",
    "ends_at",
    "cancelled_at",
    "closed_at",
    "taken",
    "takes",
)
_account = lots.c.account == sa.bindparam("account")
_FIRST_DUE = sa.select(sa.func.min(lots.c.ends_at)).where(_account, OPEN_LOT)
_NEWEST_CLOSED = sa.select(sa.func.max(lots.c.ends_at)).where(
    _account, lots.c.closed_at.isnot(None)
)
_DUE = sa.select(lots.c.account).where(OPEN_LOT, lots.c.ends_at <= sa.bindparam("now")).distinct()


def insert(connection: sa.Connection, lot: Lot) -> None:
    """Write a lot, in the transaction of its grant."""
    row = {name: getattr(lot, name) for name in _FIELDS[1:5]}
    connection.execute(sa.insert(lots), {"transfer_id": lot.id, **row})


def of_account(connection: sa.Connection, account: str) -> list[Lot]:
    """Every lot that the account ever had, the one that ends first being first."""
    query = (
        sa.select(*(lots.c[name] for name in _FIELDS))
        .where(lots.c.account == account)
        .order_by(lots.c.ends_at, lots.c.starts_at, lots.c.transfer_id)
    )
    return [_lot(row) for row in connection.execute(query)]


def of_transfer(connection: sa.Connection, transfer: str) -> Lot | None:
    """The lot that a transfer gave, if it gave one."""
    query = sa.select(*(lots.c[name] for name in _FIELDS)).where(lots.c.transfer_id == transfer)
    row = connection.execute(query).first()
    return _lot(row) if row else None


def update(connection: sa.Connection, lot: str, **values: Any) -> None:
    """Change fields of a lot."""
    connection.execute(sa.update(lots).where(lots.c.transfer_id == lot).values(values))


def due(connection: sa.Connection, now: datetime) -> list[str]:
    """The accounts with a lot whose end has come and is not written down yet."""
    return list(connection.execute(_DUE, {"now": now}).scalars())


def first_due(connection: sa.Connection, account: str) -> datetime | None:
    """When the first lot of an account ends whose end is not written down yet."""
    found: datetime | None = connection.execute(_FIRST_DUE, {"account": account}).scalar()
    return found


def closed_since(connection: sa.Connection, account: str, since: datetime) -> bool:
    """Whether the account has a lot that ended after that and whose end is written down."""
    newest = connection.execute(_NEWEST_CLOSED, {"account": account}).scalar()
    return newest is not None and newest > since


def flow(connection: sa.Connection, account: str) -> Flow:
    """What moved and moves on an account beside its lots.

    What a lease costs is told by its times, but for what an admin gave back: of its charges, one
    a minute, none is read.
    """
    back = transfers.c.key.like("refund:%")
    query = (
        sa.select(transfers.c.at, postings.c.amount, transfers.c.lease_id, back)
        .join(postings, postings.c.transfer_id == transfers.c.id)
        .outerjoin(lots, lots.c.transfer_id == transfers.c.id)
        .where(
            postings.c.account == account,
            APART,
            lots.c.transfer_id.is_(None),
            transfers.c.key.not_in(_reversals(connection, account)),
            transfers.c.kind != TransferKind.EXPIRY.value,
        )
        .order_by(postings.c.id)
    )
    rows = connection.execute(query).all()
    refunded: dict[str, int] = {}
    for _, amount, lease, is_back in rows:
        if is_back:
            refunded[lease] = refunded.get(lease, 0) + amount
    return Flow(_uses(connection, account, refunded), [(row[0], row[1]) for row in rows])


def _reversals(connection: sa.Connection, account: str) -> list[str]:
    """The keys of the reversals of lots: they are the lots' own end."""
    query = sa.select(lots.c.transfer_id).where(
        lots.c.account == account, lots.c.cancelled_at.isnot(None)
    )
    return [reversal_key(name) for name in connection.execute(query).scalars()]


def _uses(connection: sa.Connection, account: str, refunded: dict[str, int]) -> list[Use]:
    query = sa.select(
        leases.c.id,
        leases.c.rate,
        leases.c.started_at,
        leases.c.ended_at,
        leases.c.state,
        leases.c.charged,
    ).where(leases.c.account == account, leases.c.rate > 0, leases.c.started_at.isnot(None))
    return [
        Use(
            rate,
            started_at,
            ended_at,
            None if state != LeaseState.ENDED.value else charged + refunded.get(name, 0),
        )
        for name, rate, started_at, ended_at, state, charged in connection.execute(query)
    ]


def _lot(row: Any) -> Lot:
    values = dict(zip(_FIELDS, row, strict=True))
    return Lot(id=values.pop("transfer_id"), **values)
