"""Waiting in the queue: turns, changes by members and admins, faults, kill -9. Real: hub, proxy,
accounting service, SQLite, the command line, Chromium; servers are local."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
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
from tests.support.browser import show_notifications
from tests.support.hub import ADMIN
from tests.support.pages import add_cookies, look_over, look_over_in_the_dark, sign_in, words
from tests.support.paying_hub import PayingHub, command
from tests.support.processes import wait_for
from tests.support.tickets import (
    CONFIG,
    COUNTED,
    assert_books,
    change,
    fill,
    last_word,
    line_up,
    ticket_of,
    users_in_line,
    wait_looks,
)
from tests.support.tier import SOAK, Rounds

SOON = 30.0
"""Seconds for what takes one or two, on a machine with other things to do."""

CATALOG = """
environments:
  - {slug: open, image: none, default: true}
  - {slug: lab, image: none, allowed_groups: [lab]}
  - {slug: club, image: none, allowed_groups: [club]}
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
    fill_up(hub)
    yield hub
    hub.services.devices.resume(actor=ADMIN)  # whatever a test that failed has left
    for uuid in hub.services.devices.closures():
        hub.services.devices.undrain(uuid, actor=ADMIN)
    for ticket in hub.services.queue.waiting():
        hub.stop_server(ticket.server.user, ticket.server.name)
    for lease in hub.services.leases.open_leases():
        if lease.server.user not in FILLERS:
            hub.stop_server(lease.server.user, lease.server.name)
    assert hub.services.queue.waiting() == []
    assert {lease.server.user for lease in hub.services.leases.open_leases()} <= set(FILLERS)
    assert_books(hub)


def fill_up(hub: PayingHub) -> None:
    """Let everybody have a GPU who is to have one before members wait."""
    fill(hub, *(user for user in FILLERS if hub.server(user) is None))


# Turns.


def starts(hub: PayingHub, user: str) -> bool:
    """Return True while the Hub starts a member's server."""
    return (hub.server(user) or {}).get("pending") == "spawn"


def test_queue_keeps_its_order_across_a_restart(hub: PayingHub) -> None:
    asked = line_up(hub, "dan", "gus", "eve")
    said = (event["message"] for event in hub.events("eve"))
    assert "none is free" in next(each for each in said if "number 3 of 3 in the queue" in each)
    before = [(ticket.id, ticket.created_at) for ticket in asked]
    hub.shut_down()
    hub.start()
    now = [(ticket.id, ticket.created_at) for ticket in hub.services.queue.waiting()]
    assert now == before

    # The service starts those who wait again; a stop before that ends no start.
    for user in ("dan", "gus", "eve"):
        wait_for(partial(starts, hub, user), f"{user}'s start to wait again")
    hub.stop_server("gus")
    assert users_in_line(hub) == ["dan", "eve"]
    assert hub.services.queue.ticket(asked[1].id).outcome == "cancelled"
    hub.stop_server("bob")
    hub.wait_server("dan", timeout=SOON)
    assert users_in_line(hub) == ["eve"]
    assert hub.services.queue.ticket(asked[0].id).outcome == "granted"
    lease = hub.lease_of("dan")
    assert lease is not None and lease.ticket_id == asked[0].id
    hub.stop_server("ada")
    hub.wait_server("eve", timeout=SOON)
    assert not hub.services.queue.waiting() and hub.lease_of("gus") is None


# What members and admins change.


