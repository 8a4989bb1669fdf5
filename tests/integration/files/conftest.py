"""A broker on each database, with members who have signed in and a clock that the test sets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpuspawner.services import Broker
from tests.support.brokers import Clock, open_broker, problems


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def broker(database_url: str, clock: Clock) -> Iterator[Broker]:
    made = open_broker(
        database_url, clock, folder_source="/srv/folders/{id}", most_folders=3, folder_quota=1
    )
    for name in ("anna", "bert", "carl"):
        made.ledger.open_account(name)
    yield made
    assert problems(made.store) == []
    made.store.close()
