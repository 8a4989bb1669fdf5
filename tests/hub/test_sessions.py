"""Sessions that end. Real here: JupyterHub, proxy, accounting service, SQLite, kill -9, Chromium;
members' servers are quick local processes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import requests
import sqlalchemy as sa
from playwright.sync_api import Browser

from gpuspawner.db import schema as db_schema
from gpuspawner.leases.models import Lease, LeaseState
from gpuspawner.ledger.rules import owed
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.queue.models import Ticket
from tests.support.gpu_hub import message_of
from tests.support.hub import ADMIN, NAVIGATION
from tests.support.pages import WIDE, mentions, sign_in, words
from tests.support.paying_hub import PayingHub
from tests.support.processes import wait_for

CONFIG = """
c.GPURates.by_model = {"*": 1800}
c.GPUCredits.opening_grant = 100_000
c.JupyterHub.slow_spawn_timeout = 1
c.GPUSpawnerMixin.catalog = "catalog.yaml"
c.Spawner.group_overrides = {
    "guests": {"groups": ["guests"], "spawner_override": {"most_hours": 2}},
}
c.GPUSessions.warn_minutes = [30, 10]
c.GPUNotifications.hook = ["tee", "-a", "hook.json"]
c.JupyterHub.load_groups = {"guests": {"users": []}}
"""
"""Half a credit a second."""

CLAIMS = """
from pathlib import Path
from gpuspawner.queue.service import QueueService
from gpuspawner.spawners import no_shows
from gpuspawner.spawners.mixin import GPUSpawnerMixin

start_ticket, await_claim = QueueService.start_ticket, GPUSpawnerMixin.await_claim

def start_with_time_to_claim(self, *args, **kwargs):
    self.settings.claim_minutes = float(Path("claim-minutes").read_text())
    return start_ticket(self, *args, **kwargs)

async def await_and_say_so(spawner):
    await await_claim(spawner)
    with open("watched", "a") as file:
        print(spawner.user.name, file=file)

QueueService.start_ticket = start_with_time_to_claim
GPUSpawnerMixin.await_claim, no_shows.LOOK = await_and_say_so, 0.2
"""
"""The file ``claim-minutes`` says how long a GPU from the line is kept for its member; the file
``watched`` names those whom the hub no longer waits for."""

CATALOG = """
environments:
  - slug: quick
    image: none
    default: true
    hours: {max: 0.002}
  - slug: long
    display_name: Long work
    description: As long as you like.
    image: none
    hours: {default: 4, max: 12}
"""
"""Sessions of 7 seconds, and of hours."""


T4 = {"environment": "long", "gpu_model": "T4"}
"""Of which there is one."""


@pytest.fixture(scope="module")
def module_hub(hubs: None, folder: Path) -> Iterator[PayingHub]:
    hub = PayingHub(folder / "hub", CONFIG + CLAIMS)
    (hub.folder / "catalog.yaml").write_text(CATALOG)
    (hub.folder / "claim-minutes").write_text("10")
    with hub:
        yield hub


@pytest.fixture
def hub(module_hub: PayingHub) -> Iterator[PayingHub]:
    """A hub with two A100 and a T4, which the test's members gave back when it is over."""
    hub = module_hub
    yield hub
    for ticket in hub.services.queue.waiting():
        hub.stop_server(ticket.server.user)
    for lease in hub.services.leases.open_leases():
        hub.stop_server(lease.server.user)
    wait_for(lambda: not hub.services.leases.open_leases(), "the GPUs to be free")


def age(hub: PayingHub, lease: Lease, by: timedelta) -> None:
    """Move the session's whole time in the store into the past."""
    lease = hub.services.leases.get(lease.id)
    assert lease.started_at is not None
    assert lease.answered_at is not None
    moved = {"granted_at": lease.granted_at - by, "started_at": lease.started_at - by}
    moved["answered_at"] = lease.answered_at - by
    with hub.services.store.write() as connection:
        row = db_schema.leases.c.id == lease.id
        connection.execute(sa.update(db_schema.leases).where(row).values(moved))


