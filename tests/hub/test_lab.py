"""The GPU item in JupyterLab. Real: Chromium, JupyterLab with its extensions, JupyterHub, proxy,
accounting service, SQLite; servers are local processes, and what GPUs do comes from a script."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from playwright.sync_api import Browser, Page, Route, expect

from gpuspawner.devices import repository as devices_repository
from gpuspawner.devices.repository import SickLease
from gpuspawner.engines.resource_use import ResourceUse
from gpuspawner.leases import repository as leases_repository
from gpuspawner.leases.models import Lease, LeaseState
from gpuspawner.monitoring import repository as monitoring_repository
from gpuspawner.monitoring.idle import IdleState
from gpuspawner.monitoring.models import DeviceUse
from gpuspawner.monitoring.repository import WatchedLease
from gpuspawner.monitoring.resource_service import ContainerSample
from gpuspawner.services import utcnow
from tests.support.axe import troubles
from tests.support.browser import complaints_of_ours, screenshot
from tests.support.hub import ADMIN, USER_PASSWORD
from tests.support.pages import DRAWN, PHONE, WIDE
from tests.support.paying_hub import PayingHub
from tests.support.processes import BIN, REPO, die_with_us, environment_of, free_port, wait_for

LAB = REPO / "images" / "common" / "lab"
GB = 2**30

ENVIRONMENT = {
    "JUPYTER_PATH": str(LAB / "share" / "jupyter"),
    "JUPYTER_CONFIG_PATH": str(LAB / "etc" / "jupyter"),
    "PYTHONPATH": os.pathsep.join([str(LAB), str(REPO)]),
}
"""By which a JupyterLab that is installed here finds what the images have in their own."""

CONFIG = f"""
c.GPURates.by_model = {{"*": 4}}
c.GPUCredits.opening_grant = 50
c.GPUIdle.policy = {{"*": {{"mode": "enforce"}}}}
c.GPUCredits.hold_minutes = 1
c.GPUSpawnerMixin.catalog = "catalog.yaml"
c.Spawner.cmd = ["jupyterhub-singleuser"]
c.Spawner.environment = {ENVIRONMENT!r}
c.Spawner.http_timeout = 120
c.Spawner.default_url = "/lab"
c.GPUSessions.warn_minutes = [59]
"""

CATALOG = f"""
environments:
  - slug: lab
    display_name: JupyterLab
    image: none
    default: true
    devices: {{default: 1, max: 2}}
    hours: {{max: 1}}
  - slug: quick
    image: none
    spawner_override:
      cmd: {[sys.executable, str(REPO / "tests/support/tiny_server.py")]}
"""

USED = ResourceUse(
    cpu_seconds=5400.0,
    memory_bytes=5 * GB // 2,
    memory_limit_bytes=32 * GB,
    disk_read_bytes=3 * GB,
    disk_written_bytes=GB // 2,
    network_received_bytes=1536,
)

SCRIPT = {"0": {"use": 37, "used_bytes": 12 * GB}, "1": {"use": 0, "used_bytes": GB}}


@pytest.fixture(scope="module")
def hub(hubs: None, folder: Path) -> Iterator[PayingHub]:
    script = folder / "gpus.json"
    script.write_text(json.dumps(SCRIPT))
    environment = {"GPUSPAWNER_SIMULATION": str(script)}
    hub = PayingHub(folder / "hub", CONFIG, environment=environment)
    (hub.folder / "catalog.yaml").write_text(CATALOG)
    with hub:
        hub.start_server("ada", environment="lab", gpus=1, gpu_model="A100")
        yield hub


@pytest.fixture
def lease(hub: PayingHub) -> Lease:
    """Ada's."""
    [found] = [x for x in hub.services.leases.open_leases() if x.server.user == "ada"]
    return found


def token_of(lease: Lease) -> str:
    """The token that JupyterHub gave to a server."""
    for process in psutil.process_iter():
        environment = environment_of(process)
        if environment.get("GPUSPAWNER_LEASE_ID") == lease.id:
            return environment["JUPYTERHUB_API_TOKEN"]
    raise LookupError(f"no process of lease {lease.id}")


