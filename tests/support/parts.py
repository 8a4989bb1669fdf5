"""The real parts that a test uses, and the tier that follows from them.

A test declares a part by asking, directly or through other fixtures, for one of the fixtures in
:data:`FIXTURES`. Whoever starts a part calls :func:`require`, so a test that starts one it has not
declared fails, and no marker has to be written by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

FIXTURES = {
    "docker": {"engine", "cdi_engine", "engines"},
    "postgres": {"postgres", "postgres_servers"},
    "browser": {"module_browser", "browsers"},
    "slurm": {"shared_cluster", "clusters"},
    "hub": {"hubs"},
    "quick_hub": {"quick_hub"},
    "kill": {"rounds"},
    "process": {"processes"},
    "soak": {"soak"},
}
"""Each part, and the fixtures that declare it."""

each_database = pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
"""For a test of what only a database decides: queries, constraints, locks, races."""

NOT_QUICK = FIXTURES.keys() - {"quick_hub"}
"""``make quick`` runs what uses none of these: of hubs, the one that starts in ten seconds."""

_allowed: frozenset[str] | None = None
"""What the test that runs now has declared; None outside of tests, as in a benchmark."""


class UndeclaredPart(AssertionError):
    """A test starts a part that none of its fixtures declares."""


def is_quick(item: pytest.Item) -> bool:
    """Return True if ``make quick`` runs the test."""
    return not parts_of(item) & NOT_QUICK


def parts_of(item: pytest.Item) -> frozenset[str]:
    """Return the parts that a collected test declares."""
    fixtures = set(getattr(item, "fixturenames", ()))
    found = {part for part, names in FIXTURES.items() if names & fixtures}
    call = getattr(item, "callspec", None)
    if call is not None and "postgresql" in call.params.values():
        found.add("postgres")
    if "slurm" in found:
        found.add("docker")  # each node has an engine
    return frozenset(found)


@contextmanager
def allowed(item: pytest.Item) -> Iterator[None]:
    """Let only what this test declares start meanwhile."""
    global _allowed
    before, _allowed = _allowed, parts_of(item)
    try:
        yield
    finally:
        _allowed = before


def in_test() -> bool:
    """Return True while a test runs, and False in a benchmark."""
    return _allowed is not None


def require(part: str) -> None:
    """Raise UndeclaredPart unless the running test has declared the part."""
    if part == "hub" and "quick_hub" in (_allowed or ()):
        return
    if _allowed is not None and part not in _allowed:
        names = " or ".join(f"`{name}`" for name in sorted(FIXTURES[part]))
        raise UndeclaredPart(f"this test starts a part ({part}) without asking for {names}")
