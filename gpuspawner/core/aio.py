"""Waiting with a timeout, for several tasks at once, and for blocking work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

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


def in_daemon_thread(
    name: str, work: Callable[[], T], ended: Callable[[], None] = lambda: None
) -> asyncio.Future[T]:
    """Run blocking work in a thread that the process does not wait for at its end.

    Whatever the work raises, the caller gets. ``ended`` is called in the event loop when the thread
    ends, even if nobody waits for its result any more.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(settle_with: Callable[[Any], None], value: Any) -> None:
        ended()
        if not done.done():
            settle_with(value)

    def run() -> None:
        result: tuple[Callable[[Any], None], Any]
        try:
            result = done.set_result, work()
        except Exception as error:
            result = done.set_exception, error
        with suppress(RuntimeError):  # the event loop has ended meanwhile
            loop.call_soon_threadsafe(settle, *result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done
