"""Which postings are apart from the charges of leases, of which there are thousands.

Revision ID: 0010
Revises: 0009
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"

_MARK = """
    UPDATE postings SET apart = true WHERE transfer_id IN (
        SELECT id FROM transfers
        WHERE kind NOT IN ('charge', 'refund') OR key LIKE 'refund:%'
    )
"""


def upgrade() -> None:
    column = sa.Column("apart", sa.Boolean, nullable=False, server_default=sa.false())
    op.add_column("postings", column)
    sqlite = op.get_bind().dialect.name == "sqlite"
    off, on = _SQLITE if sqlite else _POSTGRESQL
    # Append-only as ever: what it says does not change, and nobody else sees it meanwhile.
    for statement in (off, _MARK, on):
        op.execute(sa.text(statement))
    condition = sa.text("apart")
    op.create_index(
        "postings_apart",
        "postings",
        ["account", "id"],
        sqlite_where=condition,
        postgresql_where=condition,
    )


_SQLITE = (
    "DROP TRIGGER postings_never_update",
    "CREATE TRIGGER postings_never_update BEFORE UPDATE ON postings BEGIN "
    "SELECT RAISE(ABORT, 'the ledger is append-only: correct it by a reversal'); END",
)
_POSTGRESQL = (
    "ALTER TABLE postings DISABLE TRIGGER postings_append_only",
    "ALTER TABLE postings ENABLE TRIGGER postings_append_only",
)
