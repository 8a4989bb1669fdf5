"""Schedules of runs, and what became of each of their times.

Revision ID: 0024
Revises: 0023
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gpuspawner.db.schema import UTCDateTime

revision = "0024"
down_revision = "0023"


def upgrade() -> None:
    op.create_table(
        "schedules",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("cron", sa.Text(), nullable=False),
        sa.Column("zone", sa.Text(), nullable=False),
        sa.Column("work", sa.Text(), nullable=False),
        sa.Column("options", sa.Text(), nullable=False),
        sa.Column("requeue", sa.Boolean(), nullable=False),
        sa.Column("preemptible", sa.Boolean(), nullable=False),
        sa.Column("created_at", UTCDateTime(), nullable=False),
        sa.Column("paused", sa.Boolean(), nullable=False),
        sa.Column("next_at", UTCDateTime(), nullable=False),
        sa.Column("refusal", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    has_key = sa.text("key != ''")
    op.create_index(
        "one_schedule_a_key",
        "schedules",
        ["user", "key"],
        unique=True,
        sqlite_where=has_key,
        postgresql_where=has_key,
    )
    op.create_index("schedules_by_user", "schedules", ["user", "created_at"])
    op.create_index("schedules_by_time", "schedules", ["next_at"])
    op.create_table(
        "schedule_times",
        sa.Column("schedule_id", sa.Text(), nullable=False),
        sa.Column("due_at", UTCDateTime(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["schedule_id"], ["schedules.id"]),
        sa.PrimaryKeyConstraint("schedule_id", "due_at"),
    )
    is_due = sa.text("run_id IS NULL AND reason = ''")
    op.create_index(
        "due_schedule_times",
        "schedule_times",
        ["due_at"],
        sqlite_where=is_due,
        postgresql_where=is_due,
    )
