"""Rows of shared folders: who made them, and who was invited."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from ..errors import UnknownFolder
from .schema_files import folder_members, folders


@dataclass(frozen=True, slots=True)
class Invited:
    """Somebody whom a folder is shared with."""

    user: str
    write: bool
    invited_by: str
    invited_at: datetime
    accepted_at: datetime | None = None
    """None: they have not said yes yet, and their servers do not get it."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that a member shares with others."""

    id: str
    name: str
    """For people: where the files lie is made from the id alone."""
    owner: str
    made_at: datetime
    left_at: datetime | None = None
    """When its owner left the hub: an admin can hand it on."""
    deleted_at: datetime | None = None
    """When its owner deleted it: no server gets it, and an admin can bring it back."""
    members: tuple[Invited, ...] = ()

    def invited(self, user: str) -> Invited | None:
        """How it is shared with somebody; None for its owner, and for who was not invited."""
        return next((some for some in self.members if some.user == user), None)

    def since(self, user: str) -> datetime | None:
        """Since when somebody's servers get it; None when they do not."""
        if user == self.owner:
            return self.made_at if self.left_at is None else None
        found = self.invited(user)
        return found.accepted_at if found else None

    def writes(self, user: str) -> bool:
        """Whether somebody who has it may change what is in it."""
        found = self.invited(user)
        return user == self.owner or (found is not None and found.write)


def get(connection: sa.Connection, folder_id: str, *, lock: bool = False) -> Folder:
    """One folder, a deleted one too. Raises UnknownFolder."""
    query = sa.select(folders).where(folders.c.id == folder_id)
    row = connection.execute(query.with_for_update() if lock else query).mappings().first()
    if row is None:
        raise UnknownFolder(folder=folder_id)
    return _with_members(connection, [row])[0]


def of_user(connection: sa.Connection, user: str) -> Sequence[Folder]:
    """The folders that somebody owns or was invited to, the oldest first; no deleted ones."""
    invited = sa.select(folder_members.c.folder_id).where(folder_members.c.user == user)
    mine = sa.or_(folders.c.owner == user, folders.c.id.in_(invited))
    query = sa.select(folders).where(folders.c.deleted_at.is_(None), mine).order_by(*_ORDER)
    return _with_members(connection, connection.execute(query).mappings().all())


def every(connection: sa.Connection) -> Sequence[Folder]:
    """All of them, the deleted ones too, the oldest first."""
    query = sa.select(folders).order_by(*_ORDER)
    return _with_members(connection, connection.execute(query).mappings().all())


def owned(connection: sa.Connection, user: str) -> int:
    """How many folders somebody has that are not deleted."""
    query = sa.select(sa.func.count()).select_from(folders)
    query = query.where(folders.c.owner == user, folders.c.deleted_at.is_(None))
    return int(connection.execute(query).scalar_one())


def insert(connection: sa.Connection, folder: Folder) -> None:
    """Write a new one."""
    row = {column.name: getattr(folder, column.name) for column in folders.c}
    connection.execute(sa.insert(folders).values(row))


def update(connection: sa.Connection, folder_id: str, **values: Any) -> None:
    """Change some columns of one."""
    connection.execute(sa.update(folders).where(folders.c.id == folder_id).values(values))


def remove(connection: sa.Connection, folder_id: str) -> None:
    """Forget one, and who was invited."""
    connection.execute(sa.delete(folder_members).where(folder_members.c.folder_id == folder_id))
    connection.execute(sa.delete(folders).where(folders.c.id == folder_id))


def invite(connection: sa.Connection, folder_id: str, invited: Invited) -> None:
    """Write how a folder is shared with somebody, in the place of what was before."""
    uninvite(connection, folder_id, invited.user)
    row = {name: getattr(invited, name) for name in Invited.__dataclass_fields__}
    connection.execute(sa.insert(folder_members).values(folder_id=folder_id, **row))


def uninvite(connection: sa.Connection, folder_id: str, user: str) -> bool:
    """Share a folder with somebody no more. False when it was not."""
    mine = (folder_members.c.folder_id == folder_id, folder_members.c.user == user)
    return connection.execute(sa.delete(folder_members).where(*mine)).rowcount > 0


def _with_members(connection: sa.Connection, rows: Sequence[Any]) -> list[Folder]:
    shared: dict[str, list[Invited]] = {row["id"]: [] for row in rows}
    for folder_id, invited in _members(connection, shared):
        shared[folder_id].append(invited)
    return [Folder(**row, members=tuple(shared[row["id"]])) for row in rows]


def _members(connection: sa.Connection, ids: Iterable[str]) -> Iterable[tuple[str, Invited]]:
    wanted = list(ids)
    columns = [folder_members.c[name] for name in Invited.__dataclass_fields__]
    for start in range(0, len(wanted), 500):  # SQLite takes so many parameters, and not many more
        query = sa.select(folder_members.c.folder_id, *columns)
        query = query.where(folder_members.c.folder_id.in_(wanted[start : start + 500]))
        for row in connection.execute(query.order_by(folder_members.c.user)):
            yield row[0], Invited(*row[1:])


_ORDER = (folders.c.made_at, folders.c.id)
