"""Devices may be reserved for groups, which may lend them to others.

Revision ID: 0029
Revises: 0028
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"


def upgrade() -> None:
    op.add_column(
        "devices",
        sa.Column("reserved_for", sa.Text(), nullable=False, server_default=sa.text("'[]'")),
    )
    op.add_column(
        "devices", sa.Column("lent", sa.Boolean(), nullable=False, server_default=sa.false())
    )
