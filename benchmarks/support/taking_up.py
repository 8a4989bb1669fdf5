"""When a hub took up each spawn, when its member was told a place, and what held the event loop.

Imported by the hub's configuration. ``/hub/benchmark/forget`` begins anew, and
``/hub/benchmark/taken`` tells all that since then.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any
from unittest import mock

from jupyterhub.utils import maybe_future
from tornado.web import RequestHandler

from gpuspawner.spawners.progress import SpawnProgress
from support.noop import GPUNoopSpawner, NoopSpawner

TAKEN: dict[str, float] = {}
"""When the pre-spawn stage of each member's spawn began."""
TOLD: dict[int, float] = {}
"""When each spawn said its first word, by the identity of what it speaks through."""
SPOKEN: dict[str, SpawnProgress] = {}
"""What each member's spawn speaks through."""
STEPS: list[float] = []
"""Seconds for which single steps held the event loop, those of over a millisecond."""


class WatchedNoop(NoopSpawner):
    """The stock side."""

    def run_pre_spawn_hook(self) -> Any:
        TAKEN[self.user.name] = time.perf_counter()
        return super().run_pre_spawn_hook()


class WatchedGPUNoop(GPUNoopSpawner):
    """Ours."""

    def run_pre_spawn_hook(self) -> Any:
        TAKEN[self.user.name] = time.perf_counter()
        answer = super().run_pre_spawn_hook()
        SPOKEN[self.user.name] = self.said
        return maybe_future(answer)


class Taken(RequestHandler):
    """Everything, in seconds of one clock."""

    def get(self) -> None:
        told = {name: TOLD.get(id(said)) for name, said in SPOKEN.items()}
        services = self.settings["app"].users.settings.get("gpuspawner_services")
        waiting = len(services.line.tickets) if services else 0
        found = {"taken": TAKEN, "told": told, "steps": sorted(STEPS)[-20:], "waiting": waiting}
        self.write(json.dumps(found))


class Forget(RequestHandler):
    """What was before does not count."""

    def get(self) -> None:
        for known in (TAKEN, TOLD, SPOKEN, STEPS):
            known.clear()
        self.write("{}")


def watch() -> None:
    """Have every step of the event loop timed, and every first word."""
    run = asyncio.Handle._run
    say = SpawnProgress.say

    def timed_run(handle: asyncio.Handle) -> None:
        began = time.perf_counter()
        run(handle)
        took = time.perf_counter() - began
        if took > 0.001:
            STEPS.append(took)

    def timed_say(self: SpawnProgress, *args: Any, **kwargs: Any) -> None:
        say(self, *args, **kwargs)
        TOLD.setdefault(id(self), time.perf_counter())

    # For the life of this hub alone: neither asyncio nor a spawn tells these moments to others.
    mock.patch.object(asyncio.Handle, "_run", timed_run).start()
    mock.patch.object(SpawnProgress, "say", timed_say).start()


HANDLERS = [(r"/benchmark/taken", Taken), (r"/benchmark/forget", Forget)]
"""For ``c.JupyterHub.extra_handlers``."""