def test_admin_cancel_ends_the_spawn_with_its_reason(hub: PayingHub, browser: Browser) -> None:
    (ticket,) = line_up(hub, "nils")
    page = browser.new_context().new_page()
    add_cookies(page, hub, "nils")
    page.goto(f"{hub.url}/hub/spawn-pending/nils")
    expect(page.get_by_role("heading", name="Waiting for a GPU")).to_be_visible()

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
    again = change(hub, ADMIN, f"queue/{ticket.id}/cancel", reason="again")
    assert (again.status_code, again.json()["error"]) == (409, "ticket_ended")
    assert "Cancelled an admin cancelled it: the course is over" in words(
        hub.page("nils", "cluster")
    )

    heading = page.get_by_role("heading", name="You lost your place in the queue")
    expect(heading).to_be_visible()
    expect(page.get_by_role("alert")).to_contain_text("the course is over")
    look_over(page, "queue-refusal")
    look_over_in_the_dark(page, "queue-refusal")
    page.get_by_role("link", name="Start again").click()
    expect(page.get_by_label("GPUs", exact=True)).to_have_value("1")
    assert "never retrieved" not in hub.log_text()


def test_members_leave_the_queue_or_start_without_a_gpu(hub: PayingHub, browser: Browser) -> None:
    line_up(hub, "paul", "quinn")
    context = browser.new_context()
    show_notifications(context, allowed=True)
    pending = context.new_page()
    add_cookies(pending, hub, "quinn")
    pending.goto(f"{hub.url}/hub/spawn-pending/quinn")
    expect(pending.get_by_role("heading", name="Waiting for a GPU")).to_be_visible()
    pending.get_by_role("button", name="Notify me when it is my turn").click()
    notifies = pending.get_by_text("This browser notifies you when it is your turn.")
    expect(notifies).to_be_visible()
    # Who goes first depends on the lengths of earlier sessions, too.
    number = re.compile(r"[Nn]umber [12] of 2")
    expect(pending.locator("#gs-card")).to_contain_text(number)
    expect(pending.locator("#progress-bar")).to_be_hidden()
    expect(pending.get_by_text("Your server is starting up.")).to_be_hidden()
    expect(pending.get_by_role("button", name="Stop Server")).to_be_hidden()

    page = browser.new_context().new_page()
    sign_in(page, hub, "paul", "")
    assert number.search(words(hub.page("paul")))
    home = hub.open_page("paul", "/hub/home").text
    assert number.search(home) and "Leave queue" in home
    assert "Stop My Server" not in home, "there is none yet"
    page.get_by_role("button", name="Leave queue for my server").click()
    expect(page.get_by_role("heading", name="Leave the queue?")).to_be_visible()
    assert number.search(words(hub.page("paul"))), "nothing is lost before it is confirmed"
    page.get_by_role("button", name="Leave queue").click()
    page.wait_for_url(f"{hub.url}/services/gpu/?given_up=1")
    assert page.get_by_text("You left the queue.").is_visible()
    assert page.get_by_text("My place in the queue").count() == 0
    assert "the member left the queue" in words(hub.page("paul", "cluster"))
    wait_for(lambda: hub.server("paul") is None, "the end of paul's spawn", timeout=SOON)
    told = hub.services.notifications.notices_of("paul")
    assert told == [], "nobody is told what they did themselves"

    only = pending.get_by_text("Number 1 of 1 in the queue", exact=True)
    expect(only).to_be_visible()
    pending.get_by_role("link", name="Leave queue").click()
    expect(pending.get_by_role("heading", name="Leave the queue?")).to_be_visible()
    pending.go_back()
    pending.get_by_role("button", name="Start without a GPU").click()
    pending.wait_for_url("**/user/quinn/**")
    lease = hub.lease_of("quinn")
    assert lease is not None and lease.devices == ()
    assert hub.services.queue.waiting() == []


