"""Runs the Alembic migrations beside this file."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa

from ..core.errors import ConfigError

if TYPE_CHECKING:
    from alembic.config import Config

SCRIPTS = Path(__file__).parent / "migrations"

VERSION_TABLE = "gpuspawner_version"
"""Not Alembic's own name: JupyterHub's tables may be in the same database."""


def config() -> Config:
    """Return the Alembic configuration; no alembic.ini, so that a wheel needs no extra file."""
    from alembic.config import Config

    settings = Config()
    settings.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    return settings


def revision(connection: sa.Connection) -> str | None:
    """Return the version of the schema in the database, or None for an empty one."""
    if not sa.inspect(connection).has_table(VERSION_TABLE):
        return None
    version = sa.table(VERSION_TABLE, sa.column("version_num", sa.Text))
    return connection.execute(sa.select(version.c.version_num)).scalar()


@cache
def versions() -> list[str]:
    """Return the version that each migration leads to, oldest first, from its file name."""
    return sorted(path.name.partition("_")[0] for path in SCRIPTS.glob("versions/[0-9]*.py"))


def newest() -> str:
    """Return the version that the newest migration leads to."""
    return versions()[-1]


def upgrade(connection: sa.Connection) -> None:
    """Upgrade the schema within the transaction. Raises ConfigError for an unknown version."""
    current = revision(connection)
    if current == newest():
        return
    if current is not None and current not in versions():
        what = (
            f"the database is of version {current}, which this gpuspawner does not know; "
            "install the newer gpuspawner again, or restore the database from before its upgrade"
        )
        raise ConfigError(what=what)
    # Only now: a process with an up-to-date database starts a quarter of a second earlier.
    from alembic import command

    settings = config()
    settings.attributes["connection"] = connection
    command.upgrade(settings, "head")
