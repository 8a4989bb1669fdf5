"""Members all the way, one of them in the queue while the hub is killed. Real: Chromium, hub,
proxy, service, Docker Engine, JupyterLab, SQLite."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from gpuspawner.core.times import minute_after
from gpuspawner.core.units import MICRO, format_credits
from gpuspawner.ledger.rules import owed
from tests.support.browser import screenshot
from tests.support.compatibility import HUB_6
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import GPUHub
from tests.support.hub import ADMIN
from tests.support.page_text import text_of
from tests.support.pages import WIDE, Clicks, add_cookies, look_over, send_sign_in
from tests.support.processes import free_port, wait_for

CATALOG = """
environments:
  - slug: lab
    display_name: JupyterLab
    description: Notebooks, a terminal and Python, for training and inference.
    image: {image}
    default: true
    devices: {{default: 1, max: 2}}
    shm_size: 1G
  - slug: course
    display_name: Deep learning course
    description: The course's notebooks and data. One GPU is enough for every exercise.
    image: {image}
    devices: {{default: 1, max: 1}}
    shm_size: 1G
  - slug: cpu
    display_name: JupyterLab without a GPU
    description: For files, notes and light work. Costs nothing.
    image: {image}
    devices: {{max: 0}}
  - slug: slow
    display_name: An environment that takes long
    description: Its server never answers.
    image: {silent}
    devices: {{max: 0}}
    spawner_override: {{http_timeout: 600}}
  - slug: instant
    display_name: A server that answers at once
    image: {instant}
    devices: {{default: 1, max: 2}}
    hours: {{default: 2, max: 4}}
datasets:
  flowers:
    source: {dataset}
"""

CONFIG = """
c.GPURates.by_model = {{"*": 1, "A100": 4}}
c.GPUCredits.opening_grant = 50
c.GPUDockerSpawner.workspace = "work-{{username}}"
c.GPUCredits.grace_seconds = 2
c.GPUDockerSpawner.gpu_limit = 2
c.DockerSpawner.mem_limit = "2G"
c.JupyterHub.cleanup_servers = False
c.GPUDevices.refresh_seconds = 0.2
c.Accounting.reconcile_seconds = 1
import gpuspawner; gpuspawner.add_services(c, url="http://127.0.0.1:{port}")
"""

CELL = """
import glob, os, pathlib
print("visible", os.environ["NVIDIA_VISIBLE_DEVICES"])
print("nodes", *glob.glob("/dev/nvidia[0-9]*"))
print("order", os.environ["CUDA_DEVICE_ORDER"], "count", os.environ["GPUSPAWNER_GPU_COUNT"])
shm = os.statvfs("/dev/shm"); print("shm", shm.f_blocks * shm.f_frsize)
print("data", pathlib.Path("/datasets/flowers/rose.txt").read_text())
try: pathlib.Path("/datasets/flowers/rose.txt").write_text("mine")
except OSError as error: print("refused", error.strerror)
pathlib.Path.home().joinpath("work/notes.txt").write_text("by " + os.environ["JUPYTERHUB_USER"])
print("the", "end")
""".strip()


@pytest.fixture(scope="module")
def module_hub(hubs: None, engine: PrivateEngine, images: Any, folder: Path) -> Iterator[GPUHub]:
    """Two GPUs, and environments with JupyterLab."""
    dataset = folder / "flowers"
    dataset.mkdir(mode=0o755)
    (dataset / "rose.txt").write_text("a rose", encoding="utf-8")
    catalog = CATALOG.format(
        image=images.BASE, silent=images.SILENT, instant=images.INSTANT, dataset=dataset
    )
    config = CONFIG.format(port=free_port())
    with GPUHub(folder / "hub", engine, config, catalog=catalog, external_proxy=True) as hub:
        yield hub
    engine.clean()


@pytest.fixture
def hub(module_hub: GPUHub) -> Iterator[GPUHub]:
    """Two GPUs, which the test's members gave back when it is over."""
    yield module_hub
    module_hub.stop_all_servers()


def open_form(browser: Browser, hub: GPUHub, user: str) -> Page:
    """A member's own window with the form to start a server."""
    page = browser.new_context(viewport=WIDE).new_page()
    add_cookies(page, hub, user)
    page.goto(f"{hub.url}/hub/spawn")
    expect(page.get_by_role("heading", name="Server Options")).to_be_visible()
    return page


def start(page: Page, environment: str, gpus: str | None = None) -> None:
    """Choose on the form and press Start."""
    page.get_by_label(environment, exact=False).first.check()
    if gpus is not None:
        page.get_by_label("GPUs", exact=True).select_option(gpus)
    page.get_by_role("button", name="Start", exact=True).click()


