"""Positions of tickets in the queue, and what a request would get now."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime, timedelta
from functools import cache, partial
from itertools import islice

import sqlalchemy as sa

from ..core.errors import NoDeviceFree
from ..core.times import at_second, zoned
from ..core.units import DeviceCount
from ..db.clock import Timekeeper
from ..db.engine import Store
from ..devices.service import DeviceService
from ..devices.snapshots import InventorySnapshot, credit_ends
from ..devices.suitability import must_run
from ..leases import repository as leases_repository
from ..leases.host_resources import NOTHING
from ..leases.models import YIELD_SECONDS, Request
from ..ledger import repository as ledger_repository
from ..ledger.settings import GPUCredits
from . import repository
from .delegation import DelegationService
from .estimates import DevicesAhead
from .kinds import NO_KIND
from .models import (
    Decision,
    Estimate,
    Priority,
    RankedTicket,
    StoredEstimate,
    Ticket,
    WaitingTicket,
)
from .rank import QueuePosition, Show, expected_start, waits_for
from .settings import GPUQueue
from .state import QueueState

PLANNED = 8
"""How many tickets at the front are shown a latest start."""

POSITIONS_FRESH_SECONDS = 1.0
"""Seconds for which positions and estimates are reused, if nothing changes."""

CREDITS_FRESH_SECONDS = 10.0
"""Seconds for which the ends of credits are reused."""

STOPPING = timedelta(minutes=2)
"""How long a stop takes beyond the grace period.

One round of the accounting service notices that an account is dry, another stops its servers.
"""

OUTLOOK_FRESH_SECONDS = 2.0
"""Seconds for which an outlook is reused for everybody who reads a page."""

TRIED = 50
"""With at most so many tickets in the queue, a request that is not made yet is planned like one.

In a longer queue its position is counted, and nothing else of it is known.
"""

NEWCOMER = "newcomer"
"""The id of such a request in the scheduler."""

AT_ONCE = 200
"""How many tickets are estimated before the lock of the queue is released."""

LOOK_SECONDS = 60.0
"""Seconds between two looks at whether stored estimates still hold, if nothing changes."""

LOOK_REST = 50.0
"""The least pause between two such looks, as a multiple of the last one's duration."""

RENEWED_SECONDS = 45.0
"""Seconds after which a look replaces a stored estimate even if it still holds.

Less than between two looks, since an estimate is stored some time after the look began.
"""

FRESH_SECONDS = 180.0
"""Seconds for which a stored estimate is shown: an older one's author is gone."""

NOTICEABLE_SECONDS, NOTICEABLE_PART = 60.0, 0.1
"""A stored estimate is replaced if an end moved by more than both: seconds, part of the wait."""

PORTION = 1000
"""How many estimates are stored in one transaction: between two, others can write."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """How a request made at this moment would fare."""

    free: DeviceCount
    """Suitable devices that could be granted now; of shared ones, for a share also parts."""
    total: DeviceCount
    """These and the ones in use."""
    at_once: bool
    """True if it would start at once: enough are free and nobody waits for them."""
    ahead: DeviceCount = 0
    """Suitable devices that others wait for."""
    estimate: Estimate | None = None
    """When it will probably start, as that of a ticket; so are the next two."""
    planned: datetime | None = None
    latest: datetime | None = None
    place: int = 0
    """Its position in the queue; 0 if it would not wait, or if that is not known."""
    lacking: str = ""
    """What the host lacks for it: ``32.0 GB of memory (8.0 GB free)``."""
    reserved: str = ""
    """The sentence that only devices reserved for others suit it; empty if that is not so."""

    def start(self, now: datetime, show: Show = zoned) -> str:
        """Format the expected start, as :meth:`QueuePosition.start` does for a ticket."""
        return expected_start(self.estimate, self.planned, self.latest, now, show)


Newcomer = tuple[Request, str, frozenset[str], int | None]
"""A request that is not made yet, its member, their groups, and the session's seconds."""


