"""Real: SQLite and PostgreSQL. A prepared statement gives what SQLAlchemy's own execution gives."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import IntegrityError

from gpuspawner.errors import StoreUnavailable
from gpuspawner.store import Store
from gpuspawner.store.prepared import Prepared
from gpuspawner.store.schema import UTCDateTime

things = sa.Table(
    "things",
    sa.MetaData(),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("at", UTCDateTime),
    sa.Column("open", sa.Boolean, default=True),
    sa.Column("share", sa.Float),
    sa.Column("amount", sa.BigInteger, default=7),
)
EXACT = datetime(2025, 3, 1, 7, 0, 0, 123456, tzinfo=timezone(timedelta(hours=-5)))
ROWS = [
    {"name": "100 % of 'it'", "at": EXACT, "share": 0.1, "amount": 2**62},
    {"name": "größer?", "at": None, "share": None, "amount": -1},
]
INSERT = Prepared(sa.insert(things), ("name", "at", "share", "amount"))
ALL = sa.select(things).order_by(things.c.name)


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    store = Store(database_url)
    with store.write() as connection:
        things.create(connection)
    yield store
    store.close()


def test_rows_go_in_and_come_out_as_sqlalchemy_has_them(store: Store) -> None:
    with store.write() as connection:
        assert INSERT.run(connection, **ROWS[0]) == 1
        INSERT.run_each(connection, ROWS[1:])
    with store.read() as connection:
        found = Prepared(ALL).rows(connection)
        assert found == [tuple(row) for row in connection.execute(ALL)]
    first, second = found
    assert first == ("100 % of 'it'", EXACT, True, 0.1, 2**62)
    assert first[1].utcoffset() == timedelta(0) and isinstance(first[2], bool)
    assert second == ("größer?", None, True, None, -1)


@pytest.mark.parametrize(
    "moment",
    [EXACT, datetime(1, 1, 1, tzinfo=timezone.utc), datetime(9999, 12, 31, tzinfo=timezone.utc)],
)
def test_times_in_sqlite_are_written_as_sqlalchemy_writes_them(moment: datetime) -> None:
    """Who reads the database with another program, and what was written before, sees no change."""
    dialect = sqlite.dialect()
    theirs = sa.DateTime().dialect_impl(dialect).bind_processor(dialect)
    ours = UTCDateTime().dialect_impl(dialect).bind_processor(dialect)
    assert theirs is not None and ours is not None
    plain = moment.astimezone(timezone.utc).replace(tzinfo=None)
    assert ours(moment) == theirs(plain) and ours(None) is None
    back = UTCDateTime().dialect_impl(dialect).result_processor(dialect, None)
    assert back is not None and back(None) is None
    assert back(theirs(plain)) == moment and back(theirs(plain)).tzinfo is timezone.utc
    assert back("2025-03-01 12:00:00") == datetime(2025, 3, 1, 12, tzinfo=timezone.utc)
    with pytest.raises(ValueError, match="carry a time zone"):
        ours(plain)


def test_values_in_the_statement_and_values_that_are_given(store: Store) -> None:
    late = Prepared(
        sa.update(things)
        .where(things.c.amount > 0, things.c.name.like("100 %"), things.c.at < sa.bindparam("t"))
        .values(open=False, amount=things.c.amount - sa.bindparam("less"))
    )
    with store.write() as connection:
        INSERT.run_each(connection, ROWS)
        assert late.run(connection, t=EXACT, less=1) == 0
        assert late.run(connection, t=EXACT + timedelta(microseconds=1), less=1) == 1
        with pytest.raises(KeyError):
            late.run(connection, t=EXACT)
        changed = Prepared(ALL).rows(connection)
    assert changed[0][2:] == (False, 0.1, 2**62 - 1) and changed[1][2] is True


def test_a_default_is_written_and_one_that_differs_by_row_is_refused(store: Store) -> None:
    named = Prepared(sa.insert(things), ("name",))
    with store.write() as connection:
        named.run(connection, name="one")
        assert Prepared(ALL).rows(connection) == [("one", None, True, None, 7)]
    drawn = sa.Table(
        "drawn", sa.MetaData(), sa.Column("a", sa.Text), sa.Column("b", sa.Text, default=str)
    )
    with store.write() as connection, pytest.raises(TypeError, match="values of each row"):
        Prepared(sa.insert(drawn), ("a",)).run(connection, a="one")


def test_what_a_change_returns(store: Store) -> None:
    """Converted like what a SELECT finds."""
    named = things.c.name == sa.bindparam("which")
    move = Prepared(sa.update(things).where(named).returning(things.c.at, things.c.open), ("at",))
    with store.write() as connection:
        INSERT.run_each(connection, ROWS)
        assert move.rows(connection, which="größer?", at=EXACT) == [(EXACT, True)]
        assert move.rows(connection, which="nothing", at=EXACT) == []
        assert [row[1] for row in Prepared(ALL).rows(connection)] == [EXACT, EXACT]


def test_what_the_driver_says_is_sqlalchemys_error(store: Store) -> None:
    with pytest.raises(IntegrityError) as caught, store.write() as connection:
        INSERT.run_each(connection, [ROWS[0], ROWS[0]])
    assert "INSERT INTO things" in str(caught.value)
    with store.read() as connection:
        assert Prepared(ALL).rows(connection) == [], "the transaction was given up"
    with pytest.raises(ValueError, match="time zone"), store.write() as connection:
        INSERT.run(connection, **ROWS[0] | {"at": datetime(2025, 3, 1)})


def test_a_database_that_refuses_is_not_there(store: Store) -> None:
    """A read transaction of PostgreSQL, a query-only connection of SQLite: neither writes."""
    with pytest.raises(StoreUnavailable), store.read() as connection:
        if store.dialect == "sqlite":
            connection.exec_driver_sql("PRAGMA query_only=ON")
        INSERT.run(connection, **ROWS[0])
    with store.read() as connection:
        assert connection.execute(ALL).all() == []


def test_a_statement_that_is_a_transaction_of_its_own(store: Store) -> None:
    named = things.c.name == sa.bindparam("which")
    rename = Prepared(sa.update(things).where(named).returning(things.c.amount), ("name",))
    with store.write() as connection:
        INSERT.run_each(connection, ROWS)
    assert store.write_one(rename, which="größer?", name="größer") == [(-1,)]
    with pytest.raises(IntegrityError):
        store.write_one(rename, which="größer", name=ROWS[0]["name"])
    with store.read() as connection:
        assert [row[0] for row in Prepared(ALL).rows(connection)] == ["100 % of 'it'", "größer"]


def test_threads_that_write_come_one_at_a_time(store: Store) -> None:
    """Both kinds of writers, of which each reads what the one before has written."""
    more = {"amount": things.c.amount + 1}
    added = Prepared(sa.update(things).values(**more).returning(things.c.amount))
    with store.write() as connection:
        INSERT.run(connection, **ROWS[1])

    def write(number: int) -> None:
        if number % 2:
            store.write_one(added)
            return
        with store.write() as connection:
            ((_, _, _, _, amount),) = Prepared(ALL).rows(connection)
            connection.execute(sa.update(things).values(amount=amount + 1))

    list(store.executor.map(write, range(60)))
    with ThreadPoolExecutor(8) as others:
        list(others.map(write, range(60)))
    with store.read() as connection:
        assert Prepared(ALL).rows(connection)[0][4] == -1 + 120
