"""The live page of the cluster, and a GPU that falls sick. Real here: JupyterHub, proxy, accounting
service, its samples, local servers, Chromium; the GPUs are simulated, and fail as a script says."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from playwright.sync_api import Browser

from gpuspawner.core.errors import StoreUnavailable
from gpuspawner.leases.models import LeaseState
from gpuspawner.monitoring import cluster_views
from gpuspawner.monitoring.models import DeviceUse
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.services import Services
from tests.support.batch_jobs import CLUSTER, look_since, run
from tests.support.brokers import (
    T0,
    Clock,
    make_services,
    migrated_bytes,
    open_services,
    running,
)
from tests.support.hub import ADMIN
from tests.support.pages import (
    PHONE,
    WIDE,
    ask,
    look_over,
    look_over_in_the_dark,
    mentions,
    picture,
    served,
    sign_in,
    words,
)
from tests.support.paying_hub import PayingHub
from tests.support.processes import wait_for

CONFIG = """
c.GPURates.by_model = {"*": 1}
c.GPUCredits.grace_seconds = 3600
c.GPUCredits.opening_grant = 1000
service_constants["gpuspawner.monitoring.health_service.QUIET_MINUTES"] = 0.05
c.GPUMonitoring.sample_seconds = 0.5
c.JupyterHub.services.append({"name": "bot", "api_token": "token-of-bot"})
c.JupyterHub.load_roles.append(
    {"name": "bot", "services": ["bot"], "scopes": ["access:services!service=gpu"]}
)
"""


class Scene:
    """A hub, and the script that its GPUs follow."""

    def __init__(self, hub: PayingHub, script: Path) -> None:
        self.hub = hub
        self._script = script

    def play(self, **devices: dict[str, Any]) -> None:
        """What the GPUs show from now on, by index: ``_0={"use": 73}``."""
        text = json.dumps({name.removeprefix("_"): shows for name, shows in devices.items()})
        new = self._script.with_suffix(".new")
        new.write_text(text)
        os.replace(new, self._script)


@pytest.fixture(scope="module")
def scene(hubs: None, folder: Path) -> Iterator[Scene]:
    """Ada has the first A100, Bob the second; the T4 is free."""
    script = folder / "script.json"
    script.write_text("{}")
    environment = {"GPUSPAWNER_SIMULATION": str(script)}
    with PayingHub(folder / "hub", CONFIG, environment=environment) as hub:
        hub.start_server("ada", "training", gpus=1, gpu_model="A100")
        hub.start_server("bob", "secret-plan", gpus=1, gpu_model="A100")
        yield Scene(hub, script)


def events(answer: requests.Response) -> Iterator[tuple[str, Any]]:
    """What a stream tells, one event after the other."""
    name = ""
    for line in answer.iter_lines(chunk_size=None, decode_unicode=True):
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def watch(hub: PayingHub, user: str, url: str = "", pictures: int = 1) -> requests.Response:
    """A stream as a script with this member's token gets it."""
    url = url or f"{hub.url}/services/gpu/cluster/live"
    headers = {"Authorization": f"token {hub.user_token(user)}"}
    return requests.get(f"{url}?pictures={pictures}", headers=headers, timeout=60, stream=True)


# Who is told what.