@dataclass(eq=False)
class PositionService:
    """Calculates the position of every ticket, and how a request would fare."""

    store: Store
    clock: Timekeeper
    settings: GPUQueue
    credits: GPUCredits
    _: KW_ONLY
    line: QueueState
    devices: DeviceService
    delegation: DelegationService

    def __post_init__(self) -> None:
        self._standings: tuple[tuple[int, float], dict[str, QueuePosition]] = ((-1, 0.0), {})
        self._likely_ends: tuple[float, dict[str, float]] = (-math.inf, {})
        self._outlooks: tuple[float, dict[Newcomer, Outlook]] = (-math.inf, {})
        self._stored: tuple[int, datetime | None, dict[str, StoredEstimate]] = (-1, None, {})
        """What was read: the clock's version, when the newest was stored, and each by ticket."""
        self._looked: tuple[int, float, float] = (-1, -math.inf, 0.0)
        """At the last look: the queue's revision, the time, and how long the look took."""
        self._looked_until = -math.inf
        """When it ended, by the machine's monotonic clock."""
        self._learned_at = -math.inf

    def standings(self) -> dict[str, QueuePosition]:
        """Return every ticket's position, reason and estimate, by ticket id."""
        if self.delegation.delegate is not None:
            return self.delegation.standings()
        with self.line.lock:
            decision = self.decide(PLANNED)
            now = self.clock().timestamp()
            revision, since = self._standings[0]
            if revision == self.line.revision and 0 <= now - since < POSITIONS_FRESH_SECONDS:
                return self._standings[1]
            revision = self.line.revision
            waiting = [self.line.tickets[name] for name in self.line.scheduler.in_line(now)]
        found = self._stand(waiting, decision, now)
        self._standings = ((revision, now), found)
        return found

    def order(self) -> list[tuple[Ticket, RankedTicket, QueuePosition]]:
        """Return the whole queue with all scores and their parts, first next, for admins."""
        if self.delegation.delegate is not None:
            return self.delegation.order()
        with self.line.lock:
            decision = self.decide(PLANNED)
            now = self.clock().timestamp()
            ranked = self.line.scheduler.order(now)
            waiting = [self.line.tickets[each.id] for each in ranked]
        found = self._stand(waiting, decision, now)
        return [(t, r, found[t.id]) for t, r in zip(waiting, ranked, strict=True)]

    def store_estimates(self) -> int:
        """Store new estimates where there is none or it no longer holds; return how many.

        Only the hub that grants calls this, in each of its rounds. Each process learns from what it
        has seen, so two authors would give one ticket two estimates.
        """
        if self.delegation.delegate is not None:
            return 0
        began = time.monotonic()
        with self.line.lock:
            now = self.clock().timestamp()
            new = self.line.scheduler.waiting.keys() - self._stored[2].keys()
            if self.line.paused or not (new or self._is_look_due(now)):
                return 0
            decision = self.decide(PLANNED)
            revision = self.line.revision
            waiting = [self.line.tickets[name] for name in self.line.scheduler.in_line(now)]
            is_due = self._is_look_due(now)
        stored = self._read_stored(now)
        only = None if is_due else {ticket.id for ticket in waiting} - stored.keys()
        found = self._own_estimates(waiting, decision, now, only)
        changed = {
            ticket_id: estimate
            for ticket_id, estimate in found.items()
            if _is_outdated(stored.get(ticket_id), estimate, now)
        }
        rest = iter(changed.items())
        while part := dict(islice(rest, PORTION)):
            with self.store.write() as connection:
                # Of the moment of writing: then readers find all that was stored since they read.
                repository.store_estimates(connection, part, self.clock(), at_second(now))
        if changed:
            self._standings = ((-1, 0.0), {})
        if is_due:
            self._learned_at = now
            self._looked_until = time.monotonic()
            self._looked = (revision, now, self._looked_until - began)
        return len(changed)

    def first_estimate(self, ticket: Ticket) -> StoredEstimate | None:
        """Return the estimate of a ticket that is about to be queued. Needs the lock.

        None in a long queue, where it takes a while: :meth:`store_estimates` adds it then.
        """
        if self.delegation.delegate is not None or self.line.paused or not ticket.request.devices:
            return None
        if not self.line.synced or len(self.line.tickets) > TRIED:
            return None
        now = self.clock().timestamp()
        waiting = self.line.waiting(ticket)
        decision, before, _ = self._try(waiting, now)
        latest = decision.latest.get(ticket.id)
        return StoredEstimate(now, self.line.estimator.guess(waiting, now, before, latest))

    def place_of(self, ticket_id: str) -> int:
        """Return a ticket's position; 0 if it does not wait or has none yet."""
        if self.delegation.delegate is not None:
            return 0
        with self.line.lock:
            return self.line.scheduler.place(ticket_id, self.clock().timestamp())

    def in_line(self, ticket_id: str) -> bool:
        """Return True if a ticket was waiting at the last look at the store."""
        return ticket_id in self.line.tickets

    def could_start(self, ticket: Ticket) -> bool:
        """Return True if suitable devices were free at the last look, so it may be its turn."""
        return not ticket.request.devices or self.line.free_for(ticket.request) > 0

    def outlooks(
        self,
        requests: Mapping[str, Request],
        member: str = "",
        groups: frozenset[str] = frozenset(),
        seconds: int | None = None,
    ) -> dict[str, Outlook]:
        """Return how each request, under any key, would fare; at most some seconds old.

        ``member`` and their ``groups`` decide where in the queue a request would be; a session
        without ``seconds`` has no end. An external scheduler says when a request starts only once
        it has it, and never at the latest.
        """
        now = self.clock().timestamp()
        since, known = self._outlooks
        if not 0 <= now - since < OUTLOOK_FRESH_SECONDS:
            since, known = now, {}
        # Environments with the same requirements share one answer.
        wanted = {
            name: (
                replace(self.of_member(request, groups), environment=""),
                member,
                groups,
                seconds,
            )
            for name, request in requests.items()
        }
        missing = set(wanted.values()) - known.keys()
        if missing:
            known = known | self._look_ahead(missing, now)
            self._outlooks = (since, known)
        return {name: known[newcomer] for name, newcomer in wanted.items()}

    def of_member(
        self, request: Request, groups: frozenset[str], *, preemptible: bool = False
    ) -> Request:
        """Return a request with what decides which reserved devices its member may use."""
        return self.devices.look().fleet.of_member(request, groups, preemptible=preemptible)

    def require_fit(self, request: Request, groups: frozenset[str] | None = None) -> None:
        """Raise TooMuchAsked if a request could never be granted, however long it waits.

        ``groups`` are the member's, unless the request has those that count.
        """
        look = self.devices.look()
        if groups is not None:
            request = look.fleet.of_member(request, groups)
        must_run(request, look.inventory)
        with suppress(NoDeviceFree):  # it would fit, were it not for what runs there now
            look.fleet.choose(request, frozenset())

    def sync(self) -> InventorySnapshot:
        """Update the queue from the store."""
        look = self.devices.look()
        now = self.clock()
        if self.clock.version != self.line.clock_version:
            self.line.clock_version = self.clock.version
            if self.line.synced:
                self.line.begin_anew(self.settings.make_scheduler(self.line.budget))
        elif look.fleet.differs_in_reservations(self.line.supply.fleet):
            # Leases are of other kinds now.
            self.line.begin_anew(self.settings.make_scheduler(self.line.budget))
        self.store.run(lambda connection: self.line.sync(connection, look, now))
        return look

    def decide(self, planned: int = 0) -> Decision:
        """Return the scheduler's decision; nobody gets a device while granting is paused.

        ``planned``: for how many tickets the planned start is wanted; if any, also why others are
        held back.
        """
        self.sync()
        now = self.clock().timestamp()
        if not self.line.paused:
            return self._decision(now, planned)
        if self.line.budget is None:
            return Decision()
        host, reasons = self.line.host_use, planned > 0
        decision = self.line.scheduler.decide(now, {}, reasons=reasons, host=host)
        return replace(decision, planned={}, held_back={})

    # Helpers.

    def _decision(self, now: float, planned: int) -> Decision:
        return self.line.scheduler.decide(
            now,
            self.line.supply.grantable,
            planned=planned,
            reasons=planned > 0,
            likely_ends=self._ends(now) if planned else {},
            yielded=self.line.supply.yielded,
            host=self.line.host_use,
        )

    def _is_yielded(self, ticket_id: str, decision: Decision) -> bool:
        """Return True if a start of now may have to wait until preemptible runs have yielded."""
        left, yielded = decision.left, self.line.supply.yielded
        kinds = decision.takes.get(ticket_id, ())
        return any(left.get(kind, 0) < yielded.get(kind, 0) for kind in kinds)

    def _ends(self, now: float) -> dict[str, float]:
        """Return when the credits of open leases run out; nobody is promised that they do.

        Infinity for a lease whose device is drained and does not come back to the queue.
        """
        since, ends = self._likely_ends
        if not 0 <= now - since < CREDITS_FRESH_SECONDS:
            ends = self.store.run(partial(self._read_ends, now=now))
            self._likely_ends = (now, ends)
        return ends | self.line.drained()

    def _read_ends(self, connection: sa.Connection, now: float) -> dict[str, float]:
        leases = leases_repository.open_leases(connection)
        names = {lease.account for lease in leases if lease.rate}
        accounts = {name: ledger_repository.get_account(connection, name) for name in names}
        grace = timedelta(seconds=self.credits.grace_seconds) + STOPPING
        at = at_second(now)
        ends = credit_ends(leases, accounts, grace, at)
        return {lease_id: end.timestamp() for lease_id, end in ends.items()}

    def _stand(
        self, waiting: Sequence[Ticket], decision: Decision, now: float
    ) -> dict[str, QueuePosition]:
        found = {}

        @cache
        def why(request: Request, user: str, held_back: str, host: str) -> str:
            free, asked = self.line.free_for(request, user), self.line.asked(request)
            text = waits_for(request, free, asked, self.line.paused, host)
            return f"{text} ({held_back})" if held_back else text

        estimates = self._estimates(waiting, decision, now)
        for place, ticket in enumerate(waiting, start=1):
            latest, note = decision.latest.get(ticket.id), decision.held_back.get(ticket.id, "")
            if self._is_yielded(ticket.id, decision):
                latest, note = now + YIELD_SECONDS, "preemptible runs are making room"
            # Only for slots the member matters: one answer serves all other requests.
            user = ticket.server.user if self.line.is_for_share(ticket.request) else ""
            host = decision.waits_for_host.get(ticket.id, "")
            planned = None if host else decision.planned.get(ticket.id)
            found[ticket.id] = QueuePosition(
                place=place,
                of=len(waiting),
                why=why(ticket.request, user, note, host),
                estimate=estimates.get(ticket.id),
                planned=_moment_or_none(planned),
                latest=_moment_or_none(latest),
                cpu_only=not ticket.request.devices,
            )
        return found

    def _estimates(
        self,
        waiting: Sequence[Ticket],
        decision: Decision,
        now: float,
    ) -> dict[str, Estimate]:
        """Return when tickets will probably start; one that a limit or the host holds has none.

        By the stored estimates, which all processes show alike, and by our own for tickets without.
        """
        found: dict[str, Estimate] = {}
        if self.line.paused:
            return found
        stored = self._read_stored(now)
        missing = {ticket.id for ticket in waiting} - stored.keys()
        own: Mapping[str, Estimate | None] = {}
        if not 0 <= now - self._learned_at < RENEWED_SECONDS:
            # Learn from all tickets, to have estimates of our own when nobody stores any.
            self._learned_at = now
            own = self._own_estimates(waiting, decision, now)
        elif missing:
            own = self._own_estimates(waiting, decision, now, missing)
        for ticket in waiting:
            known = stored.get(ticket.id)
            estimate = known.estimate if known else own.get(ticket.id)
            is_held = ticket.id in decision.held_back or ticket.id in decision.waits_for_host
            if estimate is not None and not is_held:
                found[ticket.id] = _within(estimate, now, decision.latest.get(ticket.id))
        return found

    def _own_estimates(
        self,
        waiting: Sequence[Ticket],
        decision: Decision,
        now: float,
        only: Collection[str] | None = None,
    ) -> dict[str, Estimate | None]:
        """Return this process's own estimates, of all tickets or only some."""
        found: dict[str, Estimate | None] = {}
        ahead = DevicesAhead()
        for start in range(0, len(waiting), AT_ONCE):
            # Release the lock in between: a new request need not wait for all of them.
            with self.line.lock:
                for ticket in waiting[start : start + AT_ONCE]:
                    waits = self.line.scheduler.waiting.get(ticket.id)
                    if waits and not waits.devices:
                        found[ticket.id] = None
                    elif waits:
                        devices, most = ahead.of(waits), decision.latest.get(ticket.id)
                        if only is None or ticket.id in only:
                            found[ticket.id] = self.line.estimator.estimate(
                                ticket.id, now, devices, most
                            )
        return found

    def _is_look_due(self, now: float) -> bool:
        """Return True if it is time to see whether all stored estimates still hold."""
        revision, since, took = self._looked
        if not 0 <= now - since < LOOK_SECONDS:
            return True
        return (
            revision != self.line.revision
            and time.monotonic() - self._looked_until >= LOOK_REST * took
        )

    def _read_stored(self, now: float) -> dict[str, StoredEstimate]:
        """Return the stored estimates that are not too old; reads only what is new."""
        version, newest, known = self._stored
        if version != self.clock.version or newest is None:
            version, newest, known = self.clock.version, at_second(now - FRESH_SECONDS), {}
        since = newest
        found, newest = self.store.run(lambda c: repository.estimates_since(c, since))
        tickets = self.line.tickets
        if len(known) > 2 * len(tickets) + AT_ONCE:
            known = {name: each for name, each in known.items() if name in tickets}
        known = known | found
        self._stored = (version, newest, known)
        return {name: each for name, each in known.items() if now - each.at < FRESH_SECONDS}

    def _look_ahead(self, newcomers: set[Newcomer], now: float) -> dict[Newcomer, Outlook]:
        with self.line.lock:
            self.sync()
            asked: dict[frozenset[str], DeviceCount] = {}
            for ticket in self.line.scheduler.waiting.values():
                asked[ticket.kinds] = asked.get(ticket.kinds, 0) + ticket.devices
            return {newcomer: self._outlook(newcomer, asked, now) for newcomer in newcomers}

    def _outlook(
        self, newcomer: Newcomer, asked: Mapping[frozenset[str], DeviceCount], now: float
    ) -> Outlook:
        request, member, groups, seconds = newcomer
        if not self.line.kinds(request):
            reserved = self.line.supply.fleet.why_reserved(request)
            return Outlook(free=0, total=0, at_once=False, reserved=reserved)
        host_left = self.line.host_left(request)
        lacking = "" if host_left is None else request.host.lacking(host_left)
        # For memory and CPU cores, a request may have to wait behind any other.
        is_first = host_left is None or not (request.host and self.line.tickets)
        if not request.devices and is_first:
            return Outlook(free=0, total=0, at_once=not lacking, lacking=lacking)
        kinds = self.line.kinds(request, member)
        supply = self.line.supply
        free = self.line.count_for(request, supply.free, member)
        total = self.line.count_for(request, supply.usable)
        ahead = sum(count for others, count in asked.items() if not kinds.isdisjoint(others))
        if self.line.paused and request.devices:
            return Outlook(free, total, at_once=False, ahead=ahead)
        is_first = is_first and not ahead and not lacking
        if is_first and self.line.has_enough(request, supply.free, member):
            return Outlook(free, total, at_once=True)
        if is_first and self.line.has_enough(request, supply.grantable, member):
            return Outlook(free, total, at_once=False, latest=at_second(now + YIELD_SECONDS))
        if self.delegation.delegate is not None:  # its order is not ours
            return Outlook(free, total, at_once=False, ahead=ahead)
        group, priority = self.settings.standing_of(groups)
        waiting = WaitingTicket(
            id=NEWCOMER,
            member=member,
            group=group,
            priority=Priority(priority),
            devices=self.line.asked(request),
            kinds=kinds or frozenset({NO_KIND}),
            share_bytes=self.line.share_bytes(request),
            smallest=request.smallest,
            asked_at=now,
            seconds=seconds,
            host=NOTHING if host_left is None else request.host,
        )
        decision, before, place = Decision(), ahead, 0
        if len(self.line.tickets) <= TRIED:
            decision, before, place = self._try(waiting, now)
        else:
            place = self._count(waiting, now)
        latest = decision.latest.get(NEWCOMER)
        if is_yielded := self._is_yielded(NEWCOMER, decision):
            latest = now + YIELD_SECONDS
        lacking = decision.waits_for_host.get(NEWCOMER, lacking)
        estimate = None
        if request.devices and not lacking and NEWCOMER not in decision.held_back:
            estimate = self.line.estimator.guess(waiting, now, before, latest)
        at_once = NEWCOMER in decision.starts and not is_yielded and not lacking
        return Outlook(
            free,
            total,
            at_once=at_once,
            ahead=ahead,
            estimate=estimate,
            planned=None if lacking else _moment_or_none(decision.planned.get(NEWCOMER)),
            latest=_moment_or_none(latest),
            place=0 if at_once else place,
            lacking=lacking,
        )

    def _try(self, newcomer: WaitingTicket, now: float) -> tuple[Decision, DeviceCount, int]:
        """Return the decision as if the newcomer were in the queue, and its position.

        Between both: the devices before it. Needs the lock.
        """
        scheduler = self.line.scheduler
        with scheduler.trying(newcomer):
            decision = self._decision(now, PLANNED)
            ahead = DevicesAhead()
            counts = {name: ahead.of(scheduler.waiting[name]) for name in scheduler.in_line(now)}
        return decision, counts[newcomer.id], 1 + list(counts).index(newcomer.id)

    def _count(self, newcomer: WaitingTicket, now: float) -> int:
        """Return the position that the newcomer would have in the queue. Needs the lock.

        The scheduler keeps its tickets in order: this takes about as long in a queue of any length.
        """
        scheduler = self.line.scheduler
        with scheduler.trying(newcomer):
            return scheduler.place(newcomer.id, now)


def _is_outdated(known: StoredEstimate | None, estimate: Estimate | None, now: float) -> bool:
    """Return True if a new estimate should replace the stored one."""
    if known is None or not 0 <= now - known.at < RENEWED_SECONDS:
        return True
    if known.estimate is None or estimate is None:
        return known.estimate is not estimate
    shown = _within(known.estimate, now, None)
    noticeable = max(NOTICEABLE_SECONDS, NOTICEABLE_PART * (estimate.high - now))
    moved = max(abs(shown.low - estimate.low), abs(shown.high - estimate.high))
    return moved > noticeable


def _within(estimate: Estimate, now: float, latest: float | None) -> Estimate:
    """Return an estimate cut to the time from now to the latest start."""
    most = math.inf if latest is None else max(now, latest)
    low, likely, high = (
        min(most, max(now, at)) for at in (estimate.low, estimate.likely, estimate.high)
    )
    return Estimate(low, likely, high)


def _moment_or_none(seconds: float | None) -> datetime | None:
    return None if seconds is None else at_second(seconds)
