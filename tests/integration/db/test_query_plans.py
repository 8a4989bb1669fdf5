"""Query plans. Real: SQLite and PostgreSQL.

Open leases are few, and ended ones grow for years: no query about open leases may read ended ones.
A partial index serves only a query that repeats its condition.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import sqlalchemy as sa

from gpuspawner.db.engine import Store
from gpuspawner.db.schema import TO_ADD_UP
from gpuspawner.devices.placement import texts
from gpuspawner.leases import allocation
from gpuspawner.leases import repository as leases_repository
from gpuspawner.leases.models import Lease, LeasedDevice, Request, ServerRef, Slot
from gpuspawner.ledger import credit_repository
from gpuspawner.ledger import repository as ledger_repository
from gpuspawner.members import repository as members_repository
from tests.support.brokers import T0, open_services
from tests.support.leases import lease_of
from tests.support.parts import each_database

MOST_STATEMENTS = 17
"""Of a grant, a confirmation and a release together, with the three that begin a transaction."""

QUESTIONS: dict[str, Callable[[sa.Connection], Any]] = {
    "the open lease of a server": lambda c: leases_repository.open_of(c, ServerRef("anna")),
    "all open leases": leases_repository.open_leases,
    "places with their leases": leases_repository.taken,
    "places": leases_repository.places_taken,
    "charges that are due": lambda c: ledger_repository.portion_of_charges(
        c, T0, timedelta(minutes=1), 200
    ),
    "an account with what it has set aside": lambda c: ledger_repository.find_account(
        c, "member:anna"
    ),
    "what is to be added up": lambda c: leases_repository.where(c, TO_ADD_UP),
    "what former members still have": members_repository.members_with_leases,
    "what a grant must know": lambda c: allocation.read(c, ServerRef("anna"), "member:anna"),
}

FEW = tuple(
    f"SCAN {name}" for name in ("CONSTANT ROW", "rates", "closures", "mig_changes", "closed")
)
"""What has few rows, all of which matter."""


@pytest.fixture
def store(new_file: Callable[[], str]) -> Iterator[Store]:
    store = Store(new_file())
    sa.event.listen(
        store.engine,
        "do_connect",
        lambda _dialect, _record, _args, options: options.update(factory=RecordingConnection),
    )
    yield store
    store.close()


class Recording(sqlite3.Cursor):
    """Remembers what it was asked, as the driver was given it."""

    asked: ClassVar[list[tuple[str, Any]]] = []

    def execute(self, statement: str, parameters: Any = ()) -> sqlite3.Cursor:
        self.asked.append((statement, parameters))
        return super().execute(statement, parameters)


class RecordingConnection(sqlite3.Connection):
    """One whose cursors are :class:`Recording`."""

    def cursor(self, *_: Any) -> Any:
        return super().cursor(Recording)

    def execute(self, statement: str, parameters: Any = ()) -> Any:
        return self.cursor().execute(statement, parameters)


def steps(store: Store, question: Callable[[sa.Connection], Any]) -> list[tuple[str, str]]:
    """What is asked, and each step of how it is found."""
    with store.read() as connection:
        Recording.asked.clear()
        question(connection)
        asked = list(Recording.asked)
        assert asked
        return [
            (statement, step)
            for statement, parameters in asked
            for step in connection.exec_driver_sql(
                f"EXPLAIN QUERY PLAN {statement}", tuple(parameters)
            ).scalars("detail")
        ]


def test_frequent_queries_do_not_scan_whole_tables(store: Store) -> None:
    for name, question in QUESTIONS.items():
        for statement, step in steps(store, question):
            assert "USING" in step or step in FEW or "SCAN" not in step, (
                f"{name}: {step}, for {statement}"
            )


def test_expiring_credits_are_settled_without_reading_charges(store: Store) -> None:
    """A year has a charge a minute, and none is read: the index only has postings apart."""
    found = steps(store, lambda c: credit_repository.flow_of_account(c, "member:anna"))
    ledger = [step for _, step in found if "postings" in step]
    assert ledger == ["SEARCH postings USING INDEX postings_apart (account=?)"]


@each_database
def test_lease_lifetime_takes_few_statements(database_url: str) -> None:
    """Each is a hand-over of Python's lock, which the hub's event loop waits for."""
    services = open_services(database_url, device_source="simulated:2xA100-80GB")
    said: list[str] = []

    def live(user: str) -> None:
        lease = services.queue.ask(ServerRef(user), Request(devices=1), engine="noop")
        assert isinstance(lease, Lease)
        services.leases.confirm(lease.id, "noop", devices=lease.devices)
        time.sleep(0.02)  # so that it costs something
        ended = services.leases.release(lease.id, stopped_at=services.clock(), reason="stopped")
        assert ended.charged > 0

    @sa.event.listens_for(services.store.engine, "before_cursor_execute")
    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        said.append(statement.split()[0])

    services.ledger.open_account("anna")
    live("anna")  # looks at the devices, and asks which tickets there are
    said.clear()
    live("anna")
    assert len(said) <= MOST_STATEMENTS, said
    services.store.close()


@each_database
def test_slots_read_as_text_match_slots_read_as_rows(database_url: str) -> None:
    store = Store(database_url)
    uuids = ("GPU-1", "MIG-GPU-5/1/0", "odd:name:3", "GPU-größer")
    devices = tuple(LeasedDevice(u, n, n, "A100", 80) for n, u in enumerate(uuids))
    lease = lease_of("anna", id="one", devices=devices)
    with store.write() as connection:
        assert leases_repository.places_taken(connection) == frozenset()
        ledger_repository.open_account(connection, "member:anna", T0)
        leases_repository.insert(connection, lease)
        assert leases_repository.places_taken(connection) == texts(
            leases_repository.taken(connection)
        )
        assert leases_repository.places_taken(connection) == texts(
            Slot(u, n) for n, u in enumerate(uuids)
        )
        leases_repository.end(connection, "one", T0, "stopped", charged=0)
        assert leases_repository.places_taken(connection) == frozenset()
    store.close()
