"""Spawners, an engine and a proxy that do nothing, so that the hub itself is measured.

Imported by the hub's configuration. The address in ``BENCHMARK_ADDRESS`` is that of a tiny
server outside the hub, which answers for every member.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from jupyterhub.proxy import Proxy
from jupyterhub.spawner import Spawner

from gpuspawner.leases.models import Sighting
from gpuspawner.spawners.mixin import ExitStatus, GPUSpawnerMixin

ADDRESS = os.environ.get("BENCHMARK_ADDRESS", "")


class NoopSpawner(Spawner):
    """Starts nothing, at once. What every real engine asks the Hub for is asked for all the
    same: the environment and the command line."""

    up = False

    async def start(self) -> str:
        self.get_env()
        self.get_args()
        self.up = True
        return ADDRESS

    async def stop(self, now: bool = False) -> None:
        self.up = False

    async def poll(self) -> int | None:
        return None if self.up else 0

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "up": self.up}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.up = state.get("up", False)


class NoopEngine:
    """An engine on which nothing runs."""

    name = "noop"

    def sightings(self) -> Sequence[Sighting]:
        return ()

    def end(self, sighting: Sighting) -> None:
        raise AssertionError("nothing runs here")


class GPUNoopSpawner(GPUSpawnerMixin, NoopSpawner):
    """The same with leases: what is added to :class:`NoopSpawner` is what gpuspawner costs."""

    engine_name = "noop"

    def engine(self) -> Any:
        return NoopEngine()

    def engine_ref(self) -> str:
        return f"noop:{self.user.name}"

    async def prove_gone(self) -> ExitStatus:
        return ExitStatus(gone=not self.up)


class MemoryProxy(Proxy):
    """Keeps the routes that the Hub asks for, and forwards nothing: the benchmark talks to the
    Hub itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.routes: dict[str, dict[str, Any]] = {}

    async def start(self) -> None:
        """There is no process to start."""

    async def stop(self) -> None:
        """Nor one to stop."""

    async def add_route(self, routespec: str, target: str, data: Any) -> None:
        self.routes[routespec] = {"routespec": routespec, "target": target, "data": data}

    async def delete_route(self, routespec: str) -> None:
        self.routes.pop(routespec, None)

    async def get_all_routes(self) -> dict[str, dict[str, Any]]:
        return dict(self.routes)