def let_end_in(hub: PayingHub, lease: Lease, minutes: float) -> None:
    """Move the session's time so that it ends so many minutes from now."""
    ends_at = hub.services.leases.get(lease.id).ends_at
    assert ends_at is not None
    age(hub, lease, ends_at - hub.services.clock() - timedelta(minutes=minutes))


def wait_told(hub: PayingHub, user: str, count: int) -> None:
    """Wait until the member has heard so many times that the session ends."""
    wait_for(
        lambda: len(hub.told(user, NoticeKind.SESSION_ENDS)) == count, f"warning {count} of {user}"
    )


def test_session_ends_on_time_and_is_charged_exactly(hub: PayingHub) -> None:
    lease = hub.start_server("ada")
    endless = hub.start_server("bob", gpus=0)
    assert lease.seconds == 7 and endless.seconds is None
    assert lease.started_at is not None and lease.ends_at is not None
    done = hub.wait_end(lease)
    assert done.outcome == "session_end"
    assert done.end_reason.startswith("its time was over at ")
    assert done.ended_at is not None and done.ended_at >= lease.ends_at
    assert done.charged == owed(lease.rate, lease.started_at, done.ended_at)
    wait_for(lambda: hub.server("ada") is None, "the Hub's word", timeout=20)
    assert hub.told("ada", NoticeKind.SESSION_ENDS) == [], "it was shorter than any warning"
    assert hub.told("ada", NoticeKind.STOPPED) == [
        "Your server was stopped: its time limit was reached"
    ]
    assert "stopped: its time was over" in words(hub.page("ada"))
    assert hub.server("bob") is not None
    assert hub.services.sessions.due_sessions().stop == ()


def test_session_end_and_warnings_survive_kills(hub: PayingHub) -> None:
    lease = hub.start_server("dora", environment="long", hours=2)
    second = hub.start_server("emil", environment="long", hours=2)
    let_end_in(hub, lease, 25)
    wait_told(hub, "dora", 1)
    assert "stops at" in words(hub.page("dora"))
    hub.kill9(services=True)
    let_end_in(hub, second, 0)
    assert hub.services.leases.get(second.id).state is LeaseState.RUNNING
    hub.start()
    assert hub.wait_end(second).outcome == "session_end"
    assert hub.told("emil", NoticeKind.SESSION_ENDS) == [], "there was nobody to tell it"
    assert len(hub.told("emil", NoticeKind.STOPPED)) == 1

    let_end_in(hub, lease, 5)
    wait_told(hub, "dora", 2)
    let_end_in(hub, lease, 0)
    assert hub.wait_end(lease).outcome == "session_end"
    keys = [notice.key.split(":") for notice in hub.services.notifications.notices_of("dora")]
    assert [(key[0], key[-1]) for key in keys] == [
        ("stopped", lease.id),
        ("session_ends", "10"),
        ("session_ends", "30"),
    ]

    def heard() -> list[tuple[str, float | None]]:
        lines = (hub.folder / "hook.json").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        some = [(each["event"], each["minutes"]) for each in events if each["user"] == "dora"]
        return list(dict.fromkeys(some))  # a killed service may have it told twice

    wait_for(lambda: len(heard()) > 2, "the hook")
    assert heard() == [("session_ends", 30), ("session_ends", 10), ("session_over", None)]


