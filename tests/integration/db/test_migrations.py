"""From an empty database, by any URL, to the newest schema. Real: SQLite, PostgreSQL, Alembic,
processes, files."""

from __future__ import annotations

import stat
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from jupyterhub import orm

from gpuspawner.core.errors import ConfigError
from gpuspawner.db import engine as db_engine
from gpuspawner.db import schema as db_schema
from gpuspawner.db.engine import Store
from gpuspawner.ledger import repository as ledger_repository
from gpuspawner.monitoring.repository import device_use_between
from tests.support.brokers import T0
from tests.support.postgres import PrivatePostgres
from tests.support.racers import FORKSERVER

NEVER_CHANGE = ("transfers", "postings", "audit", "chain")
APPEND_ONLY = {
    "sqlite": {f"{table}_never_{verb}" for table in NEVER_CHANGE for verb in ("update", "delete")},
    "postgresql": {f"{table}_append_only" for table in NEVER_CHANGE},
}


def is_ours(name: str | None, kind: str, parents: Any) -> bool:
    return not (kind == "table" and name == "gpuspawner_version")


def differences(connection: sa.Connection) -> list[Any]:
    """What an admin's `alembic check` would say."""
    options = {"compare_type": True, "compare_server_default": True, "include_name": is_ours}
    context = MigrationContext.configure(connection, opts=options)
    found: list[Any] = compare_metadata(context, db_schema.metadata)
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


def test_schema_versions_match_the_alembic_scripts() -> None:
    scripts = ScriptDirectory.from_config(db_engine.config())
    found = [script.revision for script in scripts.walk_revisions()]
    assert found[::-1] == db_engine.versions()


def test_migrations_produce_the_declared_schema(empty_database_url: str) -> None:
    with closing(Store(empty_database_url)) as store, store.read() as connection:
        assert differences(connection) == []
        assert triggers(connection) == APPEND_ONLY[store.dialect]
        made = conditions(sa.inspect(connection))
    assert made["one_open_lease_a_slot"] and made["one_open_lease_a_server"]

    # The same from the tables as the code has them, beside it.
    bare = sa.create_engine(empty_database_url)
    with bare.begin() as connection:
        for table in sa.inspect(connection).get_table_names():
            cascade = " CASCADE" if store.dialect == "postgresql" else ""
            connection.execute(sa.text(f"DROP TABLE {table}{cascade}"))
        db_schema.metadata.create_all(connection)
        assert conditions(sa.inspect(connection)) == made
    bare.dispose()


def test_second_migration_changes_nothing(empty_database_url: str) -> None:
    for number in range(2):
        with closing(Store(empty_database_url)) as store, store.write() as connection:
            assert ledger_repository.open_account(connection, "member:anna", T0) is (number == 0)
            db_engine.upgrade(connection)
            assert db_engine.revision(connection) == db_engine.newest()
            assert differences(connection) == []
    with closing(Store(empty_database_url)) as store, store.write() as connection:
        connection.execute(sa.text("DROP INDEX one_open_lease_a_server"))
        assert [kind for kind, *_ in differences(connection)] == ["add_index"]


def test_use_of_devices_survives_the_new_primary_key(empty_database_url: str) -> None:
    engine = sa.create_engine(empty_database_url)
    names = {"uuid": "GPU-a", "seconds": 60, "since": T0, "known": 9, "samples": 9, "xids": "13,79"}
    old = sa.table("device_use", *map(sa.column, names), sa.column("lease_id"))
    settings = db_engine.config()
    with engine.begin() as connection:
        settings.attributes["connection"] = connection
        command.upgrade(settings, "0027")
        connection.execute(sa.insert(old).values(names | {"since": as_stored(T0, connection)}))
        db_engine.upgrade(connection)
        assert differences(connection) == []
        columns = old.c.uuid, old.c.seconds, old.c.lease_id, old.c.samples, old.c.xids
        assert connection.execute(sa.select(*columns)).all() == [("GPU-a", 60, "", 9, "13,79")]
    engine.dispose()
    with closing(Store(empty_database_url)) as store, store.read() as connection:
        (minute,) = device_use_between(connection, T0, T0 + timedelta(minutes=1))
        assert (minute.since, minute.known, minute.xids) == (T0, 9, (13, 79))


