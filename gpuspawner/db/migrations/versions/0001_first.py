"""Devices, leases, tickets and the ledger, with what must never be.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "accounts",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("balance", sa.BigInteger(), nullable=False),
        sa.Column("opened_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "balance BETWEEN -4611686018427387904 AND 4611686018427387904",
            name="accounts_balance",
        ),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "devices",
        sa.Column("uuid", sa.Text(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("pci_bus_id", sa.Text(), nullable=False),
        sa.Column("parent_uuid", sa.Text(), nullable=True),
        sa.Column("compute_mode", sa.Text(), nullable=False),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("processes", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("observed_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("slots >= 1", name="devices_have_slots"),
        sa.PrimaryKeyConstraint("uuid"),
    )
    op.create_table(
        "tickets",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("server_name", sa.Text(), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("end_reason", sa.Text(), nullable=False),
        sa.CheckConstraint("(state = 'ended') = (ended_at IS NOT NULL)", name="tickets_end"),
        sa.CheckConstraint("state IN ('waiting', 'ended')", name="tickets_state"),
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
        "leases",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("server_name", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("rate", sa.BigInteger(), nullable=False),
        sa.Column("hold", sa.BigInteger(), nullable=False),
        sa.Column("charged", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("engine", sa.Text(), nullable=False),
        sa.Column("engine_ref", sa.Text(), nullable=False),
        sa.Column("granted_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("end_reason", sa.Text(), nullable=False),
        sa.Column("warned_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("(state = 'ended') = (ended_at IS NOT NULL)", name="leases_end"),
        sa.CheckConstraint("state IN ('granted', 'running', 'ended')", name="leases_state"),
        sa.CheckConstraint("rate >= 0 AND hold >= 0 AND charged >= 0", name="leases_amounts"),
        sa.ForeignKeyConstraint(
            ["account"],
            ["accounts.name"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("leases_by_account", "leases", ["account", "granted_at"], unique=False)
    op.create_index(
        "one_open_lease_a_server",
        "leases",
        ["user", "server_name"],
        unique=True,
        sqlite_where=sa.text("state != 'ended'"),
        postgresql_where=sa.text("state != 'ended'"),
    )
    op.create_index(
        "open_leases",
        "leases",
        ["account"],
        unique=False,
        sqlite_where=sa.text("state != 'ended'"),
        postgresql_where=sa.text("state != 'ended'"),
    )
    op.create_table(
        "lease_places",
        sa.Column("lease_id", sa.Text(), nullable=False),
        sa.Column("uuid", sa.Text(), nullable=False),
        sa.Column("slot", sa.Integer(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("open", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["lease_id"],
            ["leases.id"],
        ),
        sa.PrimaryKeyConstraint("lease_id", "uuid", "slot"),
    )
    op.create_index(
        "one_open_lease_a_slot",
        "lease_places",
        ["uuid", "slot"],
        unique=True,
        sqlite_where=sa.text("open"),
        postgresql_where=sa.text("open"),
    )
    op.create_table(
        "transfers",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("lease_id", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["lease_id"],
            ["leases.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("key"),
    )
    op.create_index("transfers_by_lease", "transfers", ["lease_id"], unique=False)
    op.create_table(
        "postings",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("transfer_id", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["account"],
            ["accounts.name"],
        ),
        sa.ForeignKeyConstraint(
            ["transfer_id"],
            ["transfers.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("postings_by_account", "postings", ["account", "id"], unique=False)
    op.create_index("postings_by_transfer", "postings", ["transfer_id"], unique=False)
    for statement in _append_only(op.get_bind().dialect.name):
        op.execute(statement)


def _append_only(dialect: str) -> list[str]:
    """Triggers that keep the ledger append-only."""
    sentence = "the ledger is append-only: correct it by a reversal"
    tables = ("transfers", "postings")
    if dialect == "sqlite":
        return [
            f"CREATE TRIGGER {table}_never_{verb} BEFORE {verb.upper()} ON {table} "
            f"BEGIN SELECT RAISE(ABORT, '{sentence}'); END"
            for table in tables
            for verb in ("update", "delete")
        ]
    function = (
        "CREATE FUNCTION gpuspawner_append_only() RETURNS trigger AS $$ "
        f"BEGIN RAISE EXCEPTION '{sentence}' USING ERRCODE = 'integrity_constraint_violation'; "
        "END $$ LANGUAGE plpgsql"
    )
    return [function] + [
        f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
        "FOR EACH STATEMENT EXECUTE FUNCTION gpuspawner_append_only()"
        for table in tables
    ]
