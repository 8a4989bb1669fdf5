"""What the service asks the Hub. Real: HTTP. The Hub is a script: it can say what Hubs rarely do.

``tests/hub/test_accounting.py`` has the real Hub.
"""

from __future__ import annotations

import pytest
from tornado.testing import bind_unused_port

from gpuspawner.core.errors import Unavailable
from gpuspawner.leases.models import ServerRef
from gpuspawner.leases.reconciliation import HubState
from gpuspawner.service.hub_client import HubClient
from tests.support.rounds import ScriptedHub


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


async def test_user_and_server_names_are_url_quoted(hub: ScriptedHub) -> None:
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
async def test_unexpected_hub_responses_raise_unavailable(
    hub: ScriptedHub, status: int, body: str | None, sentence: str
) -> None:
    hub.status, hub.body = status, body
    client = hub.client()
    with pytest.raises(Unavailable, match=sentence):
        await client.servers()


async def test_unreachable_hub_raises_unavailable() -> None:
    listening, port = bind_unused_port()
    listening.close()
    with pytest.raises(Unavailable, match="is not responding"):
        await HubClient(f"http://127.0.0.1:{port}/hub/api", "token").servers()
