"""Full garbage collections wait while very many members ask at once.

Python looks for garbage among all that there is whenever that has grown by a quarter. While two
thousand ask, each such look was seen to stop the whole hub for 0.2 to 0.5 seconds, and whoever was
taken up just then learnt the place that much later. So those looks are put off until the burst is
over, for a while at most; the quick ones at what is new go on.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import deque

MANY = 6
"""Members who ask within :data:`AT_ONCE` make a burst. Few, since the next look may be near; that
a handful have theirs put off for some seconds costs nothing."""

AT_ONCE = 4.0
"""Seconds."""

CALM = 5.0
"""Seconds without such a crowd after which it is over."""

LONGEST = 120.0
"""Seconds after which garbage is looked for all the same, and for a while not put off again."""

NEVER = 1_000_000


class Burst:
    """Notices bursts. One a hub; on the event loop only."""

    def __init__(self) -> None:
        self._asked: deque[float] = deque(maxlen=MANY)
        self._thresholds: tuple[int, int, int] | None = None
        """Those of Python, while ours are in their place."""
        self._began = self._latest = 0.0
        self._not_before = 0.0

    def asked(self) -> None:
        """One more member asks."""
        now = time.monotonic()
        self._asked.append(now)
        if len(self._asked) < MANY or now - self._asked[0] > AT_ONCE or now < self._not_before:
            return
        self._latest = now
        if self._thresholds is None and gc.isenabled():
            self._began = now
            self._thresholds = gc.get_threshold()
            gc.set_threshold(*self._thresholds[:2], NEVER)
            asyncio.get_running_loop().call_later(CALM, self._look)

    def _look(self) -> None:
        now = time.monotonic()
        too_long = now - self._began >= LONGEST
        if now - self._latest < CALM and not too_long:
            asyncio.get_running_loop().call_later(CALM, self._look)
            return
        if too_long:
            self._not_before = now + LONGEST / 10
        if self._thresholds is not None:
            gc.set_threshold(*self._thresholds)
            self._thresholds = None
