"""``gpuspawner audit`` against books that are right, and against every kind of row that is wrong.

Real: SQLite, PostgreSQL, the command. What is wrong is written behind the store's back, with
its triggers and constraints taken away first.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from datetime import timedelta

import pytest

from gpuspawner.core.units import MICRO
from gpuspawner.db import audit
from gpuspawner.db.engine import Store
from gpuspawner.services import Services
from tests.support.broken_stores import by_hand
from tests.support.brokers import Clock, broken_invariants, open_services, running
from tests.support.parts import each_database
from tests.support.years import Year, write_year


@pytest.fixture
def used(database_url: str) -> Iterator[Services]:
    """A store in which everything happened once: grant, hold, charge, refund, failure, end."""
    clock = Clock()
    services = open_services(database_url, clock, gpu_rates={"*": 4})
    anna = running(services, "anna", 2)
    clock.forward(minutes=30)
    services.ledger.charge_all()
    services.leases.release(anna.id, ended_at=clock.forward(minutes=7), reason="stopped")
    bert = running(services, "bert")
    clock.forward(hours=1)
    services.ledger.charge_all()
    services.leases.release(bert.id, ended_at=clock.now - timedelta(minutes=30), reason="refunded")
    carl = running(services, "carl")
    clock.forward(minutes=5)
    services.ledger.charge_all()
    services.leases.release(carl.id, ended_at=clock.now, reason="its start failed", failed=True)
    services.ledger.grant("member:anna", 1, actor="admin", reason="a microcredit")
    end = clock.now + timedelta(minutes=1)
    services.ledger.grant("member:bert", 5, actor="admin", reason="a minute's", until=end)
    running(services, "dora")
    clock.forward(minutes=1)
    services.ledger.charge_all()
    services.ledger.end_lots()
    yield services
    services.store.close()


def test_correct_database_passes_every_check(used: Services) -> None:
    findings, rows = used.audit.check()
    assert broken_invariants(used) == {}
    assert [finding.name for finding in findings] == list(audit.CHECKS)
    assert all(finding.law.endswith(".") for finding in findings)
    assert rows["leases"] == 4
    assert rows["postings"] == 2 * rows["transfers"] > 20


WRONG = (
    (
        "references",
        "UPDATE transfers SET lease_id = 'nobody' WHERE kind = 'refund'",
        "transfers.lease_id is 'nobody', but leases has no such row",
    ),
    (
        "places",
        "UPDATE lease_places SET open = false WHERE open",
        "is open, but its device",
    ),
    (
        "sharing",
        "INSERT INTO lease_places (lease_id, uuid, slot, "
        '"index", model, memory_bytes, open, slots, held_slots, sharer) '
        "SELECT (SELECT min(id) FROM leases WHERE ended_at IS NOT NULL), uuid, 1, "
        "\"index\", model, memory_bytes, open, 2, 1, 'eve' FROM lease_places WHERE open",
        "is leased whole, and other leases are on it",
    ),
    (
        "order of times",
        "UPDATE leases SET started_at = NULL WHERE state = 'running'",
        "its times contradict that",
    ),
    (
        "whole transfers",
        "DELETE FROM postings "
        "WHERE transfer_id IN (SELECT id FROM transfers WHERE kind = 'refund')",
        "has no postings: it moved nothing",
    ),
    (
        "marks of postings",
        "UPDATE postings SET apart = NOT apart "
        "WHERE transfer_id IN (SELECT id FROM transfers WHERE kind = 'refund')",
        "are marked wrongly",
    ),
    (
        "zero sum",
        "UPDATE postings SET amount = amount + 1 WHERE id = 1",
        "sum to 1 microcredits, not zero",
    ),
    (
        "balances",
        "UPDATE accounts SET balance = balance - 1 WHERE name = 'member:bert'",
        "The balance of member:bert is 97999999 microcredits, but its postings sum to 98000000",
    ),
    (
        "charges of leases",
        "UPDATE leases SET charged = charged + 5 WHERE state = 'running'",
        "microcredits were charged, but its postings took",
    ),
    (
        "credits that ended",
        "UPDATE lots SET taken = taken - 1",
        "4 microcredits of member:bert expired by its lots, but not by its postings",
    ),
    (
        "settlement of leases",
        "UPDATE leases SET ended_at = '2025-03-09 12:00:00' WHERE \"user\" = 'anna'",
        "has ended and owed",
    ),
    (
        "settlement of leases",
        "UPDATE leases SET outcome = '' WHERE outcome = 'failed'",
        "has ended and owed 333333 microcredits, but 0",
    ),
)
"""Invariants, a statement that breaks each, and what the audit says of the first wrong row."""


@each_database
def test_audit_names_the_first_wrong_row(used: Services) -> None:
    with by_hand(used) as connection:
        connection.commit()  # keeps the settings of by_hand through the rollbacks below
        for name, statement, sentence in WRONG:
            if used.store.dialect == "sqlite":
                connection.exec_driver_sql("BEGIN")
            assert connection.exec_driver_sql(statement).rowcount >= 1, name
            assert sentence in next(audit.CHECKS[name](connection), ""), name
            connection.rollback()
    assert broken_invariants(used) == {}


def test_audit_finds_wrong_refills_and_expired_credits(used: Services) -> None:
    clock = Clock.of(used)
    used.refills.add_refill(
        used.refills.plan_refill(
            "FREQ=DAILY",
            amount=10 * MICRO,
            actor="admin",
            reason="term",
            audience=["everybody"],
            starts_at=clock.now + timedelta(days=1),
            keep=timedelta(days=1),
        )
    )
    for _ in range(3):
        clock.forward(days=1)
        for due in used.refills.due_refills():
            used.refills.give_refill(due.id)
        used.ledger.end_lots()
    assert broken_invariants(used) == {}
    with by_hand(used) as connection:
        connection.exec_driver_sql("UPDATE refill_runs SET total = total + 1")
        connection.exec_driver_sql("UPDATE lots SET taken = taken - 1 WHERE taken > 0")
    found = broken_invariants(used)
    assert set(found) == {"refills", "credits that ended"}
    sentence = "UTC gave 40000001 microcredits to 4 accounts, but its postings gave 40000000 to 4"
    assert sentence in found["refills"]


def test_audit_finds_a_transfer_key_posted_twice(used: Services) -> None:
    columns = "id, key, kind, at, actor, reason, lease_id"
    loosen = {
        "postgresql": ("ALTER TABLE transfers DROP CONSTRAINT transfers_key_key",),
        "sqlite": (  # whose unique constraint cannot be taken away
            f"CREATE TABLE loose AS SELECT {columns} FROM transfers",
            "DROP TABLE transfers",
            "ALTER TABLE loose RENAME TO transfers",
        ),
    }
    change = "UPDATE transfers SET key = 'opening:member:anna' WHERE key = 'opening:member:bert'"
    with by_hand(used) as connection:
        for statement in (*loosen[used.store.dialect], change):
            connection.exec_driver_sql(statement)
    assert "The key opening:member:anna was posted 2 times" in broken_invariants(used)["keys"]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_damaged_sqlite_file_stops_the_audit(used: Services) -> None:
    """PostgreSQL looks after its own pages."""
    with used.store.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        page = connection.exec_driver_sql(
            "SELECT rootpage FROM sqlite_master WHERE name = 'postings_by_account'"
        ).scalar_one()
    with open(used.store.engine.url.database or "", "r+b") as file:
        file.seek((page - 1) * 4096 + 3)
        file.write(b"\xff\xff")
    used.store.engine.dispose()
    findings, _ = used.audit.check()
    assert findings[-1].name == "file"
    assert findings[-1].problem


def test_audit_holds_few_rows_in_memory(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it holds follows how many it looks at at a time, not how many there are."""
    names = ("zero sum", "balances", "charges of leases", "settlement of leases")
    store = Store(database_url)
    write_year(store, Year(members=20, devices=8, leases=200, days=10))
    tracemalloc.start()
    try:
        with store.read() as connection:

            def peak(name: str, at_once: int) -> int:
                monkeypatch.setattr(audit, "AT_ONCE", at_once)
                before = tracemalloc.get_traced_memory()[0]
                tracemalloc.reset_peak()
                assert list(audit.CHECKS[name](connection)) == []
                return tracemalloc.get_traced_memory()[1] - before

            for name in names:
                peak(name, 5)  # what is loaded once is loaded now
                assert peak(name, 5) < peak(name, 200) / 2, name
    finally:
        tracemalloc.stop()
        store.close()
