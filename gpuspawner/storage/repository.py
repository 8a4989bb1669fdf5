"""Rows of workspaces and of shared folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from ..core.errors import UnknownFolder
from ..db.audit_log import AuditEntry
from ..db.schema import audit, folder_members, folders, quota_projects, workspaces

FIRST_PROJECT = 700_000_000
"""Our ids start here: an admin's own projects and Docker's are far below."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """A member's own files: a directory of the engine's machine, or a volume of the engine."""

    source: str
    """The directory's path, or the volume's name."""
    user: str
    seen_at: datetime
    """When a server last got it."""
    quota: int | None = None
    """Bytes; None: no limit."""
    busy: str = ""
    """What an admin is doing with it; no server gets it meanwhile."""

    @property
    def is_volume(self) -> bool:
        """True for a volume, False for a directory."""
        return not self.source.startswith("/")


def find_workspace(
    connection: sa.Connection, source: str, *, lock: bool = False
) -> Workspace | None:
    """Return a workspace; None if no server ever got it."""
    query = sa.select(*_COLUMNS).where(workspaces.c.source == source)
    row = connection.execute(query.with_for_update() if lock else query).first()
    return Workspace(*row) if row else None


def workspaces_of_user(connection: sa.Connection, user: str) -> Sequence[Workspace]:
    """Return a member's workspaces, newest first."""
    order = (workspaces.c.seen_at.desc(), workspaces.c.source)
    query = sa.select(*_COLUMNS).where(workspaces.c.user == user).order_by(*order)
    return [Workspace(*row) for row in connection.execute(query)]


def all_workspaces(connection: sa.Connection) -> Sequence[Workspace]:
    """Return all workspaces, by name."""
    query = sa.select(*_COLUMNS).order_by(workspaces.c.source)
    return [Workspace(*row) for row in connection.execute(query)]


def put_workspace(connection: sa.Connection, workspace: Workspace) -> None:
    """Write a workspace, replacing what was known of it."""
    remove_workspace(connection, workspace.source)
    row = {name: getattr(workspace, name) for name in Workspace.__dataclass_fields__}
    connection.execute(sa.insert(workspaces).values(row))


def remove_workspace(connection: sa.Connection, source: str) -> None:
    """Delete a workspace's row."""
    connection.execute(sa.delete(workspaces).where(workspaces.c.source == source))


ARCHIVED = "archive workspace"
"""The action of an archive in the audit log; its detail is the file."""
RESTORED = "restore workspace"
"""The action of putting one back; its detail is the file."""


def last_archives(connection: sa.Connection) -> dict[str, AuditEntry]:
    """Return the newest archive of each workspace that has one, by the workspace's name."""
    newest = sa.select(sa.func.max(audit.c.id)).where(audit.c.action == ARCHIVED)
    columns = [audit.c[name] for name in AuditEntry.__dataclass_fields__]
    query = sa.select(*columns).where(audit.c.id.in_(newest.group_by(audit.c.subject)))
    found = (AuditEntry(*row) for row in connection.execute(query))
    return {entry.subject: entry for entry in found}


def archived_from(connection: sa.Connection) -> dict[str, str]:
    """Return the workspace that each archive was made from, by the archive's file."""
    query = sa.select(audit.c.detail, audit.c.subject).where(audit.c.action == ARCHIVED)
    return {row.detail: row.subject for row in connection.execute(query.order_by(audit.c.id))}


def project_of(connection: sa.Connection, source: str) -> int | None:
    """Return the quota project of a directory; None if it has none yet."""
    query = sa.select(quota_projects.c.id).where(quota_projects.c.source == source)
    found = connection.execute(query).scalar()
    return None if found is None else FIRST_PROJECT + int(found)


def give_project(connection: sa.Connection, source: str) -> int:
    """Return the quota project of a directory, created if needed. Ids are never reused."""
    if (found := project_of(connection, source)) is not None:
        return found
    insert = sa.insert(quota_projects).values(source=source).returning(quota_projects.c.id)
    return FIRST_PROJECT + int(connection.execute(insert).scalar_one())


