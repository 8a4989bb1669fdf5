"""Services on a database of its own, for what signing in leads to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuspawner.services import Services
from tests.support.members import open_services


@pytest.fixture
def services(tmp_path: Path, migrated_file: Path) -> Iterator[Services]:
    services = open_services(tmp_path, migrated_file)
    yield services
    services.store.close()
