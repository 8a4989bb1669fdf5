"""Database URLs as admins write them, on a real PostgreSQL and real files."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from jupyterhub import orm

from gpuspawner.core.errors import ConfigError
from gpuspawner.db.engine import Store
from gpuspawner.ledger import repository as ledger_repository
from tests.support.postgres import PrivatePostgres


def test_a_plain_postgresql_url_works_with_every_sqlalchemy(postgres: PrivatePostgres) -> None:
    url = sa.make_url(postgres.fresh_database()).set(drivername="postgresql")
    store = Store(url.render_as_string(hide_password=False))
    assert store.run(ledger_repository.all_accounts) == []
    store.close()


def test_the_file_is_for_the_hub_alone(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/hub.sqlite")
    assert store.run(ledger_repository.all_accounts) == []
    assert (tmp_path / "hub.sqlite").stat().st_mode & 0o777 == 0o600
    store.close()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqlite://", "must be a file"),
        ("sqlite:///:memory:", "must be a file"),
        ("mysql://localhost/x", "no supported database"),
        ("not a url", "write it like"),
    ],
)
def test_what_cannot_be_used_is_said(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Store(url)


def test_jupyterhubs_own_database_can_be_shared(postgres: PrivatePostgres) -> None:
    """Its tables and its Alembic version are not ours."""
    url = postgres.fresh_database()
    orm.new_session_factory(url)
    store = Store(url)
    assert store.run(ledger_repository.all_accounts) == []
    store.close()
    orm.new_session_factory(url)  # the hub starts again, and finds its version
