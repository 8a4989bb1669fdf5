"""Duties that fail. Real: asyncio."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from gpuspawner.service.supervisor import Supervisor


@pytest.fixture
def supervisor() -> Supervisor:
    return Supervisor(logging.getLogger("duties"), pauses=(0.0, 0.001))


async def until(look: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not look():
            await asyncio.sleep(0)


async def test_a_duty_that_fails_once_is_logged_counted_and_restarted(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    rounds = {"fails": 0, "other": 0}

    def duty(name: str) -> Callable[[], Awaitable[None]]:
        async def go_on() -> None:
            while True:
                rounds[name] += 1
                if name == "fails" and rounds[name] == 1:
                    raise ValueError("nobody foresaw this")
                await asyncio.sleep(0)

        return go_on

    tasks = [asyncio.ensure_future(supervisor.keep(name, duty(name))) for name in rounds]
    await until(lambda: rounds["fails"] > 3)
    before = rounds["other"]
    await until(lambda: rounds["other"] > before + 3)
    [record] = caplog.records
    assert "'fails' failed" in record.message
    assert record.exc_info and "nobody foresaw this" in str(record.exc_info[1])
    assert [supervisor.states[name].failures for name in rounds] == [1, 0]
    assert supervisor.states["fails"].last_error == "ValueError: nobody foresaw this"
    assert all(state.is_running for state in supervisor.states.values())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not any(state.is_running for state in supervisor.states.values())


async def test_a_duty_that_always_fails_is_tried_again_and_again(supervisor: Supervisor) -> None:
    async def fail() -> None:
        raise ValueError

    task = asyncio.ensure_future(supervisor.keep("fails", fail))
    await until(lambda: task.done() or _failures(supervisor) > 5)
    assert not task.done()
    task.cancel()


async def test_a_duty_with_nothing_to_do_is_no_failure(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    await supervisor.keep("returns", lambda: asyncio.sleep(0))
    assert supervisor.states == {}
    assert not caplog.records


def _failures(supervisor: Supervisor) -> int:
    return sum(state.failures for state in supervisor.states.values())
