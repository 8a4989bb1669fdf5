"""A second hub on one database. Real: hubs, proxies, accounting services, SQLite, kill -9; servers
are local."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import requests

from gpuspawner.leases.models import ServerRef
from tests.support.gpu_hub import assert_in_words, message_of
from tests.support.paying_hub import PayingHub
from tests.support.preloaded import PRELOADED
from tests.support.processes import REPO, wait_for
from tests.support.tickets import CONFIG, assert_books, fill, line_up, users_in_line

SOON = 40.0
"""Seconds for what takes a few, on a machine with other things to do."""

ANOTHER = "Another hub is using this database, and only one hub can grant GPUs from it."
NOT_THE_OWNER = "The servers in this hub's database belong to another hub"


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
