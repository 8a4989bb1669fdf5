"""What a grant must know of the store, read in one statement.

A hub that starts a server does so beside its event loop, and each statement is a hand-over of
Python's lock. So what a grant nearly always finds absent (rates that an admin set, other servers
on the same account) is only said to be there or not; who needs it reads it then.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from ..db.schema import (
    ENDED,
    OPEN_LEASE,
    OPEN_LOT,
    accounts,
    closures,
    leases,
    lots,
    memberships,
    rates,
)
from ..devices.closures import keeper
from ..ledger.credit_policy import OVERDRAFT
from ..ledger.models import Account
from ..ledger.repository import HOLDS
from .models import ServerRef
from .repository import CLOSED, HELD, PAYS, PLACES

_of_account = sa.bindparam("account", type_=sa.Text)
_server = (
    leases.c.user == sa.bindparam("member"),
    leases.c.server_name == sa.bindparam("server"),
)
_paying = sa.select(leases.c.id).where(PAYS, leases.c.account == _of_account)
_due = sa.select(sa.func.min(lots.c.ends_at)).where(OPEN_LOT, lots.c.account == _of_account)
_balance = sa.select(accounts.c.balance).where(accounts.c.name == _of_account)
_shared = (
    sa.select(leases.c.overdraft)
    .where(
        OPEN_LEASE,
        leases.c.account == _of_account,
        leases.c.when_dry == OVERDRAFT,
        leases.c.rate > 0,
    )
    .order_by(leases.c.granted_at, leases.c.id)
    .limit(1)
)
_former = sa.select(memberships.c.user).where(memberships.c.user == sa.bindparam("member"), ENDED)
_held = HELD.where(leases.c.account == _of_account)
_kept = sa.select(sa.func.aggregate_strings(closures.c.subject, " ")).where(
    closures.c.actor == sa.bindparam("keeper", type_=sa.Text)
)
_ALL = sa.select(
    sa.select(leases.c.id).where(*_server, OPEN_LEASE).scalar_subquery(),
    PLACES.scalar_subquery(),
    CLOSED.scalar_subquery(),
    sa.exists(sa.select(rates.c.id).where(HOLDS)),
    _due.scalar_subquery(),
    sa.exists(_paying),
    _balance.scalar_subquery(),
    _held.scalar_subquery(),
    sa.exists(_former),
    _shared.scalar_subquery(),
    _kept.scalar_subquery(),
)


@dataclass(frozen=True, slots=True)
class AllocationContext:
    """What there is before a grant, at one moment."""

    lease_id: str | None
    """The open lease of the server, if it has one."""
    taken: frozenset[str]
    """As :func:`gpuspawner.leases.repository.places_taken` has it."""
    has_rates: bool
    """Whether an admin set any that hold or will."""
    first_due: datetime | None
    """When the first lot of the account ends whose end is not written down yet."""
    is_paying: bool
    """Whether the account pays for a server that runs."""
    account: Account | None
    """The account that is to pay, if it is open; less nothing that is owed and not charged."""
    is_former: bool
    """Whether the server's member is none any more."""
    overdraft: int | None
    """The overdraft of the account that servers which go on share, in microcredits; None where
    none of them has one."""
    kept: frozenset[str]
    """The UUIDs of the devices that are kept for the server, which starts again with them."""


def read(connection: sa.Connection, server: ServerRef, account: str) -> AllocationContext:
    """What a grant to this server, paid by this account, must know."""
    asked = {"member": server.user, "server": server.name, "keeper": keeper(server)}
    found = connection.execute(_ALL, {**asked, "account": account}).one()
    lease_id, places, closed, has_rates, due, is_paying, balance, held, former, shared, kept = found
    return AllocationContext(
        lease_id=lease_id,
        taken=frozenset(" ".join(filter(None, (places, closed))).split()),
        has_rates=has_rates,
        first_due=due,
        is_paying=is_paying,
        account=None if balance is None else Account(name=account, balance=balance, held=int(held)),
        is_former=former,
        overdraft=shared,
        kept=frozenset((kept or "").split()),
    )
