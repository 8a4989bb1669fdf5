"""Waiting no longer than so many seconds, and for all that was begun."""

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


async def side_by_side(*works: Awaitable[object]) -> None:
    """Do them all at once, until each is done, one fails or this is cancelled. In the end all of
    them have ended, and each has done what it does at its end.

    ``asyncio.gather`` that is cancelled waits only for the first of them to end.
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