def test_session_extends_only_while_nobody_waits(hub: PayingHub) -> None:
    lease = hub.start_server("ada", **T4, hours=2)
    assert lease.ends_at is not None and lease.seconds == 7200
    assert "Extend to" in words(hub.page("ada"))
    browser = hub.login("ada")
    browser.get(f"{hub.url}/services/gpu/", headers=NAVIGATION)
    path = f"/services/gpu/leases/{lease.id}/extend"

    refused = browser.post(hub.url + path, headers=NAVIGATION, timeout=120)
    assert refused.status_code == 403 and "This form is too old" in words(refused)
    assert hub.services.leases.get(lease.id).extended == 0

    before = hub.services.clock()
    done = hub.post_form(browser, path, {}, page="/services/gpu/")
    after = hub.services.clock()
    assert done.ok and done.history[-1].status_code == 303
    assert "The session is extended: it ends at" in words(done)
    extended = hub.services.leases.get(lease.id)
    assert extended.ends_at is not None
    anew = extended.ends_at - timedelta(seconds=7200)
    assert before <= anew <= after + timedelta(seconds=1), "two hours from then, in whole seconds"

    answer = extend(hub, "ada", lease)
    assert answer.ok, answer.text
    told = answer.json()
    assert told["id"] == lease.id and told["outcome"] == "" and told["claim_by"] is None
    assert told["ends_at"] > extended.ends_at.isoformat()[:19]
    trail = hub.services.audit.trail()
    longer = hub.services.leases.get(lease.id)
    over = lease.ends_at + timedelta(seconds=longer.extended - 7200)
    wait_for(lambda: hub.services.clock() > over, "a second in which it can become longer")
    assert extend(hub, ADMIN, lease).ok
    (change,) = set(hub.services.audit.trail()) - set(trail)
    assert (change.actor, change.action) == (ADMIN, "extend")

    assert hub.spawn("bob", T4).status_code == 202
    wait_for(hub.services.queue.waiting, "bob's ticket", timeout=15)
    now = hub.services.leases.get(lease.id)
    page = hub.post_form(browser, path, {}, page="/services/gpu/")
    assert page.status_code == 409
    assert "The session cannot be extended: 1 member waits for this GPU" in words(page)
    assert "Running" in words(page)
    answer = extend(hub, ADMIN, lease)
    assert answer.status_code == 409
    assert answer.json()["error"] == "cannot_extend"
    assert hub.services.leases.get(lease.id).ends_at == now.ends_at

    for user, status in (("bob", 404), ("ada", 405)):
        method = "POST" if user == "bob" else "GET"
        answer = extend(hub, user, lease, method)
        assert answer.status_code == status, answer.text
        assert not mentions(answer.text, "ada")
    assert extend(hub, "ada", lease, lease_id="0123").status_code == 404


def extend(
    hub: PayingHub, user: str, lease: Lease, method: str = "POST", lease_id: str = ""
) -> requests.Response:
    return hub.call(user, method, f"leases/{lease_id or lease.id}/extend")


def test_repeated_no_show_is_free_but_queues_last(hub: PayingHub) -> None:
    (hub.folder / "claim-minutes").write_text("0.05")

    def ask_in_line(user: str) -> Ticket:
        hub.spawn(user, T4)

        def found() -> list[Ticket]:
            return [ticket for ticket in hub.services.queue.waiting() if ticket.server.user == user]

        return wait_for(found, f"{user}'s ticket", timeout=15)[0]

    def misses() -> str:
        """Ada waits for the GPU, gets it, and does not come; what she is told."""
        first = hub.start_server("bob", **T4)
        ticket = ask_in_line("ada")
        assert not ticket.last
        hub.stop_server("bob")
        assert first.id
        granted = wait_for(lambda: hub.services.queue.ticket(ticket.id).lease_id, "ada's turn")
        lease = hub.services.leases.get(granted)
        assert lease.claim_seconds == 3
        done = hub.wait_end(lease)
        assert (done.outcome, done.charged) == ("no_show", 0)
        assert done.end_reason == "no one connected within 0.05 min of its start"
        wait_for(lambda: hub.server("ada") is None, "the Hub's word", timeout=20)
        return hub.services.notifications.notices_of("ada")[0].body

    before = hub.services.ledger.open_account("ada").balance
    assert "end of the queue" not in misses()
    assert "next time you wait at the end of the queue" in misses()
    assert hub.services.ledger.member("ada").balance == before
    hub.start_server("bob", **T4)
    assert ask_in_line("ada").last
    assert not ask_in_line("cleo").last


