"""The roster, and who is a member. Whoever has an account was one, and needs no welcome.

Revision ID: 0011
Revises: 0010
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table(
        "roster",
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("course", sa.Text(), nullable=False),
        _text("groups"),
        _text("mail"),
        _time("starts_at"),
        _time("ends_at"),
        _time("listed_at", nullable=False),
        sa.PrimaryKeyConstraint("user", "course"),
    )
    op.create_table(
        "memberships",
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("by_roster", sa.Boolean(), nullable=False, server_default=sa.false()),
        _time("since", nullable=False),
        _time("ended_at"),
        _text("reason"),
        _text("actor"),
        _time("welcomed_at"),
        sa.PrimaryKeyConstraint("user"),
    )
    ended = sa.text("ended_at IS NOT NULL")
    op.create_index(
        "former_members", "memberships", ["user"], sqlite_where=ended, postgresql_where=ended
    )
    op.execute(
        'INSERT INTO memberships ("user", since, welcomed_at) '
        "SELECT substr(name, 8), opened_at, opened_at FROM accounts WHERE name LIKE 'member:%'"
    )


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=False, server_default=sa.text("''"))


def _time(name: str, *, nullable: bool = True) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)