_COLUMNS = tuple(workspaces.c[name] for name in Workspace.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class FolderMember:
    """A member whom a folder is shared with."""

    user: str
    write: bool
    invited_by: str
    invited_at: datetime
    accepted_at: datetime | None = None
    """None: they have not accepted yet, and their servers do not get it."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that a member shares with others."""

    id: str
    name: str
    """For people: the path of the files is made from the id alone."""
    owner: str
    made_at: datetime
    left_at: datetime | None = None
    """When its owner left the hub: an admin can give it to somebody else."""
    deleted_at: datetime | None = None
    """When its owner deleted it: no server gets it, and an admin can restore it."""
    members: tuple[FolderMember, ...] = ()

    def invited(self, user: str) -> FolderMember | None:
        """Return how it is shared with a user; None for its owner, and without an invitation."""
        return next((some for some in self.members if some.user == user), None)

    def since(self, user: str) -> datetime | None:
        """Return since when a user's servers get it; None if they do not."""
        if user == self.owner:
            return self.made_at if self.left_at is None else None
        found = self.invited(user)
        return found.accepted_at if found else None

    def writes(self, user: str) -> bool:
        """Return True if a user who has it may change its contents."""
        found = self.invited(user)
        return user == self.owner or (found is not None and found.write)


def get_folder(connection: sa.Connection, folder_id: str, *, lock: bool = False) -> Folder:
    """Return a folder, even a deleted one. Raises UnknownFolder."""
    query = sa.select(folders).where(folders.c.id == folder_id)
    row = connection.execute(query.with_for_update() if lock else query).mappings().first()
    if row is None:
        raise UnknownFolder(folder=folder_id)
    return _with_members(connection, [row])[0]


def folders_of_user(connection: sa.Connection, user: str) -> Sequence[Folder]:
    """Return the folders that a user owns or was invited to, oldest first; no deleted ones."""
    invited = sa.select(folder_members.c.folder_id).where(folder_members.c.user == user)
    mine = sa.or_(folders.c.owner == user, folders.c.id.in_(invited))
    query = sa.select(folders).where(folders.c.deleted_at.is_(None), mine).order_by(*_ORDER)
    return _with_members(connection, connection.execute(query).mappings().all())


def all_folders(connection: sa.Connection) -> Sequence[Folder]:
    """Return all folders, including deleted ones, oldest first."""
    query = sa.select(folders).order_by(*_ORDER)
    return _with_members(connection, connection.execute(query).mappings().all())


def insert_folder(connection: sa.Connection, folder: Folder) -> None:
    """Insert a folder."""
    row = {column.name: getattr(folder, column.name) for column in folders.c}
    connection.execute(sa.insert(folders).values(row))


def update_folder(connection: sa.Connection, folder_id: str, **values: Any) -> None:
    """Change some columns of a folder."""
    connection.execute(sa.update(folders).where(folders.c.id == folder_id).values(values))


def remove_folder(connection: sa.Connection, folder_id: str) -> None:
    """Delete a folder's row and its invitations."""
    connection.execute(sa.delete(folder_members).where(folder_members.c.folder_id == folder_id))
    connection.execute(sa.delete(folders).where(folders.c.id == folder_id))


def invite_to_folder(connection: sa.Connection, folder_id: str, invited: FolderMember) -> None:
    """Write how a folder is shared with somebody, replacing what was before."""
    uninvite_from_folder(connection, folder_id, invited.user)
    row = {name: getattr(invited, name) for name in FolderMember.__dataclass_fields__}
    connection.execute(sa.insert(folder_members).values(folder_id=folder_id, **row))


def uninvite_from_folder(connection: sa.Connection, folder_id: str, user: str) -> bool:
    """Stop sharing a folder with somebody. Returns False if it was not shared."""
    mine = (folder_members.c.folder_id == folder_id, folder_members.c.user == user)
    return connection.execute(sa.delete(folder_members).where(*mine)).rowcount > 0


def _with_members(connection: sa.Connection, rows: Sequence[Any]) -> list[Folder]:
    shared: dict[str, list[FolderMember]] = {row["id"]: [] for row in rows}
    ids = list(shared)
    columns = [folder_members.c[name] for name in FolderMember.__dataclass_fields__]
    query = sa.select(folder_members.c.folder_id, *columns).order_by(folder_members.c.user)
    for start in range(0, len(ids), 500):  # SQLite limits the number of parameters
        some = query.where(folder_members.c.folder_id.in_(ids[start : start + 500]))
        for folder_id, *values in connection.execute(some):
            shared[folder_id].append(FolderMember(*values))
    return [Folder(**row, members=tuple(shared[row["id"]])) for row in rows]


_ORDER = (folders.c.made_at, folders.c.id)
