"""Runs: notebooks and commands with a lease of their own.

Revision ID: 0021
Revises: 0020
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gpuspawner.db.schema import UTCDateTime

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("work", sa.Text(), nullable=False),
        sa.Column("options", sa.Text(), nullable=False),
        sa.Column("requeue", sa.Boolean(), nullable=False),
        sa.Column("restarts", sa.Integer(), nullable=False),
        sa.Column("after_lease", sa.Text(), nullable=False),
        sa.Column("created_at", UTCDateTime(), nullable=False),
        sa.Column("ended_at", UTCDateTime(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.CheckConstraint("outcome IN ('', 'done', 'failed', 'stopped')", name="runs_outcome"),
        sa.CheckConstraint("(outcome != '') = (ended_at IS NOT NULL)", name="runs_end"),
        sa.PrimaryKeyConstraint("id"),
    )
    has_key, is_open = sa.text("key != ''"), sa.text("ended_at IS NULL")
    op.create_index(
        "one_run_a_key",
        "runs",
        ["user", "key"],
        unique=True,
        sqlite_where=has_key,
        postgresql_where=has_key,
    )
    op.create_index(
        "open_runs", "runs", ["created_at"], sqlite_where=is_open, postgresql_where=is_open
    )
    op.create_index("runs_by_user", "runs", ["user", "created_at"])
