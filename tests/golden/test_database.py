"""The database as it is after all migrations, as SQLite and PostgreSQL say it."""

from __future__ import annotations

import re
from pathlib import Path

import sqlalchemy as sa

from tests.golden.conftest import Golden
from tests.support.postgres import PrivatePostgres

TRIGGERS = {
    "sqlite": "SELECT tbl_name, sql FROM sqlite_master WHERE type = 'trigger'",
    "postgresql": """
        SELECT relname, pg_get_triggerdef(t.oid) || E'\\n' || pg_get_functiondef(tgfoid)
        FROM pg_trigger t JOIN pg_class c ON c.oid = tgrelid WHERE NOT tgisinternal
    """,
}


def test_sqlite_schema_matches_the_recording(golden: Golden, migrated_file: Path) -> None:
    golden("database-sqlite.txt", schema_of(f"sqlite:///{migrated_file}"))


def test_postgresql_schema_matches_the_recording(golden: Golden, postgres: PrivatePostgres) -> None:
    url = postgres.migrated_database()
    text = schema_of(url)
    postgres.drop(url)
    golden("database-postgresql.txt", text)


def schema_of(url: str) -> str:
    """Tables with columns, constraints, indexes and triggers, in an order of names."""
    engine = sa.create_engine(
        sa.make_url(url).set(drivername="postgresql+psycopg") if "postgres" in url else url,
        poolclass=sa.NullPool,
    )
    with engine.connect() as connection:
        triggers = connection.execute(sa.text(TRIGGERS[engine.dialect.name])).all()
        seen = sa.inspect(connection)
        return "\n\n".join(
            "\n  ".join([name, *sorted(table(seen, name)), *sorted(trigger_lines(triggers, name))])
            for name in sorted(seen.get_table_names())
        )


def table(seen: sa.Inspector, name: str) -> list[str]:
    """A table's columns, constraints and indexes, a line each."""
    lines = []
    for column in seen.get_columns(name):
        needed = "" if column["nullable"] else " not null"
        default = f" default {column['default']}" if column["default"] is not None else ""
        lines.append(f"column {column['name']}: {column['type']}{needed}{default}")
    lines.append(f"primary key: {', '.join(seen.get_pk_constraint(name)['constrained_columns'])}")
    for key in seen.get_foreign_keys(name):
        target = f"{key['referred_table']}({', '.join(key['referred_columns'])})"
        lines.append(f"foreign key {', '.join(key['constrained_columns'])} -> {target}")
    for unique in seen.get_unique_constraints(name):
        lines.append(f"unique {unique['name']}: {', '.join(unique['column_names'])}")
    for check in seen.get_check_constraints(name):
        lines.append(f"check {check['name']}: {one_line(check['sqltext'])}")
    for index in seen.get_indexes(name):
        columns = index.get("expressions") or index["column_names"]
        where = [v for k, v in index.get("dialect_options", {}).items() if k.endswith("_where")]
        lines.append(
            f"{'unique ' if index['unique'] else ''}index {index['name']}: "
            f"{', '.join(map(str, columns))}{f' where {one_line(str(where[0]))}' if where else ''}"
        )
    return lines


def trigger_lines(triggers: list[tuple[str, str]], name: str) -> list[str]:
    """The triggers of a table, a line each."""
    return [f"trigger {one_line(sql)}" for of, sql in triggers if of == name]


def one_line(sql: str) -> str:
    return re.sub(r"\s+", " ", sql).strip()
