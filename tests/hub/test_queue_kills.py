"""Hubs that fail while members wait. Real: hubs, proxies, accounting services, SQLite, kill -9;
servers are local."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest
import requests

from gpuspawner.leases.models import ServerRef
from gpuspawner.queue.models import Ticket
from tests.support.brokers import problems
from tests.support.gpu_hub import assert_in_words, message_of
from tests.support.paying_hub import PayingHub
from tests.support.preloaded import PRELOADED
from tests.support.processes import REPO, wait_for
from tests.support.tickets import CONFIG, fill, line_up, ticket_of, users_in_line
from tests.support.tier import SOAK, Rounds

SOON = 40.0
"""Seconds for what takes a few, on a machine with other things to do."""


ANOTHER = "Another hub is using this database, and only one hub can grant GPUs from it."


NOT_THE_OWNER = "The servers in this hub's database belong to another hub"


@pytest.fixture
def hub(hubs: None, tmp_path: Path) -> Iterator[PayingHub]:
    """Three GPUs; the proxy is a process of its own, as in production."""
    with PayingHub(tmp_path / "hub", CONFIG, external_proxy=True) as hub:
        yield hub


def refusal(hub: PayingHub, user: str) -> str:
    """Why a hub refuses a server, with or without a GPU."""

    def refused(gpus: int) -> list[requests.Response]:
        answer = hub.spawn(user, {"gpus": gpus})
        if answer.status_code not in (201, 202):
            return [answer]
        # JupyterHub did not wait for the refusal, which took more than a second.
        wait_for(lambda: hub.server(user) is None, "the end of the spawn")
        return []

    answers = [wait_for(partial(refused, gpus), "a refusal within a second")[0] for gpus in (1, 0)]
    for answer in answers:
        assert answer.status_code == 503, answer.text
        assert_in_words(answer.text)
    one, other = map(message_of, answers)
    assert one == other
    return one


def assert_books(hub: PayingHub) -> None:
    try:
        wait_for(lambda: not problems(hub.services.store), "the books to be in order", timeout=10)
    except TimeoutError:
        pytest.fail("; ".join(problems(hub.services.store)))


def test_second_hub_needs_a_takeover_to_use_the_store(
    hubs: None, tmp_path: Path, database_url: str
) -> None:
    one = PayingHub(tmp_path / "one", CONFIG, database_url=database_url, name="one")
    two = PayingHub(tmp_path / "two", CONFIG, database_url=database_url, name="two")
    with one, two:
        fill(one, "ada", "bob", "cleo")
        [dan] = line_up(one, "dan")
        told = refusal(two, "bert")
        assert told.startswith(ANOTHER) and "c." not in told, "what to do is in the log"
        assert "give this one its own database (c.GPUDatabase.url)" in two.log_text()
        # Nor does its service touch what it does not know.
        wait_for(
            lambda: any(ANOTHER in line for line in two.service_lines()), "its word", timeout=SOON
        )
        two.wait_rounds(1, "reconciliation", "sessions", "credits")
        assert [ticket.id for ticket in one.services.queue.waiting()] == [dan.id]
        assert len(one.services.leases.open_leases()) == 3 and users_in_line(one) == ["dan"]

        # The first one is killed. Its servers and its line stay its own, whatever the second does.
        one.kill9(services=True)
        before = [lease.id for lease in one.services.leases.open_leases()]
        assert refusal(two, "bert").startswith(NOT_THE_OWNER)
        two.wait_rounds(2, "reconciliation", "sessions", "credits", "members")
        assert any("gpuspawner takeover" in line for line in two.service_lines())
        assert [lease.id for lease in one.services.leases.open_leases()] == before
        assert [ticket.id for ticket in one.services.queue.waiting()] == [dan.id]

        # The same hub, back from a crash, goes on at once and without a command.
        one.start()
        assert one.spawn("ada-two", {"gpus": 0}).ok
        assert refusal(two, "bert").startswith(ANOTHER)
        assert {dan.id} == {ticket.id for ticket in one.services.queue.waiting()}

        # It is gone for good: an admin says that the second one goes on.
        one.kill9(services=True)
        take_over(two)
        lease = two.start_server("bert", gpus=0)
        assert lease.server == ServerRef("bert")
        tickets = one.services.queue
        outcome = wait_for(lambda: tickets.ticket(dan.id).outcome, "dan's end", timeout=SOON)
        assert outcome == "member_gone", "nobody at the other hub"
        one.start()
        assert refusal(one, "fay").startswith(ANOTHER)
        wait_for(
            lambda: [each.server.user for each in two.services.leases.open_leases()] == ["bert"],
            "the end of what the second hub does not know",
            timeout=SOON,
        )
        assert_books(two)


def take_over(hub: PayingHub) -> None:
    """As an admin does, in the hub's working directory."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO), "TZ": "UTC"}
    done = PRELOADED.run(["takeover", "--yes"], hub.folder, environment, answer="")
    assert done.returncode == 0, done.stderr


# The hub is killed.


def test_every_ticket_is_granted_once_despite_kills(
    hub: PayingHub, rounds: Rounds, chance: random.Random
) -> None:
    """While three servers stop, those who wait are granted theirs, and others come to the line."""
    kills = rounds(30)
    outcomes: Counter[str] = Counter()
    for number in range(kills):
        members = [f"{name}{number}" for name in ("dan", "eve", "fay", "gil", "hal")]
        fill(hub, "ada", "bob", "cleo")
        sure = line_up(hub, *members[:3])
        moment = (number + chance.random()) / kills * 3
        said = f"round {number}, killed after {moment:.3f} s"
        for user in ("ada", "bob", "cleo"):
            hub.ask_and_go("DELETE", user)
        for user in members[3:]:
            hub.ask_and_go("POST", user, {"gpus": 1})
        time.sleep(moment)
        hub.kill9(services=chance.random() < 0.5)

        tickets = _tickets(hub, members)
        assert {ticket.id for ticket in sure} <= tickets.keys(), f"{said}: a ticket is lost"
        outcomes[_stage(hub, tickets)] += 1
        hub.start()
        for user in ("ada", "bob", "cleo"):
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
