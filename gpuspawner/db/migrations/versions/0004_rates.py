"""Rates that admins set, and what becomes of a server whose account runs dry.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    for table in ("leases", "tickets"):
        op.add_column(table, _text("when_dry", "stop"))
        op.add_column(table, _whole("overdraft"))
    op.add_column("leases", _whole("waived"))
    op.add_column("leases", sa.Column("told_dry", sa.Float()))
    op.create_table(
        "rates",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("slots", sa.Integer(), nullable=True),
        sa.Column("hours", sa.Text(), nullable=False),
        sa.Column("zone", sa.Text(), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("set_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("removed_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("amount >= 0 AND amount <= 1000000000000", name="rates_amount"),
        sa.CheckConstraint("slots >= 1", name="rates_slots"),
        sa.CheckConstraint("since >= set_at", name="rates_since"),
        sa.PrimaryKeyConstraint("id"),
    )


def _text(name: str, default: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=False, server_default=sa.text(f"'{default}'"))


def _whole(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=False, server_default=sa.text("0"))
