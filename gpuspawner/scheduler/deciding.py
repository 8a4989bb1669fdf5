"""Who starts now: a walk down the line with what is free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heappop, heappush

from .book import FRESH, Book
from .limits import Limiter
from .line import POSITION, SMALL, Batch, Entry
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
    """One decision: the positioned, those who go first because of their age, the line."""

    def __init__(self, book: Book, limiter: Limiter, round_: Round) -> None:
        self._book = book
        self._limiter = limiter
        self._round = round_
        self._now = round_.now
        self.starts: list[str] = []

    def run(self, aged: Iterable[str]) -> None:
        """Fill :attr:`starts`, as far as devices go."""
        entries = self._book.line.entries
        at = self._line(0, POSITION) if entries[0][0] == POSITION else 0
        for ticket_id in aged:
            batch = self._book.batch(ticket_id)
            if self._round.left and not self._limiter.refusal(batch, self._now):
                self._offer(ticket_id, batch, batch.which | SMALL, because_of_age=True)
        self._line(at, None)

    def _line(self, at: int, only: int | None) -> int:
        """Walk on from the entry at ``at``, through the section ``only`` or to the end."""
        entries = self._book.line.entries
        round_, now = self._round, self._now
        following: list[Entry] = []
        count = len(entries)  # looks move entries and leave as many
        while round_.left and (at < count or following):
            if following and (at == count or following[0] < entries[at]):
                entry = heappop(following)
            else:
                entry = entries[at]
                if only is not None and entry[0] != only:
                    break
                at += 1
            batch = entry[4]
            shape = batch.shape
            if shape.seen != round_.version:
                round_.measure(shape)
            room = shape.rooms[batch.which]
            if room < batch.seconds and (room >= 0.0 or shape.considered == round_.number):
                continue
            if room >= 0.0 and batch.entry is entry and self._is_old(batch):
                self._book.look(batch, now)
                if entries[at - 1] is not batch.entry:
                    if batch.entry > entry:
                        at -= 1  # it went back: another one is in its place
                    else:
                        heappush(following, batch.entry)
                    continue
            if entry[3] in round_.on or self._limiter.refusal(batch, now):
                continue
            if self._offer(entry[3], batch, batch.which, because_of_age=False):
                behind = batch.behind(entry[3], now)
                if behind is not None:
                    heappush(following, behind)
        return at

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
