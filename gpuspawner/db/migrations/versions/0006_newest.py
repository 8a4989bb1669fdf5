"""The newest leases of everybody, however many there ever were.

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_index("leases_by_grant", "leases", ["granted_at"], unique=False)
