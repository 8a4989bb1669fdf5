"""The tests' browser does not care what happens to network interfaces beside it."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

import pytest
from playwright.sync_api import Browser

from tests.support.processes import as_root, run

INTERFACE = "gstest0"
PAGE = b"<script>for (let i = 0; i < 40; i++) fetch('/' + i)</script>"


class Answer(BaseHTTPRequestHandler):
    """HTTP/1.0: one connection for each request, and it is connecting that Chromium breaks off."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def addresses_come_and_go() -> Iterator[None]:
    """As with every container that starts or ends, but all the time."""
    done = Event()

    def change() -> None:
        while not done.is_set():
            run(as_root(["ip", "link", "add", INTERFACE, "type", "bridge"]))
            run(as_root(["ip", "addr", "add", "198.51.100.1/24", "dev", INTERFACE]))
            run(as_root(["ip", "link", "set", INTERFACE, "up"]))
            run(as_root(["ip", "link", "del", INTERFACE]))

    thread = Thread(target=change)
    thread.start()
    yield
    done.set()
    thread.join()


@pytest.mark.usefixtures("addresses_come_and_go")
def test_requests_are_not_broken_off_when_an_interface_changes(browser: Browser, url: str) -> None:
    failed: list[str] = []
    page = browser.new_page()
    page.on("requestfailed", lambda it: failed.append(str(it.failure)))
    for _ in range(8):
        page.goto(url, wait_until="networkidle")
    assert failed == []
