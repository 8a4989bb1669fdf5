"""The command line and the hub's broker, on each database."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from gpuspawner.db.engine import Store
from gpuspawner.services import Broker
from tests.support.brokers import make_broker
from tests.support.command import FLEET, Command


@pytest.fixture
def cli(tmp_path: Path, database_url: str) -> Command:
    return Command(tmp_path, database_url)


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    """The hub's broker, whose clock the test sets."""
    broker = make_broker(
        database_url=database_url,
        device_source=FLEET,
        gpu_rates={"*": 1, "A100": "3.6"},
    )
    now = [datetime(2025, 3, 1, 12, 0, tzinfo=timezone.utc)]
    broker.clock = lambda: now[0]
    broker.forward = lambda **step: now.append(now.pop() + timedelta(**step))
    broker.ledger.open_account("ada")
    broker.ledger.open_account("grace")
    yield broker
    Store.open(database_url).close()
