"""Statements that SQLAlchemy compiles once for all databases of a process.

It compiles each statement anew for every engine. A program has one engine; here every test has
one, on a database like the test's before, and would spend half of its time on that.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.util import LRUCache

_compiled: Any = LRUCache(5000)


class _Same:
    """A dialect that equals the others of its class, for it is a part of a statement's key."""

    @classmethod
    def engine_created(cls, engine: sa.Engine) -> None:
        engine.update_execution_options(compiled_cache=_compiled)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return hash(type(self))


class SQLite(_Same, SQLiteDialect_pysqlite):
    supports_statement_cache = True


class Psycopg(_Same, PGDialect_psycopg):
    supports_statement_cache = True


def compile_once() -> None:
    """Let the engines that this process makes from now on share what they compile."""
    for name in ("sqlite", "sqlite.pysqlite"):
        registry.register(name, __name__, SQLite.__name__)
    registry.register("postgresql.psycopg", __name__, Psycopg.__name__)
