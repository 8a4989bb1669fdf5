"""A hub that is killed and comes back. Real: hub, proxy beside it, Docker Engine, SQLite."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import requests

from gpuspawner.core.units import MICRO
from gpuspawner.db.engine import Store
from gpuspawner.engines.base import LABEL_LEASE
from gpuspawner.engines.docker import DockerEngine
from gpuspawner.leases.models import Lease, LeaseState
from gpuspawner.leases.reconciliation import Release
from gpuspawner.ledger.rules import owed
from tests.support import images
from tests.support.brokers import services_on
from tests.support.engine import PrivateEngine
from tests.support.gate import Gate
from tests.support.gpu_hub import CATALOG, GPUHub, assert_in_words, message_of
from tests.support.processes import wait_for
from tests.support.tier import Rounds

GRANT = 100_000

CONFIG = f"""
c.GPURates.by_model = {{"*": 3600}}  # a credit a second
c.GPUCredits.opening_grant = {GRANT}
c.Spawner.poll_interval = 1
c.Spawner.http_timeout = 5
"""

ALL = {"gpus": 2}
"""Every GPU: who gets them, gets them because nobody else has one."""

PENDING = f"""
  - slug: silent
    image: {images.SILENT}
    devices: {{{{default: 1, max: 2}}}}
  - slug: hanging
    image: 127.0.0.1:{{registry}}/gpuspawner/nowhere:1
    devices: {{{{default: 1, max: 2}}}}
  - slug: hasty
    image: {images.INSTANT}
    devices: {{{{default: 1, max: 2}}}}
    spawner_override: {{{{start_timeout: 2}}}}
"""
"""Environments whose spawn stays pending: the server never answers, or its image never comes; and
one whose starts may not take long."""

STILL_FINDING_OUT = "The hub is still checking which GPUs are in use. Try again in a moment."
WAITING = "Checking which GPUs are in use: waiting for the container engine"


@pytest.fixture(scope="module")
def module_hub(
    hubs: None, engine: PrivateEngine, images: Any, gate: Gate, silent_registry: int, folder: Path
) -> Iterator[GPUHub]:
    """Its proxy is a process of its own."""
    hub = GPUHub(
        folder / "hub",
        engine,
        CONFIG,
        fleet="2xT4",
        catalog=CATALOG + PENDING.format(registry=silent_registry),
        docker_host=gate.url,
        external_proxy=True,
    )
    with hub:
        yield hub
    engine.clean()


@pytest.fixture
def hub(module_hub: GPUHub) -> GPUHub:
    """The same for one test: up, and without the servers of the tests before."""
    if module_hub._hub is None:
        module_hub.start()
    for user in module_hub.api("GET", "users?state=active").json():
        module_hub.stop_server(user["name"])
    wait_for(lambda: not module_hub.open_leases(), "the release of everything")
    return module_hub


def answers(hub: GPUHub, member: str) -> bool:
    """Whether the member's server is reached through the proxy, hub or no hub."""
    return requests.get(f"{hub.server_url(member)}/env", timeout=120).status_code == 200


def assert_paid_exactly(hub: GPUHub, lease: Lease) -> None:
    """Rate times time for this lease, and nothing else on the account."""
    [now] = [other for other in hub.leases(lease.server.user) if other.id == lease.id]
    assert now.state is LeaseState.ENDED and now.ended_at is not None
    assert now.charged == owed(now.rate, now.started_at, now.ended_at)
    others = sum(o.charged for o in hub.leases(lease.server.user) if o.id != lease.id)
    assert hub.balance(lease.server.user) == GRANT * MICRO - now.charged - others


