"""Workspaces with their quotas, and folders that members share.

Revision ID: 0008
Revises: 0007
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_table(
        "quota_projects",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("source"),
    )
    op.create_table(
        "workspaces",
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        _time("seen_at"),
        sa.Column("quota", sa.BigInteger(), nullable=True),
        sa.Column("busy", sa.Text(), nullable=False, server_default=sa.text("''")),
        sa.PrimaryKeyConstraint("source"),
    )
    op.create_index("workspaces_by_user", "workspaces", ["user"], unique=False)
    op.create_table(
        "folders",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        _time("made_at"),
        _time("left_at", nullable=True),
        _time("deleted_at", nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("folders_by_owner", "folders", ["owner"], unique=False)
    op.create_table(
        "folder_members",
        sa.Column("folder_id", sa.Text(), nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("write", sa.Boolean(), nullable=False),
        sa.Column("invited_by", sa.Text(), nullable=False),
        _time("invited_at"),
        _time("accepted_at", nullable=True),
        sa.ForeignKeyConstraint(["folder_id"], ["folders.id"]),
        sa.PrimaryKeyConstraint("folder_id", "user"),
    )
    op.create_index("folder_members_by_user", "folder_members", ["user"], unique=False)


def _time(name: str, *, nullable: bool = False) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)
