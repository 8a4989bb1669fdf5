"""Sampling of devices once a second in a thread, summed up by the minute.

A hanging driver blocks this thread and no duty; a slow or missing store delays no sample.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

from ..devices.models import DeviceProcess
from ..devices.source import DevicesUnavailable, Sampler
from ..monitoring.models import DeviceUse, RemoteProcess, Rollups, Sample

if TYPE_CHECKING:
    from ..engines.base import ProcessOwners


KEPT_SECONDS = 300
"""How many samples of each device are kept in memory."""
MOST_MINUTES = 20_000
"""Complete minutes that wait for a missing store, a day and a half of eight devices."""
AGAIN_SECONDS = 60.0
"""How often it is tried again after nothing could be seen."""

Clock = Callable[[], datetime]


class Sampling:
    """The thread, and what it has collected. All methods are for other threads."""

    def __init__(
        self,
        sampler: Sampler,
        clock: Clock,
        seconds: float,
        log: logging.Logger,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sampler = sampler
        self._clock = clock
        self._monotonic = monotonic
        self._log = log
        self.seconds = seconds
        self.silent_after = 10 * max(1.0, seconds)
        """Seconds without an answer after which that is reported."""
        self.owners: ProcessOwners | None = None
        """Owners of the processes on devices; set by code that knows the open leases."""
        self._strange: dict[int, tuple[ProcessOwners, bool]] = {}
        self._rollups = Rollups(self._is_strange)
        self._recent: dict[str, deque[Sample]] = defaultdict(lambda: deque(maxlen=KEPT_SECONDS))
        self._complete: deque[DeviceUse] = deque(maxlen=MOST_MINUTES)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._answered_at = monotonic()
        self._error = ""

    def start(self) -> None:
        """Start the thread, which does not keep the process alive: it may hang in the driver."""
        self._thread = threading.Thread(target=self._run, name="sampling", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """Stop after the present sample; incomplete minutes count as complete."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return  # it hangs in the driver, and may still be adding
        with self._lock:
            self._complete.extend(self._rollups.rest())

    def recent(self) -> dict[str, list[Sample]]:
        """Return the newest samples of each device, oldest first."""
        with self._lock:
            return {uuid: list(samples) for uuid, samples in self._recent.items()}

    def trouble(self) -> str:
        """Return why there are no samples, as a sentence; empty if there are."""
        if self._error:
            return self._error
        silent = self._monotonic() - self._answered_at
        if silent > self.silent_after:
            return f"The driver has not answered for {silent:.0f} s; the use of GPUs is not known"
        return ""

    def complete(self) -> list[DeviceUse]:
        """Return the complete minutes that were not stored yet, oldest first."""
        with self._lock:
            return list(self._complete)

    def written(self, minutes: list[DeviceUse]) -> None:
        """Record that these minutes are in the store."""
        done = {id(minute) for minute in minutes}
        with self._lock:
            left = [minute for minute in self._complete if id(minute) not in done]
            self._complete = deque(left, maxlen=MOST_MINUTES)

    # In the thread.

    def _run(self) -> None:
        due = self._monotonic()
        while not self._stop.is_set():
            pause = self.seconds if self._look() else max(self.seconds, AGAIN_SECONDS)
            due += pause
            now = self._monotonic()
            if due < now:  # the driver was slow: missed samples are skipped
                due += (now - due) // self.seconds * self.seconds + self.seconds
            self._stop.wait(due - now)

    def _look(self) -> bool:
        try:
            samples = self._sampler.sample(self._clock(), self._monotonic())
        except DevicesUnavailable as lost:
            self._error = str(lost)
            self._answered_at = self._monotonic()
            return False
        except Exception as error:  # whatever a driver does, the next round follows
            if not self._error:
                self._log.exception("Sampling the GPUs failed")
            self._error = f"The use of GPUs cannot be read: {error!r}"
            return False
        self._error = ""
        self._answered_at = self._monotonic()
        with self._lock:
            for sample in samples:
                self._recent[sample.uuid].append(sample)
            self._complete.extend(self._rollups.add(samples))
        return True

    def _is_strange(self, process: DeviceProcess) -> bool:
        """Return True if it belongs to no lease; reads ``/proc`` once per set of open leases."""
        if isinstance(process, RemoteProcess):
            return process.strange
        if (owners := self.owners) is None:
            return False  # the owners are not known yet
        asked = self._strange.get(process.pid)
        if asked is None or asked[0] is not owners:
            if len(self._strange) > 1000:
                self._strange.clear()
            asked = self._strange[process.pid] = (owners, owners.lease_of(process.pid) is None)
        return asked[1]
