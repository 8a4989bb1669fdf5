"""One scheduling round: which tickets start now, and what is reserved for planned starts."""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple

from ..core.units import DeviceCount
from .host_admission import HostAdmission
from .kinds import Preference, kind_preference
from .limits import Limiter
from .models import QueuePolicy
from .ordering import FRESH, GUESS, LAST, POSITION, SMALL, Book, Entry, Rooms, Shape, TicketBatch


class Capacity:
    """Devices by kind."""

    def __init__(self, devices: Mapping[str, DeviceCount], small_share: float) -> None:
        self.devices = dict(devices)
        """All usable devices by kind."""
        self.order = {kind: place for place, kind in enumerate(devices)}
        """The place of each kind among these."""
        self._for_small = {kind: int(small_share * count) for kind, count in devices.items()}

    def for_small(self, kind: str, devices: DeviceCount) -> DeviceCount:
        """Return how many devices must be left when a request that is not small starts.

        Fewer than usual if the request needs nearly all there are.
        """
        kept = self._for_small.get(kind)
        if not kept:
            return 0
        others = self.devices[kind] - devices
        return kept if others >= kept else max(0, others)


_MEMORY = 12 * 3600.0
"""Seconds after which a start counts about a third."""

_LEAST = 60.0
"""Seconds that every start takes, whatever is ahead."""


class GrantRate:
    """The rate at which devices are granted, by kind; old grants fade."""

    def __init__(self) -> None:
        self._given: dict[str, float] = {}
        self._as_of = -math.inf
        self._past = 1.0
        """The share of the memory that lies before the first event."""

    def give(self, held: Mapping[str, DeviceCount], at: float) -> None:
        """Record that these devices, by kind, were granted."""
        fade = self._fade(at)
        for kind in self._given:
            self._given[kind] *= fade
        if self._given:
            self._past *= fade
        self._as_of = max(self._as_of, at)
        for kind, devices in held.items():
            self._given[kind] = self._given.get(kind, 0.0) + devices

    def seconds_for(self, devices: DeviceCount, kinds: Iterable[str], now: float) -> float:
        """Return how long it takes to grant this many devices of any of the kinds."""
        fade = self._fade(now)
        # One more device, so that nothing is divided by zero and a single start proves little.
        given = 1.0 + fade * sum(self._given.get(kind, 0.0) for kind in kinds)
        return _LEAST + devices * (_MEMORY * (1.0 - fade * self._past) + 1.0) / given

    def _fade(self, now: float) -> float:
        return math.exp(min(0.0, self._as_of - now) / _MEMORY) if self._given else 1.0


_Release = tuple[float, str, DeviceCount]
"""When, which lease, how many devices of one kind."""


class PlannedStart(NamedTuple):
    """When enough devices of a kind are free together."""

    at: float
    spare: DeviceCount
    """How many more are free then."""


