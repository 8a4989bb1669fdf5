"""Jobs that are ended together: who asks while Slurm is being told of others shares the next call
with everybody who does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import suppress

from ..errors import SlurmRefused, SlurmUnavailable


class _Batch:
    """What one call is to end, and what came of it."""

    def __init__(self) -> None:
        self.jobs: set[int] = set()
        self.begun = False
        self.error: SlurmUnavailable | None = None


class Cancelling:
    """Ends jobs by their numbers."""

    def __init__(self, cancel: Callable[..., None]) -> None:
        """``cancel`` takes the numbers of jobs."""
        self._cancel = cancel
        self._lock = threading.Lock()
        self._one_call = threading.Lock()
        self._next = _Batch()

    def end(self, jobs: Collection[int]) -> None:
        """Returns when Slurm was told; one that has ended meanwhile is no mistake. Blocks.
        Raises SlurmUnavailable."""
        with self._lock:
            batch = self._next
            batch.jobs |= set(jobs)
        with self._one_call:
            if not batch.begun:  # nobody of those who share it came first
                self._tell(batch)
        if batch.error is not None:
            raise batch.error

    def _tell(self, batch: _Batch) -> None:
        with self._lock:
            batch.begun = True
            self._next = _Batch()
        try:
            with suppress(SlurmRefused):  # they are over, or will be
                self._cancel(*sorted(batch.jobs))
        except SlurmUnavailable as error:
            batch.error = error
