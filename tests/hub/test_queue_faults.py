"""What befalls who waits. Real: hub, proxy, accounting service, SQLite; servers are local."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import sqlalchemy as sa

from gpuspawner.db.schema import tickets
from gpuspawner.leases.models import LeaseState, ServerRef
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.queue.models import Ticket
from gpuspawner.service.worker import TICKET_DAYS
from tests.support.brokers import problems
from tests.support.hub import ADMIN
from tests.support.lines import CONFIG, fill, last_word, line_up, ticket_of, users_in_line
from tests.support.paying_hub import PayingHub
from tests.support.processes import wait_for

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
def hub(hubs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PayingHub]:
    """Three GPUs."""
    folder = tmp_path_factory.mktemp("faults") / "hub"
    folder.mkdir()
    (folder / "catalog.yaml").write_text(CATALOG, encoding="utf-8")
    config = f'{CONFIG}\nc.GPULocalSpawner.catalog = "{folder}/catalog.yaml"\n'
    with PayingHub(folder, config) as hub:
        yield hub


@pytest.fixture(autouse=True)
def nothing_leaks(hub: PayingHub) -> Iterator[None]:
    """All GPUs are in use before a test; after it everything fits together."""
    fill(hub, *(user for user in FILLERS if hub.server(user) is None))
    yield
    for ticket in hub.broker.waiting():
        hub.stop_server(ticket.server.user, ticket.server.name)
    for lease in hub.broker.open_leases():
        if lease.server.user not in FILLERS:
            hub.stop_server(lease.server.user, lease.server.name)
    assert hub.broker.waiting() == []
    assert {lease.server.user for lease in hub.broker.open_leases()} <= set(FILLERS)
    wait_for(lambda: not problems(hub.broker.store), "the books to be in order", timeout=5)


def assert_ended(hub: PayingHub, ticket: Ticket, outcome: str, reason: str) -> None:
    """One end, with its reason; nothing is left of the wait, and its member was told."""
    user = ticket.server.user
    now = wait_for(lambda: _ended(hub, ticket), f"the end of {user}'s ticket", timeout=SOON)
    assert (now.outcome, now.end_reason) == (outcome, reason)
    assert now.ended_at is not None and now.lease_id is None
    assert hub.broker.lease_of(ticket.server) is None
    [told] = [n for n in hub.broker.notifications.notices_of(user) if n.key.endswith(ticket.id)]
    assert told.kind is NoticeKind.TICKET_ENDED and reason.rstrip(".") in told.body


def _ended(hub: PayingHub, ticket: Ticket) -> Ticket | None:
    now = hub.broker.ticket(ticket.id)
    return now if now.outcome else None


def assert_only_one_in_line(hub: PayingHub, user: str) -> None:
    """Who was behind has moved up, and their page says so."""
    wait_for(lambda: users_in_line(hub) == [user], f"{user} to move up", timeout=SOON)
    url = f"users/{user}/server/progress"
    with hub.api("GET", url, stream=True, timeout=SOON) as stream:
        for line in stream.iter_lines():
            if b"You are the only one in line" in line:
                return
    raise AssertionError(f"{user}'s page does not say so")


def test_renamed(hub: PayingHub) -> None:
    dan, _ = line_up(hub, "dan", "eve")
    said = last_word(
        hub, "dan", lambda: hub.api("PATCH", "users/dan", json={"name": "dana"}).raise_for_status()
    )
    assert "Your place in line is gone: the member was renamed. Start the server again" in said
    assert_ended(hub, dan, "member_gone", "the member was renamed")
    assert_only_one_in_line(hub, "eve")
    # Under the new name they are as welcome as anybody.
    wait_for(lambda: hub.server("dana") is None, "the end of the old spawn", timeout=SOON)
    assert hub.spawn("dana", {"gpus": 1}).ok
    wait_for(lambda: users_in_line(hub) == ["eve", "dana"], "dana's new place", timeout=SOON)


def test_removed(hub: PayingHub) -> None:
    """JupyterHub by itself cannot remove a member whose spawn is pending."""
    one, _ = line_up(hub, "fay", "gil")
    hub.spawn("fay", {"gpus": 1}, "second")
    wait_for(lambda: len(hub.broker.waiting()) == 3, "the second server's ticket", timeout=SOON)
    two = next(t for t in hub.broker.waiting() if t.server == ServerRef("fay", "second"))

    def remove() -> None:
        answer = hub.api("DELETE", "users/fay")
        assert answer.status_code == 204, answer.text

    said = last_word(hub, "fay", remove)
    assert "Your place in line is gone: the member was removed." in said
    for ticket in (one, two):
        assert hub.broker.ticket(ticket.id).outcome == "member_gone", "by the time it is answered"
        assert_ended(hub, ticket, "member_gone", "the member was removed")
    assert hub.api("GET", "users/fay").status_code == 404
    assert_only_one_in_line(hub, "gil")


@pytest.mark.parametrize("how", ["left", "gone"])
def test_the_group_that_the_environment_needs(hub: PayingHub, how: str) -> None:
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


def test_waited_too_long(hub: PayingHub) -> None:
    jon, _ = line_up(hub, "jon", "kim")

    def age() -> None:
        with hub.broker.store.write() as connection:
            asked = jon.created_at - timedelta(days=TICKET_DAYS, seconds=1)
            connection.execute(
                sa.update(tickets).where(tickets.c.id == jon.id).values(created_at=asked)
            )

    said = last_word(hub, "jon", age)
    assert f"Your place in line is gone: it waited for {TICKET_DAYS} days." in said
    assert_ended(hub, jon, "expired", f"it waited for {TICKET_DAYS} days")
    assert_only_one_in_line(hub, "kim")


def test_cancelled_by_an_admin_in_another_process(hub: PayingHub) -> None:
    lea, _ = line_up(hub, "lea", "max")
    why = "an admin cancelled it: the course is over"
    end = hub.broker.end_ticket
    said = last_word(hub, "lea", lambda: end(lea.id, "cancelled", why, actor=ADMIN))
    assert f"Your place in line is gone: {why}." in said
    assert_ended(hub, lea, "cancelled", why)
    assert_only_one_in_line(hub, "max")


def test_a_server_that_fails_when_its_turn_has_come(hub: PayingHub) -> None:
    """It costs nothing, and the next one's turn comes at once."""
    [ned] = line_up(hub, "ned", environment="broken")
    line_up(hub, "ola")
    said = last_word(hub, "ned", lambda: hub.stop_server("ada"))
    assert "Your server did not start" in said and "Nothing was charged." in said
    hub.wait_server("ola", timeout=SOON)
    [failed] = hub.broker.leases_of("member:ned")
    assert failed.state is LeaseState.ENDED and failed.charged == 0
    assert failed.ticket_id == ned.id and hub.broker.ticket(ned.id).outcome == "granted"
    account = hub.broker.ledger.account("member:ned")
    assert (account.balance, account.held) == (100_000_000, 0)
    [lease] = hub.broker.leases_of("member:ola")
    assert failed.ended_at is not None and lease.uuids == failed.uuids
    assert lease.granted_at >= failed.ended_at
    assert ticket_of(hub, "ned") is None, "a start that failed does not come back"
