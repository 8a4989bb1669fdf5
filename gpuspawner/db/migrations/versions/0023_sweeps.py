"""Sweeps: runs that were submitted together, of which only so many join the queue at once.

Revision ID: 0023
Revises: 0022
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gpuspawner.db.schema import UTCDateTime

revision = "0023"
down_revision = "0022"


def upgrade() -> None:
    op.add_column("runs", sa.Column("sweep", sa.Text(), nullable=True))
    op.add_column("runs", sa.Column("at_most", sa.Integer(), nullable=True))
    op.add_column("runs", sa.Column("admitted_at", UTCDateTime(), nullable=True))
    of_sweep = sa.text("sweep IS NOT NULL")
    op.create_index(
        "runs_by_sweep", "runs", ["sweep"], sqlite_where=of_sweep, postgresql_where=of_sweep
    )
