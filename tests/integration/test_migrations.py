"""From an empty database to the newest schema. Real: SQLite, PostgreSQL, Alembic, processes."""

from __future__ import annotations

import multiprocessing
import stat
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from gpuspawner.errors import ConfigError
from gpuspawner.ledger.rules import owed
from gpuspawner.model import MICRO, LeaseState, ServerRef
from gpuspawner.store import Store, book, leases, migrate, schema
from tests.support.brokers import T0, Clock, open_broker, problems

APPEND_ONLY = {
    "sqlite": {
        "transfers_never_update",
        "transfers_never_delete",
        "postings_never_update",
        "postings_never_delete",
        "audit_never_update",
        "audit_never_delete",
    },
    "postgresql": {"transfers_append_only", "postings_append_only", "audit_append_only"},
}


def is_ours(name: str | None, kind: str, parents: Any) -> bool:
    return not (kind == "table" and name == "gpuspawner_version")


def differences(connection: sa.Connection) -> list[Any]:
    """What an admin's `alembic check` would say."""
    options = {"compare_type": True, "compare_server_default": True, "include_name": is_ours}
    context = MigrationContext.configure(connection, opts=options)
    found: list[Any] = compare_metadata(context, schema.metadata)
    return found


def conditions(inspector: sa.Inspector) -> dict[str, Any]:
    """What Alembic does not compare: the conditions of partial indexes, and the checks."""
    found: dict[str, Any] = {}
    for table in sorted(set(inspector.get_table_names()) - {"gpuspawner_version"}):
        for index in inspector.get_indexes(table):
            options = index.get("dialect_options", {})
            found[str(index["name"])] = {k: str(v) for k, v in options.items() if "where" in k}
        for check in inspector.get_check_constraints(table):
            found[str(check["name"])] = check["sqltext"]
    return found


def triggers(connection: sa.Connection) -> set[str]:
    query = {
        "sqlite": "SELECT name FROM sqlite_master WHERE type = 'trigger'",
        "postgresql": "SELECT tgname FROM pg_trigger WHERE NOT tgisinternal",
    }[connection.dialect.name]
    return set(connection.execute(sa.text(query)).scalars())


def head() -> str:
    return str(ScriptDirectory.from_config(migrate.config()).get_current_head())


def test_the_migrations_make_the_schema(database_url: str) -> None:
    store = Store(database_url)
    with store.read() as connection:
        assert differences(connection) == []
        assert triggers(connection) == APPEND_ONLY[store.dialect]
        made = conditions(sa.inspect(connection))
    store.close()
    assert made["one_open_lease_a_slot"] and made["one_open_lease_a_server"]

    # The same from the tables as the code has them, beside it.
    bare = sa.create_engine(database_url)
    with bare.begin() as connection:
        for table in sa.inspect(connection).get_table_names():
            cascade = " CASCADE" if store.dialect == "postgresql" else ""
            connection.execute(sa.text(f"DROP TABLE {table}{cascade}"))
        schema.metadata.create_all(connection)
        assert conditions(sa.inspect(connection)) == made
    bare.dispose()


def test_a_difference_would_be_seen(database_url: str) -> None:
    """The comparison above is not blind."""
    store = Store(database_url)
    with store.write() as connection:
        connection.execute(sa.text("ALTER TABLE accounts ADD COLUMN nickname TEXT"))
        connection.execute(sa.text("DROP INDEX one_open_lease_a_server"))
        kinds = {difference[0] for difference in differences(connection)}
    store.close()
    assert kinds == {"remove_column", "add_index"}


def test_running_twice_changes_nothing(database_url: str) -> None:
    for number in range(2):
        store = Store(database_url)
        with store.write() as connection:
            assert book.open_account(connection, "member:anna", T0) is (number == 0)
            migrate.upgrade(connection)
            assert migrate.revision(connection) == head()
            assert differences(connection) == []
        store.close()


def _open_account(url: str, gate: Any, name: str, said: Any) -> None:
    """In a process of its own: migrate what is there, together with the others."""
    store = Store(url)
    gate.wait(60)
    try:
        with store.write() as connection:
            book.open_account(connection, name, T0)
        said.put("")
    except Exception as error:
        said.put(repr(error))
    finally:
        store.close()


def test_several_processes_find_an_empty_database_at_once(database_url: str) -> None:
    names = [f"member:user{number}" for number in range(6)]
    spawn = multiprocessing.get_context("spawn")
    gate, said = spawn.Barrier(len(names)), spawn.Queue()
    workers = [
        spawn.Process(target=_open_account, args=(database_url, gate, name, said)) for name in names
    ]
    for worker in workers:
        worker.start()
    assert [said.get(timeout=90) for _ in workers] == [""] * len(workers)
    for worker in workers:
        worker.join(timeout=30)
    store = Store(database_url)
    with store.read() as connection:
        assert [account.name for account in book.all_accounts(connection)] == names
        assert differences(connection) == []
    store.close()


