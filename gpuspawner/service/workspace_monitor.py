"""The duty that measures members' workspaces, for the page that lists them.

Measuring a directory visits every file in it. So one is measured after the other, with pauses, and
never while somebody waits for a page.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ..core.aio import in_daemon_thread
from ..core.errors import Unavailable
from ..engines.docker import DockerEngine, client_from_environment
from ..storage.directories import volume_sizes
from ..storage.repository import Workspace
from .worker import Round, Tick, TickDuty

T = TypeVar("T")

ROUND_SECONDS = 30.0
"""Seconds between two searches for workspaces to measure."""
PATIENCE_SECONDS = 600.0
"""Seconds for one directory; the size of one that takes longer is unknown."""
MOST_BUSY = 5.0
"""The pause after a measurement, in multiples of its duration."""


class WorkspaceDuty(TickDuty):
    """Measures workspaces: directories of this machine, and volumes of its engine."""

    def __init__(self, tick: Tick, engine: DockerEngine) -> None:
        super().__init__(tick)
        self.engine = engine
        self._under_way = set[str]()
        """What is measured, also by threads that nobody waits for any more."""

    async def round(self) -> None:
        """Measure what is due."""
        storage = self.services.storage
        unmeasured = await self.services.run(storage.unmeasured)
        due = [some for some in unmeasured if some.source not in self._under_way]
        if volumes := [some for some in due if some.is_volume]:
            names = [some.source for some in volumes]
            with self.tick.going_on("Sizes of volumes"):
                sizes = await self._paced(partial(self.engine.call, volume_sizes), *names)
                for some in volumes:
                    storage.keep_size(some.source, sizes.get(some.source))
        for some in due:
            if not some.is_volume:
                with self.tick.going_on(f"Size of {some.source}"):
                    await self._measure(some)

    async def _measure(self, some: Workspace) -> None:
        storage = self.services.storage
        try:
            use = await self._paced(
                partial(storage.use_of, some.source, some.quota, PATIENCE_SECONDS), some.source
            )
        except asyncio.TimeoutError as error:  # the thread may never end; there is one at most
            storage.keep_size(some.source, None)
            raise Unavailable("its file system is not responding") from error
        storage.keep_size(some.source, use.used if use else None)

    async def _paced(self, work: Callable[[], T], *sources: str) -> T:
        """Return the result of blocking work, after a pause. Raises asyncio.TimeoutError."""
        began = time.monotonic()
        self._under_way.update(sources)
        result = in_daemon_thread(
            "gpuspawner-workspaces", work, lambda: self._under_way.difference_update(sources)
        )
        await asyncio.wait({result}, timeout=2 * PATIENCE_SECONDS)
        await asyncio.sleep(MOST_BUSY * (time.monotonic() - began))
        if not result.done():
            raise asyncio.TimeoutError
        return result.result()


def workspace_rounds(tick: Tick) -> list[Round]:
    """Return this duty."""
    engine = DockerEngine(partial(client_from_environment, PATIENCE_SECONDS))
    return [(ROUND_SECONDS, "Workspaces", WorkspaceDuty(tick, engine).round)]
