"""The queue: tickets in full, session lengths, claims, closures, the audit trail, notices.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    for column in (
        sa.Column("group", sa.Text(), nullable=False, server_default=sa.text("''")),
        sa.Column("seconds", sa.BigInteger()),
        sa.Column("extended", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("told_minutes", sa.Float()),
        sa.Column("ticket_id", sa.Text()),
        sa.Column("claim_seconds", sa.BigInteger()),
        sa.Column("claimed_at", sa.DateTime(timezone=True)),
        sa.Column("outcome", sa.Text(), nullable=False, server_default=sa.text("''")),
    ):
        op.add_column("leases", column)
    op.drop_table("tickets")  # nothing has written one before this version
    op.create_table(
        "tickets",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("server_name", sa.Text(), nullable=False),
        sa.Column("group", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("options", sa.Text(), nullable=False),
        sa.Column("engine", sa.Text(), nullable=False),
        sa.Column("seconds", sa.BigInteger(), nullable=True),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("boost", sa.Float(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=True),
        sa.Column("last", sa.Boolean(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("end_reason", sa.Text(), nullable=False),
        sa.Column("lease_id", sa.Text(), nullable=True),
        sa.CheckConstraint("(state = 'ended') = (ended_at IS NOT NULL)", name="tickets_end"),
        sa.CheckConstraint("(state = 'ended') = (outcome != '')", name="tickets_outcome"),
        sa.CheckConstraint("state IN ('waiting', 'ended')", name="tickets_state"),
        sa.ForeignKeyConstraint(["lease_id"], ["leases.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(
        "one_open_ticket_a_server",
        "tickets",
        ["user", "server_name"],
        unique=True,
        sqlite_where=sa.text("state = 'waiting'"),
        postgresql_where=sa.text("state = 'waiting'"),
    )
    op.create_table(
        "closures",
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("subject"),
    )
    op.create_table(
        "audit",
        _id(),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    _notices()
    for statement in _append_only(op.get_bind().dialect.name):
        op.execute(statement)


def _notices() -> None:
    op.create_table(
        "notices",
        _id(),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("sent_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("key"),
    )
    op.create_index(
        "notices_unsent",
        "notices",
        ["id"],
        unique=False,
        sqlite_where=sa.text("sent_at IS NULL"),
        postgresql_where=sa.text("sent_at IS NULL"),
    )
    op.create_index("notices_by_user", "notices", ["user", "id"], unique=False)
    op.create_table(
        "notice_choices",
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("channel", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("kinds", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("user", "channel"),
    )


def _id() -> sa.Column[int]:
    return sa.Column(
        "id",
        sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
        autoincrement=True,
        nullable=False,
    )


def _append_only(dialect: str) -> list[str]:
    """Triggers that keep the audit trail append-only."""
    sentence = "the audit trail is append-only"
    if dialect == "sqlite":
        return [
            f"CREATE TRIGGER audit_never_{verb} BEFORE {verb.upper()} ON audit "
            f"BEGIN SELECT RAISE(ABORT, '{sentence}'); END"
            for verb in ("update", "delete")
        ]
    return [
        "CREATE FUNCTION gpuspawner_audit_append_only() RETURNS trigger AS $$ "
        f"BEGIN RAISE EXCEPTION '{sentence}' USING ERRCODE = 'integrity_constraint_violation'; "
        "END $$ LANGUAGE plpgsql",
        "CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
        "FOR EACH STATEMENT EXECUTE FUNCTION gpuspawner_audit_append_only()",
    ]
