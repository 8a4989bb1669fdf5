"""What a benchmark asks of a hub whose servers run on a cluster. Imported by its configuration.

``/hub/benchmark/steps`` tells how long each step of our own code held the event loop, in seconds
by the clock and by the processor, and between which lines; and when the hub asked Slurm for its
jobs.
"""

from __future__ import annotations

import json
import time
import types
from collections.abc import Awaitable, Generator
from typing import Any

from tornado.web import RequestHandler

from gpuspawner.slurm import scheduler
from gpuspawner.slurm.jobs import SlurmJob, read_jobs
from gpuspawner.slurm.programs import Slurm
from gpuspawner.spawners.slurm import GPUSlurmSpawner

STEPS: list[tuple[float, float, str]] = []
"""Seconds by the clock and by the processor of each step, and where it began and ended."""
LOOKS: list[float] = []
"""When Slurm was asked, in seconds of a clock."""


def counted(slurm: Slurm) -> list[SlurmJob]:
    """As :func:`read_jobs`, and counted."""
    LOOKS.append(time.monotonic())
    return read_jobs(slurm)


scheduler.read_jobs = counted


class Steps(RequestHandler):
    """The steps since the last question."""

    def get(self) -> None:
        self.write(json.dumps({"steps": STEPS, "looks": LOOKS}))
        STEPS.clear()


@types.coroutine
def timed(work: Awaitable[Any]) -> Generator[Any, Any, Any]:
    """Await something, and write down how long each of its steps held the event loop."""
    steps: Any = work.__await__()
    resume, value = steps.send, None
    while True:
        began = where(work)
        clock, processor = time.perf_counter(), time.thread_time()
        try:
            waiting_for = resume(value)
        except StopIteration as end:
            return end.value
        finally:
            took = time.perf_counter() - clock, time.thread_time() - processor
            STEPS.append((*took, f"{began} to {where(work)}"))
        try:
            yield waiting_for
            resume, value = steps.send, None
        except BaseException as error:
            resume, value = steps.throw, error


def where(work: Any) -> str:
    """The innermost line that a coroutine is at."""
    line = "its end"
    while (frame := getattr(work, "cr_frame", None)) is not None:
        line = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        work = work.cr_await
    return line


class TimedSlurmSpawner(GPUSlurmSpawner):
    """Times every step that it takes on the event loop."""

    async def run_pre_spawn_hook(self) -> None:
        await timed(super().run_pre_spawn_hook())

    async def start(self) -> Any:
        return await timed(super().start())

    async def poll(self) -> Any:
        return await timed(super().poll())

    async def stop(self, now: bool = False) -> None:
        await timed(super().stop(now=now))

    async def run_post_stop_hook(self) -> None:
        await timed(super().run_post_stop_hook())


HANDLERS = [(r"/benchmark/steps", Steps)]
"""For ``c.JupyterHub.extra_handlers``."""
