"""Reports of use: leases by their members and by their ends.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_index("leases_by_user", "leases", ["user", "granted_at"], unique=False)
    op.create_index("leases_by_end", "leases", ["ended_at", "started_at"], unique=False)
