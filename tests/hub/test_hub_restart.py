"""A hub that is killed and comes back. Real: hub, proxy beside it, Docker Engine, SQLite."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import requests

from gpuspawner.core.units import MICRO
from gpuspawner.db.engine import Store
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

GRANT = 100_000

CONFIG = f"""
c.GPURates.by_model = {{"*": 3600}}  # a credit a second
c.GPUCredits.opening_grant = {GRANT}
c.Spawner.poll_interval = 1
c.Spawner.http_timeout = 15
import gpuspawner.spawners.mixin
gpuspawner.spawners.mixin.COMPARING = 240.0  # a start waits while the test looks at it
"""

GPUS = 6
ALL = {"gpus": GPUS}
"""Every GPU: who gets them, gets them because nobody else has one."""

PENDING = f"""
  - slug: silent
    image: {images.SILENT}
    devices: {{{{default: 1, max: 8}}}}
    spawner_override: {{{{http_timeout: 60}}}}
  - slug: hanging
    image: 127.0.0.1:{{registry}}/gpuspawner/nowhere:1
    devices: {{{{default: 1, max: 8}}}}
  - slug: hasty
    image: {images.INSTANT}
    devices: {{{{default: 1, max: 8}}}}
    spawner_override: {{{{start_timeout: 2}}}}
  - slug: told
    image: {images.INSTANT}
    devices: {{{{default: 1, max: 8}}}}
    spawner_override:
      http_timeout: 300
      cmd: [sh, -c, "until [ -e /tmp/go ]; do sleep 0.1; done; exec instant", "--"]
"""
"""Environments whose spawn stays pending: the server never answers, or its image never comes; one
whose starts may not take long; and one whose server answers as soon as it is told to."""

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
        fleet=f"{GPUS}xT4",
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


def answers_itself(engine: PrivateEngine, container: str) -> bool:
    """Whether the server in a container is reached at its own address."""
    networks = engine.client.inspect_container(container)["NetworkSettings"]["Networks"]
    [address] = [each["IPAddress"] for each in networks.values()]
    try:
        return requests.get(f"http://{address}:8888/", timeout=120).status_code > 0
    except requests.RequestException:
        return False


def running(hub: GPUHub) -> list[dict[str, Any]]:
    """The containers that run."""
    return [each for each in hub.containers() if each["State"] == "running"]


def assert_paid_exactly(hub: GPUHub, lease: Lease) -> None:
    """Rate times time for this lease, and nothing else on the account."""
    [now] = [other for other in hub.leases(lease.server.user) if other.id == lease.id]
    assert now.state is LeaseState.ENDED and now.ended_at is not None
    assert now.charged == owed(now.rate, now.started_at, now.ended_at)
    others = sum(o.charged for o in hub.leases(lease.server.user) if o.id != lease.id)
    assert hub.balance(lease.server.user) == GRANT * MICRO - now.charged - others


def test_restarted_hub_keeps_what_runs_and_settles_what_ended(
    hub: GPUHub, engine: PrivateEngine
) -> None:
    """Two servers run on, and one of their members is renamed. While the hub is down, two others
    are ended by hand and two by the accounting service, which also settles their leases: a kill
    during a stop leaves that to it. Somebody else's container has taken the name of the last.
    """
    members = ("stays", "was", "killed", "removed", "settled", "replaced")
    for user in members:
        hub.spawn_and_wait(user, {"gpus": 1})
    leases = {lease.server.user: lease for lease in hub.open_leases()}
    refs = {user: lease.engine_ref for user, lease in leases.items()}
    hub.api("PATCH", "users/was", json={"name": "renamed"}).raise_for_status()
    hub.kill9()
    assert answers(hub, "stays")

    before = datetime.now(timezone.utc)
    for user in ("settled", "replaced"):
        engine.client.stop(refs[user], timeout=10)
    found = {"docker": DockerEngine(lambda: engine.client).sightings()}
    with services_on(hub.database_url) as services:
        actions = services.leases.reconcile(found, servers=None)
    released = {action.lease.id for action in actions if isinstance(action, Release)}
    assert released == {leases["settled"].id, leases["replaced"].id}
    name = engine.client.inspect_container(refs["replaced"])["Name"].lstrip("/")
    engine.client.remove_container(refs["replaced"])
    foreign = engine.client.create_container(images.INSTANT, ["true"], name=name)["Id"]
    engine.client.start(foreign)
    engine.client.wait(foreign)
    between = datetime.now(timezone.utc)  # after the service saw them alive
    engine.client.kill(refs["killed"])
    engine.client.remove_container(refs["removed"], force=True)
    engine.client.wait(refs["killed"])
    after = datetime.now(timezone.utc)

    hub.start()
    assert hub.wait_server("stays", timeout=20)["ready"] and answers(hub, "stays")
    by_service, by_hand = (before, between), (between, after)
    ends = {"settled": by_service, "replaced": by_service, "killed": by_hand, "removed": by_hand}
    for user, (earliest, latest) in ends.items():
        wait_for(lambda user=user: hub.server(user) is None, "the hub to show it stopped")
        wait_for(lambda user=user: not hub.open_leases(user), "the settlement")
        [ended] = hub.leases(user)
        assert ended.ended_at is not None
        assert earliest < ended.ended_at < latest, f"{user}: and not when the hub was back"
        assert_paid_exactly(hub, leases[user])
    wait_for(lambda: len(hub.containers()) == 2, "the removal of the containers")
    assert engine.client.inspect_container(foreign)["Name"] == f"/{name}"
    engine.client.remove_container(foreign)

    # Adopted: the same leases, the same containers, and nothing of theirs for anybody else.
    assert {c["Id"] for c in hub.containers()} == {refs["stays"], refs["was"]}
    wait_for(lambda: hub.open_leases()[0].server.user != "was", "the new name in the lease")
    assert {(lease.id, lease.server.user, lease.account) for lease in hub.open_leases()} == {
        (leases["stays"].id, "stays", "member:stays"),
        (leases["was"].id, "renamed", "member:was"),
    }
    hub.spawn_and_wait("next", {"gpus": GPUS - 2})
    refused = hub.spawn("late", {"gpus": 1, "wait": "no"})
    assert refused.status_code == 409 and message_of(refused).startswith("All 6 GPUs are in use")
    # They cost what they always did, the time without a hub included.
    hub.stop_server("stays")
    assert_paid_exactly(hub, leases["stays"])
    hub.stop_server("renamed")
    assert hub.balance("was") < GRANT * MICRO, "who started it paid"


def test_hub_leaves_servers_of_other_hubs_alone(
    hubs: None, hub: GPUHub, engine: PrivateEngine, tmp_path: Path
) -> None:
    """A first start ends what nobody owns; a lease of another store is somebody's."""
    hub.spawn_and_wait("anna", {"gpus": 1})
    [lease] = hub.open_leases()
    with GPUHub(tmp_path / "other", engine, fleet=f"{GPUS}xT4", name="other hub") as other:
        other.spawn_and_wait("bert", {"gpus": 1})
        assert {c["Labels"]["gpuspawner.member"] for c in hub.containers()} == {"anna", "bert"}
        assert hub.get("anna", "env").status_code == 200
        assert hub.open_leases() == [lease]
        other.stop_server("bert")
    assert hub.get("anna", "env").status_code == 200
    hub.stop_server("anna")


