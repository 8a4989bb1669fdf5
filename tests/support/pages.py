"""The pages: their words, pictures and accessibility, signing in, and pages of a test's own."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import requests
from jupyterhub.services.auth import HubOAuth
from playwright.sync_api import Browser, BrowserContext, Page, ViewportSize
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port

from gpuspawner.services import Services
from gpuspawner.web import app as web_app
from gpuspawner.web.base import Context
from tests.support import axe, tier
from tests.support.browser import screenshot
from tests.support.hub import ADMIN, ADMIN_PASSWORD, USER_PASSWORD, HubProcess
from tests.support.paying_hub import PayingHub

WIDE = ViewportSize(width=1280, height=800)
PHONE = ViewportSize(width=390, height=844)
SIZES = {"desk": WIDE, "phone": PHONE}

ACROSS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
"""Pixels by which a page is wider than its window."""
STICKING_OUT = """
[...document.querySelectorAll("body *")].filter(
    e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1
).map(e => e.outerHTML.slice(0, 200))
"""
"""The elements that make it so, the outermost first."""
DRAWN = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""What is laid out anew after a change of size has been drawn."""
OUTSIDE = """
[...document.querySelectorAll("dd")].filter(cell => {
    const text = document.createRange()
    text.selectNodeContents(cell)
    return text.getBoundingClientRect().right > cell.getBoundingClientRect().right + 1
}).map(cell => cell.innerText)
"""
"""What sticks out of its place in a list."""
GROUND = "getComputedStyle(document.body).backgroundColor"
GROUNDS = {"light": "rgb(255, 255, 255)", "dark": "rgb(33, 37, 41)"}
UNNAMED = """
[...document.querySelectorAll("input:not([type=hidden], [type=submit], [aria-label]), select")]
    .filter(e => !e.labels.length)
    .map(e => e.outerHTML)
"""
"""Fields without a label."""


def words(answer: requests.Response) -> str:
    """What is on a page without its tags, on one line; not the navigation bar around it."""
    found = re.search(r"<main.*</main>", answer.text, re.DOTALL)
    text = re.sub(r"<[^>]+>", " ", found[0] if found else answer.text.partition("<body>")[2])
    return " ".join(text.replace("&#39;", "'").split())


def mentions(text: str, name: str) -> bool:
    """Return True if a text has this name as a word: an id such as 5ada3c has no name in it."""
    return re.search(rf"\b{re.escape(name)}\b", text) is not None


def ask(hub: PayingHub, user: str, url: str) -> requests.Response:
    """A page that a test serves itself, as this member with a token."""
    headers = {"Authorization": f"token {hub.user_token(user)}"}
    return requests.get(url, headers=headers, timeout=120)


@contextmanager
def served(hub: PayingHub, services: Services, **settings: Any) -> Iterator[str]:
    """Serve the pages from this process, with these settings of theirs; the Hub still says who
    asks."""
    auth = HubOAuth(
        api_url=f"{hub.url}/hub/api",
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
            web_app.make_app(Context(services, auth, warn_minutes=[30], **settings))
        )
        server.add_socket(listening)
        return server

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(listen(), loop).result(120)
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


def send_sign_in(page: Page, user: str) -> None:
    """Fill in and send the form for signing in that the page shows."""
    page.fill("input[name=username]", user)
    page.fill("input[name=password]", ADMIN_PASSWORD if user == ADMIN else USER_PASSWORD)
    page.click("[type=submit]")


def add_cookies(page: Page, hub: HubProcess, user: str) -> None:
    """Let the browser be that of a member who has signed in by the hub's form."""
    page.context.add_cookies(
        [
            {"name": cookie.name, "value": cookie.value, "domain": "127.0.0.1", "path": cookie.path}
            for cookie in hub.browser_of(user).cookies
            if cookie.value is not None
        ]
    )


