"""Refusals in the Hub's log. Real: asyncio, logging."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from gpuspawner.core.errors import EngineUnavailable, GPUSpawnerError, NoDeviceFree
from gpuspawner.spawners.progress import FailedSpawn, RefusalFilter


@pytest.mark.parametrize(
    ("error", "told"), [(NoDeviceFree(), 0), (EngineUnavailable(), 1), (None, 1)]
)
async def test_asyncio_reports_no_refusal_of_a_spawn_that_nobody_awaits(
    error: GPUSpawnerError | None, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def spawn() -> None:
        raise FailedSpawn(error) if error else ValueError("a defect")

    only_these = RefusalFilter()
    logger = logging.getLogger("asyncio")
    logger.addFilter(only_these)
    try:
        task = asyncio.ensure_future(spawn())
        await asyncio.wait([task])
        del task
        gc.collect()
    finally:
        logger.removeFilter(only_these)
    reports = [r for r in caplog.records if "never retrieved" in r.getMessage()]
    assert len(reports) == told


def test_refusal_is_logged_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("of this test")
    logger.addFilter(RefusalFilter())
    for error in (NoDeviceFree(), EngineUnavailable()):
        try:
            raise FailedSpawn(error) from error
        except Exception:
            logger.exception("Failed to spawn %s", "ada")
    refused, failed = caplog.records
    assert refused.exc_info is None and "All GPUs are in use" in refused.getMessage()
    assert failed.exc_info is not None and failed.getMessage() == "Failed to spawn ada"
