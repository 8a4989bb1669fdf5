"""Positions of tickets in the queue, and what a request would get now."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import cache, partial

import sqlalchemy as sa

from ..core.errors import NoDeviceFree
from ..core.times import zoned
from ..db.clock import Timekeeper
from ..db.engine import Store
from ..devices.placement import must_run
from ..devices.service import DeviceService
from ..devices.snapshots import InventorySnapshot, credit_ends
from ..leases import repository as leases_repository
from ..leases.models import Request
from ..ledger import repository as ledger_repository
from ..ledger.settings import GPUCredits
from .delegation import DelegationService
from .estimates import DevicesAhead
from .models import Decision, Estimate, Priority, RankedTicket, Ticket, WaitingTicket
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
"""With at most so many tickets in the queue, a request that is not made yet is planned like one."""

NEWCOMER = "newcomer"
"""The id of such a request in the scheduler."""

AT_ONCE = 200
"""How many tickets are estimated before the lock of the queue is released."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """How a request made at this moment would fare."""

    free: int
    """Suitable devices that could be granted now."""
    total: int
    """These and the ones in use."""
    at_once: bool
    """True if it would start at once: enough are free and nobody waits for them."""
    ahead: int = 0
    """Suitable devices that others wait for."""
    estimate: Estimate | None = None
    """When it will probably start, as that of a ticket; so are the next two."""
    planned: datetime | None = None
    latest: datetime | None = None

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
        return self.line.free_for(ticket.request) > 0

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
            name: (replace(request, environment=""), member, groups, seconds)
            for name, request in requests.items()
        }
        missing = set(wanted.values()) - known.keys()
        if missing:
            known = known | self._look_ahead(missing, now)
            self._outlooks = (since, known)
        return {name: known[newcomer] for name, newcomer in wanted.items()}

    def require_fit(self, request: Request) -> None:
        """Raise TooMuchAsked if a request could never be granted, however long it waits."""
        look = self.devices.look()
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
                self.line.begin_anew(self.settings.make_scheduler())
        self.store.run(lambda connection: self.line.sync(connection, look, now))
        return look

    def decide(self, planned: int = 0) -> Decision:
        """Return the scheduler's decision; nobody starts while granting is paused.

        ``planned``: for how many tickets the planned start is wanted; if any, also why others are
        held back.
        """
        self.sync()
        if self.line.paused or not self.line.tickets:
            return Decision()
        now = self.clock().timestamp()
        return self._decision(now, planned)

    # Helpers.

    def _decision(self, now: float, planned: int) -> Decision:
        return self.line.scheduler.decide(
            now,
            self.line.supply.free,
            planned=planned,
            reasons=planned > 0,
            likely_ends=self._ends(now) if planned else {},
        )

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
        at = datetime.fromtimestamp(now, timezone.utc)
        ends = credit_ends(leases, accounts, grace, at)
        return {lease_id: end.timestamp() for lease_id, end in ends.items()}

    def _stand(
        self, waiting: Sequence[Ticket], decision: Decision, now: float
    ) -> dict[str, QueuePosition]:
        found = {}

        @cache
        def why(request: Request, held_back: str) -> str:
            text = waits_for(request, self.line.free_for(request), self.line.paused)
            return f"{text} ({held_back})" if held_back else text

        estimates = self._estimates(waiting, decision, now)
        for place, ticket in enumerate(waiting, start=1):
            found[ticket.id] = QueuePosition(
                place=place,
                of=len(waiting),
                why=why(ticket.request, decision.held_back.get(ticket.id, "")),
                estimate=estimates.get(ticket.id),
                planned=_moment(decision.planned.get(ticket.id)),
                latest=_moment(decision.latest.get(ticket.id)),
            )
        return found

    def _estimates(
        self,
        waiting: Sequence[Ticket],
        decision: Decision,
        now: float,
    ) -> dict[str, Estimate]:
        """Return when tickets will probably start; a ticket that a limit holds back has none."""
        found: dict[str, Estimate] = {}
        if self.line.paused:
            return found
        ahead = DevicesAhead()
        for start in range(0, len(waiting), AT_ONCE):
            # Release the lock in between: a new request need not wait for all of them.
            with self.line.lock:
                for ticket in waiting[start : start + AT_ONCE]:
                    if waits := self.line.scheduler.waiting.get(ticket.id):
                        devices, most = ahead.of(waits), decision.latest.get(ticket.id)
                        estimate = self.line.estimator.estimate(ticket.id, now, devices, most)
                        if estimate is not None and ticket.id not in decision.held_back:
                            found[ticket.id] = estimate
        return found

    def _look_ahead(self, newcomers: set[Newcomer], now: float) -> dict[Newcomer, Outlook]:
        with self.line.lock:
            self.sync()
            asked: Counter[frozenset[str]] = Counter()
            for ticket in self.line.scheduler.waiting.values():
                asked[ticket.kinds] += ticket.devices
            return {newcomer: self._outlook(newcomer, asked, now) for newcomer in newcomers}

    def _outlook(self, newcomer: Newcomer, asked: Counter[frozenset[str]], now: float) -> Outlook:
        request, member, groups, seconds = newcomer
        kinds = self.line.kinds(request) if request.devices else frozenset[str]()
        if not kinds:
            return Outlook(free=0, total=0, at_once=not request.devices)
        usable, given = self.line.supply.usable, self.line.supply.free
        free = sum(given.get(kind, 0) for kind in kinds)
        total = sum(usable.get(kind, 0) for kind in kinds)
        ahead = sum(count for others, count in asked.items() if not kinds.isdisjoint(others))
        if self.line.paused:
            return Outlook(free, total, at_once=False, ahead=ahead)
        if not ahead and any(given.get(kind, 0) >= request.devices for kind in kinds):
            return Outlook(free, total, at_once=True)
        if self.delegation.delegate is not None:  # its order is not ours
            return Outlook(free, total, at_once=False, ahead=ahead)
        group, priority = self.settings.standing_of(groups)
        waiting = WaitingTicket(
            id=NEWCOMER,
            member=member,
            group=group,
            priority=Priority(priority),
            devices=request.devices,
            kinds=kinds,
            asked_at=now,
            seconds=seconds,
        )
        decision, before = Decision(), ahead
        if len(self.line.tickets) <= TRIED:
            decision, before = self._try(waiting, now)
        latest = decision.latest.get(NEWCOMER)
        estimate = self.line.estimator.guess(waiting, now, before, latest)
        return Outlook(
            free,
            total,
            at_once=NEWCOMER in decision.starts,
            ahead=ahead,
            estimate=None if NEWCOMER in decision.held_back else estimate,
            planned=_moment(decision.planned.get(NEWCOMER)),
            latest=_moment(latest),
        )

    def _try(self, newcomer: WaitingTicket, now: float) -> tuple[Decision, int]:
        """Return the decision as if the newcomer were in the queue, and the devices before it.

        Needs the lock.
        """
        scheduler = self.line.scheduler
        scheduler.submit(newcomer)
        try:
            decision = self._decision(now, PLANNED)
            ahead = DevicesAhead()
            counts = {name: ahead.of(scheduler.waiting[name]) for name in scheduler.in_line(now)}
        finally:
            scheduler.withdraw(newcomer.id)
        return decision, counts[newcomer.id]


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, timezone.utc)
