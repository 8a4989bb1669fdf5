"""A lease reserves memory and CPU of the host until it ends.

Revision ID: 0028
Revises: 0027
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"


def upgrade() -> None:
    for name in ("host_memory_bytes", "host_milli_cpus"):
        op.add_column(
            "leases",
            sa.Column(name, sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        )
