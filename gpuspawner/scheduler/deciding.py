"""Who starts now: a walk down the line with what is free."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush

from .book import FRESH, Book
from .limits import Limiter
from .line import LAST, POSITION, SMALL, Batch, Entry, Shape
from .policy import Policy
from .round import Round


class Aged:
    """Who goes first because of their age: served as devices allow, within a share of them."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._in_use: dict[str, int] = {}

    def start(self, held: Mapping[str, int]) -> None:
        """Devices (by kind) are in use by one that went first."""
        for kind, devices in held.items():
            self._in_use[kind] = self._in_use.get(kind, 0) + devices

    def end(self, held: Mapping[str, int]) -> None:
        """And are not any more."""
        for kind, devices in held.items():
            self._in_use[kind] -= devices

    def due(self, asked_at: float, now: float) -> bool:
        """Whether a ticket has waited so long."""
        return now - asked_at >= self._policy.overdue_seconds

    def first(
        self, book: Book, limiter: Limiter, capacity: Mapping[str, int], now: float
    ) -> list[str]:
        """The tickets that go first now, in order."""
        found: list[tuple[float, str]] = []
        for kinds, ages in book.by_age.items():
            if not self.due(ages[0][0], now):
                continue
            in_use = sum(self._in_use.get(kind, 0) for kind in kinds)
            most = self._policy.overdue_share * sum(capacity.get(kind, 0) for kind in kinds)
            for asked_at, ticket_id in ages:
                if not self.due(asked_at, now) or (in_use and in_use >= most):
                    break
                ticket = book.tickets[ticket_id]
                if ticket.position is not None or limiter.refusal(book.batch(ticket_id), now):
                    continue
                if in_use and in_use + ticket.devices > most:
                    break
                in_use += ticket.devices
                found.append((asked_at, ticket_id))
        found.sort()
        return [ticket_id for _, ticket_id in found]


class Walk:
    """One decision: the positioned, those who go first because of their age, the line.

    The line is walked shape by shape, with a finger on the first ticket of each that may get
    something, so that nobody is looked at whose devices are all in use. What is left only
    becomes less while a decision is made: who was passed over once need not be asked again,
    but for the first of a shape that finds no devices left at all, which gets a planned start.
    """

    def __init__(self, book: Book, limiter: Limiter, round_: Round) -> None:
        self._book = book
        self._limiter = limiter
        self._round = round_
        self._now = round_.now
        self._shapes: list[Shape] = []
        self._heads: list[tuple[Entry, Shape | None]] = []
        """The next ticket of each shape; and, without a shape, those that are out of its row."""
        self._section = LAST
        """The last section to walk through."""
        self.starts: list[str] = []

    def run(self, aged: Iterable[str]) -> None:
        """Fill :attr:`starts`, as far as devices go."""
        first = POSITION
        if self._book.line.entries[0][0] == POSITION:
            self._line(POSITION, POSITION)
            first = POSITION + 1
        for ticket_id in aged:
            batch = self._book.batch(ticket_id)
            if self._round.left and not self._limiter.refusal(batch, self._now):
                self._offer(ticket_id, batch, batch.which | SMALL, because_of_age=True)
        self._line(first, LAST)

    def _line(self, first: int, last: int) -> None:
        """Offer what is left to all from the section ``first`` to the section ``last``."""
        round_ = self._round
        self._section = last
        self._shapes = [shape for shape in self._book.shapes if shape.entries]
        self._heads = []
        for each in self._shapes:
            each.passed = False
            entry = each.entries[0]
            if entry[0] < first:
                self._point(each, (first,))
            elif entry[0] <= last:
                each.head = entry  # whether it may get something is seen when it is its turn
                self._heads.append((entry, each))
        heapify(self._heads)
        while round_.left and self._heads:
            entry, shape = heappop(self._heads)
            if shape is not None and shape.head is not entry:
                continue  # the finger has moved on
            version = round_.version
            self._turn(entry)
            if shape is not None:
                self._point(shape, entry)
            if round_.version != version:
                self._less_is_left(entry, but=shape)

    def _turn(self, entry: Entry) -> None:
        """Offer what is left to one ticket."""
        batch = entry[4]
        if not self._may_get(batch):
            return
        if batch.entry is entry and self._round.room(batch) >= 0.0 and self._is_old(batch):
            self._book.look(batch, self._now)
            if batch.entry is not entry:
                if batch.entry < entry:
                    heappush(self._heads, (batch.entry, None))
                return
        if entry[3] in self._round.on or self._limiter.refusal(batch, self._now):
            return
        if self._offer(entry[3], batch, batch.which, because_of_age=False):
            behind = batch.behind(entry[3], self._now)
            if behind is not None:
                heappush(self._heads, (behind, None))

    def _point(self, shape: Shape, after: Entry | tuple[int]) -> None:
        """Put the finger on the first ticket of a shape behind ``after`` that may get something."""
        round_, now = self._round, self._now
        if shape.seen != round_.version:
            round_.measure(shape)
        rooms = shape.rooms
        considered = shape.considered == round_.number
        shape.head = None
        if considered and max(rooms) < 0.0:
            return
        entries, refusal = shape.entries, self._limiter.refusal
        for place in range(bisect_right(entries, after), len(entries)):
            entry = entries[place]
            if entry[0] > self._section:
                return
            batch = entry[4]
            room = rooms[batch.which]
            if room < batch.seconds and (room >= 0.0 or considered):
                shape.passed = shape.passed or not considered
                continue
            if batch.parties and refusal(batch, now):
                continue
            shape.head = entry
            heappush(self._heads, (entry, shape))
            return

    def _less_is_left(self, here: Entry, but: Shape | None) -> None:
        """Those of a shape that were passed over because they last too long may be the first
        to find no devices at all."""
        for shape in self._shapes:
            if not shape.passed or shape is but or shape.considered == self._round.number:
                continue
            before = shape.rooms
            self._round.measure(shape)
            if shape.rooms != before:
                self._point(shape, here)

    def _may_get(self, batch: Batch) -> bool:
        """Whether a ticket may start now, or is the first of its shape that cannot."""
        room = self._round.room(batch)
        if room < 0.0:
            return batch.shape.considered != self._round.number
        return room >= batch.seconds

    def _is_old(self, batch: Batch) -> bool:
        """Whether more is known by now of how long its like lasts."""
        if batch.ends_seen == batch.alike.ends:
            return False
        return not 0 <= self._now - batch.looked_at <= FRESH

    def _offer(self, ticket_id: str, batch: Batch, which: int, because_of_age: bool) -> bool:
        """Start a ticket if it fits, else plan its start."""
        shape, round_ = batch.shape, self._round
        if shape.seen != round_.version:
            round_.measure(shape)
        if shape.rooms[which] >= batch.seconds:
            round_.start(ticket_id, shape, batch.seconds, which)
            self.starts.append(ticket_id)
            self._limiter.take(batch, batch.seconds)
            return True
        if shape.rooms[which] < 0.0:
            round_.keep(ticket_id, shape, which, because_of_age)
        return False
