"""MIG layouts of a machine whose driver is a stand-in. Real: databases, processes, pynvml."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuspawner.db.engine import Store
from tests.support.nvml.divided import DividedMachine, dividable


@pytest.fixture
def machine(library: Path, tmp_path: Path, database_url: str, processes: None) -> DividedMachine:
    """A machine with one A100 that is not divided."""
    made = DividedMachine(library, tmp_path / "fleet", database_url)
    made.has(dividable())
    return made


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    """The hub's store."""
    opened = Store.open(database_url)
    yield opened
    opened.close()
