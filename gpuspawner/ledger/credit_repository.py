"""Rows of lots and of recurring refills."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from ..core.errors import UnknownRefill
from ..db.schema import (
    APART,
    OPEN_LOT,
    accounts,
    leases,
    lots,
    postings,
    refill_runs,
    refills,
    transfers,
)
from ..leases.models import LeaseState
from .lots import Lot, LotFlow, LotUse
from .models import Account, TransferKind
from .refills import Mode, Recurrence, Refill
from .rules import reversal_key

_account = lots.c.account == sa.bindparam("account")
_FIRST_DUE = sa.select(sa.func.min(lots.c.ends_at)).where(_account, OPEN_LOT)
_NEWEST_CLOSED = sa.select(sa.func.max(lots.c.ends_at)).where(_account, ~OPEN_LOT)
_DUE = sa.select(lots.c.account).where(OPEN_LOT, lots.c.ends_at <= sa.bindparam("now")).distinct()


def insert_lot(connection: sa.Connection, lot: Lot) -> None:
    """Insert a lot, in the transaction of its grant."""
    row = {name: getattr(lot, name) for name in ("account", "amount", "starts_at", "ends_at")}
    connection.execute(sa.insert(lots), {"transfer_id": lot.id, **row})


def lots_of_account(connection: sa.Connection, account: str) -> list[Lot]:
    """Return every lot that the account ever had, first to end first."""
    query = sa.select(lots).where(lots.c.account == account)
    ordered = query.order_by(lots.c.ends_at, lots.c.starts_at, lots.c.transfer_id)
    return [_lot(row) for row in connection.execute(ordered).mappings()]


def lots_of_transfer(connection: sa.Connection, transfer: str) -> Lot | None:
    """Return the lot that a transfer created, if it did."""
    query = sa.select(lots).where(lots.c.transfer_id == transfer)
    row = connection.execute(query).mappings().first()
    return _lot(row) if row else None


def update_lot(connection: sa.Connection, lot: str, **values: Any) -> None:
    """Change fields of a lot."""
    connection.execute(sa.update(lots).where(lots.c.transfer_id == lot).values(values))


def lots_due(connection: sa.Connection, now: datetime) -> list[str]:
    """Return the accounts with a lot whose end has come and is not recorded yet."""
    return list(connection.execute(_DUE, {"now": now}).scalars())


def first_lot_due(connection: sa.Connection, account: str) -> datetime | None:
    """Return the earliest end of an account's lots whose end is not recorded yet."""
    found: datetime | None = connection.execute(_FIRST_DUE, {"account": account}).scalar()
    return found


def lots_closed_since(connection: sa.Connection, account: str, since: datetime) -> bool:
    """Return True if the account has a lot that ended after this and whose end is recorded."""
    newest = connection.execute(_NEWEST_CLOSED, {"account": account}).scalar()
    return newest is not None and newest > since


def flow_of_account(connection: sa.Connection, account: str) -> LotFlow:
    """Return what moved on an account apart from its lots.

    The cost of a lease follows from its times, except for refunds by admins: none of its charges,
    one a minute, is read.
    """
    back = transfers.c.key.like("refund:%")
    cancelled = sa.select(lots.c.transfer_id).where(
        lots.c.account == account, lots.c.cancelled_at.isnot(None)
    )
    # A lot's reversal is the lot's own end.
    reversals = [reversal_key(name) for name in connection.execute(cancelled).scalars()]
    query = (
        sa.select(transfers.c.at, postings.c.amount, transfers.c.lease_id, back)
        .join(postings, postings.c.transfer_id == transfers.c.id)
        .outerjoin(lots, lots.c.transfer_id == transfers.c.id)
        .where(
            postings.c.account == account,
            APART,
            lots.c.transfer_id.is_(None),
            transfers.c.key.not_in(reversals),
            transfers.c.kind != TransferKind.EXPIRY.value,
        )
        .order_by(postings.c.id)
    )
    rows = connection.execute(query).all()
    refunded: dict[str, int] = {}
    for _, amount, lease, is_back in rows:
        if is_back:
            refunded[lease] = refunded.get(lease, 0) + amount
    return LotFlow(_uses(connection, account, refunded), [(row[0], row[1]) for row in rows])


def _uses(connection: sa.Connection, account: str, refunded: dict[str, int]) -> list[LotUse]:
    query = sa.select(
        leases.c.id,
        leases.c.rate,
        leases.c.started_at,
        leases.c.ended_at,
        leases.c.state,
        leases.c.charged,
    ).where(leases.c.account == account, leases.c.rate > 0, leases.c.started_at.isnot(None))
    return [
        LotUse(
            rate,
            started_at,
            ended_at,
            None if state != LeaseState.ENDED.value else charged + refunded.get(name, 0),
        )
        for name, rate, started_at, ended_at, state, charged in connection.execute(query)
    ]


