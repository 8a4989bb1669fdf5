"""Sessions that end. Real here: JupyterHub, proxy, accounting service, SQLite, kill -9, Chromium;
members' servers are quick local processes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import requests
from playwright.sync_api import Browser

from gpuspawner.ledger.rules import owed
from gpuspawner.model import Lease, LeaseState, NoticeKind, ServerRef, Ticket
from tests.support.browser import screenshot
from tests.support.hub import ADMIN, NAVIGATION
from tests.support.pages import sign_in, words
from tests.support.paying_hub import PayingHub
from tests.support.processes import PATIENCE, wait_for

WIDE = {"width": 1280, "height": 800}
PHONE = {"width": 360, "height": 740}

CONFIG = """
c.Broker.gpu_rates = {"*": 1800}
c.Broker.opening_grant = 100_000
c.JupyterHub.slow_spawn_timeout = 1
c.GPUSpawnerMixin.catalog = "catalog.yaml"
c.Spawner.group_overrides = {
    "guests": {"groups": ["guests"], "spawner_override": {"most_hours": 2}},
}
c.Accounting.session_warn_minutes = [0.75, 0.05]
c.Accounting.session_hook = ["tee", "-a", "hook.json"]
"""
"""Half a credit a second; warned 45 and 3 seconds before the end."""

ONE_GPU = """
c.Broker.device_source = "simulated:1xT4"
c.Broker.claim_minutes = 0.1
"""

CATALOG = """
environments:
  - slug: quick
    image: none
    default: true
    hours: {max: 0.002}
  - slug: minute
    image: none
    hours: {max: 0.0167}
  - slug: long
    display_name: Long work
    description: As long as you like.
    image: none
    hours: {default: 4, max: 12}
"""
"""Sessions of 7 seconds, of a minute, and of hours."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[PayingHub]:
    """Two A100 and a T4."""
    with session_hub(tmp_path) as hub:
        yield hub


@pytest.fixture(scope="module")
def one_gpu_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PayingHub]:
    with session_hub(tmp_path_factory.mktemp("one"), ONE_GPU) as hub:
        yield hub


@pytest.fixture
def one_gpu(one_gpu_hub: PayingHub) -> Iterator[PayingHub]:
    """A hub with one T4, which the test's members gave back when it is over."""
    yield one_gpu_hub
    for ticket in one_gpu_hub.broker.waiting():
        one_gpu_hub.stop_server(ticket.server.user)
    for lease in one_gpu_hub.broker.open_leases():
        one_gpu_hub.stop_server(lease.server.user)
    wait_for(lambda: not one_gpu_hub.broker.open_leases(), "the GPU to be free")


def session_hub(folder: Path, config: str = "") -> PayingHub:
    hub = PayingHub(folder / "hub", CONFIG + config)
    (hub.folder / "catalog.yaml").write_text(CATALOG)
    return hub


def ended(hub: PayingHub, lease: Lease, timeout: float = 40.0) -> Lease:
    """The lease once it has ended by itself."""

    def look() -> Lease | None:
        found = hub.broker.lease(lease.id)
        return found if found.state is LeaseState.ENDED else None

    return wait_for(look, f"the end of {lease.server}", timeout=timeout)


def told(hub: PayingHub, user: str, kind: NoticeKind) -> list[str]:
    return [n.title for n in hub.broker.notices_of(user) if n.kind is kind]


