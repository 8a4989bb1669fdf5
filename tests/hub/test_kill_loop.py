"""A hub killed at every point of a spawn. Real: hub, proxy, accounting service, Docker Engine."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import requests

from gpuspawner.core.units import MICRO
from gpuspawner.db.engine import Store
from gpuspawner.engines.base import LABEL_LEASE
from gpuspawner.leases.models import Lease, LeaseState
from tests.support.brokers import problems
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import GPUHub
from tests.support.processes import free_port, wait_for
from tests.support.tier import SOAK, Rounds

CONFIG = """
c.Broker.gpu_rates = {{"*": 3600}}  # a credit a second
c.Broker.opening_grant = 1_000_000
c.Accounting.charge_seconds = 1
c.Accounting.reconcile_seconds = 1
import gpuspawner; gpuspawner.add_services(c, url="http://127.0.0.1:{port}")
"""

EXACT = 0.5
"""Seconds between what is charged and what the engine's events say, at the most."""


@pytest.fixture
def hub(hubs: None, engine: PrivateEngine, images: Any, tmp_path: Path) -> Iterator[GPUHub]:
    """Three devices; the proxy is a process of its own, as in production."""
    config = CONFIG.format(port=free_port())
    with GPUHub(tmp_path / "hub", engine, config, fleet="3xT4", external_proxy=True) as hub:
        yield hub
    engine.clean()


def ask_and_go(hub: GPUHub, member: str) -> threading.Thread:
    """Ask for a server with a device, and do not wait for the answer: the hub may die first."""

    def ask() -> None:
        with contextlib.suppress(requests.RequestException):
            hub.api("POST", f"users/{member}/server", json={"gpus": 1})

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


def answers(hub: GPUHub, member: str) -> bool:
    """Whether the member's server is reached through the proxy, hub or no hub."""
    return requests.get(f"{hub.server_url(member)}/env", timeout=120).status_code == 200


def leaks(hub: GPUHub) -> list[str]:
    """Where leases, containers, the Hub's servers and the devices do not say the same."""
    open_leases = {lease.id: lease for lease in hub.open_leases()}
    found = []
    alive: Counter[str] = Counter()
    for container in hub.containers():
        lease_id = container["Labels"][LABEL_LEASE]
        alive[lease_id] += container["State"] == "running"
        if lease_id not in open_leases:
            found.append(f"a container ({container['State']}) of lease {lease_id}, which is over")
    for lease in open_leases.values():
        server = hub.server(lease.server.user, lease.server.name)
        if alive[lease.id] != 1:
            found.append(f"lease {lease.id} of {lease.server} has {alive[lease.id]} containers")
        if server is None or not server["ready"]:
            found.append(f"lease {lease.id} of {lease.server}, which the Hub has as {server}")
        if lease.state is not LeaseState.RUNNING:
            found.append(f"lease {lease.id} of {lease.server} is {lease.state.value}")
    for user in hub.api("GET", "users?state=active").json():
        holders = {lease.server.user for lease in open_leases.values()}
        if user["name"] not in holders:
            found.append(f"{user['name']} has a server and no lease")
    leased = {(place.uuid, lease) for place, lease in hub.taken().items()}
    if leased != {(d.uuid, lease.id) for lease in open_leases.values() for d in lease.devices}:
        found.append(f"devices taken: {leased}")
    return found


def assert_charged_exactly(hub: GPUHub, engine: PrivateEngine, since: float) -> None:
    """A server that answered or was adopted paid from its start to its end, and others nothing."""
    lived = engine.lifetimes(since)
    for lease in [*hub.leases("victim"), *hub.leases("witness")]:
        if lease.started_at is None:
            assert lease.charged == 0, "a server that never answered costs nothing"
        elif lease.id in lived:
            seconds = lease.charged / MICRO
            assert seconds == pytest.approx(lived[lease.id], abs=EXACT), lease


def settle(hub: GPUHub, what: str) -> None:
    """Wait until nothing leaks; what leaks for good is named."""
    try:
        wait_for(lambda: not leaks(hub), "order", timeout=30, interval=0.2)
    except TimeoutError:
        pytest.fail(f"{what}: {'; '.join(leaks(hub))}")


def stop(hub: GPUHub, member: str) -> None:
    if hub.server(member) is not None:
        hub.stop_server(member)


def time_of_a_spawn(hub: GPUHub, member: str) -> float:
    """Seconds from asking until the server is ready."""
    durations = []
    for _ in range(3):
        began = time.monotonic()
        hub.spawn_and_wait(member, {"gpus": 1})
        durations.append(time.monotonic() - began)
        hub.stop_server(member)
    return median(durations)


def became_of(hub: GPUHub, before: set[str]) -> str:
    """What a spawn under way at the kill came to."""
    new: list[Lease] = [lease for lease in hub.leases("victim") if lease.id not in before]
    if not new:
        return "no lease yet"
    [lease] = new
    return "adopted" if lease.state is LeaseState.RUNNING else f"settled: {lease.end_reason}"


def test_nothing_leaks_wherever_the_hub_is_killed(
    hub: GPUHub, engine: PrivateEngine, rounds: Rounds, chance: random.Random
) -> None:
    hub.spawn_and_wait("bystander", {"gpus": 1})
    [bystander] = hub.open_leases()
    lasts = time_of_a_spawn(hub, "victim")
    store = Store(hub.database_url)
    kills = rounds(50)
    outcomes: Counter[str] = Counter()

    for number in range(kills):
        before = {lease.id for lease in hub.leases("victim")}
        since = time.time()
        moment = (number + chance.random()) / kills * 1.2 * lasts
        said = f"killed {moment:.3f} s into a spawn of {lasts:.3f} s"
        asking = ask_and_go(hub, "victim")
        time.sleep(moment)
        hub.kill9(services=chance.random() < 0.5)
        asking.join(timeout=120)
        assert answers(hub, "bystander"), said

        hub.start()
        # The first spawn after a start compares everything before it gets anything.
        hub.spawn_and_wait("witness", {"gpus": 1})
        settle(hub, said)
        assert problems(store) == [], said
        outcome = became_of(hub, before)
        outcomes[outcome] += 1
        if outcome == "adopted":
            [lease] = hub.open_leases("victim")
            assert hub.environment_of("victim")["NVIDIA_VISIBLE_DEVICES"] == lease.uuids[0]
            assert len(hub.device_nodes("victim")) == 1
        assert answers(hub, "bystander") and answers(hub, "witness"), said
        [still] = hub.open_leases("bystander")
        assert (still.id, still.state) == (bystander.id, LeaseState.RUNNING)

        for member in ("victim", "witness"):
            stop(hub, member)
        settle(hub, f"{said}, after the stops")
        assert_charged_exactly(hub, engine, since)
        assert len(hub.taken()) == 1, "the other devices are free again"

    print(f"a spawn took {lasts:.2f} s; killed {kills} times:", dict(outcomes))
    if SOAK:
        assert outcomes["adopted"] and len(outcomes) > 1, "some were too early, some were not"
    store.close()
