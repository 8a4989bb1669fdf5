"""Who waits: tickets in batches, their points, and the line that they make."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from types import MappingProxyType

from .lengths import Lengths
from .limits import Limiter
from .line import Batch, Line, Shape, Terms
from .points import Points
from .policy import Policy
from .values import Waiting

LOOK_AGAIN = 1200.0
"""Seconds after which points are worked out anew, at the soonest, if sessions of the like have
ended; if not, three times as many: past use decays, running sessions grow older."""

LOOK_PART = 0.1
"""And that part of the time that a batch has waited: so long a wait needs no such care."""

FRESH = 60.0
"""Seconds for which points serve for a ticket whose turn it would be."""

_LOOKS = 50
"""Points that are worked out anew in one decision, at most, for being old."""


class Book:
    """All tickets, found by id, by age and in the order of their points."""

    def __init__(self, policy: Policy, lengths: Lengths, points: Points, limiter: Limiter) -> None:
        self._policy = policy
        self._lengths = lengths
        self._points = points
        self._limiter = limiter
        self.tickets: dict[str, Waiting] = {}
        self.waiting: Mapping[str, Waiting] = MappingProxyType(self.tickets)
        self.line = Line(policy.waiting_point_seconds)
        self.limited: dict[Batch, None] = {}
        """Batches that a limit may keep waiting."""
        self.by_age: dict[frozenset[str], list[tuple[float, str]]] = {}
        """Tickets by the kinds that fit, the oldest first."""
        self._batches: dict[str, Batch] = {}
        self._open: dict[Terms, Batch] = {}
        self._shapes: dict[tuple[int, frozenset[str]], Shape] = {}
        self._numbers = itertools.count()
        self._looks: list[tuple[float, int, Batch]] = []
        """When each batch is to be looked at again; a heap."""
        self._stale: list[Batch] = []

    @property
    def shapes(self) -> Iterable[Shape]:
        """Every shape that was ever asked for."""
        return self._shapes.values()

    def batch(self, ticket_id: str) -> Batch:
        """The batch of a ticket that waits."""
        return self._batches[ticket_id]

    def add(self, ticket: Waiting, now: float) -> None:
        """A ticket begins to wait."""
        batch = self._batch_for(ticket)
        place = (ticket.asked_at, ticket.id)
        insort(batch.tickets, place)
        batch.count += 1
        batch.alike.asked += 1
        batch.asked_until = max(batch.asked_until, ticket.asked_at)
        self.tickets[ticket.id] = ticket
        self._batches[ticket.id] = batch
        insort(self.by_age.setdefault(ticket.kinds, []), place)
        if len(batch.tickets) == 1 and not self._is_fresh(batch, now):
            self.look(batch, now)
        else:
            self.line.put(batch, now)
        if batch.parties:
            self.limited[batch] = None

    def remove(self, ticket_id: str, now: float) -> Batch:
        """A ticket that waits does so no longer. Answers its batch."""
        ticket = self.tickets.pop(ticket_id)
        batch = self._batches.pop(ticket_id)
        place = (ticket.asked_at, ticket_id)
        del batch.tickets[bisect_left(batch.tickets, place)]
        ages = self.by_age[ticket.kinds]
        del ages[bisect_left(ages, place)]
        if not ages:
            del self.by_age[ticket.kinds]
        self.line.put(batch, now)
        if not batch.tickets:
            self.limited.pop(batch, None)
        return batch

    def look(self, batch: Batch, now: float) -> None:
        """Work out length and points of a batch as of now, and set it where they put it."""
        alike = batch.alike
        batch.looked_at = now
        batch.ends_seen = alike.ends
        length = self._lengths.estimate(alike, batch.number, now, batch.asked_seconds)
        reckoning = self._points.reckon(alike.member, alike.group, alike.devices, length.cost, now)
        points = self._points.sum(reckoning, batch.priority, batch.boost)
        batch.reckoned(length, reckoning, points)
        self.line.put(batch, now)

    def ended_one_of(self, batch: Batch) -> None:
        """A session that was asked for with those of the batch is over: nothing tells more."""
        if batch.tickets:
            self._stale.append(batch)

    def bring_up_to_date(self, now: float) -> None:
        """Before a decision: points that may have changed, and who has waited enough."""
        for batch in self._stale:
            if batch.tickets and not 0 <= now - batch.looked_at < FRESH:
                self.look(batch, now)
        self._stale.clear()
        for _ in range(min(_LOOKS, len(self._looks))):
            if self._looks[0][0] > now:
                break
            _, number, batch = heappop(self._looks)
            if not batch.tickets:
                if self._open.get(batch.terms) is batch:
                    del self._open[batch.terms]
                continue
            since = abs(now - batch.looked_at)
            every = max(LOOK_AGAIN, LOOK_PART * (now - batch.tickets[0][0]))
            if since >= every and (batch.ends_seen != batch.alike.ends or since >= 3 * every):
                self.look(batch, now)
                since = 0.0
            heappush(self._looks, (now + max(LOOK_AGAIN, every - since), number, batch))
        self.line.settle(now)

    def look_at_all(self, now: float) -> None:
        """Before the whole line is shown."""
        for entry in list(self.line.entries):
            if not 0 <= now - entry[4].looked_at < FRESH:
                self.look(entry[4], now)
        self.line.settle(now)

    def _batch_for(self, ticket: Waiting) -> Batch:
        terms = (
            ticket.member,
            ticket.group,
            ticket.devices,
            ticket.kinds,
            ticket.seconds,
            ticket.priority,
            ticket.boost,
            ticket.position,
            ticket.last,
        )
        batch = self._open.get(terms)
        if (
            batch is not None
            and batch.count < self._policy.batch_tickets
            and abs(ticket.asked_at - batch.asked_until) <= self._policy.batch_seconds
        ):
            return batch
        shape = self._shapes.get((ticket.devices, ticket.kinds))
        if shape is None:
            shape = Shape(ticket.devices, ticket.kinds)
            self._shapes[(ticket.devices, ticket.kinds)] = shape
        batch = Batch(
            ticket,
            terms,
            shape,
            self._lengths.alike(ticket.member, ticket.group, ticket.devices),
            self._limiter.of(ticket.member, ticket.group),
            self._policy.waiting_point_seconds,
        )
        self._open[terms] = batch
        heappush(self._looks, (ticket.asked_at + LOOK_AGAIN, next(self._numbers), batch))
        return batch

    def _is_fresh(self, batch: Batch, now: float) -> bool:
        return batch.ends_seen == batch.alike.ends and 0 <= now - batch.looked_at < FRESH