def test_member_sees_all_devices_but_no_other_names(scene: Scene) -> None:
    hub = scene.hub
    page = hub.page("ada", "cluster")
    with watch(hub, "ada", pictures=2) as stream:
        assert stream.headers["Content-Type"].startswith("text/event-stream")
        assert stream.headers["Cache-Control"] == "no-store"
        told = list(events(stream))
    for text in (page.text, json.dumps(told), hub.json("ada", "cluster").text):
        assert "secret-plan" not in text
        assert not mentions(text, "bob")
        assert hub.services.leases.of_account("member:bob")[0].id not in text
    assert "1 of 3 free, the queue is empty" in words(page)
    assert "yours: training" in words(page)
    assert words(page).count("in use") == 1
    assert dict(told)["picture"]["summary"] == "1 of 3 free, the queue is empty"
    first = hub.services.leases.of_account("member:ada")[0].uuids[0]
    own = dict(told)["mine"]
    assert own.keys() == {first}
    assert (own[first]["who"], own[first]["slots"]) == ("yours: training", [0])
    devices = hub.json("ada", "cluster").json()["devices"]
    assert [(some["user"], some["server"]) for some in devices] == [
        ("ada", "training"),
        (None, None),
        (None, None),
    ]
    assert [bool(some["since"]) for some in devices] == [True, True, False]


def test_names_are_shown_to_admins_or_by_setting(scene: Scene) -> None:
    hub = scene.hub
    assert "bob/secret-plan" in words(hub.page(ADMIN, "cluster"))
    with watch(hub, ADMIN) as stream:
        tiles = dict(events(stream))["picture"]["tiles"]
    assert [told["who"] for told in tiles.values()] == ["ada/training", "bob/secret-plan", ""]
    with served(hub, hub.services, members_see_names=True) as url:
        page = words(ask(hub, "ada", url + "cluster"))
        assert "bob" in page
        assert "secret-plan" not in page
        users = [some["user"] for some in ask(hub, "ada", url + "api/cluster").json()["devices"]]
        assert users == ["ada", "bob", None]


def test_cluster_is_hidden_from_strangers_and_services(scene: Scene) -> None:
    hub = scene.hub
    for path in ("cluster/live", "api/cluster"):
        for token, status in (("", 401), ("made-up", 401), ("token-of-bot", 403)):
            headers = {"Authorization": f"token {token}"} if token else {}
            url = f"{hub.url}/services/gpu/{path}"
            answer = requests.get(url, headers=headers, timeout=120, allow_redirects=False)
            assert answer.status_code == status
            assert "A100" not in answer.text
    page = requests.get(f"{hub.url}/services/gpu/cluster", timeout=120)
    assert "/hub/login" in page.url
    wrong = ask(hub, "ada", f"{hub.url}/services/gpu/cluster/live?pictures=x")
    assert wrong.status_code == 400
    assert "'pictures'" in wrong.json()["message"]


# As it goes on.


def test_cluster_page_updates_live(scene: Scene, browser: Browser) -> None:
    hub = scene.hub
    troubles: list[str] = []
    page = browser.new_page(viewport=WIDE)
    page.on("console", lambda message: troubles.append(message.text))
    sign_in(page, hub, "ada", "cluster")
    scene.play(_0={"use": 73, "used_bytes": 13 * 2**29, "celsius": 61}, _1={"use": 4})
    page.wait_for_selector(".tile.own:has-text('73 %')")
    scene.play(
        _0={"use": 100, "used_bytes": 79 * 2**30, "celsius": 91, "throttle": 0x40},
        _1={"error": "It fell off the bus.", "xids": [79]},
    )
    page.wait_for_selector(".tile.own:has-text('100 %')")
    page.wait_for_selector(".tile:has-text('is not responding')")
    own = page.inner_text(".tile.own")
    assert "79.0 of 80 GB" in own
    assert "91 °C" in own
    assert "too warm" in own
    assert "yours: training" in own
    assert "fell off" not in page.content()
    assert page.inner_text("#live") == "Live."
    assert page.get_attribute(".tile.own [data-width=level]", "width") == "100"
    look_over(page, "cluster")
    page.close()
    page = browser.new_page(viewport=WIDE)
    page.on("console", lambda message: troubles.append(message.text))
    sign_in(page, hub, ADMIN, "cluster")
    page.wait_for_selector(".tile:has-text('It fell off the bus; Xid 79')")
    look_over_in_the_dark(page, "cluster-admin")
    scene.play()
    hub.start_server("cleo", gpus=1, gpu_model="T4")
    page.wait_for_selector(".tile:has-text('cleo')")
    hub.stop_server("cleo")
    # Without the one that is sick since it fell off the bus.
    page.wait_for_selector("#summary:has-text('1 of 2 free')")
    assert page.locator(".tile:has-text('cleo')").count() == 0
    assert troubles == []