def test_renamed_member_keeps_the_running_server(hub: GPUHub) -> None:
    hub.spawn_and_wait("ada", {"gpus": 1})
    [lease], [container] = hub.open_leases(), hub.containers()
    hub.api("PATCH", "users/ada", json={"name": "ada-renamed"}).raise_for_status()
    wait_for(lambda: hub.open_leases()[0].server.user == "ada-renamed", "the name in the lease")
    [followed] = hub.open_leases()
    assert (followed.id, followed.account) == (lease.id, "member:ada")
    assert [each["Id"] for each in hub.containers()] == [container["Id"]]
    hub.stop_server("ada-renamed")
    wait_for(lambda: not hub.open_leases(), "the release")
    assert not hub.containers()


def test_starts_interrupted_by_a_kill_are_adopted_or_cost_nothing(
    hub: GPUHub, engine: PrivateEngine
) -> None:
    """One before there is a container, one whose server has not answered, and one whose server
    has, without that being written down. There is no accounting service here: the hub itself sees
    that it answers."""
    lost = ("silent", "hanging")
    for user in lost:
        hub.ask_and_go("POST", user, {"gpus": 1, "environment": user})
    wait_for(lambda: len(hub.open_leases()) == 2, "the leases")
    wait_for(lambda: running(hub), "a container")
    hub.ask_and_go("POST", "answers", {"gpus": 1, "environment": "told"})
    wait_for(lambda: len(running(hub)) == 2, "its container")
    store = Store(hub.database_url)
    with store.write():  # so that the hub cannot write that the server answered
        container = hub.container_of("answers")
        engine.execute(container, ["touch", "/tmp/go"])
        wait_for(lambda: answers_itself(engine, container), "its answer")
        hub.kill9()
    store.close()
    assert [lease.state for lease in hub.open_leases()] == [LeaseState.GRANTED] * 3

    hub.start()
    for user in lost:
        wait_for(lambda u=user: not hub.open_leases(u), "the orphan to be settled", timeout=20)
        assert hub.server(user) is None
        assert [lease.charged for lease in hub.leases(user)] == [0]
        assert hub.balance(user) == GRANT * MICRO
    hub.wait_server("answers", timeout=30)
    wait_for(lambda: hub.open_leases()[0].state is LeaseState.RUNNING, "the adoption")
    [lease] = hub.open_leases()
    assert lease.answered_at is not None and lease.started_at is not None
    assert lease.started_at < lease.answered_at
    assert len(hub.containers()) == 1
    # The engine's own word of the start. Its events come later, on a busy machine much later.
    state = engine.client.inspect_container(hub.container_of("answers"))["State"]
    whole, _, fraction = state["StartedAt"].removesuffix("Z").partition(".")
    began = datetime.fromisoformat(f"{whole}.{fraction[:6]:0<6}+00:00")
    before = datetime.now(timezone.utc)
    hub.stop_server("answers")
    after = datetime.now(timezone.utc)
    assert_paid_exactly(hub, lease)
    [ended] = hub.leases("answers")
    assert ended.started_at is not None and ended.ended_at is not None
    assert abs(ended.started_at - began) <= timedelta(microseconds=1)
    assert before < ended.ended_at < after
    hub.spawn_and_wait("silent", {"environment": "cpu"})
    hub.spawn_and_wait("next", ALL)


