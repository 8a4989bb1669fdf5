"""A lease may hold one slot of a shared device, or all of them.

Revision ID: 0025
Revises: 0024
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"


def upgrade() -> None:
    for name in ("slots", "held_slots"):
        op.add_column(
            "lease_places",
            sa.Column(name, sa.Integer(), nullable=False, server_default=sa.text("1")),
        )
    op.add_column("lease_places", sa.Column("sharer", sa.Text(), nullable=True))
    is_open = sa.text("open")
    op.create_index(
        "one_slot_a_member",
        "lease_places",
        ["uuid", "sharer"],
        unique=True,
        sqlite_where=is_open,
        postgresql_where=is_open,
    )
