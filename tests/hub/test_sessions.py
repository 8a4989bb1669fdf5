"""Sessions that end. Real here: JupyterHub, proxy, accounting service, SQLite, kill -9; members'
servers are quick local processes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from gpuspawner.db import schema as db_schema
from gpuspawner.leases.models import Lease, LeaseState
from gpuspawner.ledger.rules import owed
from gpuspawner.notifications.models import NoticeKind
from tests.support.gpu_hub import message_of
from tests.support.pages import words
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
GPUSpawnerMixin.await_claim, no_shows.QUERY_SECONDS = await_and_say_so, 0.2
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


def no_longer_watched(hub: PayingHub) -> list[str]:
    """Whom the hub no longer waits for; it makes the file when it says so for the first time."""
    file = hub.folder / "watched"
    return file.read_text().split() if file.exists() else []


def wait_told(hub: PayingHub, user: str, count: int) -> None:
    """Wait until the member has heard so many times that the session ends."""
    wait_for(
        lambda: len(hub.told(user, NoticeKind.SESSION_ENDS)) == count, f"warning {count} of {user}"
    )


def test_session_ends_on_time_and_is_charged_exactly(hub: PayingHub) -> None:
    """It may be over before anybody has looked at it."""
    endless = hub.start_server("bob", gpus=0)
    assert endless.seconds is None
    assert hub.spawn("anna").ok
    of_anna = wait_for(lambda: hub.services.leases.of_account("member:anna"), "anna's lease")
    done = hub.wait_end(of_anna[0])
    assert (done.seconds, done.outcome) == (7, "session_end")
    assert done.started_at is not None and done.ends_at is not None
    assert done.end_reason.startswith("its time was over at ")
    assert done.ended_at is not None and done.ended_at >= done.ends_at
    assert done.charged == owed(done.rate, done.started_at, done.ended_at)
    wait_for(lambda: hub.server("anna") is None, "the Hub's word", timeout=20)
    assert hub.told("anna", NoticeKind.SESSION_ENDS) == [], "it was shorter than any warning"
    assert hub.told("anna", NoticeKind.STOPPED) == [
        "Your server was stopped: its time limit was reached"
    ]
    assert "stopped: its time was over" in words(hub.page("anna"))
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
        file = hub.folder / "hook.json"  # which the first event makes
        lines = file.read_text().splitlines() if file.exists() else []
        events = [json.loads(line) for line in lines]
        some = [(each["event"], each["minutes"]) for each in events if each["user"] == "dora"]
        return list(dict.fromkeys(some))  # a killed service may have it told twice

    wait_for(lambda: len(heard()) > 2, "the hook")
    assert heard() == [("session_ends", 30), ("session_ends", 10), ("session_over", None)]


def test_only_who_connects_in_time_keeps_the_gpu(hub: PayingHub) -> None:
    """Eve gets the GPU that she waited for and connects; Ada gets it after her and does not."""
    (hub.folder / "claim-minutes").write_text("10")
    hub.start_server("bob", **T4)
    hub.spawn("eve", T4)
    wait_for(hub.services.queue.waiting, "eve's ticket", timeout=15)
    hub.stop_server("bob")
    hub.wait_server("eve", timeout=30)
    lease = hub.lease_of("eve")
    assert lease is not None and lease.claim_seconds == 600 and lease.up_since is not None
    # A server of Jupyter's reports what its member does; this one lets the test do it.
    at = (lease.up_since + timedelta(seconds=2)).isoformat()
    body = {"last_activity": at, "servers": {"": {"last_activity": at}}}
    hub.api("POST", "users/eve/activity", json=body).raise_for_status()
    wait_for(lambda: hub.services.leases.get(lease.id).claimed_at, "the claim", timeout=15)

    # The time to come goes by, and the hub waits for nobody any more.
    age(hub, lease, timedelta(minutes=20))
    wait_for(lambda: "eve" in no_longer_watched(hub), "the end of the hub's watch")
    assert hub.services.sessions.no_show(lease.id).outcome == ""
    hub.wait_rounds(1, "sessions")
    assert hub.services.leases.get(lease.id).state is LeaseState.RUNNING

    before = hub.services.ledger.open_account("ada").balance
    hub.spawn("ada", T4)
    (ticket,) = wait_for(hub.services.queue.waiting, "ada's ticket", timeout=15)
    (hub.folder / "claim-minutes").write_text("0.05")
    hub.stop_server("eve")
    granted = wait_for(lambda: hub.services.queue.ticket(ticket.id).lease_id, "ada's turn")
    done = hub.wait_end(hub.services.leases.get(granted))
    assert (done.claim_seconds, done.outcome, done.charged) == (3, "no_show", 0)
    assert done.end_reason == "no one connected within 0.05 min of its start"
    wait_for(lambda: hub.server("ada") is None, "the Hub's word", timeout=20)
    assert "Nothing was charged." in hub.services.notifications.notices_of("ada")[0].body
    assert hub.services.ledger.member("ada").balance == before


def refusal(hub: PayingHub, user: str, **options: Any) -> str:
    """Why a start is refused, whether at once or on the page that waits."""
    answer = hub.spawn(user, options)
    return hub.failure(user) if answer.status_code in (201, 202) else message_of(answer)


def test_session_hours_are_limited_by_environment_and_group(hub: PayingHub) -> None:
    message = refusal(hub, "fay", environment="long", hours=13)
    assert "Long work allows 12 for one session. Write 12 or less." in message
    message = refusal(hub, "fay", environment="long", hours="soon")
    assert "The field 'hours' must be a number of hours from 0.25 to 8760" in message
    guest = hub.login("guest")

    def offered() -> list[str]:
        form = guest.get(f"{hub.url}/hub/spawn", timeout=120).text
        return re.findall(r'<option value="\d+" data-length="(\d+ h)" *>', form)

    assert offered() == ["1 h", "2 h", "4 h", "8 h", "12 h"]
    hub.api("POST", "groups/guests/users", json={"users": ["guest"]}).raise_for_status()
    assert offered() == ["1 h", "2 h"]
    message = refusal(hub, "guest", environment="long", hours=3)
    assert "your limit is 2 for one session" in message
    assert hub.start_server("guest", environment="long", hours=2).seconds == 2 * 3600
