"""A broker on each database, with simulated devices, rich members and a clock of the test's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from gpuspawner.services import Broker
from tests.support.brokers import problems
from tests.support.rounds import Clock, open_broker


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def broker(database_url: str, clock: Clock) -> Iterator[Broker]:
    """Two A100 at 4 credits an hour and a T4 at 1; everybody has 1,000 credits."""
    broker = open_broker(database_url, clock)
    broker.settings.credits.opening_grant = 1000
    yield broker
    assert problems(broker.store) == []
    broker.store.close()


@pytest.fixture
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Broker]]:
    """A new broker, on a store of its own."""
    opened: list[Broker] = []

    def make() -> Broker:
        while opened:
            opened.pop().store.close()
        url = f"sqlite:///{tmp_path_factory.mktemp('store')}/gpuspawner.sqlite"
        opened.append(open_broker(url, Clock()))
        opened[0].settings.credits.opening_grant = 1000
        return opened[0]

    yield make
    for broker in opened:
        broker.store.close()
