"""Waiting in the queue: turns, changes by members and admins, faults, kill -9. Real: hub, proxy,
accounting service, SQLite, the command line, Chromium; servers are local."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa
from playwright.sync_api import Browser, expect

from gpuspawner.db.schema import tickets
from gpuspawner.leases.models import LeaseState, ServerRef
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.queue.models import Ticket
from gpuspawner.service.worker import TICKET_DAYS
from tests.support.brokers import problems
from tests.support.browser import show_notifications
from tests.support.hub import ADMIN
from tests.support.pages import add_cookies, look_over, look_over_in_the_dark, sign_in, words
from tests.support.paying_hub import PayingHub
from tests.support.preloaded import PRELOADED
from tests.support.processes import REPO, wait_for
from tests.support.tickets import (
    CONFIG,
    COUNTED,
    change,
    fill,
    last_word,
    line_up,
    ticket_of,
    users_in_line,
    wait_looks,
)

SOON = 30.0
"""Seconds for what takes one or two, on a machine with other things to do."""

CATALOG = """
environments:
  - {slug: open, image: none, default: true}
  - {slug: lab, image: none, allowed_groups: [lab]}
  - {slug: broken, image: none, spawner_override: {cmd: ["false"]}}
"""

FILLERS = ("ada", "bob", "cleo")


@pytest.fixture(scope="module")
def module_hub(hubs: None, folder: Path) -> Iterator[PayingHub]:
    """Three GPUs; the proxy is a process of its own."""
    (folder / "catalog.yaml").write_text(CATALOG, encoding="utf-8")
    config = f'{CONFIG}{COUNTED}\nc.GPULocalSpawner.catalog = "{folder}/catalog.yaml"\n'
    with PayingHub(folder / "hub", config, external_proxy=True) as hub:
        yield hub


@pytest.fixture
def hub(module_hub: PayingHub) -> Iterator[PayingHub]:
    """All GPUs are in use before a test, and nobody waits; after it everything fits together.
    Each test has members of its own in the queue."""
    hub = module_hub
    fill(hub, *(user for user in FILLERS if hub.server(user) is None))
    yield hub
    for ticket in hub.services.queue.waiting():
        hub.stop_server(ticket.server.user, ticket.server.name)
    for lease in hub.services.leases.open_leases():
        if lease.server.user not in FILLERS:
            hub.stop_server(lease.server.user, lease.server.name)
    assert hub.services.queue.waiting() == []
    assert {lease.server.user for lease in hub.services.leases.open_leases()} <= set(FILLERS)
    wait_for(lambda: not problems(hub.services.store), "the books to be in order", timeout=5)


# Turns.


def test_tickets_are_granted_in_queue_order(hub: PayingHub) -> None:
    line_up(hub, "dan", "eve")
    said = (event["message"] for event in hub.events("eve"))
    assert "none is free" in next(each for each in said if "number 2 of 2 in the queue" in each)

    hub.stop_server("bob")
    hub.wait_server("dan")
    assert users_in_line(hub) == ["eve"]
    assert hub.services.queue.tickets_of("dan")[0].outcome == "granted"
    lease = hub.lease_of("dan")
    assert lease is not None and lease.ticket_id == hub.services.queue.tickets_of("dan")[0].id
    hub.stop_server("ada")
    hub.wait_server("eve")
    assert not hub.services.queue.waiting()


def test_stopping_the_server_cancels_its_ticket(hub: PayingHub) -> None:
    line_up(hub, "gus", "hal")
    hub.stop_server("gus")
    assert users_in_line(hub) == ["hal"]
    assert hub.services.queue.tickets_of("gus")[0].outcome == "cancelled"
    hub.stop_server("ada")
    hub.wait_server("hal")
    assert hub.lease_of("gus") is None


def test_hub_restart_keeps_every_ticket(hub: PayingHub) -> None:
    line_up(hub, "ida", "jan", "kim")
    before = [(ticket.id, ticket.created_at) for ticket in hub.services.queue.waiting()]
    for end in (partial(hub.kill9, services=True), hub.shut_down):
        end()
        hub.start()
        now = [(ticket.id, ticket.created_at) for ticket in hub.services.queue.waiting()]
        assert now == before
    hub.stop_server("cleo")
    hub.wait_server("ida", timeout=30)
    hub.stop_server("bob")
    hub.wait_server("jan", timeout=30)
    assert users_in_line(hub) == ["kim"]


# What members and admins change.


def command(hub: PayingHub, *arguments: str) -> str:
    """``gpuspawner`` in a shell on the hub's machine; what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = PRELOADED.run(arguments, hub.folder, environment, answer="")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_admin_cancel_ends_the_spawn_with_its_reason(hub: PayingHub) -> None:
    (ticket,) = line_up(hub, "nils")

    def cancel() -> None:
        answer = change(hub, ADMIN, f"queue/{ticket.id}/cancel", reason="the course is over")
        assert answer.json()["outcome"] == "cancelled", answer.text

    message = last_word(hub, "nils", cancel, SOON)
    assert "an admin cancelled it: the course is over." in message
    wait_for(lambda: hub.server("nils") is None, "the end of nils's spawn", timeout=10)
    (told,) = hub.services.notifications.notices_of("nils")
    assert told.title == "You lost your place in the queue" and "the course is over" in told.body
    (trail,) = hub.services.audit.trail(1)
    assert (trail.actor, trail.action) == (ADMIN, "cancelled")
    assert trail.subject == f"ticket {ticket.id} of nils"
    assert "Cancelled an admin cancelled it: the course is over" in words(
        hub.page("nils", "cluster")
    )
    again = change(hub, ADMIN, f"queue/{ticket.id}/cancel", reason="again")
    assert (again.status_code, again.json()["error"]) == (409, "ticket_ended")


