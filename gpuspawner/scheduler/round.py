"""One decision while it is being made: what is left, and what is kept for planned starts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from .line import Shape
from .releases import Planned, Releases

_VERSIONS = itertools.count()


class _Kept:
    """Devices of one kind that are gathered for the first ticket that waits for them."""

    __slots__ = ("at", "no_guess", "spare")

    def __init__(self, planned: Planned, no_guess: bool) -> None:
        self.at = planned.at
        self.spare = planned.spare
        self.no_guess = no_guess


class Round:
    """The free devices of a moment, given out one ticket after the other.

    The first ticket of each kind that does not fit gets a planned start: the moment at which
    enough devices have come back. Those behind it may use what is free meanwhile, if they end
    before, or do with what is left over then.
    """

    def __init__(
        self, now: float, free: Mapping[str, int], releases: Releases, for_small: Mapping[str, int]
    ) -> None:
        self.now = now
        self.left = {kind: count for kind, count in free.items() if count > 0}
        self.planned: dict[str, float] = {}
        self.on: dict[str, str] = {}
        """For each start, the kind of its devices."""
        self._releases = releases
        self._for_small = for_small
        self._kept: dict[str, _Kept] = {}
        self._starts: dict[str, list[tuple[float, str, int]]] = {}
        self._version = self._number = next(_VERSIONS)

    def considered(self, shape: Shape) -> bool:
        """Whether a start was planned, or tried to be, for a ticket of this shape."""
        return shape.considered == self._number

    def room(self, shape: Shape, guess: bool, small: bool) -> float:
        """How many seconds a ticket may last that starts now; -1 when it cannot.

        ``guess``: nobody knows how long it will last. ``small``: it may use what is kept for
        small requests.
        """
        if shape.seen != self._version:
            shape.seen = self._version
            shape.rooms = (
                self._most_room(shape, False, False),
                self._most_room(shape, False, True),
                self._most_room(shape, True, False),
                self._most_room(shape, True, True),
            )
        return shape.rooms[2 * guess + small]

    def start(self, ticket_id: str, shape: Shape, seconds: float, guess: bool, small: bool) -> None:
        """Give a ticket its devices; the caller has asked for the room."""
        devices = shape.devices
        kind = max(
            (k for k in shape.kinds if self._room(k, devices, guess, small) >= seconds),
            key=lambda k: (k not in self._kept, self.left[k]),
        )
        self.on[ticket_id] = kind
        kept = self._kept.get(kind)
        if kept is not None and self.now + seconds > kept.at:
            kept.spare -= devices
        self.left[kind] -= devices
        if not self.left[kind]:
            del self.left[kind]
        self._starts.setdefault(kind, []).append((self.now + seconds, ticket_id, devices))
        self._version = next(_VERSIONS)

    def keep(self, ticket_id: str, shape: Shape, no_guess: bool, small: bool) -> None:
        """Plan the start of a ticket that does not fit, unless another one's is planned on all
        kinds that it could use. ``no_guess``: nothing whose length is a guess may use its
        devices meanwhile."""
        shape.considered = self._number
        plans = []
        for kind in shape.kinds:
            if kind in self._kept:
                continue
            left, starts = self.left.get(kind, 0), self._starts.get(kind, ())
            left -= 0 if small else self._for_small.get(kind, 0)
            planned = self._releases.together(kind, shape.devices, left, self.now, starts)
            if planned is not None:
                plans.append((planned.at, kind, planned))
        if plans:
            at, kind, planned = min(plans)
            self._kept[kind] = _Kept(planned, no_guess)
            self.planned[ticket_id] = at
            self._version = next(_VERSIONS)

    def started(self, kind: str) -> list[tuple[float, str, int]]:
        """What starts now of a kind, as releases."""
        return self._starts.get(kind, [])

    def _most_room(self, shape: Shape, guess: bool, small: bool) -> float:
        return max(self._room(kind, shape.devices, guess, small) for kind in shape.kinds)

    def _room(self, kind: str, devices: int, guess: bool, small: bool) -> float:
        left = self.left.get(kind, 0)
        if left < devices or (not small and left < devices + self._for_small.get(kind, 0)):
            return -1.0
        kept = self._kept.get(kind)
        if kept is None or kept.spare >= devices:
            return math.inf
        return -1.0 if guess and kept.no_guess else kept.at - self.now
