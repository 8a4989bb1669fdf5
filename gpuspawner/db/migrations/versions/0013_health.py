"""How devices are, and which leases were on sick ones.

Revision ID: 0013
Revises: 0012
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    held = sa.Column("held_bytes", sa.BigInteger(), nullable=False, server_default=sa.text("0"))
    op.add_column("devices", held)
    op.create_table(
        "device_health",
        sa.Column("uuid", sa.Text(), nullable=False),
        sa.Column("verdict", sa.Text(), nullable=False),
        _words("cause"),
        _words("reason"),
        _time("since", nullable=False),
        _time("fault_at"),
        _time("last_at"),
        sa.Column("falls", sa.Integer(), nullable=False, server_default=sa.text("0")),
        _time("fell_at"),
        _time("probed_at"),
        _words("probe"),
        _words("accepted"),
        sa.CheckConstraint("verdict IN ('fine', 'watch', 'sick')", name="device_health_verdict"),
        sa.CheckConstraint(
            "(verdict = 'sick') = (fault_at IS NOT NULL)", name="device_health_fault"
        ),
        sa.PrimaryKeyConstraint("uuid"),
    )
    op.create_table(
        "sick_leases",
        sa.Column("lease_id", sa.Text(), nullable=False),
        sa.Column("uuid", sa.Text(), nullable=False),
        _words("cause"),
        _words("reason"),
        _time("fault_at", nullable=False),
        _time("told_at", nullable=False),
        _time("settled_at"),
        sa.Column("refunded", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.CheckConstraint("refunded >= 0", name="sick_leases_refunded"),
        sa.ForeignKeyConstraint(["lease_id"], ["leases.id"]),
        sa.PrimaryKeyConstraint("lease_id"),
    )
    condition = sa.text("settled_at IS NULL")
    op.create_index(
        "sick_leases_unsettled",
        "sick_leases",
        ["lease_id"],
        sqlite_where=condition,
        postgresql_where=condition,
    )


def _time(name: str, *, nullable: bool = True) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def _words(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=False, server_default=sa.text("''"))