def ask(
    hub: PayingHub, token: str, path: str, method: str = "GET", *, by_hub: bool = False
) -> requests.Response:
    """The service's JSON; as a server in a container reaches it, by the hub's API."""
    base = f"{hub.url}/hub/api/gpuspawner" if by_hub else f"{hub.url}/services/gpu/api"
    headers = {"Authorization": f"token {token}"}
    return requests.request(method, f"{base}/{path}", headers=headers, timeout=60)


def test_first_kernel_uses_the_standby_process(hub: PayingHub) -> None:
    wait_for(lambda: "A kernel is made ready" in hub.log_text(), "a kernel in advance", timeout=60)
    whose = "import os; print(open('/proc/self/cmdline').read().split(chr(0))[1], os.getcwd())"
    first, second = (hub.kernel_run("ada", whose).split() for _ in range(2))
    assert first[0].endswith("gpuspawner_standby.py") and second[0] == "-m"
    assert first[1] == second[1]
    assert hub.log_text().count("The kernel was ready") == 1
    told = hub.get("ada", "api/nbconvert", timeout=90).json()
    assert told["html"] == {"output_mimetype": "text/html"} and "notebook" in told
    assert "listed by the server itself" not in hub.log_text()


# What the token of a server may do.


def test_server_reads_its_own_session_via_the_hub_api(hub: PayingHub, lease: Lease) -> None:
    def now() -> dict[str, Any] | None:
        answer = ask(hub, token_of(lease), f"leases/{lease.id}/now", by_hub=True)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told if told["devices"][0]["use_percent"] is not None else None

    told = wait_for(now, "the first samples", timeout=30)
    assert told["lease"]["id"] == lease.id
    [device] = told["devices"]
    assert (device["uuid"], device["use_percent"], device["used_bytes"]) == (
        lease.uuids[0],
        37,
        12 * GB,
    )
    assert float(told["account"]["balance"]) <= 50
    assert told["page"] == "/services/gpu/"


def test_server_token_is_limited_to_its_own_session(hub: PayingHub, lease: Lease) -> None:
    token = token_of(lease)
    other = hub.start_server("bob", environment="quick", gpus=0)
    second = hub.start_server("ada", "second", environment="quick", gpus=0)
    for theirs in (other, second):
        for path, method in (
            (f"leases/{theirs.id}/now", "GET"),
            (f"leases/{theirs.id}/extend", "POST"),
            (f"leases/{theirs.id}/snooze", "POST"),
            (f"leases/{theirs.id}/end", "POST"),
        ):
            for by_hub in (False, True):
                answer = ask(hub, token, path, method, by_hub=by_hub)
                assert answer.status_code == 404, (path, answer.text)
                assert "bob" not in answer.text and "second" not in answer.text
        assert hub.services.leases.get(theirs.id).state is LeaseState.RUNNING
    for path in ("me", "leases", "devices", "accounts/member:ada", f"leases/{lease.id}/receipt"):
        assert ask(hub, token, path).status_code == 403, path
        assert ask(hub, token, path, by_hub=True).status_code == 404, path
    assert ask(hub, token, f"leases/{lease.id}/stop", "POST").status_code == 403
    path = f"leases/{lease.id}/now"
    assert ask(hub, token, path, "POST", by_hub=True).status_code == 404
    assert ask(hub, "forged", path, by_hub=True).status_code == 403
    nobody = requests.get(f"{hub.url}/hub/api/gpuspawner/{path}", timeout=60)
    assert nobody.status_code == 403
    # The second server's own token says the same of the first.
    assert ask(hub, token_of(second), path).status_code == 404
    for theirs in (other, second):
        hub.stop_server(theirs.server.user, theirs.server.name)


def test_admin_server_token_has_no_admin_rights(hub: PayingHub, lease: Lease) -> None:
    theirs = hub.start_server(ADMIN, environment="quick", gpus=0)
    token = token_of(theirs)
    assert ask(hub, token, f"leases/{theirs.id}/now").ok
    for action in ("extend", "snooze", "end"):
        answer = ask(hub, token, f"leases/{lease.id}/{action}", "POST")
        assert answer.status_code == 404, answer.text
    assert hub.services.leases.get(lease.id).state is LeaseState.RUNNING
    hub.stop_server(ADMIN)


