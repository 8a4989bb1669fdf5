"""Estimates of when a ticket will start, learned from earlier tickets.

What counts most is the work ahead: how many devices go first, and how many per second were recently
granted on the same kinds. Their quotient is the *pace* of a ticket. Past tickets with about the
same width, time waited and pace show which multiple of the pace their wait came to; tickets that
still wait show that theirs is larger. The estimate is the narrowest interval that contains eight of
ten waits, stretched by how much intervals have recently proved too narrow or too wide.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ..core.units import DeviceCount
from .kinds import pool_of
from .models import Estimate, RunningLease, WaitingTicket
from .rounds import GrantRate

_LEAST_GAIN = 0.001
"""How much one comparison changes the factor of a class that has seen many."""

_FIRST_GAIN = 1.0
_FIRST_COUNT = 100
"""A new class learns faster: its n-th comparison has the gain FIRST_GAIN / (FIRST_COUNT + n)."""

_LOWEST, _HIGHEST = -3.0, 2.0
"""Bounds of a class's contribution, as a logarithm."""

_MOST = 1.65
"""The largest factor: in an unprecedented overload, an interval of weeks would be useless."""

Class = tuple[str | int, ...]


class Calibration:
    """A factor for each class of tickets, adjusted a little with every comparison.

    A miss raises it and a hit lowers it, in the proportion that keeps it stable when the intended
    share of intervals holds. So the promised share is kept in the long run whatever changes. A
    ticket is in several classes, whose factors are multiplied.
    """

    def __init__(self, inside: float) -> None:
        self._inside = inside
        self._logs: dict[Class, float] = {}
        self._counts: dict[Class, int] = {}

    def stretch(self, classes: tuple[Class, ...]) -> float:
        """Return the factor for a ticket of these classes."""
        return min(_MOST, math.exp(sum(self._logs.get(of, 0.0) for of in classes)))

    def compare(self, classes: tuple[Class, ...], held: bool) -> None:
        """Record if an interval shown to a ticket of these classes contained its start."""
        for of in classes:
            count = self._counts[of] = self._counts.get(of, 0) + 1
            gain = max(_LEAST_GAIN, _FIRST_GAIN / (_FIRST_COUNT + count))
            log = self._logs.get(of, 0.0) + gain * (self._inside - held)
            self._logs[of] = min(_HIGHEST, max(_LOWEST, log))


_REMEMBERED = 300
"""How many recent observations are kept of each likeness."""

_APART = 60.0
"""Seconds between two kept observations.

Tickets requested together start together, and must not push out all other observations.
"""

_FRESH = 60.0
"""Seconds for which a curve is reused."""


@dataclass(slots=True, eq=False)
class WaitObservation:
    """A ticket at one moment of its wait: the estimate it was shown, and when it started."""

    at: float
    pace: float
    """Expected wait in seconds, by the work ahead of it."""
    classes: tuple[Class, ...]
    told: Estimate | None
    compared: bool = False
    """True if the shown estimate was compared with the outcome."""
    over_at: float | None = None
    """When it started or was withdrawn; None while it waits."""
    started: bool = False

    def multiple(self, now: float) -> float:
        """Return how many times its pace the ticket has waited since this observation."""
        until = now if self.over_at is None else self.over_at
        return max(0.0, until - self.at) / self.pace


class WaitCurve(NamedTuple):
    """The share of tickets that started within each multiple of their pace."""

    multiples: list[float]
    parts: list[float]

    def at(self, part: float) -> float:
        """Return the multiple within which this share has started; 0 for no share."""
        if part <= 0.0:
            return 0.0
        return self.multiples[min(len(self.parts) - 1, bisect_left(self.parts, part - 1e-9))]


class WaitObservations:
    """The latest observations of similar tickets."""

    def __init__(self) -> None:
        self._looks: deque[WaitObservation] = deque(maxlen=_REMEMBERED)
        self._curve = WaitCurve([], [])
        self._made_at = -math.inf

    def add(self, look: WaitObservation) -> None:
        """Keep an observation, unless it comes too soon after the last."""
        if not self._looks or not 0 <= look.at - self._looks[-1].at < _APART:
            self._looks.append(look)

    def curve(self, now: float) -> WaitCurve:
        """Return the curve of the waits, at most a minute old."""
        if not 0 <= now - self._made_at < _FRESH:
            self._curve = _curve(self._looks, now)
            self._made_at = now
        return self._curve


def _curve(looks: deque[WaitObservation], now: float) -> WaitCurve:
    """Return the product-limit estimate; a ticket that waits or was withdrawn is censored."""
    waits = sorted((look.multiple(now), look.started) for look in looks)
    multiples: list[float] = []
    parts: list[float] = []
    left = 1.0
    for at_risk, (multiple, started) in zip(range(len(waits), 0, -1), waits, strict=True):
        if started:
            left -= left / at_risk
            multiples.append(multiple)
            parts.append(1.0 - left)
    if multiples and left > 1e-9:
        multiples.append(waits[-1][0])
        parts.append(1.0)
    return WaitCurve(multiples, parts)


