"""Which limits this engine can set: asked once.

It may not be able to raise those that PyTorch's users expect, or to limit what is written.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import requests
from docker.errors import APIError, DockerException, ImageNotFound

from ..engines.disk import may_enforce, refusal, size_option, storage_of
from .container import ULIMITS, DiskLimit

if TYPE_CHECKING:
    from .docker import GPUDockerSpawner

KEY = "gpuspawner_ulimits"
DISK_DRIVER = "gpuspawner_disk_driver"


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


async def disk_limit(spawner: GPUDockerSpawner, image: str) -> DiskLimit | None:
    """How much a server of this image may write into its own container; None: no limit.

    Whether the engine keeps it is proved once, by a container that is created and never started:
    one that the engine refuses must not keep servers from starting.
    """
    limit = int(spawner.disk_limit)
    if not limit:
        return None
    lock = spawner.of_engine(f"{DISK_DRIVER}_lock", asyncio.Lock)
    async with lock:
        try:
            driver = spawner.engine_settings.get(DISK_DRIVER)
            if driver is None:
                driver = await _enforcing_driver(spawner, image, limit)
                spawner.engine_settings[DISK_DRIVER] = driver
        except ImageNotFound:
            raise
        except (DockerException, requests.RequestException, OSError) as error:
            # The next start asks again; meanwhile the accounting service watches this one.
            spawner.log.warning("Whether the engine limits containers is not known: %s", error)
            return DiskLimit(limit)
    if not driver:
        return DiskLimit(limit)
    return DiskLimit(limit, await spawner._ask_engine(_size, spawner, driver, image, limit))


async def _enforcing_driver(spawner: GPUDockerSpawner, image: str, limit: int) -> str:
    """The storage driver that keeps the limit; empty when none does."""
    info = await spawner._call("info")
    if not may_enforce(info):
        return ""
    driver = str(info["Driver"])
    size = await spawner._ask_engine(_size, spawner, driver, image, limit)
    said = await spawner._ask_engine(refusal, spawner.client, image, size)
    if said:
        spawner.log.warning("The engine (%s) limits no container: %s", storage_of(info), said)
    return "" if said else driver


def _size(spawner: GPUDockerSpawner, driver: str, image: str, limit: int) -> int:
    return size_option(spawner.client, driver, image, limit)
