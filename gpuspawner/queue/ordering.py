"""The order of waiting tickets: usage, points and batches.

A score is a sum of points. Only the points for waiting change by themselves, and equally for all.
So the order of two tickets is stable and looked up instead of sorted, with one exception: for
requests that lack points, waiting counts only until it has made up for them. They are then *level*
and ordered by age. Hence five sections, each ordered by a key independent of the time:

  0. tickets that an admin gave a position
  1. tickets with points above zero before any waiting: small requests, little past use
  2. level tickets, oldest first
  3. tickets whose score still rises
  4. tickets that were put last
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from types import MappingProxyType
from typing import NamedTuple

from ..core.units import DeviceCount
from .kinds import CPU_ONLY, most_equivalents, shared_pools
from .limits import LimitedRequests, Limiter
from .models import HOUR, Priority, QueuePolicy, ScorePart, WaitingTicket
from .session_lengths import ExpectedLength, SessionLengths, SimilarSessions

_CPU_ONLY = frozenset({CPU_ONLY})

_FARTHEST = 256.0
"""How many half-lives from the reference time until that is moved."""


class FairShareUse:
    """Decayed use of members or of groups, exact at every moment.

    A device held since ``s`` has a use of ``c * (1 - 2**-((t - s) / half_life))`` at ``t``, with
    ``c = half_life / ln 2``: the most that one device can reach. A party is therefore two numbers,
    the devices it holds and one coefficient, and nothing is updated as time passes.
    """

    def __init__(self, half_life: float) -> None:
        self.half_life = half_life
        self.full = half_life / math.log(2)
        """The GPU-seconds that a device held forever converges to."""
        self._reference = 0.0
        """The time for which the coefficients below are stated."""
        self._held: dict[str, DeviceCount] = {}
        self._past: dict[str, float] = {}

    def of(self, party: str, now: float) -> float:
        """Return the recent use in GPU-seconds, as of ``now``; never negative."""
        past = self._past.get(party)
        if past is None:
            return 0.0
        age = (self._reference - now) / self.half_life
        used = self.full * self._held[party] + past * math.pow(2.0, min(_FARTHEST, age))
        return max(0.0, used)

    def change(self, party: str, devices: DeviceCount, at: float) -> None:
        """Record that ``party`` holds this many devices more (or fewer) from ``at``."""
        age = (at - self._reference) / self.half_life
        if not -_FARTHEST < age < _FARTHEST:
            self._move_reference(at)
            age = 0.0
        self._held[party] = self._held.get(party, 0) + devices
        change = self.full * devices * math.pow(2.0, age)
        self._past[party] = self._past.get(party, 0.0) - change

    def _move_reference(self, to: float) -> None:
        """Move the reference time long before floats overflow; what they cannot reach has faded."""
        age = (self._reference - to) / self.half_life
        factor = math.pow(2.0, max(-2 * _FARTHEST, min(2 * _FARTHEST, age)))
        for party in self._past:
            self._past[party] *= factor
        self._reference = to


FIRST = 1e9
"""Points of a ticket with a position set by an admin: above every score."""

BY_AGE = 1e6
"""Points of an overdue ticket."""


class ScoredRequest(NamedTuple):
    """The points of a request, and the figures behind them."""

    size: float = 0.0
    gpu_hours: float = 0.0
    member: float = 0.0
    member_used: float = 0.0
    group: float = 0.0
    group_used: float = 0.0


class Points:
    """Calculates points from policy, weights and past use."""

    def __init__(self, policy: QueuePolicy, group_weights: Mapping[str, float]) -> None:
        self._policy = policy
        self._group_weights = dict(group_weights)
        self._members = FairShareUse(policy.half_life_seconds)
        self._groups = FairShareUse(policy.half_life_seconds)
        self._whole = self._members.full
        """The most GPU-seconds that all devices can reach: past use is a fraction of it."""

    def set_capacity(self, devices: DeviceCount) -> None:
        """Set the number of usable devices."""
        self._whole = max(1, devices) * self._members.full

    def start(self, member: str, group: str, devices: DeviceCount, at: float) -> None:
        """Record that a member uses this many more devices, for a group."""
        if member:
            self._members.change(member, devices, at)
        if group:
            self._groups.change(group, devices, at)

    def end(self, member: str, group: str, devices: DeviceCount, at: float) -> None:
        """Record that this many devices were returned."""
        self.start(member, group, -devices, at)

    def reckon(
        self, member: str, group: str, devices: DeviceCount, cost: float, now: float
    ) -> ScoredRequest:
        """Return the points of a request for devices that is expected to cost ``cost`` seconds."""
        policy = self._policy
        gpu_hours = devices * cost / HOUR
        size = math.log2(policy.level_gpu_hours / gpu_hours) if devices else 0.0
        member_used = member_points = group_used = group_points = 0.0
        if member:
            member_used = self._members.of(member, now)
            member_points = -policy.member_share_points * (member_used / self._whole)
        if group:
            group_used = self._groups.of(group, now)
            share = group_used / (self._whole * self._group_weights.get(group, 1.0))
            group_points = -policy.group_share_points * share
        return ScoredRequest(size, gpu_hours, member_points, member_used, group_points, group_used)

    def sum(self, reckoning: ScoredRequest, ticket: WaitingTicket) -> float:
        """Return all points except those for waiting."""
        own = reckoning.size + reckoning.member + reckoning.group
        return own + self._policy.priority_points.get(ticket.priority, 0.0) + ticket.boost

    def parts(self, reckoning: ScoredRequest, ticket: WaitingTicket) -> list[ScorePart]:
        """Return the same points as separate items."""
        level = self._policy.level_gpu_hours
        size = f"about {reckoning.gpu_hours:.1f} GPU-hours expected, {level:g} give 0 points"
        parts = [ScorePart("size", reckoning.size, size)]
        if ticket.member:
            used = _used(reckoning.member_used, 1.0)
            parts.append(ScorePart("share of the member", reckoning.member, used))
        if ticket.group:
            used = _used(reckoning.group_used, self._group_weights.get(ticket.group, 1.0))
            parts.append(ScorePart("share of the group", reckoning.group, used))
        if ticket.priority != Priority.NORMAL:
            of_class = self._policy.priority_points.get(ticket.priority, 0.0)
            name = Priority(ticket.priority).name.lower()
            parts.append(ScorePart("priority", of_class, f"class {name}"))
        if ticket.boost:
            parts.append(ScorePart("boost", ticket.boost, "given by an admin"))
        return parts


def _used(seconds: float, weight: float) -> str:
    return f"used {seconds / HOUR:.1f} GPU-hours of late, weight {weight:g}"


Key = tuple[int, float, float, str]
"""Section, order within it, request time, id."""

Entry = tuple[int, float, float, str, "TicketBatch"]
"""The key of the first ticket of a batch, and the batch."""

Terms = tuple[object, ...]
"""What the tickets of one batch have in common."""

POSITION, ABOVE, LEVEL, RISING, LAST = range(5)

Rooms = tuple[float, ...]
"""How many seconds a ticket that starts now may last, -1 if it cannot start.

