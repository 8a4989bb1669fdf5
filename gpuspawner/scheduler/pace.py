"""How fast devices have been given out of late."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

_MEMORY = 12 * 3600.0
"""Seconds after which a start counts about a third."""

_LEAST = 60.0
"""Seconds that every start takes, whatever is ahead."""


class Flow:
    """Devices given out, by kind; old ones fade away."""

    def __init__(self) -> None:
        self._given: dict[str, float] = {}
        self._as_of = -math.inf
        self._past = 1.0
        """The part of the memory that lies before the first event."""

    def give(self, held: Mapping[str, int], at: float) -> None:
        """So many devices of each kind were given out."""
        self._pass(at)
        for kind, devices in held.items():
            self._given[kind] = self._given.get(kind, 0.0) + devices

    def seconds_for(self, devices: int, kinds: Iterable[str], now: float) -> float:
        """How long it takes to give out so many devices, of any of the kinds."""
        fade = self._fade(now)
        # One device more, so that nothing is divided by zero and a single start proves little.
        given = 1.0 + fade * sum(self._given.get(kind, 0.0) for kind in kinds)
        return _LEAST + devices * (_MEMORY * (1.0 - fade * self._past) + 1.0) / given

    def _pass(self, now: float) -> None:
        fade = self._fade(now)
        for kind in self._given:
            self._given[kind] *= fade
        if self._given:
            self._past *= fade
        self._as_of = max(self._as_of, now)

    def _fade(self, now: float) -> float:
        return math.exp(min(0.0, self._as_of - now) / _MEMORY) if self._given else 1.0
