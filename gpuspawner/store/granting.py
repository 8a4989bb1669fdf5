"""What a grant must know of the store, read in one statement.

A hub that starts a server does so beside its event loop, and each statement is a hand-over of
Python's lock. So what a grant nearly always finds absent (rates that an admin set, other servers
on the same account) is only said to be there or not; who needs it reads it then. Which places are
taken is read where nobody knows it yet (see :mod:`.open_places`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from ..ledger.dry import OVERDRAFT
from ..model import Account, ServerRef
from . import open_places
from .closures import keeper
from .leases import CLOSED, HELD, PAYS, PLACES
from .prepared import Prepared
from .rates import HOLDS
from .schema import OPEN_LEASE, OPEN_LOT, accounts, closures, leases, lots, rates
from .schema_members import ENDED, memberships

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
        leases.c.when_dry == sa.literal_column(f"'{OVERDRAFT}'"),
        leases.c.rate > sa.literal_column("0"),
    )
    .order_by(leases.c.granted_at, leases.c.id)
    .limit(1)
)
_former = sa.select(memberships.c.user).where(memberships.c.user == sa.bindparam("member"), ENDED)
_held = HELD.where(leases.c.account == _of_account)
_space: Any = sa.literal_column("' '")
_kept = sa.select(sa.func.aggregate_strings(closures.c.subject, _space)).where(
    closures.c.actor == sa.bindparam("keeper", type_=sa.Text)
)


def _statement(places: Any) -> Prepared:
    return Prepared(
        sa.select(
            sa.select(leases.c.id).where(*_server, OPEN_LEASE).scalar_subquery(),
            places,
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
    )


_ALL = _statement(PLACES.scalar_subquery())
_REST = _statement(sa.null())
"""Where the places are known."""


@dataclass(frozen=True, slots=True)
class Known:
    """What there is before a grant, at one moment."""

    lease_id: str | None
    """The open lease of the server, if it has one."""
    taken: frozenset[str]
    """As :func:`gpuspawner.store.leases.places_taken` has it."""
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


def read(connection: sa.Connection, server: ServerRef, account: str) -> Known:
    """What a grant to this server, paid by this account, must know."""
    asked = {"member": server.user, "server": server.name, "keeper": keeper(server)}
    taken = open_places.known(connection)
    statement = _ALL if taken is None else _REST
    (found,) = statement.rows(connection, account=account, **asked)
    lease_id, places, closed, has_rates, due, is_paying, balance, held, former, shared, kept = found
    if taken is None:
        taken = frozenset((places or "").split())
        open_places.remember(connection, taken)
    return Known(
        lease_id=lease_id,
        taken=taken.union(closed.split()) if closed else taken,
        has_rates=has_rates,
        first_due=due,
        is_paying=is_paying,
        account=None if balance is None else Account(name=account, balance=balance, held=int(held)),
        is_former=former,
        overdraft=shared,
        kept=frozenset((kept or "").split()),
    )
