"""Waiting with a timeout, and for several tasks at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(seconds: float, work: Awaitable[T]) -> T:
    """Return the result of ``work``, or cancel it after a timeout.

    Raises asyncio.TimeoutError. ``asyncio.wait_for`` does the same since Python 3.12; before, it
    lost a cancellation that came just when the work was done, and the cancelled caller went on.
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


async def side_by_side(*works: Awaitable[object]) -> None:
    """Run all at once until each is done, one fails or this is cancelled.

    Afterwards all of them have ended, including their cleanup. A cancelled ``asyncio.gather`` only
    waits for the first one to end.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in done:
        task.result()
