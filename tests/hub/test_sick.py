"""A GPU that falls sick in the middle of a session. Real here: JupyterHub, proxy, accounting
service, its samples, local servers, Chromium; the GPUs are simulated, and fail as a script says."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from gpuspawner.leases.models import Lease, LeaseState, ServerRef
from gpuspawner.notifications.models import NoticeKind
from tests.support import axe
from tests.support.browser import screenshot
from tests.support.hub import ADMIN
from tests.support.pages import sign_in, words
from tests.support.paying_hub import PayingHub
from tests.support.processes import wait_for

CONFIG = """
c.GPURates.by_model = {"*": 1}
c.GPUCredits.opening_grant = 1000
c.GPUHealth.quiet_minutes = 0.05
c.GPUMonitoring.sample_seconds = 0.5
"""
T4 = {"gpus": 1, "gpu_model": "T4"}


class Scene:
    """A hub, and the script that its GPUs follow."""

    def __init__(self, hub: PayingHub, script: Path) -> None:
        self.hub = hub
        self._script = script

    def play(self, **shows: Any) -> None:
        """What the T4 shows from now on."""
        new = self._script.with_suffix(".new")
        new.write_text(json.dumps({"2": shows} if shows else {}))
        os.replace(new, self._script)

    def state(self) -> str:
        """What the T4 is doing."""
        return self.hub.broker.overview().devices[2].state

    def lease(self, user: str) -> Lease | None:
        """The open lease of a member's server."""
        return self.hub.broker.lease_of(ServerRef(user))


@pytest.fixture
def scene(hubs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    script = tmp_path / "script.json"
    script.write_text("{}")
    environment = {"GPUSPAWNER_SIMULATION": str(script)}
    with PayingHub(tmp_path / "hub", CONFIG, environment=environment) as hub:
        yield Scene(hub, script)


def told(hub: PayingHub, user: str) -> list[str]:
    return [
        each.title
        for each in hub.broker.notifications.notices_of(user)
        if each.kind is NoticeKind.GPU_SICK
    ]


def test_a_gpu_falls_sick_and_comes_back(scene: Scene, browser: Browser) -> None:
    hub = scene.hub
    lease = hub.start_server("ada", **T4)
    assert "is sick" not in words(hub.page("ada"))
    scene.play(xids=[79], probe="It computes wrongly.")
    wait_for(lambda: told(hub, "ada"), "the warning", timeout=60)
    assert told(hub, "ada") == ["A GPU of your server is sick"]
    assert scene.state() == "draining"
    for width in (1280, 390):
        page = browser.new_page(viewport={"width": width, "height": 800})
        sign_in(page, hub, "ada", "")
        text = page.inner_text(".notice.bad")
        assert "GPU 2 (T4), Xid 79: it lost power, NVLink or the bus" in text
        assert "comes back when it has stopped" in text
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert axe.troubles(page) == []
        screenshot(page, f"sick-{width}")
        page.close()
    assert "drained by health: Xid 79" in words(hub.page(ADMIN, "admin"))

    hub.stop_server("ada")
    assert hub.spawn("bob", T4).ok

    def given_back() -> bool:
        found = hub.broker.lease(lease.id)
        return found.state is LeaseState.ENDED and found.refunded > 0

    wait_for(given_back, "the refund", timeout=60)

    def failed() -> bool:
        return any("failed: It computes wrongly" in each.detail for each in hub.broker.trail())

    wait_for(failed, "the first probe", timeout=60)
    assert scene.state() == "drained"
    assert scene.lease("bob") is None  # he waits for it
    scene.play()
    wait_for(lambda: scene.lease("bob"), "the GPU's return", timeout=90)
    assert not any(finding.problem for finding in hub.broker.audit()[0])
    known = hub.broker.health.device_states()[lease.uuids[0]]
    assert (known.state.verdict, known.state.falls) == ("watch", 1)
