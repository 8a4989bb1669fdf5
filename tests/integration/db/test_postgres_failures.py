"""A PostgreSQL that stops, throws its clients out, is busy or full of them. Real: all of that.

Whatever happens, it is said as StoreUnavailable, nothing is half-written, and it works again
as soon as the database does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
import sqlalchemy as sa

from gpuspawner.core.errors import StoreUnavailable
from gpuspawner.db import engine as db_engine
from gpuspawner.leases import repository as leases_repository
from tests.support.broken_stores import assert_unavailable, assert_works, in_use
from tests.support.brokers import open_services
from tests.support.postgres import PrivatePostgres


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits ten seconds for a lock in a test."""
    monkeypatch.setattr(db_engine, "BUSY_SECONDS", 0.3)


def test_store_recovers_after_postgresql_restarts(postgres: PrivatePostgres) -> None:
    with in_use(postgres.migrated_database()) as services:
        with postgres.halted():
            assert_unavailable(services)
            assert_unavailable(services)
        assert_works(services)


def test_database_without_an_encoding_keeps_texts(postgres: PrivatePostgres) -> None:
    with in_use(postgres.ascii_database()) as services:
        assert_works(services)
        services.ledger.open_account("zoë")
        assert services.ledger.member("zoë").name == "member:zoë"


def test_transaction_is_rolled_back_if_postgresql_stops(postgres: PrivatePostgres) -> None:
    with in_use(postgres.migrated_database()) as services:
        before = services.leases.open_leases()[0]
        with (
            ExitStack() as halted,
            pytest.raises(StoreUnavailable),
            services.store.write() as connection,
        ):
            leases_repository.end(connection, before.id, before.granted_at, "half", charged=0)
            halted.enter_context(postgres.halted())
        assert services.leases.open_leases() == [before]
        assert_works(services)


OTHERS = sa.text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid != pg_backend_pid()"
)


ThrowOut = tuple[str, Callable[[], None]]


@pytest.fixture
def throw_out(postgres: PrivatePostgres) -> Iterator[ThrowOut]:
    """A database, and what ends all connections to it."""
    url = postgres.migrated_database()
    admin = sa.create_engine(url, isolation_level="AUTOCOMMIT")

    def all_others() -> None:
        with admin.connect() as connection:
            assert connection.execute(OTHERS).all()

    yield url, all_others
    admin.dispose()


def test_store_reconnects_after_postgresql_ends_its_connections(throw_out: ThrowOut) -> None:
    """A restart between two transactions is not even noticed."""
    url, all_others = throw_out
    with in_use(url) as services:
        all_others()
        assert_works(services)
        with pytest.raises(StoreUnavailable), services.store.write() as mine:
            all_others()
            mine.execute(sa.text("SELECT 1"))


def test_lost_connection_rolls_back_the_transaction(throw_out: ThrowOut) -> None:
    """Nothing of it is stored, not even a statement that follows an ignored error."""
    url, all_others = throw_out
    with in_use(url) as services:
        (before,) = services.leases.open_leases()

        def end(connection: sa.Connection) -> None:
            leases_repository.end(connection, before.id, before.granted_at, "half", charged=0)

        with pytest.raises(StoreUnavailable), services.store.write() as connection:
            end(connection)
            all_others()
        with pytest.raises(StoreUnavailable), services.store.write() as connection:
            end(connection)
            all_others()
            with suppress(sa.exc.DBAPIError):
                leases_repository.get(connection, before.id)
            end(connection)
        assert services.leases.open_leases() == [before]
        assert_works(services)


def test_other_postgresql_writer_blocks_writes_but_not_reads(
    postgres: PrivatePostgres, impatient: None
) -> None:
    url = postgres.migrated_database()
    with in_use(url) as services:
        other = open_services(f"{url}?application_name=other")
        with other.store.write():
            assert_unavailable(services, reads=False)
            assert len(services.leases.open_leases()) == 1, "who only reads is not disturbed"
        other.store.close()
        assert_works(services)


def test_connection_limit_makes_the_store_unavailable(postgres: PrivatePostgres) -> None:
    url = postgres.migrated_database()
    admin = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with in_use(url) as services, admin.connect() as connection:
        services.store.engine.dispose()
        connection.execute(sa.text(f'ALTER DATABASE "{admin.url.database}" CONNECTION LIMIT 0'))
        connection.execute(sa.text("DROP ROLE IF EXISTS member"))  # the server is everybody's
        connection.execute(sa.text("CREATE ROLE member LOGIN"))
        limited = open_services(url.replace("postgres@", "member@"))
        assert_unavailable(limited)
        limited.store.close()
        assert_works(services)
    admin.dispose()
