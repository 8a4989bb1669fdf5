"""What the containers of each environment used, for the metrics.

Revision ID: 0032
Revises: 0031
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"

_COUNTS = (
    "disk_read_bytes",
    "disk_written_bytes",
    "network_received_bytes",
    "network_sent_bytes",
    "memory_kills",
)


def _number(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False)


def upgrade() -> None:
    made = op.create_table(
        "environment_use",
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("cpu_seconds", sa.Float(), nullable=False),
        *map(_number, _COUNTS),
        sa.PrimaryKeyConstraint("environment"),
    )
    names = ("cpu_seconds", *_COUNTS)
    used = sa.table("resource_use", sa.column("lease_id"), *map(sa.column, names))
    leases = sa.table("leases", sa.column("id"), sa.column("environment"))
    sums = (sa.func.coalesce(sa.func.sum(used.c[name]), 0) for name in names)
    until_now = (
        sa.select(leases.c.environment, *sums)
        .join_from(leases, used, leases.c.id == used.c.lease_id)
        .group_by(leases.c.environment)
    )
    op.execute(sa.insert(made).from_select(["environment", *names], until_now))


def downgrade() -> None:
    op.drop_table("environment_use")