def back_to_form(page: Page, hub: GPUHub) -> None:
    """JupyterHub shows a refusal above the form only if it comes within a second."""
    if not page.locator("#spawn_form").is_visible():
        page.goto(f"{hub.url}/hub/spawn")


def wait_for_lab(page: Page, user: str) -> None:
    """Until JupyterLab is there, by itself."""
    page.wait_for_url(re.compile(f"/user/{user}/lab"))
    expect(page.locator(".jp-Launcher, .jp-NotebookPanel").first).to_be_visible()


def run_cell(page: Page, code: str) -> str:
    """Open a new notebook, run the code in its first cell: what it printed."""
    page.get_by_role("menuitem", name="File", exact=True).click()
    page.locator(".lm-Menu:visible .lm-Menu-itemLabel", has_text="New").first.hover()
    page.locator('.lm-Menu:visible [data-command="notebook:create-new"]').click()
    page.locator(".jp-Dialog").get_by_role("button", name="Select").click()
    notebook = page.locator(".jp-NotebookPanel:visible")
    idle = notebook.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]')
    expect(idle).to_be_visible()
    cell = notebook.locator(".jp-Cell .cm-content").first
    cell.fill(code)
    cell.press("Shift+Enter")
    output = notebook.locator(".jp-OutputArea-output").first
    expect(output).to_contain_text("the end")
    return output.inner_text()


def type_in_terminal(page: Page, command: str) -> None:
    """Open a terminal from the launcher and type a line."""
    page.get_by_role("button", name="New Launcher").first.click()
    page.locator(".jp-LauncherCard:visible", has_text="Terminal").first.click()
    terminal = page.locator(".jp-Terminal:visible")
    expect(terminal.locator(".xterm-screen")).to_be_visible()
    terminal.click()
    page.keyboard.type(f"{command}\n")


def test_two_members_use_gpus_from_sign_in_to_stop(browser: Browser, hub: GPUHub) -> None:
    # Member 1 finds an environment, signs in, and sees what there is and what it costs.
    context = browser.new_context(viewport=WIDE)
    clicks, one = Clicks(context), context.new_page()
    one.goto(f"{hub.url}/hub/environments")
    one.get_by_role("link", name="Launch JupyterLab", exact=True).click()
    send_sign_in(one, "member1")
    form = one.locator("#spawn_form")
    expect(form).to_contain_text("2 of 2 GPUs free.")
    expect(form).to_contain_text("Your balance: 50.00 credits.")
    expect(form.get_by_role("radio")).to_have_count(5)
    expect(form.get_by_role("radio").first).to_be_checked()
    expect(form.get_by_role("row").nth(1)).to_contain_text("A100-80GB 2 of 2 4.00 12 h 30 min")
    look_over(one, "journey-1-form", accessible=False)

    # Too many for the environment: it cannot be chosen.
    one.get_by_label("Deep learning course", exact=False).first.check()
    expect(one.locator("#gpus option[value='2']")).to_be_disabled()
    expect(one.get_by_role("button", name="Start", exact=True)).to_be_in_viewport()
    look_over(one, "journey-2-course", accessible=False)
    assert not hub.leases()
    start(one, "Deep learning course", "1")
    wait_for_lab(one, "member1")

    # Member 2 at the same time: the other GPU.
    two = open_form(browser, hub, "member2")
    expect(two.locator("#spawn_form")).to_contain_text("1 of 2 GPUs free.")
    start(two, "JupyterLab")
    two.wait_for_url(re.compile("/spawn-pending/|/user/"))
    two.close()
    hub.wait_server("member2")

    # What their GPU does, by way of the container's own token and the hub's API.
    item = one.locator(".gpuspawner-item button")
    expect(item).to_contain_text("A100-80GB")
    expect(item).to_contain_text(" %")
    expect(item).to_contain_text("credits")

    said = {"member1": run_cell(one, CELL)}
    assert clicks.count <= 9, "from the catalog to a cell's output"
    said |= {"member2": hub.kernel_run("member2", CELL)}
    screenshot(one, "journey-3-lab")
    for user, text in said.items():
        [lease] = hub.open_leases(user)
        assert lease.environment == {"member1": "course", "member2": "lab"}[user]
        assert f"visible {lease.uuids[0]}\n" in text
        assert re.search(r"nodes /dev/nvidia\d\n", text), "its own device and no other"
        assert "order PCI_BUS_ID count 1\n" in text
        assert f"shm {2**30}\n" in text
        assert "data a rose\n" in text
        assert "refused Read-only file system\n" in text
    assert len(hub.taken()) == 2
    type_in_terminal(one, "cd ~/work; echo $GPUSPAWNER_GPU_COUNT GPU > terminal.txt")
    wait_for(lambda: _file(hub, "member1", "terminal.txt") == "1 GPU\n", "the terminal")
    screenshot(one, "journey-4-terminal")

    # Nothing is left for a third, who would not wait: a sentence, and a way on.
    three = open_form(browser, hub, "member3")
    expect(three.locator("#spawn_form")).to_contain_text("0 of 2 GPUs free.")
    three.get_by_label("Don't queue if no GPU is free").check()
    start(three, "JupyterLab")
    refusal = three.locator("body")
    expect(refusal).to_contain_text("All 2 GPUs are in use. Expected start in the queue: ")
    expect(refusal).to_contain_text("Join the queue, or start without a GPU.")
    look_over(three, "journey-5-all-in-use", accessible=False)

    # Member 1 stops. The GPU is free at once, and the balance is down to the second.
    _stop_on_home_page(one, hub, "member1")
    [ended] = hub.leases("member1")
    assert ended.ended_at is not None
    assert ended.charged == owed(ended.rate, ended.started_at, ended.ended_at) > 0
    assert hub.balance("member1") == 50 * MICRO - ended.charged
    back_to_form(three, hub)
    start(three, "A server that answers at once")
    hub.wait_server("member3")
    assert hub.open_leases("member3")[0].uuids == ended.uuids

    # And comes back, without a GPU this time: the files are where they were.
    one.goto(f"{hub.url}/hub/spawn")
    shown = format_credits(hub.balance("member1"))
    expect(one.locator("#spawn_form")).to_contain_text(f"Your balance: {shown} credits.")
    expect(one.get_by_role("radio").nth(1)).to_be_checked()  # what they chose last time
    one.get_by_label("flowers", exact=True).uncheck()  # the dataset is not needed for that
    start(one, "JupyterLab without a GPU")
    wait_for_lab(one, "member1")
    expect(one.locator(".jp-DirListing-item", has_text="notes.txt")).to_be_visible()
    assert _file(hub, "member1", "notes.txt") == "by member1"
    assert hub.open_leases("member1")[0].devices == ()
    [container] = [c for c in hub.containers() if "member1" in str(c["Names"])]
    assert "/datasets/flowers" not in str(container["Mounts"])
    screenshot(one, "journey-6-back-again")
    # Member 2's files are their own.
    assert _file(hub, "member2", "notes.txt") == "by member2"


