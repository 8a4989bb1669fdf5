"""A member in a browser: from the click on Start to a notebook whose kernel answers."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass
from datetime import datetime

from playwright.sync_api import Browser, BrowserContext, Page, TimeoutError, ViewportSize

from tests.support.browser import ARGUMENTS, chromium, environment
from tests.support.engine import PrivateEngine
from tests.support.hub import USER_PASSWORD, HubProcess
from tests.support.processes import wait_for

PATIENCE = 120_000
"""Milliseconds that anything may take."""

AGAIN = 1_000
"""Milliseconds after which a cell without an answer is written anew."""

ANSWER = 42
STEPS = ("container made", "container started", "server listens", "hub says ready", "page loads")
"""What happens between the click and a page that can be used, in its order."""


@dataclass(frozen=True, slots=True)
class Click:
    """Seconds since the click on Start."""

    steps: dict[str, float]
    """Until each of STEPS was over."""
    usable: float
    """Until JupyterLab's launcher could be clicked."""
    answered: float
    """Until a new notebook's kernel had worked something out."""

    def parts(self) -> dict[str, float]:
        """How long each step took by itself, and what came after them."""
        ends = {**self.steps, "JupyterLab's start": self.usable, "a kernel answers": self.answered}
        began, found = 0.0, {}
        for name, end in ends.items():
            found[name] = end - began
            began = end
        return found


def sign_in(browser: Browser, hub: HubProcess, user: str, profile: str = "") -> BrowserContext:
    """A browser window of this member, whose cache is still empty.

    ``profile``: a folder for what people's browsers keep on disk, compiled scripts too.
    """
    size: ViewportSize = {"width": 1280, "height": 800}
    if profile:
        context = browser.browser_type.launch_persistent_context(
            profile,
            executable_path=chromium(),
            args=list(ARGUMENTS),
            env=dict(environment()),
            viewport=size,
        )
    else:
        context = browser.new_context(viewport=size)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.goto(f"{hub.url}/hub/login?next=%2Fhub%2Fhome")
    page.get_by_label("Username").fill(user)
    page.get_by_label("Password").fill(USER_PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url("**/hub/home")
    page.close()
    return context


def click_to_lab(
    context: BrowserContext, hub: HubProcess, engine: PrivateEngine, user: str
) -> Click:
    """Start this member's server with the form's own choice, and work in it."""
    page = context.new_page()
    page.goto(f"{hub.url}/hub/spawn")
    start = page.get_by_role("button", name="Start")
    start.wait_for()
    began = time.time()
    start.click()
    page.wait_for_url(re.compile(f"/user/{user}/lab"), wait_until="commit")
    loading = time.time()
    notebook = page.locator(".jp-LauncherCard[data-category=Notebook]").first
    notebook.wait_for()
    usable = time.time()
    notebook.click()
    _run_a_cell(page)
    answered = time.time()
    page.close()
    moments = [*_container_moments(engine), _ready(hub, user), loading]
    steps = {name: moment - began for name, moment in zip(STEPS, moments, strict=True)}
    return Click(steps, usable - began, answered - began)


def _run_a_cell(page: Page) -> None:
    panel = page.locator(".jp-NotebookPanel:visible")
    # What is run before JupyterLab and the kernel know of one another is lost, or starts another.
    page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for()
    cell = panel.locator(".jp-Cell .cm-content").first
    output = panel.locator(".jp-OutputArea-output", has_text=str(ANSWER)).first

    def answered() -> bool:
        """JupyterLab forgets what is written into a notebook that it is still setting up."""
        cell.fill(f"print({ANSWER // 2} + {ANSWER - ANSWER // 2})")
        cell.press("Shift+Enter")
        with contextlib.suppress(TimeoutError):
            output.wait_for(timeout=AGAIN)
        return output.is_visible()

    wait_for(answered, "an answer of the kernel", timeout=PATIENCE / 1e3, interval=0)


def _container_moments(engine: PrivateEngine) -> list[float]:
    """When it was made, when it was started, and when the server in it began to listen."""
    [found] = engine.client.containers()  # nobody else has one
    state = engine.client.inspect_container(found["Id"])
    log = engine.client.logs(found["Id"], timestamps=True).decode(errors="replace").splitlines()
    listening = next(line for line in log if "Jupyter Server" in line and "is running" in line)
    stamps = (state["Created"], state["State"]["StartedAt"], listening.split(maxsplit=1)[0])
    return [_moment(stamp) for stamp in stamps]


def _moment(stamp: str) -> float:
    """Docker writes nanoseconds, which Python does not read."""
    whole, _, fraction = stamp.rstrip("Z").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")


def _ready(hub: HubProcess, user: str) -> float:
    """When the hub had found the server and its route."""
    line = re.compile(rf"\[I (\S+ \S+) JupyterHub \S+\] User {user} took [\d.]+ seconds to start")

    def latest() -> str | None:
        found = line.findall(hub.log_text())
        return found[-1] if found else None

    return datetime.fromisoformat(wait_for(latest, "the hub to say that it is ready")).timestamp()
