"""What devices did, minute by minute and hour by hour.

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


def _sum(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=False, server_default=sa.text("0"))


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=False, server_default=sa.text("''"))
