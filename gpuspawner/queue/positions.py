"""Positions of tickets in the queue, and what a request would get now."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import cache

from ..core.errors import NoDeviceFree
from ..db.clock import Timekeeper
from ..db.engine import Store
from ..devices.placement import must_run
from ..devices.service import DeviceService
from ..devices.snapshots import InventorySnapshot
from ..leases.models import Request
from .delegation import DelegationService
from .estimates import DevicesAhead
from .models import Decision, Estimate, RankedTicket, Ticket, WaitingTicket
from .rank import QueuePosition, waits_for
from .settings import GPUQueue
from .state import QueueState

PLANNED = 8
"""How many tickets at the front are shown a latest start."""

POSITIONS_FRESH_SECONDS = 1.0
"""Seconds for which positions and estimates are reused, if nothing changes."""

OUTLOOK_FRESH_SECONDS = 2.0
"""Seconds for which an outlook is reused for everybody who reads a page."""

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
    likely: timedelta | None = None
    """Its probable wait, if enough tickets have waited to learn from."""
    most: timedelta | None = None
    """Its maximum wait, if all sessions that it would wait for have an end."""


@dataclass(eq=False)
class PositionService:
    """Calculates the position of every ticket, and how a request would fare."""

    store: Store
    clock: Timekeeper
    settings: GPUQueue
    _: KW_ONLY
    line: QueueState
    devices: DeviceService
    delegation: DelegationService

    def __post_init__(self) -> None:
        self._standings: tuple[tuple[int, float], dict[str, QueuePosition]] = ((-1, 0.0), {})
        self._outlooks: tuple[float, dict[Request, Outlook]] = (-math.inf, {})

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

    def outlooks(self, requests: Mapping[str, Request]) -> dict[str, Outlook]:
        """Return how each request, under any key, would fare; at most some seconds old."""
        now = self.clock().timestamp()
        since, known = self._outlooks
        if not 0 <= now - since < OUTLOOK_FRESH_SECONDS:
            since, known = now, {}
        # Environments with the same requirements share one answer.
        wanted = {
            name: replace(request, environment="") if request.environment else request
            for name, request in requests.items()
        }
        missing = set(wanted.values()) - known.keys()
        if missing:
            known = known | self._look_ahead(missing, now)
            self._outlooks = (since, known)
        return {name: known[request] for name, request in wanted.items()}

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
        return self.line.scheduler.decide(
            self.clock().timestamp(), self.line.supply.free, planned=planned, reasons=planned > 0
        )

    # Helpers.

    def _stand(
        self, waiting: Sequence[Ticket], decision: Decision, now: float
    ) -> dict[str, QueuePosition]:
        found = {}

        @cache
        def why(request: Request, held_back: str) -> str:
            text = waits_for(request, self.line.free_for(request), self.line.paused)
            return f"{text} ({held_back})" if held_back else text

        latest = self._latest(waiting, decision)
        estimates = self._estimates(waiting, decision, latest, now)
        for place, ticket in enumerate(waiting, start=1):
            planned = decision.planned.get(ticket.id)
            found[ticket.id] = QueuePosition(
                place=place,
                of=len(waiting),
                why=why(ticket.request, decision.held_back.get(ticket.id, "")),
                estimate=estimates.get(ticket.id),
                planned=datetime.fromtimestamp(planned, timezone.utc) if planned else None,
                certain=ticket.id in latest,
            )
        return found

    def _latest(self, waiting: Sequence[Ticket], decision: Decision) -> dict[str, float]:
        """Return the planned starts that no session without an end can delay."""
        found: dict[str, float] = {}
        with self.line.lock:
            if any(lease.ends_at is None for lease in self.line.scheduler.running.values()):
                return found
        for ticket in waiting:
            if ticket.id not in decision.planned:
                break
            found[ticket.id] = decision.planned[ticket.id]
            if ticket.seconds is None:
                break
        return found

    def _estimates(
        self,
        waiting: Sequence[Ticket],
        decision: Decision,
        latest: Mapping[str, float],
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
                        devices, most = ahead.of(waits), latest.get(ticket.id)
                        estimate = self.line.estimator.estimate(ticket.id, now, devices, most)
                        if estimate is not None and ticket.id not in decision.held_back:
                            found[ticket.id] = estimate
        return found

    def _look_ahead(self, requests: set[Request], now: float) -> dict[Request, Outlook]:
        with self.line.lock:
            self.sync()
            asked: Counter[frozenset[str]] = Counter()
            for ticket in self.line.scheduler.waiting.values():
                asked[ticket.kinds] += ticket.devices
            return {request: self._outlook(request, asked, now) for request in requests}

    def _outlook(self, request: Request, asked: Counter[frozenset[str]], now: float) -> Outlook:
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
        most = self._ends(kinds, ahead + request.devices - free, now)
        newcomer = WaitingTicket(
            id="", member="", devices=request.devices, kinds=kinds, asked_at=now
        )  # fmt: skip
        estimate = self.line.estimator.guess(newcomer, now, ahead, most)
        return Outlook(
            free,
            total,
            at_once=False,
            ahead=ahead,
            likely=_in(estimate.likely if estimate else None, now),
            most=_in(most, now),
        )

    def _ends(self, kinds: frozenset[str], wanted: int, now: float) -> float | None:
        """Return when this many devices of these kinds are back, if session ends guarantee it."""
        back = sorted(
            (max(now, lease.ends_at), sum(lease.held.get(kind, 0) for kind in kinds))
            for lease in self.line.scheduler.running.values()
            if lease.ends_at is not None and not kinds.isdisjoint(lease.held)
        )
        for at, devices in back:
            wanted -= devices
            if wanted <= 0:
                return at
        return None


def _in(moment: float | None, now: float) -> timedelta | None:
    return None if moment is None else timedelta(seconds=max(0.0, moment - now))
