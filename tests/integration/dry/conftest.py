"""A broker on each database with a policy for each group, a Hub that is a script, and the duty."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from gpuspawner.service.member_duties import CreditDuty
from gpuspawner.services import Broker
from tests.support.brokers import problems
from tests.support.rounds import Clock, ScriptedHub, make_credits, open_broker

POLICIES = {"lab": {"overdraft": "0.5"}, "course": "session", "*": "stop"}
Make = Callable[..., CreditDuty]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def broker(database_url: str, clock: Clock) -> Iterator[Broker]:
    broker = open_broker(database_url, clock, when_dry=POLICIES, hold_minutes=1)
    yield broker
    assert problems(broker.store) == []
    broker.store.close()


@pytest.fixture
async def hub() -> AsyncIterator[ScriptedHub]:
    async with ScriptedHub().serving() as hub:
        yield hub


@pytest.fixture
async def make(broker: Broker, hub: ScriptedHub) -> AsyncIterator[Make]:
    """The duty; closed at the end, as by a service that stops."""
    opened: list[CreditDuty] = []

    def make(**settings: Any) -> CreditDuty:
        opened.append(make_credits(broker, hub, **settings))
        return opened[-1]

    yield make
    for some in opened:
        await some.close()