def test_admin_sees_which_images_are_missing(hub: GPUHub) -> None:
    def page(user: str = ADMIN, query: str = "") -> str:
        return text_of(hub.open_page(user, f"/hub/catalog{query}").text)

    file = hub.folder / "catalog.yaml"
    text = file.read_text(encoding="utf-8")
    row = "JupyterLab lab, preselected everybody up to 2 "
    assert re.search(rf"{row}\S+ here built on this machine", page())
    new = "  - {slug: new, display_name: A new one, image: 'nowhere/new:1', devices: {max: 0}}\n"
    own = new.replace("}}", "}, spawner_override: {pull_policy: never}}").replace("new", "own")
    try:
        file.write_text(text.replace("datasets:\n", f"{new}{own}datasets:\n"), encoding="utf-8")
        missing = "A new one new everybody none nowhere/new:1 missing the first start waits"
        assert missing in page() and missing in page(query="?updates=1")
        assert "nowhere/own:1 missing a start fails: pulling is off" in page()
        file.write_text("environments: [", encoding="utf-8")
        broken = page()
        assert "The catalog's file has a mistake; the last valid one stays in use." in broken
        assert missing in broken
    finally:
        file.write_text(text, encoding="utf-8")
    assert hub.open_page("one", "/hub/catalog").status_code == 403


def test_waiting_member_reaches_server_after_a_hub_kill(browser: Browser, hub: GPUHub) -> None:
    hub.spawn_and_wait("member5", {"environment": "instant", "gpus": 2})
    page = open_form(browser, hub, "member6")
    start(page, "A server that answers at once", "1")
    card = page.locator("#gs-card")
    expect(card).to_contain_text("Number 1 of 1 in the queue")
    expect(card).to_contain_text("a GPU; none is free")
    end = hub.open_leases("member5")[0].ends_at
    assert end is not None
    expect(card).to_contain_text(re.compile("Expected start ?by .* at the latest"))
    at = re.compile(f"{minute_after(end):%Y-%m-%dT%H:%M}")
    expect(card.locator("time")).to_have_attribute("datetime", at)
    look_over(page, "journey-7-in-line", accessible=False)

    hub.kill9(services=True)
    expect(card).to_contain_text("Your place in the queue is kept")
    look_over(page, "journey-8-hub-away", accessible=False)
    hub.start()
    expect(card).not_to_contain_text("Your place in the queue is kept")
    expect(card).to_contain_text("Number 1 of 1 in the queue")

    hub.stop_server("member5")
    page.wait_for_url(re.compile("/user/member6/"))
    [lease] = hub.open_leases("member6")
    assert len(lease.devices) == 1
    assert lease.ticket_id, "it came from the line"


