"""Each part killed at any point of a session. Real: hub, proxy, accounting service, Docker Engine,
SQLite and PostgreSQL."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import docker.errors
import pytest
import requests

from gpuspawner.core.units import MICRO
from gpuspawner.db.engine import Store
from gpuspawner.engines.base import LABEL_LEASE
from gpuspawner.leases.models import Lease, LeaseState
from tests.support.brokers import problems
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import GPUHub
from tests.support.postgres import PrivatePostgres
from tests.support.processes import free_port, wait_for
from tests.support.tier import SOAK, Rounds

CONFIG = """
c.GPURates.by_model = {{"*": 3600}}  # a credit a second
c.GPUCredits.opening_grant = 1_000_000
c.GPUCredits.charge_seconds = 1
c.Accounting.reconcile_seconds = 1
import gpuspawner; gpuspawner.add_services(c, url="http://127.0.0.1:{port}")
"""

EXACT = 0.5
"""Seconds between what is charged and what the engine's events say, at most."""


PARTS = ("hub", "service", "proxy", "database", "container")
PHASES = ("start", "run", "stop")
UP = "JupyterHub is now running"


@pytest.fixture
def hub(hubs: None, engine: PrivateEngine, images: Any, tmp_path: Path) -> Iterator[GPUHub]:
    """Three devices; the proxy is a process of its own, as in production."""
    config = CONFIG.format(port=free_port())
    with GPUHub(tmp_path / "hub", engine, config, fleet="3xT4", external_proxy=True) as hub:
        yield hub
    engine.clean()


@pytest.fixture
def hub_on_postgres(
    hubs: None, engine: PrivateEngine, images: Any, postgres: PrivatePostgres, tmp_path: Path
) -> Iterator[GPUHub]:
    """The same with its leases and credits in PostgreSQL."""
    config = CONFIG.format(port=free_port())
    options = {"fleet": "3xT4", "external_proxy": True}
    url = postgres.fresh_database()
    with GPUHub(tmp_path / "hub", engine, config, database_url=url, **options) as hub:
        yield hub
    engine.clean()
    postgres.drop(url)


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


def kill(part: str, hub: GPUHub, engine: PrivateEngine, postgres: PrivatePostgres) -> None:
    """Kill a part on the spot, and start it again as its own supervisor does."""
    if part == "hub":
        before = hub.log_text().count(UP)
        hub.kill9()
        hub.start()
        # JupyterHub ends if a service of it dies before it is up itself.
        wait_for(lambda: hub.log_text().count(UP) > before, "the hub to be up with its service")
    elif part == "service":
        hub.kill_services()
    elif part == "proxy":
        hub.kill_proxy()
    elif part == "database":
        postgres.halt(signal.SIGQUIT)  # as in a crash: nothing is written down any more
        postgres.start()
    else:
        for container in hub.containers():
            with contextlib.suppress(docker.errors.APIError):  # it does not run, or is gone
                engine.client.kill(container["Id"])


def is_at_rest(hub: GPUHub, member: str) -> bool:
    """Return True if the member's server is ready, or there is none, and nothing goes on."""
    try:
        server = hub.server(member)
    except requests.RequestException:  # the proxy is not back yet, or has no way to the hub
        return False
    return server is None or bool(server["ready"])


def test_sessions_are_charged_exactly_despite_any_kill(
    hub_on_postgres: GPUHub,
    engine: PrivateEngine,
    postgres: PrivatePostgres,
    rounds: Rounds,
    chance: random.Random,
) -> None:
    hub = hub_on_postgres
    lasts = time_of_a_spawn(hub, "victim")
    store = Store(hub.database_url)
    kills, charged = rounds(100), 0
    for number in range(kills):
        part, phase = PARTS[number % len(PARTS)], chance.choice(PHASES)
        since = time.time()
        asking = hub.ask_and_go("POST", "victim", {"gpus": 1})
        if phase != "start":
            asking.join(timeout=120)
            hub.wait_server("victim")
        if phase == "stop":
            asking = hub.ask_and_go("DELETE", "victim")
        moment = chance.uniform(0, 1.2 * lasts)
        said = f"{part} killed {moment:.3f} s into the {phase}, a start lasts {lasts:.3f} s"
        time.sleep(moment)
        kill(part, hub, engine, postgres)
        asking.join(timeout=120)
        wait_for(partial(is_at_rest, hub, "victim"), f"rest after {said}")
        settle(hub, said)
        stop(hub, "victim")
        settle(hub, f"{said}, after the stop")
        assert not hub.taken(), said
        assert problems(store) == [], said
        lived = engine.lifetimes(since)
        for lease in hub.leases("victim"):
            if lease.id in lived and lease.started_at is not None:
                seconds, charged = lease.charged / MICRO, charged + 1
                assert seconds == pytest.approx(lived[lease.id], abs=EXACT), (said, lease)
            elif lease.id in lived:
                assert lease.charged == 0 and phase == "start", (said, lease)
    print(f"a spawn took {lasts:.2f} s; {charged} sessions were charged in {kills} rounds")
    assert charged > kills // 3
    store.close()


def test_hub_killed_during_a_spawn_leaks_nothing(
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
        asking = hub.ask_and_go("POST", "victim", {"gpus": 1})
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