def test_hub_without_runs_says_so_and_has_no_button(hub: PayingHub, lease: Lease) -> None:
    answer = ask(hub, token_of(lease), "runs/-/quote", "POST", by_hub=True)
    assert (answer.status_code, answer.json()["error"]) == (409, "no_runs")
    page = hub.get("ada", "lab", timeout=90).text
    assert '"gpuspawner": "on"' in page and "gpuspawnerRuns" not in page
    item = 'href="/services/gpu/runs"'
    for path in ("/hub/home", "/services/gpu/"):
        assert item not in hub.open_page("ada", path).text, path
    runs = hub.open_page("ada", "/services/gpu/runs").text
    assert item in runs and "This hub has none" in runs and "gpuspawner-run" not in runs


def test_request_that_is_too_large_is_answered_with_the_limit(hub: PayingHub, lease: Lease) -> None:
    relay = f"http://{hub.hub_ip}:{hub.hub_port}/hub/api/gpuspawner"
    token = {"Authorization": f"token {token_of(lease)}"}
    for base, kibibytes in ((f"{hub.url}/services/gpu/api", 65), (relay, 65), (relay, 7 * 1024)):
        sent = {"command": ["train", "x" * kibibytes * 1024], "sets": [{}]}
        answer = requests.post(f"{base}/sweeps", json=sent, headers=token, timeout=60)
        told = answer.json()
        assert (answer.status_code, told["error"]) == (413, "request_too_large"), (base, kibibytes)
        assert told["message"].startswith("The request is larger than 64.0 kB. Send less at once")
    forged = {"Authorization": "token forged"}
    for headers, kibibytes in ((forged, 7 * 1024), (token, 9 * 1024)):
        data = b"x" * kibibytes * 1024
        with suppress(requests.ConnectionError):  # it ends before all was sent
            answer = requests.post(f"{relay}/sweeps", data, headers=headers, timeout=60)
            assert answer.status_code == 400


# What members see.


