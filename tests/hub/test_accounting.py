"""Real here: JupyterHub, proxy, accounting service, culler, Chromium; servers are processes or
containers."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from playwright.sync_api import Browser, expect

from gpuspawner.core.units import MICRO
from gpuspawner.engines.local import started_at
from gpuspawner.leases.models import Lease, LeaseState
from gpuspawner.ledger.rules import owed
from tests.support.browser import screenshot
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import GPUHub
from tests.support.losing import take_devices
from tests.support.pages import sign_in
from tests.support.paying_hub import PayingHub, service_lines
from tests.support.processes import alive, command_of, free_port, wait_for

Factory = Callable[..., PayingHub]


@pytest.fixture
def paying_hub(hubs: None, tmp_path: Path) -> Iterator[Factory]:
    """Start hubs as PayingHub takes them; gone at the end of the test."""
    with ExitStack() as hubs:

        def start(config: str = "", **kwargs: Any) -> PayingHub:
            hub = PayingHub(tmp_path / "hub", config, **kwargs)
            hubs.callback(hub.stop)
            hub.start()
            return hub

        yield start


@pytest.fixture(scope="module")
def hub(hubs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PayingHub]:
    """Everybody is rich; the proxy is a process beside the hub, which may be killed."""
    folder = tmp_path_factory.mktemp("rich") / "hub"
    config = "c.GPUCredits.opening_grant = 10000"
    with PayingHub(folder, config, services=", cull_idle_after=3600", external_proxy=True) as hub:
        yield hub


GRACE = timedelta(seconds=5)


@pytest.fixture(scope="module")
def poor_hub(hubs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PayingHub]:
    """Everybody has three seconds of a GPU."""
    folder = tmp_path_factory.mktemp("poor") / "hub"
    config = f"c.GPUCredits.opening_grant = 3\nc.GPUCredits.grace_seconds = {GRACE.seconds}"
    with PayingHub(folder, config) as hub:
        yield hub


def ended(hub: PayingHub, lease: Lease, timeout: float = 30.0) -> Lease:
    """The lease, once it is settled; its charge must be exact."""

    def look() -> Lease | None:
        now = hub.broker.lease(lease.id)
        return now if now.state is LeaseState.ENDED else None

    settled = wait_for(look, f"the end of {lease.server}'s lease", timeout=timeout)
    assert settled.ended_at is not None
    assert settled.charged == owed(settled.rate, settled.started_at, settled.ended_at)
    return settled


def test_a_local_server_is_charged_from_its_start_to_its_end(paying_hub: Factory) -> None:
    """However late the Hub notices that the process has ended."""
    hub = paying_hub("c.GPUCredits.opening_grant = 100\nc.Accounting.reconcile_seconds = 3600")
    lease = hub.start_server("exact", gpus=1)
    process = psutil.Process(int(lease.engine_ref.partition(":")[0]))
    descriptor, began = os.pidfd_open(process.pid), started_at(lease.engine_ref)
    assert began is not None
    process.suspend()  # it does not end yet when the Hub asks it to
    with ThreadPoolExecutor(1) as threads:
        stopping = threads.submit(hub.stop_server, "exact")
        wait_for(lambda: (hub.server("exact") or {}).get("pending") == "stop", "the stop")
        hub.wait_rounds(3, "charges")
        process.resume()
        select.select([descriptor], [], [])
        lived = (datetime.now(timezone.utc) - began).total_seconds()
        stopping.result()
    os.close(descriptor)
    settled = ended(hub, lease)
    assert settled.charged / MICRO == pytest.approx(lived, abs=0.5)


def test_an_account_runs_dry(poor_hub: PayingHub) -> None:
    hub = poor_hub
    lease = hub.start_server("ada", gpus=1)
    assert lease.started_at is not None

    def warned() -> Lease | None:
        now = hub.broker.lease(lease.id)
        return now if now.warned_at else None

    told = wait_for(warned, "the warning", timeout=15)
    assert told.warned_at is not None
    assert (told.warned_at - lease.started_at).total_seconds() >= 3
    assert hub.server("ada") is not None, "the grace had only begun"
    assert "Your credits have run out" in hub.page("ada").text

    settled = ended(hub, lease)
    assert settled.ended_at is not None
    assert settled.ended_at - told.warned_at >= GRACE
    wait_for(lambda: hub.server("ada") is None, "the Hub to know")
    assert hub.broker.ledger.member("ada").balance == 3 * MICRO - settled.charged
    assert hub.broker.overview().free == 3
    stop = "Stopping ada: the credits ran out"
    wait_for(lambda: stop in hub.service_lines(), "a line of it")
    assert sum("ada ran dry" in line for line in hub.service_lines()) == 1

    refused = hub.spawn("ada", {"gpus": 1})
    assert refused.status_code == 402
    assert "You can start without a GPU" in refused.text
    free = hub.start_server("ada", gpus=0)
    hub.wait_rounds(1, "charges", "credits", "sessions")
    assert hub.broker.lease(free.id).state is LeaseState.RUNNING
    hub.stop_server("ada")


def test_credits_in_time_keep_the_server(poor_hub: PayingHub) -> None:
    hub = poor_hub
    lease = hub.start_server("bob", gpus=1)
    warned_at = wait_for(lambda: hub.broker.lease(lease.id).warned_at, "the warning", timeout=15)
    hub.broker.ledger.grant(lease.account, 1000 * MICRO, actor="admin", reason="a gift")
    wait_for(lambda: hub.broker.lease(lease.id).warned_at is None, "it to be taken back")
    wait_for(lambda: hub.broker.clock() > warned_at + GRACE, "the end of the grace")
    hub.wait_rounds(1, "charges", "credits", "sessions")
    assert hub.broker.lease(lease.id).state is LeaseState.RUNNING
    assert hub.server("bob") is not None
    hub.stop_server("bob")
    ended(hub, lease)


def test_the_service_is_killed_and_comes_back(hub: PayingHub) -> None:
    goes_on = hub.start_server("goes-on", gpus=1)
    stops = hub.start_server("stops", gpus=1)
    hub.kill_service()
    down_since = hub.broker.clock()
    charged = hub.broker.lease(goes_on.id).charged
    hub.stop_server("stops")
    ended(hub, stops)

    # The Hub starts it anew.
    hub.wait_pages()
    back = wait_for(lambda: _charged_after(hub, goes_on, charged), "the next charge")
    assert back.charged > owed(back.rate, down_since, hub.broker.clock()) - 5 * MICRO
    hub.stop_server("goes-on")
    settled = ended(hub, goes_on)
    assert hub.broker.ledger.member("goes-on").balance == 10000 * MICRO - settled.charged
    lines = hub.broker.ledger.statement("member:goes-on", limit=1000)
    assert -sum(line.amount for line in lines if line.lease_id == goes_on.id) == settled.charged


def _charged_after(hub: PayingHub, lease: Lease, charged: int) -> Lease | None:
    now = hub.broker.lease(lease.id)
    return now if now.charged > charged else None


def test_a_server_that_dies_behind_the_hubs_back(hub: PayingHub) -> None:
    lease = hub.start_server("dies", gpus=2)
    seen_at = wait_for(lambda: hub.broker.lease(lease.id).seen_at, "the first look")
    pid = int(lease.engine_ref.partition(":")[0])
    (server,) = [p for p in hub.children_left() if p.pid == pid]
    server.send_signal(signal.SIGKILL)
    wait_for(lambda: not alive(pid), "its end")
    killed_at = hub.broker.clock()
    settled = ended(hub, lease, timeout=10)
    assert settled.ended_at is not None
    # Charged up to when it was last seen alive: never for time in which it was gone.
    assert seen_at <= settled.ended_at <= killed_at
    assert hub.broker.overview().free == 3
    hub.stop_server("dies")  # the Hub has yet to hear of it


def test_a_killed_hub_takes_its_service_along(hub: PayingHub) -> None:
    lease = hub.start_server("lives", gpus=1)
    old = hub.service()
    assert old is not None
    command, environment = old.cmdline(), old.environ()
    hub.kill9()
    wait_for(lambda: not old.is_running(), "the service to notice", timeout=5)
    # Also one that the hub had just begun to start.
    subprocess.run(command, env=environment, cwd=hub.folder, timeout=120, check=True)
    hub.start()
    new = hub.service()
    assert new is not None
    assert new.pid != old.pid
    assert hub.page("lives").ok
    assert hub.broker.lease(lease.id).state is LeaseState.RUNNING
    assert hub.get("lives", "").text == lease.id
    hub.stop_server("lives")
    ended(hub, lease)


def test_the_service_may_do_nothing_else(hub: PayingHub) -> None:
    hub.start_server("cara", gpus=1)
    service = hub.service()
    assert service is not None
    token = service.environ()["JUPYTERHUB_API_TOKEN"]
    assert "gpuspawner.sqlite" not in " ".join(service.cmdline())

    def ask(method: str, path: str, **kwargs: Any) -> int:
        return requests.request(
            method,
            f"{hub.url}/hub/api/{path}",
            headers={"Authorization": f"token {token}"},
            timeout=120,
            **kwargs,
        ).status_code

    assert ask("GET", "users?state=active") == 200
    assert ask("GET", "users/cara") == 200
    forbidden = {
        "POST users": {"usernames": ["eve"]},
        "POST users/eve": {},
        "DELETE users/cara": None,
        "PATCH users/cara": {"admin": True},
        "GET users/cara/tokens": None,
        "POST users/cara/tokens": {},
        "GET groups": None,
        "GET services": None,
        "GET proxy": None,
        "POST shutdown": {},
    }
    answers = {call: ask(*call.split(" "), json=body) for call, body in forbidden.items()}
    # What a service may not even see is "not found" on the Hub.
    assert set(answers.values()) <= {403, 404}, answers
    assert hub.api("GET", "users/eve").status_code == 404
    seen = requests.get(
        f"{hub.url}/hub/api/users/cara", headers={"Authorization": f"token {token}"}, timeout=30
    ).json()
    assert "auth_state" not in seen or seen["auth_state"] is None
    assert "state" not in seen["servers"][""]
    assert ask("DELETE", "users/cara/server") in (202, 204)
    wait_for(lambda: hub.server("cara") is None, "the stop")


def test_the_idle_culler_releases_and_settles(paying_hub: Factory) -> None:
    # Nobody samples GPUs: the culler goes by the Hub alone. That it asks us whether they rest is
    # in test_metrics.py.
    config = "c.GPUCredits.opening_grant = 10000\nc.GPUMonitoring.sample_seconds = 0"
    hub = paying_hub(config, services=", cull_idle_after=4")
    lease = hub.start_server("ada", gpus=1)
    settled = ended(hub, lease, timeout=30)
    assert settled.charged > 0
    wait_for(lambda: hub.server("ada") is None, "the hub to forget the server")
    assert hub.service("idle-culler") is not None
    assert "Culling server ada" in hub.log_text()


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


def test_the_database_goes_and_comes_back(paying_hub: Factory, postgres: Any) -> None:
    hub = paying_hub("c.GPUCredits.opening_grant = 10000", database_url=postgres.fresh_database())
    lease = hub.start_server("ada", gpus=1)
    assert hub.page("ada").ok
    hub.json("ada", "me").raise_for_status()
    postgres.halt()
    try:
        page = hub.page("ada")
        assert page.status_code == 503
        assert "The database does not answer. Try again in a moment" in page.text
        answer = hub.json("ada", "me")
        assert answer.status_code == 503
        assert answer.json()["error"] == "store_unavailable"
        with asked_in_vain(postgres.port) as times:
            wait_for(lambda: len(times) >= MANY, "many rounds in vain", timeout=60)
    finally:
        postgres.start()
    wait_for(lambda: hub.page("ada").ok, "the page")
    wait_for(lambda: "Charges: all is well again" in hub.service_lines(), "the charges", timeout=10)
    said = [line for line in hub.service_lines() if line.startswith("Charges: The database")]
    assert len(said) == 1, said
    assert "Traceback" not in hub.log_text()
    hub.stop_server("ada")
    ended(hub, lease)


@pytest.fixture(scope="module")
def docker_hub(
    hubs: None, engine: PrivateEngine, images: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GPUHub]:
    """A hub whose servers are containers, with its accounting service."""
    config = f"""
