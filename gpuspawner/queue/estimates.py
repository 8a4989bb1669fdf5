"""When a ticket will probably start, learned from the tickets before it.

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
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from .models import Estimate, Running, Waiting
from .rounds import GrantRate

_LEAST_GAIN = 0.001
"""How much one comparison changes a class that has seen many."""

_FIRST_GAIN = 1.0
_FIRST_COUNT = 100
"""A new class learns faster: the gain of its n-th comparison is the first over n and these."""

_LOWEST, _HIGHEST = -3.0, 2.0
"""Bounds of what one class adds, as a logarithm."""

_MOST = 1.65
"""The greatest factor: where an overload is unlike all that was seen before, an interval of weeks
would be right and useless."""

Class = tuple[str | int, ...]


class Calibration:
    """A factor for each class of tickets, moved a little with every comparison.

    A miss moves it up and a hit down, in the proportion that leaves it at rest when as many
    hold as should. So the promise is kept in the long run whatever changes. A ticket is in
    several classes, and their factors are multiplied.
    """

    def __init__(self, inside: float) -> None:
        self._inside = inside
        self._logs: dict[Class, float] = {}
        self._counts: dict[Class, int] = {}

    def stretch(self, classes: tuple[Class, ...]) -> float:
        """The factor for a ticket of these classes."""
        return min(_MOST, math.exp(sum(self._logs.get(of, 0.0) for of in classes)))

    def compare(self, classes: tuple[Class, ...], held: bool) -> None:
        """An interval that was shown to a ticket of these classes held its start, or did not."""
        for of in classes:
            count = self._counts[of] = self._counts.get(of, 0) + 1
            gain = max(_LEAST_GAIN, _FIRST_GAIN / (_FIRST_COUNT + count))
            log = self._logs.get(of, 0.0) + gain * (self._inside - held)
            self._logs[of] = min(_HIGHEST, max(_LOWEST, log))


_REMEMBERED = 300
"""Looks of a likeness that are kept."""

_APART = 60.0
"""Seconds between two that are kept: tickets that are asked for together share their fate, and
must not make all others forgotten."""

_FRESH = 60.0
"""Seconds for which a curve serves."""


class WaitObservation:
    """A ticket at one moment of its wait, what it was told, and what came of it."""

    __slots__ = ("at", "classes", "compared", "over_at", "pace", "started", "told")

    def __init__(
        self, at: float, pace: float, classes: tuple[Class, ...], told: Estimate | None
    ) -> None:
        self.at = at
        self.pace = pace
        """Seconds that it was to wait by the work ahead of it."""
        self.classes = classes
        self.told = told
        self.compared = told is None
        """Whether what it was told was compared with what came."""
        self.over_at: float | None = None
        """When it started or was withdrawn; None while it waits."""
        self.started = False

    def over(self, at: float, started: bool) -> None:
        """The ticket waits no longer."""
        self.over_at = at
        self.started = started

    def multiple(self, now: float) -> float:
        """How many times its pace the ticket has waited since."""
        until = now if self.over_at is None else self.over_at
        return max(0.0, until - self.at) / self.pace


class WaitCurve(NamedTuple):
    """Which part of the tickets has started within which multiple of their pace."""

    multiples: list[float]
    parts: list[float]

    def at(self, part: float) -> float:
        """The multiple within which this part has started; 0 for no part at all."""
        if part <= 0.0:
            return 0.0
        return self.multiples[min(len(self.parts) - 1, bisect_left(self.parts, part - 1e-9))]


class WaitObservations:
    """The latest looks at tickets that are alike."""

    def __init__(self) -> None:
        self._looks: deque[WaitObservation] = deque(maxlen=_REMEMBERED)
        self._curve = WaitCurve([], [])
        self._made_at = -math.inf

    def add(self, look: WaitObservation) -> None:
        """Keep one more, unless it comes too soon after the last."""
        if not self._looks or not 0 <= look.at - self._looks[-1].at < _APART:
            self._looks.append(look)

    def curve(self, now: float) -> WaitCurve:
        """Their waits as of a minute ago at most."""
        if not 0 <= now - self._made_at < _FRESH:
            self._curve = _curve(self._looks, now)
            self._made_at = now
        return self._curve


def _curve(looks: deque[WaitObservation], now: float) -> WaitCurve:
    """The product-limit estimate: who still waits, or gave up, counts for as long as that."""
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
        self.looks: list[WaitObservation] = []
        self.next_look = ticket.asked_at


class Estimator:
    """Estimates for tickets that wait. Incremental: it is told what :class:`Scheduler` is told.

    Pure, and quick: an estimate looks a curve up, which serves all tickets alike for a minute.
    """

    def __init__(self) -> None:
        self._tickets: dict[str, _Ticket] = {}
        self._flow = GrantRate()
        self._looks: dict[Key, WaitObservations] = {}
        self._calibration = Calibration(_AIM)
        self._due: list[tuple[float, int, WaitObservation]] = []
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
            self._keep(known, WaitObservation(now, pace, classes, estimate), keys)
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

    def _curve(self, keys: tuple[Key, ...], now: float) -> WaitCurve | None:
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
            looks = self._looks.get(key)
            if looks is None:
                looks = self._looks[key] = WaitObservations()
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

    def _compare(self, look: WaitObservation, at: float) -> None:
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
