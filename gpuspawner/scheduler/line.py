"""The line: who waits, in order, kept up to date one ticket at a time.

A score is a sum of points, of which only the waiting changes by itself, and equally for all. So
the order of two tickets stays, and is looked up and not sorted, with one exception: the waiting
of requests that lack points counts until it has made up for them. They are then *level*, and go
by age. Hence five sections, each ordered by a key that does not depend on the time:

0. tickets that an admin gave a position
1. tickets whose points are above zero before any waiting: small requests, little past use
2. level ones, the oldest first
3. those that still rise
4. tickets that were put last
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heappop, heappush

from .lengths import Alike, Length
from .limits import Party
from .points import Reckoning
from .values import Waiting

Key = tuple[int, float, float, str]
"""Section, order in it, when it was asked for, id."""

Entry = tuple[int, float, float, str, "Batch"]
"""The key of the first ticket of a batch, and the batch."""

Terms = tuple[object, ...]
"""What tickets of one batch have in common."""

POSITION, ABOVE, LEVEL, RISING, LAST = range(5)

Rooms = tuple[float, ...]
"""How many seconds a ticket may last that starts now, -1 when it cannot: four figures, indexed by
the sum of :data:`SMALL` and :data:`GUESS`."""

SMALL, GUESS = 1, 2
"""It may use what is kept for small requests; nobody knows how long it will last."""


class Shape:
    """Requests for so many devices of the same kinds. A decision notes on it what fits."""

    __slots__ = ("considered", "devices", "entries", "head", "kinds", "passed", "rooms", "seen")

    def __init__(self, devices: int, kinds: frozenset[str]) -> None:
        self.devices = devices
        self.kinds = tuple(sorted(kinds))
        self.entries: list[Entry] = []
        """Its part of the line."""
        self.head: Entry | None = None
        """Its next ticket, in a walk down the line."""
        self.passed = False
        """Whether some of its tickets were passed over because they last too long."""
        self.seen = -1
        self.considered = -1
        self.rooms: Rooms = (-1.0, -1.0, -1.0, -1.0)


class Batch:
    """Requests of one member that are alike and were made one after another."""

    __slots__ = (
        "alike",
        "asked_seconds",
        "asked_until",
        "boost",
        "checked",
        "checked_at",
        "count",
        "ends_seen",
        "entry",
        "last",
        "length",
        "looked_at",
        "number",
        "parties",
        "per_point",
        "points",
        "position",
        "priority",
        "reckoning",
        "refusal",
        "refused_for_a_while",
        "seconds",
        "shape",
        "terms",
        "tickets",
        "which",
    )

    def __init__(
        self,
        ticket: Waiting,
        terms: Terms,
        shape: Shape,
        alike: Alike,
        parties: tuple[Party, ...],
        per_point: float,
    ) -> None:
        self.terms = terms
        self.shape = shape
        self.alike = alike
        self.parties = parties
        self.asked_seconds = ticket.seconds
        self.position = ticket.position
        self.last = ticket.last
        self.boost = ticket.boost
        self.priority = ticket.priority
        self.per_point = per_point
        """Seconds of waiting that are worth one point."""
        self.tickets: list[tuple[float, str]] = []
        """When each was asked for, and its id, in order."""
        self.number = alike.asked
        """Where its requests stand in the row of those alike."""
        self.count = 0
        """How many have ever been in it."""
        self.asked_until = ticket.asked_at
        self.length = Length(0.0, 0.0)
        self.reckoning = Reckoning()
        self.points = 0.0
        """All but the waiting."""
        self.seconds = 0.0
        """How long each of its tickets keeps its devices: as asked for, else as guessed."""
        self.which = 0
        """Which of the :data:`Rooms` of its shape is its own."""
        self.looked_at = float("-inf")
        """When length and points were last worked out."""
        self.ends_seen = -1
        self.entry: Entry | None = None
        """Its place in the line; None while it is out of it."""
        self.checked = -1
        self.checked_at = 0.0
        self.refusal = ""
        """The limit that keeps it waiting, as of the check."""
        self.refused_for_a_while = False
        """Whether the passing of time alone may change that."""

    def key(self, asked_at: float, ticket_id: str, now: float) -> Key:
        """Where one of its tickets stands at ``now``."""
        if self.position is not None:
            return (POSITION, self.position, asked_at, ticket_id)
        due = asked_at / self.per_point - self.points
        if self.last:
            return (LAST, due, asked_at, ticket_id)
        if self.points >= 0.0:
            return (ABOVE, due, asked_at, ticket_id)
        if due <= now / self.per_point:
            return (LEVEL, asked_at, asked_at, ticket_id)
        return (RISING, due, asked_at, ticket_id)

    def reckoned(self, length: Length, reckoning: Reckoning, points: float) -> None:
        """Note what was worked out anew."""
        self.length, self.reckoning, self.points = length, reckoning, points
        self.seconds = length.seconds if self.asked_seconds is None else self.asked_seconds
        small = SMALL if reckoning.size >= 0.0 else 0
        self.which = small + (GUESS if self.asked_seconds is None else 0)

    def behind(self, ticket_id: str, now: float) -> Entry | None:
        """The entry of the ticket behind this one in the batch, if there is one."""
        place = 1
        while self.tickets[place - 1][1] != ticket_id:
            place += 1
        if place == len(self.tickets):
            return None
        return (*self.key(*self.tickets[place], now), self)

    def waiting_points(self, asked_at: float, now: float) -> float:
        """Points for waiting: as many as are lacking, where some are."""
        waited = max(0.0, now - asked_at) / self.per_point
        if self.points < 0.0 and not self.last:
            return min(waited, -self.points)
        return waited


class Line:
    """Batches in the order of their first tickets."""

    def __init__(self, per_point: float) -> None:
        self._per_point = per_point
        self.entries: list[Entry] = []
        self._several: dict[Batch, None] = {}
        """Those in which more than one waits."""

    def put(self, batch: Batch, now: float) -> Entry | None:
        """Set a batch where it belongs now, or take it out when nobody waits in it."""
        if len(batch.tickets) > 1:
            self._several[batch] = None
        else:
            self._several.pop(batch, None)
            if not batch.tickets:
                self.remove(batch)
                return None
        asked_at, ticket_id = batch.tickets[0]
        entry = (*batch.key(asked_at, ticket_id, now), batch)
        if batch.entry is not None:
            if batch.entry[:4] == entry[:4]:
                return batch.entry
            self.remove(batch)
        batch.entry = entry
        insort(self.entries, entry)
        insort(batch.shape.entries, entry)
        return entry

    def remove(self, batch: Batch) -> None:
        """Take a batch out of the line."""
        if batch.entry is not None:
            for entries in (self.entries, batch.shape.entries):
                del entries[bisect_left(entries, batch.entry)]
            batch.entry = None

    def settle(self, now: float) -> None:
        """Those whose waiting has made up for what they lacked go by age from now on."""
        first = bisect_left(self.entries, (RISING,))
        while first < len(self.entries) and self.entries[first][0] == RISING:
            if self.entries[first][1] > now / self._per_point:
                break
            self.put(self.entries[first][4], now)
            first += 1

    def in_order(self, now: float) -> Iterator[Key]:
        """The keys of all tickets, first next; nothing may change meanwhile."""
        following: list[tuple[Key, int, Batch]] = []
        for entry in self.entries:
            while following and following[0][0] < entry[:4]:
                key, place, batch = heappop(following)
                yield key
                _follow(following, batch, place, now)
            yield entry[:4]
            if len(entry[4].tickets) > 1:
                _follow(following, entry[4], 0, now)
        while following:
            key, place, batch = heappop(following)
            yield key
            _follow(following, batch, place, now)

    def before(self, key: Key, now: float) -> int:
        """How many tickets stand before ``key``."""
        count = bisect_left(self.entries, key)
        for batch in self._several:
            if batch.entry is not None and batch.entry[:4] < key:
                keys = [batch.key(asked_at, name, now) for asked_at, name in batch.tickets[1:]]
                count += bisect_left(keys, key)
        return count


def _follow(following: list[tuple[Key, int, Batch]], batch: Batch, place: int, now: float) -> None:
    """Add what stands behind the ticket at ``place`` of a batch."""
    if place + 1 < len(batch.tickets):
        key = batch.key(*batch.tickets[place + 1], now)
        heappush(following, (key, place + 1, batch))
