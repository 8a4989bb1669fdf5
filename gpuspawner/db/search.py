"""Searches for accounts, leases and audit log entries, page by page."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import sqlalchemy as sa

from ..db.audit_log import AuditEntry
from ..leases import repository as leases_repository
from ..leases.models import Lease
from ..ledger.models import Account
from .schema import accounts, audit, leases

_HELD = leases_repository.HELD.where(leases.c.account == accounts.c.name).scalar_subquery()

LONGEST = 200
"""Maximum characters of a search text; no name is longer."""


class Accounts(NamedTuple):
    """Some accounts, by name."""

    found: list[Account]
    following: str | None
    """The name after which the next page starts; None on the last one."""


class Leases(NamedTuple):
    """Some leases, last granted first."""

    found: list[Lease]
    older: str | None
    """The lease after which the next page starts; None on the last one."""


class Trail(NamedTuple):
    """Some of the admins' changes, newest first."""

    changes: list[AuditEntry]
    older: int | None
    """The id before which the next page starts; None on the last one."""


def find_accounts(
    connection: sa.Connection,
    text: str = "",
    after: str = "",
    limit: int = 50,
    among: Collection[str] | None = None,
) -> Accounts:
    """Find people's accounts with this text in their names, in any case; ``among``: only these."""
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


def find_leases(
    connection: sa.Connection,
    *,
    user: str | None = None,
    account: str | None = None,
    text: str = "",
    before: str | None = None,
    limit: int = 50,
) -> Leases:
    """Find the newest leases of a user or account, granted before one. Raises UnknownLease.

    ``text``: only those with this in the user, server, account or environment, in any case.
    """
    order = (leases.c.granted_at.desc(), leases.c.id.desc())
    query = sa.select(leases.c.id).order_by(*order).limit(limit + 1)
    if user is not None:
        query = query.where(leases.c.user == user)
    if account is not None:
        query = query.where(leases.c.account == account)
    if text:
        part = text[:LONGEST].lower()
        columns = (leases.c.user, leases.c.server_name, leases.c.account, leases.c.environment)
        query = query.where(
            sa.or_(*(sa.func.lower(c).contains(part, autoescape=True) for c in columns))
        )
    if before is not None:
        last = leases_repository.get(connection, before)
        same = sa.and_(leases.c.granted_at == last.granted_at, leases.c.id < last.id)
        # The first condition follows from the second, and lets the database use its index.
        earlier = sa.or_(leases.c.granted_at < last.granted_at, same)
        query = query.where(leases.c.granted_at <= last.granted_at, earlier)
    ids = list(connection.execute(query).scalars())
    found = leases_repository.where(connection, leases.c.id.in_(ids[:limit]))
    found.sort(key=lambda lease: (lease.granted_at, lease.id), reverse=True)
    return Leases(found, found[-1].id if len(ids) > limit else None)


def find_changes(
    connection: sa.Connection, text: str = "", before: int | None = None, limit: int = 50
) -> Trail:
    """Find the admins' changes that contain this text, case-insensitively."""
    columns = (audit.c.at, audit.c.actor, audit.c.action, audit.c.subject, audit.c.detail)
    query = sa.select(*columns, audit.c.id).order_by(audit.c.id.desc()).limit(limit + 1)
    if before is not None:
        query = query.where(audit.c.id < before)
    if text:
        part = text[:LONGEST].lower()
        query = query.where(
            sa.or_(*(sa.func.lower(c).contains(part, autoescape=True) for c in columns[1:]))
        )
    found = [AuditEntry(*row) for row in connection.execute(query)]
    return Trail(found[:limit], found[limit - 1].id if len(found) > limit else None)
