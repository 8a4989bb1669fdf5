"""Waiting in line. Real: hub, proxy, accounting service, SQLite, kill -9; servers are local."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from gpuspawner.model import ServerRef, Ticket
from tests.support.paying_hub import PayingHub
from tests.support.processes import wait_for

CONFIG = """
c.Broker.gpu_rates = {"*": 1}
c.Broker.hold_minutes = 1
c.JupyterHub.tornado_settings = {"slow_spawn_timeout": 1}
"""
"""Three devices."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[PayingHub]:
    with PayingHub(tmp_path / "hub", CONFIG, external_proxy=True) as hub:
        yield hub


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


def progress(hub: PayingHub, user: str, seconds: float) -> list[str]:
    """What the pending page shows of a spawn within some time."""
    url = f"{hub.url}/hub/api/users/{user}/server/progress"
    headers = {"Authorization": f"token {hub.token}"}
    found: list[str] = []
    end = time.monotonic() + seconds
    with requests.get(url, headers=headers, stream=True, timeout=seconds + 5) as stream:
        for line in stream.iter_lines():
            if line.startswith(b"data:"):
                found.append(json.loads(line[5:])["message"])
            if time.monotonic() > end:
                break
    return found


def outcome(hub: PayingHub, user: str) -> str:
    return hub.broker.tickets_of(user)[0].outcome


def test_the_turn_comes_by_itself_and_in_order(hub: PayingHub) -> None:
    for user in ("ada", "bob", "cleo"):
        hub.start_server(user)
    in_line(hub, "dan", "eve")
    said = progress(hub, "eve", 3)
    assert any("number 2 of 2 in line" in line and "none is free" in line for line in said), said

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
    for user in ("ada", "bob", "cleo"):
        hub.start_server(user)
    in_line(hub, "dan", "eve")
    hub.stop_server("dan")
    assert [ticket.server.user for ticket in waiting(hub)] == ["eve"]
    assert outcome(hub, "dan") == "cancelled"
    hub.stop_server("ada")
    hub.wait_server("eve")
    assert hub.broker.lease_of(ServerRef("dan")) is None


@pytest.mark.parametrize("how", ["kill9", "sigterm"])
def test_a_restart_of_the_hub_keeps_every_place(hub: PayingHub, how: str) -> None:
    for user in ("ada", "bob", "cleo"):
        hub.start_server(user)
    in_line(hub, "dan", "eve", "fay")
    before = [(ticket.id, ticket.created_at) for ticket in waiting(hub)]
    if how == "kill9":
        hub.kill9(services=True)
    else:
        hub.shut_down()
    hub.start()
    assert [(ticket.id, ticket.created_at) for ticket in waiting(hub)] == before
    hub.stop_server("cleo")
    hub.wait_server("dan", timeout=30)
    hub.stop_server("bob")
    hub.wait_server("eve", timeout=30)
    assert [ticket.server.user for ticket in waiting(hub)] == ["fay"]
