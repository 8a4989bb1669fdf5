"""What the database itself forbids. Real: SQLite and PostgreSQL; the rows go past our checks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from itertools import product
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from gpuspawner.core.errors import (
    LedgerError,
    NoDeviceFree,
    ServerHasLease,
    UnknownAccount,
    UnknownLease,
)
from gpuspawner.db import engine as db_engine
from gpuspawner.db import schema as db_schema
from gpuspawner.db.engine import Store, newest, revision, upgrade
from gpuspawner.leases import repository as leases_repository
from gpuspawner.leases.models import Lease, LeasedDevice, LeaseState, ServerRef, Slot
from gpuspawner.ledger import reports
from gpuspawner.ledger import repository as ledger_repository
from gpuspawner.ledger import rules as ledger_rules
from tests.support.brokers import T0
from tests.support.leases import lease_of
from tests.support.parts import each_database
from tests.support.processes import wait_for

ANNA = "member:anna"


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    """An empty store in which anna has an account."""
    store = Store(database_url)
    with store.write() as connection:
        ledger_repository.open_account(connection, ANNA, T0)
    yield store
    store.close()


def insert(store: Store, table: sa.Table, **row: Any) -> None:
    """One row, as it is, in a transaction of its own."""
    with store.write() as connection:
        connection.execute(sa.insert(table).values(row))


def count(store: Store, table: sa.Table) -> int:
    with store.read() as connection:
        return int(connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())


def lease_row(name: str, **changes: Any) -> dict[str, Any]:
    row = {"id": name, "user": name, "server_name": "", "account": ANNA, "rate": 1, "hold": 1}
    return row | {"state": "granted", "granted_at": T0} | changes


def place_row(lease: str, uuid: str = "GPU-1", slot: int = 0, **changes: Any) -> dict[str, Any]:
    row = {"lease_id": lease, "uuid": uuid, "slot": slot, "index": 0, "model": "A100"}
    return row | {"memory_bytes": 80, "open": True} | changes


def ticket_row(name: str, **changes: Any) -> dict[str, Any]:
    row = {"id": name, "user": "anna", "server_name": "", "request": "{}", "state": "waiting"}
    return row | {"created_at": T0} | changes


@each_database
def test_slot_has_at_most_one_open_lease(store: Store) -> None:
    for name in ("one", "two", "three"):
        insert(store, db_schema.leases, **lease_row(name))
    insert(store, db_schema.lease_places, **place_row("one"))
    with pytest.raises(IntegrityError):
        insert(store, db_schema.lease_places, **place_row("two"))
    insert(store, db_schema.lease_places, **place_row("two", slot=1))
    insert(store, db_schema.lease_places, **place_row("two", uuid="GPU-2"))
    other = sa.update(db_schema.lease_places).where(db_schema.lease_places.c.uuid == "GPU-2")
    with pytest.raises(IntegrityError), store.write() as connection:
        connection.execute(other.values(uuid="GPU-1"))
    with store.read() as connection:
        assert leases_repository.taken(connection) == {
            Slot("GPU-1", 0): "one",
            Slot("GPU-1", 1): "two",
            Slot("GPU-2", 0): "two",
        }
    # An ended lease frees its slot for another one, and cannot open again while that is open.
    with store.write() as connection:
        leases_repository.end(connection, "one", T0, "stopped", charged=0)
    insert(store, db_schema.lease_places, **place_row("three"))
    again = sa.update(db_schema.lease_places).where(db_schema.lease_places.c.lease_id == "one")
    with pytest.raises(IntegrityError), store.write() as connection:
        connection.execute(again.values(open=True))


@each_database
def test_server_has_at_most_one_open_lease_and_ticket(store: Store) -> None:
    insert(store, db_schema.leases, **lease_row("one", user="anna"))
    with pytest.raises(IntegrityError):
        insert(store, db_schema.leases, **lease_row("two", user="anna", state="running"))
    insert(store, db_schema.leases, **lease_row("named", user="anna", server_name="lab"))
    insert(store, db_schema.leases, **lease_row("other", user="bert"))
    with store.write() as connection:
        leases_repository.end(connection, "one", T0, "stopped", charged=0)
    insert(store, db_schema.leases, **lease_row("two", user="anna"))
    again = sa.update(db_schema.leases).where(db_schema.leases.c.id == "one")
    with pytest.raises(IntegrityError), store.write() as connection:
        connection.execute(again.values(state="running", ended_at=None))

    insert(store, db_schema.tickets, **ticket_row("one"))
    with pytest.raises(IntegrityError):
        insert(store, db_schema.tickets, **ticket_row("two"))
    insert(store, db_schema.tickets, **ticket_row("named", server_name="lab"))
    end = sa.update(db_schema.tickets).where(db_schema.tickets.c.id == "one")
    with store.write() as connection:
        connection.execute(end.values(state="ended", ended_at=T0, outcome="granted"))
    insert(store, db_schema.tickets, **ticket_row("two"))


GIFT = ledger_rules.transfer_id("gift")
DEVICE = {"uuid": "GPU-1", "index": 0, "model": "A100", "memory_bytes": 80, "slots": 0}
TWICE = {"id": "other", "key": "gift", "kind": "grant", "at": T0, "actor": "a", "reason": "r"}
IMPOSSIBLE: tuple[tuple[sa.Table, dict[str, Any]], ...] = (
    (db_schema.leases, lease_row("one", state="ended")),
    (db_schema.leases, lease_row("one", ended_at=T0)),
    (db_schema.leases, lease_row("one", state="running", ended_at=T0)),
    (db_schema.leases, lease_row("one", state="paused")),
    (db_schema.leases, lease_row("one", rate=-1)),
    (db_schema.leases, lease_row("one", hold=-1)),
    (db_schema.leases, lease_row("one", charged=-1)),
    (db_schema.leases, lease_row("one", account="member:nobody")),
    (db_schema.tickets, ticket_row("one", state="ended")),
    (db_schema.tickets, ticket_row("one", ended_at=T0)),
    (db_schema.tickets, ticket_row("one", state="lost")),
    (db_schema.lease_places, place_row("no such lease")),
    (db_schema.devices, DEVICE | {"status": "ok", "observed_at": T0}),
    (db_schema.transfers, TWICE),
    (db_schema.postings, {"transfer_id": "no such transfer", "account": ANNA, "amount": 1}),
    (db_schema.postings, {"transfer_id": GIFT, "account": "member:nobody", "amount": 1}),
    (db_schema.accounts, {"name": "member:bert", "balance": -(2**62) - 1, "opened_at": T0}),
)


@each_database
def test_impossible_rows_are_rejected(store: Store) -> None:
    with store.write() as connection:
        ledger_repository.post(connection, grant("gift"))
    for table, row in IMPOSSIBLE:
        before = count(store, table)
        with pytest.raises(IntegrityError):
            insert(store, table, **row)
        assert count(store, table) == before, row
    insert(store, db_schema.transfers, **{**TWICE, "key": "another"})
    with pytest.raises(sa.exc.StatementError, match="time zone"):
        insert(store, db_schema.leases, **lease_row("one", granted_at=datetime(2025, 3, 1)))


# The ledger is append-only.


def grant(key: str, amount: int = 5, account: str = ANNA) -> Any:
    return ledger_rules.grant(account, amount, key=key, at=T0, actor="admin", reason="gift")


@each_database
def test_posted_rows_cannot_be_changed_or_deleted(store: Store) -> None:
    with store.write() as connection:
        ledger_repository.post(connection, grant("gift"))
        before = ledger_repository.of_key(connection, "gift")
    changes: list[Any] = [
        sa.update(db_schema.transfers).values(reason="x"),
        sa.update(db_schema.postings).values(amount=9),
        sa.delete(db_schema.transfers),
        sa.delete(db_schema.postings),
    ]
    if store.dialect == "postgresql":
        changes += [sa.text(f"TRUNCATE {table}") for table in ("postings", "transfers CASCADE")]
    for change in changes:
        with pytest.raises(IntegrityError, match="append-only"), store.write() as connection:
            connection.execute(change)
    with store.read() as connection:
        assert ledger_repository.of_key(connection, "gift") == before is not None


# The same as domain errors, and nothing half-written.


def lease(name: str, user: str, *uuids: str) -> Lease:
    devices = tuple(LeasedDevice(u, 0, n, "A100", 80) for n, u in enumerate(uuids))
    fields = {"account": ANNA, "environment": "pytorch", "devices": devices, "granted_at": T0}
    return lease_of(user, id=name, rate=7, hold=3, **fields)


@each_database
def test_transfer_for_an_unknown_lease_writes_nothing(store: Store) -> None:
    of_nothing = replace(grant("gift"), lease_id="no such lease")
    with pytest.raises(IntegrityError), store.write() as connection:
        ledger_repository.open_account(connection, "system:grants", T0)
        ledger_repository.post(connection, of_nothing)
    assert count(store, db_schema.transfers) == count(store, db_schema.postings) == 0


@each_database
def test_lease_of_a_taken_slot_or_server_is_refused(store: Store) -> None:
    with store.write() as connection:
        leases_repository.insert(connection, lease("one", "anna", "GPU-1"))
    with (
        pytest.raises(NoDeviceFree, match="Another session just took the GPU"),
        store.write() as connection,
    ):
        leases_repository.insert(connection, lease("two", "bert", "GPU-0", "GPU-1"))
    with pytest.raises(ServerHasLease), store.write() as connection:
        leases_repository.insert(connection, lease("two", "anna", "GPU-0"))
    with store.read() as connection:
        assert leases_repository.taken(connection) == {Slot("GPU-1", 0): "one"}
        with pytest.raises(UnknownLease, match="no lease 'two'"):
            leases_repository.get(connection, "two")


@each_database
def test_lease_is_read_back_as_written(store: Store) -> None:
    zone = timezone(timedelta(hours=-5))
    exact = datetime(2025, 3, 1, 7, 0, 0, 123456, tzinfo=zone)
    put = lease("one", "anna", "GPU-1", "GPU-0")
    with store.write() as connection:
        leases_repository.insert(connection, put)
        leases_repository.update(
            connection, "one", state=LeaseState.RUNNING, started_at=exact, engine_ref="c", charged=2
        )
    with store.read() as connection:
        got = leases_repository.get(connection, "one")
        assert got.started_at == exact and got.started_at.utcoffset() == timedelta(0)
        assert (got.state, got.engine_ref, got.charged) == (LeaseState.RUNNING, "c", 2)
        assert got.devices == put.devices and got.granted_at == T0
        assert leases_repository.open_leases(connection) == [got]
        assert leases_repository.of_account(connection, ANNA) == [got]
        assert ledger_repository.get_account(connection, ANNA).held == 1
        assert leases_repository.open_of(connection, ServerRef("anna")) == got
        assert leases_repository.open_of(connection, ServerRef("anna", "lab")) is None


@each_database
def test_more_than_1000_open_leases_are_read(store: Store) -> None:
    with store.write() as connection:
        for number in range(1001):
            leases_repository.insert(
                connection, lease(f"{number}", f"user{number}", f"GPU-{number}")
            )
    with store.read() as connection:
        found = leases_repository.open_leases(connection)
    assert len(found) == 1001 and all(len(one.devices) == 1 for one in found)


# The book.


@each_database
def test_transfer_changes_balances_once(store: Store) -> None:
    with store.write() as connection:
        assert ledger_repository.post(connection, grant("gift")) is True
        assert ledger_repository.post(connection, grant("gift")) is False
        with pytest.raises(LedgerError, match="used for another amount or account"):
            ledger_repository.post(connection, grant("gift", amount=6))
    with store.read() as connection:
        assert ledger_repository.get_account(connection, ANNA).balance == 5
        assert ledger_repository.get_account(connection, "system:grants").balance == -5
        assert [a.name for a in ledger_repository.all_accounts(connection)] == [ANNA]


@each_database
def test_transfer_batch_skips_those_already_posted(store: Store) -> None:
    """In their order, without those that are posted already or occur twice."""
    some = [grant(f"gift{number % 4}", number % 4 + 1) for number in range(6)]
    with store.write() as connection:
        assert ledger_repository.post_many(connection, []) == []
        assert ledger_repository.post(connection, some[1])
        posted = ledger_repository.post_many(connection, some)
        assert posted == [True, False, True, True, False, False]
        assert ledger_repository.post_many(connection, some) == [False] * 6
    with store.read() as connection:
        assert ledger_repository.get_account(connection, ANNA).balance == 10
        lines = reports.entry_page(connection, ANNA).entries
        assert [line.amount for line in reversed(lines)] == [2, 1, 3, 4]
        for transfer in some:
            assert ledger_repository.of_key(connection, transfer.key) == transfer


@each_database
def test_transfer_batch_is_posted_entirely_or_not_at_all(store: Store) -> None:
    wrong = {
        "the key 'gift' was used for another amount": [grant("gift"), grant("gift", 6)],
        "would have more than an account can hold": [grant("one"), grant("two", 2**63 - 1)],
        "'member:nobody'": [grant("one"), grant("two", account="member:nobody")],
    }
    for at_once, (what, some) in product((True, False), wrong.items()):
        error = UnknownAccount if "nobody" in what else LedgerError
        with pytest.raises(error, match=what), store.write() as connection:
            for part in [some] if at_once else [[each] for each in some]:
                ledger_repository.post_many(connection, part)
    too_much = [grant("one", 2**63 - 1), grant("two", 2**63 - 1)]
    with pytest.raises(LedgerError, match="no more for member:anna"), store.write() as connection:
        ledger_repository.post_many(connection, too_much, "no more for {name}")
    with pytest.raises(UnknownAccount, match="'member:nobody'"), store.write() as connection:
        ledger_repository.post(connection, grant("gift", account="member:nobody"))
    assert count(store, db_schema.transfers) == count(store, db_schema.postings) == 0
    with store.read() as connection:
        assert ledger_repository.get_account(connection, ANNA).balance == 0


@each_database
def test_balance_beyond_the_limit_is_rejected(store: Store) -> None:
    """Beyond 64 bits SQLite would go on with a float."""
    with store.write() as connection:
        ledger_repository.post(connection, grant("first", amount=2**62 - 1))
    for amount in (2**62, 2**63 - 1):
        with pytest.raises(LedgerError, match="more than an account can hold"):
            second = grant("second", amount=amount)
            store.run(lambda c, it=second: ledger_repository.post(c, it), write=True)
    with store.read() as connection:
        assert ledger_repository.get_account(connection, ANNA).balance == 2**62 - 1
        assert count(store, db_schema.transfers) == 1


@each_database
def test_statement_shows_the_balance_after_each_line(store: Store) -> None:
    with store.write() as connection:
        for number in range(1, 5):
            ledger_repository.post(connection, grant(f"gift{number}", amount=number))
    with store.read() as connection:
        lines = reports.entry_page(connection, ANNA, limit=3).entries
        assert [(line.amount, line.balance) for line in lines] == [(4, 10), (3, 6), (2, 3)]
        assert {(line.kind, line.reason, line.actor, line.at) for line in lines} == {
            ("grant", "gift", "admin", T0)
        }
        with pytest.raises(UnknownAccount):
            reports.entry_page(connection, "member:nobody")


# Transactions.


@each_database
def test_starting_process_does_not_wait_for_a_writer(database_url: str) -> None:
    """An up-to-date schema is checked without a lock."""
    writing, starting = Store(database_url), Store(database_url)
    with writing.write():
        assert starting.run(lambda c: c.execute(sa.text("SELECT 1")).scalar_one()) == 1
    writing.close()
    starting.close()


def test_starting_process_waits_for_a_schema_upgrade(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for longer than a writer waits for another one."""
    monkeypatch.setattr(db_engine, "BUSY_SECONDS", 0.1)
    upgrading, starting = Store(empty_database_url), Store(empty_database_url)
    if upgrading.dialect == "sqlite":
        db_engine._create_private(upgrading.engine.url.database)
    looks: list[bool] = []
    is_current = starting._is_current
    monkeypatch.setattr(starting, "_is_current", lambda: looks.append(is_current()) or looks[-1])
    with ThreadPoolExecutor(1) as threads:
        with upgrading.write_engine.begin() as connection:
            upgraded = threads.submit(starting.run, revision, write=True)
            wait_for(lambda: len(looks) > 2 or upgraded.done(), "two waits that were too short")
            upgrade(connection)
        assert upgraded.result() == newest()
    assert looks[-1], "it found what the other one had done"
    upgrading.close()
    starting.close()