def test_running_servers_survive_a_hub_kill(hub: GPUHub, member: str) -> None:
    for user in (member, f"{member}-two"):
        hub.spawn_and_wait(user, {"gpus": 1})
    before = hub.open_leases()
    containers = {container["Id"] for container in hub.containers()}
    hub.kill9()
    assert answers(hub, member) and answers(hub, f"{member}-two")
    hub.start()
    for user in (member, f"{member}-two"):
        assert hub.wait_server(user, timeout=20)["ready"]
        assert answers(hub, user)
    # Adopted: the same leases, the same containers, and nothing for anybody else.
    assert {c["Id"] for c in hub.containers()} == containers
    refused = hub.spawn(f"{member}-three", {"gpus": 1, "wait": "no"})
    assert refused.status_code == 409 and message_of(refused).startswith("All 2 GPUs are in use")
    assert [lease.id for lease in hub.open_leases()] == [lease.id for lease in before]
    assert all(lease.state is LeaseState.RUNNING for lease in hub.open_leases())
    # They cost what they always did, the time without a hub included.
    for lease in before:
        hub.stop_server(lease.server.user)
        assert_paid_exactly(hub, lease)
    hub.spawn_and_wait(f"{member}-three", {"gpus": 1})


def test_hub_leaves_servers_of_other_hubs_alone(
    hubs: None, hub: GPUHub, engine: PrivateEngine, tmp_path: Path
) -> None:
    """A first start ends what nobody owns; a lease of another store is somebody's."""
    hub.spawn_and_wait("anna", {"gpus": 1})
    [lease] = hub.open_leases()
    with GPUHub(tmp_path / "other", engine, fleet="2xT4", name="other hub") as other:
        other.spawn_and_wait("bert", {"gpus": 1})
        assert {c["Labels"]["gpuspawner.member"] for c in hub.containers()} == {"anna", "bert"}
        assert hub.get("anna", "env").status_code == 200
        assert hub.open_leases() == [lease]
        other.stop_server("bert")
    assert hub.get("anna", "env").status_code == 200
    hub.stop_server("anna")


@pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])
def test_renamed_member_keeps_the_running_server(hub: GPUHub, member: str, restart: bool) -> None:
    hub.spawn_and_wait(member, {"gpus": 1})
    [lease] = hub.open_leases()
    [container] = hub.containers()
    new = f"{member}-renamed"
    hub.api("PATCH", f"users/{member}", json={"name": new}).raise_for_status()
    if restart:
        hub.kill9()
        hub.start()
        hub.spawn_and_wait("passer-by", {"environment": "cpu"})
        hub.stop_server("passer-by")
    wait_for(lambda: hub.open_leases()[0].server.user == new, "the new name in the lease")
    [followed] = hub.open_leases()
    assert (followed.id, followed.account) == (lease.id, f"member:{member}")
    assert [each["Id"] for each in hub.containers()] == [container["Id"]]
    hub.stop_server(new)
    wait_for(lambda: not hub.open_leases(), "the release")
    assert not hub.containers()
    assert hub.balance(member) < GRANT * MICRO, "who started it paid"
    hub.spawn_and_wait(f"{member}-next", ALL)


def test_servers_ended_while_hub_is_down_are_settled(
    hub: GPUHub, member: str, engine: PrivateEngine
) -> None:
    """One was killed, one is removed."""
    killed, removed = f"{member}-killed", f"{member}-removed"
    for user in (killed, removed):
        hub.spawn_and_wait(user, {"gpus": 1})
    leases = {lease.server.user: lease for lease in hub.open_leases()}
    hub.kill9()
    before = datetime.now(timezone.utc)
    engine.client.kill(leases[killed].engine_ref)
    engine.client.remove_container(leases[removed].engine_ref, force=True)
    wait_for(lambda: hub.containers()[0]["State"] == "exited", "the container's end")
    after = datetime.now(timezone.utc)
    hub.start()
    hub.spawn_and_wait(f"{member}-two", ALL)
    for user, lease in leases.items():
        wait_for(lambda user=user: hub.server(user) is None, "the hub to show it stopped")
        [ended] = hub.leases(user)
        assert ended.ended_at is not None
        assert before < ended.ended_at < after, "and not when the hub was back"
        assert_paid_exactly(hub, lease)
    assert [c["Labels"][LABEL_LEASE] for c in hub.containers()] == [hub.open_leases()[0].id]