def test_connecting_in_time_keeps_the_server(hub: PayingHub) -> None:
    (hub.folder / "claim-minutes").write_text("10")
    hub.start_server("bob", **T4)
    hub.spawn("eve", T4)
    wait_for(hub.services.queue.waiting, "eve's ticket", timeout=15)
    hub.stop_server("bob")
    hub.wait_server("eve", timeout=30)
    lease = hub.lease_of("eve")
    assert lease is not None and lease.claim_seconds == 600 and lease.up_since is not None
    # A server of Jupyter's reports what its member does; this one lets the test do it.
    url = f"{hub.url}/hub/api/users/eve/activity"
    at = (lease.up_since + timedelta(seconds=2)).isoformat()
    body = {"last_activity": at, "servers": {"": {"last_activity": at}}}
    headers = {"Authorization": f"token {hub.token}"}
    requests.post(url, json=body, headers=headers, timeout=120).raise_for_status()
    wait_for(lambda: hub.services.leases.get(lease.id).claimed_at, "the claim", timeout=15)

    # The time to come goes by, and the hub waits for nobody any more.
    age(hub, lease, timedelta(minutes=20))
    watched = hub.folder / "watched"
    wait_for(lambda: "eve" in watched.read_text().split(), "the end of the hub's watch")
    assert hub.services.sessions.no_show(lease.id).outcome == ""
    hub.wait_rounds(1, "sessions")
    assert hub.services.leases.get(lease.id).state is LeaseState.RUNNING


def test_form_offers_hours_allowed_for_the_group(hub: PayingHub) -> None:
    gina = hub.login("gina")

    def offered() -> list[str]:
        form = gina.get(f"{hub.url}/hub/spawn", timeout=120).text
        return re.findall(r'<option value="\d+" data-length="(\d+ h)" *>', form)

    assert offered() == ["1 h", "2 h", "4 h", "8 h", "12 h"]
    hub.api("POST", "groups/guests/users", json={"users": ["gina"]}).raise_for_status()
    assert offered() == ["1 h", "2 h"]
    hub.api("DELETE", "groups/guests/users", json={"users": ["gina"]}).raise_for_status()
    assert offered() == ["1 h", "2 h", "4 h", "8 h", "12 h"]


def refusal(hub: PayingHub, user: str, **options: Any) -> str:
    """Why a start is refused, whether at once or on the page that waits."""
    answer = hub.spawn(user, options)
    return hub.failure(user) if answer.status_code in (201, 202) else message_of(answer)


def test_session_hours_are_limited_and_selectable(hub: PayingHub, browser: Browser) -> None:
    message = refusal(hub, "fay", environment="long", hours=13)
    assert "Long work allows 12 for one session. Write 12 or less." in message
    hub.api("POST", "users/guest").raise_for_status()
    hub.api("POST", "groups/guests/users", json={"users": ["guest"]}).raise_for_status()
    message = refusal(hub, "guest", environment="long", hours=3)
    assert "your limit is 2 for one session" in message
    message = refusal(hub, "fay", environment="long", hours="soon")
    assert "The field 'hours' must be a number of hours from 0.25 to 8760" in message

    page = browser.new_context(viewport=WIDE).new_page()
    sign_in(page, hub, "cleo", "")
    page.goto(f"{hub.url}/hub/spawn")
    page.check("#environment-long")
    labels = page.locator("#hours option").all_inner_texts()
    assert (labels[0], labels[-1]) == ("Default (4 h), 7200.00 credits", "12 h, 21600.00 credits")
    assert page.locator("#wait").is_checked() is False
    page.select_option("#hours", "8")
    page.check("#wait")
    page.click("#spawn_form input[type=submit], #spawn_form button[type=submit]")
    hub.wait_server("cleo")
    lease = hub.lease_of("cleo")
    assert lease is not None and lease.seconds == 8 * 3600
    stored = hub.api("GET", "users/cleo").json()["servers"][""]["user_options"]
    assert (stored["hours"], stored["wait"]) == (8, False)
    page.goto(f"{hub.url}/services/gpu/")
    assert re.search(r"Extend to \d\d:\d\d", page.locator("main").inner_text())


def test_request_without_waiting_is_refused_at_once(hub: PayingHub) -> None:
    hub.start_server("ada", **T4)
    message = refusal(hub, "bob", **T4, wait="no")
    assert "in use" in message or "before you" in message
    assert hub.services.queue.waiting() == []
