"""What devices did, minute by minute and hour by hour, and how long those of a lease have rested.

Revision ID: 0012
Revises: 0011
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.create_table(
        "device_use",
        sa.Column("uuid", sa.Text(), nullable=False),
        sa.Column("seconds", sa.Integer(), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        *map(_sum, ("samples", "known", "busy", "measured", "use_sum", "use_max", "memory_max")),
        *map(_sum, ("powered", "milliwatts_sum")),
        sa.Column("celsius_max", sa.Integer()),
        sa.Column("sm_mhz_max", sa.Integer()),
        *map(_sum, ("throttle", "ecc_errors")),
        _text("xids"),
        *map(_sum, ("processes", "strangers")),
        _text("error"),
        sa.Column("summed", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.CheckConstraint("seconds IN (60, 3600)", name="device_use_seconds"),
        sa.CheckConstraint("busy <= known AND known <= samples", name="device_use_samples"),
        sa.PrimaryKeyConstraint("uuid", "seconds", "since"),
    )
    op.create_index("device_use_by_time", "device_use", ["seconds", "since"])
    condition = sa.text("seconds = 60 AND NOT summed")
    op.create_index(
        "device_use_to_sum",
        "device_use",
        ["since"],
        sqlite_where=condition,
        postgresql_where=condition,
    )
    op.create_table(
        "idle",
        sa.Column("lease_id", sa.Text(), nullable=False),
        sa.Column("credit", sa.Float(), nullable=False),
        sa.Column("judged_until", sa.DateTime(timezone=True), nullable=False),
        sa.Column("warned_at", sa.DateTime(timezone=True)),
        sa.Column("stops_at", sa.DateTime(timezone=True)),
        sa.Column("snoozes", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.ForeignKeyConstraint(["lease_id"], ["leases.id"]),
        sa.PrimaryKeyConstraint("lease_id"),
    )


def _sum(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=False, server_default=sa.text("0"))


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=False, server_default=sa.text("''"))
