"""What an admin gave back of what a lease was charged, all of it or a part.

Revision ID: 0007
Revises: 0006
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    column = sa.Column("refunded", sa.BigInteger, nullable=False, server_default=sa.text("0"))
    op.add_column("leases", column)