class ReleaseTimes:
    """The ends of leases, by kind and in order."""

    def __init__(self) -> None:
        self._by_kind: dict[str, list[_Release]] = {}
        self._ends: dict[str, tuple[float, Mapping[str, DeviceCount]]] = {}
        self._guesses: list[tuple[float, str]] = []

    def put(self, lease_id: str, held: Mapping[str, DeviceCount], at: float, guess: bool) -> None:
        """Record that a lease holds these devices until ``at``, replacing what was known before."""
        self.remove(lease_id)
        self._ends[lease_id] = (at, held)
        for kind, devices in held.items():
            insort(self._by_kind.setdefault(kind, []), (at, lease_id, devices))
        if guess:
            heapq.heappush(self._guesses, (at, lease_id))

    def remove(self, lease_id: str) -> None:
        """Record that the lease has ended; an unknown lease is no error."""
        at, held = self._ends.pop(lease_id, (0.0, {}))
        for kind, devices in held.items():
            releases = self._by_kind[kind]
            del releases[bisect_left(releases, (at, lease_id, devices))]

    @property
    def next_guess(self) -> float:
        """The earliest estimated end; infinity if there is none."""
        return self._guesses[0][0] if self._guesses else math.inf

    def guessed_wrong(self, now: float) -> Iterator[str]:
        """Yield leases whose estimated end has passed: they need a new estimate."""
        while self._guesses and self._guesses[0][0] <= now:
            at, lease_id = heapq.heappop(self._guesses)
            if self._ends.get(lease_id, (None,))[0] == at:
                yield lease_id

    def ahead(self, kind: str, now: float) -> Sequence[_Release]:
        """Return the releases of a kind after ``now``, in order.

        A session that should be over is given as much time again as it is already late: what does
        not end must not look as if it would at any moment.
        """
        ends = self._by_kind.get(kind, ())
        if not ends or ends[0][0] > now:
            return ends
        late = bisect_right(ends, now, key=itemgetter(0))
        again = [(2 * now - at, lease_id, count) for at, lease_id, count in ends[:late]]
        return sorted([*again, *ends[late:]])

    def together(
        self,
        kind: str,
        devices: DeviceCount,
        free: DeviceCount,
        now: float,
        starts: Sequence[_Release],
    ) -> PlannedStart | None:
        """Return when ``devices`` are free at once, with ``free`` now and no other grants.

        ``starts`` are releases of what starts now. Returns None if there will never be enough.
        """
        ahead = self.ahead(kind, now)
        reached: float | None = None
        for at, _, count in heapq.merge(ahead, sorted(starts)) if starts else ahead:
            if reached is not None and at > reached:
                break
            free += count
            if reached is None and free >= devices:
                reached = at
        return None if reached is None else PlannedStart(reached, free - devices)


class ReleasePlan:
    """The free devices of one kind from now on, as steps in time."""

    def __init__(
        self, now: float, free: DeviceCount, ends: Iterable[tuple[float, DeviceCount]]
    ) -> None:
        """Create a plan; ``ends`` are the times at which devices return, and how many."""
        self._times = [now]
        self._free = [free]
        for at, devices in sorted(ends):
            if at > self._times[-1]:
                self._times.append(at)
                self._free.append(self._free[-1])
            self._free[-1] += devices

    def earliest(self, devices: DeviceCount, seconds: float) -> float:
        """Return the first time from which enough are free for long enough; infinity if never."""
        start: float | None = None
        for at, (time, free) in enumerate(zip(self._times, self._free, strict=True)):
            if free < devices:
                start = None
                continue
            if start is None:
                start = time
            last = at + 1 == len(self._times)
            if last or self._times[at + 1] >= start + seconds:
                return start
        return math.inf

    def lasts(self, devices: DeviceCount, start: float, seconds: float) -> bool:
        """Return True if enough are free from ``start`` for so long."""
        first = max(0, bisect_right(self._times, start) - 1)
        last = bisect_left(self._times, start + seconds)
        return min(self._free[first:last], default=self._free[first]) >= devices

    @property
    def times(self) -> Sequence[float]:
        """When the number of free devices changes, in order; the first is now."""
        return self._times

    def take(self, devices: DeviceCount, start: float, seconds: float) -> None:
        """Reserve devices from ``start`` for ``seconds``."""
        end = start + seconds
        self._cut(start)
        if math.isfinite(end):
            self._cut(end)
        for at, time in enumerate(self._times):
            if start <= time < end:
                self._free[at] -= devices

    def _cut(self, at: float) -> None:
        place = bisect_right(self._times, at)
        if place and self._times[place - 1] == at:
            return
        insort(self._times, at)
        self._free.insert(place, self._free[place - 1] if place else self._free[0])