def test_container_of_a_settled_lease_is_removed(
    hub: GPUHub, member: str, engine: PrivateEngine
) -> None:
    """Killed during a stop, the hub leaves the lease to the accounting service.

    The container of a second lease is gone, and somebody else's has its name by now: that one
    stays.
    """
    other = f"{member}-two"
    for user in (member, other):
        hub.spawn_and_wait(user, {"gpus": 1})
    leases = {lease.server.user: lease for lease in hub.open_leases()}
    hub.kill9()
    for lease in leases.values():
        engine.client.stop(lease.engine_ref, timeout=10)
    found = {"docker": DockerEngine(lambda: engine.client).sightings()}
    with services_on(hub.database_url) as services:
        settled = services.leases.reconcile(found, servers=None)
    assert [type(outcome) for outcome in settled] == [Release, Release]
    replaced = leases[other].engine_ref
    name = engine.client.inspect_container(replaced)["Name"].lstrip("/")
    engine.client.remove_container(replaced)
    foreign = engine.client.create_container(images.INSTANT, ["true"], name=name)["Id"]
    engine.client.start(foreign)
    engine.client.wait(foreign)
    hub.start()
    wait_for(lambda: not hub.containers(), "the removal of the container")
    for user, lease in leases.items():
        wait_for(lambda u=user: hub.server(u) is None, "the hub to see that the server is gone")
        assert_paid_exactly(hub, lease)
    assert engine.client.inspect_container(foreign)["Name"] == f"/{name}"
    engine.client.remove_container(foreign)


def test_starts_interrupted_by_a_kill_cost_nothing(hub: GPUHub, member: str) -> None:
    """With the container up but not its server, and before there is a container."""
    members = {f"{member}-{environment}": environment for environment in ("silent", "hanging")}
    for user, environment in members.items():
        hub.ask_and_go("POST", user, {"gpus": 1, "environment": environment})
    wait_for(lambda: len(hub.open_leases()) == 2, "the leases")
    wait_for(lambda: any(c["State"] == "running" for c in hub.containers()), "a container")
    hub.kill9()
    assert len(hub.open_leases()) == 2
    hub.start()
    for user in members:
        wait_for(lambda u=user: not hub.open_leases(u), "the orphan to be settled", timeout=20)
        assert hub.server(user) is None
        assert [lease.charged for lease in hub.leases(user)] == [0]
        assert hub.balance(user) == GRANT * MICRO
    assert not hub.containers()
    hub.spawn_and_wait(f"{member}-two", ALL)
    for user in members:
        hub.spawn_and_wait(user, {"environment": "cpu"})


def test_adopted_server_is_charged_from_its_start(
    hub: GPUHub, engine: PrivateEngine, member: str
) -> None:
    """There is no accounting service here: the hub itself sees that the server answers."""
    since = time.time()
    hub.ask_and_go("POST", member, {"gpus": 1})
    wait_for(hub.open_leases, "the lease")
    store = Store(hub.database_url)
    with store.write():  # so that the hub cannot write that the server answered
        wait_for(lambda: any(c["State"] == "running" for c in hub.containers()), "a container")
        hub.kill9()
    store.close()
    assert [lease.state for lease in hub.open_leases()] == [LeaseState.GRANTED]
    hub.start()
    hub.wait_server(member, timeout=30)
    wait_for(lambda: hub.open_leases()[0].state is LeaseState.RUNNING, "the adoption")
    [lease] = hub.open_leases()
    assert lease.answered_at is not None and lease.started_at is not None
    assert lease.started_at < lease.answered_at
    hub.stop_server(member)
    assert_paid_exactly(hub, lease)
    [ended] = hub.leases(member)
    lived = engine.lifetimes(since)[lease.id]
    assert ended.charged / MICRO == pytest.approx(lived, abs=0.5)


