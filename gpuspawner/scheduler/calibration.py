"""How much wider than the past suggests intervals have to be, learned from those shown."""

from __future__ import annotations

import math

_LEAST_GAIN = 0.001
"""How much one comparison changes a class that has seen many."""

_FIRST_GAIN = 1.0
_FIRST_COUNT = 100
"""A new class learns faster: the gain of its n-th comparison is the first over n and these."""

_LOWEST, _HIGHEST = -3.0, 2.0
"""Bounds of what one class adds, as a logarithm."""

_MOST = 1.65
"""The greatest factor: where an overload is unlike all that was seen before, an interval of weeks
would be right and useless."""

Class = tuple[str | int, ...]


class Calibration:
    """A factor for each class of tickets, moved a little with every comparison.

    A miss moves it up and a hit down, in the proportion that leaves it at rest when as many
    hold as should. So the promise is kept in the long run whatever changes. A ticket is in
    several classes, and their factors are multiplied.
    """

    def __init__(self, inside: float) -> None:
        self._inside = inside
        self._logs: dict[Class, float] = {}
        self._counts: dict[Class, int] = {}

    def stretch(self, classes: tuple[Class, ...]) -> float:
        """The factor for a ticket of these classes."""
        return min(_MOST, math.exp(sum(self._logs.get(of, 0.0) for of in classes)))

    def compare(self, classes: tuple[Class, ...], held: bool) -> None:
        """An interval that was shown to a ticket of these classes held its start, or did not."""
        for of in classes:
            count = self._counts[of] = self._counts.get(of, 0) + 1
            gain = max(_LEAST_GAIN, _FIRST_GAIN / (_FIRST_COUNT + count))
            log = self._logs.get(of, 0.0) + gain * (self._inside - held)
            self._logs[of] = min(_HIGHEST, max(_LOWEST, log))