Four figures, indexed by the sum of :data:`SMALL` and :data:`GUESS`.
"""

SMALL, GUESS = 1, 2
"""It may use what is reserved for small requests; its length is only a guess."""


@dataclass(slots=True, eq=False)
class Shape:
    """Requests for the same number of devices of the same kinds. A round notes on it what fits."""

    devices: DeviceCount
    taken: Mapping[str, DeviceCount]
    """How much a ticket takes if it gets all its devices of one kind, for each that fits."""
    pools: Sequence[Sequence[str]]
    """Groups of shared devices (their kinds); a ticket for several devices takes all from one."""
    equivalents: DeviceCount
    """How many GPUs the devices are at most; a MIG instance counts as its part."""
    gathers: bool = False
    """True if its tickets may need several slots of a shared device."""
    smallest: bool = False
    """True if its tickets get the kind with the least memory."""
    entries: list[Entry] = field(default_factory=list)
    """Its part of the queue."""
    head: Entry | None = None
    """Its next ticket during a walk along the queue."""
    passed: bool = False
    """True if some of its tickets were skipped because they last too long."""
    seen: int = -1
    considered: int = -1
    rooms: Rooms = (-1.0, -1.0, -1.0, -1.0)
    """How long its tickets may last, if they start now."""


@dataclass(slots=True, eq=False, kw_only=True)
class TicketBatch(LimitedRequests):
    """Requests of one member that are alike and were made one after another."""

    ticket: WaitingTicket
    """The first of its tickets; the others differ only in id and time."""
    terms: Terms
    shape: Shape
    alike: SimilarSessions
    per_point: float
    """Seconds of waiting that are worth one point."""
    number: int
    """Its position in the sequence of similar requests."""
    asked_until: float
    tickets: list[tuple[float, str]] = field(default_factory=list)
    """When each was requested, and its id, in order."""
    count: int = 0
    """How many tickets were ever in it."""
    reckoning: ScoredRequest = field(default_factory=ScoredRequest)
    points: float = 0.0
    """All but the waiting."""
    which: int = 0
    """Which of the :data:`Rooms` of its shape applies."""
    looked_at: float = -math.inf
    """When seconds and points were last calculated."""
    ends_seen: int = -1
    entry: Entry | None = None
    """Its place in the queue; None while it is out of it."""

    def key(self, asked_at: float, ticket_id: str, now: float) -> Key:
        """Return the key of one of its tickets at ``now``."""
        if self.ticket.position is not None:
            return (POSITION, self.ticket.position, asked_at, ticket_id)
        due = asked_at / self.per_point - self.points
        if self.ticket.last:
            return (LAST, due, asked_at, ticket_id)
        if self.points >= 0.0:
            return (ABOVE, due, asked_at, ticket_id)
        if due <= now / self.per_point:
            return (LEVEL, asked_at, asked_at, ticket_id)
        return (RISING, due, asked_at, ticket_id)

    def reckoned(self, length: ExpectedLength, reckoning: ScoredRequest, points: float) -> None:
        """Store the results of a calculation."""
        self.reckoning, self.points = reckoning, points
        asked = self.ticket.seconds
        self.seconds = length.seconds if asked is None else asked
        self.which = (SMALL if reckoning.size >= 0.0 else 0) + (GUESS if asked is None else 0)

    def behind(self, ticket_id: str, now: float) -> Entry | None:
        """Return the entry of the ticket behind this one in the batch, if there is one."""
        place = 1
        while self.tickets[place - 1][1] != ticket_id:
            place += 1
        if place == len(self.tickets):
            return None
        return (*self.key(*self.tickets[place], now), self)

    def waiting_points(self, asked_at: float, now: float) -> float:
        """Return the points for waiting: at most what is lacking, if something is."""
        waited = max(0.0, now - asked_at) / self.per_point
        if self.points < 0.0 and not self.ticket.last:
            return min(waited, -self.points)
        return waited


class OrderedBatches:
    """Batches in the order of their first tickets."""

    def __init__(self, per_point: float) -> None:
        self._per_point = per_point
        self.entries: list[Entry] = []
        self._several: dict[TicketBatch, None] = {}
        """Batches with more than one waiting ticket."""

    def put(self, batch: TicketBatch, now: float) -> Entry | None:
        """Insert a batch at its present position, or remove it if nothing waits in it."""
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

    def remove(self, batch: TicketBatch) -> None:
        """Remove a batch from the queue."""
        if batch.entry is not None:
            for entries in (self.entries, batch.shape.entries):
                del entries[bisect_left(entries, batch.entry)]
            batch.entry = None

    def settle(self, now: float) -> None:
        """Order tickets by age whose waiting has made up for the points they lacked."""
        first = bisect_left(self.entries, (RISING,))
        while first < len(self.entries) and self.entries[first][0] == RISING:
            if self.entries[first][1] > now / self._per_point:
                break
            self.put(self.entries[first][4], now)
            first += 1

    def in_order(self, now: float) -> Iterator[Key]:
        """Yield the keys of all tickets, first next; nothing may change meanwhile."""
        following: list[tuple[Key, int, TicketBatch]] = []
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
        """Return how many tickets are before ``key``."""
        count = bisect_left(self.entries, key)
        for batch in self._several:
            if batch.entry is not None and batch.entry[:4] < key:
                keys = [batch.key(asked_at, name, now) for asked_at, name in batch.tickets[1:]]
                count += bisect_left(keys, key)
        return count


def _follow(
    following: list[tuple[Key, int, TicketBatch]], batch: TicketBatch, place: int, now: float
) -> None:
    """Add the ticket behind the one at ``place`` of a batch."""
    if place + 1 < len(batch.tickets):
        key = batch.key(*batch.tickets[place + 1], now)
        heappush(following, (key, place + 1, batch))


LOOK_AGAIN = 1200.0
"""Minimum seconds until points are recalculated, if similar sessions have ended since.

