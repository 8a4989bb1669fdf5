"""Two members, one GPU, a hub killed in between. Real: Chromium, hub, proxy, Docker, JupyterLab."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from gpuspawner.devices.snapshots import clock
from tests.support import images
from tests.support.browser import screenshot
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import GPUHub
from tests.support.hub import USER_PASSWORD
from tests.support.processes import free_port, wait_for

WIDE = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
SLOW = 120_000
"""Milliseconds for what takes Jupyter some time, on a machine with other things to do."""

CATALOG = f"""
environments:
  - slug: lab
    display_name: JupyterLab
    image: {images.BASE}
    default: true
    devices: {{default: 1, max: 1}}
    hours: {{default: 2, max: 4}}
  - slug: instant
    image: {images.INSTANT}
    devices: {{default: 1, max: 1}}
"""

CONFIG = """
c.JupyterHub.cleanup_servers = False
c.GPUDevices.refresh_seconds = 0.2
c.Accounting.reconcile_seconds = 1
import gpuspawner
gpuspawner.add_services(c, url="http://127.0.0.1:{port}")
"""


@pytest.fixture(scope="module")
def module_hub(
    hubs: None, engine: PrivateEngine, images: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GPUHub]:
    folder = tmp_path_factory.mktemp("queue-journey") / "hub"
    config = CONFIG.format(port=free_port())
    with GPUHub(
        folder, engine, config, fleet="1xA100-80GB", catalog=CATALOG, external_proxy=True
    ) as hub:
        yield hub
    engine.clean()


@pytest.fixture
def hub(module_hub: GPUHub) -> Iterator[GPUHub]:
    """A hub with one GPU, which the test's members gave back when it is over."""
    yield module_hub
    for lease in module_hub.open_leases():
        module_hub.stop_server(lease.server.user)


def sign_in(browser: Browser, hub: GPUHub, user: str) -> Page:
    page = browser.new_context(viewport=WIDE).new_page()
    page.goto(f"{hub.url}/hub/spawn")
    page.get_by_label("Username").fill(user)
    page.get_by_label("Password").fill(USER_PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Server Options")).to_be_visible()
    return page


def wait_for_lab(page: Page, user: str) -> None:
    page.wait_for_url(re.compile(f"/user/{user}/lab"), timeout=SLOW)
    expect(page.locator(".jp-Launcher, .jp-NotebookPanel").first).to_be_visible(timeout=SLOW)


def keep(page: Page, name: str) -> None:
    for size, suffix in ((WIDE, "wide"), (PHONE, "phone")):
        page.set_viewport_size(size)
        screenshot(page, f"queue-{name}-{suffix}")
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= size["width"], f"{name} is {width} pixels wide on {suffix}"
    page.set_viewport_size(WIDE)


def test_the_second_lands_by_itself(browser: Browser, hub: GPUHub) -> None:
    one = sign_in(browser, hub, "member1")
    one.get_by_role("button", name="Start").click()
    wait_for_lab(one, "member1")

    two = sign_in(browser, hub, "member2")
    two.get_by_role("button", name="Start").click()
    message = two.locator("#progress-message")
    expect(message).to_contain_text("You are the only one in line", timeout=SLOW)
    expect(message).to_contain_text("Waiting for a GPU; none is free")
    end = hub.open_leases("member1")[0].ends_at
    assert end is not None
    # With the day, when the end is after midnight.
    likely = re.compile(rf"Most likely start: by {clock(end, end)[:5]}( on \d+ \w+)?\.")
    expect(message).to_contain_text(likely)
    keep(two, "1-pending")

    hub.kill9(services=True)
    expect(message).to_contain_text("Your place in line is kept", timeout=SLOW)
    keep(two, "2-hub-away")
    hub.start()
    expect(message).to_contain_text("You are the only one in line", timeout=SLOW)
    expect(message).to_contain_text(likely)

    hub.stop_server("member1")
    wait_for_lab(two, "member2")
    [lease] = hub.open_leases("member2")
    assert len(lease.devices) == 1
    assert lease.ticket_id, "it came from the line"


def test_stop_on_the_pending_page_leaves_the_line(browser: Browser, hub: GPUHub) -> None:
    hub.spawn_and_wait("member3", {"environment": "instant"})
    two = sign_in(browser, hub, "member4")
    two.get_by_role("button", name="Start").click()
    expect(two.locator("#progress-message")).to_contain_text("in line", timeout=SLOW)
    two.get_by_role("button", name="Stop Server").click()
    wait_for(lambda: not hub.server("member4"), "the stop")
    expect(two.get_by_role("heading")).to_contain_text("Server not running", timeout=SLOW)
    keep(two, "3-left")
    hub.stop_server("member3")
    assert not hub.open_leases("member4")
