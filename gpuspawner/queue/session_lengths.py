"""How long sessions last, learned from those that ended and from those that go on.

Members ask for many of a kind at a time, and those last about equally long. So the best witnesses
of a request are the sessions of the same member, group and size that were asked for at about the
same time. One that still runs is a witness too: of its like, few end before it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from typing import NamedTuple

_REMEMBERED = 256
"""Ended sessions that are kept of one member, group and size, at least."""

_REACH = 60
"""Requests further apart in their row are no witnesses of each other."""

_FEW = 3
"""Witnesses that are needed; what is expected of fewer leaves everything open."""

_LEAST = 10.0
"""Seconds; shorter sessions are as short as this to an estimate."""

_SAME = 20
"""Requests so near to each other in their row have the same witnesses, more or less."""

_FRESH = 60.0
"""Seconds for which an estimate serves others, if no session of the like ends."""

_GO_ON = 2
"""How much a session that runs counts beside one that ended: it has more to say than its age."""

_MEDIAN = 0.6
"""The part of sessions that end before the length that is expected: a little to the safe side."""


class Length(NamedTuple):
    """What is expected of a session."""

    seconds: float
    """It is about as likely over sooner as later."""
    cost: float
    """Seconds that the order counts: less than the above when it may be over very soon. The
    geometric mean of the above and the time spent per session that ends, if all are given up
    at the age at which that is least."""


class _Estimated(NamedTuple):
    """The latest estimate of some that are alike, and what it was made of."""

    length: Length
    ends: int
    most: float | None
    number: int
    at: float


class Alike:
    """Sessions of one member, group and number of devices, numbered as they were asked for."""

    __slots__ = (
        "_ended",
        "_numbers",
        "_running",
        "_since",
        "asked",
        "devices",
        "ends",
        "estimated",
        "group",
        "member",
    )

    def __init__(self, member: str, group: str, devices: int) -> None:
        self.member = member
        self.group = group
        self.devices = devices
        self.asked = 0
        """How many were ever asked for: the number of the next one."""
        self.ends = 0
        """How many have ended, ever."""
        self.estimated: _Estimated | None = None
        self._numbers: list[int] = []
        """The numbers of those that ended, in order."""
        self._ended: list[float] = []
        """How many seconds each of them lasted."""
        self._running: list[int] = []
        """The numbers of those that run, in order."""
        self._since: list[float] = []
        """When each of them started."""

    def start(self, number: int, started_at: float) -> None:
        """One that was asked for runs."""
        place = bisect_right(self._running, number)
        self._running.insert(place, number)
        self._since.insert(place, started_at)

    def end(self, number: int, started_at: float, seconds: float) -> None:
        """One is over after so many seconds, whether its start was told or not."""
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
        """How long those lasted that were asked for nearest to ``number``, and since when those
        run that are as near."""
        numbers = self._numbers
        high = len(numbers)
        if high and numbers[-1] > number:
            high = min(high, bisect_left(numbers, number) + most)
        low = high - most if high > most else 0
        # What ended of the nearest before and behind: a window that narrows from the far side.
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


class Lengths:
    """All that is known about lengths."""

    def __init__(self, default: float, samples: int) -> None:
        self._default = default
        self._samples = samples
        self._alike: dict[tuple[str, str, int], Alike] = {}
        self._latest: dict[tuple[str, ...], deque[float]] = {}

    def alike(self, member: str, group: str, devices: int) -> Alike:
        """Where sessions of these three are kept."""
        key = (member, group, devices)
        found = self._alike.get(key)
        if found is None:
            found = self._alike[key] = Alike(member, group, devices)
        return found

    def end(self, alike: Alike, number: int, started_at: float, seconds: float) -> None:
        """A session is over after so many seconds."""
        alike.end(number, started_at, seconds)
        if alike.ends > 2 * _FEW:
            return  # it speaks for itself, and others have heard enough of it
        for key in _wider(alike):
            self._latest.setdefault(key, deque(maxlen=_FEW)).append(seconds)

    def estimate(self, alike: Alike, number: int, now: float, most: float | None) -> Length:
        """What to expect of the one with this number, which lasts ``most`` seconds at most."""
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
            length = Length(min(length.seconds, most), min(length.cost, most))
        alike.estimated = _Estimated(length, alike.ends, most, number, now)
        return length

    def end_of(self, alike: Alike, number: int, started_at: float, now: float) -> float:
        """When one that runs is expected to end, in seconds since 1970."""
        age = now - started_at
        done, _ = alike.witnesses(number, self._samples)
        if len(done) < _FEW:
            done += self._otherwise(alike, None)
        longer = sorted(seconds for seconds in done if seconds > age)
        # Longer than everything known: what has lasted long goes on for about as long again.
        length = longer[len(longer) // 2] if longer else max(2 * age, age + 600.0)
        return started_at + length

    def _otherwise(self, alike: Alike, most: float | None) -> list[float]:
        """Lengths to go by where there are no witnesses: of others, where its like was hardly
        ever seen; else from very short to very long, so that a few are tried out soon."""
        if alike.ends < _FEW:
            for key in _wider(alike):
                latest = self._latest.get(key, ())
                if len(latest) >= _FEW:
                    return list(latest)
        typical = self._default if most is None else most / 2
        return [typical / 30, typical, 10 * typical]


def _wider(alike: Alike) -> tuple[tuple[str, ...], ...]:
    """From the nearest likeness to the farthest."""
    size = str(alike.devices)
    keys: list[tuple[str, ...]] = [("size", size), ("all",)]
    if alike.member:
        keys.insert(0, ("member", alike.member))
    if alike.group:
        keys.insert(0, ("group", alike.group, size))
    return tuple(keys)


def _weigh(done: list[float], ages: list[float]) -> Length:
    """What lengths say, of which some are only known to be more than an age.

    The curve of those that go on is the product-limit estimate of survival.
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
    return Length(expected, math.sqrt(expected / most_ends))
