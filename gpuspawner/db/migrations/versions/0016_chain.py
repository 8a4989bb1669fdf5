"""Hash chains over the ledger, the audit trail and ended leases.

Revision ID: 0016
Revises: 0015
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gpuspawner.db import hash_chain

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.add_column("postings", sa.Column("link", sa.Text))
    number = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.create_table(
        "chain",
        sa.Column("id", number, nullable=False, autoincrement=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("ref", sa.Text(), nullable=False),
        sa.Column("facts", sa.Text(), nullable=False),
        sa.Column("posting", sa.BigInteger(), nullable=False),
        sa.Column("link", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("chain_by_ref", "chain", ["kind", "ref"])
    connection = op.get_bind()
    hash_chain.chain_existing(connection)
    for statement in _SQLITE if connection.dialect.name == "sqlite" else _POSTGRESQL:
        op.execute(sa.text(statement))


_SENTENCE = "the chain is append-only"
_SQLITE = (
    "CREATE TRIGGER chain_never_update BEFORE UPDATE ON chain BEGIN "
    f"SELECT RAISE(ABORT, '{_SENTENCE}'); END",
    "CREATE TRIGGER chain_never_delete BEFORE DELETE ON chain BEGIN "
    f"SELECT RAISE(ABORT, '{_SENTENCE}'); END",
)
_POSTGRESQL = (
    # Its own statement is planned once a connection, and not each time that somebody asks.
    "CREATE FUNCTION gpuspawner_newest_link() RETURNS text AS $$ "
    "BEGIN RETURN (SELECT link FROM postings ORDER BY id DESC LIMIT 1); "
    "END $$ LANGUAGE plpgsql STABLE",
    "CREATE FUNCTION gpuspawner_chain_append_only() RETURNS trigger AS $$ "
    f"BEGIN RAISE EXCEPTION '{_SENTENCE}' USING ERRCODE = 'integrity_constraint_violation'; "
    "END $$ LANGUAGE plpgsql",
    "CREATE TRIGGER chain_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON chain "
    "FOR EACH STATEMENT EXECUTE FUNCTION gpuspawner_chain_append_only()",
)
