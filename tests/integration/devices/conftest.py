"""NVML in a process of its own, through pynvml and the dynamic linker. Only the driver's library is
a stand-in, compiled here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.nvml.machine import Machine


@pytest.fixture(scope="session")
def shared_machine(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    machine = Machine(library, tmp_path_factory.mktemp("machine") / "fleet")
    yield machine
    machine.end()


@pytest.fixture
def machine(shared_machine: Machine) -> Iterator[Machine]:
    """A machine that nobody has looked at; pytest shows its log when the test failed."""
    yield shared_machine.begin()
    print(shared_machine.log.read_text())
