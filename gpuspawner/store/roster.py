"""Rows of the roster: who is a member in which course, from when and until when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from .schema_members import roster

_SEPARATOR = "\n"
_REMOVE = sa.delete(roster).where(
    roster.c.user == sa.bindparam("name"), roster.c.course == sa.bindparam("of")
)


@dataclass(frozen=True, slots=True)
class Entry:
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


def of_user(connection: sa.Connection, user: str) -> list[Entry]:
    """Every entry of a name, however it is written."""
    query = sa.select(roster).where(roster.c.user == user.lower()).order_by(roster.c.course)
    return [_entry(row) for row in connection.execute(query).mappings()]


def every(connection: sa.Connection) -> list[Entry]:
    """The whole roster, by name and course."""
    query = sa.select(roster).order_by(roster.c.user, roster.c.course)
    return [_entry(row) for row in connection.execute(query).mappings()]


def put(connection: sa.Connection, entries: Iterable[Entry], now: datetime) -> None:
    """Write entries, each in the place of the one that was there for its name and course."""
    rows = [
        {
            **{name: getattr(entry, name) for name in Entry.__dataclass_fields__},
            "groups": _SEPARATOR.join(entry.groups),
            "listed_at": now,
        }
        for entry in entries
    ]
    if rows:
        connection.execute(_REMOVE, [{"name": r["user"], "of": r["course"]} for r in rows])
        connection.execute(sa.insert(roster), rows)


def _entry(row: sa.RowMapping) -> Entry:
    return Entry(
        user=row["user"],
        course=row["course"],
        groups=tuple(row["groups"].split(_SEPARATOR)) if row["groups"] else (),
        mail=row["mail"],
        starts_at=row["starts_at"],
        ends_at=row["ends_at"],
    )
