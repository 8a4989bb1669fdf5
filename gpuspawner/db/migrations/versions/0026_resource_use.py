"""What the containers of leases use of CPU, memory, disk and network.

Revision ID: 0026
Revises: 0025
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gpuspawner.db.schema import UTCDateTime

revision = "0026"
down_revision = "0025"


def _figure(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=True)


def _number(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False)


def upgrade() -> None:
    op.create_table(
        "resource_use",
        sa.Column("lease_id", sa.Text(), nullable=False),
        sa.Column("cpu_seconds", sa.Float(), nullable=True),
        *map(_figure, ("memory_bytes", "memory_peak_bytes", "memory_limit_bytes")),
        *map(_figure, ("disk_read_bytes", "disk_written_bytes")),
        *map(_figure, ("network_received_bytes", "network_sent_bytes")),
        sa.Column("sampled_at", UTCDateTime(), nullable=True),
        _number("memory_kills"),
        sa.Column("container_id", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("last_cpu_seconds", sa.Float(), nullable=True),
        *map(_figure, ("last_disk_read_bytes", "last_disk_written_bytes")),
        *map(_figure, ("last_network_received_bytes", "last_network_sent_bytes")),
        _number("last_kill_nanoseconds"),
        sa.Column("told_at", UTCDateTime(), nullable=True),
        sa.ForeignKeyConstraint(["lease_id"], ["leases.id"]),
        sa.PrimaryKeyConstraint("lease_id"),
    )