def refused_page(hub: GPUHub, member: str) -> str:
    """The page of a start that was refused; nothing while that is still being cleared away."""
    page = hub.open_page(member, f"/hub/spawn-pending/{member}")
    return page.text if STILL_FINDING_OUT in page.text else ""


def wait_told(hub: GPUHub, member: str) -> None:
    """Until the page of the member's pending start says what it waits for."""
    wait_for(lambda: (hub.server(member) or {}).get("pending") == "spawn", "the start")
    said = next(event for event in hub.events(member) if WAITING in event.get("message", ""))
    assert_in_words(said["message"])


def tickets(hub: GPUHub, member: str) -> list[tuple[str, str]]:
    """The member's tickets, newest first, and how they ended."""
    with services_on(hub.database_url) as services:
        return [(ticket.id, ticket.outcome) for ticket in services.queue.tickets_of(member)]


def test_hub_grants_nothing_until_the_engine_answers(hub: GPUHub, gate: Gate) -> None:
    """As after a reboot of the machine. A start waits for the engine as long as any start may take,
    and is then refused. Two starts waited in the queue before the restart, three are new; two of
    the five are stopped before the comparison: their tickets end, or the accounting service would
    begin them again.
    """
    hub.spawn_and_wait("holder", ALL)
    [lease] = hub.open_leases()
    queued = {}
    for user in ("resumed", "given-up"):
        hub.ask_and_go("POST", user, {"gpus": 1})
        [(queued[user], _)] = wait_for(lambda user=user: tickets(hub, user), "the ticket")
    hub.browser_of("hasty")
    hub.kill9()
    gate.shut()
    try:
        hub.start()
        before = hub.records()
        for gpus in (1, 0):
            options = {"environment": "hasty", "gpus": gpus}
            refused = hub.spawn("hasty", options)
            assert (refused.status_code, message_of(refused)) == (503, STILL_FINDING_OUT)
            hub.send_form("hasty", options)
            page = wait_for(lambda: refused_page(hub, "hasty"), "the page that says it")
            assert_in_words(page)
        assert answers(hub, "holder"), "who was running goes on"
        for user in ("resumed", "given-up", "new", "new-given-up"):
            hub.ask_and_go("POST", user, {"gpus": 1})
            wait_told(hub, user)
        hub.ask_and_go("POST", "cpu", {"environment": "cpu"})
        wait_told(hub, "cpu")
        assert hub.records() == before, "nothing was granted, and nothing released"
        for user in ("given-up", "new-given-up"):
            hub.stop_server(user)
        assert tickets(hub, "given-up") == [(queued["given-up"], "cancelled")]
        assert tickets(hub, "new-given-up") == []
    finally:
        gate.open()
    hub.wait_server("cpu")
    assert {open_lease.server.user for open_lease in hub.open_leases()} == {"holder", "cpu"}
    hub.stop_server("holder")
    assert_paid_exactly(hub, lease)
    for user in ("resumed", "new"):
        hub.wait_server(user)
    assert tickets(hub, "resumed") == [(queued["resumed"], "granted")]
    [resumed] = hub.open_leases("resumed")
    assert resumed.ticket_id == queued["resumed"]
    assert {each.server.user for each in hub.open_leases()} == {"cpu", "resumed", "new"}


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
