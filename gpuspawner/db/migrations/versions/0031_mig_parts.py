"""How much of a GPU a MIG instance is, of devices and of leased ones.

Revision ID: 0031
Revises: 0030
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"


def upgrade() -> None:
    for table in ("devices", "lease_places"):
        part = sa.Column("part", sa.Text(), nullable=False, server_default=sa.text("'1'"))
        op.add_column(table, part)
