"""What many ask for at once, told in one go: whoever comes while Slurm is being told something
shares the next call with everybody who does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class _Call(Generic[T, R]):
    """What one call is about, and what came of it."""

    def __init__(self) -> None:
        self.wanted: list[T] = []
        self.begun = False
        self.result: list[R] = []
        self.error: Exception | None = None


class Together(Generic[T, R]):
    """Calls a function with what several threads want of it, never twice at once."""

    def __init__(self, tell: Callable[[list[T]], R]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()
        self._next: _Call[T, R] = _Call()

    def tell(self, *wanted: T) -> R:
        """What came of it for all who shared the call, or its error. Blocks."""
        with self._lock:
            call = self._next
            call.wanted += wanted
        with self._one_at_a_time:
            if not call.begun:  # nobody of those who share it came first
                self._do(call)
        if call.error is not None:
            raise call.error
        return call.result[0]

    def _do(self, call: _Call[T, R]) -> None:
        with self._lock:
            call.begun = True
            self._next = _Call()
        try:
            call.result.append(self._tell(call.wanted))
        except Exception as error:  # everybody's who waits for it
            call.error = error
