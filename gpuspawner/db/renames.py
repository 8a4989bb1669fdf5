"""Rows of renames of members.

A renamed member has the new name in each of their rows, but the chain's hashes cover the old one:
verification asks here what an account was called when something was posted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from ..ledger.models import member_account
from .schema import renames

_ALL = sa.select(renames).order_by(renames.c.id.desc())


@dataclass(frozen=True, slots=True)
class Rename:
    """A rename of a member."""

    id: int
    at: datetime
    actor: str
    old: str
    new: str
    posting: int
    """The newest posting at that time; 0 if there was none."""
    kept: frozenset[int]
    """Postings up to that one that the account of the new name had before."""


def insert_rename(
    connection: sa.Connection,
    *,
    at: datetime,
    actor: str,
    old: str,
    new: str,
    posting: int,
    kept: Collection[int],
) -> Rename:
    """Record a rename; the caller seals it."""
    row = {"at": at, "actor": actor, "old": old, "new": new, "posting": posting}
    row["kept"] = " ".join(map(str, sorted(kept)))
    made = connection.execute(sa.insert(renames).values(row).returning(renames.c.id))
    return Rename(made.scalar_one(), at, actor, old, new, posting, frozenset(kept))


def every(connection: sa.Connection) -> list[Rename]:
    """Return all renames, newest first."""
    return [_rename(row) for row in connection.execute(_ALL).mappings()]


def last_of(connection: sa.Connection, old: str) -> Rename | None:
    """Return the newest rename of a member with this old name, or None."""
    row = connection.execute(_ALL.where(renames.c.old == old).limit(1)).mappings().first()
    return _rename(row) if row else None


def account_then(done: Sequence[Rename], account: str, posting: int) -> str:
    """Return an account's name when a posting (by its id) was written.

    ``account`` is its name now; ``done`` are all renames, newest first.
    """
    for each in done:
        if each.posting < posting:
            break  # this and all older ones were done when it was posted
        if account == member_account(each.new) and posting not in each.kept:
            account = member_account(each.old)
    return account


def _rename(row: sa.RowMapping) -> Rename:
    return Rename(**{**row, "kept": frozenset(map(int, row["kept"].split()))})
