"""Whether this engine may raise the limits that PyTorch's users expect: asked once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from docker.errors import APIError

from .container import ULIMITS

if TYPE_CHECKING:
    from .docker import GPUDockerSpawner

KEY = "gpuspawner_ulimits"


async def allowed_ulimits(spawner: GPUDockerSpawner) -> list[dict[str, Any]]:
    """The default ulimits that containers can have here, maybe none.

    A rootless engine, or one inside another container, may not raise limits, and a
    container that asks for it does not start. One throw-away container tells.
    """
    lock = spawner.of_engine(f"{KEY}_lock", asyncio.Lock)
    async with lock:
        if KEY not in spawner.engine_settings:
            spawner.engine_settings[KEY] = [
                limit for limit in ULIMITS if await _can_have(spawner, limit)
            ]
    found: list[dict[str, Any]] = spawner.engine_settings[KEY]
    return found


async def _can_have(spawner: GPUDockerSpawner, limit: dict[str, Any]) -> bool:
    try:
        code, words = await spawner.run_helper(["true"], Ulimits=[limit])
    except APIError as error:
        if "rlimit" not in str(error):
            raise
        code, words = 1, str(error)
    if code:
        spawner.log.warning("This engine cannot set the ulimit %s: %s", limit["Name"], words)
    return not code