def test_a_session_ends_by_itself_and_is_charged_to_its_end(hub: PayingHub) -> None:
    lease = hub.start_server("ada")
    endless = hub.start_server("bob", gpus=0)
    assert lease.seconds == 7 and endless.seconds is None
    assert lease.started_at is not None and lease.ends_at is not None
    wait_for(lambda: told(hub, "ada", NoticeKind.SESSION_ENDS), "the warning", timeout=15)
    assert "stops at" in words(hub.page("ada"))
    done = ended(hub, lease)
    assert done.outcome == "session_end"
    assert done.end_reason.startswith("its time was over at ")
    assert done.ended_at is not None and done.ended_at >= lease.ends_at
    assert done.charged == owed(lease.rate, lease.started_at, done.ended_at)
    wait_for(lambda: hub.server("ada") is None, "the Hub's word", timeout=20)
    assert len(told(hub, "ada", NoticeKind.SESSION_ENDS)) == 1
    assert told(hub, "ada", NoticeKind.STOPPED) == ["Your server is stopped: its time is over"]
    assert "stopped: its time was over" in words(hub.page("ada"))
    assert hub.server("bob") is not None
    assert hub.broker.due_sessions().stop == ()


def test_hub_and_service_killed_in_between_warn_once_and_end_all_the_same(hub: PayingHub) -> None:
    lease = hub.start_server("ada", environment="minute")
    wait_for(lambda: told(hub, "ada", NoticeKind.SESSION_ENDS), "the first warning", timeout=20)
    second = hub.start_server("bob")
    hub.kill9(services=True)
    assert second.ends_at is not None
    wait_for(lambda: hub.broker.clock() > second.ends_at, "the end of Bob's time", timeout=10)
    assert hub.broker.lease(second.id).state is LeaseState.RUNNING
    hub.start()
    assert ended(hub, second).outcome == "session_end"
    assert told(hub, "bob", NoticeKind.SESSION_ENDS) == [], "there was nobody to tell it"
    assert len(told(hub, "bob", NoticeKind.STOPPED)) == 1

    assert ended(hub, lease, timeout=60).outcome == "session_end"
    keys = [notice.key.split(":") for notice in hub.broker.notices_of("ada")]
    assert [(key[0], key[-1]) for key in keys] == [
        ("stopped", lease.id),
        ("session_ends", "0.05"),
        ("session_ends", "0.75"),
    ]
    events = [json.loads(line) for line in (hub.folder / "hook.json").read_text().splitlines()]
    adas = [(e["event"], e["minutes"]) for e in events if e["user"] == "ada"]
    assert adas == [("warning", 0.75), ("warning", 0.05), ("end", 0)]


def test_an_extension_moves_the_end_unless_somebody_waits(one_gpu: PayingHub) -> None:
    hub = one_gpu
    lease = hub.start_server("ada", environment="long", hours=2)
    assert lease.ends_at is not None and lease.seconds == 7200
    assert "Extend to" in words(hub.page("ada"))
    browser = hub.login("ada")
    browser.get(f"{hub.url}/services/gpu/", headers=NAVIGATION)
    path = f"/services/gpu/leases/{lease.id}/extend"

    refused = browser.post(hub.url + path, headers=NAVIGATION, timeout=30)
    assert refused.status_code == 403 and "This form is too old" in words(refused)
    assert hub.broker.lease(lease.id).extended == 0

    time.sleep(1)
    done = hub.post_form(browser, path, {}, page="/services/gpu/")
    assert done.ok and done.history[-1].status_code == 303
    assert "The session is extended: it ends at" in words(done)
    extended = hub.broker.lease(lease.id)
    assert extended.ends_at is not None
    assert (
        timedelta(seconds=1) <= extended.ends_at - lease.ends_at <= timedelta(seconds=30 * PATIENCE)
    )

    answer = extend(hub, "ada", lease)
    assert answer.ok, answer.text
    told = answer.json()
    assert told["id"] == lease.id and told["outcome"] == "" and told["claim_by"] is None
    assert told["ends_at"] > extended.ends_at.isoformat()[:19]
    trail = hub.broker.trail()
    time.sleep(1.5)
    assert extend(hub, ADMIN, lease).ok
    (change,) = set(hub.broker.trail()) - set(trail)
    assert (change.actor, change.action) == (ADMIN, "extend")

    assert hub.spawn("bob", {"environment": "long"}).status_code == 202
    wait_for(hub.broker.waiting, "bob's ticket", timeout=15)
    before = hub.broker.lease(lease.id)
    page = hub.post_form(browser, path, {}, page="/services/gpu/")
    assert page.status_code == 409
    assert "The session cannot be extended: 1 member waits for this GPU" in words(page)
    assert "Running now" in words(page)
    answer = extend(hub, ADMIN, lease)
    assert answer.status_code == 409
    assert answer.json()["error"] == "cannot_extend"
    assert hub.broker.lease(lease.id).ends_at == before.ends_at

    for user, status in (("bob", 404), ("ada", 405)):
        method = "POST" if user == "bob" else "GET"
        answer = extend(hub, user, lease, method)
        assert answer.status_code == status, answer.text
        assert "ada" not in answer.text
    assert extend(hub, "ada", lease, lease_id="0123").status_code == 404


