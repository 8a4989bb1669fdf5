"""Accounts that run dry while hub and service are killed. Real here: JupyterHub, proxy, the
accounting service, kill -9; servers are local processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
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

GRACE = 3
"""Seconds of grace, unless a test says otherwise."""

Start = Callable[..., PayingHub]


@pytest.fixture
def start(hubs: None, tmp_path: Path) -> Iterator[Start]:
    """A hub whose GPUs cost a credit a second; warnings come 5 minutes and a minute before."""
    hubs: list[PayingHub] = []

    def start(credits: float, policy: object = "stop", grace: int = GRACE) -> PayingHub:
        config = f"""
c.GPUCredits.opening_grant = {credits}
c.GPUCredits.grace_seconds = {grace}
c.GPUCredits.when_exhausted = {{"*": {policy!r}}}
c.GPUCredits.warn_minutes = [5, 1]
c.GPUCredits.hook = {[sys.executable, "-c", KEEP, str(tmp_path / "told")]!r}
"""
        hubs.append(PayingHub(tmp_path / "hub", config, external_proxy=True))
        hubs[0].start()
        return hubs[0]

    yield start
    for hub in hubs:
        found = problems(hub.broker.store)
        hub.stop()
        assert found == []


def kill_all(hub: PayingHub) -> None:
    hub.kill9(services=True)
    hub.start()


def heard(hub: PayingHub) -> list[str]:
    """The events that the hook heard of, in order."""
    file = hub.folder.parent / "told"
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else []
    return [f"{line['event']} {line['minutes']:g}" for line in lines]


def told(hub: PayingHub, user: str = "ada") -> list[str]:
    kinds = (NoticeKind.CREDITS_LOW, NoticeKind.STOPPED)
    notices = [
        notice for notice in hub.broker.notifications.notices_of(user) if notice.kind in kinds
    ]
    return [notice.title.partition(" until ")[0] for notice in reversed(notices)]


def ended(hub: PayingHub, lease: Lease) -> Lease:
    def look() -> Lease | None:
        now = hub.broker.lease(lease.id)
        return now if now.state is LeaseState.ENDED else None

    settled = wait_for(look, "the end of the lease", timeout=SOON)
    assert settled.ended_at
    assert settled.charged + settled.waived == owed(
        settled.rate, settled.started_at, settled.ended_at
    )
    wait_for(lambda: hub.server("ada") is None, "the Hub to know")
    return settled


ALL = [
    "Your credits last",
    "Your credits have run out",
    "Your server is stopped: the credits have run out",
]


def test_killed_at_the_warning_in_the_grace_and_at_the_stop(start: Start) -> None:
    """Each is told once, and the server is stopped in the end."""
    hub = start(12, grace=10)
    lease = hub.start_server("ada", gpus=1)
    wait_for(lambda: told(hub), "the warning", timeout=SOON)
    kill_all(hub)
    warned = wait_for(lambda: hub.broker.lease(lease.id).warned_at, "the grace", timeout=SOON)
    assert (warned - lease.started_at).total_seconds() >= 12
    hub.kill_service()
    wait_for(lambda: hub.broker.lease(lease.id).outcome, "the order", timeout=90)
    kill_all(hub)
    settled = ended(hub, lease)
    assert (settled.outcome, settled.end_reason) == ("credits", "the credits ran out")
    assert (settled.ended_at - warned).total_seconds() >= 10
    assert told(hub) == ALL
    assert hub.broker.ledger.member("ada").balance == 12 * MICRO - settled.charged


def test_an_overdraft_holds_though_nobody_is_there_to_stop_the_server(start: Start) -> None:
    hub = start(4, {"overdraft": 5})
    lease = hub.start_server("ada", gpus=1)
    wait_for(lambda: hub.broker.lease(lease.id).warned_at, "the overdraft", timeout=SOON)
    refused = hub.spawn("ada", {"gpus": 1}, "another")
    assert refused.status_code == 402
    assert "does not cover this" in refused.text
    hub.kill9(services=True)
    beyond = lease.started_at + timedelta(seconds=14)
    wait_for(lambda: hub.broker.clock() >= beyond, "a time far beyond the bound")
    hub.start()
    settled = ended(hub, lease)
    assert settled.outcome == "credits"
    assert hub.broker.ledger.member("ada").balance == -5 * MICRO
    assert settled.charged == 9 * MICRO
    assert settled.waived >= 5 * MICRO
    assert told(hub)[-2:] == ALL[1:]
    assert heard(hub)[-1] == "stop 0"


def test_a_planned_session_ends_first(start: Start) -> None:
    hub = start(5, "session")
    lease = hub.start_server("ada", gpus=1, hours=0.25)
    warned = wait_for(lambda: hub.broker.lease(lease.id).warned_at, "its word", timeout=SOON)
    hub.kill_service()
    assert "goes on until its session ends at" in hub.broker.notifications.notices_of("ada")[0].body
    assert hub.spawn("ada", {"gpus": 1}, "another").status_code == 402
    hub.wait_pages()
    over = warned + timedelta(seconds=GRACE)
    wait_for(lambda: hub.broker.clock() > over, "the end of the grace")
    hub.wait_rounds(1, "credits", "sessions")
    assert hub.server("ada") is not None
    assert hub.broker.lease(lease.id).outcome == ""
    wait_for(lambda: "dry 0" in heard(hub), "what the killed service had yet to tell", timeout=SOON)
    assert "stop 0" not in heard(hub)


def test_each_event_is_heard_once(start: Start) -> None:
    hub = start(1000, grace=1)
    lease = hub.start_server("ada", gpus=1)
    expected: list[str] = []
    for seconds, event in ((240, "low 5"), (50, "low 1"), (2, "dry 0")):
        leave(hub, seconds)
        expected.append(event)
        wait_for(lambda: heard(hub)[: len(expected)] == expected, event, timeout=SOON)
    ended(hub, lease)
    wait_for(lambda: len(heard(hub)) > 3, "the hook", timeout=SOON)
    assert heard(hub) == [*expected, "stop 0"]


def leave(hub: PayingHub, seconds: int) -> None:
    """Take credits away: what is left lasts for so long."""
    balance = hub.broker.ledger.member("ada").balance
    hub.broker.ledger.grant("member:ada", seconds * MICRO - balance, actor="kim", reason="a test")
