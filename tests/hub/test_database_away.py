"""A database that is locked, gone, or changed by others. Real: hubs, proxies, accounting services,
a Docker Engine, SQLite and PostgreSQL."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import requests

from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import LeaseState
from gpuspawner.ledger.rules import owed
from gpuspawner.queue.models import Ticket
from tests.support.brokers import open_services, problems
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import GPUHub, assert_in_words, error_on, message_of, refused_in_time
from tests.support.page_text import text_of
from tests.support.paying_hub import PayingHub
from tests.support.postgres import PrivatePostgres
from tests.support.processes import wait_for
from tests.support.tickets import CONFIG as LINE
from tests.support.tickets import COUNTED, fill, line_up, looks
from tests.support.visitor import Visitor

GRANT = 100_000
SENTENCE = "Database unavailable. No changes were made. Try again in a moment."

CONFIG = f"""
c.JupyterHub.tornado_settings = {{"slow_spawn_timeout": 60}}  # whoever asks hears how it ended
c.GPURates.by_model = {{"*": 3600}}  # a credit a second
c.GPUCredits.opening_grant = {GRANT}

async def wait_for_slow_members(spawner):
    import asyncio
    import os
    while spawner.user.name.startswith("slow") and not os.path.exists("go-on"):
        await asyncio.sleep(0.02)

c.Spawner.pre_spawn_hook = wait_for_slow_members

import gpuspawner.db.engine
gpuspawner.db.engine.BUSY_SECONDS = 8.0  # of patience with a lock: it has to be seen by us
"""


@pytest.fixture(scope="module")
def hub(hubs: None, engine: PrivateEngine, images: Any, folder: Path) -> Iterator[GPUHub]:
    """Two devices, on SQLite."""
    with GPUHub(folder / "hub", engine, CONFIG, fleet="2xT4") as hub:
        yield hub
    engine.clean()


def pending(hub: GPUHub, member: str) -> bool:
    """Whether the Hub has begun with a start of this member's."""
    server = hub.server(member)
    return server is not None and server["pending"] == "spawn"


def test_start_fails_cleanly_on_a_locked_database(hub: GPUHub, member: str) -> None:
    hub.spawn_and_wait("bystander", {"gpus": 1})
    hub.browser_of(member)
    hub.spawn_and_wait(member, {"environment": "cpu"})
    hub.stop_server(member)
    before = hub.records()
    with hub.locked():
        answer: list[requests.Response] = []
        asking = threading.Thread(target=lambda: answer.append(hub.spawn(member, {"gpus": 1})))
        asking.start()
        wait_for(lambda: pending(hub, member), "the start to begin")
        assert hub.api("GET", "/").ok and hub.get("bystander", "env").ok
        assert asking.is_alive(), "the hub goes on for everybody else"
        asking.join()
        assert (answer[0].status_code, message_of(answer[0])) == (503, SENTENCE)
        page = hub.open_page(member, "/hub/spawn")
        assert page.ok and "Your balance" in page.text, "reading goes on"
    assert hub.records() == before
    assert len(hub.containers()) == 1, "the bystander's"
    hub.spawn_and_wait(member, {"gpus": 1})
    hub.stop_server(member)
    hub.stop_server("bystander")


def test_start_cancelled_during_lock_leaves_no_lease(hub: GPUHub, member: str) -> None:
    """The grant that comes after all is given back at once."""
    hub.api("POST", f"users/{member}")
    asking = threading.Thread(target=lambda: hub.spawn(member, {"gpus": 1}))
    with hub.locked():
        asking.start()
        wait_for(lambda: pending(hub, member), "the start to begin")
        stopping = threading.Thread(target=lambda: hub.api("DELETE", f"users/{member}/server"))
        stopping.start()
        cancelled = f"Interrupting spawner {member}, pending spawn"
        wait_for(lambda: cancelled in hub.log_text(), "the Hub to hear of the stop")
    asking.join()
    stopping.join()
    wait_for(lambda: hub.server(member) is None, "the stop")
    wait_for(lambda: not hub.open_leases(member), "the release")
    assert [lease.charged for lease in hub.leases(member)] in ([], [0])
    assert not hub.containers()