def earliest_start(
    shape: Shape, plans: Mapping[str, ReleasePlan], seconds: float
) -> tuple[float, dict[str, DeviceCount]]:
    """Return the first time at which requests of a shape get their devices, and these, by kind.

    Infinity and nothing if they never do.
    """
    found = [
        (plans[kind].earliest(devices, seconds), [(kind, devices)])
        for kind, devices in shape.taken.items()
        if kind in plans
    ]
    for pool in shape.pools:
        known = [kind for kind in pool if kind in plans]
        for at in sorted({time for kind in known for time in plans[kind].times}):
            some = [kind for kind in known if plans[kind].lasts(1, at, seconds)]
            if len(some) >= shape.devices:
                found.append((at, [(kind, 1) for kind in some[: int(shape.devices)]]))
                break
    at, held = min(found, default=(math.inf, []))
    return (at, dict(held)) if math.isfinite(at) else (math.inf, {})


_VERSIONS = itertools.count()

_NO_ROOM: Rooms = (-1.0, -1.0, -1.0, -1.0)


@dataclass(slots=True)
class _KeptDevices:
    """Devices of one kind that are gathered for the first ticket that waits for them."""

    at: float
    spare: DeviceCount
    no_guess: bool


class Round:
    """The free devices of a moment, granted one ticket after the other.

    The first ticket of each kind that does not fit gets a planned start: when enough devices have
    returned. Tickets behind it may use what is free meanwhile, if they end earlier or fit into what
    is left over then.
    """

    def __init__(
        self,
        now: float,
        free: Mapping[str, DeviceCount],
        capacity: Capacity,
        releases: ReleaseTimes,
        guess_again: Callable[[float], None],
        yielded: Mapping[str, DeviceCount] = MappingProxyType({}),
    ) -> None:
        """Start a round; ``guess_again`` moves estimated releases to after the given time.

        Of the ``free`` devices, those that still have to be ``yielded`` are taken last.
        """
        self.now = now
        self.left = {kind: count for kind, count in free.items() if count > 0}
        self.version = self.number = next(_VERSIONS)
        """The version increases with every grant or reservation; the number is the first one."""
        self.planned: dict[str, float] = {}
        self.takes: dict[str, Mapping[str, DeviceCount]] = {}
        """The devices that each start gets, by kind."""
        self._capacity = capacity
        self._releases = releases
        self._guess_again = guess_again
        self._yielded = yielded
        self._kept: dict[str, _KeptDevices] = {}
        self._starts: dict[str, list[_Release]] = {}

    def measure(self, shape: Shape) -> None:
        """Store on a shape how many seconds its tickets may last; see :attr:`Shape.rooms`."""
        rooms = _NO_ROOM
        for kind, devices in shape.taken.items():
            if self.left.get(kind, 0) >= devices:
                of_kind = self._rooms(kind, devices)
                rooms = of_kind if rooms is _NO_ROOM else tuple(map(max, rooms, of_kind))
        for pool in shape.pools:
            each = [self._rooms(kind, 1) for kind in pool if self.left.get(kind, 0) >= 1]
            if len(each) >= shape.devices:
                # A ticket for n devices may last as long as the n devices with the most time allow.
                best = (sorted(some)[-int(shape.devices)] for some in zip(*each, strict=True))
                rooms = tuple(map(max, rooms, best))
        shape.rooms = rooms
        shape.seen = self.version

    def room(self, batch: TicketBatch) -> float:
        """Return how many seconds the tickets of a batch may last; negative if none can start."""
        shape = batch.shape
        if shape.seen != self.version:
            self.measure(shape)
        return shape.rooms[batch.which]

    def start(self, ticket_id: str, shape: Shape, seconds: float, which: int) -> None:
        """Give a ticket its devices; ``which`` is the room that was found to be enough."""
        held = self.takes[ticket_id] = self.hold(shape, seconds, which)
        for kind, devices in held.items():
            self._starts.setdefault(kind, []).append((self.now + seconds, ticket_id, devices))

    def hold(self, shape: Shape, seconds: float, which: int) -> dict[str, DeviceCount]:
        """Take the devices of a ticket out of the round; return them by kind."""
        held = dict(shape.taken)
        if len(held) > 1 or shape.pools:
            held = self._best(shape, seconds, which)
        for kind, devices in held.items():
            kept = self._kept.get(kind)
            if kept is not None:
                in_doubt = kept.no_guess and which & GUESS
                if in_doubt or self.now + seconds > kept.at:
                    kept.spare -= devices
            self.left[kind] -= devices
            if not self.left[kind]:
                del self.left[kind]
        self.version = next(_VERSIONS)
        return held

    def _best(self, shape: Shape, seconds: float, which: int) -> dict[str, DeviceCount]:
        """Return what to take: not what others wait for, if the ticket fits elsewhere.

        Of the others the best by :func:`~gpuspawner.queue.kinds.kind_preference`.
        """
        order = self._capacity.order

        def is_elsewhere(kind: str, devices: DeviceCount) -> tuple[bool, bool, bool]:
            return (
                self._rooms(kind, devices)[which] >= seconds,
                kind not in self._kept,
                self.left[kind] - self._yielded.get(kind, 0) >= devices,
            )

        def preference(kind: str, left: DeviceCount, devices: DeviceCount) -> Preference:
            key = kind_preference(kind, left, devices, smallest=shape.smallest)
            return *key, order.get(kind, 0) if devices < 1 else 0

        found = [
            (is_elsewhere(kind, devices), preference(kind, left, devices), {kind: devices})
            for kind, devices in shape.taken.items()
            if (left := self.left.get(kind, 0)) >= devices
        ]
        for pool in shape.pools:
            ranks = {kind: is_elsewhere(kind, 1) for kind in pool if self.left.get(kind, 0) >= 1}
            count = int(shape.devices)
            if len(ranks) >= count:
                best = sorted(ranks, key=lambda kind: ranks[kind], reverse=True)[:count]
                key = preference(best[0], len(ranks), count)
                found.append((ranks[best[-1]], key, dict.fromkeys(best, 1)))
        rank = max(rank for rank, _, _ in found)
        return min((each for each in found if each[0] == rank), key=itemgetter(1))[2]

    def keep(self, ticket_id: str, shape: Shape, which: int, no_guess: bool) -> None:
        """Plan the start of a ticket that does not fit.

        Unless another ticket's start is planned on all kinds that it could use. ``no_guess``:
        nothing with an estimated length may use its devices meanwhile.
        """
        shape.considered = self.number
        kinds = [kind for kind in shape.taken if kind not in self._kept]
        pools = [[kind for kind in pool if kind not in self._kept] for pool in shape.pools]
        pools = [pool for pool in pools if len(pool) >= shape.devices]
        if not kinds and not pools:
            return
        if self._releases.next_guess <= self.now:
            self._guess_again(self.now)
        plans: list[tuple[float, list[tuple[str, DeviceCount]]]] = []
        for kind in kinds:
            devices = shape.taken[kind]
            left = self.left.get(kind, 0)
            if not which & SMALL:
                left -= self._capacity.for_small(kind, devices)
            planned = self._together(kind, devices, left)
            if planned is not None:
                plans.append((planned.at, [(kind, planned.spare)]))
        for pool in pools:
            each = ((self._together(kind, 1, self.left.get(kind, 0)), kind) for kind in pool)
            first = sorted((it.at, kind, it.spare) for it, kind in each if it is not None)
            if len(first) >= shape.devices:
                first = first[: int(shape.devices)]
                plans.append((first[-1][0], [(kind, spare) for _, kind, spare in first]))
        if plans:
            at, gathered = min(plans)
            for kind, spare in gathered:
                self._kept[kind] = _KeptDevices(at, spare, no_guess)
            self.planned[ticket_id] = at
            self.version = next(_VERSIONS)

    def _together(self, kind: str, devices: DeviceCount, left: DeviceCount) -> PlannedStart | None:
        if left >= devices:  # as some devices of a pool may be
            return PlannedStart(self.now, left - devices)
        starts = self._starts.get(kind, ())
        return self._releases.together(kind, devices, left, self.now, starts)

    def started(self, kind: str) -> list[_Release]:
        """Return what starts now of a kind, as releases."""
        return self._starts.get(kind, [])

    def _rooms(self, kind: str, devices: DeviceCount) -> Rooms:
        kept = self._kept.get(kind)
        if kept is None or kept.spare >= devices:
            room = room_of_guess = math.inf
        else:
            room = kept.at - self.now
            room_of_guess = -1.0 if kept.no_guess else room
        if self.left[kind] >= devices + self._capacity.for_small(kind, devices):
            return (room, room, room_of_guess, room_of_guess)
        return (-1.0, room, -1.0, room_of_guess)


