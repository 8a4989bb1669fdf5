"""How long ``poll()`` of running servers takes, asked inside the hub that polls them.

Imported by the hub's configuration. ``/hub/benchmark/polls?side=ours`` begins to poll the
servers of members whose names begin so, one every :data:`EVERY` seconds whether or not the
last one has answered; ``/hub/benchmark/polled`` ends that and tells the seconds that each
poll took.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from typing import Any

from tornado.web import RequestHandler

EVERY = 0.05

_probe: Probe | None = None


class Probe:
    """Polls servers in turns until it is told to stop."""

    def __init__(self, spawners: list[Any]) -> None:
        self._stop = asyncio.Event()
        self._running = asyncio.ensure_future(self._run(spawners))

    async def end(self) -> list[float]:
        """Seconds of each poll, those that have not answered yet included."""
        self._stop.set()
        return await self._running

    async def _run(self, spawners: list[Any]) -> list[float]:
        asked = []
        for spawner in itertools.cycle(spawners):
            if self._stop.is_set():
                break
            asked.append(asyncio.ensure_future(_seconds(spawner)))
            await asyncio.sleep(EVERY)
        return list(await asyncio.gather(*asked))


async def _seconds(spawner: Any) -> float:
    began = time.perf_counter()
    if await spawner.poll() is not None:
        raise RuntimeError(f"the server of {spawner.user.name} is not running")
    return time.perf_counter() - began


class Begin(RequestHandler):
    async def get(self) -> None:
        global _probe
        side = self.get_argument("side")
        users = self.settings["app"].users.values()
        _probe = Probe([u.spawner for u in users if u.name.startswith(side) and u.running])
        self.write("{}")


class End(RequestHandler):
    async def get(self) -> None:
        if _probe is None:
            raise RuntimeError("nothing was polled")
        self.write(json.dumps(await _probe.end()))


HANDLERS = [(r"/benchmark/polls", Begin), (r"/benchmark/polled", End)]
"""For ``c.JupyterHub.extra_handlers``."""
