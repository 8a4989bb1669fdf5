"""From the public catalog into a server, and a catalog that changes under a running hub. Real:
JupyterHub, proxy, service, SQLite, the command line, local servers, Chromium."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import requests
from playwright.sync_api import Browser, Page, expect

from gpuspawner.cli.app import main
from gpuspawner.core.units import MICRO
from gpuspawner.ledger.rules import owed
from gpuspawner.notifications.models import NoticeKind
from tests.support.browser import screenshot
from tests.support.catalog_files import CATALOG, EVIL, FILES
from tests.support.gpu_hub import assert_in_words, message_of
from tests.support.hub import ADMIN, NAVIGATION, USER_PASSWORD
from tests.support.page_text import text_of
from tests.support.pages import WIDE, add_cookies, look_over, look_over_in_the_dark, send_sign_in
from tests.support.paying_hub import PayingHub
from tests.support.processes import environment_of, wait_for
from tests.support.tickets import fill, line_up

SOON = 60.0

CONFIG = """
c.GPUSpawnerMixin.catalog = {file!r}
c.GPUCredits.opening_grant = 100
c.GPURates.by_model = {{"A100": 4, "T4": 1}}
c.GPURates.special = [
    {{"environment": "course", "model": "A100", "rate": 2}},
    {{"environment": "course", "model": "T4", "rate": "0.5"}},
]
c.JupyterHub.tornado_settings = {{"slow_spawn_timeout": 1}}
"""


class CatalogHub(PayingHub):
    """A hub and its catalog's file, with the files that the catalog names beside it."""

    def __init__(self, folder: Path) -> None:
        for name, text in FILES.items():
            (folder / name).write_text(text, encoding="utf-8")
        self.file = folder / "catalog.yaml"
        super().__init__(folder / "hub", CONFIG.format(file=str(self.file)))

    def write(self, text: str) -> None:
        """Save the catalog as an editor does."""
        new = self.file.with_suffix(".new")
        new.write_text(dedent(text), encoding="utf-8")
        new.replace(self.file)

    def form(self, user: str) -> str:
        """The spawn form as this member sees it."""
        answer = self.open_page(user, f"/hub/spawn/{user}")
        assert answer.status_code == 200, answer.text
        return answer.text


@pytest.fixture(scope="module")
def hub(hubs: None, folder: Path) -> Iterator[CatalogHub]:
    """Three GPUs; an A100 costs 4 credits an hour and a T4 1."""
    with CatalogHub(folder) as hub:
        yield hub


def words(answer: requests.Response) -> str:
    return text_of(answer.text.partition("<body>")[2])


def get(hub: PayingHub, path: str, **query: str) -> requests.Response:
    """A page as a stranger sees it."""
    url = f"{hub.url}/hub/{path}"
    return requests.get(url, params=query, headers=NAVIGATION, timeout=60)


def open_page(browser: Browser, hub: PayingHub, path: str = "environments", **kind: Any) -> Page:
    page = browser.new_context(**{"viewport": WIDE, **kind}).new_page()
    page.goto(f"{hub.url}/hub/{path}")
    return page


# What anybody sees.


def test_public_catalog_shows_free_devices_and_rates(hub: PayingHub) -> None:
    text = words(get(hub, "environments"))
    assert "4 environments" in text and "For the staff" not in text
    assert "PyTorch 2.5.1 CUDA 12.4 1 to 2 GPUs" in text
    assert "3 of 3 GPUs free now 1.00 to 4.00 credits a GPU-hour Launch" in text
    assert "1 of 1 GPU free now 1.00 credits a GPU-hour" in text
    assert "no GPU Notes and files. Available now free of charge Launch" in text
    schema = requests.get(f"{hub.url}/services/gpu/catalog.schema.json", timeout=SOON)
    assert schema.json()["title"] == "gpuspawner's catalog of environments"


def test_catalog_search_works_without_javascript(hub: PayingHub) -> None:
    query: dict[str, str]
    for query, found in (
        ({"framework": "JAX", "gpu": "with", "now": "1", "q": "GRADIENTS"}, ["jax"]),
        ({"gpu": "without"}, ["plain", "evil"]),
        ({"q": EVIL * 50, "gpu": "x", "page": "-1"}, []),
        ({"page": "9" * 400}, ["torch", "jax", "plain", "evil"]),
    ):
        page = get(hub, "environments", **query)
        assert page.status_code == 200
        assert re.findall(r'spawn\?opt-environment=(\w+)"', page.text) == found
        assert EVIL not in page.text


