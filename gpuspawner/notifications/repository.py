"""Rows of notices, which wait here until they are sent, and of members' choices.

A notice is added inside the transaction of what it reports, so it is sent exactly if that happened.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from ..db.schema import UNSENT, notice_choices, notices
from .models import Notice, NoticeKind

LONGEST_ERROR = 2000
PARAMETERS = 500
"""Ids in one statement; SQLite limits the number of parameters."""


@dataclass(frozen=True, slots=True)
class ChannelChoice:
    """A member's choice for one channel."""

    channel: str
    address: str = ""
    """The address; empty for a channel that needs none."""
    kinds: frozenset[NoticeKind] = frozenset()
    """Of what to notify; empty means nothing."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of sending a notice: sent, or another failed try."""

    sent_at: datetime | None
    tries: int
    error: str = ""
    """The channels that still fail, in the format of :func:`errors_text`."""


def add(connection: sa.Connection, notice: Notice) -> bool:
    """Insert a notice. Returns False if its key is known: nothing is reported twice."""
    if told(connection, [notice.key]):
        return False
    row = {name: getattr(notice, name) for name in ("key", "user", "title", "body", "at")}
    row |= {"kind": notice.kind.value, "facts": json.dumps(dict(notice.facts))}
    connection.execute(sa.insert(notices), row)
    return True


def told(connection: sa.Connection, keys: Collection[str]) -> set[str]:
    """Return those of these keys that are known."""
    query = sa.select(notices.c.key).where(notices.c.key.in_(keys))
    return set(connection.execute(query).scalars())


def of_user(connection: sa.Connection, user: str, limit: int = 20) -> list[Notice]:
    """Return a member's newest notices, newest first."""
    query = sa.select(notices).where(notices.c.user == user).order_by(notices.c.id.desc())
    return [_notice(row) for row in connection.execute(query.limit(limit)).mappings()]


def unsent(connection: sa.Connection, since: datetime, tries: int) -> list[int]:
    """Return ids of unsent notices after ``since`` with fewer tries; oldest first."""
    due = (UNSENT, notices.c.at > since, notices.c.tries < tries)
    query = sa.select(notices.c.id).where(*due).order_by(notices.c.id)
    return list(connection.execute(query).scalars())


def some(connection: sa.Connection, ids: Iterable[int]) -> list[Notice]:
    """Return those of the notices that exist, oldest first."""
    found: list[Notice] = []
    for part in _parts(sorted(ids)):
        query = sa.select(notices).where(notices.c.id.in_(part)).order_by(notices.c.id)
        found += [_notice(row) for row in connection.execute(query).mappings()]
    return found


def mark(connection: sa.Connection, outcomes: Mapping[int, Outcome]) -> None:
    """Record the results of notices, by id."""
    for notice, outcome in outcomes.items():
        change = sa.update(notices).where(notices.c.id == notice).values(asdict(outcome))
        connection.execute(change)


def choices(
    connection: sa.Connection, users: Collection[str]
) -> dict[str, dict[str, ChannelChoice]]:
    """Return the choices of these members, by member and channel."""
    known = {kind.value: kind for kind in NoticeKind}  # another version may know more
    found: dict[str, dict[str, ChannelChoice]] = {user: {} for user in users}
    for part in _parts(sorted(users)):
        query = sa.select(notice_choices).where(notice_choices.c.user.in_(part))
        for row in connection.execute(query):
            kinds = frozenset(known[word] for word in row.kinds.split() if word in known)
            found[row.user][row.channel] = ChannelChoice(row.channel, row.address, kinds)
    return found


def choose(connection: sa.Connection, user: str, chosen: Iterable[ChannelChoice]) -> None:
    """Store a member's choices; those for other channels stay as they are."""
    for choice in chosen:
        mine = (notice_choices.c.user == user) & (notice_choices.c.channel == choice.channel)
        connection.execute(sa.delete(notice_choices).where(mine))
        kinds = " ".join(sorted(kind.value for kind in choice.kinds))
        row = {"user": user, "channel": choice.channel, "address": choice.address, "kinds": kinds}
        connection.execute(sa.insert(notice_choices).values(row))


def errors_text(errors: Mapping[str, str]) -> str:
    """Format why each channel failed, a line for each, to store with the notice."""
    if not errors:
        return ""
    room = LONGEST_ERROR // len(errors)
    return "\n".join(f"{name}: {' '.join(why.split())[:room]}" for name, why in errors.items())


def failing(error: str) -> dict[str, str]:
    """Parse such a text into the channels, with why each failed."""
    lines = (line.partition(":") for line in error.splitlines())
    return {channel: why.strip() for channel, _, why in lines if channel}


def _parts(values: list[Any]) -> Iterable[list[Any]]:
    return (values[start : start + PARAMETERS] for start in range(0, len(values), PARAMETERS))


def _notice(row: Any) -> Notice:
    kind, facts = NoticeKind(row["kind"]), json.loads(row["facts"])
    return Notice(**{**row, "kind": kind, "facts": facts})
