"""How long sessions last, learned from those that ended."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator

from .values import Ended

_Key = tuple[str, ...]


class Lengths:
    """The latest durations by member and size, group and size, size, and of all."""

    def __init__(self, history: int, default: float) -> None:
        self._history = history
        self._default = default
        self._latest: dict[_Key, deque[float]] = {}
        self._sorted: dict[_Key, list[float]] = {}

    def learn(self, ended: Ended) -> None:
        """Remember how long this one lasted."""
        seconds = max(0.0, ended.ended_at - ended.started_at)
        for key in _keys(ended.member, ended.group, ended.devices):
            self._latest.setdefault(key, deque(maxlen=self._history)).append(seconds)
            self._sorted.pop(key, None)

    def expected(
        self, member: str, group: str, devices: int, asked: float | None, age: float = 0.0
    ) -> float:
        """Seconds that such a session will last, as the median of those that lasted longer
        than ``age``; never more than ``asked`` for, never less than ``age``."""
        length = self._median(member, group, devices, age)
        return length if asked is None else max(age, min(asked, length))

    def _median(self, member: str, group: str, devices: int, age: float) -> float:
        for key in _keys(member, group, devices):
            known = self._known(key)
            first = bisect_right(known, age)
            if len(known) - first >= 3:
                return known[(first + len(known)) // 2]
        # Longer than everything known: what has lasted long goes on for about as long again.
        return max(self._default, 2 * age)

    def _known(self, key: _Key) -> list[float]:
        if key not in self._sorted:
            self._sorted[key] = sorted(self._latest.get(key, ()))
        return self._sorted[key]


def _keys(member: str, group: str, devices: int) -> Iterator[_Key]:
    """From the nearest likeness to the farthest."""
    size = str(devices)
    yield ("member", member, size)
    if group:
        yield ("group", group, size)
    yield ("size", size)
    yield ("all",)
