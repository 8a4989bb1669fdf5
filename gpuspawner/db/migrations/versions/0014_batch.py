"""Jobs beside servers, and the groups of members whom they count on.

Revision ID: 0014
Revises: 0013
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.create_table(
        "batch_jobs",
        _words("id"),
        _words("cluster"),
        _words("label"),
        _words("name"),
        _words("user"),
        sa.Column("member", sa.Text()),
        sa.Column("account", sa.Text()),
        sa.Column("rate", sa.BigInteger(), nullable=False),
        _words("devices"),
        _time("started_at"),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
        _number("seconds", sa.BigInteger()),
        _number("charged", sa.BigInteger()),
        _number("entries", sa.Integer()),
        sa.CheckConstraint("(member IS NULL) = (account IS NULL)", name="batch_jobs_member"),
        sa.CheckConstraint("account IS NOT NULL OR charged = 0", name="batch_jobs_account"),
        sa.CheckConstraint(
            "rate >= 0 AND seconds >= 0 AND charged >= 0", name="batch_jobs_amounts"
        ),
        sa.ForeignKeyConstraint(["account"], ["accounts.name"]),
        sa.PrimaryKeyConstraint("id"),
    )
    condition = sa.text("ended_at IS NULL")
    op.create_index(
        "batch_jobs_open",
        "batch_jobs",
        ["cluster", "started_at"],
        sqlite_where=condition,
        postgresql_where=condition,
    )
    op.create_index("batch_jobs_by_end", "batch_jobs", ["cluster", "ended_at"])
    op.create_table(
        "batch_marks",
        _words("cluster"),
        _time("since"),
        _time("until"),
        _time("audited_until"),
        sa.CheckConstraint("until >= since", name="batch_marks_until"),
        sa.PrimaryKeyConstraint("cluster"),
    )
    op.create_table(
        "member_groups",
        _words("user"),
        _words("groups"),
        _time("at"),
        sa.PrimaryKeyConstraint("user"),
    )


def _time(name: str) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=False)


def _words(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=False)


def _number(name: str, kind: sa.Integer) -> sa.Column[int]:
    return sa.Column(name, kind, nullable=False, server_default=sa.text("0"))