def test_pauses_drains_and_moves_decide_who_starts(hub: PayingHub) -> None:
    """As changed by commands and by REST, while the hub runs."""
    _, _, last = line_up(hub, "uli", "vera", "willi")
    moved = command(hub, "queue", "move", last.id, "1")
    assert moved.endswith("it is number 1 in the queue now.\n")
    lease = hub.lease_of("bob")
    assert lease is not None
    (uuid,) = lease.uuids
    command(hub, "pause", "--reason", "new fans")
    form = words(hub.open_page("zoe", "/hub/spawn"))
    assert "New GPU sessions are paused (new fans). You can join the queue" in form
    assert "3 servers wait in the queue." in form
    hub.stop_server("bob")
    wait_looks(hub, 2)
    assert len(hub.services.queue.waiting()) == 3
    assert hub.services.monitoring.overview().free == 1

    drained = change(hub, ADMIN, f"devices/{uuid}/drain", reason="a fan").json()
    assert (drained["changed"], drained["drained"]["reason"]) == (True, "a fan")
    command(hub, "resume")
    wait_looks(hub, 2)
    assert len(hub.services.queue.waiting()) == 3
    states = {view.device.uuid: view.state for view in hub.services.monitoring.overview().devices}
    assert states[uuid] == "drained"
    assert "drained by admin: a fan" in command(hub, "devices")

    change(hub, ADMIN, f"devices/{uuid}/undrain").raise_for_status()
    hub.wait_server("willi", timeout=SOON)
    granted = hub.lease_of("willi")
    assert granted is not None and granted.uuids == (uuid,)
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


def test_lost_tickets_end_with_their_reason_and_others_move_up(hub: PayingHub) -> None:
    """A member renamed, one removed, a group left, a group removed, a wait of too many days."""
    for group, user in (("lab", "hal"), ("club", "ivy")):
        hub.api("POST", f"users/{user}")
        hub.api("POST", f"groups/{group}").raise_for_status()
        hub.api("POST", f"groups/{group}/users", json={"users": [user]}).raise_for_status()
    dora, fred, jon = line_up(hub, "dora", "fred", "jon")
    [hal] = line_up(hub, "hal", environment="lab")
    [ivy] = line_up(hub, "ivy", environment="club")
    line_up(hub, "emil")
    hub.spawn("fred", {"gpus": 1}, "second")
    second = ServerRef("fred", "second")
    look = partial(hub.services.queue.ticket_of, second)
    freds = [fred, wait_for(look, "the second server's ticket", timeout=SOON)]

    def rename() -> None:
        hub.api("PATCH", "users/dora", json={"name": "dorothea"}).raise_for_status()

    said, lost = last_word(hub, "dora", rename), "You lost your place in the queue: "
    assert f"{lost}the member was renamed. Start the server again" in said
    assert_ended(hub, dora, "member_gone", "the member was renamed")

    def remove() -> None:
        """JupyterHub by itself cannot remove a member whose spawn is pending."""
        answer = hub.api("DELETE", "users/fred")
        assert answer.status_code == 204, answer.text

    assert f"{lost}the member was removed." in last_word(hub, "fred", remove)
    for ticket in freds:
        now = hub.services.queue.ticket(ticket.id)
        assert now.outcome == "member_gone", "by the time it is answered"
        assert_ended(hub, ticket, "member_gone", "the member was removed")
    assert hub.api("GET", "users/fred").status_code == 404

    for ticket, path, group in ((hal, "groups/lab/users", "lab"), (ivy, "groups/club", "club")):
        user = ticket.server.user

        def leave(user: str = user, path: str = path) -> None:
            hub.api("DELETE", path, json={"users": [user]}).raise_for_status()

        said = last_word(hub, user, leave)
        assert f"You may not use the environment '{group}'" in said and "ask your admin" in said
        assert_ended(hub, ticket, "refused", said.removeprefix("Spawn failed: "))

    def age() -> None:
        asked_at = jon.created_at - timedelta(days=TICKET_DAYS, seconds=1)
        with hub.services.store.write() as connection:
            update = sa.update(tickets).where(tickets.c.id == jon.id)
            connection.execute(update.values(created_at=asked_at))

    assert f"{lost}it waited for {TICKET_DAYS} days." in last_word(hub, "jon", age)
    assert_ended(hub, jon, "expired", f"it waited for {TICKET_DAYS} days")

    assert users_in_line(hub) == ["emil"]
    said = (event["message"] for event in hub.events("emil", timeout=SOON))
    assert any("You are the only one in the queue" in each for each in said)
    # Under the new name Dora is as welcome as anybody.
    wait_for(lambda: hub.server("dorothea") is None, "the end of the old spawn", timeout=SOON)
    assert hub.spawn("dorothea", {"gpus": 1}).ok
    wait_for(lambda: users_in_line(hub) == ["emil", "dorothea"], "dorothea's place", timeout=SOON)


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


