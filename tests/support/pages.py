"""Reading the service's pages: their words, their pictures, and pages of a test's own."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import requests
from jupyterhub.services.auth import HubOAuth
from playwright.sync_api import Browser, Page
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port

from gpuspawner.services import Broker
from gpuspawner.web import app as web_app
from tests.support.browser import screenshot
from tests.support.hub import ADMIN, ADMIN_PASSWORD, USER_PASSWORD, HubProcess
from tests.support.paying_hub import PayingHub


def words(answer: requests.Response) -> str:
    """A page without its tags, on one line."""
    text = re.sub(r"<[^>]+>", " ", answer.text.partition("<body>")[2])
    return " ".join(text.replace("&#39;", "'").split())


def ask(hub: PayingHub, user: str, url: str) -> requests.Response:
    """A page that a test serves itself, as this member with a token."""
    headers = {"Authorization": f"token {hub.user_token(user)}"}
    return requests.get(url, headers=headers, timeout=120)


@contextmanager
def served(hub: PayingHub, broker: Broker, *, api_url: str = "", **settings: Any) -> Iterator[str]:
    """Serve the pages from this process, with these settings of theirs; the Hub still says who
    asks."""
    auth = HubOAuth(
        api_url=api_url or f"{hub.url}/hub/api",
        api_token=hub.token,
        base_url="/services/gpu/",
        oauth_client_id="service-gpu",
        oauth_redirect_uri="/services/gpu/oauth_callback",
        access_scopes={"access:services!service=gpu"},
    )
    loop = asyncio.new_event_loop()
    listening, port = bind_unused_port()

    async def listen() -> HTTPServer:
        server = web_app.make_server(
            web_app.make_app(broker, hub_auth=auth, warn_minutes=[30], **settings)
        )
        server.add_socket(listening)
        return server

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(listen(), loop).result(10)
    try:
        yield f"http://127.0.0.1:{port}/services/gpu/"
    finally:
        loop.call_soon_threadsafe(server.stop)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def picture(browser: Browser, hub: PayingHub, url: str, name: str, size: Any) -> None:
    """A picture of a page that is served by this test, as the admin."""
    headers = {"Authorization": f"token {hub.user_token(ADMIN)}"}
    context = browser.new_context(viewport=size, extra_http_headers=headers)
    page = context.new_page()
    page.goto(url)
    screenshot(page, name)
    context.close()


def sign_in(page: Page, hub: HubProcess, user: str, path: str) -> None:
    page.goto(f"{hub.url}/services/gpu/{path}")
    page.fill("input[name=username]", user)
    page.fill("input[name=password]", ADMIN_PASSWORD if user == ADMIN else USER_PASSWORD)
    page.click("[type=submit]")
    page.wait_for_url(f"{hub.url}/services/gpu/{path}")
