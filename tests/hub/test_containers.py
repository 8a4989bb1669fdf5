"""Containers that lose their GPUs, are removed or fill up. Real: hub, proxy, accounting service, a
Docker Engine, containers that write, Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import requests
from playwright.sync_api import Browser, expect

from gpuspawner.engines.scratch import LABEL_SCRATCH
from gpuspawner.leases.models import Lease, LeaseState
from gpuspawner.ledger.rules import owed
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.services import Services
from tests.support.brokers import services_on
from tests.support.browser import screenshot
from tests.support.device_loss import take_devices
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import GPUHub, assert_in_words
from tests.support.pages import WIDE, add_cookies, look_over, look_over_page, sign_in
from tests.support.paying_hub import service_lines
from tests.support.processes import environment_of, free_port, wait_for

CONFIG = """
c.Accounting.reconcile_seconds = 3
service_constants["gpuspawner.service.device_monitor.CONTAINERS_SECONDS"] = 1
c.Spawner.poll_interval = 3600  # only the accounting service looks for servers that are gone
service_constants["gpuspawner.service.disk_monitor.SCRATCH_SECONDS"] = 1
c.GPUDockerSpawner.disk_limit = "60M"
c.GPUDockerSpawner.scratch_size = "40M"
c.GPUDockerSpawner.workspace = "disk-{{username}}"
c.JupyterHub.tornado_settings = {{"slow_spawn_timeout": 1}}
from jupyterhub.services import service
service._ServiceSpawner.poll_interval = 2  # one that has died is started anew then, and not in 30 s
import gpuspawner
gpuspawner.add_services(c, url="http://127.0.0.1:{port}")
"""


@pytest.fixture(scope="module")
def module_hub(hubs: None, engine: PrivateEngine, images: Any, folder: Path) -> Iterator[GPUHub]:
    with GPUHub(folder / "hub", engine, CONFIG.format(port=free_port())) as hub:
        yield hub
    engine.clean()


@pytest.fixture
def hub(module_hub: GPUHub) -> Iterator[GPUHub]:
    """Two GPUs, which the test's members gave back when it is over."""
    yield module_hub
    module_hub.stop_all_servers()


def test_removed_container_is_settled_at_its_end(hub: GPUHub) -> None:
    hub.spawn_and_wait("ada", {"gpus": 1})
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
    # A look between the kill and the removal finds a container that has exited.
    ways = ("the server was gone", "the server exited (exit code 137)")
    said = {f"Lease {lease.id} of ada settled: {way}" for way in ways}
    wait_for(lambda: said & set(service_lines(hub)), "a line of it", timeout=5)


def test_server_that_lost_devices_restarts_with_them(hub: GPUHub, browser: Browser) -> None:
    """Its member is told, and it starts again with them, though somebody waits for any."""
    hub.api("POST", "users/bea")
    for user in ("bea", "carl"):
        hub.spawn_and_wait(user, {"gpus": 1})
    (lease,), (kept,) = hub.open_leases("bea"), hub.open_leases("carl")
    assert hub.spawn("dora", {"gpus": 1}).ok  # she waits in the queue
    take_devices(hub.engine, lease.engine_ref)

    page = browser.new_page(viewport=WIDE)
    sign_in(page, hub, "bea", "")
    warning = page.locator(".notice.bad:has(form)")

    def warned() -> bool:
        page.reload()
        return warning.is_visible()

    wait_for(warned, "the warning", timeout=60)
    expect(warning).to_contain_text("Your server has lost access to its GPU")
    look_over(page, "lost")
    (said,) = [line for line in service_lines(hub) if "does not reach its GPUs" in line]
    assert f"(lease {lease.id}). They came by NVIDIA's hook; the engine's cgroup driver" in said
    assert kept.id not in "".join(service_lines(hub)), "a server that lost nothing"

    def ask(user: str, of: Lease) -> requests.Response:
        return hub.call(user, "POST", f"leases/{of.id}/restart")

    assert ask("carl", lease).status_code == 404
    refused = ask("carl", kept)
    assert refused.status_code == 409
    assert "it reaches them, as far as is known" in refused.json()["message"]

    page.get_by_role("button", name="Restart with the same GPU").click()
    screenshot(page, "lost-asked")
    page.get_by_role("button", name="Restart", exact=True).click()
    expect(page.get_by_text("The server is being restarted")).to_be_visible()
    name = "JUPYTERHUB_SERVICE_NAME"
    (service,) = [p for p in hub.children_left() if environment_of(p).get(name) == "gpu"]
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


# A server that fills its own container.


@pytest.fixture
def services(hub: GPUHub) -> Iterator[Services]:
    with services_on(hub.database_url) as services:
        yield services


def write(hub: GPUHub, user: str, file: str, megabytes: int) -> None:
    words = ["dd", "if=/dev/zero", f"of={file}", "bs=1M", f"count={megabytes}", "conv=fsync"]
    client = hub.engine.client
    client.exec_start(client.exec_create(hub.container_of(user), words, user="0")["Id"])