def test_database_locked_after_grant_fails_the_start(hub: GPUHub) -> None:
    member = "slow-one"
    hub.api("POST", f"users/{member}")
    answer: list[requests.Response] = []
    asking = threading.Thread(target=lambda: answer.append(hub.spawn(member, {"gpus": 1})))
    asking.start()
    wait_for(lambda: hub.open_leases(member), "the grant")
    with hub.locked():
        (hub.folder / "go-on").touch()
        asking.join()
        assert (answer[0].status_code, message_of(answer[0])) == (503, SENTENCE)
        assert hub.server(member) is None
    # What could not be written down is settled when it is in the way.
    assert not hub.containers()
    hub.spawn_and_wait(member, {"gpus": 1})
    newest, older = hub.leases(member)
    assert older.state is LeaseState.ENDED and older.charged == 0
    assert newest.state is LeaseState.RUNNING and len(hub.taken()) == 1
    hub.stop_server(member)


def test_stop_on_locked_database_is_charged_exactly(
    hub: GPUHub, engine: PrivateEngine, member: str
) -> None:
    hub.spawn_and_wait(member, {"gpus": 1})
    with hub.locked():
        before = datetime.now(timezone.utc)
        hub.api("DELETE", f"users/{member}/server").raise_for_status()
        wait_for(lambda: not hub.containers(), "the container's end")
        after = datetime.now(timezone.utc)
        wait_for(lambda: hub.server(member) is None, "the hub to show it stopped", timeout=30)
    assert hub.open_leases(member), "its end is not written down yet"
    hub.spawn_and_wait(member, {"gpus": 1})
    _, older = hub.leases(member)
    assert older.state is LeaseState.ENDED and older.ended_at is not None
    give_or_take = timedelta(seconds=0.25)
    assert before - give_or_take < older.ended_at < after + give_or_take
    assert older.charged == owed(older.rate, older.started_at, older.ended_at)
    hub.stop_server(member)


def test_server_does_not_start_after_its_lease_ended(hub: GPUHub) -> None:
    """Whoever ended it, the device may be somebody else's by now."""
    services = open_services(hub.database_url, device_source="simulated:2xT4")
    (hub.folder / "go-on").unlink(missing_ok=True)  # of the test before
    with ThreadPoolExecutor(1) as threads:
        hub.api("POST", "users/slow-two").raise_for_status()
        ask = {"json": {"gpus": 1}, "timeout": 120}
        asking = threads.submit(hub.api, "POST", "users/slow-two/server", **ask)
        [lease] = wait_for(lambda: hub.open_leases("slow-two"), "the lease")
        services.leases.release(lease.id, reason="released by an admin")
        (hub.folder / "go-on").touch()
        answer = asking.result()
    assert answer.status_code == 500
    assert message_of(answer) == (
        "Your server did not start: its lease was ended before it answered. Nothing was charged."
    )
    assert hub.server("slow-two") is None and hub.containers() == [] and hub.taken() == {}
    assert hub.balance("slow-two") == GRANT * MICRO
    hub.spawn_and_wait("anna", {"gpus": 2})
    assert problems(services.store) == []
    hub.stop_server("anna")
    services.store.close()


# Members in the queue, and pages.


IMPATIENT = """
import gpuspawner.db.engine
gpuspawner.db.engine.BUSY_SECONDS = 1.0  # of patience with a lock, to save time here
"""

SOON = 40.0
"""Seconds for what takes a few, on a machine with other things to do."""

MANY = 40
"""Connections that the service tries to make in more than three rounds of its charges: the other
duties take turns with them, and make half a dozen in the time between two of them."""


