"""`make screenshots`: the pictures of the documentation, taken from the running demo.

It starts the demo in a folder of its own, with simulated GPUs and local processes, and does in a
browser what the tutorial says.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import demo_processes
from demo import REPO, SIMULATED, Demo
from demo_state import ADMIN, Stop
from playwright.sync_api import Browser, Page, sync_playwright

FOLDER = REPO / "docs" / "_static" / "screenshots"
PATIENCE_MS = 120_000
LOOK_MS = 1000
"""The pause between two looks at what a session has cost."""


def take_all(demo: Demo, browser: Browser, folder: Path) -> None:
    """Take every picture, in the order of the tutorial."""
    folder.mkdir(parents=True, exist_ok=True)
    first = sign_in(demo, browser, "member1")
    first.goto(f"{demo.url}/hub/spawn")
    take(first, folder / "start-form.png", 880)
    first.get_by_label("Model").select_option("T4")
    start(first, "JupyterLab with a GPU")
    first.wait_for_url(re.compile("/user/member1/"))

    several = "JupyterLab with several GPUs"
    second = sign_in(demo, browser, "member2")
    start(second, several)
    second.wait_for_url(re.compile("/user/member2/"))
    third = sign_in(demo, browser, "member3")
    start(third, several)
    third.get_by_text("Expected start").wait_for()
    take(third, folder / "waiting.png", 420)

    admin = sign_in(demo, browser, ADMIN)
    admin.goto(f"{demo.url}/services/gpu/devices")
    take(admin, folder / "devices.png", 790)

    first.goto(f"{demo.url}/services/gpu/")
    cost = first.locator("dt:text-is('Cost so far') + dd")
    for _ in range(PATIENCE_MS // LOOK_MS):
        if cost.inner_text() != "0.00 credits":  # a T4 costs the first cent in half a minute
            break
        first.wait_for_timeout(LOOK_MS)
        first.reload()
    else:
        raise RuntimeError("The session costs nothing: look at the accounting service's log.")
    first.get_by_role("button", name="Stop").first.click()
    first.get_by_role("button", name="Stop server").click()
    first.get_by_role("link", name="Receipt").click()
    take(first, folder / "receipt.png", 930)


def sign_in(demo: Demo, browser: Browser, user: str) -> Page:
    """Return a window of the user's own, signed in."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto(f"{demo.url}/hub/login")
    page.fill("input[name=username]", user)
    passwords = demo.passwords
    page.fill("input[name=password]", passwords.admin if user == ADMIN else passwords.members)
    page.click("[type=submit]")
    page.wait_for_url(lambda url: "/hub/login" not in url)
    return page


def start(page: Page, environment: str) -> None:
    """Choose an environment in the form and press Start."""
    if "/hub/spawn" not in page.url:
        page.goto(re.sub(r"/hub/.*|/user/.*", "/hub/spawn", page.url))
    page.get_by_label(environment).check()
    page.get_by_role("button", name="Start", exact=True).click()


def take(page: Page, file: Path, height: int) -> None:
    """Take a picture of the page down to this height, in pixels."""
    page.set_viewport_size({"width": 1280, "height": height})
    page.wait_for_load_state("networkidle")
    page.screenshot(path=file, animations="disabled")
    print(file, flush=True)


def main(folder: Path) -> int:
    """Take the pictures; the exit status."""
    os.environ["DOCKER_HOST"] = "unix:///nowhere/docker.sock"  # local processes, on any machine
    demo_processes.adopt_descendants()
    with ExitStack() as ends:
        os.environ["GPUSPAWNER_DEMO_DIR"] = ends.enter_context(tempfile.TemporaryDirectory())
        demo = Demo()
        ends.callback(demo.end)
        try:
            demo.start()
        except Stop as reason:
            sys.exit(str(reason))
        if demo.gpus != SIMULATED:
            sys.exit("Take the pictures on a machine without GPUs: they show simulated ones.")
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        playwright = ends.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        ends.callback(browser.close)
        take_all(demo, browser, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