def extend(
    hub: PayingHub, user: str, lease: Lease, method: str = "POST", lease_id: str = ""
) -> requests.Response:
    url = f"{hub.url}/services/gpu/api/leases/{lease_id or lease.id}/extend"
    if user == ADMIN:
        hub.login(ADMIN)  # whom the Hub has not seen yet
    headers = {"Authorization": f"token {hub.user_token(user)}"}
    return requests.request(method, url, headers=headers, timeout=30)


def test_a_no_show_stops_costs_nothing_and_twice_waits_at_the_end(one_gpu: PayingHub) -> None:
    hub = one_gpu

    def ask_in_line(user: str) -> Ticket:
        hub.spawn(user, {"environment": "long"})

        def found() -> list[Ticket]:
            return [ticket for ticket in hub.broker.waiting() if ticket.server.user == user]

        return wait_for(found, f"{user}'s ticket", timeout=15)[0]

    def misses() -> str:
        """Ada waits for the GPU, gets it, and does not come; what she is told."""
        first = hub.start_server("bob", environment="long")
        ticket = ask_in_line("ada")
        assert not ticket.last
        hub.stop_server("bob")
        assert first.id
        hub.wait_server("ada", timeout=30)
        lease = hub.broker.lease_of(ServerRef("ada"))
        assert lease is not None and lease.claim_seconds == 6
        done = ended(hub, lease)
        assert (done.outcome, done.charged) == ("no_show", 0)
        assert done.end_reason == "nobody connected within 0.1 min of its start"
        wait_for(lambda: hub.server("ada") is None, "the Hub's word", timeout=20)
        return hub.broker.notices_of("ada")[0].body

    before = hub.broker.open_account("ada").balance
    assert "end of the line" not in misses()
    assert "next time you wait at the end of the line" in misses()
    assert hub.broker.member("ada").balance == before
    hub.start_server("bob", environment="long")
    assert ask_in_line("ada").last
    assert not ask_in_line("cleo").last


def test_who_comes_in_time_keeps_the_server(one_gpu: PayingHub) -> None:
    hub = one_gpu
    hub.start_server("bob", environment="long")
    hub.spawn("ada", {"environment": "long"})
    wait_for(hub.broker.waiting, "ada's ticket", timeout=15)
    hub.stop_server("bob")
    hub.wait_server("ada", timeout=30)
    lease = hub.broker.lease_of(ServerRef("ada"))
    assert lease is not None
    # A server of Jupyter's reports what its member does; this one lets the test do it.
    url = f"{hub.url}/hub/api/users/ada/activity"
    time.sleep(1.5)
    at = hub.broker.clock().isoformat()
    body = {"last_activity": at, "servers": {"": {"last_activity": at}}}
    headers = {"Authorization": f"token {hub.token}"}
    requests.post(url, json=body, headers=headers, timeout=30).raise_for_status()
    wait_for(lambda: hub.broker.lease(lease.id).claimed_at, "the claim", timeout=15)
    time.sleep(7)
    assert hub.broker.lease(lease.id).state is LeaseState.RUNNING


