"""The scheduler: decides whose turn it is, updated event by event."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType

from ..core.units import DeviceCount
from ..leases.host_resources import HostBudget
from .host_admission import HostAdmission, HostUse
from .kinds import CPU_ONLY, equivalents_of
from .limits import Limiter
from .models import (
    HOUR,
    Decision,
    EndedSession,
    QueueLimits,
    QueuePolicy,
    RankedTicket,
    RunningLease,
    ScorePart,
    WaitingTicket,
)
from .ordering import BY_AGE, FIRST, LAST, POSITION, Book, Key, Points, TicketBatch
from .rounds import Capacity, OverdueTickets, ReleasePlan, ReleaseTimes, Round, Walk, earliest_start
from .session_lengths import SessionLengths, SimilarSessions


@dataclass(slots=True)
class _Lease:
    """A running lease and what its end will teach."""

    lease: RunningLease
    equivalents: DeviceCount
    """How many GPUs its devices are."""
    number: int
    alike: SimilarSessions
    batch: TicketBatch | None
    aged: bool
    """It went first because it was overdue."""


class Scheduler:
    """Waiting tickets, running leases, and the rules that choose between them.

    Incremental and in memory: the owner reports events and asks for decisions. It starts nothing
    itself; a ticket leaves the queue with :meth:`started`. Times are seconds since 1970; setting
    the clock back does no harm. A ticket gets all its devices from one kind.
    """

    def __init__(
        self,
        policy: QueuePolicy | None = None,
        *,
        group_weights: Mapping[str, float] | None = None,
        member_limits: QueueLimits | None = None,
        group_limits: Mapping[str, QueueLimits] | None = None,
        host: HostBudget | None = None,
    ) -> None:
        self.policy = policy or QueuePolicy()
        patience = self.policy.host_patience_seconds
        self._host = HostAdmission(host, patience) if host else None
        self._points = Points(self.policy, group_weights or {})
        self._limiter = Limiter(member_limits or QueueLimits(), group_limits or {})
        self._lengths = SessionLengths(self.policy.default_seconds, self.policy.samples)
        self._book = Book(self.policy, self._lengths, self._points, self._limiter)
        self._aged = OverdueTickets(self.policy)
        self._releases = ReleaseTimes()
        self._capacity = Capacity({}, 0.0)
        self._leases: dict[str, _Lease] = {}
        self._running: dict[str, RunningLease] = {}
        self._latest = -math.inf
        self.waiting: Mapping[str, WaitingTicket] = self._book.waiting
        self.running: Mapping[str, RunningLease] = MappingProxyType(self._running)

    def set_capacity(self, devices: Mapping[str, DeviceCount]) -> None:
        """Set how many devices can be leased at all, by kind: shares are fractions of them.

        Of shared devices that are equally good for a share, the first one here is filled first.
        """
        self._capacity = Capacity(devices, self.policy.small_share)
        self._points.set_capacity(equivalents_of(devices))

    # Events.

    def submit(self, ticket: WaitingTicket) -> None:
        """Add a waiting ticket; one with the same id is replaced."""
        now = max(self._latest, ticket.asked_at)
        before = self.waiting.get(ticket.id)
        if before is not None:
            if before == ticket:
                return
            self._book.remove(ticket.id, now)
        self._book.add(ticket, now)

    def withdraw(self, ticket_id: str) -> None:
        """Remove a ticket; an unknown ticket is no error."""
        if ticket_id in self.waiting:
            self._book.remove(ticket_id, self._latest)
            if self._host is not None:
                self._host.forget(ticket_id)

    @contextmanager
    def trying(self, ticket: WaitingTicket) -> Iterator[None]:
        """Have a new ticket in the queue for a moment, to see how it would fare.

        Nothing is learned from it: how often members ask decides which sessions theirs are compared
        with, and each process would have tried other tickets.
        """
        self.submit(ticket)
        try:
            yield
        finally:
            self._book.forget(ticket.id, self._latest)
            if self._host is not None:
                self._host.forget(ticket.id)

    def started(self, lease: RunningLease) -> None:
        """Record that a lease began; its ticket, if it had one, leaves the queue."""
        if lease.id in self._leases:
            self.ended(lease.id, lease.started_at)
        at, devices = lease.started_at, lease.devices
        alike = self._lengths.alike(lease.member, lease.group, devices)
        ticket = self.waiting.get(lease.ticket_id or lease.id)
        batch, aged, seconds = None, False, None
        number = alike.asked
        if ticket is not None:
            batch = self._book.remove(ticket.id, at)
            if self._host is not None:
                self._host.forget(ticket.id)
            aged, seconds = self._aged.due(ticket.asked_at, at), batch.seconds
        if batch is not None and batch.alike is alike:
            number = batch.number
        else:
            alike.asked += 1
        self._running[lease.id] = lease
        used = lease.equivalents
        self._leases[lease.id] = _Lease(lease, used, number, alike, batch, aged)
        alike.start(number, at)
        self._points.start(lease.member, lease.group, used, at)
        if aged:
            self._aged.start(lease.held)
        ends_at = lease.ends_at
        if ends_at is None:
            if seconds is None:
                seconds = self._lengths.estimate(alike, number, at, None).seconds
            ends_at = at + seconds
        self._ends(lease, ends_at)

    def extended(self, lease_id: str, ends_at: float | None) -> None:
        """Record that the session's end was moved; an unknown lease is no error."""
        known = self._leases.get(lease_id)
        if known is None:
            return
        known.lease = self._running[lease_id] = replace(known.lease, ends_at=ends_at)
        if ends_at is None:
            ends_at = self._guess(known, max(self._latest, known.lease.started_at))
        self._ends(known.lease, ends_at)

    def ended(self, lease_id: str, at: float) -> None:
        """Record that a lease ended: its use counts, its length is learned. Unknown is no error."""
        known = self._leases.pop(lease_id, None)
        if known is None:
            return
        lease = self._running.pop(lease_id)
        at = max(at, lease.started_at)
        self._points.end(lease.member, lease.group, known.equivalents, at)
        if known.aged:
            self._aged.end(lease.held)
        self._releases.remove(lease_id)
        self._limiter.remove(lease)
        self._lengths.end(known.alike, known.number, lease.started_at, at - lease.started_at)
        if known.batch is not None:
            self._book.ended_one_of(known.batch)

    def learn(self, history: Iterable[EndedSession]) -> None:
        """Learn from sessions that ended before this scheduler was created, oldest first."""
        for ended in history:
            start, end = ended.started_at, max(ended.started_at, ended.ended_at)
            used = ended.devices * ended.part
            self._points.start(ended.member, ended.group, used, start)
            self._points.end(ended.member, ended.group, used, end)
            alike = self._lengths.alike(ended.member, ended.group, ended.devices)
            self._lengths.end(alike, alike.asked, start, end - start)
            alike.asked += 1

    # Results.

    def decide(
        self,
        now: float,
        free: Mapping[str, DeviceCount],
        *,
        planned: int = 0,
        reasons: bool = False,
        likely_ends: Mapping[str, float] = MappingProxyType({}),
        yielded: Mapping[str, DeviceCount] = MappingProxyType({}),
        host: HostUse | None = None,
    ) -> Decision:
        """Decide who starts now on the ``free`` devices (by kind). Starts nothing.

        Planned are the starts that those of now depend on, and, for people to know, the starts of
        the next ``planned`` tickets; with ``reasons`` also which tickets a limit keeps waiting.
        ``likely_ends`` are of leases that will probably end earlier than they have to; infinity
        for one whose devices are not given to anybody else. Of ``free``, those that still have to
        be ``yielded`` are taken last. ``host`` is what is used of its memory and CPU, if these have
        a budget.
        """
        if self._host is not None:
            self._host.begin(host or HostUse())
        if not self.waiting:
            return Decision(left=dict(free), host_left=self._host.left if self._host else None)
        if self._book.has_cpu_only:
            free = {**free, CPU_ONLY: 1}  # and no such ticket takes a part of it
        self._latest = now
        self._book.bring_up_to_date(now)
        if planned > 0 or self._limiter.any:
            self._guess_again(now)
        round_ = Round(now, free, self._capacity, self._releases, self._guess_again, yielded)
        walk = Walk(self._book, self._limiter, round_, self._host)
        aged = self._first_by_age(now)
        walk.run(aged)
        left = {kind: count for kind, count in round_.left.items() if kind != CPU_ONLY}
        latest: dict[str, float] = {}
        if planned > 0:
            self._plan(round_, now, self._in_order(now, aged), planned, likely_ends)
            keys = self._in_order(now, aged)
            latest = self._latest_starts(round_, now, keys, planned, likely_ends)
        held_back = self._held_back(round_.takes, now) if reasons else {}
        waits_for_host = self._wait_for_host(round_.takes, held_back) if reasons else {}
        self._limiter.give_back()
        return Decision(
            starts=tuple(walk.starts),
            planned=round_.planned,
            latest=latest,
            held_back=held_back,
            waits_for_host=waits_for_host,
            takes=round_.takes,
            left=left,
            host_left=self._host.left if self._host else None,
        )

    def order(self, now: float) -> list[RankedTicket]:
        """Return all waiting tickets, first next, each with the parts of its score."""
        self._latest = now
        self._book.look_at_all(now)
        aged = self._first_by_age(now)
        first = frozenset(aged)
        ranked = []
        for place, key in enumerate(self._in_order(now, aged), start=1):
            parts = self._parts(key, now, key[3] in first)
            ranked.append(RankedTicket(key[3], place, sum(part.points for part in parts), parts))
        return ranked

    def in_line(self, now: float) -> list[str]:
        """Return the ids of all waiting tickets, first next: :meth:`order` without scores."""
        self._latest = now
        self._book.line.settle(now)
        return [key[3] for key in self._in_order(now, self._first_by_age(now))]

    def place(self, ticket_id: str, now: float) -> int:
        """Return a ticket's position, 1 is next; 0 if it does not wait."""
        ticket = self.waiting.get(ticket_id)
        if ticket is None:
            return 0
        self._latest = now
        self._book.line.settle(now)
        aged = self._first_by_age(now)
        if aged:
            return self.in_line(now).index(ticket_id) + 1
        key = self._book.batch(ticket_id).key(ticket.asked_at, ticket_id, now)
        return 1 + self._book.line.before(key, now)

    # Helpers.

    def _guess_again(self, now: float) -> None:
        """Estimate again the ends of leases that time has proved wrong."""
        for lease_id in list(self._releases.guessed_wrong(now)):
            known = self._leases[lease_id]
            self._ends(known.lease, max(now + 60.0, self._guess(known, now)))

    def _held_back(self, starting: Collection[str], now: float) -> dict[str, str]:
        return {
            ticket_id: batch.refusal
            for batch in self._book.limited
            if self._limiter.refusal(batch, now)
            for _, ticket_id in batch.tickets
            if ticket_id not in starting
        }

    def _wait_for_host(
        self, starting: Collection[str], held_back: Mapping[str, str]
    ) -> dict[str, str]:
        if self._host is None:
            return {}
        return {
            ticket_id: lacking
            for batch in self._book.limited
            if batch.host and (lacking := self._host.lacking(batch))
            for _, ticket_id in batch.tickets
            if ticket_id not in starting and ticket_id not in held_back
        }

    def _has_to_wait(self, batch: TicketBatch, now: float) -> bool:
        """Return True if a limit or the host keeps the tickets of a batch waiting."""
        if self._host is not None and batch.host and not self._host.fits(batch):
            return True
        return bool(self._limiter.refusal(batch, now))

    def _ends(self, lease: RunningLease, at: float) -> None:
        self._releases.put(lease.id, lease.held, at, guess=lease.ends_at is None)
        self._limiter.put(lease, at)

    def _guess(self, known: _Lease, now: float) -> float:
        return self._lengths.end_of(known.alike, known.number, known.lease.started_at, now)

    def _first_by_age(self, now: float) -> list[str]:
        return self._aged.first(self._book, self._limiter, self._capacity.devices, now)

    def _in_order(self, now: float, aged: list[str]) -> Iterator[Key]:
        keys = self._book.line.in_order(now)
        if not aged:
            return keys
        first = dict.fromkeys(aged)
        by_id: dict[str, Key] = {}
        before: list[Key] = []
        rest: list[Key] = []
        for key in keys:
            if key[3] in first:
                by_id[key[3]] = key
            else:
                (before if key[0] == POSITION else rest).append(key)
        return chain(before, map(by_id.__getitem__, aged), rest)

    def _plan(
        self,
        round_: Round,
        now: float,
        keys: Iterable[Key],
        most: int,
        likely_ends: Mapping[str, float],
    ) -> None:
        """Plan the next starts, each as if all before it start as planned."""
        kinds = {*self._capacity.devices, *round_.left}
        plans: dict[str, ReleasePlan] = {}
        for kind in kinds:
            ends = [
                (min(at, max(now, likely_ends.get(lease_id, at))), devices)
                for at, lease_id, devices in self._releases.ahead(kind, now)
                if likely_ends.get(lease_id) != math.inf
            ]
            ends += [(at, devices) for at, _, devices in round_.started(kind)]
            plans[kind] = ReleasePlan(now, round_.left.get(kind, 0), ends)
        for key in keys:
            batch = self._book.batch(key[3])
            if key[3] in round_.takes or self._has_to_wait(batch, now):
                continue
            if most <= 0:
                break
            most -= 1
            seconds = batch.seconds
            at, held = earliest_start(batch.shape, plans, seconds)
            for kind, devices in held.items():
                plans[kind].take(devices, at, seconds)
            if held:
                if likely_ends or key[3] not in round_.planned:
                    round_.planned[key[3]] = at
            elif likely_ends:
                round_.planned.pop(key[3], None)

    def _latest_starts(
        self,
        round_: Round,
        now: float,
        keys: Iterable[Key],
        most: int,
        likely_ends: Mapping[str, float],
    ) -> dict[str, float]:
        """Return by when the next ``most`` tickets start, by ends that are known and not guessed.

        A session without an end counts as one that never ends. While there is one, a request for
        several devices, or for several slots of a shared one, has no such time, because they are
        gathered for it by guessed ends.
        """
        ends: dict[str, list[tuple[float, DeviceCount]]] = {}
        is_sure = True
        for lease in self._running.values():
            if likely_ends.get(lease.id) == math.inf:
                continue
            is_sure = is_sure and lease.ends_at is not None
            for kind, devices in lease.held.items() if lease.ends_at is not None else ():
                ends.setdefault(kind, []).append((max(now, lease.ends_at or now), devices))
        for ticket_id, held in round_.takes.items():
            ticket = self.waiting[ticket_id]
            is_sure = is_sure and ticket.seconds is not None
            for kind, devices in held.items() if ticket.seconds is not None else ():
                ends.setdefault(kind, []).append((now + (ticket.seconds or 0), devices))
        plans = {
            kind: ReleasePlan(now, round_.left.get(kind, 0), ends.get(kind, ()))
            for kind in {*self._capacity.devices, *round_.left}
        }
        found: dict[str, float] = {}
        for key in keys:
            ticket = self.waiting[key[3]]
            if ticket.id in round_.takes:
                continue
            # Nobody can say when others return memory and CPU of the host.
            batch = self._book.batch(ticket.id)
            is_held_back = bool(batch.host) or self._has_to_wait(batch, now)
            is_gathered = ticket.devices > 1 or ticket.gathers_slots
            if len(found) >= most or is_held_back or (is_gathered and not is_sure):
                break
            seconds = math.inf if ticket.seconds is None else ticket.seconds
            at, held = earliest_start(batch.shape, plans, seconds)
            if not held:
                break
            for kind, devices in held.items():
                plans[kind].take(devices, at, seconds)
            found[ticket.id] = at
            is_sure = is_sure and ticket.seconds is not None
        return found

    def _parts(self, key: Key, now: float, because_of_age: bool) -> tuple[ScorePart, ...]:
        section, position, asked_at, ticket_id = key
        batch = self._book.batch(ticket_id)
        waited = max(0.0, now - asked_at)
        hours = f"{waited / HOUR:.1f} hours"
        if section == POSITION:
            return (
                ScorePart("position", FIRST - position, "given by an admin; nothing else counts"),
            )
        if because_of_age:
            why = f"{hours}, too long; nothing else counts"
            return (ScorePart("waiting", BY_AGE + waited / HOUR, why),)
        parts = self._points.parts(batch.reckoning, batch.ticket)
        points = batch.waiting_points(asked_at, now)
        if points < waited / batch.per_point:
            hours += ", which has made up for all that was lacking"
        parts.append(ScorePart("waiting", points, hours))
        if section == LAST:
            parts.append(ScorePart("last", -BY_AGE, "missed its turn twice"))
        return tuple(parts)
