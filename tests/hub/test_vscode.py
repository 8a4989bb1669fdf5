"""VS Code in the browser, in a member's session. Real: hub, proxy, a Docker Engine, the image of
images/vscode, Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from gpuspawner.engines.smoke_test import passed, smoke
from tests.support.browser import screenshot
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import GPUHub
from tests.support.images import VSCODE
from tests.support.pages import WIDE, add_cookies, send_sign_in
from tests.support.processes import wait_for

CATALOG = f"""
environments:
  - slug: vscode
    display_name: VS Code
    image: {VSCODE}
    first_page: vscode
    default: true
    devices: {{default: 1, max: 1}}
"""


@pytest.fixture(scope="module")
def hub(hubs: None, engine: PrivateEngine, images: Any, folder: Path) -> Iterator[GPUHub]:
    images.ensure_images(engine, [images.VSCODE])
    with GPUHub(folder / "hub", engine, catalog=CATALOG) as hub:
        yield hub
    engine.clean()


@pytest.mark.usefixtures("soak", "hub")
def test_vscode_image_builds_from_its_lock_and_passes_its_smoke_test(
    engine: PrivateEngine, images: Any
) -> None:
    found = smoke(engine.client, images.VSCODE)
    assert passed(found), found
    lock = images.OURS / "vscode" / "requirements.lock"
    assert images.locked(lock) <= images.listed(engine, images.VSCODE)


@pytest.mark.usefixtures("soak")
def test_member_works_in_vscode_and_nobody_else_gets_in(hub: GPUHub, browser: Browser) -> None:
    page = browser.new_page(viewport=WIDE)
    page.goto(f"{hub.url}/hub/login?next=/hub/spawn")
    send_sign_in(page, "ann")
    page.get_by_role("button", name="Start", exact=True).click()
    page.wait_for_url(f"{hub.url}/user/ann/vscode/**")
    (lease,) = hub.open_leases("ann")
    (device,) = lease.devices

    # The workbench with the member's own folder.
    expect(page.locator(".monaco-workbench")).to_be_visible()
    hub.shell("ann", "echo hello > ~/work/from-the-shell.txt")
    expect(page.get_by_role("treeitem", name="from-the-shell.txt")).to_be_visible()

    # A terminal, which needs websockets, and what it writes in the editor.
    page.keyboard.press("F1")
    page.keyboard.type("Terminal: Create New Terminal")
    commands = page.locator(".quick-input-list a")
    commands.filter(has_text=re.compile("^Terminal: Create New Terminal$")).click()
    expect(page.locator(".xterm-helper-textarea")).to_be_focused()
    page.keyboard.type("(cat from-the-shell.txt; echo $NVIDIA_VISIBLE_DEVICES) > device.txt")
    page.keyboard.press("Enter")
    written = (0, f"hello\n{device.uuid}")
    wait_for(lambda: hub.shell("ann", "cat ~/work/device.txt") == written, "the terminal's file")
    page.get_by_role("treeitem", name="device.txt").dblclick()
    expect(page.locator(".editor-group-container .view-lines")).to_contain_text(device.uuid)
    screenshot(page, "vscode")

    url = page.url
    other = browser.new_page()
    add_cookies(other, hub, "bob")
    answer = other.goto(url)
    assert answer is not None and answer.status == 403
    stranger = browser.new_page()
    stranger.goto(url)
    expect(stranger).to_have_url(re.compile("/hub/login"))
