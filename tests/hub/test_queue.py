"""Waiting in line. Real: hub, proxy, accounting service, SQLite, kill -9; servers are local."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from gpuspawner.leases.models import ServerRef
from gpuspawner.queue.models import Ticket
from tests.support.paying_hub import PayingHub
from tests.support.processes import wait_for

CONFIG = """
c.GPURates.by_model = {"*": 1}
c.GPUCredits.hold_minutes = 1
c.JupyterHub.tornado_settings = {"slow_spawn_timeout": 1}
"""
"""Three devices."""


FILLERS = ("ada", "bob", "cleo")


@pytest.fixture(scope="module")
def module_hub(hubs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PayingHub]:
    folder = tmp_path_factory.mktemp("queue") / "hub"
    with PayingHub(folder, CONFIG, external_proxy=True) as hub:
        yield hub


@pytest.fixture
def hub(module_hub: PayingHub) -> Iterator[PayingHub]:
    """All devices are in use, and nobody waits. Each test has members of its own in line."""
    hub = module_hub
    for user in FILLERS:
        if hub.server(user) is None:
            hub.start_server(user)
    yield hub
    for ticket in waiting(hub):
        hub.stop_server(ticket.server.user)
    for lease in hub.broker.open_leases():
        if lease.server.user not in FILLERS:
            hub.stop_server(lease.server.user)


def waiting(hub: PayingHub) -> list[Ticket]:
    return hub.broker.waiting()


def ask(hub: PayingHub, user: str, **options: Any) -> requests.Response:
    """Ask for a server; who waits is answered 202."""
    answer = hub.spawn(user, options)
    assert answer.status_code in (201, 202), answer.text
    return answer


def in_line(hub: PayingHub, *users: str) -> None:
    """Let them ask one after the other, and wait until each has a ticket."""
    for count, user in enumerate(users, start=1):
        assert ask(hub, user).status_code == 202
        wait_for(lambda count=count: len(waiting(hub)) == count, f"{user}'s ticket", timeout=10)


def progress(hub: PayingHub, user: str, until: str) -> list[str]:
    """What the pending page shows of a spawn, up to a sentence with these words."""
    found: list[str] = []
    with hub.api("GET", f"users/{user}/server/progress", stream=True, timeout=120) as stream:
        for line in stream.iter_lines():
            if line.startswith(b"data:"):
                found.append(json.loads(line[5:])["message"])
                if until in found[-1]:
                    break
    return found


def outcome(hub: PayingHub, user: str) -> str:
    return hub.broker.tickets_of(user)[0].outcome


def test_the_turn_comes_by_itself_and_in_order(hub: PayingHub) -> None:
    in_line(hub, "dan", "eve")
    said = progress(hub, "eve", "number 2 of 2 in line")
    assert "none is free" in said[-1], said

    hub.stop_server("bob")
    hub.wait_server("dan")
    assert [ticket.server.user for ticket in waiting(hub)] == ["eve"]
    assert outcome(hub, "dan") == "granted"
    lease = hub.broker.lease_of(ServerRef("dan"))
    assert lease is not None and lease.ticket_id == hub.broker.tickets_of("dan")[0].id
    hub.stop_server("ada")
    hub.wait_server("eve")
    assert not waiting(hub)


def test_stopping_gives_the_place_up(hub: PayingHub) -> None:
    in_line(hub, "gus", "hal")
    hub.stop_server("gus")
    assert [ticket.server.user for ticket in waiting(hub)] == ["hal"]
    assert outcome(hub, "gus") == "cancelled"
    hub.stop_server("ada")
    hub.wait_server("hal")
    assert hub.broker.lease_of(ServerRef("gus")) is None


@pytest.mark.parametrize("how", ["kill9", "sigterm"])
def test_a_restart_of_the_hub_keeps_every_place(hub: PayingHub, how: str) -> None:
    first, second, third = (f"{name}-{how}" for name in ("ida", "jan", "kim"))
    in_line(hub, first, second, third)
    before = [(ticket.id, ticket.created_at) for ticket in waiting(hub)]
    if how == "kill9":
        hub.kill9(services=True)
    else:
        hub.shut_down()
    hub.start()
    assert [(ticket.id, ticket.created_at) for ticket in waiting(hub)] == before
    hub.stop_server("cleo")
    hub.wait_server(first, timeout=30)
    hub.stop_server("bob")
    hub.wait_server(second, timeout=30)
    assert [ticket.server.user for ticket in waiting(hub)] == [third]