def _lot(row: Any) -> Lot:
    values = dict(row)
    return Lot(id=values.pop("transfer_id"), **values)


@dataclass(frozen=True, slots=True)
class RefillRun:
    """An occurrence that was granted."""

    occurrence: datetime
    at: datetime
    """When it was granted: later than the occurrence if the service was down."""
    accounts: int
    """How many got something."""
    total: int
    """Microcredits."""


_SAME = ("id", "amount", "cap", "reason", "made_at", "made_by", "next_at", "ended_at")
"""What a refill and its row have in common."""
_RECURRENCE = ("rule", "zone", "starts_at")


def insert_refill(connection: sa.Connection, refill: Refill) -> None:
    """Insert a refill."""
    row = {name: getattr(refill, name) for name in _SAME}
    row |= {name: getattr(refill.recurrence, name) for name in _RECURRENCE}
    row |= {
        "mode": refill.mode.value,
        "audience": json.dumps(refill.audience),
        "keep_seconds": None if refill.keep is None else round(refill.keep.total_seconds()),
    }
    connection.execute(sa.insert(refills).values(row))


def find_refill(connection: sa.Connection, refill_id: str, *, lock: bool = False) -> Refill | None:
    """Return the refill with this id, if there is one."""
    query = sa.select(refills).where(refills.c.id == refill_id)
    row = connection.execute(query.with_for_update() if lock else query).mappings().first()
    return _refill(row) if row is not None else None


def get_refill(connection: sa.Connection, refill_id: str, *, lock: bool = False) -> Refill:
    """Return a refill. Raises UnknownRefill."""
    if found := find_refill(connection, refill_id, lock=lock):
        return found
    raise UnknownRefill(refill=refill_id)


def all_refills(connection: sa.Connection, *, ended: bool = False) -> list[Refill]:
    """Return every refill, oldest first; those that an admin ended only on request."""
    query = sa.select(refills).order_by(refills.c.made_at, refills.c.id)
    if not ended:
        query = query.where(refills.c.ended_at.is_(None))
    return [_refill(row) for row in connection.execute(query).mappings()]


def refills_due(connection: sa.Connection, now: datetime) -> list[Refill]:
    """Return the refills with an occurrence that is due, longest overdue first."""
    query = (
        sa.select(refills)
        .where(refills.c.ended_at.is_(None), refills.c.next_at <= now)
        .order_by(refills.c.next_at, refills.c.id)
    )
    return [_refill(row) for row in connection.execute(query).mappings()]


def end_refill(connection: sa.Connection, refill_id: str, at: datetime) -> None:
    """End a refill: it has no further occurrences."""
    connection.execute(sa.update(refills).where(refills.c.id == refill_id).values(ended_at=at))


def note_refill_run(
    connection: sa.Connection, refill_id: str, run: RefillRun, next_at: datetime | None
) -> None:
    """Record that an occurrence was granted, and which one is next."""
    connection.execute(sa.insert(refill_runs).values(refill_id=refill_id, **asdict(run)))
    connection.execute(sa.update(refills).where(refills.c.id == refill_id).values(next_at=next_at))


def runs_of_refill(connection: sa.Connection, refill_id: str, limit: int = 20) -> list[RefillRun]:
    """Return the latest granted occurrences, newest first."""
    query = sa.select(refill_runs).where(refill_runs.c.refill_id == refill_id)
    newest = query.order_by(refill_runs.c.occurrence.desc()).limit(limit)
    return [RefillRun(*row[1:]) for row in connection.execute(newest)]


def accounts_since(connection: sa.Connection) -> Sequence[tuple[Account, datetime]]:
    """Return every account but the ledger's own, with its opening time, by name; without holds."""
    query = sa.select(accounts).order_by(accounts.c.name)
    return [
        (Account(name=row["name"], balance=row["balance"]), row["opened_at"])
        for row in connection.execute(query).mappings()
        if not row["name"].startswith("system:")
    ]


def _refill(row: Any) -> Refill:
    keep = row["keep_seconds"]
    return Refill(
        recurrence=Recurrence(*(row[name] for name in _RECURRENCE)),
        mode=Mode(row["mode"]),
        audience=tuple(json.loads(row["audience"])),
        keep=None if keep is None else timedelta(seconds=keep),
        **{name: row[name] for name in _SAME},
    )
