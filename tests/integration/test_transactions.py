"""All of a transaction or nothing, in every thread. Real: SQLite and PostgreSQL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from gpuspawner.errors import StoreUnavailable
from gpuspawner.store import Store
from gpuspawner.store.prepared import Prepared

things = sa.Table("things", sa.MetaData(), sa.Column("name", sa.Text, primary_key=True))
parts = sa.Table(
    "parts",
    things.metadata,
    # Looked at when the transaction ends.
    sa.Column(
        "name", sa.ForeignKey(things.c.name, deferrable=True, initially="DEFERRED"), nullable=False
    ),
)
ADD = Prepared(sa.insert(things), ("name",))
ADD_PART = Prepared(sa.insert(parts), ("name",))
ALL = Prepared(sa.select(things.c.name).order_by(things.c.name))
Run = Callable[[Callable[[], Any]], Any]


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    store = Store(database_url)
    with store.write() as connection:
        things.metadata.create_all(connection)
    yield store
    store.close()


@pytest.fixture(params=["a thread of the store's own", "another thread"])
def run(request: pytest.FixtureRequest, store: Store) -> Run:
    """Runs work in a thread that keeps its connection, or in one that borrows it each time."""
    if request.param == "another thread":
        return lambda work: work()
    return lambda work: store.executor.submit(work).result()


def names(store: Store) -> list[str]:
    with store.read() as connection:
        return [name for (name,) in ALL.rows(connection)]


class Mistake(Exception):
    """What somebody's code raises in the middle."""


ORDERS = ["prepared", "SQLAlchemy"], ["SQLAlchemy", "prepared"], ["prepared"], ["SQLAlchemy"], []


@pytest.mark.parametrize("order", ORDERS)
def test_all_is_committed_or_nothing_however_it_was_written(
    store: Store, run: Run, order: list[str]
) -> None:
    def write(mark: str, mistake: bool) -> None:
        with store.write() as connection:
            for how in order:
                if how == "prepared":
                    ADD.run(connection, name=how + mark)
                else:
                    connection.execute(sa.insert(things).values(name=how + mark))
            if mistake:
                raise Mistake

    with pytest.raises(Mistake):
        run(lambda: write(" lost", True))
    assert run(lambda: names(store)) == []
    run(lambda: write("", False))
    with pytest.raises(Mistake):
        run(lambda: write(" lost", True))
    run(lambda: write(" again", False))
    expected = sorted(how + mark for how in order for mark in ("", " again"))
    assert run(lambda: names(store)) == names(store) == expected


def test_a_read_is_one_view_in_every_thread(store: Store, run: Run) -> None:
    def view() -> list[list[str]]:
        with store.read() as connection:
            before = [name for (name,) in ALL.rows(connection)]
            with store.write() as other:
                ADD.run(other, name="new")
            within = names(store)
            after = list(connection.execute(sa.select(things.c.name)).scalars())
            return [before, within, after]

    assert run(view) == [[], ["new"], []]
    assert run(lambda: names(store)) == ["new"]


def test_others_read_and_write_while_every_thread_of_the_store_is_busy(store: Store) -> None:
    workers = store.executor._max_workers
    everybody = threading.Barrier(workers + 1)

    def look(number: int) -> list[Any]:
        with store.read() as connection:
            found = ALL.rows(connection)
            everybody.wait(timeout=60)
            everybody.wait(timeout=60)
            return found

    busy = [store.executor.submit(look, number) for number in range(workers)]
    everybody.wait(timeout=60)
    with store.write() as connection:
        ADD.run(connection, name="new")
        assert names(store) == []
    everybody.wait(timeout=60)
    assert [each.result() for each in busy] == [[]] * workers
    assert names(store) == ["new"]


@pytest.mark.parametrize("how", ["prepared", "SQLAlchemy"])
def test_a_commit_that_is_refused_leaves_nothing_behind(store: Store, run: Run, how: str) -> None:
    """The database says no at the very end: no row, no open transaction, no lock."""

    def write() -> None:
        with store.write() as connection:
            ADD.run(connection, name="mine")
            if how == "prepared":
                ADD_PART.run(connection, name="nobody's")
            else:
                connection.execute(sa.insert(parts).values(name="nobody's"))

    for _ in range(2):
        with pytest.raises(sa.exc.IntegrityError):
            run(write)
    other = Store(store.url)  # who waits for whatever the first one holds
    with other.write() as connection:
        ADD.run(connection, name="theirs")
    other.close()
    run(lambda: store.run(lambda connection: ADD.run(connection, name="later"), write=True))
    assert run(lambda: names(store)) == names(store) == ["later", "theirs"]


@pytest.mark.parametrize("kept", [True, False])
def test_a_connection_whose_first_statement_failed_is_not_used_again(
    store: Store, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    monkeypatch.setattr("gpuspawner.store.store.BUSY_SECONDS", 0.3)
    impatient, made = Store(store.url), []
    sa.event.listen(impatient.engine, "connect", lambda *_: made.append(None))

    def write() -> None:
        with impatient.write() as connection:
            ADD.run(connection, name="mine")

    def try_it() -> None:
        if kept:
            impatient.executor.submit(write).result()
        else:
            write()

    assert names(impatient) == []
    with store.write():  # nobody else's turn
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                try_it()
            assert impatient.engine.pool.checkedout() == 0
    try_it()
    assert (len(made), names(store)) == (4, ["mine"])
    impatient.close()