Otherwise three times as long: past use decays, and running sessions grow older.
"""

LOOK_PART = 0.1
"""Also at least this share of the time a batch has waited: a long wait changes little."""

FRESH = 60.0
"""Seconds for which points are valid for a ticket whose turn it would be."""

_LOOKS = 50
"""How many old batches are recalculated in one round, at most."""


class Book:
    """All tickets, found by id, by age and in the order of their points."""

    def __init__(
        self, policy: QueuePolicy, lengths: SessionLengths, points: Points, limiter: Limiter
    ) -> None:
        self._policy = policy
        self._lengths = lengths
        self._points = points
        self._limiter = limiter
        self.tickets: dict[str, WaitingTicket] = {}
        self.waiting: Mapping[str, WaitingTicket] = MappingProxyType(self.tickets)
        self.line = OrderedBatches(policy.waiting_point_seconds)
        self.limited: dict[TicketBatch, None] = {}
        """Batches that a limit, or the host's memory and CPU, may keep waiting."""
        self.by_age: dict[frozenset[str], list[tuple[float, str]]] = {}
        """Tickets by the kinds that fit, oldest first."""
        self._batches: dict[str, TicketBatch] = {}
        self._open: dict[Terms, TicketBatch] = {}
        self.shapes: dict[tuple[DeviceCount, frozenset[str], int, bool], Shape] = {}
        """Every shape that was ever requested."""
        self._numbers = itertools.count()
        self._looks: list[tuple[float, int, TicketBatch]] = []
        """When each batch is recalculated; a heap."""
        self._stale: list[TicketBatch] = []

    @property
    def has_cpu_only(self) -> bool:
        """True if a ticket waits that needs no device."""
        return _CPU_ONLY in self.by_age

    def batch(self, ticket_id: str) -> TicketBatch:
        """Return the batch of a waiting ticket."""
        return self._batches[ticket_id]

    def add(self, ticket: WaitingTicket, now: float) -> None:
        """Add a ticket."""
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
        if batch.parties or batch.host:
            self.limited[batch] = None

    def remove(self, ticket_id: str, now: float) -> TicketBatch:
        """Remove a waiting ticket and return its batch."""
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

    def forget(self, ticket_id: str, now: float) -> None:
        """Remove a waiting ticket as if it had never been requested."""
        batch = self.remove(ticket_id, now)
        batch.count -= 1
        batch.alike.asked -= 1
        if batch.tickets:
            batch.asked_until = batch.tickets[-1][0]
        elif not batch.count and self._open.get(batch.terms) is batch:
            del self._open[batch.terms]

    def look(self, batch: TicketBatch, now: float) -> None:
        """Recalculate length and points of a batch, and move it to its position."""
        alike = batch.alike
        batch.looked_at = now
        batch.ends_seen = alike.ends
        length = self._lengths.estimate(alike, batch.number, now, batch.ticket.seconds)
        devices = batch.equivalents
        reckoning = self._points.reckon(alike.member, alike.group, devices, length.cost, now)
        batch.reckoned(length, reckoning, self._points.sum(reckoning, batch.ticket))
        self.line.put(batch, now)

    def ended_one_of(self, batch: TicketBatch) -> None:
        """Record that a session requested with a batch ended: that is the best evidence."""
        if batch.tickets:
            self._stale.append(batch)

    def bring_up_to_date(self, now: float) -> None:
        """Update what may have changed before a round: points, and who has waited enough."""
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
        """Update all batches, before the whole queue is shown."""
        for entry in list(self.line.entries):
            if not 0 <= now - entry[4].looked_at < FRESH:
                self.look(entry[4], now)
        self.line.settle(now)

    def _batch_for(self, ticket: WaitingTicket) -> TicketBatch:
        terms = (
            ticket.member,
            ticket.group,
            ticket.devices,
            ticket.kinds,
            ticket.share_bytes,
            ticket.smallest,
            ticket.seconds,
            ticket.priority,
            ticket.boost,
            ticket.position,
            ticket.last,
            ticket.host,
        )
        batch = self._open.get(terms)
        if (
            batch is not None
            and batch.count < self._policy.batch_tickets
            and abs(ticket.asked_at - batch.asked_until) <= self._policy.batch_seconds
        ):
            return batch
        alike_in = (ticket.devices, ticket.kinds, ticket.share_bytes, ticket.smallest)
        shape = self.shapes.get(alike_in)
        if shape is None:
            pools = shared_pools(ticket.kinds) if ticket.devices > 1 else {}
            alone = ticket.kinds.difference(*pools.values())
            shape = Shape(
                devices=ticket.devices,
                taken={kind: ticket.taken_of(kind) for kind in sorted(alone)},
                pools=tuple(pools.values()),
                equivalents=most_equivalents(ticket.devices, ticket.kinds),
                gathers=ticket.gathers_slots,
                smallest=ticket.smallest,
            )
            self.shapes[alike_in] = shape
        alike = self._lengths.alike(ticket.member, ticket.group, ticket.devices)
        batch = TicketBatch(
            parties=self._limiter.of(ticket.member, ticket.group) if ticket.devices else (),
            devices=ticket.devices,
            host=ticket.host or None,
            equivalents=shape.equivalents,
            ticket=ticket,
            terms=terms,
            shape=shape,
            alike=alike,
            per_point=self._policy.waiting_point_seconds,
            number=alike.asked,
            asked_until=ticket.asked_at,
        )
        self._open[terms] = batch
        heappush(self._looks, (ticket.asked_at + LOOK_AGAIN, next(self._numbers), batch))
        return batch

    def _is_fresh(self, batch: TicketBatch, now: float) -> bool:
        return batch.ends_seen == batch.alike.ends and 0 <= now - batch.looked_at < FRESH
