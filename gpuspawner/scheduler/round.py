"""One decision while it is being made: what is left, and what is kept for planned starts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

from .capacity import Capacity
from .line import GUESS, SMALL, Batch, Rooms, Shape
from .releases import Planned, Releases

_VERSIONS = itertools.count()

_NO_ROOM: Rooms = (-1.0, -1.0, -1.0, -1.0)


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
        self,
        now: float,
        free: Mapping[str, int],
        capacity: Capacity,
        releases: Releases,
        guess_again: Callable[[float], None],
    ) -> None:
        """``guess_again`` sees to it that no release is guessed to be before the time given."""
        self.now = now
        self.left = {kind: count for kind, count in free.items() if count > 0}
        self.version = self.number = next(_VERSIONS)
        """The version grows when anything is given out or kept; the number is the first one."""
        self.planned: dict[str, float] = {}
        self.on: dict[str, str] = {}
        """For each start, the kind of its devices."""
        self._capacity = capacity
        self._releases = releases
        self._guess_again = guess_again
        self._kept: dict[str, _Kept] = {}
        self._starts: dict[str, list[tuple[float, str, int]]] = {}

    def measure(self, shape: Shape) -> None:
        """Note on a shape how many seconds its tickets may last; see :attr:`Shape.rooms`."""
        rooms = _NO_ROOM
        for kind in shape.kinds:
            if self.left.get(kind, 0) >= shape.devices:
                of_kind = self._rooms(kind, shape.devices)
                rooms = of_kind if rooms is _NO_ROOM else tuple(map(max, rooms, of_kind))
        shape.rooms = rooms
        shape.seen = self.version

    def room(self, batch: Batch) -> float:
        """How many seconds the tickets of a batch may last; negative where none can start."""
        shape = batch.shape
        if shape.seen != self.version:
            self.measure(shape)
        return shape.rooms[batch.which]

    def start(self, ticket_id: str, shape: Shape, seconds: float, which: int) -> None:
        """Give a ticket its devices; ``which`` of the rooms was seen to be enough."""
        devices, kind = shape.devices, shape.kinds[0]
        if len(shape.kinds) > 1:
            kind = max(
                (k for k in shape.kinds if self.left.get(k, 0) >= devices),
                key=lambda k: (
                    self._rooms(k, devices)[which] >= seconds,
                    k not in self._kept,
                    self.left[k],
                ),
            )
        self.on[ticket_id] = kind
        kept = self._kept.get(kind)
        if kept is not None:
            in_doubt = kept.no_guess and which & GUESS
            if in_doubt or self.now + seconds > kept.at:
                kept.spare -= devices
        self.left[kind] -= devices
        if not self.left[kind]:
            del self.left[kind]
        self._starts.setdefault(kind, []).append((self.now + seconds, ticket_id, devices))
        self.version = next(_VERSIONS)

    def keep(self, ticket_id: str, shape: Shape, which: int, no_guess: bool) -> None:
        """Plan the start of a ticket that does not fit, unless another one's is planned on all
        kinds that it could use. ``no_guess``: nothing whose length is a guess may use its
        devices meanwhile."""
        shape.considered = self.number
        kinds = [kind for kind in shape.kinds if kind not in self._kept]
        if not kinds:
            return
        if self._releases.next_guess <= self.now:
            self._guess_again(self.now)
        plans = []
        for kind in kinds:
            left, starts = self.left.get(kind, 0), self._starts.get(kind, ())
            if not which & SMALL:
                left -= self._capacity.for_small(kind, shape.devices)
            planned = self._releases.together(kind, shape.devices, left, self.now, starts)
            if planned is not None:
                plans.append((planned.at, kind, planned))
        if plans:
            at, kind, planned = min(plans)
            self._kept[kind] = _Kept(planned, no_guess)
            self.planned[ticket_id] = at
            self.version = next(_VERSIONS)

    def started(self, kind: str) -> list[tuple[float, str, int]]:
        """What starts now of a kind, as releases."""
        return self._starts.get(kind, [])

    def _rooms(self, kind: str, devices: int) -> Rooms:
        kept = self._kept.get(kind)
        if kept is None or kept.spare >= devices:
            room = room_of_guess = math.inf
        else:
            room = kept.at - self.now
            room_of_guess = -1.0 if kept.no_guess else room
        if self.left[kind] >= devices + self._capacity.for_small(kind, devices):
            return (room, room, room_of_guess, room_of_guess)
        return (-1.0, room, -1.0, room_of_guess)
