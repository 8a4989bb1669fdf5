"""Run the Alembic migrations that lie beside this file."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

SCRIPTS = Path(__file__).parent / "migrations"


def config() -> Config:
    """The Alembic configuration; no alembic.ini, so that a wheel needs no extra file."""
    settings = Config()
    settings.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    return settings


def upgrade(connection: sa.Connection) -> None:
    """Bring the schema to the newest version, inside the connection's transaction."""
    settings = config()
    head = ScriptDirectory.from_config(settings).get_current_head()
    if MigrationContext.configure(connection).get_current_revision() == head:
        return
    settings.attributes["connection"] = connection
    command.upgrade(settings, "head")
