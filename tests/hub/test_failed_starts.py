"""Starts that fail cost nothing and say why. Real: hub, proxy, Docker Engine, images, SQLite."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import requests

from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease, LeaseState
from gpuspawner.ledger.rules import owed
from tests.support import images
from tests.support.compatibility import HUB_6
from tests.support.engine import PrivateEngine
from tests.support.gate import Gate
from tests.support.gpu_hub import GPUHub, assert_in_words, error_on, message_of
from tests.support.page_text import text_of
from tests.support.processes import wait_for
from tests.support.tier import Rounds

GRANT = 100_000

CATALOG = """
environments:
  - {{slug: instant, image: {instant}, default: true}}
  - {{slug: cpu, image: {instant}, devices: {{max: 0}}}}
  - {{slug: exits, image: {exits}}}
  - slug: silent
    image: {silent}
    spawner_override: {{http_timeout: 2}}
  - slug: late
    image: {instant}
    spawner_override:
      start_timeout: 20
      http_timeout: 300
      cmd: [sh, -c, "until [ -e /tmp/go ]; do sleep 0.1; done; exec instant", "--"]
  - slug: dies
    image: {instant}
    spawner_override:
      start_timeout: 20
      http_timeout: 300
      cmd: [sh, -c, "until [ -e /tmp/go ]; do sleep 0.1; done; exit 4", "--"]
  - slug: patient
    image: {silent}
    spawner_override: {{start_timeout: 60, http_timeout: 60}}
  - slug: absent
    image: gpuspawner/nowhere:1
    spawner_override: {{pull_policy: never}}
  - slug: unreachable
    image: 127.0.0.1:1/gpuspawner/nowhere:1
  - slug: crawling
    image: 127.0.0.1:{registry}/gpuspawner/nowhere:1
    spawner_override: {{start_timeout: 15}}
  - slug: mistyped
    image: {instant}
    spawner_override: {{extra_host_config: {{memory_limit: 1g}}}}
  - slug: hanging
    image: 127.0.0.1:{registry}/gpuspawner/nowhere:1
"""

CONFIG = f"""
c.GPURates.by_model = {{"*": 3600}}  # a credit a second: what is charged by mistake shows
c.GPUCredits.opening_grant = {GRANT}
c.JupyterHub.tornado_settings = {{"slow_spawn_timeout": 30}}  # the answer says why a start failed

from gpuspawner.spawners.docker import GPUDockerSpawner

class Tidied(GPUDockerSpawner):
    looks = 0

    async def poll(self):
        self.looks += 1
        return await super().poll()

async def tidy(spawner):
    import asyncio
    seen = spawner.looks
    while spawner.user.name == "tidy" and spawner.looks == seen:
        await asyncio.sleep(0.1)  # until the Hub has given up looking on, and asks

c.JupyterHub.spawner_class = Tidied
c.Spawner.post_stop_hook = tidy

def of_member(setting, usual):
    return lambda spawner: setting.get(spawner.user.name, usual)

