"""Everything a grant needs to know from the database, read in one statement.

The hub starts servers in threads beside its event loop, and each statement hands over Python's
lock. What a grant rarely needs (rates set by an admin, other servers on the same account) is
therefore only reported as present or absent, and read separately when it is needed.
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
from .host_resources import HostAmount
from .models import ServerRef
from .repository import CLOSED, HELD, PAYS, PLACES, RESERVED, kept_host

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
_LENGTH = len(_ALL.selected_columns)
_ALL_AND_HOST = _ALL.add_columns(*(each.scalar_subquery() for each in RESERVED))


@dataclass(frozen=True, slots=True)
class AllocationContext:
    """The state before a grant, at one moment."""

    lease_id: str | None
    """The server's open lease, if it has one."""
    taken: frozenset[str]
    """The occupied slots, as :func:`gpuspawner.leases.repository.places_taken` returns them."""
    has_rates: bool
    """True if an admin has set rates that apply now or later."""
    first_due: datetime | None
    """When the account's next lot expires whose expiry is not posted yet."""
    is_paying: bool
    """True if the account pays for a running server."""
    account: Account | None
    """The paying account, if it is open; amounts owed but not yet charged are not deducted."""
    is_former: bool
    """True if the server's member has lost their membership."""
    overdraft: int | None
    """The overdraft shared by the account's servers that may go into one, in microcredits.

    None if no server of the account has an overdraft.
    """
    kept: frozenset[str]
    """The UUIDs of the devices reserved for this server, which restarts with them."""
    reserved: HostAmount | None = None
    """What is reserved for others of the host's memory and CPU, if that was asked.

    For open leases, and for servers that restart.
    """


def read(
    connection: sa.Connection, server: ServerRef, account: str, *, with_host: bool = False
) -> AllocationContext:
    """Return what a grant to this server needs to know if ``account`` pays.

    ``with_host``: also what is reserved of the host, for which all open leases are read.
    """
    asked = {"member": server.user, "server": server.name, "keeper": keeper(server)}
    statement = _ALL_AND_HOST if with_host else _ALL
    found = connection.execute(statement, {**asked, "account": account}).one()
    lease_id, places, closed, has_rates, due, is_paying, balance, held, former, shared, kept = (
        found[:_LENGTH]
    )
    reserved = None
    if with_host:
        reserved = HostAmount(*map(int, found[_LENGTH:]))
        if closed:  # else nothing is kept for a restart either
            reserved += kept_host(connection, but=server)
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
        reserved=reserved,
    )
