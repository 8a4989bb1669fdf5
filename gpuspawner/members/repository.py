"""Rows of memberships and of the roster."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from ..db.schema import ENDED, OPEN_LEASE, OPEN_TICKET, leases, memberships, roster, tickets

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


def find_membership(
    connection: sa.Connection, user: str, *, lock: bool = False
) -> Membership | None:
    """What is known of somebody, if they ever were a member."""
    row = connection.execute(_LOCKED if lock else _ONE, {"member": user}).one_or_none()
    return Membership(*row) if row else None


def begin_membership(connection: sa.Connection, user: str, now: datetime) -> bool:
    """Write that somebody is a member, if nothing was known of them. True when it is new."""
    insert = _INSERT[connection.dialect.name].values(user=user, since=now)
    return connection.execute(insert).rowcount > 0


def update_membership(connection: sa.Connection, user: str, **values: Any) -> None:
    """Change some columns of one."""
    where = memberships.c.user == user
    connection.execute(sa.update(memberships).where(where).values(values))


def former_members(connection: sa.Connection) -> list[Membership]:
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


def members_with_leases(connection: sa.Connection) -> list[str]:
    """Who is no member any more and has a lease or waits in line, by name."""
    held = sa.select(leases.c.user).where(OPEN_LEASE)
    waiting = sa.select(tickets.c.user).where(OPEN_TICKET)
    some = memberships.c.user.in_(sa.union_all(held, waiting))
    query = sa.select(memberships.c.user).where(ENDED, some).order_by(memberships.c.user)
    return list(connection.execute(query).scalars())


_SEPARATOR = "\n"
_REMOVE = sa.delete(roster).where(
    roster.c.user == sa.bindparam("name"), roster.c.course == sa.bindparam("of")
)


@dataclass(frozen=True, slots=True)
class RosterEntry:
    """A line of the roster."""

    user: str
    """In small letters, as JupyterHub's authenticators write names."""
    course: str = ""
    """What they are a member for; nothing where a site has one roster."""
    groups: tuple[str, ...] = ()
    mail: str = ""
    starts_at: datetime | None = None
    """None: from ever."""
    ends_at: datetime | None = None
    """The first moment at which it holds no more; None: it has no end."""

    def holds(self, now: datetime) -> bool:
        """Whether somebody is a member by this line."""
        began = self.starts_at is None or self.starts_at <= now
        return began and (self.ends_at is None or now < self.ends_at)


def roster_of_user(connection: sa.Connection, user: str) -> list[RosterEntry]:
    """Every entry of a name, however it is written."""
    query = sa.select(roster).where(roster.c.user == user.lower()).order_by(roster.c.course)
    return [_entry(row) for row in connection.execute(query).mappings()]


def whole_roster(connection: sa.Connection) -> list[RosterEntry]:
    """The whole roster, by name and course."""
    query = sa.select(roster).order_by(roster.c.user, roster.c.course)
    return [_entry(row) for row in connection.execute(query).mappings()]


def put_roster(connection: sa.Connection, entries: Iterable[RosterEntry], now: datetime) -> None:
    """Write entries, each in the place of the one that was there for its name and course."""
    rows = [
        {
            **{name: getattr(entry, name) for name in RosterEntry.__dataclass_fields__},
            "groups": _SEPARATOR.join(entry.groups),
            "listed_at": now,
        }
        for entry in entries
    ]
    if rows:
        connection.execute(_REMOVE, [{"name": r["user"], "of": r["course"]} for r in rows])
        connection.execute(sa.insert(roster), rows)


def _entry(row: sa.RowMapping) -> RosterEntry:
    return RosterEntry(
        user=row["user"],
        course=row["course"],
        groups=tuple(row["groups"].split(_SEPARATOR)) if row["groups"] else (),
        mail=row["mail"],
        starts_at=row["starts_at"],
        ends_at=row["ends_at"],
    )
