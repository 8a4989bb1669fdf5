"""Preemptible runs yield their devices to others; a run that begins again has its old place.

Revision ID: 0022
Revises: 0021
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gpuspawner.db.schema import UTCDateTime

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    for table in ("leases", "runs"):
        op.add_column(
            table,
            sa.Column("preemptible", sa.Boolean(), nullable=False, server_default=sa.false()),
        )
    op.add_column("tickets", sa.Column("since", UTCDateTime(), nullable=True))
    op.add_column("leases", sa.Column("yields_at", UTCDateTime(), nullable=True))
    op.add_column(
        "runs",
        sa.Column("preemptions", sa.Integer(), nullable=False, server_default=sa.text("0")),
    )
