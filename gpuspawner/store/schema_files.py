"""The tables of workspaces, their quotas and the folders that members share."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, ForeignKey, Index, Integer, Table, Text, text

from .schema import UTCDateTime, metadata

quota_projects = Table(
    "quota_projects",
    metadata,
    # Never taken away: what lies on a disk under an id must not become somebody else's.
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("source", Text, nullable=False, unique=True),
)

workspaces = Table(
    "workspaces",
    metadata,
    # A directory of the engine's machine, or the name of a volume.
    Column("source", Text, primary_key=True),
    Column("user", Text, nullable=False),
    Column("seen_at", UTCDateTime, nullable=False),
    Column("quota", BigInteger),
    Column("busy", Text, nullable=False, default="", server_default=text("''")),
)
Index("workspaces_by_user", workspaces.c.user)

folders = Table(
    "folders",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("owner", Text, nullable=False),
    Column("made_at", UTCDateTime, nullable=False),
    Column("left_at", UTCDateTime),
    Column("deleted_at", UTCDateTime),
)
Index("folders_by_owner", folders.c.owner)

folder_members = Table(
    "folder_members",
    metadata,
    Column("folder_id", Text, ForeignKey("folders.id"), primary_key=True),
    Column("user", Text, primary_key=True),
    Column("write", Boolean, nullable=False),
    Column("invited_by", Text, nullable=False),
    Column("invited_at", UTCDateTime, nullable=False),
    Column("accepted_at", UTCDateTime),
)
Index("folder_members_by_user", folder_members.c.user)
