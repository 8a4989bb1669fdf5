"""Jobs that run in the background of a process, for the pages that start and show them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Generic, TypeVar

from .errors import GPUSpawnerError

DONE, FAILED, CANCELLED = "done", "failed", "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job and its result. A subclass adds what it does, and its states before the end."""

    id: int = 0
    """Given by :class:`JobTable`."""
    actor: str
    state: str
    started_at: datetime | None = None
    ended_at: datetime | None = None
    done_bytes: int = 0
    error: str = ""
    """Why it failed, or what else went wrong."""

    @property
    def is_open(self) -> bool:
        """True if it has not ended."""
        return self.state not in (DONE, FAILED, CANCELLED)


J = TypeVar("J", bound=Job)


class JobTable(Generic[J]):
    """The open jobs of a process, and the last ones that ended. They are gone with the process.

    To check the jobs and act on the result, hold ``lock``, which is reentrant.
    """

    def __init__(self, clock: Callable[[], datetime], ended_kept: int) -> None:
        self.lock = threading.RLock()
        self._clock = clock
        self._ended_kept = ended_kept
        self._jobs: dict[int, J] = {}
        self._last = 0

    def jobs(self) -> list[J]:
        """Return all of them, newest first."""
        with self.lock:
            return sorted(self._jobs.values(), key=lambda job: -job.id)

    def open_jobs(self) -> list[J]:
        """Return those that have not ended, oldest first."""
        return [job for job in reversed(self.jobs()) if job.is_open]

    def add(self, job: J) -> J:
        """Add a job, and return it with its id."""
        with self.lock:
            self._last += 1
            return self._jobs.setdefault(self._last, replace(job, id=self._last))

    def change(self, job_id: int, **values: Any) -> J:
        """Change an open job, and return it."""
        with self.lock:
            self._jobs[job_id] = changed = replace(self._jobs[job_id], **values)
            return changed

    def run(self, job: J, work: Callable[[J], None], log: logging.Logger, failure: str) -> None:
        """Do an open job's work, which ends it unless it raises.

        Our own errors say why it failed. Others go to the log, and ``failure`` is shown.
        """
        try:
            work(job)
        except GPUSpawnerError as error:
            self.end(job.id, FAILED, error=error.message)
        except Exception:
            log.exception("Job failed: %r", job)
            self.end(job.id, FAILED, error=failure)

    def end(self, job_id: int, state: str, **values: Any) -> None:
        """End a job, and forget the oldest of those that ended."""
        with self.lock:
            self.change(job_id, state=state, ended_at=self._clock(), **values)
            ended = [job.id for job in self._jobs.values() if not job.is_open]
            for old in ended[: -self._ended_kept]:
                del self._jobs[old]
