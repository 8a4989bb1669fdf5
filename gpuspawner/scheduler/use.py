"""How much each member and group has used of late: GPU-seconds that decay with a half-life."""

from __future__ import annotations

import math

_FARTHEST = 256.0
"""Half-lives from the reference time after which that is moved."""


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
        self._reference = 0.0
        """The time at which the coefficients below are what they are."""
        self._held: dict[str, int] = {}
        self._past: dict[str, float] = {}

    def of(self, party: str, now: float) -> float:
        """GPU-seconds used of late, as of ``now``; never negative."""
        past = self._past.get(party)
        if past is None:
            return 0.0
        age = (self._reference - now) / self.half_life
        used = self.full * self._held[party] + past * math.pow(
            2.0, age if age < _FARTHEST else _FARTHEST
        )
        return used if used > 0.0 else 0.0

    def change(self, party: str, devices: int, at: float) -> None:
        """``party`` holds so many devices more (or fewer) from ``at``."""
        age = (at - self._reference) / self.half_life
        if not -_FARTHEST < age < _FARTHEST:
            self._move_reference(at)
            age = 0.0
        self._held[party] = self._held.get(party, 0) + devices
        change = self.full * devices * math.pow(2.0, age)
        self._past[party] = self._past.get(party, 0.0) - change

    def _move_reference(self, to: float) -> None:
        """Long before floats overflow. What is farther away than they reach has faded."""
        age = (self._reference - to) / self.half_life
        factor = math.pow(2.0, max(-2 * _FARTHEST, min(2 * _FARTHEST, age)))
        for party in self._past:
            self._past[party] *= factor
        self._reference = to