def test_member_can_stop_a_start_on_the_pending_page(browser: Browser, hub: GPUHub) -> None:
    """The page that waits says how far it is, and its button stops the start or leaves the line."""
    hub.spawn_and_wait("member5", {"environment": "instant", "gpus": 2})
    context = browser.new_context(viewport=WIDE)
    clicks, page = Clicks(context), context.new_page()
    add_cookies(page, hub, "member4")
    page.goto(f"{hub.url}/hub/spawn")
    start(page, "A server that answers at once", "1")
    page.get_by_role("link", name="Leave queue").click()
    page.get_by_role("button", name="Leave queue").click()
    wait_for(lambda: not hub.server("member4"), "the stop")
    expect(page.get_by_text("You left the queue.")).to_be_visible()
    look_over(page, "journey-9-left", accessible=False)
    hub.stop_server("member5")
    assert not hub.leases("member4")

    page.get_by_role("link", name="Home", exact=True).first.click()
    page.get_by_role("button", name="Start My Server").click()
    start(page, "An environment that takes long")
    assert clicks.count <= 9, "who waits, leaves and returns"
    page.wait_for_url("**/spawn-pending/**")
    expect(page.locator("#progress-message")).to_have_text("Waiting for the server to answer")
    look_over(page, "journey-10-pending", accessible=False)
    page.get_by_text("Event log").click()
    expect(page.locator("#progress-log")).to_contain_text("A server without a GPU (free of")
    if HUB_6:
        page.get_by_role("button", name="Stop Server").click()
    else:
        _stop_on_home_page(page, hub, "member4")
    wait_for(lambda: hub.server("member4") is None, "the stop")
    wait_for(lambda: not hub.open_leases("member4"), "the release")
    # In a page of its own: the first one goes on by itself, whenever it hears of the stop.
    other = page.context.new_page()
    other.goto(f"{hub.url}/hub/spawn-pending/member4")
    expect(other.get_by_role("heading", name="Server not running")).to_be_visible()
    look_over(other, "journey-11-stopped", accessible=False)
    assert "member4" not in str(hub.containers())


def _stop_on_home_page(page: Page, hub: GPUHub, user: str) -> None:
    page.goto(f"{hub.url}/hub/home")
    # JupyterHub's page loads its script after itself: a click before that is lost.
    page.wait_for_function("() => window.jQuery?._data(document.querySelector('#stop'), 'events')")
    page.get_by_role("button", name="Stop My Server").click()
    expect(page.get_by_role("button", name="Start My Server")).to_be_visible()
    wait_for(lambda: not hub.open_leases(user), "the release")


def _file(hub: GPUHub, user: str, name: str) -> str:
    """A file of the member's workspace, as their server shows it."""
    answer = hub.get(user, f"api/contents/{name}")
    return str(answer.json()["content"]) if answer.ok else ""


def test_home_says_that_the_credits_ran_out(browser: Browser, hub: GPUHub) -> None:
    context = browser.new_context(viewport=WIDE)
    clicks, page = Clicks(context), context.new_page()
    add_cookies(page, hub, "member7")
    page.goto(f"{hub.url}/hub/spawn")
    start(page, "A server that answers at once", "1")
    page.wait_for_url(re.compile("/user/member7/"))
    body = {"amount": "-49.99", "reason": "used elsewhere"}  # of the 50 that everybody begins with
    path = "accounts/member:member7/grants"
    hub.call(ADMIN, "POST", path, json=body).raise_for_status()

    page.goto(f"{hub.url}/hub/home")
    wait_for(lambda: not hub.open_leases("member7"), "the end of the session", timeout=120)
    page.get_by_role("link", name="Home", exact=True).first.click()
    expect(page.get_by_role("status").first).to_contain_text("Your server was stopped at")
    expect(page.get_by_role("status").first).to_contain_text("the credits ran out")
    look_over(page, "journey-12-ran-out", accessible=False)
    page.get_by_role("link", name="Receipt").click()
    expect(page.get_by_role("heading", name="Charges and refunds")).to_be_visible()
    assert clicks.count <= 6, "from the form to the receipt"
    context.close()
