"""What each lease does on a device that others share.

Revision ID: 0030
Revises: 0029
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gpuspawner.db.schema import UTCDateTime

revision = "0030"
down_revision = "0029"

KEY = ["uuid", "seconds", "since", "lease_id"]
NUMBERS = (
    *("samples", "known", "busy", "measured", "use_sum", "use_max", "memory_max", "powered"),
    *("milliwatts_sum", "throttle", "ecc_errors", "processes", "strangers"),
)


def _words(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), server_default=sa.text("''"), nullable=False)


def _number(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False)


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.add_column("device_use", _words("lease_id"))
        op.drop_constraint("device_use_pkey", "device_use", type_="primary")
        op.create_primary_key("device_use_pkey", "device_use", KEY)
        return
    _move_rows()


def _move_rows() -> None:
    """Move the rows into a table with the new primary key, which SQLite cannot change."""
    made = op.create_table(
        "new_device_use",
        sa.Column("uuid", sa.Text(), nullable=False),
        sa.Column("seconds", sa.Integer(), nullable=False),
        sa.Column("since", UTCDateTime(), nullable=False),
        _words("lease_id"),
        *map(_number, NUMBERS),
        sa.Column("celsius_max", sa.Integer(), nullable=True),
        sa.Column("sm_mhz_max", sa.Integer(), nullable=True),
        *map(_words, ("xids", "error")),
        sa.Column("summed", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.CheckConstraint("busy <= known AND known <= samples", name="device_use_samples"),
        sa.CheckConstraint("seconds IN (60, 3600)", name="device_use_seconds"),
        sa.PrimaryKeyConstraint(*KEY),
    )
    names = [column.name for column in made.columns if column.name != "lease_id"]
    old = sa.table("device_use", *map(sa.column, names))
    op.execute(sa.insert(made).from_select(names, sa.select(*old.columns)))
    op.drop_table("device_use")
    op.rename_table("new_device_use", "device_use")
    op.create_index("device_use_by_time", "device_use", ["seconds", "since"])
    is_new = sa.text("seconds = 60 AND NOT summed")
    op.create_index("device_use_to_sum", "device_use", ["since"], sqlite_where=is_new)
