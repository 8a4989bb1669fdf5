"""MIG instances that gpuspawner makes, changes of a GPU's layout, and who has NVML open.

Revision ID: 0027
Revises: 0026
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gpuspawner.db.schema import UTCDateTime

revision = "0027"
down_revision = "0026"


def upgrade() -> None:
    op.create_index("devices_by_parent", "devices", ["parent_uuid"])
    op.create_table(
        "mig_changes",
        sa.Column("gpu_uuid", sa.Text(), nullable=False),
        sa.Column("layout", sa.Text(), nullable=False),
        sa.Column("started_at", UTCDateTime(), nullable=False),
        sa.Column("stepped_at", UTCDateTime(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("failure", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.PrimaryKeyConstraint("gpu_uuid"),
    )
    op.create_table(
        "mig_instances",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("gpu_uuid", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("profile", sa.Text(), nullable=False),
        sa.Column("profile_id", sa.Integer(), nullable=False),
        sa.Column("start", sa.Integer(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("instance_id", sa.Integer(), nullable=True),
        sa.Column("uuid", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("boot_id", sa.Text(), nullable=False),
        sa.CheckConstraint(
            "state IN ('wanted', 'begun', 'made', 'unwanted')", name="mig_instances_state"
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    is_kept = sa.text("state != 'unwanted'")
    op.create_index(
        "one_mig_instance_a_place",
        "mig_instances",
        ["gpu_uuid", "start"],
        unique=True,
        sqlite_where=is_kept,
        postgresql_where=is_kept,
    )
    op.create_table(
        "nvml_clients",
        sa.Column("process", sa.Text(), nullable=False),
        sa.Column("opened_at", UTCDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("process"),
    )