c.Accounting.reconcile_seconds = 3
c.GPUMonitoring.containers_seconds = 1
c.JupyterHub.tornado_settings = {{"slow_spawn_timeout": 1}}
from jupyterhub.services import service
service._ServiceSpawner.poll_interval = 2  # one that has died is started anew then, and not in 30 s
import gpuspawner
gpuspawner.add_services(c, url="http://127.0.0.1:{free_port()}")
"""
    with GPUHub(tmp_path_factory.mktemp("docker") / "hub", engine, config) as hub:
        yield hub
    engine.clean()


def test_a_container_removed_behind_the_hubs_back(docker_hub: GPUHub) -> None:
    hub = docker_hub
    assert hub.spawn("ada", {"gpus": 1}).ok
    hub.wait_server("ada")
    (container,) = hub.containers()
    (lease,) = hub.open_leases("ada")
    # The next look is some seconds away: its time cannot be taken for the end's.
    wait_for(lambda: _seen(hub.open_leases("ada")), "the first look", timeout=15)

    before = datetime.now(timezone.utc)
    hub.engine.client.remove_container(container["Id"], force=True)
    after = datetime.now(timezone.utc)
    wait_for(lambda: not hub.open_leases("ada"), "the settlement", timeout=10)
    (settled,) = hub.leases("ada")
    assert settled.ended_at is not None
    # Nobody has the container any more, and its end is known all the same.
    assert before <= settled.ended_at <= after
    assert settled.charged == owed(settled.rate, settled.started_at, settled.ended_at)
    assert hub.taken() == {}
    said = f"Lease {lease.id} of ada settled: the server was gone"
    wait_for(lambda: said in service_lines(hub), "a line of it", timeout=5)


def test_a_container_that_loses_its_gpus(docker_hub: GPUHub, browser: Browser) -> None:
    """Its member is told, and it starts again with them, though somebody waits for any."""
    hub = docker_hub
    hub.api("POST", "users/bea")
    for user in ("bea", "carl"):
        assert hub.spawn(user, {"gpus": 1}).ok
        hub.wait_server(user)
    (lease,), (kept,) = hub.open_leases("bea"), hub.open_leases("carl")
    assert hub.spawn("dora", {"gpus": 1}).ok  # she waits in line
    take_devices(hub.engine, lease.engine_ref)

    page = browser.new_page(viewport={"width": 1280, "height": 800})
    sign_in(page, hub, "bea", "")
    warning = page.locator(".notice.bad:has(form)")

    def warned() -> bool:
        page.reload()
        return warning.is_visible()

    wait_for(warned, "the warning", timeout=60)
    expect(warning).to_contain_text("Your server cannot reach its GPU any more")
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        screenshot(page, f"lost-{width}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    (said,) = [line for line in service_lines(hub) if "does not reach its GPUs" in line]
    assert f"(lease {lease.id}). They came by NVIDIA's hook; the engine's cgroup driver" in said
    assert kept.id not in "".join(service_lines(hub)), "a server that lost nothing"

    def ask(user: str, of: Lease) -> requests.Response:
        headers = {"Authorization": f"token {hub.user_token(user)}"}
        url = f"{hub.url}/services/gpu/api/leases/{of.id}/restart"
        return requests.post(url, headers=headers, timeout=120)

    assert ask("carl", lease).status_code == 404
    refused = ask("carl", kept)
    assert refused.status_code == 409
    assert "it reaches them, as far as is known" in refused.json()["message"]

    page.get_by_role("button", name="Restart with the same GPU").click()
    screenshot(page, "lost-asked")
    page.get_by_role("button", name="Restart it").click()
    expect(page.get_by_text("The server is being restarted")).to_be_visible()
    (service,) = [p for p in hub.children_left() if "gpuspawner.service" in command_of(p)]
    service.kill()  # the next one goes on where it was

    def back() -> Lease | None:
        found = [each for each in hub.open_leases("bea") if each.id != lease.id]
        return found[0] if found and found[0].started_at else None

    again = wait_for(back, "the server to be back", timeout=90)
    assert again.uuids == lease.uuids
    hub.wait_server("bea")
    assert hub.device_nodes("bea") == [f"/dev/nvidia{again.devices[0].index}"]
    assert hub.open_leases("dora") == [], "who waits, waits on"
    (ended,) = [each for each in hub.leases("bea") if each.id == lease.id]
    assert (ended.outcome, ended.end_reason) == ("restart", "it starts again with the same GPUs")
    hub.stop_server("bea")
    wait_for(lambda: hub.open_leases("dora"), "the turn of who waits", timeout=60)


def _seen(leases: list[Lease]) -> bool:
    return any(lease.seen_at and lease.seen_at != lease.started_at for lease in leases)


def test_taking_the_lines_out_leaves_the_hub_as_it_was(paying_hub: Factory) -> None:
    hub = paying_hub()
    hub.api("POST", "users/ada").raise_for_status()
    headers = {"Authorization": f"token {hub.user_token('ada')}"}

    def scopes() -> set[str]:
        answer = requests.get(f"{hub.url}/hub/api/user", headers=headers, timeout=120)
        return set(answer.json()["scopes"])

    with_them = scopes()
    assert "access:services!service=gpu" in with_them

    lines = hub.config.splitlines()
    lines = [line for line in lines if "gpuspawner" not in line and "gpu-local" not in line]
    hub.config = "\n".join(lines) + "\n"
    hub.has_service = False
    hub.restart()
    ours = {s for s in with_them if s.endswith("!service=gpu") or "custom:gpuspawner:" in s}
    assert scopes() == with_them - ours
    assert "gpu" not in hub.api("GET", "services").json()
    assert hub.service() is None
    hub.spawn("ada").raise_for_status()
    hub.wait_server("ada")
    assert hub.get("ada", "").text == "none"
    hub.stop_server("ada")