def test_member_cancels_a_ticket_on_their_page(hub: PayingHub, browser: Browser) -> None:
    line_up(hub, "paul", "rosa")
    page = browser.new_context().new_page()
    sign_in(page, hub, "paul", "")
    assert page.get_by_text("number 1 of 2").is_visible()
    home = hub.open_page("paul", "/hub/home").text
    assert "number 1 of 2 in the queue" in home and "Leave queue" in home
    assert "Stop My Server" not in home, "there is none yet"
    page.get_by_role("button", name="Leave queue for my server").click()
    expect(page.get_by_role("heading", name="Leave the queue?")).to_be_visible()
    assert "number 1 of 2" in words(hub.page("paul")), "nothing is lost before it is confirmed"
    page.get_by_role("button", name="Leave queue").click()
    page.wait_for_url(f"{hub.url}/services/gpu/?given_up=1")
    assert page.get_by_text("You left the queue.").is_visible()
    assert "the member left the queue" in words(hub.page("paul", "cluster"))
    assert page.get_by_text("My place in the queue").count() == 0
    wait_for(lambda: hub.server("paul") is None, "the end of paul's spawn", timeout=SOON)
    assert hub.services.notifications.notices_of("paul") == [], (
        "nobody is told what they did themselves"
    )
    assert "number 1 of 1" in words(hub.page("rosa"))
    hub.stop_server("rosa")


def test_pending_page_shows_the_queue_and_starts_without_a_gpu(
    hub: PayingHub, browser: Browser
) -> None:
    line_up(hub, "olga", "quinn")
    context = browser.new_context()
    show_notifications(context, allowed=True)
    page = context.new_page()
    add_cookies(page, hub, "quinn")
    page.goto(f"{hub.url}/hub/spawn-pending/quinn")
    expect(page.get_by_role("heading", name="Waiting for a GPU")).to_be_visible()
    page.get_by_role("button", name="Notify me when it is my turn").click()
    expect(page.get_by_text("This browser notifies you when it is your turn.")).to_be_visible()
    # Who goes first depends on the lengths of earlier sessions, too.
    expect(page.locator("#gs-card")).to_contain_text(re.compile(r"Number [12] of 2 in the queue"))
    expect(page.locator("#progress-bar")).to_be_hidden()
    expect(page.get_by_text("Your server is starting up.")).to_be_hidden()
    expect(page.get_by_role("button", name="Stop Server")).to_be_hidden()
    hub.stop_server("olga")
    expect(page.get_by_text("Number 1 of 1 in the queue", exact=True)).to_be_visible(timeout=20_000)
    page.get_by_role("link", name="Leave queue").click()
    expect(page.get_by_role("heading", name="Leave the queue?")).to_be_visible()
    page.go_back()
    page.get_by_role("button", name="Start without a GPU").click()
    page.wait_for_url("**/user/quinn/**", timeout=30_000)
    lease = hub.lease_of("quinn")
    assert lease is not None and lease.devices == ()
    assert hub.services.queue.waiting() == []