def test_environment_page_shows_its_details(hub: PayingHub) -> None:
    page = get(hub, "environments/torch")
    text = words(page)
    for part in (
        "Open train.ipynb first. one two Docs",
        "GPUs 1 to 2, or none",
        "CPU cores not limited",
        "Memory 16 GB",
        "Session up to 8 h",
        "Image torch:2.5",
        "A100-80GB 2 of 2 4.00 T4, 16 GB 1 of 1 1.00",
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


def test_missing_and_closed_pages_explain_themselves(hub: PayingHub) -> None:
    page = get(hub, "environments/nope")
    assert page.status_code == 404
    assert "There is no such page" in words(page)
    assert "There is no environment 'nope' on this hub." in words(page)
    assert get(hub, "environments/staff").status_code == 404
    assert get(hub, "environments/..%2f..%2fetc").status_code == 404
    session = hub.login("hugo")
    closed = session.get(f"{hub.url}/hub/admin", headers=NAVIGATION, timeout=60)
    assert closed.status_code == 403 and "You do not have access" in words(closed)
    assert "scopes" not in words(closed)
    lost = get(hub, "no-such-thing")
    assert lost.status_code == 404 and "There is no such page" in words(lost)


def test_public_catalog_is_current_and_names_no_member(hub: PayingHub) -> None:
    """Somebody has the T4, somebody waits for it: that is all that a stranger learns."""
    first = hub.start_server("carol", gpus=1, gpu_model="T4", hours=2)
    hub.spawn("dave", {"gpus": 1, "gpu_model": "T4", "hours": 1})
    wait_for(lambda: hub.services.queue.waiting(), "the ticket", timeout=60)

    def now() -> str:
        answer = get(hub, "environments/-/live", slugs="jax,staff,nope").json()
        assert set(answer) == {"jax"}
        return str(answer["jax"]["now"])

    wait_for(lambda: now().startswith("0 of 1 GPU free now, start "), "what is free", timeout=60)
    for path in ("environments", "environments/jax", "environments/-/live?slugs=jax"):
        text = get(hub, path).text
        assert "carol" not in text and "dave" not in text
        assert first.id not in text and first.uuids[0] not in text
    assert "jax" not in re.findall(r"opt-environment=(\w+)", get(hub, "environments", now="1").text)
    hub.api("DELETE", "users/dave/server")
    hub.stop_server("carol")
    wait_for(lambda: now() == "1 of 1 GPU free now", "the release", timeout=60)


# Into a server.


def test_visitor_launches_a_server_from_the_catalog(hub: PayingHub, browser: Browser) -> None:
    page = open_page(browser, hub)
    elsewhere: list[str] = []
    errors: list[str] = []
    page.on("request", lambda r: None if r.url.startswith(hub.url) else elsewhere.append(r.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.reload()
    # It searches as one types.
    page.get_by_label("Search", exact=True).fill("deep")
    expect(page.get_by_role("listitem").filter(has_text="PyTorch")).to_be_visible()
    expect(page.locator("#gs-cards > li:visible")).to_have_count(1)
    page.get_by_role("link", name="PyTorch", exact=True).click()
    expect(page.get_by_role("heading", name="PyTorch", exact=True)).to_be_visible()
    page.get_by_role("link", name="Launch", exact=True).click()
    # Through the sign-in to the form, with the choice made, and nothing started.
    expect(page.get_by_role("link", name="Browse environments first")).to_be_visible()
    send_sign_in(page, "ada")
    expect(page.locator("#gpuspawner-by-link")).to_contain_text("PyTorch")
    expect(page.locator("#environment-torch")).to_be_checked()
    summary = page.locator("#gpuspawner-summary")
    expect(summary).to_contain_text("1 GPU")
    expect(summary).to_contain_text("Starts now.")
    assert hub.server("ada") is None and not hub.services.leases.open_leases()
    page.get_by_label("GPUs", exact=True).select_option("2")
    page.get_by_label("Time limit").select_option("4")
    page.get_by_label("Memory", exact=True).select_option("64 GB")
    page.get_by_role("button", name="Start").click()
    page.wait_for_url(re.compile("/user/ada/"))
    [lease] = hub.services.leases.open_leases()
    assert (lease.environment, len(lease.devices), lease.seconds) == ("torch", 2, 4 * 3600)
    expect(page.locator("body")).to_have_text(lease.id)
    page.goto(f"{hub.url}/hub/environments/jax")
    expect(page.get_by_text("Your server is already running")).to_be_visible()
    # Back again: what they chose last time, and the ways to everything else.
    hub.stop_server("ada")
    page.goto(f"{hub.url}/hub/home")
    page.get_by_role("link", name="Sessions").click()
    expect(page.get_by_role("heading", name="Sessions", exact=True)).to_be_visible()
    page.goto(f"{hub.url}/hub/spawn")
    expect(page.get_by_label("GPUs", exact=True)).to_have_value("2")
    expect(page.get_by_label("Time limit")).to_have_value("4")
    expect(page.get_by_label("Memory", exact=True)).to_have_value("torch.room=more")
    page.locator("#environment-jax").check()
    expect(page.get_by_label("Memory", exact=True)).to_be_hidden()
    assert elsewhere == [] and errors == []
    page.context.close()


def test_stranger_on_a_phone_has_the_menu_and_copies_a_link(
    hub: PayingHub, browser: Browser
) -> None:
    page = open_page(browser, hub, "environments/torch", viewport={"width": 390, "height": 844})
    expect(page.get_by_role("button", name="Sign in")).to_be_hidden()
    page.get_by_role("button", name="Toggle navigation").click()
    expect(page.get_by_role("button", name="Sign in")).to_be_visible()
    expect(page.get_by_role("link", name="Environments", exact=True)).to_be_visible()
    expect(page.get_by_text("Login")).to_have_count(0)
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    page.context.close()


def test_launch_works_without_javascript(hub: PayingHub, browser: Browser) -> None:
    page = open_page(browser, hub, java_script_enabled=False)
    page.get_by_label("GPU", exact=True).select_option("without")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("#gs-cards > li")).to_have_count(2)
    expect(page.get_by_text("requires JavaScript")).to_be_hidden()
    page.get_by_role("link", name="Launch JupyterLab").click()
    send_sign_in(page, "bert")
    expect(page.locator("#environment-plain")).to_be_checked()
    screenshot(page, "catalog-7-form-without-javascript")
    page.get_by_role("button", name="Start").click()
    page.wait_for_url(re.compile("/user/bert/"))
    [lease] = hub.services.leases.open_leases()
    assert (lease.environment, lease.devices) == ("plain", ())
    hub.stop_server("bert")
    page.context.close()


def test_launch_works_with_the_keyboard_alone(hub: PayingHub, browser: Browser) -> None:
    page = open_page(browser, hub, "spawn?opt-environment=plain")
    page.keyboard.type("cleo")  # the field has the focus
    page.keyboard.press("Tab")
    page.keyboard.type(USER_PASSWORD)
    page.keyboard.press("Enter")
    expect(page.locator("#environment-plain")).to_be_checked()
    page.locator("#environment-plain").focus()
    page.keyboard.press("ArrowUp")
    expect(page.locator("#environment-jax")).to_be_checked()
    expect(page.locator("#gpuspawner-summary")).to_contain_text("T4")
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
    page.wait_for_url(re.compile("/user/cleo/"))
    [lease] = hub.services.leases.open_leases()
    assert (lease.environment, len(lease.devices)) == ("jax", 1)
    hub.stop_server("cleo")
    page.context.close()


def test_catalog_markup_is_never_executed(hub: PayingHub, browser: Browser) -> None:
    page = open_page(browser, hub, "environments/evil")
    expect(page.get_by_role("heading", level=1)).to_contain_text(EVIL)
    assert page.locator("main script, main img, main a[href^=javascript]").count() == 0
    shown = page.locator("main").text_content() or ""
    assert shown.count("<script>") > 7, "it is shown, as words"
    assert page.title() != "ran"
    page.goto(f"{hub.url}/hub/environments?q=evil")
    expect(page.get_by_role("listitem").filter(has_text="Evil")).to_contain_text(EVIL)
    assert page.title() != "ran"
    add_cookies(page, hub, "dora")
    page.goto(f"{hub.url}/hub/spawn?opt-environment=evil")
    expect(page.locator("label[for=environment-evil]")).to_contain_text(EVIL)
    page.locator("#environment-torch").check()
    page.locator("#environment-evil").check()
    assert page.locator("form img[src=x]").count() == 0
    assert page.title() != "ran"
    page.context.close()


# Requests that no browser of ours sends.

OURS = ("environments", "environments/torch", "environments/torch/logo", "environments/-/live")
MORE = ("welcome", "welcome/first", "api/gpuspawner/leases/0/now", "api/gpuspawner/leases/0/end")


def test_forged_requests_to_pages_are_rejected(hub: PayingHub) -> None:
    signed_in = hub.login("frida").cookies
    session = signed_in.get("jupyterhub-hub-login", path="/hub/")
    for path in (*OURS, *MORE):
        url = f"{hub.url}/hub/{path}"
        for xsrf, sent in ((None, {}), ("wrong", {"_xsrf": "x"}), ('"', b"%ff=%")):
            cookies = {"jupyterhub-hub-login": session, "_xsrf": xsrf}
            cookie = "; ".join(f"{name}={value}" for name, value in cookies.items() if value)
            answer = requests.post(url, data=sent, headers={"Cookie": cookie}, timeout=60)
            assert answer.status_code in (403, 404, 405), (path, xsrf, sent, answer.status_code)
            got = requests.get(url, headers={"Cookie": cookie}, timeout=60)
            assert got.status_code < 500, (path, xsrf, got.status_code)


@pytest.mark.parametrize("path", [*OURS, *MORE])
def test_oversized_request_body_closes_connection(hub: PayingHub, path: str) -> None:
    """The connection ends before the body was read, of which the Hub keeps nothing."""
    head = f"POST /hub/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: 99000000\r\n\r\n"
    with socket.create_connection((hub.hub_ip, hub.hub_port), timeout=60) as connection:
        with suppress(ConnectionError):
            connection.sendall(head.encode() + b"x" * 1024 * 1024)
        with suppress(ConnectionError):
            while connection.recv(65536):
                pass


# Links.


def test_launch_link_never_starts_a_server(hub: PayingHub) -> None:
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
    assert re.search(r'<option value="3" data-length="3 h" selected>', page.text)
    for query, status, part in (
        ("opt-environment=nope", 400, "There is no environment &#39;nope&#39;"),
        ("opt-environment=staff", 403, "reserved for some groups"),
        ("opt-gpus=2&opt-environment=plain", 400, "runs without one"),
        ("opt-gpus=2&opt-environment=jax", 400, "allows 1"),
        ("opt-hours=100&opt-environment=torch", 400, "allows 8"),
        ("opt-image=evil", 400, "&#39;image&#39;"),
        ("opt-environment=%ff", 400, "There is no environment"),
        ("opt-account=group:staff", 403, "group:staff"),
    ):
        page = follow(query)
        assert (page.status_code, part in page.text) == (status, True), page.text
    assert hub.server("emil") is None and not hub.services.leases.open_leases()
    plain = follow("")
    assert "gpuspawner-by-link" not in plain.text


def test_catalog_handles_thousands_of_environments(hub: CatalogHub) -> None:
    """Edited in while the hub runs; the pages and the form show some, and lead to all."""
    many = [{"slug": f"e{n}", "display_name": f"Number {n}", "image": "x"} for n in range(2_000)]
    hub.form("gerd")
    hub.write(json.dumps({"environments": many}))
    try:
        hub.form("gerd")  # it is read beside: nobody waits for a file of this size
        wait_for(
            lambda: "2000 environments" in get(hub, "environments").text, "the edit", timeout=90
        )
        assert "Page 34 of 34" in words(get(hub, "environments", page="999"))
        found = words(get(hub, "environments", q="number 1999"))
        assert "1 of 2000 environments" in found and "Number 1999" in found
        url = f"{hub.url}/hub/spawn?opt-environment=e1999"
        form = hub.browser_of("gerd").get(url, headers=NAVIGATION, timeout=60)
        assert form.status_code == 200, words(form)
        assert len(form.content) < 300_000
        assert re.search(r'value="e1999"\s+checked', form.text)
        assert "1939 more are" in words(form)
        hub.spawn_and_wait("kim", {"environment": "e1999", "gpus": 0})
        hub.stop_server("kim")
        wrong = message(hub.spawn("lea", {"environment": "nothing-like-it"}))
        assert wrong.endswith("more.") and len(wrong) < 500
        assert "Did you mean 'e1999'" in message(hub.spawn("lea", {"environment": "e19999"}))
    finally:
        hub.write(CATALOG)
    wait_for(lambda: "4 environments" in get(hub, "environments").text, "the edit", timeout=30)


def message(answer: requests.Response) -> str:
    """The sentence of a refusal."""
    assert 400 <= answer.status_code < 500, answer.text
    said = message_of(answer)
    assert_in_words(said)
    return said


def test_group_member_sees_group_environments(hub: PayingHub) -> None:
    hub.api("POST", "groups/staff").raise_for_status()
    hub.api("POST", "users/fritz").raise_for_status()
    hub.api("POST", "groups/staff/users", json={"users": ["fritz"]}).raise_for_status()
    session = hub.login("fritz")
    page = session.get(f"{hub.url}/hub/environments", headers=NAVIGATION, timeout=60)
    assert "5 environments" in words(page) and "For the staff" in words(page)
    one = session.get(f"{hub.url}/hub/environments/staff", headers=NAVIGATION, timeout=60)
    assert one.status_code == 200 and "Launch" in words(one)


# Edits under a running hub.


EDITED = """
    environments:
      - slug: one
        display_name: Number one
        image: none
        default: true
        environment: {SIZE: usual, KEPT: yes it is}
        profile_options:
          size:
            choices:
              usual: {default: true}
              large: {environment: {SIZE: large}}
      - {slug: two, display_name: Number two, image: none}
      - {slug: needy, image: none, cpu_variant: false}
"""


@pytest.fixture
def edited(hub: CatalogHub) -> Iterator[CatalogHub]:
    """The hub with a catalog that the test edits further; afterwards all is as it was."""
    hub.write(EDITED)
    yield hub
    for ticket in hub.services.queue.waiting():
        hub.stop_server(ticket.server.user)
    for lease in hub.services.leases.open_leases():
        hub.stop_server(lease.server.user)
    hub.write(CATALOG)
    wait_for(lambda: "4 environments" in get(hub, "environments").text, "the edit", timeout=30)


def test_broken_catalog_edit_is_shown_only_to_admins(edited: CatalogHub) -> None:
    assert "Number two" in edited.form("ada")
    edited.write(EDITED.replace("Number two", "Second to none"))
    assert "Second to none" in edited.form("ada")  # without a restart
    edited.write(EDITED + "      - {slug: new, image: none, colour: red}\n")
    told = f"{edited.file}, line 15: environment &#39;new&#39; has an unknown key &#39;colour&#39;"
    shown = edited.form(ADMIN)
    assert told in shown
    assert "Only admins see this" in shown
    member = edited.form("ada")
    assert "Second to none" in member
    assert "colour" not in member and str(edited.file) not in member
    assert edited.start_server("ada", environment="two", gpus=0).environment == "two"
    logged = "The catalog is invalid; the last valid one stays. "
    assert edited.log_text().count(logged + told.replace("&#39;", "'")) == 1
    edited.write(EDITED)
    assert "Only admins see this" not in edited.form(ADMIN)


def test_edits_apply_to_waiting_tickets_and_new_starts(edited: CatalogHub) -> None:
    tickets = edited.services.queue
    fill(edited, "bob", "cleo", "dan")
    (ticket,) = line_up(edited, "ned", environment="two")
    needs = "slug: two, min_driver: '550.54', min_cuda: '12.4'"
    edited.write(EDITED.replace("slug: two", needs).replace("Number two", "Second to none"))
    assert "Second to none" in edited.form("ada")
    edited.stop_server("bob")
    edited.wait_server("ned")
    assert tickets.ticket(ticket.id).outcome == "granted"

    (ticket,) = line_up(edited, "eve", environment="two")
    edited.write(EDITED.replace("slug: two", "slug: too"))
    wait_for(lambda: tickets.ticket(ticket.id).outcome, "the end of the wait", timeout=SOON)
    ended = tickets.ticket(ticket.id)
    why = "There is no environment 'two' on this hub. Did you mean 'too'?"
    assert (ended.outcome, ended.end_reason) == ("refused", why)
    assert edited.lease_of("eve") is None
    (notice,) = edited.services.notifications.notices_of("eve")
    assert notice.kind is NoticeKind.TICKET_ENDED and why.rstrip("?") in notice.body

    edited.write(EDITED.replace("slug: two", "slug: 'off'"))
    edited.stop_server("ned")
    again = edited.api("POST", "users/ned/server")  # with what was chosen last time
    assert message(again).startswith("There is no environment 'two' on this hub. Choose one of:")
    assert 'value="one"' in edited.form("ned")


def test_environment_options_reach_the_server(edited: CatalogHub) -> None:
    """By REST, by a link and by the form. What an environment does not offer is refused."""

    def variables(user: str) -> dict[str, str]:
        seen = map(environment_of, edited.children_left())
        return next(each for each in seen if each.get("JUPYTERHUB_USER") == user)

    edited.start_server("hal", environment="one", gpus=0, options=["one.size=large", "two.x=y"])
    assert (variables("hal")["SIZE"], variables("hal")["KEPT"]) == ("large", "yes it is")
    assert 'value="one.size=large"' in edited.form("kay")
    chosen = {"environment": "one", "gpus": "0", "options": ["one.size=large"]}
    edited.post_form(edited.browser_of("kay"), "/hub/spawn/kay", chosen)
    edited.wait_server("kay")
    assert variables("kay")["SIZE"] == "large"
    for environment, options, said in (
        (
            "one",
            {"size": "huge"},
            "Number one has no 'huge' for 'size'. Choose one of: usual, large.",
        ),
        ("two", {"size": "large"}, "Number two has no option 'size'. It has none."),
        ("one", {"size": "../x"}, "must hold texts such as 'memory=large'"),
    ):
        wrong = edited.spawn("ida", {"environment": environment, "options": options})
        assert said in message(wrong)
    refused = edited.spawn("ida", {"environment": "needy", "gpus": 0})
    assert message(refused) == "needy does not run without a GPU. Ask for 1 or more."


# The price on the form is the price paid.


PRICED = """
    environments:
      - slug: torch
        display_name: PyTorch
        image: x
        default: true
        devices: {default: 1, max: 2}
      - {slug: course, display_name: Course, image: x, devices: {default: 1, max: 1}}
      - {slug: plain, display_name: No GPU, image: x, devices: {max: 0}}
"""


@pytest.fixture
def priced(edited: CatalogHub) -> CatalogHub:
    """The hub with an environment, the course, in which GPUs cost half."""
    edited.write(PRICED)
    return edited


def test_price_shown_is_the_price_paid(priced: CatalogHub, browser: Browser) -> None:
    hub, page = priced, browser.new_context(viewport=WIDE).new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    add_cookies(page, hub, "pia")
    page.goto(f"{hub.url}/hub/spawn")
    summary, start = page.locator("#gpuspawner-summary"), page.locator("[type=submit]")
    page.check("#environment-torch")
    page.select_option("#gpus", "2")
    page.select_option("#hours", "8")
    expect(summary).to_have_text("2 x A100-80GB, 8 h, 64.00 credits. Starts now.")
    expect(page.locator("#hours option[value='24']")).to_have_text("1 d, 192.00 credits")
    page.select_option("#hours", "24")
    expect(summary).to_contain_text("Credits end first: after about 12 h 30 min.")
    # What cannot be had is refused beside the field, and cannot be sent.
    page.select_option("#gpu_model", "T4")
    expect(page.get_by_role("alert").filter(has_text="This hub has 1 T4.")).to_be_visible()
    expect(start).to_be_disabled()
    expect(start).to_be_in_viewport()
    look_over(page, "form-refused")
    look_over_in_the_dark(page, "form-refused")
    # The fields follow the environment.
    page.check("#environment-course")
    expect(page.locator("#gpus option[value='2']")).to_be_disabled()
    expect(page.locator("#gpus")).to_have_value("")
    expect(summary).to_have_text("T4, 1 d, 12.00 credits. Starts now.")
    expect(start).to_be_enabled()
    page.select_option("#gpu_model", "")
    page.select_option("#gpu_model", "A100-80GB")
    page.select_option("#hours", "")
    expect(summary).to_have_text(
        "A100-80GB, until you stop it, 2.00 credits an hour. Starts now. "
        "Credits last about 2 d 2 h."
    )
    look_over(page, "form-prices")
    page.check("#environment-plain")
    expect(summary).to_have_text("Without a GPU: free of charge. Starts now.")
    for name in ("#gpus", "#gpu_model", "#hours", "#wait"):
        expect(page.locator(name)).to_be_hidden()
    page.check("#environment-course")
    page.click("[type=submit]")
    page.wait_for_url(re.compile("/user/pia/"))
    assert errors == []
    lease = hub.lease_of("pia")
    assert lease and lease.rate == 2 * MICRO

    # An admin's change is for new servers: on the form at once, and not for who runs.
    url = ["--database", hub.database_url]
    assert main(["rates", "set", "A100", "3", "--environment", "course", *url]) == 0
    text = text_of(hub.form("quin"))
    assert "A100-80GB in PyTorch 2 of 2 4.00" not in text, "one is taken"
    assert re.search(r"A100-80GB in Course 1 of 2 3\.00 1 d 9 h", text), text
    theirs = hub.start_server("quin", environment="course", gpus=1, gpu_model="A100")
    assert theirs.rate == 3 * MICRO
    for mine, rate in ((lease, 2), (theirs, 3)):
        hub.stop_server(mine.server.user)
        settled = hub.wait_end(mine)
        assert settled.ended_at
        assert settled.charged == owed(rate * MICRO, settled.started_at, settled.ended_at)


def test_empty_balance_disables_start_for_gpus_only(priced: CatalogHub, browser: Browser) -> None:
    hub, page = priced, browser.new_context(viewport=WIDE).new_page()
    add_cookies(page, hub, "tom")
    page.goto(f"{hub.url}/hub/spawn")  # opens the account
    ledger = hub.services.ledger
    opening = ledger.statement("member:tom")[0].transfer
    ledger.reverse(opening, actor="kim", reason="A new term")
    page.reload()
    start, why = page.locator("[type=submit]"), page.get_by_role("alert")
    said = "Your balance of 0.00 credits does not pay for the start."
    expect(why.filter(has_text=said)).to_be_visible()
    expect(start).to_be_disabled()
    page.select_option("#gpus", "0")
    expect(why.filter(has_text=said)).to_be_hidden()
    page.click("[type=submit]")
    page.wait_for_url(re.compile("/user/tom/"))


def test_only_a_choice_that_started_comes_back(priced: CatalogHub) -> None:
    """Not a refused one, and not through a link."""
    hub = priced
    hub.start_server("uma", environment="torch", gpus=1, gpu_model="T4")
    choice = {"environment": "torch", "gpus": 1, "hours": 8, "wait": False}
    refused = hub.spawn("vera", {**choice, "gpu_model": "T4"})
    said = hub.failure("vera") if refused.status_code == 202 else message_of(refused)
    assert "in use" in said
    fresh = '<option value="T4" >', '<option value="1" >', 'name="wait" value="no" >'
    linked = hub.open_page("vera", "/hub/spawn", **{"opt-environment": "torch"}).text
    for form in (hub.form("vera"), linked):
        assert all(field in form for field in fresh)

    hub.start_server("vera", **choice, gpu_model="A100-80GB")
    hub.stop_server("vera")
    form = hub.form("vera")
    assert '<option value="A100-80GB" selected>' in form and 'value="no" checked>' in form
    linked = hub.open_page("vera", "/hub/spawn", **{"opt-environment": "torch"}).text
    assert 'name="wait" value="no" >' in linked, "a link says itself whether to wait"
