"""Accounts that run dry, also while hub and service are killed. Real here: JupyterHub, proxy, the
accounting service, kill -9; servers are local processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease, LeaseState
from gpuspawner.ledger.rules import owed
from gpuspawner.notifications.models import NoticeKind
from tests.support.brokers import problems
from tests.support.paying_hub import PayingHub
from tests.support.processes import wait_for

KEEP = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read())"
SOON = 60.0
"""Seconds for what takes a few."""

GRACE = timedelta(seconds=5)

CONFIG = f"""
c.GPUCredits.grace_seconds = {GRACE.seconds}
c.GPUCredits.when_exhausted = {{
    "*": "stop", "overdrawing": {{"overdraft": 5}}, "planning": "session",
}}
c.GPUCredits.warn_minutes = [5, 1]
c.GPUNotifications.hook = {[sys.executable, "-c", KEEP, "told"]!r}
c.JupyterHub.load_groups = {{
    "overdrawing": {{"users": ["oda"]}}, "planning": {{"users": ["pia"]}},
}}
"""


@pytest.fixture(scope="module")
def module_hub(hubs: None, folder: Path) -> Iterator[PayingHub]:
    """A hub whose GPUs cost a credit a second; warnings come 5 minutes and a minute before."""
    with PayingHub(folder / "hub", CONFIG, external_proxy=True) as hub:
        yield hub


@pytest.fixture
def hub(module_hub: PayingHub) -> Iterator[PayingHub]:
    """The same; each test has a member of its own, and the books are in order after it."""
    yield module_hub
    for lease in module_hub.services.leases.open_leases():
        module_hub.stop_server(lease.server.user, lease.server.name)
    assert problems(module_hub.services.store) == []


def kill_all(hub: PayingHub) -> None:
    hub.kill9(services=True)
    hub.start()


def heard(hub: PayingHub, user: str) -> list[str]:
    """What the hook heard of a member's credits, in order."""
    file = hub.folder / "told"
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else []
    mine = [line for line in lines if line["user"] == user and "credits" in line["event"]]
    return [f"{line['event']} {line['minutes'] or 0:g}" for line in mine]


def told(hub: PayingHub, user: str) -> list[str]:
    titles = hub.told(user, NoticeKind.CREDITS_LOW, NoticeKind.STOPPED)
    return [title.partition(" until ")[0] for title in reversed(titles)]


def warned(hub: PayingHub, lease: Lease) -> Lease:
    """The lease, once its member was told that the account is dry."""

    def look() -> Lease | None:
        now = hub.services.leases.get(lease.id)
        return now if now.warned_at else None

    return wait_for(look, "the warning", timeout=SOON)


def ended(hub: PayingHub, lease: Lease) -> Lease:
    """The lease, once it is settled; its charge must be exact."""
    settled = hub.wait_end(lease)
    assert settled.ended_at
    assert settled.charged + settled.waived == owed(
        settled.rate, settled.started_at, settled.ended_at
    )
    wait_for(lambda: hub.server(lease.server.user) is None, "the Hub to know")
    return settled


ALL = [
    "Your credits last",
    "Your credits have run out",
    "Your server was stopped: the credits have run out",
]


def test_server_stops_after_credits_and_grace_run_out(hub: PayingHub) -> None:
    lease = hub.start_with(3, "ada", gpus=1)
    dry = warned(hub, lease)
    assert dry.warned_at is not None
    assert (dry.warned_at - lease.started_at).total_seconds() >= 3
    assert hub.server("ada") is not None, "the grace had only begun"
    assert "Your credits have run out" in hub.page("ada").text

    settled = ended(hub, lease)
    assert settled.ended_at - dry.warned_at >= GRACE
    assert hub.services.ledger.member("ada").balance == 3 * MICRO - settled.charged
    assert hub.services.monitoring.overview().free == 3
    stop = "Stopping ada: the credits ran out"
    wait_for(lambda: stop in hub.service_lines(), "a line of it")
    assert sum("ada has no credits left" in line for line in hub.service_lines()) == 1

    refused = hub.spawn("ada", {"gpus": 1})
    assert refused.status_code == 402
    assert "You can start without a GPU" in refused.text
    free = hub.start_server("ada", gpus=0)
    hub.wait_rounds(1, "charges", "credits", "sessions")
    assert hub.services.leases.get(free.id).state is LeaseState.RUNNING