def test_a_database_of_a_newer_gpuspawner_is_left_alone(database_url: str) -> None:
    store = Store(database_url)
    with store.write() as connection:
        connection.execute(sa.text("UPDATE gpuspawner_version SET version_num = '9999'"))
    store.close()
    older = Store(database_url)
    with pytest.raises(ConfigError, match="of version 9999, which this gpuspawner does"):
        older.run(book.all_accounts)
    older.close()


def test_an_sqlite_database_is_the_hubs_alone(tmp_path: Path) -> None:
    """Who used what is nobody else's business, the log beside the database included."""
    path = tmp_path / "gpu spawner #1 100%.sqlite"
    store = Store(f"sqlite:///{path}")
    with store.write() as connection:
        book.open_account(connection, "member:anna", T0)
        modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()}
    store.close()
    assert modes == {path.name + end: 0o600 for end in ("", "-wal", "-shm")}


# From the version before the queue.

FIRST = "0001"
RATE = 4 * MICRO
HOUR_AGO, TWO_HOURS_AGO = T0 - timedelta(hours=1), T0 - timedelta(hours=2)


def rows_of_the_first_version() -> dict[str, list[dict[str, Any]]]:
    """Anna paid for an hour, and has a server that was charged for half of another one."""
    lease = {
        "user": "anna",
        "account": "member:anna",
        "environment": "pytorch",
        "rate": RATE,
        "hold": MICRO,
        "engine": "docker",
        "engine_ref": "container",
    }
    place = {"slot": 0, "index": 0, "model": "A100-80GB", "memory_bytes": 80 * 2**30}
    moved = {"actor": "gpuspawner", "reason": "before", "kind": "charge", "at": HOUR_AGO}
    opening = {"kind": "grant", "at": TWO_HOURS_AGO, "lease_id": None}
    return {
        "accounts": [
            {"name": name, "balance": balance, "opened_at": TWO_HOURS_AGO}
            for name, balance in (
                ("member:anna", 14 * MICRO),
                ("system:grants", -20 * MICRO),
                ("system:usage", 6 * MICRO),
            )
        ],
        "leases": [
            {
                **lease,
                "id": "past",
                "server_name": "old",
                "charged": 4 * MICRO,
                "state": "ended",
                "granted_at": TWO_HOURS_AGO,
                "started_at": TWO_HOURS_AGO,
                "seen_at": HOUR_AGO,
                "ended_at": HOUR_AGO,
                "end_reason": "the server was stopped",
                "warned_at": None,
            },
            {
                **lease,
                "id": "open",
                "server_name": "",
                "charged": 2 * MICRO,
                "state": "running",
                "granted_at": HOUR_AGO,
                "started_at": HOUR_AGO,
                "seen_at": HOUR_AGO + timedelta(minutes=30),
                "ended_at": None,
                "end_reason": "",
                "warned_at": HOUR_AGO + timedelta(minutes=20),
            },
        ],
        "lease_places": [
            {**place, "lease_id": "past", "uuid": "GPU-a", "open": False},
            {**place, "lease_id": "open", "uuid": "GPU-a", "open": True},
            {**place, "lease_id": "open", "uuid": "GPU-b", "open": True},
        ],
        "transfers": [
            {**moved, **opening, "id": "1", "key": "opening:member:anna"},
            {**moved, "id": "2", "key": "settle:past", "lease_id": "past"},
            {**moved, "id": "3", "key": "charge:open:0", "lease_id": "open"},
        ],
        "postings": [
            {"transfer_id": transfer, "account": account, "amount": amount}
            for transfer, source, target, moved_amount in (
                ("1", "system:grants", "member:anna", 20 * MICRO),
                ("2", "member:anna", "system:usage", 4 * MICRO),
                ("3", "member:anna", "system:usage", 2 * MICRO),
            )
            for account, amount in ((target, moved_amount), (source, -moved_amount))
        ],
        "tickets": [
            {
                "id": "t",
                "user": "bob",
                "server_name": "",
                "request": "{}",
                "state": "waiting",
                "created_at": T0,
                "ended_at": None,
                "end_reason": "",
            }
        ],
    }


