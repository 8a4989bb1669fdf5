"""A database that is locked or gone. Real: hub, proxy, Docker Engine, SQLite and PostgreSQL."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import requests

from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import LeaseState
from gpuspawner.ledger.rules import owed
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import GPUHub, assert_in_words, error_on, message_of, text_of
from tests.support.postgres import PrivatePostgres
from tests.support.processes import wait_for

GRANT = 100_000
SENTENCE = "The database does not answer. Try again in a moment; nothing was changed."

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
gpuspawner.db.engine.BUSY_SECONDS = 3.0  # of patience with a lock, to save time here
"""


@pytest.fixture(scope="module")
def hub(
    hubs: None, engine: PrivateEngine, images: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GPUHub]:
    """Two devices, on SQLite."""
    with GPUHub(tmp_path_factory.mktemp("locked") / "hub", engine, CONFIG, fleet="2xT4") as hub:
        yield hub
    engine.clean()


@pytest.fixture
def member(request: pytest.FixtureRequest) -> str:
    """A member whose account no other test has touched."""
    return re.sub(r"[^a-z0-9]+", "-", request.node.name).strip("-")


def pending(hub: GPUHub, member: str) -> bool:
    """Whether the Hub has begun with a start of this member's."""
    server = hub.server(member)
    return server is not None and server["pending"] == "spawn"


def test_a_start_while_the_database_is_locked(hub: GPUHub, member: str) -> None:
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


def test_cancelled_while_it_waits_for_the_database(hub: GPUHub, member: str) -> None:
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


def test_locked_between_the_grant_and_the_start(hub: GPUHub) -> None:
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


def test_a_stop_while_the_database_is_locked(
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


def test_the_database_is_gone(
    hubs: None, engine: PrivateEngine, images: Any, postgres: PrivatePostgres, tmp_path: Path
) -> None:
    url = postgres.fresh_database()
    with GPUHub(tmp_path / "hub", engine, CONFIG, fleet="2xT4", database_url=url) as hub:
        hub.spawn_and_wait("member1", {"gpus": 1})
        hub.browser_of("member2")
        hub.spawn_and_wait("member2", {"environment": "cpu"})
        hub.stop_server("member2")
        before = hub.records()
        postgres.halt()
        try:
            for options in ({"gpus": 1}, {"environment": "cpu"}):
                refused = hub.spawn("member2", options)
                assert (refused.status_code, message_of(refused)) == (503, SENTENCE)
            page = hub.send_refused_form("member2", {"gpus": "1"})
            assert_in_words(page.text)
            assert page.status_code == 503 and SENTENCE in error_on(page.text)
            page = hub.open_page("member2", "/hub/spawn")
            assert page.ok and SENTENCE in text_of(page.text)
            assert hub.get("member1", "env").ok, "who runs, runs"
            assert hub.api("GET", "/").ok
        finally:
            postgres.start()
        assert hub.records() == before
        hub.spawn_and_wait("member2", {"gpus": 1})
        hub.stop_server("member1")
        [lease] = hub.leases("member1")
        assert lease.charged == owed(lease.rate, lease.started_at, lease.ended_at or before)
        assert hub.balance("member1") == GRANT * MICRO - lease.charged
        hub.stop_server("member2")
    engine.clean()
