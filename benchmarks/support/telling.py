"""A replay in which tickets are told when they will probably start."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuspawner.queue.estimates import DevicesAhead, Estimator
from gpuspawner.queue.models import Decision, RunningLease, WaitingTicket
from gpuspawner.queue.scheduler import Scheduler
from support.report import quantile

LATEST = 500
"""Waits that the naive estimate looks at."""

FIRST_AGE = 60.0
"""Seconds of waiting at which a ticket is told again; then whenever that has doubled."""


@dataclass(slots=True)
class Told:
    """What one ticket was told at one moment, by all who say something; seconds since 1970."""

    ticket: WaitingTicket
    at: float
    first: bool
    """When it was asked for, and not later."""
    likely: float
    said: dict[str, tuple[float, float]]
    """From when until when it is to start, by who says so."""
    start: float = 0.0

    @property
    def wait(self) -> float:
        return self.start - self.at

    def holds(self, who: str) -> bool:
        low, high = self.said[who]
        return low <= self.start <= high

    def width(self, who: str) -> float:
        low, high = self.said[who]
        return high - low

    def score(self, who: str) -> float:
        """The interval score for eight of ten: the width, and ten times what it misses by."""
        low, high = self.said[who]
        return high - low + 10 * max(low - self.start, self.start - high, 0.0)


class Telling:
    """The production scheduler, and an estimator beside it that is told the same.

    A ticket that the decision at its own moment does not start is told at once, and again
    with the first ticket asked for after its age has doubled.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.estimator = Estimator()
        self.told: list[Told] = []
        self.not_told = 0
        """First looks at tickets of which nothing could be said."""
        self.seconds = 0.0
        """Processor time of all estimates."""
        self._open: dict[str, list[Told]] = {}
        self._new: dict[str, None] = {}
        self._moment = 0.0
        self._again: list[tuple[float, str]] = []
        self._waits: deque[float] = deque(maxlen=LATEST)

    def submit(self, ticket: WaitingTicket) -> None:
        self._tell_before(ticket.asked_at)
        self._moment = ticket.asked_at
        self._new[ticket.id] = None
        self.scheduler.submit(ticket)
        self.estimator.asked(ticket)

    def started(self, lease: RunningLease) -> None:
        ticket = self.scheduler.waiting[lease.id]
        if lease.started_at > ticket.asked_at:
            self._waits.append(lease.started_at - ticket.asked_at)
        self.scheduler.started(lease)
        self.estimator.started(lease)
        self._new.pop(lease.id, None)
        for told in self._open.pop(lease.id, ()):
            told.start = lease.started_at

    def ended(self, lease_id: str, at: float) -> None:
        self._tell_before(at)
        self.scheduler.ended(lease_id, at)

    def decide(self, now: float, free: Mapping[str, int]) -> Decision:
        self._tell_before(now)
        return self.scheduler.decide(now, free, planned=0)

    def _tell_before(self, moment: float) -> None:
        """Time goes on: who asked before ``moment`` and waits is told now."""
        if not self._new or self._moment >= moment:
            return
        now, wanted = self._moment, dict(self._new)
        self._new.clear()
        while self._again and self._again[0][0] <= now:
            ticket_id = heapq.heappop(self._again)[1]
            if ticket_id in self.scheduler.waiting:
                wanted[ticket_id] = None
        ahead = DevicesAhead()
        for ticket_id in self.scheduler.in_line(now):
            ticket = self.scheduler.waiting[ticket_id]
            before = ahead.of(ticket)
            if ticket_id in wanted:
                self._tell(ticket, now, before)

    def _tell(self, ticket: WaitingTicket, now: float, ahead: int) -> None:
        begun = time.process_time()
        estimate = self.estimator.estimate(ticket.id, now, ahead)
        self.seconds += time.process_time() - begun
        age = now - ticket.asked_at
        heapq.heappush(self._again, (ticket.asked_at + max(FIRST_AGE, 2 * age), ticket.id))
        if estimate is None or len(self._waits) < LATEST:
            self.not_told += age == 0
            return
        told = Told(
            ticket,
            now,
            age == 0,
            estimate.likely,
            {
                "ours": (estimate.low, estimate.high),
                "latest": (now + quantile(self._waits, 0.1), now + quantile(self._waits, 0.9)),
            },
        )
        self.told.append(told)
        self._open.setdefault(ticket.id, []).append(told)


def narrowest(values: Sequence[float], part: float) -> tuple[float, float]:
    """The narrowest interval that holds ``part`` of the values."""
    ordered = sorted(values)
    more = max(0, min(len(ordered) - 1, round(part * len(ordered)) - 1))
    ends = zip(ordered, ordered[more:], strict=False)
    return min(ends, key=lambda both: both[1] - both[0])
