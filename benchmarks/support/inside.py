"""What a benchmark asks of the hub's own process. Imported by the hub's configuration.

``/hub/benchmark/clock`` tells the processor time of the event loop's thread,
``/hub/benchmark/ticker?seconds=1&grants=0`` how late a 1 ms ticker was on the loop, and
``/hub/benchmark/steps`` how long each step of our own code held the loop.
"""

from __future__ import annotations

import asyncio
import json
import time
import types
from collections.abc import Awaitable, Generator
from typing import Any

from tornado.web import RequestHandler

from gpuspawner.leases.models import Request, ServerRef
from gpuspawner.services import Services
from support.noop import GPUNoopSpawner

TICK = 0.001
STEPS: list[float] = []
"""Seconds that each step of a :class:`TimedNoopSpawner` held the event loop."""


class Clock(RequestHandler):
    """Processor seconds of the thread that runs the event loop."""

    def get(self) -> None:
        self.write(json.dumps(time.thread_time()))


class Steps(RequestHandler):
    """The steps since the last question, in seconds."""

    def get(self) -> None:
        self.write(json.dumps(STEPS))
        STEPS.clear()


class Ticker(RequestHandler):
    """Seconds by which each tick was late. The loop has nothing else to do, but with
    ``grants=1`` leases are granted and released beside it without a pause."""

    async def get(self) -> None:
        services: Services = self.settings["app"].users.settings["gpuspawner_services"]
        stop = asyncio.Event()
        if self.get_argument("grants") == "0":
            stop.set()
        granting = asyncio.ensure_future(grant_and_release(services, stop))
        late = await ticker(float(self.get_argument("seconds")))
        stop.set()
        self.write(json.dumps({"late": late, "grants": await granting}))


async def ticker(seconds: float) -> list[float]:
    """How late each tick was."""
    late = []
    end = time.perf_counter() + seconds
    while (before := time.perf_counter()) < end:
        await asyncio.sleep(TICK)
        late.append(max(0.0, time.perf_counter() - before - TICK))
    return late


async def grant_and_release(services: Services, stop: asyncio.Event) -> int:
    """Lease after lease, off the loop as a spawner does it. How many there were."""
    count = 0
    server, request = ServerRef("ours-ticker"), Request(devices=1)
    while not stop.is_set():
        lease = await services.run(services.leases.grant, server, request, engine="noop")
        await services.run(services.leases.confirm, lease.id, "noop")
        await services.run(
            services.leases.release, lease.id, ended_at=services.clock(), reason="stopped"
        )
        count += 1
    return count


HANDLERS = [
    (r"/benchmark/clock", Clock),
    (r"/benchmark/ticker", Ticker),
    (r"/benchmark/steps", Steps),
]
"""For ``c.JupyterHub.extra_handlers``."""


@types.coroutine
def timed(work: Awaitable[Any]) -> Generator[Any, Any, Any]:
    """Await something, and write down how long each of its steps held the event loop."""
    steps: Any = work.__await__()
    resume, value = steps.send, None
    while True:
        began = time.perf_counter()
        try:
            waiting_for = resume(value)
        except StopIteration as end:
            return end.value
        finally:
            STEPS.append(time.perf_counter() - began)
        try:
            yield waiting_for
            resume, value = steps.send, None
        except BaseException as error:
            resume, value = steps.throw, error


class TimedNoopSpawner(GPUNoopSpawner):
    """Times every step that the mixin takes on the event loop, in a spawn and in a stop."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        began = time.perf_counter()
        super().__init__(*args, **kwargs)
        STEPS.append(time.perf_counter() - began)

    async def run_pre_spawn_hook(self) -> None:
        await timed(super().run_pre_spawn_hook())

    async def start(self) -> str:
        url: str = await timed(super().start())
        return url

    async def stop(self, now: bool = False) -> None:
        await timed(super().stop(now=now))

    async def run_post_stop_hook(self) -> None:
        await timed(super().run_post_stop_hook())
