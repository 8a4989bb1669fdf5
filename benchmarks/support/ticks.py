"""How long an event loop cannot go on, told by the process itself.

The hub answers ``/hub/benchmark/ticks?seconds=10``. The accounting service, run as
``python -m support.ticks`` in the place of ``python -m gpuspawner.service``, writes a line each
second into the file that ``BENCHMARK_TICKS`` names. Both tell the worst of each second: by how
much a tick of a millisecond was late, and for how long the loop's thread computed meanwhile. Who is
late without computing waited for the machine, for Python's lock or for a disk.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from pathlib import Path

from tornado.web import RequestHandler

from gpuspawner.service.app import Accounting

TICK = 0.001


async def worst_of_a_second() -> tuple[float, float]:
    """Seconds by which a tick was late, and seconds that the thread computed between two."""
    late = busy = 0.0
    end = time.perf_counter() + 1
    while (before := time.perf_counter()) < end:
        computed = time.thread_time()
        await asyncio.sleep(TICK)
        busy = max(busy, time.thread_time() - computed)
        late = max(late, time.perf_counter() - before - TICK)
    return late, busy


class Ticks(RequestHandler):
    """The worst of each of so many seconds."""

    async def get(self) -> None:
        found = [await worst_of_a_second() for _ in range(int(self.get_argument("seconds")))]
        self.write(json.dumps(found))


HANDLERS = [(r"/benchmark/ticks", Ticks)]
"""For ``c.JupyterHub.extra_handlers``."""


class TickingAccounting(Accounting):
    """The accounting service as it is, and a ticker on its loop."""

    async def serve(self) -> None:
        ticking = asyncio.ensure_future(self._tick_on(Path(os.environ["BENCHMARK_TICKS"])))
        try:
            await super().serve()
        finally:
            ticking.cancel()

    async def _tick_on(self, file: Path) -> None:
        while True:
            _append(file, json.dumps(await worst_of_a_second()))


def _append(file: Path, line: str) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.write(line + "\n")


if __name__ == "__main__":
    gc.freeze()  # as gpuspawner.service does
    TickingAccounting.launch_instance()