def as_stored(at: datetime, connection: sa.Connection) -> Any:
    return db_schema.as_text(at) if connection.dialect.name == "sqlite" else at


def _open_account(url: str, gate: Any, name: str, said: Any) -> None:
    """In a process of its own: migrate what is there, together with the others."""
    gate.wait(120)
    try:
        with closing(Store(url)) as store, store.write() as connection:
            ledger_repository.open_account(connection, name, T0)
        said.put("")
    except Exception as error:
        said.put(repr(error))


def test_concurrent_processes_migrate_an_empty_database(empty_database_url: str) -> None:
    names = [f"member:user{number}" for number in range(3)]
    gate, said = FORKSERVER.Barrier(len(names)), FORKSERVER.Queue()
    workers = [
        FORKSERVER.Process(target=_open_account, args=(empty_database_url, gate, name, said))
        for name in names
    ]
    for worker in workers:
        worker.start()
    assert [said.get(timeout=360) for _ in workers] == [""] * len(workers)
    for worker in workers:
        worker.join(timeout=120)
    with closing(Store(empty_database_url)) as store, store.read() as connection:
        assert [account.name for account in ledger_repository.all_accounts(connection)] == names
        assert differences(connection) == []


def test_database_of_an_unknown_version_is_rejected(empty_database_url: str) -> None:
    """A newer gpuspawner wrote it, or a state from before the first release."""
    with closing(Store(empty_database_url)) as store:
        store.run(ledger_repository.all_accounts)
        for version in ("9999", "0001"):
            with store.write() as connection:
                change = f"UPDATE gpuspawner_version SET version_num = '{version}'"
                connection.execute(sa.text(change))
            why = f"has version {version}, which this gpuspawner does"
            with closing(Store(empty_database_url)) as older, pytest.raises(ConfigError, match=why):
                older.run(ledger_repository.all_accounts)


def test_sqlite_files_are_accessible_by_their_owner_only(tmp_path: Path) -> None:
    """Who used what is nobody else's business, the log beside the database included."""
    path = tmp_path / "gpu spawner #1 100%.sqlite"
    with closing(Store(f"sqlite:///{path}")) as store, store.write() as connection:
        ledger_repository.open_account(connection, "member:anna", T0)
        modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()}
    assert modes == {path.name + end: 0o600 for end in ("", "-wal", "-shm")}


def test_failed_migration_changes_nothing_and_can_be_repeated(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power goes in the middle: the next start finds an empty database, and fills it."""
    make = sa.schema.CreateTable.__init__

    def fail(self: Any, element: sa.Table, *args: Any, **kwargs: Any) -> None:
        if element.name == "refill_runs":
            raise KeyboardInterrupt
        make(self, element, *args, **kwargs)

    monkeypatch.setattr(sa.schema.CreateTable, "__init__", fail)
    with closing(Store(empty_database_url)) as store, pytest.raises(KeyboardInterrupt):
        store.run(ledger_repository.all_accounts)
    monkeypatch.undo()

    engine = sa.create_engine(empty_database_url)
    with engine.connect() as connection:
        assert db_engine.revision(connection) is None
        assert sa.inspect(connection).get_table_names() == []
    engine.dispose()
    with closing(Store(empty_database_url)) as store, store.read() as connection:
        assert differences(connection) == []


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqlite://", "must be a file"),
        ("sqlite:///:memory:", "must be a file"),
        ("mysql://localhost/x", "not a supported database"),
        ("not a url", "write it like"),
    ],
)
def test_unsupported_database_url_is_rejected(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Store(url)


def test_database_can_be_shared_with_jupyterhub(postgres: PrivatePostgres) -> None:
    """Its tables and its Alembic version are not ours. The URL names no driver."""
    url = postgres.fresh_database()
    orm.new_session_factory(url)
    plain = sa.make_url(url).set(drivername="postgresql")
    with closing(Store(plain.render_as_string(hide_password=False))) as store:
        assert store.run(ledger_repository.all_accounts) == []
    orm.new_session_factory(url)  # the hub starts again, and finds its version