# The hub is killed.


def test_every_ticket_is_granted_once_despite_kills(
    hub: PayingHub, rounds: Rounds, chance: random.Random
) -> None:
    """While three servers stop, those who wait are granted theirs, and others come to the line."""
    kills = rounds(30)
    outcomes: Counter[str] = Counter()
    for number in range(kills):
        members = [f"{name}{number}" for name in ("dan", "eve", "fay", "gil", "hal")]
        fill_up(hub)
        sure = line_up(hub, *members[:3])
        moment = (number + chance.random()) / kills * 3
        said = f"round {number}, killed after {moment:.3f} s"
        for user in FILLERS:
            hub.ask_and_go("DELETE", user)
        for user in members[3:]:
            hub.ask_and_go("POST", user, {"gpus": 1})
        time.sleep(moment)
        hub.kill9(services=chance.random() < 0.5)

        tickets = _tickets(hub, members)
        assert {ticket.id for ticket in sure} <= tickets.keys(), f"{said}: a ticket is lost"
        outcomes[_stage(hub, tickets)] += 1
        hub.start()
        for user in FILLERS:
            _stop(hub, user)
        _serve(hub, {ticket.server.user for ticket in tickets.values()}, said)
        for ticket in tickets.values():
            assert hub.services.queue.ticket(ticket.id).outcome == "granted", said
            ran = [
                lease
                for lease in hub.services.leases.of_account(f"member:{ticket.server.user}")
                if lease.ticket_id == ticket.id and lease.outcome == "" and lease.claimed_at
            ]
            assert len(ran) <= 1, f"{said}: {ticket.server} was served twice"
        for user in members:
            _stop(hub, user)
        wait_for(
            lambda: not hub.services.leases.open_leases(), f"{said}: no lease to leak", timeout=SOON
        )
        assert hub.services.queue.waiting() == [], said
        assert_books(hub)
    print(f"killed {kills} times:", dict(outcomes))
    if SOAK:
        assert len(outcomes) > 2, "some were too early, some were not"


def _tickets(hub: PayingHub, users: Iterable[str]) -> dict[str, Ticket]:
    """Every ticket of these members that was written before the hub died."""
    return {ticket.id: ticket for user in users for ticket in hub.services.queue.tickets_of(user)}


def _stage(hub: PayingHub, tickets: dict[str, Ticket]) -> str:
    """How far the line had come."""
    granted = [ticket for ticket in tickets.values() if ticket.outcome == "granted"]
    states = Counter(
        hub.services.leases.get(ticket.lease_id or "").state.value for ticket in granted
    )
    return f"{len(tickets)} tickets, {dict(states) or 'none'} granted"


def _serve(hub: PayingHub, users: set[str], said: str) -> None:
    """Wait for the turn of each, and stop whoever had it, for the next one."""
    left = set(users)

    def look() -> bool:
        for user in sorted(left):
            server = hub.server(user)
            if server is not None and server["ready"]:
                hub.stop_server(user)
                left.discard(user)
        return not left

    try:
        wait_for(look, "everybody's turn", timeout=90, interval=0.2)
    except TimeoutError:
        waiting = {user: ticket_of(hub, user) for user in left}
        pytest.fail(
            f"{said}: no turn came for {waiting}; leases {hub.services.leases.open_leases()}"
        )


def _stop(hub: PayingHub, user: str) -> None:
    if hub.server(user) is not None:
        hub.stop_server(user)
