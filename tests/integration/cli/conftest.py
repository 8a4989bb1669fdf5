"""The command, and the hub's services on the same database (SQLite; in a soak also
PostgreSQL). Devices are simulated."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from gpuspawner.db.engine import Store
from gpuspawner.services import Services
from tests.support.brokers import make_services
from tests.support.command import FLEET, Command


@pytest.fixture
def cli(tmp_path: Path, database_url: str) -> Command:
    return Command(tmp_path, database_url, is_process=False)


@pytest.fixture
def services(database_url: str) -> Iterator[Services]:
    """The hub's services, whose clock the test sets."""
    services = make_services(
        database_url=database_url, device_source=FLEET, gpu_rates={"*": 1, "A100": "3.6"}
    )
    now = [datetime(2025, 3, 1, 12, 0, tzinfo=timezone.utc)]
    services.clock = lambda: now[0]
    services.forward = lambda **step: now.append(now.pop() + timedelta(**step))
    services.ledger.open_account("ada")
    services.ledger.open_account("grace")
    yield services
    Store.open(database_url).close()
