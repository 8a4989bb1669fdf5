"""Credits: who pays for a member, credits that end, recurring refills.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "payers",
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        _time("at"),
        sa.ForeignKeyConstraint(["account"], ["accounts.name"]),
        sa.PrimaryKeyConstraint("user"),
    )
    _lots()
    op.create_table(
        "refills",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("rule", sa.Text(), nullable=False),
        sa.Column("zone", sa.Text(), nullable=False),
        _time("starts_at"),
        sa.Column("mode", sa.Text(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("cap", sa.BigInteger(), nullable=True),
        sa.Column("audience", sa.Text(), nullable=False),
        sa.Column("keep_seconds", sa.BigInteger(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        _time("made_at"),
        sa.Column("made_by", sa.Text(), nullable=False),
        _time("next_at", nullable=True),
        _time("ended_at", nullable=True),
        sa.CheckConstraint("mode IN ('add', 'top_up')", name="refills_mode"),
        # What is not there fulfils its part.
        sa.CheckConstraint("amount > 0 AND cap > 0 AND keep_seconds > 0", name="refills_amounts"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "refill_runs",
        sa.Column("refill_id", sa.Text(), nullable=False),
        _time("occurrence"),
        _time("at"),
        sa.Column("accounts", sa.Integer(), nullable=False),
        sa.Column("total", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["refill_id"], ["refills.id"]),
        sa.PrimaryKeyConstraint("refill_id", "occurrence"),
    )


def _lots() -> None:
    op.create_table(
        "lots",
        sa.Column("transfer_id", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        _time("starts_at"),
        _time("ends_at"),
        _time("cancelled_at", nullable=True),
        _time("closed_at", nullable=True),
        sa.Column("taken", sa.BigInteger(), nullable=False),
        sa.Column("takes", sa.Integer(), nullable=False),
        sa.CheckConstraint("ends_at > starts_at", name="lots_end"),
        sa.CheckConstraint("amount > 0 AND taken >= 0 AND taken <= amount", name="lots_amounts"),
        sa.ForeignKeyConstraint(["account"], ["accounts.name"]),
        sa.ForeignKeyConstraint(["transfer_id"], ["transfers.id"]),
        sa.PrimaryKeyConstraint("transfer_id"),
    )
    op.create_index("lots_by_account", "lots", ["account", "ends_at"], unique=False)
    op.create_index(
        "open_lots",
        "lots",
        ["ends_at"],
        unique=False,
        sqlite_where=sa.text("closed_at IS NULL"),
        postgresql_where=sa.text("closed_at IS NULL"),
    )


def _time(name: str, *, nullable: bool = False) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)