def test_lab_shows_gpu_status_warnings_and_panel(
    hub: PayingHub, lease: Lease, browser: Browser
) -> None:
    """From a start without the accounting service to the server's stop."""
    rest(hub, lease)
    worked(hub, lease)
    hub.services.resources.record([ContainerSample(lease.id, "container", USED)])
    told = ask(hub, token_of(lease), f"leases/{lease.id}/now").json()
    minutes = [minute["use_percent"] for minute in told["devices"][0]["minutes"]]
    assert minutes[:28] == [*range(41, 69)], "the first full minute of this lease, and no other's"
    page = browser.new_context(viewport=WIDE).new_page()
    errors = complaints_of_ours(page)
    open_without_service(page, hub)
    item = page.locator(".gpuspawner-item button")
    expect(item).to_contain_text("A100-80GB")
    expect(item).to_contain_text("GPU 37 %")
    expect(item).to_contain_text("memory 12 of 80 GB")
    expect(item).to_contain_text(re.compile(r"4\d\.\d\d credits left"))
    expect(item).to_contain_text(re.compile(r"\d+ min left"))

    # Its GPU is idle: said with the end, and postponed by a click.
    warned = page.locator(".Toastify__toast", has_text="is idle")
    expect(warned).to_contain_text(re.compile(r"This server stops at \S+.*: its GPU is idle"))
    keep(page, "warning")
    before = idle_state(hub, lease)
    warned.get_by_role("button", name="Snooze").click()
    expect(
        page.locator(".Toastify__toast", has_text="Postponed: this server runs until")
    ).to_be_visible()
    after = idle_state(hub, lease)
    assert after.snoozes == before.snoozes + 1
    assert after.stops_at is not None and before.stops_at is not None
    assert after.stops_at - before.stops_at == timedelta(minutes=30)
    expect(warned).to_have_count(0)

    # The panel, with the curve of what the store has of this lease.
    item.click()
    panel = page.locator(".gpuspawner-panel")
    expect(panel.get_by_role("heading", name="A100-80GB")).to_be_visible()
    expect(panel).to_contain_text("12 of 80 GB")
    expect(panel.get_by_role("img", name="Utilization and memory in the last hour")).to_be_visible()
    expect(panel.locator("polyline.gpuspawner-use").first).to_be_visible()
    for name, value in (
        ("Memory", "2.5 GB of 32.0 GB"),
        ("CPU time", "1 h 30 min"),
        ("Disk", "3.0 GB read, 512.0 MB written"),
        ("Network", "1.5 kB received"),
    ):
        expect(panel).to_contain_text(f"{name}{value}")
    assert troubles(page, within=".gpuspawner-panel") == []
    keep(page, "panel")
    extended = hub.services.leases.get(lease.id).ends_at
    panel.get_by_role("button", name="Extend").click()
    expect(
        page.locator(".Toastify__toast", has_text="Extended: this server runs until")
    ).to_be_visible()
    assert extended is not None
    assert (hub.services.leases.get(lease.id).ends_at or extended) > extended

    # A button that comes too late says why, in words.
    with hub.services.store.write() as connection:
        monitoring_repository.put_watched(
            connection, lease.id, WatchedLease(begun(), utcnow() + timedelta(hours=1))
        )
    panel.get_by_role("button", name="Snooze").click()
    refused = page.locator(".Toastify__toast", has_text="The stop cannot be postponed")
    expect(refused).to_be_visible()

    # GPUs that it does not reach any more, or that are sick: the restart is on the service's page.
    hub.services.restarts.tell_lost(lease.id)
    sick = SickLease(lease.id, lease.uuids[0], "hot", "too hot", utcnow(), utcnow())
    with hub.services.store.write() as connection:
        devices_repository.note_sick_lease(connection, sick)
    expect(
        page.locator(".Toastify__toast", has_text="The GPU of this server is sick")
    ).to_be_visible()
    lost = page.locator(".Toastify__toast", has_text="has lost access to its GPU")
    expect(lost).to_be_visible()
    keep(page, "lost")
    with page.context.expect_page() as opened:
        lost.get_by_role("button", name="Restart").click()
    expect(opened.value.get_by_role("button", name="Restart with the same GPU")).to_be_visible()

    panel.get_by_role("button", name="Stop server").click()
    dialog = page.locator(".jp-Dialog", has_text="Stop this server?")
    expect(dialog).to_contain_text("Your files are kept")
    keep(page, "stop")
    assert errors == [], errors
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route(re.compile(r"/gpuspawner/session/end\b"), hold)
    page.evaluate(WHAT_THE_PANEL_SAYS)
    dialog.get_by_role("button", name="Stop", exact=True).click()
    expect(panel).to_contain_text("Stopping…")
    expect(panel.get_by_role("button", name="Stop server")).to_be_hidden()
    expect(item).to_have_text("Stopping…")
    keep(page, "stopping")
    held[0].continue_()
    page.wait_for_url(f"{hub.url}/hub/home")
    said = json.loads(page.evaluate("sessionStorage.panel"))
    assert said and all(text.endswith("Stopping…") for text in said), said
    expect(page.get_by_role("button", name="Start My Server")).to_be_visible()
    hub.wait_end(lease)


WHAT_THE_PANEL_SAYS = """
const panel = document.querySelector(".gpuspawner-content");
const said = [];
new MutationObserver(() => {
  said.push(panel.innerText);
  sessionStorage.panel = JSON.stringify(said);
}).observe(panel, { childList: true, subtree: true });
"""
"""Each text that the panel has from now on, which the page after it can still read."""


def open_without_service(page: Page, hub: PayingHub) -> None:
    """Open JupyterLab while the accounting service neither answers nor refuses."""
    service = hub.service()
    assert service is not None
    service.suspend()
    try:

        def away() -> dict[str, Any] | None:
            told: dict[str, Any] = hub.get("ada", "gpuspawner/session", timeout=90).json()
            return None if told["available"] else told  # an answer is good for some seconds

        assert wait_for(away, "that nobody answers")["retry_seconds"] > 5
        open_lab(page, hub)
        expect(page.locator("#jp-main-statusbar")).to_be_visible()
        expect(page.locator(".gpuspawner-item")).to_be_hidden()
    finally:
        service.resume()