_AIM = 0.81
"""The target share of starts within the shown interval.

A little more than the promised 0.8, so that calibration errors do not fall short of it.
"""

_SPEAKS_FROM = 20
"""How many similar observations must have a known start before an estimate is given."""

_AGES = (300.0, 3600.0, 6 * 3600.0, 86400.0)
"""Bounds in seconds of the age classes of waiting tickets."""

_FIRST_AGE = 60.0
"""A ticket is observed when it is requested, at this age, and each time that has doubled."""

_LEFT_OUT = (0.0, 0.02, 0.05)
"""Shares of the tickets that may start before the interval does."""

_DUE = 1000
"""How many pending estimates are kept before the compared ones are removed."""

Key = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PastWait:
    """A past ticket that got its devices: estimates are learned from these."""

    asked_at: float
    started_at: float
    devices: DeviceCount
    kinds: frozenset[str]
    """Kinds that fitted."""
    group: str = ""


@dataclass(slots=True)
class _Ticket:
    ticket: WaitingTicket
    next_look: float
    looks: list[WaitObservation] = field(default_factory=list)


class Estimator:
    """Estimates for waiting tickets. Incremental: it gets the same events as :class:`Scheduler`.

    Pure and fast: an estimate is a lookup in a curve that serves all tickets alike for a minute.
    """

    def __init__(self) -> None:
        self._tickets: dict[str, _Ticket] = {}
        self._flow = GrantRate()
        self._looks: dict[Key, WaitObservations] = {}
        self._calibration = Calibration(_AIM)
        self._due: list[tuple[float, int, WaitObservation]] = []
        """Estimates that were shown, by the time at which they are proven wrong."""
        self._most_due = _DUE
        self._number = itertools.count()

    # Events.

    def asked(self, ticket: WaitingTicket) -> None:
        """Record that a ticket waits; one with a known id was changed and keeps waiting."""
        known = self._tickets.get(ticket.id)
        if known is None:
            self._tickets[ticket.id] = _Ticket(ticket, ticket.asked_at)
        else:
            known.ticket = ticket

    def started(self, lease: RunningLease) -> None:
        """Record that a lease began; its ticket, if it had one, shows how long it waited."""
        at = lease.started_at
        for kind, devices in lease.held.items():
            self._flow.give({pool_of(kind): devices}, at)
        known = self._tickets.pop(lease.ticket_id or lease.id, None)
        for look in known.looks if known else ():
            look.over_at, look.started = at, True
            self._compare(look, at)

    def withdrawn(self, ticket_id: str, at: float) -> None:
        """Record that a ticket ended without devices; an unknown ticket is no error."""
        known = self._tickets.pop(ticket_id, None)
        for look in known.looks if known else ():
            look.over_at = at

    def withdraw_others(self, waiting: Collection[str], at: float) -> None:
        """Withdraw all tickets but these."""
        for ticket_id in self._tickets.keys() - waiting:
            self.withdrawn(ticket_id, at)

    def learn(self, history: Iterable[PastWait]) -> None:
        """Learn from tickets that started before this estimator was created, in any order.

        What was ahead of them was not recorded; it is assumed to be everything that was requested
        earlier and started first.
        """
        past = sorted(history, key=lambda waited: waited.asked_at)
        events = [(waited.asked_at, 1, at) for at, waited in enumerate(past)]
        events += [(max(w.asked_at, w.started_at), 0, at) for at, w in enumerate(past)]
        waiting: set[int] = set()
        for now, asks, at in sorted(events):
            this = past[at]
            if asks:
                first = (past[o] for o in waiting if past[o].started_at <= this.started_at)
                ahead = sum(o.devices for o in first if o.kinds & this.kinds)
                ticket = WaitingTicket(
                    id=f"past {at}",
                    member="",
                    group=this.group,
                    devices=this.devices,
                    kinds=this.kinds,
                    asked_at=now,
                )
                if this.started_at > now:
                    waiting.add(at)
                    self.asked(ticket)
                    self.estimate(ticket.id, now, ahead)
                    continue
            waiting.discard(at)
            held = dict.fromkeys(sorted(this.kinds)[:1], this.devices)
            self.started(RunningLease(id=f"past {at}", member="", held=held, started_at=now))

    # Results.

    def estimate(
        self, ticket_id: str, now: float, ahead: DeviceCount, latest: float | None = None
    ) -> Estimate | None:
        """Estimate when a ticket starts; never in the past.

        Returns None for an unknown ticket, and while too few similar tickets have started.

        Args:
            ticket_id: The ticket.
            now: The current time.
            ahead: How many devices the tickets before it request on kinds that fit it (see
                :class:`DevicesAhead`).
            latest: A time by which it certainly starts.

        A ticket's first estimate, and some later ones, are kept to learn from their outcome.
        """
        known = self._tickets.get(ticket_id)
        if known is None:
            return None
        ticket = known.ticket
        self._settle(now)
        pace = self._flow.seconds_for(ahead + ticket.devices, _pools(ticket.kinds), now)
        keys, classes = _like(ticket, max(0.0, now - ticket.asked_at), pace)
        estimate = None
        curve = self._curve(keys, now)
        if curve is not None:
            estimate = self._interval(curve, classes, pace, now, latest)
        if now >= known.next_look:
            age = max(_FIRST_AGE, 2 * (now - ticket.asked_at))
            known.next_look = ticket.asked_at + age
            self._keep(known, WaitObservation(now, pace, classes, estimate), keys)
        return estimate

    def guess(
        self, newcomer: WaitingTicket, now: float, ahead: DeviceCount, latest: float | None = None
    ) -> Estimate | None:
        """Return what :meth:`estimate` would for a ticket requested now; nothing is kept."""
        pace = self._flow.seconds_for(ahead + newcomer.devices, _pools(newcomer.kinds), now)
        keys, classes = _like(newcomer, 0.0, pace)
        curve = self._curve(keys, now)
        return None if curve is None else self._interval(curve, classes, pace, now, latest)

    # Helpers.

    def _curve(self, keys: tuple[Key, ...], now: float) -> WaitCurve | None:
        """Return the curve of the nearest likeness with enough observations."""
        for key in keys:
            looks = self._looks.get(key)
            if looks is not None:
                curve = looks.curve(now)
                if len(curve.multiples) >= _SPEAKS_FROM:
                    return curve
        return None

    def _interval(
        self,
        curve: WaitCurve,
        classes: tuple[Class, ...],
        pace: float,
        now: float,
        latest: float | None,
    ) -> Estimate:
        low, high = min(
            ((curve.at(out), curve.at(out + _AIM)) for out in _LEFT_OUT),
            key=lambda ends: ends[1] - ends[0],
        )
        stretch = self._calibration.stretch(classes)
        high *= stretch
        low /= max(1.0, stretch)
        likely = min(max(low, curve.at(0.5)), high)
        most = math.inf if latest is None else max(now, latest)
        return Estimate(*(min(most, now + part * pace) for part in (low, likely, high)))

    def _keep(self, known: _Ticket, look: WaitObservation, keys: tuple[Key, ...]) -> None:
        known.looks.append(look)
        for key in keys:
            if key not in self._looks:
                self._looks[key] = WaitObservations()
            self._looks[key].add(look)
        if look.told is not None:
            if len(self._due) >= self._most_due:
                self._due = [due for due in self._due if not due[2].compared]
                heapq.heapify(self._due)
                self._most_due = max(_DUE, 2 * len(self._due))
            heapq.heappush(self._due, (look.told.high, next(self._number), look))

    def _settle(self, now: float) -> None:
        """Compare the intervals that ended while their tickets still wait: they were wrong."""
        while self._due and self._due[0][0] < now:
            look = heapq.heappop(self._due)[2]
            if look.over_at is None:
                self._compare(look, now)

    def _compare(self, look: WaitObservation, at: float) -> None:
        """Compare a shown estimate with the ticket's start, at ``at`` or later."""
        if look.told is not None and not look.compared:
            look.compared = True
            self._calibration.compare(look.classes, look.told.low <= at <= look.told.high)


