"""The accounting service's own duty of sampling and judging, in a time that goes faster.

It runs in a thread of the test, on the hub's database, with the Hub's REST API and the processes
of the hub's servers as they are. What it orders is carried out by the hub's own service, whose
own sampler is off or judges no idle GPU.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from gpuspawner.engines.local import LocalEngine
from gpuspawner.monitoring.service import GPUMonitoring
from gpuspawner.service import device_monitor
from gpuspawner.service.device_monitor import GPUSampler
from gpuspawner.service.hub_client import HubClient
from gpuspawner.service.worker import Tick
from tests.support.brokers import make_services
from tests.support.paying_hub import PayingHub
from tests.support.slurm_hub import SlurmHub


class Fast:
    """A clock that began at the true time and goes faster."""

    def __init__(self, times: float) -> None:
        self._times = times
        self._began, self._monotonic = datetime.now(timezone.utc), time.monotonic()

    def __call__(self) -> datetime:
        passed = time.monotonic() - self._monotonic
        return self._began + timedelta(seconds=self._times * passed)


class FastMonitor:
    """``with FastMonitor(hub, monkeypatch, times=30, when_idle={...}) as monitor``."""

    def __init__(
        self,
        hub: PayingHub | SlurmHub,
        monkeypatch: pytest.MonkeyPatch,
        *,
        times: float,
        **settings: Any,
    ) -> None:
        self.clock = Fast(times)
        self.services = make_services(clock=self.clock, database_url=hub.database_url, **settings)
        self._tick = Tick(
            services=self.services,
            hub=HubClient(f"{hub.url}/hub/api", hub.token),
            engines={"local": LocalEngine()},
            log=logging.getLogger("monitor"),
        )
        monkeypatch.setattr(device_monitor, "WRITE_EVERY", 0.5)
        monkeypatch.setattr(device_monitor, "JUDGE_EVERY", 1)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._duty: asyncio.Future[None] | None = None

    def __enter__(self) -> FastMonitor:
        self._thread.start()
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.services.store.close()

    def begin(self) -> None:
        """Sample and judge; a sample each second and a half of the clock."""
        service = GPUSampler()
        service.monitoring = GPUMonitoring(sample_seconds=0.05)

        async def start() -> None:
            self._duty = asyncio.ensure_future(service.remember_use(self._tick))

        asyncio.run_coroutine_threadsafe(start(), self._loop).result(30)

    def end(self) -> None:
        """Stop on the spot."""

        async def stop() -> None:
            if self._duty is not None:
                self._duty.cancel()
                await asyncio.gather(self._duty, return_exceptions=True)
                self._duty = None

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(60)
