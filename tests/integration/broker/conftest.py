"""A broker on each database, with simulated devices and a clock that the test sets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpuspawner.leases.models import ServerRef
from gpuspawner.services import Broker
from tests.support.brokers import Clock, open_broker, problems

ANNA, BERT = ServerRef("anna"), ServerRef("bert")
Make = Callable[..., Broker]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def hubs_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sentences name times in the hub's own zone: here UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def failed() -> set[str]:
    """The ids of leases whose start failed, for the checks at the end: they owe nothing."""
    return set()


@pytest.fixture
def make(database_url: str, clock: Clock, failed: set[str]) -> Iterator[Make]:
    """Open brokers on one database; at the end everything in it must hold."""
    opened: list[Broker] = []

    def make(**settings: Any) -> Broker:
        opened.append(open_broker(database_url, **{"clock": clock, **settings}))
        return opened[-1]

    yield make
    assert opened
    assert problems(opened[0].store, failed=failed) == []
    opened[0].store.close()


@pytest.fixture
def broker(make: Make) -> Broker:
    """Four A100s at 4 credits an hour; members get 100 credits; 10 minutes are held."""
    return make(gpu_rates={"A100": 4, "T4": "0.5"})
