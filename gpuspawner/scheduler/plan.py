"""When devices will be free, and what of them is promised to tickets already."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Iterable


class Plan:
    """The free devices of one kind from now on, as steps in time."""

    def __init__(self, now: float, free: int, ends: Iterable[tuple[float, int]]) -> None:
        """``ends`` are the times at which so many devices come back."""
        self._times = [now]
        self._free = [free]
        for at, devices in sorted(ends):
            if at > self._times[-1]:
                self._times.append(at)
                self._free.append(self._free[-1])
            self._free[-1] += devices

    def earliest(self, devices: int, seconds: float) -> float:
        """The first time from which so many are free for so long; infinity if there is none."""
        start: float | None = None
        for at, (time, free) in enumerate(zip(self._times, self._free, strict=True)):
            if free < devices:
                start = None
                continue
            if start is None:
                start = time
            last = at + 1 == len(self._times)
            if last or self._times[at + 1] >= start + seconds:
                return start
        return math.inf

    def take(self, devices: int, start: float, seconds: float) -> None:
        """Promise so many devices from ``start`` for ``seconds``."""
        end = start + seconds
        self._cut(start)
        if math.isfinite(end):
            self._cut(end)
        for at, time in enumerate(self._times):
            if start <= time < end:
                self._free[at] -= devices

    def _cut(self, at: float) -> None:
        place = bisect_right(self._times, at)
        if place and self._times[place - 1] == at:
            return
        insort(self._times, at)
        self._free.insert(place, self._free[place - 1] if place else self._free[0])
