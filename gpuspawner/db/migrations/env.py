"""Alembic's entry: migrate over the connection that the store hands in."""

from __future__ import annotations

from alembic import context

from gpuspawner.db.engine import VERSION_TABLE
from gpuspawner.db.schema import metadata

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=metadata,
    transactional_ddl=True,
    version_table=VERSION_TABLE,
)
context.run_migrations()
