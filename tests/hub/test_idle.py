"""Long runs and idle servers in one hub, in a time that goes thirty times as fast. Real: hub,
proxy, accounting service, processes that compute and some that rest.
Simulated: the GPUs, whose use follows these processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from gpuspawner.engines.local import LEASE_VARIABLE
from gpuspawner.leases.models import Lease, LeaseState
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.service import idle_culler
from tests.support.fast_monitor import FastMonitor
from tests.support.gpu_hub import locked
from tests.support.paying_hub import PayingHub
from tests.support.processes import wait_for

CATALOG = """
environments:
  - {slug: strict, display_name: Strict, image: none, devices: {default: 1, max: 4}, default: true}
  - {slug: lenient, display_name: Lenient, image: none, devices: {default: 1, max: 4}}
  - {slug: free, display_name: Free, image: none, devices: {default: 1, max: 4}}
"""

FLEET = "simulated:4xA100-80GB"

POLICY = {
    "*": {
        "mode": "enforce",
        "first_minutes": 2,
        "countdown_minutes": 10,  # 20 seconds of ours, in which the test has to see it
        "snooze_minutes": 2,
        "most_snoozes": 1,
    },
    "environment:lenient": {"mode": "advise", "mode_waiting": "enforce"},
    "environment:free": {"mode": "off"},
}

CONFIG = """
c.GPUCredits.opening_grant = 100_000
c.GPUDevices.source = {fleet!r}
c.GPUIdle.policy = {policy!r}
c.GPUMonitoring.sample_seconds = 0
c.GPUSpawnerMixin.catalog = {catalog!r}
c.JupyterHub.tornado_settings = {{"slow_spawn_timeout": 1}}
"""

TRAINS = """
import time
while True:
    until = time.process_time() + 0.015
    while time.process_time() < until:
        pass
    time.sleep(0.1)
"""
"""An eighth of a processor, and so of a GPU: five times what keeps a server."""


@pytest.fixture(scope="module")
def hub(hubs: None, folder: Path) -> Iterator[PayingHub]:
    catalog = folder / "catalog.yaml"
    catalog.write_text(CATALOG, encoding="utf-8")
    config = CONFIG.format(fleet=FLEET, policy=POLICY, catalog=str(catalog))
    with PayingHub(folder / "hub", config) as hub:
        yield hub


@contextmanager
def training(lease: Lease) -> Iterator[None]:
    """A process of this lease computes, as a kernel whose member closed the tab."""
    environment = os.environ | {LEASE_VARIABLE: lease.id}
    process = subprocess.Popen([sys.executable, "-c", TRAINS], env=environment)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def a_write_of(monitor: FastMonitor, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set when the next write to the store begins, and has to wait if the store is locked."""
    store, begun = monitor.services.store, threading.Event()
    writing = store.write

    def write() -> AbstractContextManager[sa.Connection]:
        begun.set()
        return writing()

    monkeypatch.setattr(store, "write", write)
    return begun


def told(hub: PayingHub, user: str, words: str) -> bool:
    return any(words in title for title in hub.told(user, NoticeKind.SESSION_ENDS))


def culls(user: str) -> bool:
    server = {"name": "", "url": f"/user/{user}/"}
    hour = timedelta(hours=1)
    return asyncio.run(idle_culler.cull_arbiter(inactive=hour, inactive_limit=1800, server=server))


def gone(hub: PayingHub, user: str) -> bool:
    return hub.lease_of(user) is None


def test_only_idle_servers_are_warned_and_stopped(
    hub: PayingHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    trains = hub.start_server("trains", environment="strict")
    rests = hub.start_server("rests", environment="strict")
    lenient = hub.start_server("lenient", environment="lenient")
    hub.start_server("free", environment="free")
    with (
        training(trains),
        FastMonitor(hub, monkeypatch, times=30, device_source=FLEET, when_idle=POLICY) as monitor,
    ):
        wait_for(lambda: told(hub, "rests", "stops at"), "the warning", timeout=60)
        snooze = f"leases/{rests.id}/snooze"
        assert hub.call("rests", "POST", snooze).ok
        assert hub.call("rests", "POST", snooze).status_code == 409, "once is allowed"
        wait_for(lambda: told(hub, "lenient", "does not use its GPU"), "the advice", timeout=60)

        # The store is slow, and then the sampler is killed and comes back: it goes on.
        with locked(hub.database_url):
            assert a_write_of(monitor, monkeypatch).wait(60), "it has something to write"
        monitor.end()
        monitor.begin()

        wait_for(lambda: gone(hub, "rests"), "the end of who rests", timeout=90)
        ended = hub.services.leases.get(rests.id)
        assert (ended.outcome, ended.end_reason) == ("idle", "its GPUs were not used")
        assert hub.told("rests", NoticeKind.STOPPED)
        assert hub.services.ledger.member("rests").held == 0, (
            "what was held and not used is theirs again"
        )

        # Nobody waits: who is lenient was advised, and no more. Now two want the one that is free.
        assert not hub.services.leases.get(lenient.id).outcome
        assert not told(hub, "lenient", "stops at")
        hub.start_server("first", environment="free")
        assert hub.spawn("second", {"environment": "free"}).ok
        wait_for(lambda: told(hub, "lenient", "stops at"), "the countdown", timeout=60)
        wait_for(lambda: gone(hub, "lenient"), "the end of who rests meanwhile", timeout=90)
        wait_for(lambda: not gone(hub, "second"), "the turn of who waited", timeout=60)

        for user in ("trains", "free", "first"):
            lease = hub.lease_of(user)
            assert lease and lease.state is LeaseState.RUNNING and not lease.outcome, user
            assert hub.services.notifications.notices_of(user) == []
        # What the culler hears of servers without activity (that it asks is in test_metrics.py).
        monkeypatch.setenv("GPUSPAWNER_DATABASE_URL", hub.database_url)
        idle_culler._services.cache_clear()
        assert [user for user in ("trains", "free") if culls(user)] == ["free"]
        idle_culler._services.cache_clear()
