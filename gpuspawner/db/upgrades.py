"""Run the Alembic migrations that lie beside this file."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError

from ..core.errors import ConfigError

SCRIPTS = Path(__file__).parent / "migrations"

VERSION_TABLE = "gpuspawner_version"
"""Not Alembic's own name: JupyterHub's tables may lie in the same database."""


def config() -> Config:
    """The Alembic configuration; no alembic.ini, so that a wheel needs no extra file."""
    settings = Config()
    settings.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    return settings


def revision(connection: sa.Connection) -> str | None:
    """The version of the schema in the database; None for an empty one."""
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    return context.get_current_revision()


@cache
def newest() -> str | None:
    """The version that the newest migration leads to. Reads them all, which takes a while."""
    return ScriptDirectory.from_config(config()).get_current_head()


def upgrade(connection: sa.Connection) -> None:
    """Bring the schema to the newest version, inside the connection's transaction.

    Raises ConfigError for a database that a newer gpuspawner has upgraded.
    """
    current = revision(connection)
    if current == newest():
        return
    settings = config()
    settings.attributes["connection"] = connection
    try:
        command.upgrade(settings, "head")
    except CommandError as error:
        what = (
            f"the database is of version {current}, which this gpuspawner does not know ({error}); "
            "install the newer gpuspawner again, or restore the database from before its upgrade"
        )
        raise ConfigError(what=what) from None