def test_cluster_page_works_without_javascript(scene: Scene, browser: Browser) -> None:
    context = browser.new_context(java_script_enabled=False, viewport=PHONE)
    page = context.new_page()
    sign_in(page, scene.hub, "ada", "cluster")
    assert page.locator(".tile").count() == 3
    assert "yours: training" in page.inner_text(".tile.own")
    page.click("#reload")
    assert page.locator(".tile").count() == 3
    context.close()


# What goes wrong.


@contextmanager
def some_services(folder: Path, devices: int) -> Iterator[Services]:
    """Services of a test's own, with so many GPUs."""
    file = folder / f"{devices}.sqlite"
    file.write_bytes(migrated_bytes())
    source = f"simulated:{devices}xA100-80GB"
    services = make_services(database_url=f"sqlite:///{file}", device_source=source)
    services.ledger.open_account("ada")
    yield services
    services.store.close()


def test_stalled_stream_is_dropped_without_blocking(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = scene.hub
    for name, seconds in (("EVERY", 0.2), ("TAKES_IN", 5.0), ("LASTS", 3600.0)):
        monkeypatch.setattr(cluster_views, name, seconds)
    changing, left = iter(range(10**9)), []
    monkeypatch.setattr(
        "gpuspawner.monitoring.cluster_views.summary", lambda picture: f"{next(changing)} free"
    )
    leave = cluster_views.LiveCluster.leave

    def leave_and_tell(self: cluster_views.LiveCluster, viewer: cluster_views.Viewer) -> None:
        leave(self, viewer)
        left.append(viewer.user)

    monkeypatch.setattr(cluster_views.LiveCluster, "leave", leave_and_tell)
    with (
        some_services(tmp_path, 1000) as services,
        served(hub, services) as url,
        closing(socket.socket()) as silent,
    ):
        at = urlsplit(url)
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect((at.hostname, at.port))
        silent.sendall(
            f"GET {at.path}cluster/live HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: token {hub.user_token('ada')}\r\n\r\n".encode()
        )
        with watch(hub, "bob", url + "cluster/live", pictures=1000) as stream:
            told = events(stream)
            while not left:  # who reads goes on all the while
                assert next(name for name, _ in told if name == "picture")
            assert left == ["ada"]
        silent.settimeout(60)
        while silent.recv(2**20):
            pass  # what had been sent before; then the connection ends


@pytest.fixture(scope="module")
def live(scene: Scene, folder: Path) -> Iterator[tuple[PayingHub, Services, str]]:
    """Services with two GPUs, and where their stream is."""
    with some_services(folder, 2) as services, served(scene.hub, services) as url:
        yield scene.hub, services, f"{url}cluster/live"


def test_live_streams_per_member_are_limited(live: tuple[PayingHub, Services, str]) -> None:
    hub, _, url = live
    streams = [watch(hub, "ada", url, 1000) for _ in range(cluster_views.MOST_OF_ONE)]
    one_more = watch(hub, "ada", url)
    assert one_more.status_code == 429
    assert one_more.json()["message"].startswith("Too many live pages are open.")
    with watch(hub, "bob", url) as stream:
        assert "picture" in dict(events(stream))
    streams.pop().close()

    def again() -> bool:
        with watch(hub, "ada", url) as stream:
            return stream.ok

    wait_for(again, "room for another stream")
    for stream in streams:
        stream.close()


def test_live_stream_has_a_maximum_lifetime(
    live: tuple[PayingHub, Services, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, _, url = live
    waits: list[float] = []
    following = cluster_views.Viewer.next

    async def after_the_first(viewer: cluster_views.Viewer, seconds: float) -> str | None:
        if viewer.user != "bob":  # ada's, of the test before
            return await following(viewer, seconds)
        waits.append(seconds)
        return await following(viewer, 0.0 if waits[1:] else seconds)  # as if it had lasted

    monkeypatch.setattr(cluster_views.Viewer, "next", after_the_first)
    with watch(hub, "bob", url, 1000) as stream:
        assert "picture" in dict(events(stream))
    first, second = waits
    assert second < first <= cluster_views.LASTS, "what is left of its time"


def test_live_stream_reports_errors_and_recovers(
    live: tuple[PayingHub, Services, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, services, url = live
    monkeypatch.setattr(cluster_views, "EVERY", 0.1)
    with watch(hub, "bob", url, 1000) as stream:
        told = events(stream)
        assert next(told) == ("trouble", "")
        for error, sentence in (
            (StoreUnavailable(), "Database unavailable."),
            (ZeroDivisionError("a secret of the code"), "Something went wrong."),
        ):

            def fail(error: Exception = error) -> Any:
                raise error

            with monkeypatch.context() as away:
                away.setattr(services.leases, "open_leases", fail)
                said = next(text for name, text in told if name == "trouble" and text)
                assert said.startswith(sentence)
            assert next(text for name, text in told if name == "trouble") == ""


# What was held, and what was used of it.


def used(percent: int) -> dict[str, int]:
    """A minute at this use."""
    counts = {"measured": 60, "use_sum": 60 * percent, "use_max": percent}
    return {**counts, "memory_max": percent * 2**29}


@pytest.fixture(scope="module")
def past(scene: Scene, folder: Path) -> Iterator[str]:
    """Pages of a site where Ada's GPU worked for three hours, and Bob's two rested."""
    (folder / "past.sqlite").write_bytes(migrated_bytes())
    services = open_services(f"sqlite:///{folder}/past.sqlite", Clock(), opening_grant=1000)
    clock = services.clock
    assert isinstance(clock, Clock)
    ada, bob = running(services, "ada", 1), running(services, "bob", 2, "=secret-plan")
    minutes = [
        DeviceUse(uuid=uuid, since=T0 + timedelta(minutes=n), seconds=60, **counts)
        for n in range(180)
        for lease, counts in (
            (ada, {"samples": 60, "known": 60, "busy": 57, **used(n % 100)}),
            (bob, {"samples": 60, "known": 60, "busy": 3}),
        )
        for uuid in lease.uuids
    ]
    services.monitoring.remember_use(minutes)
    clock.forward(hours=4)
    services.leases.release(bob.id, ended_at=clock.now, reason="stopped")
    look_since(services, T0)
    services.job_billing.debit(CLUSTER, [run(1, gpus={"a100": 2}, user="carl")])
    with served(scene.hub, services) as url:
        yield url
    services.store.close()


def test_use_report_shows_idle_time_to_admins_only(
    scene: Scene, past: str, browser: Browser
) -> None:
    page = words(ask(scene.hub, ADMIN, past + "used"))
    assert "bob 1 8.00 0.30 5.70 5 % ada 1 4.00 2.85 0.15 95 %" in page
    total = "Total 2 12.00 3.15 5.85 35 %"
    assert f"{total} Batch jobs had 2.00 more GPU hours" in page
    for size in (WIDE, PHONE):
        picture(browser, scene.hub, past + "used", f"used-{size['width']}", size)
    by_model = ask(scene.hub, ADMIN, past + "api/used?by=model").json()
    assert [row["name"] for row in by_model["rows"]] == ["A100-80GB"]
    told = ask(scene.hub, ADMIN, past + "api/used").json()
    rested = {some["user"]: some["rested_gpu_seconds"] for some in told["most_rested"]}
    assert list(rested.items()) == [("bob", 20520), ("ada", 540)]
    assert [told[some]["held_gpu_seconds"] for some in ("total", "batch")] == [43200, 7200]
    text = ask(scene.hub, ADMIN, past + "used.csv?by=group").text.splitlines()
    assert text[0].startswith("group,sessions,held_gpu_hours,measured_gpu_hours")
    assert text[1] == ",2,12.000,9.000,3.150,5.850"
    for query in (
        "by=account",
        "from=x",
        "to=",
        "from=2025-01-01&to=2025-06-01",
        "from=2025-03-02",
    ):
        refused = ask(scene.hub, ADMIN, past + f"api/used?{query}")
        assert refused.status_code == 400, query
        assert refused.json()["error"] == "invalid_request"
    for path in ("used", "used.csv", "api/used"):
        answer = ask(scene.hub, "ada", past + path)
        assert answer.status_code == 403
        assert "Reports of use are for admins" in answer.text
        assert "bob" not in answer.text


def test_member_sees_usage_curves_of_own_device(scene: Scene, past: str, browser: Browser) -> None:
    hub = scene.hub
    told = words(ask(hub, "ada", past))
    assert "Whole session: used 45 % on average, 99 % at most; memory 49.5 of 80 GB at" in told
    assert "utilization" not in words(ask(hub, "bob", past)), "nothing of his runs"
    headers = {"Authorization": f"token {hub.user_token('ada')}"}
    page = browser.new_context(viewport=PHONE, extra_http_headers=headers).new_page()
    page.goto(past)
    shown = page.locator("figure path.use").first.bounding_box()
    assert shown and shown["width"] > 50
    look_over(page, "curves")


# What falls sick.


def test_sick_device_is_drained_until_it_recovers(scene: Scene, browser: Browser) -> None:
    hub, t4 = scene.hub, {"gpus": 1, "gpu_model": "T4"}

    def state() -> str:
        return hub.services.monitoring.overview().devices[2].state

    lease = hub.start_server("dora", **t4)
    assert "been sick" not in words(hub.page("dora"))
    scene.play(_2={"xids": [31]})  # her program made a mistake
    wait_for(lambda: "Xid 31" in words(hub.page(ADMIN, "cluster")), "the error", timeout=60)
    scene.play(_2={"xids": [79], "probe": "It computes wrongly."})
    wait_for(lambda: hub.told("dora", NoticeKind.GPU_SICK), "the warning", timeout=60)
    assert hub.told("dora", NoticeKind.GPU_SICK) == ["A GPU of your server is sick"]
    assert state() == "draining"
    assert not any("Xid 31" in each.detail for each in hub.services.audit.trail())
    page = browser.new_page(viewport=WIDE)
    sign_in(page, hub, "dora", "")
    text = page.inner_text(".notice.bad")
    assert "GPU 2 (T4), Xid 79: it lost power, NVLink or the bus" in text
    assert "is refunded when it has stopped" in text
    look_over(page, "sick")
    assert "drained by health: Xid 79" in words(hub.page(ADMIN, "devices"))

    hub.stop_server("dora")
    assert hub.spawn("emil", t4).ok

    def given_back() -> bool:
        found = hub.services.leases.get(lease.id)
        return found.state is LeaseState.ENDED and found.refunded > 0

    wait_for(given_back, "the refund", timeout=60)

    def failed() -> bool:
        return any(
            "failed: It computes wrongly" in each.detail for each in hub.services.audit.trail()
        )

    wait_for(failed, "the first probe", timeout=60)
    assert state() == "drained"
    assert hub.lease_of("emil") is None  # he waits for it
    scene.play()
    wait_for(lambda: hub.lease_of("emil"), "the GPU's return", timeout=90)
    assert not any(finding.problem for finding in hub.services.audit.check()[0])
    known = hub.services.health.device_states()[lease.uuids[0]]
    assert (known.state.verdict, known.state.falls) == ("watch", 1)
