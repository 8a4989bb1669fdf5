"""The index that a member has one share of a device is named after it.

Revision ID: 0033
Revises: 0032
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"


def _rename(old: str, new: str) -> None:
    op.drop_index(old, "lease_places")
    is_open = sa.text("open")
    op.create_index(
        new,
        "lease_places",
        ["uuid", "sharer"],
        unique=True,
        sqlite_where=is_open,
        postgresql_where=is_open,
    )


def upgrade() -> None:
    _rename("one_slot_a_member", "one_share_a_member")


def downgrade() -> None:
    _rename("one_share_a_member", "one_slot_a_member")
