"""Chromium as the machine has it, driven by Playwright; nothing is downloaded."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.support import c_library, parts
from tests.support.processes import REPO

RESULTS = REPO / "test-results"
ARGUMENTS = (
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-site-isolation-trials",  # every page is the hub's: they need no process each
    "--disable-sync",
)
PATIENCE_MS = 120_000
"""Milliseconds for a page or an element: an upper bound, since a slow machine takes its time."""

expect.set_options(timeout=PATIENCE_MS)


def chromium() -> str:
    """The path of the installed browser: Debian's, else Playwright's own, as on Ubuntu.

    Ubuntu's is a snap, which cannot see a test's folders.
    """
    for name in ("chromium", "google-chrome"):
        if (found := shutil.which(name)) and not found.startswith("/snap/"):
            return found
    for own in Path.home().glob(".cache/ms-playwright/chromium-*/chrome-linux*/chrome"):
        return str(own)
    raise RuntimeError("no Chromium is installed: run scripts/test_parts.sh")


def environment() -> dict[str, str]:
    """What to set for a browser that hears nothing of network interfaces; why, the source says."""
    source = Path(__file__).with_name("no_netlink.c")
    library = c_library.compiled("no_netlink.so", source)
    others = os.environ.get("LD_PRELOAD", "")
    return os.environ | {"LD_PRELOAD": f"{others} {library}".strip()}


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A headless browser.

    Open it in a test that is not a coroutine, and close it within that test: Playwright's plain
    API holds the thread's event loop for as long as it runs.
    """
    parts.require("browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium(),
            args=list(ARGUMENTS),
            env=dict(environment()),
            timeout=PATIENCE_MS,
        )
        browser.on("context", _be_patient)
        try:
            yield browser
        finally:
            browser.close()


def _be_patient(context: BrowserContext) -> None:
    context.set_default_timeout(PATIENCE_MS)


def pages_shown(browser: Browser) -> str:
    """What each open page shows and complained about, for the report of a failed test."""
    lines = []
    for page in (page for context in browser.contexts for page in context.pages):
        lines.append(f"--- page {page.url}")
        try:
            lines.append(page.locator("body").inner_text(timeout=5_000)[:600])
            # Playwright's own process keeps the last ones of these, and answers whatever the page
            # does: they need no timeout.
            lines.extend(f"{it.type}: {it.text}"[:300] for it in page.console_messages()[-15:])
            lines.extend(f"error: {it}"[:300] for it in page.page_errors()[-5:])
            open_ones = [it for it in page.requests() if it.timing["responseEnd"] < 0]
            for it in open_ones[-15:]:
                lines.append(f"no answer, or not its end: {it.url[:300]} {it.failure or ''}")
        except Exception as e:
            lines.append(f"(it is not responding: {e})")
    return "\n".join(lines)


SHOWS = """
window.Notification = class extends EventTarget {
  static get permission() { return allowed; }
  static requestPermission = () => Promise.resolve(allowed);
  constructor(title, options) {
    super();
    const shown = document.body.appendChild(document.createElement("output"));
    shown.textContent = `${title}: ${options.body}`;
  }
};
"""


def show_notifications(context: BrowserContext, *, allowed: bool) -> None:
    """Allow notifications, or block them; each is shown in its page, by an ``output``.

    Only the display is replaced: headless Chromium has none.
    """
    if allowed:
        context.grant_permissions(["notifications"])
    answer = "window.Notification.permission" if allowed else "'denied'"
    context.add_init_script(f"const allowed = {answer};{SHOWS}")


def screenshot(page: Page, name: str) -> Path:
    """Keep a picture of the whole page in ``test-results/`` and say where."""
    path = RESULTS / f"{re.sub(r'[^A-Za-z0-9._/-]+', '-', name)}.jpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    # A PNG takes the browser twice as long, and small letters can be read in this too.
    page.screenshot(path=path, full_page=True, type="jpeg", quality=80)
    return path


def complaints_of_ours(page: Page) -> list[str]:
    """What the page complains about on its console that has to do with us, as it comes.

    That a plugin took long to activate says something of this machine alone.
    """
    found: list[str] = []

    def look(kind: str, text: str, where: str) -> None:
        is_slow = text.startswith("Plugin ") and text.endswith("ms to activate.")
        if kind in ("error", "warning") and "gpuspawner" in text + where and not is_slow:
            found.append(f"{kind}: {text} ({where})")

    page.on("console", lambda it: look(it.type, it.text, str(it.location.get("url"))))
    page.on("pageerror", lambda it: found.append(str(it)))
    return found