def sign_in(page: Page, hub: HubProcess, user: str, path: str) -> None:
    """Go to a page of the service, signed in."""
    add_cookies(page, hub, user)
    page.goto(f"{hub.url}/services/gpu/{path}")
    page.wait_for_url(f"{hub.url}/services/gpu/{path}")


class Clicks:
    """Counts what somebody clicks in a browser's context, and each choice from a list."""

    def __init__(self, context: BrowserContext) -> None:
        self.count = 0
        context.expose_function("clicked", self._add)
        context.add_init_script(
            """
            addEventListener("click", e => e.isTrusted && e.detail && clicked(), true);
            addEventListener("change", e => e.target.matches("select") && clicked(), true);
            """
        )

    def _add(self) -> None:
        self.count += 1


def look_over(page: Page, name: str, *rules: str, accessible: bool = True) -> None:
    """Keep pictures of the page as on a desk and as on a phone. Nothing sticks out, and axe-core
    finds nothing serious, nor what these rules of it forbid."""
    for size, suffix in ((WIDE, "wide"), (PHONE, "phone")):
        page.set_viewport_size(size)
        page.evaluate(DRAWN)
        screenshot(page, f"{name}-{suffix}")
        wider = f"{name} is wider than its window on {suffix}"
        assert page.evaluate(ACROSS) <= 0, f"{wider}: {page.evaluate(STICKING_OUT)[:5]}"
        if accessible:
            troubles = axe.troubles(page, *rules)
            assert troubles == [], f"{name} on {suffix}: {troubles}"
    page.set_viewport_size(WIDE)


def look_over_page(page: Page, name: str) -> list[str]:
    """Keep pictures of the page: on a desk in the light and on a phone in the dark, in a soak both
    on both. It begins with the screen that the page was loaded on, and leaves the page on the last
    one.

    Returns what is wrong with it: what axe-core finds, what sticks out, errors of its scripts.
    """
    found = [f"error of a script: {it}" for it in page.page_errors()]
    screens: list[tuple[str, Literal["light", "dark"]]] = [("desk", "light"), ("phone", "dark")]
    if tier.SOAK:
        screens += [("desk", "dark"), ("phone", "light")]
    if page.viewport_size == PHONE:
        screens.reverse()
    for screen, scheme in screens:
        where = f"{screen}, {scheme}"
        page.emulate_media(color_scheme=scheme)
        if page.viewport_size != SIZES[screen]:
            page.set_viewport_size(SIZES[screen])
        dark = "html[data-bs-theme=dark]" if scheme == "dark" else "html:not([data-bs-theme=dark])"
        page.wait_for_selector(dark, state="attached")
        page.evaluate(DRAWN)
        screenshot(page, f"{name}-{screen}-{scheme}")
        if (ground := page.evaluate(GROUND)) != GROUNDS[scheme]:
            found.append(f"its ground is {ground} ({scheme})")
        if page.evaluate(ACROSS) > 0:
            found.append(f"wider than its window ({where}): {page.evaluate(STICKING_OUT)[:3]}")
        if screen == "desk":
            found += [f"it sticks out of its place: {it}" for it in page.evaluate(OUTSIDE)]
        found += [f"{axe.in_words(it)} ({where})" for it in axe.findings(page)]
    if page.locator("h1").count() != 1:
        found.append(f"{page.locator('h1').count()} main headings")
    found += [f"a field without a label: {it}" for it in page.evaluate(UNNAMED)]
    if bare := page.locator(":is(.gpuspawner, .gs-page) th:not([scope])").count():
        found.append(f"{bare} heads of tables that do not say what they head")
    return [f"{name}: {it}" for it in dict.fromkeys(found)]


def look_over_in_the_dark(page: Page, name: str) -> None:
    """The page with the colours of a dark window, which are all that differs there."""
    # Colours that change step by step would be looked at on the way.
    page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    page.wait_for_selector("html:not([data-bs-theme=light])", state="attached")
    screenshot(page, f"{name}-dark")
    assert axe.findings(page, rules=axe.COLOURS) == [], f"{name} in the dark"
    page.emulate_media(color_scheme="light")
