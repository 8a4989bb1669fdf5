"""Rows of memberships: who is a member, who was one, and why they are none any more."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from .schema import OPEN_LEASE, OPEN_TICKET, leases, tickets
from .schema_members import ENDED, memberships, roster

_ONE = sa.select(memberships).where(memberships.c.user == sa.bindparam("member"))
_LOCKED = _ONE.with_for_update()
_INSERT = {
    "sqlite": sqlite.insert(memberships).on_conflict_do_nothing(),
    "postgresql": postgresql.insert(memberships).on_conflict_do_nothing(),
}


@dataclass(frozen=True, slots=True)
class Membership:
    """What is known of somebody who signed in as a member."""

    user: str
    by_roster: bool
    """Whether it is the roster that lets them in."""
    since: datetime
    """When they signed in first."""
    ended_at: datetime | None
    """Since when they are no member any more; None: they are one."""
    reason: str
    """Why they are none any more."""
    actor: str
    """Who found that out."""
    welcomed_at: datetime | None
    """When they were shown the welcome page."""


def find(connection: sa.Connection, user: str, *, lock: bool = False) -> Membership | None:
    """What is known of somebody, if they ever were a member."""
    row = connection.execute(_LOCKED if lock else _ONE, {"member": user}).one_or_none()
    return Membership(*row) if row else None


def begin(connection: sa.Connection, user: str, now: datetime) -> bool:
    """Write that somebody is a member, if nothing was known of them. True when it is new."""
    insert = _INSERT[connection.dialect.name].values(user=user, since=now)
    return connection.execute(insert).rowcount > 0


def update(connection: sa.Connection, user: str, **values: Any) -> None:
    """Change some columns of one."""
    where = memberships.c.user == user
    connection.execute(sa.update(memberships).where(where).values(values))


def former(connection: sa.Connection) -> list[Membership]:
    """Everybody who is no member any more, by name."""
    query = sa.select(memberships).where(ENDED).order_by(memberships.c.user)
    return [Membership(*row) for row in connection.execute(query)]


def to_compare(connection: sa.Connection, now: datetime) -> list[Membership]:
    """Of those whom the roster let in: members without an entry that holds, and former ones with
    one. The names of others need no look."""
    holds = sa.exists().where(
        roster.c.user == sa.func.lower(memberships.c.user),
        sa.or_(roster.c.starts_at.is_(None), roster.c.starts_at <= now),
        sa.or_(roster.c.ends_at.is_(None), roster.c.ends_at > now),
    )
    query = sa.select(memberships).where(
        memberships.c.by_roster, sa.or_(sa.and_(~ENDED, ~holds), sa.and_(ENDED, holds))
    )
    return [Membership(*row) for row in connection.execute(query.order_by(memberships.c.user))]


def holding(connection: sa.Connection) -> list[str]:
    """Who is no member any more and has a lease or waits in line, by name."""
    held = sa.select(leases.c.user).where(OPEN_LEASE)
    waiting = sa.select(tickets.c.user).where(OPEN_TICKET)
    some = memberships.c.user.in_(sa.union_all(held, waiting))
    query = sa.select(memberships.c.user).where(ENDED, some).order_by(memberships.c.user)
    return list(connection.execute(query).scalars())