def make_first_version(url: str) -> dict[str, tuple[list[str], list[Any]]]:
    """A database of the first version with rows; its tables as columns and rows."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        settings = migrate.config()
        settings.attributes["connection"] = connection
        command.upgrade(settings, FIRST)
        assert migrate.revision(connection) == FIRST
        tables = sa.MetaData()
        tables.reflect(connection)
        for name, rows in rows_of_the_first_version().items():
            connection.execute(sa.insert(tables.tables[name]), [stored(row, url) for row in rows])
        columns = {name: list(tables.tables[name].c.keys()) for name in tables.tables}
        kept = {
            name: (columns[name], contents(connection, name, columns[name])) for name in columns
        }
    engine.dispose()
    return kept


def stored(row: dict[str, Any], url: str) -> dict[str, Any]:
    """A row as the store writes it: SQLite's times have no zone and are UTC."""
    if not url.startswith("sqlite"):
        return row
    return {k: v.replace(tzinfo=None) if isinstance(v, datetime) else v for k, v in row.items()}


def contents(connection: sa.Connection, table: str, columns: list[str]) -> list[Any]:
    """These columns of all rows of a table."""
    query = sa.select(*(sa.column(name) for name in columns)).select_from(sa.table(table))
    return sorted(map(repr, connection.execute(query)))


def test_a_database_of_the_first_version_keeps_its_leases_and_ledger(database_url: str) -> None:
    before = make_first_version(database_url)
    assert set(before) >= {"leases", "lease_places", "transfers", "postings", "accounts"}

    broker = open_broker(database_url, Clock())
    with broker.store.read() as connection:
        assert migrate.revision(connection) == head()
        assert differences(connection) == []
        assert triggers(connection) == APPEND_ONLY[broker.store.dialect]
        for table in set(before) - {"tickets", "gpuspawner_version"}:
            columns, rows = before[table]
            assert contents(connection, table, columns) == rows, table
        # Of tickets there was only the table: nothing ever wrote one.
        assert contents(connection, "tickets", ["id"]) == []
        past, running = leases.get(connection, "past"), leases.get(connection, "open")
    assert (past.state, past.ended_at, past.charged) == (LeaseState.ENDED, HOUR_AGO, 4 * MICRO)
    assert (running.server, running.uuids) == (ServerRef("anna"), ("GPU-a", "GPU-b"))
    assert (running.started_at, running.seconds, running.ticket_id) == (HOUR_AGO, None, None)
    assert (running.group, running.outcome, running.claim_seconds) == ("", "", None)
    assert running.warned_at == HOUR_AGO + timedelta(minutes=20)
    assert problems(broker.store) == []

    # What was open goes on, and is settled to the microcredit.
    settled = broker.release("open", ended_at=T0, reason="the server was stopped")
    assert settled.charged == owed(RATE, HOUR_AGO, T0)
    assert broker.member("anna").balance == 20 * MICRO - 4 * MICRO - settled.charged
    assert problems(broker.store) == []
    with pytest.raises(sa.exc.DatabaseError, match="append-only"):
        broker.store.run(lambda c: c.execute(sa.text("DELETE FROM postings")), write=True)
    broker.store.close()


def test_several_processes_find_a_database_of_the_first_version(database_url: str) -> None:
    """The hub and its service start at the same moment after an upgrade."""
    make_first_version(database_url)
    names = [f"member:user{number}" for number in range(4)]
    spawn = multiprocessing.get_context("spawn")
    gate, said = spawn.Barrier(len(names)), spawn.Queue()
    workers = [
        spawn.Process(target=_open_account, args=(database_url, gate, name, said)) for name in names
    ]
    for worker in workers:
        worker.start()
    assert [said.get(timeout=90) for _ in workers] == [""] * len(workers)
    for worker in workers:
        worker.join(timeout=30)
    store = Store(database_url)
    with store.read() as connection:
        assert differences(connection) == []
        assert leases.get(connection, "open").state is LeaseState.RUNNING
    store.close()


def test_an_upgrade_that_fails_changes_nothing(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power goes in the middle: the next start finds the first version, and upgrades it."""
    before = make_first_version(database_url)
    make = sa.schema.CreateTable.__init__

    def fail(self: Any, element: sa.Table, *args: Any, **kwargs: Any) -> None:
        if element.name == "notice_choices":
            raise KeyboardInterrupt
        make(self, element, *args, **kwargs)

    monkeypatch.setattr(sa.schema.CreateTable, "__init__", fail)
    store = Store(database_url)
    with pytest.raises(KeyboardInterrupt):
        store.run(book.all_accounts)
    store.close()
    monkeypatch.undo()

    engine = sa.create_engine(database_url)
    with engine.connect() as connection:
        assert migrate.revision(connection) == FIRST
        assert set(sa.inspect(connection).get_table_names()) == set(before)
        for table, (columns, rows) in before.items():
            assert contents(connection, table, columns) == rows, table
    engine.dispose()
    store = Store(database_url)
    with store.read() as connection:
        assert differences(connection) == []
    store.close()
