"""Threads that begin at the same moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpuspawner.core.errors import GPUSpawnerError


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Call ``work(number)`` in so many threads at once; what each returned, or its refusal."""
    gate = threading.Barrier(count)

    def run(number: int) -> Any:
        gate.wait(120)
        try:
            return work(number)
        except GPUSpawnerError as refused:
            return refused

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))
