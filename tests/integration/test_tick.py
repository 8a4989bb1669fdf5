"""Real here: SQLite and PostgreSQL, and HTTP. The Hub is a script: it can say what Hubs rarely do.

``tests/hub/test_accounting.py`` has the real Hub.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta

import pytest
from tornado.testing import bind_unused_port

from gpuspawner.core.errors import Unavailable
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import ServerRef
from gpuspawner.leases.reconciliation import HubState
from gpuspawner.ledger.rules import owed
from gpuspawner.service.hub_client import HubClient
from gpuspawner.services import Broker
from tests.support.rounds import (
    RATE,
    START,
    Clock,
    ScriptedHub,
    make_tick,
    open_broker,
    running,
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def broker(database_url: str, clock: Clock) -> Iterator[Broker]:
    broker = open_broker(database_url, clock)
    yield broker
    broker.store.close()


@pytest.fixture
async def hub() -> AsyncIterator[ScriptedHub]:
    async with ScriptedHub().serving() as hub:
        yield hub


# Charges.


async def test_charges_do_not_depend_on_the_rounds(
    broker: Broker, hub: ScriptedHub, clock: Clock
) -> None:
    lease = running(broker, "ada")
    tick = make_tick(broker, hub)
    for seconds in (0.5, 60, 0, 59.123457, 133):
        clock.advance(seconds)
        await tick.charge()
    elapsed = clock.now - START
    assert broker.ledger.member("ada").balance == MICRO - RATE * (
        elapsed // timedelta(microseconds=1)
    ) // (3_600_000_000)
    assert broker.lease(lease.id).charged == owed(RATE, START, clock.now)


async def test_rounds_side_by_side_charge_once(
    database_url: str, hub: ScriptedHub, clock: Clock
) -> None:
    """A service that is not dead yet, and the one that the Hub started after it."""
    brokers = [open_broker(database_url, clock), open_broker(database_url, clock)]
    lease = running(brokers[0], "ada")
    clock.advance(90)
    await asyncio.gather(*(make_tick(broker, hub).charge() for broker in brokers for _ in range(5)))
    assert brokers[0].lease(lease.id).charged == owed(RATE, START, clock.now)
    brokers[0].store.close()


# The Hub's REST API.


async def test_every_page_of_servers_is_read(hub: ScriptedHub) -> None:
    servers = [ServerRef(f"user{n}") for n in range(450)]
    hub.has(*servers)
    hub.users["user7"]["second"] = {"ready": False}
    client = hub.client()
    found = await client.servers()
    assert len(found) == 451
    assert found[ServerRef("user7")] is HubState.READY
    assert found[ServerRef("user7", "second")] is HubState.PENDING
    assert len(hub.asked) == 3


async def test_names_are_quoted(hub: ScriptedHub) -> None:
    odd = ServerRef("a/b ü@c", "x/y?z")
    hub.has(odd)
    client = hub.client()
    assert await client.server(odd) is HubState.READY
    assert await client.server(ServerRef("nobody")) is None
    assert await client.stop_server(odd)
    assert hub.stopped == ["a/b ü@c/x/y?z"]
    assert not await client.stop_server(ServerRef("nobody"))


@pytest.mark.parametrize(
    ("status", "body", "sentence"),
    [
        (403, None, "Give it the scopes list:users, read:groups and servers"),
        (500, None, "answered GET /users with 500"),
        (200, "<html>", "not in the form that this version knows"),
        (200, "[]", "not in the form that this version knows"),
        (200, '{"items": [{"name": "ada"}], "_pagination": {"next": null}}', "holds servers"),
    ],
)
async def test_other_answers_are_sentences(
    hub: ScriptedHub, status: int, body: str | None, sentence: str
) -> None:
    hub.status, hub.body = status, body
    client = hub.client()
    with pytest.raises(Unavailable, match=sentence):
        await client.servers()


async def test_no_answer_is_a_sentence() -> None:
    listening, port = bind_unused_port()
    listening.close()
    with pytest.raises(Unavailable, match="does not answer"):
        await HubClient(f"http://127.0.0.1:{port}/hub/api", "token").servers()