def test_lab_extension_is_inactive_without_a_hub(tmp_path: Path, browser: Browser) -> None:
    """The same extensions in a plain JupyterLab add nothing, and complain about nothing."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", f"--port={port}"),
        *("--allow-root", "--ServerApp.token=plain", f"--ServerApp.root_dir={tmp_path}"),
    ]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JUPYTER")}
    environment = {**kept, **ENVIRONMENT, "HOME": str(tmp_path), "PATH": f"{BIN}:{kept['PATH']}"}
    with open(tmp_path / "lab.log", "wb") as log:
        lab = subprocess.Popen(die_with_us(command), env=environment, stdout=log, stderr=log)
    try:
        base = f"http://127.0.0.1:{port}"
        wait_for(lambda: _answers(base), "JupyterLab", timeout=60)
        page = browser.new_context(viewport=WIDE).new_page()
        errors = complaints_of_ours(page)
        page.goto(f"{base}/lab?token=plain")
        expect(page.locator(".jp-Launcher")).to_be_visible()
        loaded = page.evaluate("Object.keys(window._JUPYTERLAB ?? {})")
        assert "gpuspawner" in loaded
        expect(page.locator(".gpuspawner-item")).to_have_count(0)
        assert errors == [], errors
        asked = requests.get(f"{base}/gpuspawner/session?token=plain", timeout=120)
        assert asked.status_code == 404
    finally:
        lab.terminate()
        lab.wait(timeout=60)


# Steps of the above.


def open_lab(page: Page, hub: PayingHub) -> None:
    page.goto(f"{hub.url}/hub/login?next=/hub/home")
    page.fill("input[name=username]", "ada")
    page.fill("input[name=password]", USER_PASSWORD)
    page.click("[type=submit]")
    page.wait_for_url("**/hub/home")
    page.goto(f"{hub.url}/user/ada/lab?reset")
    expect(page.locator(".jp-Launcher")).to_be_visible()


def keep(page: Page, name: str) -> None:
    """Pictures as on a desk and as on a phone."""
    for size, suffix in ((WIDE, "wide"), (PHONE, "phone")):
        page.set_viewport_size(size)
        page.evaluate(DRAWN)
        screenshot(page, f"lab-item-{name}-{suffix}")
    page.set_viewport_size(WIDE)


def rest(hub: PayingHub, lease: Lease) -> None:
    """As if it had been judged: its GPUs rest, and it stops in nine minutes."""
    now = utcnow()
    state = IdleState(credit=0, warned_at=now, stops_at=now + timedelta(minutes=9))
    with hub.services.store.write() as connection:
        # What began before is judged: the script's work of the next minutes is not.
        monitoring_repository.put_watched(
            connection, lease.id, WatchedLease(state, now + timedelta(hours=1))
        )


def begun() -> IdleState:
    """Nobody has to be warned."""
    return IdleState(credit=3600)


def idle_state(hub: PayingHub, lease: Lease) -> IdleState:
    _, watched = hub.services.idle.idle_state(lease.server)
    assert watched is not None
    return watched.state


def worked(hub: PayingHub, lease: Lease) -> None:
    """As if it had begun half an hour ago, and somebody else before it had worked too."""
    began = utcnow() - timedelta(minutes=30)
    with hub.services.store.write() as connection:
        leases_repository.update(
            connection, lease.id, granted_at=began, started_at=began, answered_at=began
        )
    counts = {"samples": 60, "known": 60, "busy": 60, "measured": 60, "memory_max": 8 * GB}
    minute = began.replace(second=0, microsecond=0)
    hub.services.monitoring.remember_use(
        [
            DeviceUse(
                uuid=lease.uuids[0],
                since=minute + timedelta(minutes=number),
                seconds=60,
                use_sum=60 * (40 + number),
                **counts,
            )
            for number in range(-20, 29)
        ]
    )


def _answers(base: str) -> bool:
    try:
        return requests.get(f"{base}/api", timeout=120).ok
    except requests.RequestException:
        return False
