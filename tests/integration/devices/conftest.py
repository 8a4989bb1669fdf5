"""NVML in a process of its own, through pynvml and the dynamic linker. Only the driver's library is
a stand-in, compiled here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.nvml import nvml_library as nvml
from tests.support.nvml.machine import Machine


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.build_nvml_library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def machine(library: Path, tmp_path: Path) -> Iterator[Machine]:
    made = Machine(library, tmp_path / "fleet")
    yield made
    made.end()
