"""Accounts, transfers and the audit trail, found and told page by page."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import sqlalchemy as sa

from ..errors import UnknownTransfer
from ..ledger.entries import Posting, Transfer, TransferKind
from ..model import Account
from . import leases as lease_rows
from .closures import Change
from .schema import accounts, audit, leases, postings, transfers

_HELD = lease_rows.HELD.where(leases.c.account == accounts.c.name).scalar_subquery()

LONGEST = 200
"""Characters of what is searched for; no name is longer."""


class Accounts(NamedTuple):
    """Some accounts, by name."""

    found: list[Account]
    following: str | None
    """The name that the next page comes after; None on the last one."""


class Trail(NamedTuple):
    """Some of what admins changed, newest first."""

    changes: list[Change]
    older: int | None
    """What the next page comes before; None on the last one."""


def find_accounts(
    connection: sa.Connection,
    text: str = "",
    after: str = "",
    limit: int = 50,
    among: Collection[str] | None = None,
) -> Accounts:
    """The accounts with this text in their names, compared without case; ``among`` these only.

    The ledger's own are not among them.
    """
    query = (
        sa.select(accounts.c.name, accounts.c.balance, _HELD)
        .where(accounts.c.name > after, ~accounts.c.name.startswith("system:"))
        .order_by(accounts.c.name)
        .limit(limit + 1)
    )
    if text:
        name = sa.func.lower(accounts.c.name)
        query = query.where(name.contains(text[:LONGEST].lower(), autoescape=True))
    if among is not None:
        query = query.where(accounts.c.name.in_(sorted(among)))
    found = [Account(name=n, balance=b, held=int(h)) for n, b, h in connection.execute(query)]
    following = found[limit - 1].name if len(found) > limit else None
    return Accounts(found[:limit], following)


def transfer(connection: sa.Connection, transfer_id: str) -> Transfer:
    """One transfer. Raises UnknownTransfer."""
    query = sa.select(transfers).where(transfers.c.id == transfer_id)
    row = connection.execute(query).mappings().first()
    if row is None:
        raise UnknownTransfer(transfer=transfer_id)
    lines = sa.select(postings.c.account, postings.c.amount).where(
        postings.c.transfer_id == transfer_id
    )
    return Transfer(
        **{name: row[name] for name in row if name != "kind"},
        kind=TransferKind(row["kind"]),
        postings=tuple(Posting(*line) for line in connection.execute(lines)),
    )


def find_changes(
    connection: sa.Connection, text: str = "", before: int | None = None, limit: int = 50
) -> Trail:
    """What admins changed, with this text in it, compared without case."""
    columns = (audit.c.at, audit.c.actor, audit.c.action, audit.c.subject, audit.c.detail)
    query = sa.select(*columns, audit.c.id).order_by(audit.c.id.desc()).limit(limit + 1)
    if before is not None:
        query = query.where(audit.c.id < before)
    if text:
        part = text[:LONGEST].lower()
        query = query.where(
            sa.or_(*(sa.func.lower(c).contains(part, autoescape=True) for c in columns[1:]))
        )
    found = [Change(*row) for row in connection.execute(query)]
    return Trail(found[:limit], found[limit - 1].id if len(found) > limit else None)
