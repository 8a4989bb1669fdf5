"""The estimate of a waiting ticket: one for all pages, answers and commands.

Revision ID: 0019
Revises: 0018
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    for name in ("estimated_at", "estimate_low", "estimate_likely", "estimate_high"):
        op.add_column("tickets", sa.Column(name, sa.DateTime(timezone=True), nullable=True))
