"""Somebody sets the wall clock while a server runs. Real: hub, proxy, service, local processes and
SQLite; their wall clock is the test's, the kernel's time since boot is real."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuspawner.core.units import MICRO
from gpuspawner.engines.local import started_at
from gpuspawner.leases.models import Lease
from tests.support.clocks import WallClock
from tests.support.paying_hub import PayingHub
from tests.support.processes import wait_for

HOUR = 3600
YEAR = 365 * 24 * HOUR
STEPS = (2 * HOUR, -2 * HOUR, YEAR, -YEAR)

EXACT = 0.5
"""Seconds by which a charge may differ from how long the server lived."""


class ClockHub(PayingHub):
    """A hub and a service with a wall clock each; members' servers have this machine's."""

    def __init__(self, folder: Path) -> None:
        self.clocks = {who: WallClock(folder / who) for who in ("hub", "service")}
        super().__init__(
            folder / "files",
            "c.GPUCredits.opening_grant = 10000\nc.Accounting.reconcile_seconds = 1",
            environment=self.clocks["hub"].environment,
            external_proxy=True,
        )
        of_service = self.clocks["service"].environment
        self.config += (
            "\nfrom gpuspawner.config import _entries"
            "\nfor each in _entries(c.JupyterHub.services):\n"
            f"    each.setdefault('environment', {{}}).update({of_service!r})\n"
        )

    def set_clocks(self, hub: int, service: int) -> None:
        """Set the wall clocks of the hub and of the service so many seconds ahead of ours."""
        self.clocks["hub"].set(hub)
        self.clocks["service"].set(service)

    def clock_entries(self) -> list[str]:
        """What the audit log says of wall clocks that were set."""
        entries = (entry for entry in self.services.audit.trail(1000) if entry.action == "clock")
        return [entry.detail for entry in entries if "The wall clock was set by" in entry.detail]


@pytest.fixture
def hub(hubs: None, folder: Path) -> Iterator[ClockHub]:
    with ClockHub(folder) as hub:
        yield hub


def charged(hub: PayingHub, lease: Lease) -> float:
    return hub.services.leases.get(lease.id).charged / MICRO


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


def test_clock_steps_do_not_change_the_charge(hub: ClockHub) -> None:
    """While hub and service run, each with another step, and while both are down."""
    lease = hub.start_server("ada", gpus=1, hours=1)
    life = Lifetime(lease)
    for step in STEPS:
        hub.set_clocks(step, -step)
        wait_for_charges(hub, lease, 2)
        assert charged(hub, lease) <= life.so_far()
    hub.set_clocks(0, 0)
    hub.wait_rounds(2, "clock")  # so that the service knows the time from which the next step is
    before = hub.clock_entries()
    hub.kill9()
    hub.set_clocks(2 * HOUR, 2 * HOUR)
    hub.start()
    wait_for_charges(hub, lease, 2)
    assert charged(hub, lease) <= life.so_far()
    assert len(hub.clock_entries()) == len(before) + 1
    at_least = life.so_far()
    hub.stop_server("ada")
    hub.wait_end(lease)
    assert at_least - EXACT <= charged(hub, lease) <= life.whole() + EXACT