def test_ended_wait_becomes_the_page_of_the_refusal(hub: PayingHub, browser: Browser) -> None:
    (ticket,) = line_up(hub, "rita")
    page = browser.new_context().new_page()
    add_cookies(page, hub, "rita")
    page.goto(f"{hub.url}/hub/spawn-pending/rita")
    expect(page.get_by_role("heading", name="Waiting for a GPU")).to_be_visible()
    change(hub, ADMIN, f"queue/{ticket.id}/cancel", reason="the course is over")
    heading = page.get_by_role("heading", name="You lost your place in the queue")
    expect(heading).to_be_visible(timeout=20_000)
    expect(page.get_by_role("alert")).to_contain_text("the course is over")
    look_over(page, "queue-refusal")
    look_over_in_the_dark(page, "queue-refusal")
    page.get_by_role("link", name="Start again").click()
    expect(page.get_by_label("GPUs", exact=True)).to_have_value("1")
    log = hub.log_text()
    assert "never retrieved" not in log


def test_paused_queue_grants_nothing(hub: PayingHub) -> None:
    line_up(hub, "sven")
    command(hub, "pause", "--reason", "new fans")
    try:
        hub.stop_server("ada")
        wait_looks(hub, 2)
        waits = ticket_of(hub, "sven")
        assert waits is not None and not waits.outcome
        assert hub.services.monitoring.overview().free == 1
    finally:
        command(hub, "resume")
    hub.wait_server("sven", timeout=15)
    hub.stop_server("sven")
    fill(hub, "ada")


def test_drained_device_is_not_granted(hub: PayingHub) -> None:
    lease = hub.lease_of("bob")
    assert lease is not None
    (uuid,) = lease.uuids
    drained = change(hub, ADMIN, f"devices/{uuid}/drain", reason="a fan").json()
    assert (drained["changed"], drained["drained"]["reason"]) == (True, "a fan")
    line_up(hub, "tina")
    hub.stop_server("bob")
    wait_looks(hub, 2)
    assert ticket_of(hub, "tina") is not None
    states = {view.device.uuid: view.state for view in hub.services.monitoring.overview().devices}
    assert states[uuid] == "drained"
    assert "drained by admin: a fan" in command(hub, "devices")
    change(hub, ADMIN, f"devices/{uuid}/undrain").raise_for_status()
    hub.wait_server("tina", timeout=15)
    granted = hub.lease_of("tina")
    assert granted is not None and granted.uuids == (uuid,)
    hub.stop_server("tina")
    fill(hub, "bob")


def test_ticket_moved_to_the_front_starts_first(hub: PayingHub) -> None:
    _, _, last = line_up(hub, "uli", "vera", "willi")
    assert command(hub, "queue", "move", last.id, "1").endswith(
        "it is number 1 in the queue now.\n"
    )
    hub.stop_server("cleo")
    hub.wait_server("willi", timeout=15)
    assert ticket_of(hub, "uli") and ticket_of(hub, "vera")


# What befalls who waits.


def assert_ended(hub: PayingHub, ticket: Ticket, outcome: str, reason: str) -> None:
    """One end, with its reason; nothing is left of the wait, and its member was told."""
    user = ticket.server.user
    now = wait_for(lambda: _ended(hub, ticket), f"the end of {user}'s ticket", timeout=SOON)
    assert (now.outcome, now.end_reason) == (outcome, reason)
    assert now.ended_at is not None and now.lease_id is None
    assert hub.services.leases.of_server(ticket.server) is None
    [told] = [n for n in hub.services.notifications.notices_of(user) if n.key.endswith(ticket.id)]
    assert told.kind is NoticeKind.TICKET_ENDED and reason.rstrip(".") in told.body


def _ended(hub: PayingHub, ticket: Ticket) -> Ticket | None:
    now = hub.services.queue.ticket(ticket.id)
    return now if now.outcome else None


def assert_only_one_in_line(hub: PayingHub, user: str) -> None:
    """Who was behind has moved up, and their page says so."""
    wait_for(lambda: users_in_line(hub) == [user], f"{user} to move up", timeout=SOON)
    said = (event["message"] for event in hub.events(user, timeout=SOON))
    assert any("You are the only one in the queue" in each for each in said)