def test_credits_granted_during_grace_keep_the_server(hub: PayingHub) -> None:
    lease = hub.start_with(3, "bob", gpus=1)
    warned_at = warned(hub, lease).warned_at
    hub.set_balance("bob", 1000)
    wait_for(lambda: hub.services.leases.get(lease.id).warned_at is None, "it to be taken back")
    wait_for(lambda: hub.services.clock() > warned_at + GRACE, "the end of the grace")
    hub.wait_rounds(1, "charges", "credits", "sessions")
    assert hub.services.leases.get(lease.id).state is LeaseState.RUNNING
    assert hub.server("bob") is not None
    hub.stop_server("bob")
    ended(hub, lease)


def test_exhausted_account_is_stopped_despite_kills(hub: PayingHub) -> None:
    """Each is told once, and the server is stopped in the end."""
    lease = hub.start_with(12, "cleo", gpus=1)
    wait_for(lambda: told(hub, "cleo"), "the warning", timeout=SOON)
    kill_all(hub)
    warned_at = warned(hub, lease).warned_at
    assert (warned_at - lease.started_at).total_seconds() >= 12
    hub.kill_service()
    wait_for(lambda: hub.services.leases.get(lease.id).outcome, "the order", timeout=90)
    kill_all(hub)
    settled = ended(hub, lease)
    assert (settled.outcome, settled.end_reason) == ("credits", "the credits ran out")
    assert settled.ended_at - warned_at >= GRACE
    assert told(hub, "cleo") == ALL
    assert hub.services.ledger.member("cleo").balance == 12 * MICRO - settled.charged


def test_overdraft_limit_holds_while_the_hub_is_down(hub: PayingHub) -> None:
    lease = hub.start_with(4, "oda", gpus=1)
    warned(hub, lease)
    refused = hub.spawn("oda", {"gpus": 1}, "another")
    assert refused.status_code == 402
    assert "does not cover this" in refused.text
    hub.kill9(services=True)
    beyond = lease.started_at + timedelta(seconds=14)
    wait_for(lambda: hub.services.clock() >= beyond, "a time far beyond the bound")
    hub.start()
    settled = ended(hub, lease)
    assert settled.outcome == "credits"
    assert hub.services.ledger.member("oda").balance == -5 * MICRO
    assert settled.charged == 9 * MICRO
    assert settled.waived >= 5 * MICRO
    assert told(hub, "oda")[-2:] == ALL[1:]
    wait_for(lambda: heard(hub, "oda")[-1:] == ["credits_gone_stopped 0"], "the hook", timeout=SOON)


def test_planned_session_outlasts_the_credit_grace(hub: PayingHub) -> None:
    lease = hub.start_with(5, "pia", gpus=1, hours=0.25)
    warned_at = warned(hub, lease).warned_at
    hub.kill_service()
    assert (
        "continues until its session ends at"
        in hub.services.notifications.notices_of("pia")[0].body
    )
    assert hub.spawn("pia", {"gpus": 1}, "another").status_code == 402
    hub.wait_pages()
    wait_for(lambda: hub.services.clock() > warned_at + GRACE, "the end of the grace")
    hub.wait_rounds(1, "credits", "sessions")
    assert hub.server("pia") is not None
    assert hub.services.leases.get(lease.id).outcome == ""

    def dry() -> bool:
        return "credits_gone 0" in heard(hub, "pia")

    wait_for(dry, "what the killed service had yet to tell", timeout=SOON)
    assert "credits_gone_stopped 0" not in heard(hub, "pia")


def test_each_credit_event_is_reported_once(hub: PayingHub) -> None:
    lease = hub.start_with(1000, "eve", gpus=1)
    expected: list[str] = []
    for seconds, event in ((240, "credits_low 5"), (50, "credits_low 1"), (2, "credits_gone 0")):
        hub.set_balance("eve", seconds)
        expected.append(event)
        wait_for(lambda: heard(hub, "eve")[: len(expected)] == expected, event, timeout=SOON)
    ended(hub, lease)
    wait_for(lambda: len(heard(hub, "eve")) > 3, "the hook", timeout=SOON)
    assert heard(hub, "eve") == [*expected, "credits_gone_stopped 0"]