@contextmanager
def asked_in_vain(port: int) -> Iterator[list[int]]:
    """Whoever connects to this port is sent away, and gets a place in the list."""
    times: list[int] = []
    with socket.create_server(("127.0.0.1", port)) as listener:

        def send_away() -> None:
            with suppress(OSError):
                while True:
                    caller, address = listener.accept()
                    times.append(address[1])
                    caller.close()

        thread = threading.Thread(target=send_away, daemon=True)
        thread.start()
        yield times
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_lock_and_outage_keep_sessions_and_tickets(
    hubs: None, tmp_path: Path, postgres: PrivatePostgres
) -> None:
    """Whoever asks reads a sentence, who runs runs, who waits waits, and the service says once
    that its database is away."""
    url = postgres.migrated_database()
    config = LINE + COUNTED + IMPATIENT
    # Whoever asks is answered 202 after so long, and not before the refusal.
    config += 'c.JupyterHub.tornado_settings = {"slow_spawn_timeout": 5}\n'
    with PayingHub(tmp_path / "hub", config, database_url=url) as hub:
        fill(hub, "ada", "bob", "cleo")
        dan, eve, fay = line_up(hub, "dan", "eve", "fay")
        with hub.services.store.write():  # nobody else can write
            _trouble(hub, stops=("fay",))
            wait_for(lambda: _charge_lines(hub), "the service to say so")
        _left(hub, fay)
        wait_for(lambda: len(_charge_lines(hub)) == 2, "the charges", timeout=10)

        assert hub.page("ada").ok
        hub.json("ada", "me").raise_for_status()
        gus = Visitor(hub.url, "gus", session=hub.login("gus"))
        gus.get("/hub/spawn")  # the first visit opens the account
        with postgres.halted():
            _is_said_everywhere(hub, gus)
            _trouble(hub, stops=("eve", "ada"))
            with asked_in_vain(postgres.port) as times:
                wait_for(lambda: len(times) >= MANY, "many rounds in vain", timeout=60)
        wait_for(lambda: hub.page("ada").ok, "the page")
        assert (
            hub.services.queue.tickets_of("gus")
            == hub.services.leases.of_account("member:gus")
            == []
        )
        _goes_on(hub, dan, eve)
        wait_for(lambda: _charge_lines(hub)[-1].endswith("well again"), "the charges", timeout=10)
        said = [line.partition(".")[0] for line in _charge_lines(hub)]
        assert said == ["Charges: Database unavailable", "Charges: all is well again"] * 2
        traceback = re.search(r'File ".*/gpuspawner/(service|web)/', hub.log_text())
        assert not traceback, "the service says it in words"
        hub.stop_server("bob")
        [lease] = hub.services.leases.of_account("member:bob")
        assert lease.ended_at is not None
        assert lease.charged == owed(lease.rate, lease.started_at, lease.ended_at)
        assert hub.services.ledger.member("bob").balance == 100 * MICRO - lease.charged


def _charge_lines(hub: PayingHub) -> list[str]:
    """What the service has said of its charges."""
    return [line for line in hub.service_lines() if line.startswith("Charges: ")]


def _is_said_everywhere(hub: PayingHub, member: Visitor) -> None:
    """By REST, on the form, on the service's pages and as its JSON; and the hub answers."""
    for options in ({"gpus": 1}, {"gpus": 0}):
        refused = hub.spawn(member.name, options)
        assert (refused.status_code, message_of(refused)) == (503, SENTENCE)
    page = refused_in_time(lambda: member.post("/hub/spawn", {"gpus": "1"}))
    assert_in_words(page.text)
    assert page.status_code == 503 and SENTENCE in error_on(page.text)
    form = member.get("/hub/spawn")
    assert form.ok and SENTENCE in text_of(form.text)
    home = member.get("/hub/home")
    assert home.ok and SENTENCE in text_of(home.text)
    page = hub.page("ada")
    assert page.status_code == 503
    assert "Database unavailable. No changes were made. Try again in a moment" in page.text
    answer = hub.json("ada", "me")
    assert (answer.status_code, answer.json()["error"]) == (503, "store_unavailable")
    assert hub.get("bob", "").ok, "who runs, runs"


def _trouble(hub: PayingHub, stops: Iterable[str]) -> None:
    """Who waits waits on, who leaves may leave, and the hub answers everybody."""
    for user in stops:
        hub.api("DELETE", f"users/{user}/server").raise_for_status()
    enough = looks(hub) + 3

    def has_looked() -> bool:
        """Whether the hub has tried the line some times; meanwhile it answers."""
        assert hub.api("GET", "/").ok
        return looks(hub) >= enough

    wait_for(has_looked, "looks at a line that cannot be read", timeout=SOON)
    server = hub.server("dan")
    assert server is not None and server["pending"] == "spawn"
    for user in stops:
        wait_for(lambda user=user: hub.server(user) is None, f"{user}'s stop", timeout=SOON)


def _goes_on(hub: PayingHub, dan: Ticket, eve: Ticket) -> None:
    """Once the database is back, what happened meanwhile is written, and the line goes on."""
    hub.wait_server("dan", timeout=SOON)
    [lease] = hub.services.leases.of_account("member:dan")
    assert lease.ticket_id == dan.id
    _left(hub, eve)
    assert hub.services.queue.waiting() == []
    wait_for(lambda: not problems(hub.services.store), "the books to be in order", timeout=10)


def _left(hub: PayingHub, ticket: Ticket) -> None:
    """Wait until it is written that this member left the line, and see that they got nothing."""
    user = ticket.server.user
    ended = wait_for(lambda: _if_ended(hub, ticket), f"{user}'s leaving", timeout=SOON)
    assert (ended.outcome, ended.end_reason) == ("cancelled", "the start was stopped")
    assert hub.server(user) is None
    assert hub.services.leases.of_account(f"member:{user}") == []


def _if_ended(hub: PayingHub, ticket: Ticket) -> Ticket | None:
    now = hub.services.queue.ticket(ticket.id)
    return now if now.outcome else None
