"""Which way GPUs get into containers here: asked once, proved once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..engines.injection import candidates
from ..engines.preflight import prove_injection
from ..errors import StartFailed

if TYPE_CHECKING:
    from .docker import GPUDockerSpawner

KEY = "gpuspawner_injection"


async def injection_mode(spawner: GPUDockerSpawner, uuids: Sequence[str]) -> str:
    """The mode for this start. Raises StartFailed when no way works.

    ``auto`` tries what the engine offers, best first, with a container of the image that
    is about to start and one of the leased devices; what works serves the hub's life.
    """
    if spawner.gpu_injection != "auto":
        return str(spawner.gpu_injection)
    if not uuids:
        return "none"
    look = await spawner.broker.read(spawner.broker.look)
    if look.inventory.source == "simulated":
        return "none"
    lock = spawner.of_engine(f"{KEY}_lock", asyncio.Lock)
    async with lock:
        if KEY not in spawner.engine_settings:
            spawner.engine_settings[KEY] = await _prove(spawner, uuids[0])
    mode: str = spawner.engine_settings[KEY]
    return mode


async def _prove(spawner: GPUDockerSpawner, uuid: str) -> str:
    spawner.said.say("Finding out how GPUs get into containers here", 40)
    info = await spawner.docker("info")
    said = []
    for mode in candidates(info):
        finding = await asyncio.to_thread(
            prove_injection, spawner.client, spawner.image, mode, uuid
        )
        if finding.status == "ok":
            spawner.log.info("GPUs get into containers by %s", mode)
            return mode
        said.append(f"{mode}: {finding.text}")
    spawner.log.error("No way to inject a GPU works: %s", "; ".join(said))
    cause = "this machine's container engine cannot hand GPUs to containers (tell your admin: "
    raise StartFailed(cause=cause + "gpuspawner check says what to do)")
