"""When a ticket will probably start, learned from those that waited before it.

What counts most is the work ahead: devices that go first, and how many a second have been given
out of late on the same kinds. Their quotient is the *pace* of a ticket. Tickets of the past that
were about as wide, had waited about as long and had about the same pace tell which multiples of it
the wait came to; those that still wait tell that theirs is more. The narrowest interval that holds
eight of ten is shown, stretched by as much as it has proved too narrow (or too wide) of late.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from .calibration import Calibration, Class
from .curves import Curve, Look, Looks
from .pace import Flow
from .values import Estimate, Running, Waiting

_AIM = 0.81
"""The part of the tickets that is to start within the interval shown to them: a little more than
the promised 0.8, so that errors of the calibration do not fall short of it."""

_SPEAKS_FROM = 20
"""Looks of the like that must have been compared with a start before anything is said."""

_AGES = (300.0, 3600.0, 6 * 3600.0, 86400.0)
"""Seconds of waiting at which a ticket begins to be compared with others."""

_FIRST_AGE = 60.0
"""A ticket is looked at when it is asked for, at this age, and whenever that has doubled."""

_LEFT_OUT = (0.0, 0.02, 0.05)
"""Parts of the tickets that may start before the interval does."""

_DUE = 1000
"""Estimates that are kept to be compared before those that have been are sorted out."""

Key = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """A ticket of the past that got its devices: what estimates are learned from."""

    asked_at: float
    started_at: float
    devices: int
    kinds: frozenset[str]
    """Kinds that fitted."""
    group: str = ""


class _Ticket:
    __slots__ = ("looks", "next_look", "ticket")

    def __init__(self, ticket: Waiting) -> None:
        self.ticket = ticket
        self.looks: list[Look] = []
        self.next_look = ticket.asked_at


class Estimator:
    """Estimates for tickets that wait. Incremental: it is told what :class:`Scheduler` is told.

    Pure, and quick: an estimate looks a curve up, which serves all tickets alike for a minute.
    """

    def __init__(self) -> None:
        self._tickets: dict[str, _Ticket] = {}
        self._flow = Flow()
        self._looks: dict[Key, Looks] = {}
        self._calibration = Calibration(_AIM)
        self._due: list[tuple[float, int, Look]] = []
        """What was told, by when it is proved wrong."""
        self._most_due = _DUE
        self._number = itertools.count()

    # What happens.

    def asked(self, ticket: Waiting) -> None:
        """A ticket waits; one of the same id that was changed goes on waiting."""
        known = self._tickets.get(ticket.id)
        if known is None:
            self._tickets[ticket.id] = _Ticket(ticket)
        else:
            known.ticket = ticket

    def started(self, lease: Running) -> None:
        """A lease began; its ticket, if it had one, tells how long it has waited."""
        at = lease.started_at
        self._flow.give(lease.held, at)
        known = self._tickets.pop(lease.ticket_id or lease.id, None)
        for look in known.looks if known else ():
            look.over(at, started=True)
            self._compare(look, at)

    def withdrawn(self, ticket_id: str, at: float) -> None:
        """A ticket waits no longer and got nothing; an unknown one is no error."""
        known = self._tickets.pop(ticket_id, None)
        for look in known.looks if known else ():
            look.over(at, started=False)

    def learn(self, history: Iterable[Waited]) -> None:
        """Tickets that started before this estimator began, in any order.

        Nobody wrote down what was ahead of them; it is taken to be what had been asked for
        earlier and went first in the end.
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
                ticket = Waiting(
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
            self.started(Running(id=f"past {at}", member="", held=held, started_at=now))

    # What follows.

    def estimate(
        self, ticket_id: str, now: float, ahead: int, latest: float | None = None
    ) -> Estimate | None:
        """When a ticket starts; None while too few like it have started to say, or for an
        unknown one. Never in the past.

        ``ahead`` are the devices that tickets before it ask for on the kinds that fit it (see
        :class:`Ahead`), ``latest`` is a time by which it starts for certain. The first estimate
        of a ticket, and some later ones, are kept to learn from what comes of them.
        """
        known = self._tickets.get(ticket_id)
        if known is None:
            return None
        ticket = known.ticket
        self._settle(now)
        pace = self._flow.seconds_for(ahead + ticket.devices, ticket.kinds, now)
        keys, classes = _like(ticket, max(0.0, now - ticket.asked_at), pace)
        estimate = None
        curve = self._curve(keys, now)
        if curve is not None:
            estimate = self._interval(curve, classes, pace, now, latest)
        if now >= known.next_look:
            age = max(_FIRST_AGE, 2 * (now - ticket.asked_at))
            known.next_look = ticket.asked_at + age
            self._keep(known, Look(now, pace, classes, estimate), keys)
        return estimate

    def guess(
        self, newcomer: Waiting, now: float, ahead: int, latest: float | None = None
    ) -> Estimate | None:
        """What :meth:`estimate` would say of a ticket that was asked for now; nothing is kept."""
        pace = self._flow.seconds_for(ahead + newcomer.devices, newcomer.kinds, now)
        keys, classes = _like(newcomer, 0.0, pace)
        curve = self._curve(keys, now)
        return None if curve is None else self._interval(curve, classes, pace, now, latest)

    # Steps of the above.

    def _curve(self, keys: tuple[Key, ...], now: float) -> Curve | None:
        """Of the nearest likeness of which enough is known."""
        for key in keys:
            looks = self._looks.get(key)
            if looks is not None:
                curve = looks.curve(now)
                if len(curve.multiples) >= _SPEAKS_FROM:
                    return curve
        return None

    def _interval(
        self,
        curve: Curve,
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

    def _keep(self, known: _Ticket, look: Look, keys: tuple[Key, ...]) -> None:
        known.looks.append(look)
        for key in keys:
            looks = self._looks.get(key)
            if looks is None:
                looks = self._looks[key] = Looks()
            looks.add(look)
        if look.told is not None:
            if len(self._due) >= self._most_due:
                self._due = [due for due in self._due if not due[2].compared]
                heapq.heapify(self._due)
                self._most_due = max(_DUE, 2 * len(self._due))
            heapq.heappush(self._due, (look.told.high, next(self._number), look))

    def _settle(self, now: float) -> None:
        """Intervals that are over while their tickets wait were wrong: that is known at once."""
        while self._due and self._due[0][0] < now:
            look = heapq.heappop(self._due)[2]
            if look.over_at is None:
                self._compare(look, now)

    def _compare(self, look: Look, at: float) -> None:
        """What a ticket was told with its start, which was at ``at`` or will be later."""
        if look.told is not None and not look.compared:
            look.compared = True
            self._calibration.compare(look.classes, look.told.low <= at <= look.told.high)


class Ahead:
    """Counts, on a walk down the line, the devices that go before each ticket."""

    def __init__(self) -> None:
        self._asked: dict[frozenset[str], int] = {}

    def of(self, ticket: Waiting) -> int:
        """The devices asked for by those before it on kinds that fit it; then it counts too."""
        kinds = ticket.kinds
        ahead = sum(count for other, count in self._asked.items() if not kinds.isdisjoint(other))
        self._asked[kinds] = self._asked.get(kinds, 0) + ticket.devices
        return ahead


def _like(ticket: Waiting, waited: float, pace: float) -> tuple[tuple[Key, ...], tuple[Class, ...]]:
    """Which tickets of the past are like this one, the nearest first, and the classes whose
    intervals are stretched alike."""
    age = bisect_left(_AGES, waited + 1e-9)
    width = min(4, ticket.devices.bit_length())
    band = int(math.log2(pace))
    keys = ((age, width, band), (age, band), (band,), ())
    return keys, (("age", age), ("width", width, age), ("group", ticket.group))
