"""When devices under lease come back: at the ends of sessions, as far as they are known, else
as sessions like them did."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

_Release = tuple[float, str, int]
"""When, which lease, how many devices of one kind."""


class Planned(NamedTuple):
    """When so many devices of a kind are free together."""

    at: float
    spare: int
    """How many more are free then."""


class Releases:
    """The ends of leases, by kind and in order."""

    def __init__(self) -> None:
        self._by_kind: dict[str, list[_Release]] = {}
        self._ends: dict[str, tuple[float, Mapping[str, int]]] = {}
        self._guesses: list[tuple[float, str]] = []

    def put(self, lease_id: str, held: Mapping[str, int], at: float, guess: bool) -> None:
        """A lease holds these devices until ``at``; replaces what was said of it before."""
        self.remove(lease_id)
        self._ends[lease_id] = (at, held)
        for kind, devices in held.items():
            insort(self._by_kind.setdefault(kind, []), (at, lease_id, devices))
        if guess:
            heapq.heappush(self._guesses, (at, lease_id))

    def remove(self, lease_id: str) -> None:
        """The lease has ended; unknown is no error."""
        at, held = self._ends.pop(lease_id, (0.0, {}))
        for kind, devices in held.items():
            releases = self._by_kind[kind]
            del releases[bisect_left(releases, (at, lease_id, devices))]

    def end_of(self, lease_id: str) -> float:
        """When the lease ends, as far as is known."""
        return self._ends[lease_id][0]

    @property
    def next_guess(self) -> float:
        """The first end that was guessed; infinity where there is none."""
        return self._guesses[0][0] if self._guesses else math.inf

    def guessed_wrong(self, now: float) -> Iterator[str]:
        """Leases that should have ended by now and were only guessed: guess again."""
        while self._guesses and self._guesses[0][0] <= now:
            at, lease_id = heapq.heappop(self._guesses)
            if self._ends.get(lease_id, (None,))[0] == at:
                yield lease_id

    def ahead(self, kind: str, now: float) -> Sequence[_Release]:
        """What comes back of a kind after ``now``, in order.

        A session that should be over is given as long again as it is late already: what does
        not end must not look as if it would at any moment.
        """
        ends = self._by_kind.get(kind, ())
        if not ends or ends[0][0] > now:
            return ends
        late = bisect_right(ends, now, key=itemgetter(0))
        again = [(2 * now - at, lease_id, count) for at, lease_id, count in ends[:late]]
        return sorted([*again, *ends[late:]])

    def together(
        self, kind: str, devices: int, free: int, now: float, starts: Sequence[_Release]
    ) -> Planned | None:
        """When ``devices`` are free at once, if ``free`` are now and nobody else gets any.

        ``starts`` are releases of what starts now. None when there will never be so many.
        """
        ahead = self.ahead(kind, now)
        reached: float | None = None
        for at, _, count in heapq.merge(ahead, sorted(starts)) if starts else ahead:
            if reached is not None and at > reached:
                break
            free += count
            if reached is None and free >= devices:
                reached = at
        return None if reached is None else Planned(reached, free - devices)