c.GPUSpawnerMixin.gpu_limit = of_member({{"no-number": None}}, 8)
c.GPUSpawnerMixin.most_hours = of_member({{"no-hours": -1}}, None)
"""


@pytest.fixture(scope="module")
def hub(
    hubs: None, engine: PrivateEngine, images: Any, gate: Gate, silent_registry: int, folder: Path
) -> Iterator[GPUHub]:
    """One device: whatever a failed start keeps, the next one misses."""
    catalog = CATALOG.format(
        instant=images.INSTANT, exits=images.EXITS, silent=images.SILENT, registry=silent_registry
    )
    with GPUHub(
        folder / "hub", engine, CONFIG, fleet="1xT4", catalog=catalog, docker_host=gate.url
    ) as hub:
        yield hub
    engine.clean()


def fails(hub: GPUHub, user: str, environment: str) -> tuple[int, str]:
    """Start what cannot start, by REST: the status and the sentence."""
    answer = hub.spawn(user, {"environment": environment, "gpus": 1, "wait": "no"})
    assert_in_words(answer.text)
    return answer.status_code, message_of(answer)


def assert_cost_nothing(hub: GPUHub, user: str) -> Lease:
    """The newest lease ended without a charge, and nothing of the start is left."""
    wait_for(lambda: not hub.open_leases(user), "the release of the lease")
    lease = hub.leases(user)[0]
    assert lease.state is LeaseState.ENDED and lease.charged == 0
    assert lease.devices, "it was a start with a device"
    assert hub.balance(user) == GRANT * MICRO
    assert not hub.taken()
    assert not hub.containers()
    assert hub.server(user) is None
    return lease


def assert_next_start_works(hub: GPUHub, user: str) -> None:
    """Without a GPU, and without any trace of one; then another member gets the device."""
    hub.spawn_and_wait(user, {"environment": "cpu"})
    inside = hub.environment_of(user)
    assert inside["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert inside["GPUSPAWNER_GPU_COUNT"] == "0"
    assert hub.device_nodes(user) == []
    hub.spawn_and_wait("another", {"gpus": 1})
    assert hub.environment_of("another")["NVIDIA_VISIBLE_DEVICES"] == hub.devices[0]
    hub.stop_server(user)
    hub.stop_server("another")


FAILURES = {
    "absent": r"the image gpuspawner/nowhere:1 is not on this machine, and pulling is off",
    "unreachable": r"the image 127\.0\.0\.1:1/gpuspawner/nowhere:1 could not be pulled \(.*its "
    r"registry is not responding.*",
    "exits": "it exited at once with code 3",
    "silent": "it did not respond within 2 seconds",
    "mistyped": r"an unexpected error occurred \(tell your admin\)",
    "crawling": r"it was not up within 15 seconds \(it got as far as: Pulling 127\.0\.0\.1:.*\)",
}
"""Why a start of each environment fails."""

FOR_THE_ADMIN = {
    "exits": "no module named jupyterhub: this image is made to fail",  # its last words
    "silent": "running, and listening to nobody",
    "mistyped": "unexpected keyword argument",
}


@pytest.mark.parametrize("environment", FAILURES)
def test_failed_start_is_explained_and_costs_nothing(
    hub: GPUHub, member: str, environment: str
) -> None:
    status, sentence = fails(hub, member, environment)
    said = rf"Your server did not start: {FAILURES[environment]}\. Nothing was charged\."
    assert status == 500 and re.fullmatch(said, sentence), sentence
    lease = assert_cost_nothing(hub, member)
    assert environment != "exits" or "exit code 3" in lease.end_reason
    assert FOR_THE_ADMIN.get(environment, "") in hub.log_text()
    if environment == "silent":  # once is enough: each of the others needs the only device
        assert_next_start_works(hub, member)


@pytest.mark.parametrize(
    "user, sentence, in_log",
    [
        (
            "no-number",
            "Your server did not start: an unexpected error occurred (tell your admin). Nothing "
            "was charged.",
            "int() argument must be",
        ),
        (
            "no-hours",
            "This hub is not set up correctly. Tell your admin, who finds the reason in its log.",
            "c.GPUSpawnerMixin.most_hours is -1",
        ),
    ],
)
def test_mistake_in_the_configuration_is_explained_to_the_admin_only(
    hub: GPUHub, user: str, sentence: str, in_log: str
) -> None:
    assert fails(hub, user, "instant") == (500, sentence)
    assert in_log in hub.log_text()
    assert not hub.leases(user) and not hub.containers()


def test_failure_reason_survives_a_slow_cleanup(hub: GPUHub) -> None:
    """The Hub gives up looking on after thirty seconds, and asks whether the server lives."""
    assert fails(hub, "tidy", "exits") == (
        500,
        "Your server did not start: it exited at once with code 3. Nothing was charged.",
    )
    assert_cost_nothing(hub, "tidy")


def test_http_timeout_applies_after_container_start(
    hub: GPUHub, member: str, engine: PrivateEngine
) -> None:
    """``start_timeout`` ends with the container's start; then ``http_timeout`` counts."""
    other, third = f"{member}-dies", f"{member}-is-stopped"
    hub.ask_and_go("POST", member, {"environment": "late", "gpus": 1})
    dying = hub.ask_and_go("POST", other, {"environment": "dies", "gpus": 0})
    hub.ask_and_go("POST", third, {"environment": "late", "gpus": 0})

    def long_ago() -> bool:
        running = [c for c in hub.containers() if c["State"] == "running"]
        return len(running) == 3 and all(time.time() - c["Created"] > 23 for c in running)

    wait_for(long_ago, "the servers to be older than their start_timeout")
    assert [lease.state for lease in hub.open_leases(member)] == [LeaseState.GRANTED]
    hub.stop_server(third)
    wait_for(lambda: not hub.open_leases(third), "the release of the one that was stopped")
    assert hub.leases(third)[0].started_at is None
    for container in hub.containers():
        if container["State"] == "running":  # not the one that was stopped
            engine.execute(container["Id"], ["touch", "/tmp/go"])
    hub.wait_server(member)
    assert [lease.state for lease in hub.open_leases(member)] == [LeaseState.RUNNING]
    dying.join()
    wait_for(lambda: not hub.open_leases(other), "the release of the one that died")
    assert "exit code 4" in hub.leases(other)[0].end_reason
    hub.stop_server(member)


def failure_page(hub: GPUHub, member: str) -> str:
    """The page that says it; nothing while the failed server is being stopped."""
    page = hub.open_page(member, f"/hub/spawn-pending/{member}")
    return page.text if "Your server did not start" in page.text else ""


def events_of(hub: GPUHub, member: str) -> list[dict[str, Any]]:
    """Those of the last spawn; none when it has failed and is being stopped already."""
    try:
        return hub.progress(member)
    except requests.HTTPError as error:
        assert error.response.status_code == 400
        return []


