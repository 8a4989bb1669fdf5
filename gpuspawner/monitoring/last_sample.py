"""The last sample of a container, just before it is stopped: later the engine has no figures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from ..core.aio import in_daemon_thread
from ..core.errors import GPUSpawnerError
from ..engines.base import EngineWithUse
from ..engines.resource_use import ResourceUse
from ..services import Services
from .resource_service import ContainerSample

PATIENCE_SECONDS = 1.0
"""How long a stop waits for the engine's answer before it, and for the store after it."""


@asynccontextmanager
async def last_sample(
    services: Services, engine: EngineWithUse, lease_id: str, container_id: str
) -> AsyncIterator[None]:
    """Record what a lease's container uses until the block stops it.

    This never makes the stop fail, and delays it only a moment. If the engine does not answer in
    time, the last use stays unknown.
    """
    work = partial(engine.resource_use, container_id)
    reading = in_daemon_thread("gpuspawner-last-sample", work)
    recording = asyncio.ensure_future(_record(services, lease_id, container_id, reading))
    await asyncio.wait([reading], timeout=PATIENCE_SECONDS)
    yield
    await asyncio.wait([recording], timeout=PATIENCE_SECONDS)


async def _record(
    services: Services,
    lease_id: str,
    container_id: str,
    reading: asyncio.Future[ResourceUse | None],
) -> None:
    try:
        if use := await reading:
            sample = ContainerSample(lease_id, container_id, use)
            await services.run(services.resources.record, [sample])
    except GPUSpawnerError as error:
        services.log.warning("The last use of lease %s is unknown: %s", lease_id, error.message)
    except Exception:
        services.log.exception("The last use of lease %s is unknown", lease_id)
