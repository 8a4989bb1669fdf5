"""Real: Python's own collector and an event loop."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from gpuspawner.spawners import burst
from gpuspawner.spawners.burst import MANY, NEVER, Burst

USUAL = (701, 11, 12)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(burst, "CALM", 0.05)
    before = gc.get_threshold()
    gc.set_threshold(*USUAL)
    yield
    gc.set_threshold(*before)


async def until_usual() -> None:
    while gc.get_threshold() != USUAL:
        await asyncio.sleep(0.01)


async def test_a_few_change_nothing() -> None:
    crowd = Burst()
    for _ in range(MANY - 1):
        crowd.asked()
    assert gc.get_threshold() == USUAL


async def test_those_who_come_one_by_one_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burst, "AT_ONCE", 0.0001)
    crowd = Burst()
    for _ in range(MANY + 5):
        crowd.asked()
        await asyncio.sleep(0.001)
    assert gc.get_threshold() == USUAL


async def test_full_collections_wait_until_a_crowd_was_served() -> None:
    crowd = Burst()
    full = gc.get_stats()[2]["collections"]
    for _ in range(MANY):
        crowd.asked()
    assert gc.get_threshold() == (*USUAL[:2], NEVER)
    kept = [[[n]] for n in range(300_000)]
    assert gc.get_stats()[2]["collections"] == full
    await asyncio.wait_for(until_usual(), 10)
    kept += [[[n]] for n in range(300_000)]
    assert gc.get_stats()[2]["collections"] > full, "and come again"


async def test_a_crowd_that_never_ends_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burst, "LONGEST", 0.5)
    crowd = Burst()

    async def go_on() -> None:
        while True:
            crowd.asked()
            await asyncio.sleep(0.001)

    crowding = asyncio.ensure_future(go_on())
    try:
        while gc.get_threshold() == USUAL:
            await asyncio.sleep(0.001)
        await asyncio.wait_for(until_usual(), 10)
    finally:
        crowding.cancel()
