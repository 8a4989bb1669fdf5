"""Predictions of how long sessions last, from ended and running ones.

Members request many similar sessions at a time, and those last about equally long. The best
evidence for a request is therefore sessions of the same member, group and size requested at about
the same time. One that still runs is evidence too: few similar sessions end sooner.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from ..core.units import DeviceCount

_REMEMBERED = 256
"""Ended sessions kept of one member, group and size, at least."""

_REACH = 60
"""Requests further apart in their sequence are no evidence for each other."""

_FEW = 3
"""How much evidence is needed; with less, the prediction leaves everything open."""

_LEAST = 10.0
"""Seconds; shorter sessions count as this long."""

_SAME = 20
"""Requests this close in their sequence have nearly the same evidence."""

_FRESH = 60.0
"""Seconds for which an estimate is reused, if no similar session ends."""

_GO_ON = 2
"""The weight of a running session against an ended one: it tells more than its age."""

_MEDIAN = 0.6
"""The share of sessions that end before the expected length: a little on the safe side."""


class ExpectedLength(NamedTuple):
    """The expected length of a session."""

    seconds: float
    """It is about as likely to end sooner as later."""
    cost: float
    """Seconds used for ordering: less than ``seconds`` if the session may end very soon.

    The geometric mean of ``seconds`` and the time spent per ended session, if all are given up at
    the age at which that time is least.
    """


class _Estimated(NamedTuple):
    """The latest estimate for similar sessions, and what it was made of."""

    length: ExpectedLength
    ends: int
    most: float | None
    number: int
    at: float


@dataclass(slots=True, eq=False)
class SimilarSessions:
    """Sessions of one member, group and number of devices, numbered in order of request."""

    member: str
    group: str
    devices: DeviceCount
    asked: int = 0
    """How many were ever requested: the number of the next one."""
    ends: int = 0
    """How many ever ended."""
    estimated: _Estimated | None = None
    _numbers: list[int] = field(default_factory=list)
    """The numbers of the ended sessions, in order."""
    _ended: list[float] = field(default_factory=list)
    """How many seconds each of them lasted."""
    _running: list[int] = field(default_factory=list)
    """The numbers of the running sessions, in order."""
    _since: list[float] = field(default_factory=list)
    """When each of them started."""

    def start(self, number: int, started_at: float) -> None:
        """Record that a requested session runs."""
        place = bisect_right(self._running, number)
        self._running.insert(place, number)
        self._since.insert(place, started_at)

    def end(self, number: int, started_at: float, seconds: float) -> None:
        """Record that a session ended after ``seconds``, even if its start was never recorded."""
        place = bisect_left(self._running, number)
        while place < len(self._running) and self._running[place] == number:
            if self._since[place] == started_at:
                del self._running[place], self._since[place]
                break
            place += 1
        place = bisect_right(self._numbers, number)
        self._numbers.insert(place, number)
        self._ended.insert(place, seconds)
        self.ends += 1
        if len(self._numbers) > 2 * _REMEMBERED:
            del self._numbers[:_REMEMBERED], self._ended[:_REMEMBERED]

    def witnesses(self, number: int, most: int) -> tuple[list[float], list[float]]:
        """Return the evidence nearest to ``number``.

        Lengths of the ended sessions requested nearest to it, and start times of the running ones
        that are as near.
        """
        numbers = self._numbers
        high = len(numbers)
        if high and numbers[-1] > number:
            high = min(high, bisect_left(numbers, number) + most)
        low = high - most if high > most else 0
        # The nearest ended sessions before and after: a window that narrows from the far side.
        if high and numbers[high - 1] > number:
            low = max(0, low - most)
            while high - low > most:
                if number - numbers[low] > numbers[high - 1] - number:
                    low += 1
                else:
                    high -= 1
        while low < high and number - numbers[low] > _REACH:
            low += 1
        while low < high and numbers[high - 1] - number > _REACH:
            high -= 1
        reach = _REACH
        if high - low == most:
            reach = max(number - numbers[low], numbers[high - 1] - number)
        if not self._running:
            return self._ended[low:high], []
        first = bisect_left(self._running, number - reach)
        last = bisect_right(self._running, number + reach)
        return self._ended[low:high], self._since[max(first, last - 2 * most) : last]


class SessionLengths:
    """Everything known about session lengths."""

    def __init__(self, default: float, samples: int) -> None:
        self._default = default
        self._samples = samples
        self._alike: dict[tuple[str, str, DeviceCount], SimilarSessions] = {}
        self._latest: dict[tuple[str, ...], deque[float]] = {}

    def alike(self, member: str, group: str, devices: DeviceCount) -> SimilarSessions:
        """Return the record of sessions of these three."""
        key = (member, group, devices)
        found = self._alike.get(key)
        if found is None:
            found = self._alike[key] = SimilarSessions(member, group, devices)
        return found

    def end(self, alike: SimilarSessions, number: int, started_at: float, seconds: float) -> None:
        """Record that a session ended after ``seconds``."""
        alike.end(number, started_at, seconds)
        if alike.ends > 2 * _FEW:
            return  # it has enough evidence of its own, and others have learned enough from it
        for key in _wider(alike):
            self._latest.setdefault(key, deque(maxlen=_FEW)).append(seconds)

    def estimate(
        self, alike: SimilarSessions, number: int, now: float, most: float | None
    ) -> ExpectedLength:
        """Return the expected length of the session with this number, at most ``most`` seconds."""
        last = alike.estimated
        if (
            last is not None
            and last.ends == alike.ends
            and last.most == most
            and abs(number - last.number) <= _SAME
            and 0.0 <= now - last.at <= _FRESH
        ):
            return last.length
        done, since = alike.witnesses(number, self._samples)
        if len(done) < _FEW:
            done += self._otherwise(alike, most)
        length = _weigh(done, [now - start for start in since])
        if most is not None:
            length = ExpectedLength(min(length.seconds, most), min(length.cost, most))
        alike.estimated = _Estimated(length, alike.ends, most, number, now)
        return length

    def end_of(self, alike: SimilarSessions, number: int, started_at: float, now: float) -> float:
        """Return when a running session is expected to end, in seconds since 1970."""
        age = now - started_at
        done, _ = alike.witnesses(number, self._samples)
        if len(done) < _FEW:
            done += self._otherwise(alike, None)
        longer = sorted(seconds for seconds in done if seconds > age)
        # Longer than everything known: a long session is expected to last about as long again.
        length = longer[len(longer) // 2] if longer else max(2 * age, age + 600.0)
        return started_at + length

    def _otherwise(self, alike: SimilarSessions, most: float | None) -> list[float]:
        """Return lengths to use without evidence: from very short to very long."""
        if alike.ends < _FEW:  # similar sessions were hardly ever seen: those of others
            for key in _wider(alike):
                latest = self._latest.get(key, ())
                if len(latest) >= _FEW:
                    return list(latest)
        typical = self._default if most is None else most / 2
        return [typical / 30, typical, 10 * typical]


def _wider(alike: SimilarSessions) -> tuple[tuple[str, ...], ...]:
    """Return keys from the nearest likeness to the farthest."""
    size = str(alike.devices)
    keys: list[tuple[str, ...]] = [("size", size), ("all",)]
    if alike.member:
        keys.insert(0, ("member", alike.member))
    if alike.group:
        keys.insert(0, ("group", alike.group, size))
    return tuple(keys)


def _weigh(done: list[float], ages: list[float]) -> ExpectedLength:
    """Return the expected length, where some lengths are only known to exceed an age.

    The curve for running sessions is the product-limit estimate of survival.
    """
    done.sort()
    ages.sort()
    on, spent, before, expected, most_ends = 1.0, 0.0, 0.0, 0.0, 0.0
    left, older = len(done), len(ages)
    at_least = iter(ages)
    age = next(at_least, math.inf)
    for seconds in done:
        value = seconds if seconds > _LEAST else _LEAST
        while age < value:
            older -= 1
            age = next(at_least, math.inf)
        spent += on * (value - before)
        before = value
        on -= on / (left + _GO_ON * older)
        left -= 1
        ends = (1.0 - on) / spent
        if ends > most_ends:
            most_ends = ends
        if not expected and on <= 1.0 - _MEDIAN:
            expected = value
    if not expected:
        expected = 2 * max(before, ages[-1])
    return ExpectedLength(expected, math.sqrt(expected / most_ends))
