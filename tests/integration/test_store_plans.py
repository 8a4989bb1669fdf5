"""Real: SQLite, asked how it will find what it is asked for.

What is open is little, and what has ended grows for years: no question about open leases may
read the latter. A partial index serves only a condition in which its own is written out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from gpuspawner.model import ServerRef
from gpuspawner.store import Store, book, leases

QUESTIONS: dict[str, Callable[[sa.Connection], Any]] = {
    "the open lease of a server": lambda c: leases.open_of(c, ServerRef("anna")),
    "all open leases": leases.open_leases,
    "places with their leases": leases.taken,
    "places": leases.places_taken,
    "what an account has set aside": lambda c: leases.held(c, "member:anna"),
    "an account with what it has set aside": lambda c: book.find(c, "member:anna"),
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path}/gpuspawner.sqlite")
    yield store
    store.close()


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_has_ended_is_not_read(store: Store, question: str) -> None:
    asked: list[tuple[str, Any]] = []
    with store.read() as connection:
        sa.event.listen(
            connection,
            "before_cursor_execute",
            lambda _c, _cursor, statement, parameters, *_: asked.append((statement, parameters)),
        )
        QUESTIONS[question](connection)
        assert asked
        for statement, parameters in list(asked):
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
            for step in plan.scalars("detail"):
                assert "USING" in step or "SCAN" not in step, f"{step}, for {statement}"