class DevicesAhead:
    """Counts, while walking along the queue, the devices that go before each ticket."""

    def __init__(self) -> None:
        self._asked: dict[frozenset[str], DeviceCount] = {}

    def of(self, ticket: WaitingTicket) -> DeviceCount:
        """Return the devices requested before it on kinds that fit it, and add its own."""
        kinds = ticket.kinds
        ahead = sum(count for other, count in self._asked.items() if not kinds.isdisjoint(other))
        self._asked[kinds] = self._asked.get(kinds, 0) + ticket.devices
        return ahead


@lru_cache(maxsize=4096)
def _pools(kinds: frozenset[str]) -> frozenset[str]:
    """Return the kinds for which grants are counted: one for all shared devices of a model."""
    return frozenset(map(pool_of, kinds))


def _like(
    ticket: WaitingTicket, waited: float, pace: float
) -> tuple[tuple[Key, ...], tuple[Class, ...]]:
    """Return how to find similar past tickets, nearest likeness first, and the ticket's classes."""
    age = bisect_left(_AGES, waited + 1e-9)
    width = min(4, int(ticket.devices).bit_length())
    band = int(math.log2(pace))
    keys = ((age, width, band), (age, band), (band,), ())
    return keys, (("age", age), ("width", width, age), ("group", ticket.group))
