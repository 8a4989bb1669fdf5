"""Totals of what has ended, which reports and metrics read instead of all leases and postings.

They are empty at first: the accounting service adds up what ended before.

Revision ID: 0009
Revises: 0008
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.add_column("leases", sa.Column("days", sa.Integer, nullable=True))
    _partial("leases_to_add_up", ["id"], "state = 'ended' AND days IS NULL")
    _partial("long_leases", ["ended_at", "started_at"], "days > 2")
    op.create_table(
        "totals",
        sa.Column("by", sa.Text(), nullable=False),
        sa.Column("span", sa.Text(), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("micros", sa.BigInteger(), nullable=False),
        sa.Column("cost", sa.BigInteger(), nullable=False),
        sa.Column("sessions", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("span IN ('day', 'month', 'ever')", name="totals_span"),
        sa.PrimaryKeyConstraint("by", "span", "since", "name"),
    )
    op.create_table(
        "moved",
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("came", sa.BigInteger(), nullable=False),
        sa.Column("went", sa.BigInteger(), nullable=False),
        sa.Column("last", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["account"], ["accounts.name"]),
        sa.PrimaryKeyConstraint("account"),
    )


def _partial(name: str, columns: list[str], where: str) -> None:
    condition = sa.text(where)
    op.create_index(name, "leases", columns, sqlite_where=condition, postgresql_where=condition)
