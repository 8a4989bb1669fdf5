"""From the public catalog into a server. Real: JupyterHub, proxy, local servers, Chromium."""

from __future__ import annotations

import itertools
import json
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests
from playwright.sync_api import Browser, Page, ViewportSize, expect

from tests.support import axe
from tests.support.browser import screenshot
from tests.support.catalog_files import EVIL, FILES
from tests.support.gpu_hub import text_of
from tests.support.hub import NAVIGATION, USER_PASSWORD
from tests.support.paying_hub import PayingHub
from tests.support.processes import wait_for

WIDE = ViewportSize(width=1280, height=900)
PHONE = ViewportSize(width=390, height=844)
SLOW = 120_000
"""Milliseconds for a page or a server, on a machine with other things to do."""


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The catalog, with the files that it names beside it."""
    folder = tmp_path_factory.mktemp("catalog")
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder / "catalog.yaml"


@pytest.fixture(scope="module")
def hub(hubs: None, catalog: Path) -> Iterator[PayingHub]:
    """Three GPUs; an A100 costs 4 credits an hour and a T4 1."""
    config = f"""
c.GPUSpawnerMixin.catalog = {str(catalog)!r}
c.GPUCredits.opening_grant = 100
c.GPURates.by_model = {{"A100": 4, "T4": 1}}
c.JupyterHub.tornado_settings = {{"slow_spawn_timeout": 1}}
"""
    with PayingHub(catalog.parent / "hub", config) as hub:
        yield hub


def words(answer: requests.Response) -> str:
    return text_of(answer.text.partition("<body>")[2])


def get(hub: PayingHub, path: str, **query: str) -> requests.Response:
    """A page as a stranger sees it."""
    url = f"{hub.url}/hub/{path}"
    return requests.get(url, params=query, headers=NAVIGATION, timeout=60)


def open_page(browser: Browser, hub: PayingHub, path: str = "environments", **kind: Any) -> Page:
    page = browser.new_context(**{"viewport": WIDE, **kind}).new_page()
    page.set_default_timeout(SLOW)
    page.goto(f"{hub.url}/hub/{path}")
    return page


def sign_in(page: Page, user: str) -> None:
    page.get_by_label("Username").fill(user)
    page.get_by_label("Password", exact=False).first.fill(USER_PASSWORD)
    page.get_by_role("button", name="Sign in").click()


def keep(page: Page, name: str) -> None:
    """Pictures as on a desk and as on a phone; nothing sticks out, and nothing is hard to use."""
    for size, suffix in ((WIDE, "wide"), (PHONE, "phone")):
        page.set_viewport_size(size)
        screenshot(page, f"catalog-{name}-{suffix}")
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= size["width"], f"{name} is {width} pixels wide on {suffix}"
        assert axe.troubles(page) == []
    page.set_viewport_size(WIDE)


# What anybody sees.


def test_a_stranger_sees_what_is_free_and_what_it_costs(hub: PayingHub) -> None:
    text = words(get(hub, "environments"))
    assert "4 environments" in text and "For the staff" not in text
    assert "PyTorch 2.5.1 CUDA 12.4 up to 2 GPUs" in text
    assert "3 of 3 GPUs free now 1.00 to 4.00 credits a GPU-hour Launch" in text
    assert "1 of 1 GPU free now 1.00 credits a GPU-hour" in text
    assert "no GPU Notes and files. Starts at once free of charge Launch" in text


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"q": "GRADIENTS"}, ["jax"]),
        ({"q": "2.5.1 course"}, ["torch"]),
        ({"gpu": "without"}, ["plain", "evil"]),
        ({"framework": "JAX", "gpu": "with"}, ["jax"]),
        ({"now": "1", "q": "py"}, ["torch", "plain"]),
        ({"q": "nothing like it"}, []),
        ({"q": EVIL * 50, "gpu": "x", "page": "-1"}, []),
        ({"page": "9" * 400}, ["torch", "jax", "plain", "evil"]),
    ],
)
def test_searching_without_javascript(
    hub: PayingHub, query: dict[str, str], found: list[str]
) -> None:
    page = get(hub, "environments", **query)
    assert page.status_code == 200
    assert re.findall(r'spawn\?opt-environment=(\w+)"', page.text) == found
    assert EVIL not in page.text


def test_the_page_of_one(hub: PayingHub) -> None:
    page = get(hub, "environments/torch")
    text = words(page)
    for part in (
        "Open train.ipynb first. one two Docs",
        "Memory 16 GB",
        "Session up to 8 h",
        "Tested on 2026-10-01",
        "2 packages with their versions numpy 2.1.3 torch 2.5.1",
        "What is new PyTorch 2.5.1",
        "A sample notebook Train a model print(40 + 2) 42",
        "Read more The course",
    ):
        assert part in text
    assert f'value="{hub.url}/hub/spawn?opt-environment=torch"' in page.text
    logo = get(hub, "environments/torch/logo")
    assert logo.headers["Content-Type"] == "image/svg+xml"
    assert "sandbox" in logo.headers["Content-Security-Policy"], "its script cannot run"
    assert get(hub, "environments/jax/logo").status_code == 404


def test_what_is_not_there_is_said_in_words(hub: PayingHub) -> None:
    page = get(hub, "environments/nope")
    assert page.status_code == 404
    assert "There is no such page" in words(page)
    assert "There is no environment 'nope' on this hub." in words(page)
    assert get(hub, "environments/staff").status_code == 404
    assert get(hub, "environments/..%2f..%2fetc").status_code == 404
    session = hub.login("hugo")
    closed = session.get(f"{hub.url}/hub/admin", headers=NAVIGATION, timeout=60)
    assert closed.status_code == 403 and "This is not for you" in words(closed)
    assert "scopes" not in words(closed)
    lost = get(hub, "no-such-thing")
    assert lost.status_code == 404 and "There is no such page" in words(lost)


def test_no_member_is_named_and_what_is_free_stays_true(hub: PayingHub) -> None:
    """Somebody has the T4, somebody waits for it: that is all that a stranger learns."""
    first = hub.start_server("carol", gpus=1, gpu_model="T4", hours=2)
    hub.spawn("dave", {"gpus": 1, "gpu_model": "T4", "hours": 1})
    wait_for(lambda: hub.broker.waiting(), "the ticket", timeout=60)

    def now() -> str:
        answer = get(hub, "environments/-/live", slugs="jax,staff,nope").json()
        assert set(answer) == {"jax"}
        return str(answer["jax"]["now"])

    wait_for(lambda: now() == "0 of 1 GPU free now, others wait", "what is free", timeout=60)
    for path in ("environments", "environments/jax", "environments/-/live?slugs=jax"):
        text = get(hub, path).text
        assert "carol" not in text and "dave" not in text
        assert first.id not in text and first.uuids[0] not in text
    assert "jax" not in re.findall(r"opt-environment=(\w+)", get(hub, "environments", now="1").text)
    hub.api("DELETE", "users/dave/server")
    hub.stop_server("carol")
    wait_for(lambda: now() == "1 of 1 GPU free now", "the release", timeout=60)


# Into a server.


def test_browse_launch_sign_in_choose_land(hub: PayingHub, browser: Browser) -> None:
    page = open_page(browser, hub)
    elsewhere: list[str] = []
    errors: list[str] = []
    page.on("request", lambda r: None if r.url.startswith(hub.url) else elsewhere.append(r.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.reload()
    keep(page, "1-environments")
    # It searches as one types.
    page.get_by_label("Search", exact=True).fill("deep")
    expect(page.get_by_role("listitem").filter(has_text="PyTorch")).to_be_visible()
    expect(page.locator("#gs-cards > li:visible")).to_have_count(1)
    page.get_by_role("link", name="PyTorch", exact=True).click()
    expect(page.get_by_role("heading", name="PyTorch", exact=True)).to_be_visible()
    keep(page, "2-environment")
    page.get_by_role("link", name="Launch", exact=True).click()
    # Through the sign-in to the form, with the choice made, and nothing started.
    expect(page.get_by_role("link", name="See the environments first")).to_be_visible()
    keep(page, "3-sign-in")
    sign_in(page, "ada")
    expect(page.locator("#gpuspawner-by-link")).to_contain_text("PyTorch")
    expect(page.locator("#environment-torch")).to_be_checked()
    expect(page.locator("#gpuspawner-price")).to_have_text(
        "1 GPU: 1.00 to 4.00 credits an hour. Your balance lasts 1 d 1 h."
    )
    expect(page.locator("#gpuspawner-wait")).to_have_text("Starts at once.")
    assert hub.server("ada") is None and not hub.broker.open_leases()
    keep(page, "4-form")
    page.get_by_label("GPUs", exact=True).select_option("2")
    page.get_by_label("For how long").select_option("4")
    page.get_by_label("Memory").select_option("64 GB")
    page.get_by_role("button", name="Start").click()
    page.wait_for_url(re.compile("/user/ada/"), timeout=SLOW)
    [lease] = hub.broker.open_leases()
    assert (lease.environment, len(lease.devices), lease.seconds) == ("torch", 2, 4 * 3600)
    expect(page.locator("body")).to_have_text(lease.id)
    page.goto(f"{hub.url}/hub/environments/jax")
    expect(page.get_by_text("Your server runs already")).to_be_visible()
    # Back again: what they chose last time, and the ways to everything else.
    hub.stop_server("ada")
    page.goto(f"{hub.url}/hub/home")
    keep(page, "5-home")
    page.get_by_role("link", name="GPUs and credits").click()
    expect(page.get_by_role("heading", name="My GPUs and credits")).to_be_visible()
    page.goto(f"{hub.url}/hub/spawn")
    expect(page.get_by_label("GPUs", exact=True)).to_have_value("2")
    expect(page.get_by_label("For how long")).to_have_value("4")
    expect(page.get_by_label("Memory")).to_have_value("torch.room=more")
    page.locator("#environment-jax").check()
    expect(page.get_by_label("Memory")).to_be_hidden()
    page.goto(f"{hub.url}/hub/environments/nope")
    keep(page, "6-not-there")
    assert elsewhere == [] and errors == []
    page.context.close()


def test_in_the_dark(hub: PayingHub, browser: Browser) -> None:
    page = open_page(browser, hub, color_scheme="dark")
    screenshot(page, "catalog-8-dark")
    assert axe.troubles(page) == []
    page.goto(f"{hub.url}/hub/environments/torch")
    assert axe.troubles(page) == []
    page.context.close()


def test_without_javascript(hub: PayingHub, browser: Browser) -> None:
    page = open_page(browser, hub, java_script_enabled=False)
    page.get_by_label("GPU", exact=True).select_option("without")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("#gs-cards > li")).to_have_count(2)
    expect(page.get_by_text("requires JavaScript")).to_be_hidden()
    page.get_by_role("link", name="Launch JupyterLab").click()
    sign_in(page, "bert")
    expect(page.locator("#environment-plain")).to_be_checked()
    screenshot(page, "catalog-7-form-without-javascript")
    page.get_by_role("button", name="Start").click()
    page.wait_for_url(re.compile("/user/bert/"), timeout=SLOW)
    [lease] = hub.broker.open_leases()
    assert (lease.environment, lease.devices) == ("plain", ())
    hub.stop_server("bert")
    page.context.close()


def test_by_keyboard_alone(hub: PayingHub, browser: Browser) -> None:
    page = open_page(browser, hub, "spawn?opt-environment=plain")
    page.keyboard.type("cleo")  # the field has the focus
    page.keyboard.press("Tab")
    page.keyboard.type(USER_PASSWORD)
    page.keyboard.press("Enter")
    expect(page.locator("#environment-plain")).to_be_checked()
    page.locator("#environment-plain").focus()
    page.keyboard.press("ArrowUp")
    expect(page.locator("#environment-jax")).to_be_checked()
    expect(page.locator("#gpuspawner-price")).to_contain_text("1.00 credits an hour")
    page.keyboard.press("Tab")
    expect(page.locator("#gpus")).to_be_focused()
    page.keyboard.press("End")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Home")
    expect(page.locator("#gpus")).to_have_value("")
    for _ in range(6):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.type") == "submit":
            break
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("/user/cleo/"), timeout=SLOW)
    [lease] = hub.broker.open_leases()
    assert (lease.environment, len(lease.devices)) == ("jax", 1)
    hub.stop_server("cleo")
    page.context.close()


def test_nothing_that_an_admin_pastes_runs(hub: PayingHub, browser: Browser) -> None:
    page = open_page(browser, hub, "environments/evil")
    expect(page.get_by_role("heading", level=1)).to_contain_text(EVIL)
    assert page.locator("main script, main img, main a[href^=javascript]").count() == 0
    assert page.title() != "ran"
    page.goto(f"{hub.url}/hub/environments?q=evil")
    expect(page.get_by_role("listitem").filter(has_text="Evil")).to_contain_text(EVIL)
    assert page.title() != "ran"
    page.goto(f"{hub.url}/hub/spawn?opt-environment=evil")
    sign_in(page, "dora")
    expect(page.locator("label[for=environment-evil]")).to_contain_text(EVIL)
    page.locator("#environment-torch").check()
    page.locator("#environment-evil").check()
    assert page.title() != "ran"
    page.context.close()


# Requests that no browser of ours sends.

OURS = ("environments", "environments/torch", "environments/torch/logo", "environments/-/live")
MORE = ("welcome", "welcome/first", "api/gpuspawner/leases/0/now", "api/gpuspawner/leases/0/end")


def test_our_pages_answer_whatever_is_forged(hub: PayingHub) -> None:
    signed_in = hub.login("frida").cookies
    session = signed_in.get("jupyterhub-hub-login", path="/hub/")
    for path in (*OURS, *MORE):
        url = f"{hub.url}/hub/{path}"
        for xsrf, sent in itertools.product((None, "wrong", '"'), ({}, {"_xsrf": "x"}, b"%ff=%")):
            cookies = {"jupyterhub-hub-login": session, "_xsrf": xsrf}
            cookie = "; ".join(f"{name}={value}" for name, value in cookies.items() if value)
            answer = requests.post(url, data=sent, headers={"Cookie": cookie}, timeout=60)
            assert answer.status_code in (403, 404, 405), (path, xsrf, sent, answer.status_code)
            got = requests.get(url, headers={"Cookie": cookie}, timeout=60)
            assert got.status_code < 500, (path, xsrf, got.status_code)


@pytest.mark.parametrize("path", [*OURS, *MORE])
def test_our_pages_take_no_large_body(hub: PayingHub, path: str) -> None:
    """The connection ends before the body was read, of which the Hub keeps nothing."""
    head = f"POST /hub/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: 99000000\r\n\r\n"
    with socket.create_connection((hub.hub_ip, hub.hub_port), timeout=60) as connection:
        with suppress(ConnectionError):
            connection.sendall(head.encode() + b"x" * 1024 * 1024)
        with suppress(ConnectionError):
            while connection.recv(65536):
                pass


# Links.


def test_a_link_starts_nothing_whatever_it_says(hub: PayingHub) -> None:
    session = hub.login("emil")

    def follow(query: str) -> requests.Response:
        url = f"{hub.url}/hub/spawn?{query}"
        return session.get(url, headers=NAVIGATION, timeout=60)

    for query in (
        "opt-environment=torch&opt-gpus=2&opt-hours=3&opt-gpu_model=A100",
        "environment=torch&gpus=2",  # as JupyterHub once wrote it
        "_xsrf=x",
        "opt-gpus=1&fbclid=x",
        "opt-wait=no",
    ):
        page = follow(query)
        assert page.status_code == 200 and "spawn_form" in page.text, query
        assert "/hub/spawn?" in page.url, "it is still the form"
    assert hub.server("emil") is None
    page = follow("opt-environment=torch&opt-gpus=2&opt-hours=3&opt-account=member:emil")
    assert re.search(r'value="torch"\s+checked', page.text)
    assert '<option value="2" selected>' in page.text
    assert re.search(r'<option value="3" selected>', page.text)
    for query, status, part in (
        ("opt-environment=nope", 400, "There is no environment &#39;nope&#39;"),
        ("opt-environment=staff", 403, "kept for certain groups"),
        ("opt-gpus=2&opt-environment=plain", 400, "runs without one"),
        ("opt-gpus=2&opt-environment=jax", 400, "allows 1"),
        ("opt-hours=100&opt-environment=torch", 400, "allows 8"),
        ("opt-image=evil", 400, "&#39;image&#39;"),
        ("opt-environment=%ff", 400, "There is no environment"),
        ("opt-account=group:staff", 403, "group:staff"),
    ):
        page = follow(query)
        assert (page.status_code, part in page.text) == (status, True), page.text
    assert hub.server("emil") is None and not hub.broker.open_leases()
    plain = follow("")
    assert "gpuspawner-by-link" not in plain.text


def test_ten_thousand_environments(hub: PayingHub, catalog: Path) -> None:
    """Edited in while the hub runs; the pages and the form show some, and lead to all."""
    many = [{"slug": f"e{n}", "display_name": f"Number {n}", "image": "x"} for n in range(10_000)]
    before = catalog.read_text(encoding="utf-8")
    session = hub.login("gerd")
    catalog.write_text(json.dumps({"environments": many}), encoding="utf-8")
    try:
        wait_for(
            lambda: "10000 environments" in get(hub, "environments").text, "the edit", timeout=90
        )
        assert "Page 167 of 167" in words(get(hub, "environments", page="999"))
        found = words(get(hub, "environments", q="number 9999"))
        assert "1 of 10000 environments" in found and "Number 9999" in found
        url = f"{hub.url}/hub/spawn?opt-environment=e9999"
        form = session.get(url, headers=NAVIGATION, timeout=60)
        assert form.status_code == 200, words(form)
        assert len(form.content) < 300_000
        assert re.search(r'value="e9999"\s+checked', form.text)
        assert "9939 more are" in words(form)
    finally:
        catalog.write_text(before, encoding="utf-8")
    wait_for(lambda: "4 environments" in get(hub, "environments").text, "the edit", timeout=30)


def test_who_may_sees_what_is_for_their_group(hub: PayingHub) -> None:
    hub.api("POST", "groups/staff").raise_for_status()
    hub.api("POST", "users/fritz").raise_for_status()
    hub.api("POST", "groups/staff/users", json={"users": ["fritz"]}).raise_for_status()
    session = hub.login("fritz")
    page = session.get(f"{hub.url}/hub/environments", headers=NAVIGATION, timeout=60)
    assert "5 environments" in words(page) and "For the staff" in words(page)
    one = session.get(f"{hub.url}/hub/environments/staff", headers=NAVIGATION, timeout=60)
    assert one.status_code == 200 and "Launch" in words(one)
