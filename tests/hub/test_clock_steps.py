"""Somebody sets the wall clock while a server runs. Real: hub, proxy, service, local processes and
SQLite; their wall clock is the test's, the kernel's time since boot is real."""

from __future__ import annotations

import os
import select
import threading
import time
from pathlib import Path

import pytest

from gpuspawner.core.units import MICRO
from gpuspawner.engines.local import started_at
from gpuspawner.leases.models import Lease, LeaseState
from tests.support.clocks import WallClock
from tests.support.paying_hub import PayingHub
from tests.support.processes import wait_for

HOUR = 3600
YEAR = 365 * 24 * HOUR
STEPS = (2 * HOUR, -2 * HOUR, YEAR, -YEAR)

EXACT = 0.5


def a_hub(folder: Path, who: str, clock: WallClock) -> PayingHub:
    """A hub of which the named processes have the test's clock; its members' servers have ours."""
    config = "c.GPUCredits.opening_grant = 10000\nc.Accounting.reconcile_seconds = 1"
    environment = clock.environment if who != "service" else {}
    hub = PayingHub(folder / "hub", config, environment=environment, external_proxy=True)
    if who != "hub":
        hub.config += (
            "\nfrom gpuspawner.config import _entries"
            "\nfor each in _entries(c.JupyterHub.services):\n"
            f"    each.setdefault('environment', {{}}).update({clock.environment!r})\n"
        )
    return hub


def charged(hub: PayingHub, lease: Lease) -> float:
    return hub.broker.lease(lease.id).charged / MICRO


def wait_for_charges(hub: PayingHub, lease: Lease, seconds: float) -> None:
    """Wait until so many further seconds are charged; a credit is a second."""
    before = charged(hub, lease)
    wait_for(lambda: charged(hub, lease) >= before + seconds, "charges", timeout=30)


class Lifetime:
    """How long a local server's process lived, by our clock."""

    def __init__(self, lease: Lease) -> None:
        began = started_at(lease.engine_ref)
        assert began is not None
        self.began = began.timestamp()
        self.ended = 0.0
        self._descriptor = os.pidfd_open(int(lease.engine_ref.partition(":")[0]))
        self._waiting = threading.Thread(target=self._wait)
        self._waiting.start()

    def so_far(self) -> float:
        assert not self.ended, "it has ended"
        return time.time() - self.began

    def whole(self) -> float:
        self._waiting.join()
        return self.ended - self.began

    def _wait(self) -> None:
        select.select([self._descriptor], [], [])
        self.ended = time.time()
        os.close(self._descriptor)


def assert_charged_exactly(hub: PayingHub, lease: Lease, life: Lifetime) -> None:
    """Stop the server, and see what it cost."""
    hub.stop_server("ada")
    wait_for(lambda: hub.broker.lease(lease.id).state is LeaseState.ENDED, "the end")
    assert charged(hub, lease) == pytest.approx(life.whole(), abs=EXACT)


@pytest.mark.parametrize("who", ["hub", "service", "both"])
def test_steps_during_a_session(hubs: None, tmp_path: Path, who: str) -> None:
    clock = WallClock(tmp_path / "clock")
    with a_hub(tmp_path, who, clock) as hub:
        lease = hub.start_server("ada", gpus=1, hours=1)
        life = Lifetime(lease)
        for step in STEPS:
            clock.set(step)
            wait_for_charges(hub, lease, 2)
            assert charged(hub, lease) <= life.so_far()
        assert_charged_exactly(hub, lease, life)


@pytest.mark.parametrize("step", [2 * HOUR, -2 * HOUR])
def test_a_step_between_a_crash_and_a_restart(hubs: None, tmp_path: Path, step: int) -> None:
    clock = WallClock(tmp_path / "clock")
    with a_hub(tmp_path, "both", clock) as hub:
        lease = hub.start_server("ada", gpus=1, hours=1)
        life = Lifetime(lease)
        wait_for_charges(hub, lease, 1)
        hub.kill9()
        clock.set(step)
        hub.start()
        wait_for_charges(hub, lease, 2)
        assert charged(hub, lease) <= life.so_far()
        [told] = [entry.detail for entry in hub.broker.trail() if entry.action == "clock"]
        assert "The wall clock was set by" in told
        assert_charged_exactly(hub, lease, life)