def test_the_form_offers_what_the_group_allows(hub: PayingHub) -> None:
    gina = hub.login("gina")
    hub.api("POST", "groups/guests").raise_for_status()

    def offered() -> list[str]:
        form = gina.get(f"{hub.url}/hub/spawn", timeout=30).text
        return re.findall(r"<option value=\"\d+\" *>(\d+ h)", form)

    assert offered() == ["1 h", "2 h", "4 h", "8 h", "12 h"]
    hub.api("POST", "groups/guests/users", json={"users": ["gina"]}).raise_for_status()
    assert offered() == ["1 h", "2 h"]
    hub.api("DELETE", "groups/guests/users", json={"users": ["gina"]}).raise_for_status()
    assert offered() == ["1 h", "2 h", "4 h", "8 h", "12 h"]


def test_hours_on_the_form_and_over_rest(hub: PayingHub, browser: Browser) -> None:
    answer = hub.spawn("ada", {"environment": "long", "hours": 13})
    message = hub.failure("ada") if answer.status_code in (201, 202) else answer.json()["message"]
    assert "Long work allows 12 for one session. Write 12 or less." in message
    hub.api("POST", "users/guest").raise_for_status()
    hub.api("POST", "groups/guests").raise_for_status()
    hub.api("POST", "groups/guests/users", json={"users": ["guest"]}).raise_for_status()
    answer = hub.spawn("guest", {"environment": "long", "hours": 3})
    message = hub.failure("guest") if answer.status_code in (201, 202) else answer.json()["message"]
    assert "your limit is 2 for one session" in message
    answer = hub.spawn("ada", {"environment": "long", "hours": "soon"})
    message = hub.failure("ada") if answer.status_code in (201, 202) else answer.json()["message"]
    assert "The field 'hours' must be a number of hours from 0.25 to 8760" in message

    for size, name in ((WIDE, "form-hours-wide"), (PHONE, "form-hours-phone")):
        context = browser.new_context(viewport=size)
        page = context.new_page()
        sign_in(page, hub, "cleo", "")
        page.goto(f"{hub.url}/hub/spawn")
        assert page.locator("#hours option").first.inner_text() == "usual for the environment"
        labels = page.locator("#hours option").all_inner_texts()
        assert labels[-1] == "12 h, 21600.00 credits a GPU"
        assert page.locator("#wait").is_checked() is False
        across = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(across) == 0
        screenshot(page, name)
        context.close()
    context = browser.new_context(viewport=WIDE)
    page = context.new_page()
    sign_in(page, hub, "cleo", "")
    page.goto(f"{hub.url}/hub/spawn")
    page.check("#environment-long")
    page.select_option("#hours", "8")
    page.check("#wait")
    page.click("#spawn_form input[type=submit], #spawn_form button[type=submit]")
    hub.wait_server("cleo")
    lease = hub.broker.lease_of(ServerRef("cleo"))
    assert lease is not None and lease.seconds == 8 * 3600
    stored = hub.api("GET", "users/cleo").json()["servers"][""]["user_options"]
    assert (stored["hours"], stored["wait"]) == (8, False)
    for size, name in ((WIDE, "session-wide"), (PHONE, "session-phone")):
        page.set_viewport_size(size)
        page.goto(f"{hub.url}/services/gpu/")
        assert re.search(r"Extend to \d\d:\d\d", page.locator("main").inner_text())
        screenshot(page, name)
    context.close()


def test_who_does_not_wait_is_told_at_once(one_gpu: PayingHub) -> None:
    hub = one_gpu
    hub.start_server("ada", environment="long")
    answer = hub.spawn("bob", {"environment": "long", "wait": "no"})
    message = hub.failure("bob") if answer.status_code in (201, 202) else answer.json()["message"]
    assert "in use" in message or "before you" in message
    assert hub.broker.waiting() == []
