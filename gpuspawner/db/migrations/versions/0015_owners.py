"""Which engine runs a lease's server, and which hub the database belongs to.

Revision ID: 0015
Revises: 0014
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.add_column(
        "leases", sa.Column("engine_id", sa.Text(), nullable=False, server_default=sa.text("''"))
    )
    op.create_table(
        "owner",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("hub", sa.Text(), nullable=False),
        sa.Column("machine", sa.Text(), nullable=False, server_default=sa.text("''")),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("id = 1", name="owner_one"),
        sa.PrimaryKeyConstraint("id"),
    )
