"""Members in the queue at a real hub, whose devices are all in use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import requests

from gpuspawner.queue.models import Ticket
from tests.support.brokers import problems
from tests.support.gpu_hub import assert_in_words
from tests.support.paying_hub import PayingHub
from tests.support.processes import PATIENCE, wait_for

CONFIG = """
c.GPURates.by_model = {"*": 1}
c.GPUCredits.hold_minutes = 1
c.JupyterHub.tornado_settings = {"slow_spawn_timeout": 1}
"""
"""Servers that cost little, and spawns that are answered 202 soon."""

COUNTED = """
from gpuspawner.spawners.turns import TurnDispatcher
look = TurnDispatcher._round

async def counted(self):
    try:
        await look(self)
    finally:
        with open("looks", "a") as file:
            file.write(".")

TurnDispatcher._round = counted
"""
"""The hub writes down every look at its line: see :func:`wait_looks`."""


def assert_books(hub: PayingHub) -> None:
    """Assert that the books are in order, now or within ten seconds; a failure names the faults."""
    try:
        wait_for(lambda: not problems(hub.services.store), "the books to be in order", timeout=10)
    except TimeoutError:
        pytest.fail("; ".join(problems(hub.services.store)))


def looks(hub: PayingHub) -> int:
    """How often the hub has looked at its line, also where it could not."""
    file = hub.folder / "looks"
    return file.stat().st_size if file.exists() else 0


def wait_looks(hub: PayingHub, count: int) -> None:
    """Wait until the hub has begun and ended ``count`` looks at its line, in which somebody is."""
    # One more: a look may be under way.
    enough = looks(hub) + count + 1
    wait_for(lambda: looks(hub) >= enough, f"{count} looks at the line", timeout=60)


def fill(hub: PayingHub, *users: str) -> None:
    """Start a server with one device for each."""
    for user in users:
        hub.start_server(user, gpus=1)


def line_up(hub: PayingHub, *users: str, **options: Any) -> list[Ticket]:
    """Let them ask one after the other; their tickets, once all wait."""
    for user in users:
        answer = hub.spawn(user, {"gpus": 1, **options})
        assert answer.status_code == 202, answer.text
        wait_for(partial(ticket_of, hub, user), f"{user}'s ticket", timeout=10)
    return [found for user in users if (found := ticket_of(hub, user))]


def ticket_of(hub: PayingHub, user: str) -> Ticket | None:
    """The ticket with which a member waits."""
    return next((t for t in hub.services.queue.waiting() if t.server.user == user), None)


def users_in_line(hub: PayingHub) -> list[str]:
    """Who waits, first next, as the JSON for admins says."""
    return [ticket["user"] for ticket in hub.json("admin", "queue").json()["tickets"]]


def last_word(hub: PayingHub, user: str, act: Callable[[], object], within: float = 20.0) -> str:
    """What the member's pending page says at last, when this is done while it is open.

    ``within``: seconds from then on, and more on a busy machine.
    """
    said: list[str] = []
    opened = threading.Event()

    def read() -> None:
        for event in hub.events(user):
            opened.set()
            if event.get("failed") or event.get("ready"):
                said.append(str(event["message"]))
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert opened.wait(20 * PATIENCE), f"{user}'s pending page does not open"
    act()
    reader.join(within * PATIENCE)
    assert said, f"{user}'s pending page goes on, or ended without a word"
    assert_in_words(said[0])
    return said[0]


def change(hub: PayingHub, user: str, path: str, **fields: Any) -> requests.Response:
    """Change something through the JSON as a script with this member's token does."""
    return hub.call(user, "POST", path, json=fields)
