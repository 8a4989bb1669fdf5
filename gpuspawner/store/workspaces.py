"""Rows of workspaces: whose they are, what is done with them, and the projects of their quotas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from .schema_files import quota_projects, workspaces

FIRST_PROJECT = 700_000_000
"""Ids from here on are ours: an admin's own projects and Docker's begin far below."""


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
    """What an admin does with it just now; no server gets it meanwhile."""

    @property
    def is_volume(self) -> bool:
        """Whether it is a volume, and not a directory."""
        return not self.source.startswith("/")


def find(connection: sa.Connection, source: str, *, lock: bool = False) -> Workspace | None:
    """One workspace; None when no server ever got it."""
    query = sa.select(*_COLUMNS).where(workspaces.c.source == source)
    row = connection.execute(query.with_for_update() if lock else query).first()
    return Workspace(*row) if row else None


def of_user(connection: sa.Connection, user: str) -> Sequence[Workspace]:
    """A member's workspaces, the newest first."""
    query = sa.select(*_COLUMNS).where(workspaces.c.user == user)
    query = query.order_by(workspaces.c.seen_at.desc(), workspaces.c.source)
    return [Workspace(*row) for row in connection.execute(query)]


def every(connection: sa.Connection) -> Sequence[Workspace]:
    """All of them, by their names."""
    query = sa.select(*_COLUMNS).order_by(workspaces.c.source)
    return [Workspace(*row) for row in connection.execute(query)]


def put(connection: sa.Connection, workspace: Workspace) -> None:
    """Write one, in the place of what was known of it."""
    remove(connection, workspace.source)
    row = {name: getattr(workspace, name) for name in Workspace.__dataclass_fields__}
    connection.execute(sa.insert(workspaces).values(row))


def remove(connection: sa.Connection, source: str) -> None:
    """Forget one."""
    connection.execute(sa.delete(workspaces).where(workspaces.c.source == source))


def project_of(connection: sa.Connection, source: str) -> int | None:
    """The quota project of a directory; None when it has none yet."""
    query = sa.select(quota_projects.c.id).where(quota_projects.c.source == source)
    found = connection.execute(query).scalar()
    return None if found is None else FIRST_PROJECT + int(found)


def give_project(connection: sa.Connection, source: str) -> int:
    """The quota project of a directory, made when there is none. An id is never given twice."""
    found = project_of(connection, source)
    if found is not None:
        return found
    connection.execute(sa.insert(quota_projects).values(source=source))
    made = project_of(connection, source)
    assert made is not None
    return made


_COLUMNS = tuple(workspaces.c[name] for name in Workspace.__dataclass_fields__)
