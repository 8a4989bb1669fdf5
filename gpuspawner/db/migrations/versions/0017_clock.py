"""The clock's offsets, and when servers answered.

Revision ID: 0017
Revises: 0016
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.create_table(
        "clock_offsets",
        sa.Column("boot_id", sa.Text(), nullable=False),
        sa.Column("offset", sa.BigInteger(), nullable=False),
        sa.Column("kept_at", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("stepped_at", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("stepped_after", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("before", sa.BigInteger()),
        sa.Column("measured_at", sa.BigInteger(), nullable=False),
        sa.Column("moved", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("moved_at", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("moved_after", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("raised", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.PrimaryKeyConstraint("boot_id"),
    )
    op.add_column("leases", sa.Column("answered_at", sa.DateTime(timezone=True)))
