"""What the tests of the accounting service share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.nvml import nvml_library as nvml
from tests.support.nvml.machine import Machine


@pytest.fixture(scope="session")
def nvml_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A process with the stand-in's driver. Call ``begin`` before each use."""
    library = nvml.build_nvml_library(tmp_path_factory.mktemp("nvml"))
    machine = Machine(library, tmp_path_factory.mktemp("machine") / "fleet")
    yield machine
    machine.end()
