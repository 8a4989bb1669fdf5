"""A PostgreSQL that stops, throws its clients out, is busy or full of them. Real: all of that.

Whatever happens, it is said as StoreUnavailable, nothing is half-written, and it works again
as soon as the database does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import pytest
import sqlalchemy as sa

from gpuspawner.core.errors import StoreUnavailable
from gpuspawner.db import engine as db_engine
from gpuspawner.leases import repository as leases_repository
from tests.support.broken_stores import assert_unavailable, assert_works, in_use
from tests.support.brokers import open_broker
from tests.support.postgres import PrivatePostgres


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits ten seconds for a lock in a test."""
    monkeypatch.setattr(db_engine, "BUSY_SECONDS", 0.3)


@pytest.fixture(scope="module")
def server(postgres_servers: None) -> Iterator[PrivatePostgres]:
    """A server of our own: it is stopped in the middle of everything."""
    with PrivatePostgres() as server:
        yield server


def test_postgresql_stops_and_comes_back(server: PrivatePostgres) -> None:
    with in_use(server.fresh_database()) as broker:
        server.halt()
        assert_unavailable(broker)
        assert_unavailable(broker)
        server.start()
        assert_works(broker)


def test_postgresql_stops_within_a_transaction(server: PrivatePostgres) -> None:
    with in_use(server.fresh_database()) as broker:
        before = broker.open_leases()[0]
        with pytest.raises(StoreUnavailable), broker.store.write() as connection:
            leases_repository.end(connection, before.id, before.granted_at, "half", charged=0)
            server.halt()
        server.start()
        assert broker.open_leases() == [before]
        assert_works(broker)


OTHERS = sa.text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid != pg_backend_pid()"
)


ThrowOut = tuple[str, Callable[[], None]]


@pytest.fixture
def throw_out(server: PrivatePostgres) -> Iterator[ThrowOut]:
    """A database, and what ends all connections to it."""
    url = server.fresh_database()
    admin = sa.create_engine(url, isolation_level="AUTOCOMMIT")

    def all_others() -> None:
        with admin.connect() as connection:
            assert connection.execute(OTHERS).all()

    yield url, all_others
    admin.dispose()


def test_postgresql_throws_its_clients_out(throw_out: ThrowOut) -> None:
    """A restart between two transactions is not even noticed."""
    url, all_others = throw_out
    with in_use(url) as broker:
        all_others()
        assert_works(broker)
        with pytest.raises(StoreUnavailable), broker.store.write() as mine:
            all_others()
            mine.execute(sa.text("SELECT 1"))


def test_a_connection_that_is_lost_before_the_commit(throw_out: ThrowOut) -> None:
    """Between the last statement and the COMMIT, whoever wrote: nothing of it is there."""
    url, all_others = throw_out
    with in_use(url) as broker:
        (before,) = broker.open_leases()

        def write() -> None:
            with broker.store.write() as connection:
                leases_repository.end(connection, before.id, before.granted_at, "half", charged=0)
                all_others()

        for run in (write, lambda: broker.store.executor.submit(write).result()):
            with pytest.raises(StoreUnavailable):
                run()
            assert broker.open_leases() == [before]
        assert_works(broker)


def test_threads_of_the_store_do_not_notice_either(throw_out: ThrowOut) -> None:
    url, all_others = throw_out
    with in_use(url) as broker:
        for work in (
            broker.open_leases,
            partial(broker.ledger.open_account, "bert"),
            broker.ledger.accounts,
        ):
            assert broker.store.executor.submit(work).result()
            all_others()
        broker.store.executor.submit(assert_works, broker).result()


def test_nothing_goes_on_after_a_transaction_was_lost(throw_out: ThrowOut) -> None:
    """Not even for somebody who takes no notice: the rest would be written by itself."""
    url, all_others = throw_out
    with in_use(url) as broker:
        (before,) = broker.open_leases()

        def careless() -> None:
            with broker.store.write() as connection:
                leases_repository.end(connection, before.id, before.granted_at, "half", charged=0)
                all_others()
                with suppress(sa.exc.DBAPIError):
                    leases_repository.get(connection, before.id)
                leases_repository.end(connection, before.id, before.granted_at, "half", charged=0)

        for run in (careless, broker.store.executor.submit(careless).result):
            with pytest.raises(StoreUnavailable):
                run()
        assert broker.open_leases() == [before]
        assert_works(broker)


def test_another_writer_of_postgresql_that_does_not_let_go(server: PrivatePostgres) -> None:
    url = server.fresh_database()
    with in_use(url) as broker:
        other = open_broker(f"{url}?application_name=other")
        with other.store.write():
            assert_unavailable(broker, reads=False)
            assert len(broker.open_leases()) == 1, "who only reads is not disturbed"
        other.store.close()
        assert_works(broker)


def test_postgresql_takes_no_more_clients(server: PrivatePostgres) -> None:
    url = server.fresh_database()
    admin = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with in_use(url) as broker, admin.connect() as connection:
        broker.store.engine.dispose()
        connection.execute(sa.text(f'ALTER DATABASE "{admin.url.database}" CONNECTION LIMIT 0'))
        connection.execute(sa.text("CREATE ROLE member LOGIN"))
        limited = open_broker(url.replace("postgres@", "member@"))
        assert_unavailable(limited)
        limited.store.close()
        assert_works(broker)
    admin.dispose()
