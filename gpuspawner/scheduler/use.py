"""How much each member and group has used of late: GPU-seconds that decay with a half-life."""

from __future__ import annotations

import math
from collections import defaultdict

_FARTHEST = 256.0
"""Half-lives from the reference time after which it is moved, long before floats overflow."""


class Use:
    """Decayed use of one sort of party (members, or groups), exact at every moment.

    A device held since ``s`` has a use of ``c * (1 - 2**-((t - s) / half_life))`` at ``t``, with
    ``c = half_life / ln 2``: the most that one device can come to. So a party is two numbers,
    the devices it holds and one coefficient, and nothing is walked as time passes.
    """

    def __init__(self, half_life: float) -> None:
        self.half_life = half_life
        self.full = half_life / math.log(2)
        """GPU-seconds that a device held forever comes to."""
        self._reference: float | None = None
        self._held: defaultdict[str, int] = defaultdict(int)
        self._past: defaultdict[str, float] = defaultdict(float)

    def start(self, party: str, devices: int, at: float) -> None:
        """``party`` holds so many devices more from ``at``."""
        self._change(party, devices, at)

    def end(self, party: str, devices: int, at: float) -> None:
        """``party`` gave so many devices back at ``at``."""
        self._change(party, -devices, at)

    def of(self, party: str, now: float) -> float:
        """GPU-seconds used of late, as of ``now``; never negative."""
        if party not in self._past:
            return 0.0
        past = self._past[party] * math.pow(2.0, -self._age(now))
        return max(0.0, self.full * self._held[party] + past)

    def _change(self, party: str, devices: int, at: float) -> None:
        if self._reference is None:
            self._reference = at
        if abs(self._age(at)) > _FARTHEST:
            self._move_reference(at)
        self._held[party] += devices
        self._past[party] -= self.full * devices * math.pow(2.0, self._age(at))

    def _age(self, at: float) -> float:
        """Half-lives from the reference to ``at``, within what a float bears."""
        age = (at - (self._reference or 0.0)) / self.half_life
        return min(2 * _FARTHEST, max(-2 * _FARTHEST, age))

    def _move_reference(self, to: float) -> None:
        factor = math.pow(2.0, -self._age(to))
        for party in self._past:
            self._past[party] *= factor
        self._reference = to
