"""Waiting no longer than so many seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(seconds: float, work: Awaitable[T]) -> T:
    """What ``work`` comes to. Raises asyncio.TimeoutError, and cancels the work, if it takes
    longer.

    ``asyncio.wait_for`` is the same from Python 3.12 on. Before, it lost a cancellation that came
    at the moment at which the work was done, and whoever was cancelled went on.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # too late to be of interest
            raise asyncio.TimeoutError
    finally:
        task.cancel()
    return task.result()
