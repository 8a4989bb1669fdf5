"""What a server asks for the item in JupyterLab, and how often. Real: Jupyter's server, HTTP; who
answers in the hub's place answers what the test says."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tornado import web
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port

from tests.support.lab import LAB, load_lab_module

pytestmark = pytest.mark.usefixtures("processes")

lab = load_lab_module("gpuspawner_lab")


class Hub(web.RequestHandler):
    """Answers every question in the same way, and remembers it."""

    status = 200
    body = b"{}"
    asked: list[tuple[str, str, str]] = []

    def get(self) -> None:
        self._answer()

    def post(self) -> None:
        self._answer()

    def _answer(self) -> None:
        it = self.request
        self.asked.append((str(it.method), it.path, it.headers.get("Authorization", "")))
        self.set_status(self.status)
        self.finish(self.body)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def url() -> AsyncIterator[str]:
    Hub.status, Hub.body, Hub.asked = 200, b"{}", []
    socket, port = bind_unused_port()
    server = HTTPServer(web.Application([(".*", Hub)]))
    server.add_sockets([socket])
    yield f"http://127.0.0.1:{port}/hub/api"
    server.stop()
    await server.close_all_connections()


def session(url: str, clock: Clock) -> Any:
    return lab.Session(f"{url}/gpuspawner/leases/0a/", "t0ken", None, clock)


async def test_all_tabs_share_one_request_to_the_hub(url: str) -> None:
    Hub.body = json.dumps({"devices": []}).encode()
    clock = Clock()
    it = session(url, clock)
    answers = await asyncio.gather(*(it.now() for _ in range(20)))
    assert answers == [{"devices": [], "available": True}] * 20
    assert Hub.asked == [("GET", "/hub/api/gpuspawner/leases/0a/now", "token t0ken")]
    clock.now += lab.FRESH - 1
    await it.now()
    assert len(Hub.asked) == 1
    clock.now += 2
    await it.now()
    assert len(Hub.asked) == 2


async def pauses(it: Any, clock: Clock, count: int) -> list[float]:
    found = []
    for _ in range(count):
        told = await it.now()
        assert told.keys() == {"available", "retry_seconds"} and told["available"] is False
        found.append(told["retry_seconds"])
        clock.now += told["retry_seconds"] - 0.125
        await it.now()  # too early: nobody is asked
        clock.now += 0.25
    return found


@pytest.mark.parametrize("body", [b"{}", b"<html>", b"[]", b"\xff"])
async def test_failing_hub_is_asked_less_and_less_often(url: str, body: bytes) -> None:
    Hub.status, Hub.body = 503, body
    clock = Clock()
    found = await pauses(session(url, clock), clock, 8)
    assert found == [15, 30, 60, 120, 240, 480, 600, 600]
    assert len(Hub.asked) == 8


async def test_unreachable_hub_is_retried_with_growing_pauses(url: str) -> None:
    socket, port = bind_unused_port()
    socket.close()
    clock = Clock()
    it = session(f"http://127.0.0.1:{port}", clock)
    assert await pauses(it, clock, 2) == [15, 30]
    assert await it.act("extend") == (503, {"message": lab.AWAY})


async def test_refusal_causes_a_long_pause_and_success_resets_it(url: str) -> None:
    clock = Clock()
    it = session(url, clock)
    Hub.status = 403
    assert await pauses(it, clock, 1) == [600]
    Hub.status = 200
    assert (await it.now())["available"] is True
    Hub.status = 503
    clock.now += 100
    assert await pauses(it, clock, 1) == [15]


async def test_button_press_is_sent_once_and_state_is_refreshed(url: str) -> None:
    clock = Clock()
    it = session(url, clock)
    await it.now()
    Hub.status, Hub.body = 409, json.dumps({"message": "Others wait."}).encode()
    assert await it.act("extend") == (409, {"message": "Others wait."})
    Hub.status = 200
    await it.now()
    assert [(method, path.rpartition("/")[2]) for method, path, _ in Hub.asked] == [
        ("GET", "now"),
        ("POST", "extend"),
        ("GET", "now"),
    ]


def test_session_needs_hub_url_token_and_lease() -> None:
    whole = {
        "JUPYTERHUB_API_URL": "http://10.0.0.1:8081/hub/api",
        "JUPYTERHUB_API_TOKEN": "t0ken",
        "GPUSPAWNER_LEASE_ID": "0a",
    }
    assert lab.session_of(whole) is not None
    for name in whole:
        assert lab.session_of({**whole, name: ""}) is None
        assert lab.session_of({k: v for k, v in whole.items() if k != name}) is None


def test_lab_modules_import_nothing_else_at_the_start() -> None:
    names = "gpuspawner_lab, gpuspawner_kernels, gpuspawner_exporters, gpuspawner_finish"
    code = (
        "import sys, jupyterhub.singleuser.extension, jupyter_server.serverapp; "
        "import jupyter_server.services.nbconvert.handlers; "
        f"before = set(sys.modules); import {names}; print(*sorted(set(sys.modules) - before))"
    )
    environment = {**os.environ, "PYTHONPATH": str(LAB)}
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split() == sorted([*names.split(", "), "gpuspawner_run"])
