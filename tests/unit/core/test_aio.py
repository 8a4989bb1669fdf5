"""Real: asyncio."""

from __future__ import annotations

import asyncio

import pytest

from gpuspawner.core.aio import side_by_side, within


async def test_within_returns_results_and_cancels_late_work() -> None:
    assert await within(10, asyncio.sleep(0, "done")) == "done"
    with pytest.raises(ZeroDivisionError):
        await within(10, fail())

    cleaned_up = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned_up.set()

    with pytest.raises(asyncio.TimeoutError):
        await within(0.01, work())
    assert cleaned_up.is_set()


async def fail() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("steps", range(4))
async def test_cancellation_during_completion_is_not_lost(steps: int) -> None:
    event = asyncio.Event()
    went_on = False

    async def wait() -> None:
        nonlocal went_on
        await within(60, event.wait())
        await asyncio.sleep(0)
        went_on = True

    waiting = asyncio.ensure_future(wait())
    for _ in range(3):
        await asyncio.sleep(0)
    event.set()
    for _ in range(steps):
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not went_on


async def test_side_by_side_waits_for_cleanup_of_every_task() -> None:
    """Cancelled or failed: who has more to do at the end than the others is waited for."""
    ended, begun = [], asyncio.Event()

    async def quick() -> None:
        await asyncio.Event().wait()

    async def slow(*, fails: bool = False) -> None:
        try:
            begun.set()
            if not fails:
                await asyncio.Event().wait()
            raise ZeroDivisionError
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            ended.append(fails)

    both = asyncio.ensure_future(side_by_side(quick(), slow()))
    await begun.wait()
    both.cancel()
    with pytest.raises(asyncio.CancelledError):
        await both
    with pytest.raises(ZeroDivisionError):
        await side_by_side(quick(), slow(), slow(fails=True))
    assert ended == [False, True, False]