def refused_page(hub: GPUHub, member: str) -> str:
    """The page of a start that was refused; nothing while that is still being cleared away."""
    page = hub.open_page(member, f"/hub/spawn-pending/{member}")
    return page.text if STILL_FINDING_OUT in page.text else ""


def test_hub_grants_nothing_until_the_engine_answers(hub: GPUHub, member: str, gate: Gate) -> None:
    """A start waits for the engine as long as any start may take, and is then refused."""
    hub.spawn_and_wait(member, {"gpus": 1})
    [lease] = hub.open_leases()
    hub.browser_of(f"{member}-two")
    hub.kill9()
    gate.shut()
    try:
        hub.start()
        before = hub.records()
        for options in ({"environment": "hasty", "gpus": 1}, {"environment": "hasty", "gpus": 0}):
            refused = hub.spawn(f"{member}-two", options)
            assert (refused.status_code, message_of(refused)) == (503, STILL_FINDING_OUT)
            hub.send_form(f"{member}-two", options)
            page = wait_for(lambda: refused_page(hub, f"{member}-two"), "the page that says it")
            assert_in_words(page)
        assert hub.records() == before, "nothing was granted, and nothing released"
        assert answers(hub, member), "who was running goes on"
    finally:
        gate.open()
    hub.spawn_and_wait(f"{member}-two", {"gpus": 1})
    assert {open_lease.server.user for open_lease in hub.open_leases()} == {
        member,
        f"{member}-two",
    }
    hub.stop_server(member)
    assert_paid_exactly(hub, lease)


def wait_told(hub: GPUHub, member: str) -> None:
    """Until the page of the member's pending start says what it waits for."""
    wait_for(lambda: (hub.server(member) or {}).get("pending") == "spawn", "the start")
    said = next(event for event in hub.events(member) if WAITING in event.get("message", ""))
    assert_in_words(said["message"])


def tickets(hub: GPUHub, member: str) -> list[tuple[str, str]]:
    """The member's tickets, newest first, and how they ended."""
    with services_on(hub.database_url) as services:
        return [(ticket.id, ticket.outcome) for ticket in services.queue.tickets_of(member)]


def queued_behind(hub: GPUHub, member: str, other: str) -> str:
    """Start a server on all GPUs and let another member queue; return that one's ticket."""
    hub.spawn_and_wait(member, ALL)
    hub.ask_and_go("POST", other, {"gpus": 1})
    [(ticket, _)] = wait_for(lambda: tickets(hub, other), "the ticket")
    return ticket


def test_starts_wait_for_an_engine_that_comes_up_later(
    hub: GPUHub, member: str, gate: Gate
) -> None:
    """As after a reboot of the machine. One start waited in the queue before the restart; two are
    new."""
    resumed, new, cpu = (f"{member}-{who}" for who in ("resumed", "new", "cpu"))
    ticket = queued_behind(hub, member, resumed)
    hub.kill9()
    gate.shut()
    try:
        hub.start()
        before = hub.records()
        for user, options in (
            (resumed, {"gpus": 1}),
            (new, {"gpus": 1}),
            (cpu, {"environment": "cpu"}),
        ):
            hub.ask_and_go("POST", user, options)
            wait_told(hub, user)
        assert hub.records() == before, "nothing was granted, and nothing released"
    finally:
        gate.open()
    hub.wait_server(cpu)
    assert hub.open_leases(resumed) == hub.open_leases(new) == []
    hub.stop_server(member)
    for user in (resumed, new):
        hub.wait_server(user)
    assert tickets(hub, resumed) == [(ticket, "granted")]
    assert [lease.ticket_id for lease in hub.open_leases(resumed)] == [ticket]