def test_renaming_a_member_ends_their_ticket(hub: PayingHub) -> None:
    dora, _ = line_up(hub, "dora", "emil")
    said = last_word(
        hub,
        "dora",
        lambda: hub.api("PATCH", "users/dora", json={"name": "dorothea"}).raise_for_status(),
    )
    assert (
        "You lost your place in the queue: the member was renamed. Start the server again" in said
    )
    assert_ended(hub, dora, "member_gone", "the member was renamed")
    assert_only_one_in_line(hub, "emil")
    # Under the new name they are as welcome as anybody.
    wait_for(lambda: hub.server("dorothea") is None, "the end of the old spawn", timeout=SOON)
    assert hub.spawn("dorothea", {"gpus": 1}).ok
    wait_for(
        lambda: users_in_line(hub) == ["emil", "dorothea"], "dorothea's new place", timeout=SOON
    )


def test_removing_a_member_ends_their_tickets(hub: PayingHub) -> None:
    """JupyterHub by itself cannot remove a member whose spawn is pending."""
    one, _ = line_up(hub, "fred", "gina")
    hub.spawn("fred", {"gpus": 1}, "second")
    wait_for(
        lambda: len(hub.services.queue.waiting()) == 3, "the second server's ticket", timeout=SOON
    )
    two = next(t for t in hub.services.queue.waiting() if t.server == ServerRef("fred", "second"))

    def remove() -> None:
        answer = hub.api("DELETE", "users/fred")
        assert answer.status_code == 204, answer.text

    said = last_word(hub, "fred", remove)
    assert "You lost your place in the queue: the member was removed." in said
    for ticket in (one, two):
        assert hub.services.queue.ticket(ticket.id).outcome == "member_gone", (
            "by the time it is answered"
        )
        assert_ended(hub, ticket, "member_gone", "the member was removed")
    assert hub.api("GET", "users/fred").status_code == 404
    assert_only_one_in_line(hub, "gina")


@pytest.mark.parametrize("how", ["left", "gone"])
def test_losing_the_required_group_refuses_the_ticket(hub: PayingHub, how: str) -> None:
    """The member is taken out of it, or there is no such group any more."""
    user, behind = f"hal-{how}", f"ida-{how}"
    hub.api("POST", f"users/{user}")
    hub.api("POST", "groups/lab")
    hub.api("POST", "groups/lab/users", json={"users": [user]}).raise_for_status()
    [ticket] = line_up(hub, user, environment="lab")
    line_up(hub, behind)
    path = "groups/lab/users" if how == "left" else "groups/lab"

    def change() -> None:
        hub.api("DELETE", path, json={"users": [user]}).raise_for_status()

    said = last_word(hub, user, change)
    assert "You may not use the environment 'lab'" in said and "ask your admin" in said
    reason = said.removeprefix("Spawn failed: ")
    assert_ended(hub, ticket, "refused", reason)
    assert_only_one_in_line(hub, behind)
    hub.api("DELETE", "groups/lab")


def test_ticket_expires_after_its_maximum_wait(hub: PayingHub) -> None:
    jon, _ = line_up(hub, "jon", "klaus")

    def age() -> None:
        with hub.services.store.write() as connection:
            asked = jon.created_at - timedelta(days=TICKET_DAYS, seconds=1)
            connection.execute(
                sa.update(tickets).where(tickets.c.id == jon.id).values(created_at=asked)
            )

    said = last_word(hub, "jon", age)
    assert f"You lost your place in the queue: it waited for {TICKET_DAYS} days." in said
    assert_ended(hub, jon, "expired", f"it waited for {TICKET_DAYS} days")
    assert_only_one_in_line(hub, "klaus")


def test_failed_start_passes_the_device_to_the_next(hub: PayingHub) -> None:
    """It costs nothing, and the next one's turn comes at once."""
    [ned] = line_up(hub, "ned", environment="broken")
    line_up(hub, "ola")
    said = last_word(hub, "ned", lambda: hub.stop_server("ada"))
    assert "Your server did not start" in said and "Nothing was charged." in said
    hub.wait_server("ola", timeout=SOON)
    [failed] = hub.services.leases.of_account("member:ned")
    assert failed.state is LeaseState.ENDED and failed.charged == 0
    assert failed.ticket_id == ned.id and hub.services.queue.ticket(ned.id).outcome == "granted"
    account = hub.services.ledger.account("member:ned")
    assert (account.balance, account.held) == (100_000_000, 0)
    [lease] = hub.services.leases.of_account("member:ola")
    assert failed.ended_at is not None and lease.uuids == failed.uuids
    assert lease.granted_at >= failed.ended_at
    assert ticket_of(hub, "ned") is None, "a start that failed does not come back"
