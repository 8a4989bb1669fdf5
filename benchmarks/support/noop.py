"""Spawners and an engine that do nothing, so that the hub itself is measured.

Imported by the hub's configuration. The address in ``BENCHMARK_ADDRESS`` is that of a tiny
server outside the hub, which answers for every member.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

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