def enlarge(hub: GPUHub, user: str, file: str, megabytes: int) -> None:
    """Give a file its whole size at once: who looks meanwhile sees all of it or nothing."""
    code, said = hub.shell(user, f"truncate -s {megabytes}M {file}", user="0")
    assert code == 0, said


def test_only_server_over_its_disk_limit_is_stopped(hub: GPUHub, services: Services) -> None:
    said_before = len(hub.log_text())
    for user, environment in (("eva", "instant"), ("bob", "cpu")):
        hub.spawn_and_wait(user, {"environment": environment})

    def told(user: str) -> dict[NoticeKind, str]:
        return {n.kind: f"{n.title}. {n.body}" for n in services.notifications.notices_of(user)}

    [lease] = hub.open_leases("bob")
    assert lease.devices == (), "who has no GPU has a limit as well"
    write(hub, "bob", "/home/jovyan/work/large", 100)  # his workspace is no part of it
    enlarge(hub, "bob", "/tmp/large", 50)
    warned = wait_for(lambda: told("bob").get(NoticeKind.DISK_LOW), "the warning", timeout=30)
    assert "Its container uses 50 MB of 60 MB" in warned
    assert "beyond 60 MB, it is stopped. Write large files to /home/jovyan/work" in warned
    assert hub.open_leases("bob") == [lease] or not hub.open_leases("bob")[0].outcome

    enlarge(hub, "bob", "/tmp/larger", 30)
    wait_for(lambda: not hub.open_leases("bob"), "the end of who wrote too much", timeout=60)
    ended = services.leases.get(lease.id)
    assert (ended.outcome, ended.state) == ("disk", LeaseState.ENDED)
    assert ended.end_reason == "it wrote 80 MB into its own container, and may write 60 MB"
    assert told("bob").keys() == {NoticeKind.DISK_LOW, NoticeKind.STOPPED}, "each once"
    assert len(services.notifications.notices_of("bob")) == 2
    said = told("bob")[NoticeKind.STOPPED]
    assert said.startswith("Your server was stopped: it used too much disk space. It wrote 80 MB")
    assert "What is in /home/jovyan/work is kept" in said and "ask your admin" in said
    for text in (said, warned):
        assert "disk_limit" not in text
        assert_in_words(text)
    wait_for(lambda: len(hub.containers()) == 1, "the room that it gives back", timeout=30)

    # Her server goes on, and his starts again, with what he had in his workspace.
    [hers] = hub.open_leases("eva")
    assert hers.state is LeaseState.RUNNING and not hers.outcome and told("eva") == {}
    assert hub.get("eva", "devices").ok
    hub.spawn_and_wait("bob", {"environment": "cpu"})
    size = hub.shell("bob", "du -m /home/jovyan/work/large")[1].split()[0]
    assert size in ("100", "101")
    assert "Traceback" not in hub.log_text()[said_before:]


def scratch_volumes(hub: GPUHub) -> list[str]:
    """The leases with a scratch directory on the engine."""
    listed = hub.engine.client.volumes(filters={"label": LABEL_SCRATCH})["Volumes"] or []
    return [str(each["Labels"][LABEL_SCRATCH]) for each in listed]


def test_scratch_is_the_sessions_own_and_gone_with_it(hub: GPUHub, browser: Browser) -> None:
    page = browser.new_page(viewport=WIDE)
    add_cookies(page, hub, "sam")
    page.goto(f"{hub.url}/hub/spawn")
    line = page.locator(".gpuspawner-scratch")
    expect(line).to_contain_text("/scratch is 40 MB of fast local disk.")
    expect(line).to_contain_text(
        "It is deleted when your session ends; keep files in /home/jovyan/work."
    )
    assert look_over_page(page, "scratch-form") == []
    page.close()

    hub.spawn_and_wait("sam", {"environment": "instant"})
    [lease] = hub.open_leases("sam")
    assert scratch_volumes(hub).count(lease.id) == 1
    assert hub.environment_of("sam")["GPUSPAWNER_SCRATCH"] == "/scratch"
    write(hub, "sam", "/scratch/large", 30)
    assert hub.shell("sam", "cat /scratch/*.txt")[1].startswith("This is your scratch directory")
    hub.stop_server("sam")
    wait_for(lambda: lease.id not in scratch_volumes(hub), "the end of the directory", timeout=30)

    hub.spawn_and_wait("sam", {"environment": "instant"})
    assert hub.shell("sam", "ls /scratch")[1].split() == ["DELETED-AT-THE-END.txt"]


def test_service_deletes_scratch_that_lost_its_container(hub: GPUHub) -> None:
    hub.spawn_and_wait("tom", {"environment": "instant"})
    [lease] = hub.open_leases("tom")
    assert lease.id in scratch_volumes(hub)
    hub.engine.client.remove_container(hub.container_of("tom"), force=True, v=False)
    wait_for(lambda: lease.id not in scratch_volumes(hub), "the end of the directory", timeout=30)
    wait_for(lambda: not hub.open_leases("tom"), "the settlement", timeout=30)