def test_start_stopped_before_the_comparison_leaves_nothing(
    hub: GPUHub, member: str, gate: Gate
) -> None:
    """Its ticket ends as well: otherwise the accounting service would begin the start again."""
    resumed, new = f"{member}-resumed", f"{member}-new"
    ticket = queued_behind(hub, member, resumed)
    hub.kill9()
    gate.shut()
    try:
        hub.start()
        for user in (resumed, new):
            hub.ask_and_go("POST", user, {"gpus": 1})
            wait_told(hub, user)
        for user in (resumed, new):
            hub.stop_server(user)
        assert tickets(hub, resumed) == [(ticket, "cancelled")]
        assert tickets(hub, new) == []
    finally:
        gate.open()
    hub.spawn_and_wait("passer-by", {"environment": "cpu"})
    assert {lease.server.user for lease in hub.open_leases()} == {member, "passer-by"}


def test_hub_shuts_down_during_an_image_pull(hub: GPUHub, member: str) -> None:
    """A service manager's stop is not held up by what may take an hour."""
    hub.ask_and_go("POST", member, ALL | {"environment": "hanging"})
    wait_for(lambda: hub.open_leases(member), "the lease")
    assert any("Pulling" in event["message"] for event in islice(hub.events(member), 3))
    process = hub._hub
    assert process is not None
    process.send_signal(signal.SIGINT)
    wait_for(lambda: process.poll() is not None, "the hub to end by itself", timeout=40)
    hub.shut_down()  # nothing is left to do
    assert not hub.open_leases()
    assert [lease.charged for lease in hub.leases(member)] == [0]
    assert "could not be pulled" not in hub.log_text(), "it waited for the pull to fail"


def test_kill_before_release_keeps_the_exact_charge(hub: GPUHub, member: str) -> None:
    """The container is removed, and nobody has written down when: the engine still knows."""
    hub.spawn_and_wait(member, ALL)
    [lease] = hub.open_leases()
    with hub.locked():
        before = datetime.now(timezone.utc)
        hub.ask_and_go("DELETE", member)
        wait_for(lambda: not hub.containers(), "the container's removal")
        after = datetime.now(timezone.utc)
        hub.kill9()
    assert hub.open_leases()
    hub.start()
    hub.spawn_and_wait(f"{member}-two", ALL)
    [ended] = hub.leases(member)
    assert ended.ended_at is not None and before < ended.ended_at < after
    assert_paid_exactly(hub, lease)


def test_hub_killed_during_stop_recovers_consistently(
    hub: GPUHub, member: str, rounds: Rounds, chance: random.Random
) -> None:
    """Afterwards the server runs or has ended, and hub, leases and containers say the same."""
    hub.spawn_and_wait("bystander", {"gpus": 1})
    [bystander] = hub.open_leases()
    for number in range(rounds(20)):
        if hub.server(member) is None:
            hub.spawn_and_wait(member, {"gpus": 1})
        [lease] = hub.open_leases(member)
        hub.ask_and_go("DELETE", member)
        time.sleep(chance.uniform(0.0, 0.7))
        hub.kill9()
        hub.start()
        # Whoever asks first has everything put in order before they get anything.
        hub.spawn_and_wait("passer-by", {"environment": "cpu"})
        wait_for(lambda: _fits_together(hub, member), f"order after round {number}", timeout=30)
        hub.stop_server("passer-by")
        assert answers(hub, "bystander")
        assert bystander.id in {other.id for other in hub.open_leases()}
        if not hub.open_leases(member):
            assert_paid_exactly(hub, lease)
    hub.stop_server("bystander")
    assert_paid_exactly(hub, bystander)


def _fits_together(hub: GPUHub, member: str) -> bool:
    """Hub, leases and containers say the same of this member, and nothing is left over."""
    server = hub.server(member)
    if server is not None and not server["ready"]:
        return False
    leases = {lease.id for lease in hub.open_leases(member)}
    labels = [c["Labels"] for c in hub.containers() if c["State"] == "running"]
    mine = {label[LABEL_LEASE] for label in labels if label["gpuspawner.member"] == member}
    return leases == mine and (server is not None) == bool(leases)