@pytest.mark.parametrize(
    "environment, sentence",
    [("silent", "it did not respond within 2 seconds"), ("absent", "pulling is off")],
)
def test_start_failure_is_explained_on_the_pages(
    hub: GPUHub, member: str, environment: str, sentence: str
) -> None:
    """By the form: in its red box when it fails at once, else on the page that waits."""
    page = hub.send_form(member, {"environment": environment, "gpus": "1"})
    assert_in_words(page.text)
    if "/spawn-pending/" in page.url:
        assert page.ok or sentence in text_of(page.text)  # it has failed meanwhile
        events = events_of(hub, member)
        if events:
            [*others, last] = events
            assert last["failed"] and sentence in last["message"]
            assert last["message"].startswith("Spawn failed: Your server did not")
            # One that failed before the look has nothing but its end to tell.
            assert not others or any("is yours" in event["message"] for event in others)
            assert_in_words(last["message"])
        again = wait_for(lambda: failure_page(hub, member), "the page that says it")
        assert_in_words(again)
        assert sentence in text_of(again)
    else:
        assert sentence in error_on(page.text)
    assert_cost_nothing(hub, member)
    form = hub.open_page(member, "/hub/spawn")
    assert form.ok and "1 of 1 GPU free" in text_of(form.text)


def test_engine_outage_refuses_starts_at_no_cost(hub: GPUHub, member: str, gate: Gate) -> None:
    gate.shut()
    try:
        assert fails(hub, member, "instant") == (
            503,
            "The container engine is not responding. Try again in a moment; nothing was charged.",
        )
        assert hub.open_page(member, "/hub/spawn").ok
    finally:
        gate.open()
    assert_cost_nothing(hub, member)


def test_engine_outage_during_start_keeps_the_device(hub: GPUHub, member: str, gate: Gate) -> None:
    """Nobody can say whether the container lives: the device stays, until somebody can."""
    answers = hub.ask_and_go("POST", member, {"environment": "patient", "gpus": 1})
    wait_for(lambda: _running(hub), "the container")
    gate.shut()
    try:
        stopped = hub.api("DELETE", f"users/{member}/server")
        assert stopped.status_code in (202, 204)
        wait_for(lambda: hub.server(member) is None, "the hub to let go of the server")
        assert hub.taken(), "unknown is never free"
        status, sentence = fails(hub, f"{member}-two", "instant")
        assert status == 409 and sentence.startswith("The only GPU is in use")
    finally:
        gate.open()
    assert _running(hub)
    # Its member's next start ends what is left, and then has the device.
    hub.spawn_and_wait(member, {"gpus": 1})
    newest, oldest = hub.leases(member)[:2]
    assert oldest.state is LeaseState.ENDED and oldest.charged == 0
    assert [c["Image"] for c in hub.containers()] == [images.INSTANT]
    assert list(newest.uuids) == hub.devices
    hub.stop_server(member)
    answers.join()


# Cancelled.


@pytest.mark.parametrize("environment", ["hanging", "patient"], ids=["pulling", "container-runs"])
def test_cancelled_start_costs_nothing(hub: GPUHub, member: str, environment: str) -> None:
    answers = hub.ask_and_go("POST", member, {"environment": environment, "gpus": 1})
    wait_for(lambda: hub.open_leases(member), "the lease")
    if environment == "hanging":
        assert "Pulling 127.0.0.1:" in list(islice(hub.events(member), 3))[-1]["message"]
    else:
        wait_for(lambda: _running(hub), "the container")
        pending = (f"/hub/spawn-pending/{member}", "Stop Server")
        path, button = pending if HUB_6 else ("/hub/home", "Stop My Server")
        assert button in hub.open_page(member, path).text
    hub.stop_server(member)
    answers.join()
    assert_cost_nothing(hub, member)
    if environment == "patient":  # once is enough here, too
        assert_next_start_works(hub, member)


def test_cancelled_starts_are_charged_only_if_running(
    hub: GPUHub, member: str, rounds: Rounds, chance: random.Random
) -> None:
    """Stopped again and again after some hundredths of a second."""
    times = rounds(60)
    for _ in range(times):
        answers = hub.ask_and_go("POST", member, {"environment": "instant", "gpus": 1})
        time.sleep(chance.uniform(0.0, 0.5))
        hub.api("DELETE", f"users/{member}/server").raise_for_status()
        answers.join()
        found = hub.server(member)
        if found and found["ready"] and not found["pending"]:  # the stop came before the start
            hub.stop_server(member)
        wait_for(lambda: hub.server(member) is None, "the stop")
        wait_for(lambda: not hub.open_leases(), "the release")
        wait_for(lambda: not hub.containers(), "the container's removal")
    # One that was up already costs what it ran; the others cost nothing.
    leases = hub.leases(member)
    assert len(leases) <= times
    for lease in leases:
        assert lease.ended_at is not None
        up = lease.started_at is not None
        assert lease.charged == (owed(lease.rate, lease.started_at, lease.ended_at) if up else 0)
    assert GRANT * MICRO - hub.balance(member) == sum(lease.charged for lease in leases)
    assert_next_start_works(hub, member)


def _running(hub: GPUHub) -> bool:
    return any(c["State"] == "running" for c in hub.containers())
