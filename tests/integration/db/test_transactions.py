"""All of a transaction or nothing, in every thread, and which work waits for which. Real: SQLite
and PostgreSQL."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from gpuspawner.core.errors import StoreUnavailable
from gpuspawner.db.engine import NestedWrite, Store
from gpuspawner.leases.models import LeaseState
from gpuspawner.services import Services
from tests.support.brokers import Make, problems, running
from tests.support.parts import each_database

pytestmark = each_database

things = sa.Table("things", sa.MetaData(), sa.Column("name", sa.Text, primary_key=True))
parts = sa.Table(
    "parts",
    things.metadata,
    # Checked at the end of the transaction.
    sa.Column(
        "name", sa.ForeignKey(things.c.name, deferrable=True, initially="DEFERRED"), nullable=False
    ),
)
ALL = sa.select(things.c.name).order_by(things.c.name)


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    store = Store(database_url)
    with store.write() as connection:
        things.metadata.create_all(connection)
    yield store
    store.close()


def add(connection: sa.Connection, name: str) -> None:
    connection.execute(sa.insert(things), {"name": name})


def all_of(connection: sa.Connection) -> list[str]:
    return list(connection.execute(ALL).scalars())


def names(store: Store) -> list[str]:
    return store.run(all_of)


class Mistake(Exception):
    """An error in the middle of a transaction."""


def test_transaction_is_committed_entirely_or_not_at_all(store: Store) -> None:
    def write(mark: str, mistake: bool) -> None:
        with store.write() as connection:
            add(connection, f"one{mark}")
            add(connection, f"two{mark}")
            if mistake:
                raise Mistake

    with pytest.raises(Mistake):
        write(" lost", True)
    assert names(store) == []
    write("", False)
    with pytest.raises(Mistake):
        write(" lost", True)
    write(" again", False)
    assert names(store) == ["one", "one again", "two", "two again"]


def test_write_in_a_read_transaction_fails(store: Store) -> None:
    """A read transaction of PostgreSQL, a query-only connection of SQLite: neither writes."""
    with pytest.raises(StoreUnavailable), store.read() as connection:
        if store.dialect == "sqlite":
            connection.exec_driver_sql("PRAGMA query_only=ON")
        add(connection, "new")
    assert names(store) == []


def test_writing_threads_take_turns(store: Store) -> None:
    """Each reads what the one before has written, whoever's thread it is."""

    def write(_: int) -> None:
        with store.write() as connection:
            add(connection, f"{len(all_of(connection)):03}")

    list(store.executor.map(write, range(60)))
    with ThreadPoolExecutor(8) as others:
        both = [*(others.submit(write, 0) for _ in range(30))]
        both += [store.executor.submit(write, 0) for _ in range(30)]
        for each in both:
            each.result()
    assert names(store) == [f"{number:03}" for number in range(120)]


def test_read_transaction_keeps_one_snapshot(store: Store) -> None:
    with store.read() as connection:
        before = all_of(connection)
        with store.write() as other:
            add(other, "new")
        assert [before, names(store), all_of(connection)] == [[], ["new"], []]
    assert names(store) == ["new"]


def test_busy_store_threads_do_not_block_other_threads(store: Store) -> None:
    workers = store.executor._max_workers
    everybody = threading.Barrier(workers + 1)

    def look(number: int) -> list[Any]:
        with store.read() as connection:
            found = all_of(connection)
            everybody.wait(timeout=60)
            everybody.wait(timeout=60)
            return found

    busy = [store.executor.submit(look, number) for number in range(workers)]
    everybody.wait(timeout=60)
    with store.write() as connection:
        add(connection, "new")
        assert names(store) == []
    everybody.wait(timeout=60)
    assert [each.result() for each in busy] == [[]] * workers
    assert names(store) == ["new"]


def test_refused_commit_leaves_nothing_behind(store: Store) -> None:
    """The database says no at the very end: no row, no open transaction, no lock."""
    for _ in range(2):
        with pytest.raises(sa.exc.IntegrityError), store.write() as connection:
            add(connection, "mine")
            connection.execute(sa.insert(parts), {"name": "nobody's"})
    other = Store(store.url)  # who waits for whatever the first one holds
    with other.write() as connection:
        add(connection, "theirs")
    other.close()
    store.run(lambda connection: add(connection, "later"), write=True)
    assert names(store) == ["later", "theirs"]


def test_transaction_that_cannot_begin_leaves_nothing_behind(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuspawner.db.engine.BUSY_SECONDS", 0.3)
    impatient = Store(store.url)

    def write() -> None:
        impatient.run(lambda connection: add(connection, "mine"), write=True)

    assert names(impatient) == []
    with store.write():  # nobody else's turn
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                write()
            assert impatient.engine.pool.checkedout() == 0
    write()
    assert names(store) == names(impatient) == ["mine"]
    impatient.close()


def test_nested_write_fails_and_undoes_both_writes(store: Store) -> None:
    sentence = "within another one of the same thread"
    with pytest.raises(NestedWrite, match=sentence), store.write() as connection:
        add(connection, "outer")
        with store.write() as inner:
            add(inner, "inner")
    assert names(store) == []
    store.run(lambda connection: add(connection, "later"), write=True)
    assert names(store) == ["later"]


def test_reads_within_a_view_share_one_snapshot(store: Store) -> None:
    with store.view():
        seen = [store.run(all_of)]
        with ThreadPoolExecutor(1) as threads:
            threads.submit(store.run, lambda c: add(c, "meanwhile"), write=True).result()
        seen.append(store.run(all_of))
        with store.write() as own:
            add(own, "by itself")
        seen.append(store.run(all_of))
    assert [*seen, store.run(all_of)] == [[], [], [], ["by itself", "meanwhile"]]


def test_database_error_within_a_view_becomes_store_unavailable(store: Store) -> None:
    with pytest.raises(StoreUnavailable), store.view(), store.read() as connection:
        connection.exec_driver_sql("SELECT 1").all()
        raise sa.exc.OperationalError("SELECT 1", None, Exception("gone"))
    assert names(store) == []


RELEASES = 50


@pytest.fixture
def services(make: Make) -> Services:
    return make(device_source=f"simulated:{RELEASES}xA100-80GB", opening_grant=1000)


async def test_reports_pages_and_requests_do_not_delay_releases(services: Services) -> None:
    """More of each than there are threads, and all of them hold a transaction open."""
    leases = [running(services, f"member{n}") for n in range(RELEASES)]
    done = threading.Event()

    def hold_open() -> None:
        with services.store.read() as connection:
            connection.exec_driver_sql("SELECT count(*) FROM leases").all()
            assert done.wait(600)

    def hold_on() -> None:
        assert done.wait(600)

    loop = asyncio.get_running_loop()
    held = [asyncio.ensure_future(services.report(hold_open)) for _ in range(8)]
    held += [asyncio.ensure_future(services.read(hold_open)) for _ in range(8)]
    held += [loop.run_in_executor(services.delegation.asking, hold_on) for _ in range(2000)]
    held += [asyncio.ensure_future(services.run_outside(hold_on)) for _ in range(20)]
    try:
        ended = await asyncio.gather(
            *(services.run(services.leases.release, lease.id, reason="stopped") for lease in leases)
        )
        assert {lease.state for lease in ended} == {LeaseState.ENDED}
        assert not any(task.done() for task in held)
    finally:
        done.set()
        await asyncio.gather(*held)
    assert problems(services.store) == []