class OverdueTickets:
    """Overdue tickets: served first as devices allow, within a share of them."""

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy
        self._in_use: dict[str, DeviceCount] = {}

    def start(self, held: Mapping[str, DeviceCount]) -> None:
        """Record that an overdue ticket uses devices (by kind)."""
        for kind, devices in held.items():
            self._in_use[kind] = self._in_use.get(kind, 0) + devices

    def end(self, held: Mapping[str, DeviceCount]) -> None:
        """Record that it no longer does."""
        for kind, devices in held.items():
            self._in_use[kind] = self._in_use.get(kind, 0) - devices

    def due(self, asked_at: float, now: float) -> bool:
        """Return True if the ticket has waited longer than ``overdue_seconds``."""
        return now - asked_at >= self._policy.overdue_seconds

    def first(
        self, book: Book, limiter: Limiter, capacity: Mapping[str, DeviceCount], now: float
    ) -> list[str]:
        """Return the overdue tickets that go first now, in order."""
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
    """One decision: tickets with a position, then overdue ones, then the rest of the queue.

    The queue is walked shape by shape, with a pointer to the first ticket of each that may get
    something, so that no ticket is visited whose devices are all in use. The free devices only
    decrease during a decision, so a skipped ticket need not be visited again. The exception is the
    first of a shape that finds no devices left at all, which gets a planned start.
    """

    def __init__(
        self, book: Book, limiter: Limiter, round_: Round, host: HostAdmission | None = None
    ) -> None:
        self._book = book
        self._limiter = limiter
        self._host = host
        self._round = round_
        self._now = round_.now
        self._shapes: list[Shape] = []
        self._heads: list[tuple[Entry, Shape | None]] = []
        """The next ticket of each shape and, without a shape, tickets that are out of order."""
        self._section = LAST
        """The last section to walk."""
        self.starts: list[str] = []

    def run(self, aged: Iterable[str]) -> None:
        """Fill :attr:`starts`, as far as devices allow."""
        first = POSITION
        if self._book.line.entries[0][0] == POSITION:
            self._line(POSITION, POSITION)
            first = POSITION + 1
        if self._host is not None:
            self._keep_for_host(self._host)
        for ticket_id in aged:
            batch = self._book.batch(ticket_id)
            if self._round.left and not self._limiter.refusal(batch, self._now):
                self._offer(ticket_id, batch, batch.which | SMALL, because_of_age=True)
        self._line(first, LAST)

    def _line(self, first: int, last: int) -> None:
        """Offer what is left to all from the section ``first`` to the section ``last``."""
        round_ = self._round
        self._section = last
        self._shapes = [shape for shape in self._book.shapes.values() if shape.entries]
        self._heads = []
        for each in self._shapes:
            each.passed = False
            entry = each.entries[0]
            if entry[0] < first:
                self._point(each, (first,))
            elif entry[0] <= last:
                each.head = entry  # checked when it is its turn
                self._heads.append((entry, each))
        heapify(self._heads)
        while round_.left and self._heads:
            entry, shape = heappop(self._heads)
            if shape is not None and shape.head is not entry:
                continue  # the pointer has moved on
            version = round_.version
            self._turn(entry)
            if shape is not None:
                self._point(shape, entry)
            if round_.version != version:
                self._less_is_left(entry, but=shape)

    def _turn(self, entry: Entry) -> None:
        batch = entry[4]
        room = self._round.room(batch)
        if room < 0.0:  # only the first of its shape that cannot start gets a planned start
            if batch.shape.considered == self._round.number:
                return
        elif room < batch.seconds:
            return
        # Old: similar sessions ended since the batch was last calculated.
        is_old = not 0 <= self._now - batch.looked_at <= FRESH
        is_old = is_old and batch.ends_seen != batch.alike.ends
        if batch.entry is entry and room >= 0.0 and is_old:
            self._book.look(batch, self._now)
            if batch.entry is not entry:
                if batch.entry < entry:
                    heappush(self._heads, (batch.entry, None))
                return
        if entry[3] in self._round.takes or self._is_refused(entry[3], batch, is_noted=room >= 0.0):
            return
        if self._offer(entry[3], batch, batch.which, because_of_age=False):
            behind = batch.behind(entry[3], self._now)
            if behind is not None:
                heappush(self._heads, (behind, None))

    def _point(self, shape: Shape, after: Entry | tuple[int]) -> None:
        """Point to the first ticket of a shape behind ``after`` that may get something."""
        round_ = self._round
        if shape.seen != round_.version:
            round_.measure(shape)
        rooms = shape.rooms
        considered = shape.considered == round_.number
        shape.head = None
        if considered and max(rooms) < 0.0:
            return
        entries = shape.entries
        for place in range(bisect_right(entries, after), len(entries)):
            entry = entries[place]
            if entry[0] > self._section:
                return
            batch = entry[4]
            room = rooms[batch.which]
            if room < batch.seconds and (room >= 0.0 or considered):
                shape.passed = shape.passed or not considered
                continue
            if (batch.parties or batch.host) and self._is_refused(
                entry[3], batch, is_noted=room >= batch.seconds
            ):
                continue
            shape.head = entry
            heappush(self._heads, (entry, shape))
            return

    def _is_refused(self, ticket_id: str, batch: TicketBatch, *, is_noted: bool) -> bool:
        """Return True if a limit keeps a ticket waiting, or the host has too little left for it.

        ``is_noted``: remember since when it is the host alone, for the ticket finds its devices.
        """
        if self._limiter.refusal(batch, self._now):
            return True
        return self._lacks_host(ticket_id, batch, is_noted=is_noted)

    def _lacks_host(self, ticket_id: str, batch: TicketBatch, *, is_noted: bool = True) -> bool:
        if self._host is None or not batch.host or self._host.fits(batch):
            return False
        if is_noted:
            self._host.note(ticket_id, self._now)
        return True

    def _keep_for_host(self, host: HostAdmission) -> None:
        """Serve the first ticket that has waited too long for the host, or keep all it needs."""
        for ticket_id in host.in_need(self._now):
            batch, round_ = self._book.batch(ticket_id), self._round
            if ticket_id in round_.takes or self._limiter.refusal(batch, self._now):
                continue
            if host.fits(batch) or round_.room(batch) < batch.seconds:
                self._offer(ticket_id, batch, batch.which, because_of_age=True)
                continue
            host.keep_for(batch)
            round_.hold(batch.shape, batch.seconds, batch.which)
            return

    def _less_is_left(self, here: Entry, but: Shape | None) -> None:
        """Re-check skipped tickets of each shape, which may now be the first to find no devices."""
        for shape in self._shapes:
            if not shape.passed or shape is but or shape.considered == self._round.number:
                continue
            before = shape.rooms
            self._round.measure(shape)
            if shape.rooms != before:
                self._point(shape, here)

    def _offer(self, ticket_id: str, batch: TicketBatch, which: int, because_of_age: bool) -> bool:
        shape, round_ = batch.shape, self._round
        if shape.seen != round_.version:
            round_.measure(shape)
        if shape.rooms[which] >= batch.seconds:
            if self._lacks_host(ticket_id, batch):
                return False
            round_.start(ticket_id, shape, batch.seconds, which)
            self.starts.append(ticket_id)
            self._limiter.take(batch, batch.seconds)
            if self._host is not None:
                self._host.take(batch)
            return True
        if shape.rooms[which] < 0.0:
            # A guess that a session is short is wrong often enough that many slots never become
            # free together.
            no_guess = because_of_age or shape.gathers
            round_.keep(ticket_id, shape, which, no_guess)
        return False
