"""Positions of tickets in the queue, and what a request would get now."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import cache

from ..core.errors import NoDeviceFree
from ..devices import closures
from ..devices.placement import must_run
from ..devices.snapshots import InventorySnapshot
from ..leases.models import Request
from .delegation import Delegating
from .estimates import Ahead
from .models import Decision, Estimate, Ranked, Ticket, Waiting
from .standing import Standing, waits_for
from .state import QueueState

PLANNED = 8
"""Tickets, the first in line, that are told when they start at the latest."""

POSITIONS_FRESH_SECONDS = 1.0
"""Seconds for which places and estimates serve everybody who asks, if nothing changes."""


AT_ONCE = 200
"""Tickets that are estimated before others may have the line."""


class Places(Delegating):
    """The part of the broker that knows the line."""

    line: QueueState
    _standings: tuple[tuple[int, float], dict[str, Standing]] = ((-1, 0.0), {})

    def standings(self) -> dict[str, Standing]:
        """Where every ticket stands: place, reason and estimate, by ticket id."""
        if self.delegate is not None:
            return self._delegated_standings()
        with self.line.lock:
            decision = self._decide(PLANNED)
            now = _seconds(self.clock())
            revision, since = self._standings[0]
            if revision == self.line.revision and 0 <= now - since < POSITIONS_FRESH_SECONDS:
                return self._standings[1]
            revision = self.line.revision
            waiting = self._tickets(self.line.scheduler.in_line(now))
        found = self._stand(waiting, decision, now)
        self._standings = ((revision, now), found)
        return found

    def order(self) -> list[tuple[Ticket, Ranked, Standing]]:
        """The whole line with the arithmetic of every score, first next: for admins."""
        if self.delegate is not None:
            return self._delegated_order()
        with self.line.lock:
            decision = self._decide(PLANNED)
            now = _seconds(self.clock())
            ranked = self.line.scheduler.order(now)
            waiting = self._tickets([each.id for each in ranked])
        found = self._stand(waiting, decision, now)
        return [(t, r, found[t.id]) for t, r in zip(waiting, ranked, strict=True)]

    def place_of(self, ticket_id: str) -> int:
        """A ticket's place in line; 0 when it does not wait, or nobody has said yet."""
        if self.delegate is not None:
            return 0
        with self.line.lock:
            return self.line.scheduler.place(ticket_id, _seconds(self.clock()))

    def in_line(self, ticket_id: str) -> bool:
        """Whether a ticket waits, as of the last look at the store."""
        return ticket_id in self.line.tickets

    def could_start(self, ticket: Ticket) -> bool:
        """Whether devices that would do were free at the last look: maybe its turn is now."""
        return self.line.free_for(ticket.request) > 0

    # Steps of the above.

    def _sync(self) -> InventorySnapshot:
        """Bring the line up to date with the store."""
        look: InventorySnapshot = self.look()
        now = self.clock()
        if self.clock_version != self.line.clock_version:
            self.line.clock_version = self.clock_version
            if self.line.synced:
                self.line.begin_anew(self.settings.queue.make_scheduler())
        self.store.run(lambda connection: self.line.sync(connection, look, now))
        return look

    def _decide(self, planned: int = 0) -> Decision:
        """What the scheduler says now; nobody starts while granting is paused. ``planned``: of
        how many in line the planned start is of interest, and then why others are held back."""
        self._sync()
        if closures.GRANTING in self.line.closed or self.line.empty:
            return Decision()
        now = _seconds(self.clock())
        free = self.line.supply.free
        return self.line.scheduler.decide(now, free, planned=planned, reasons=planned > 0)

    def _tickets(self, ids: Sequence[str]) -> list[Ticket]:
        return [self.line.tickets[ticket_id] for ticket_id in ids]

    def _stand(
        self, waiting: Sequence[Ticket], decision: Decision, now: float
    ) -> dict[str, Standing]:
        """The standings of all that wait, first next."""
        found = {}
        why_of = self._reasons()
        latest = self._latest(waiting, decision)
        estimates = self._estimates(waiting, decision, latest, now)
        for place, ticket in enumerate(waiting, start=1):
            planned = decision.planned.get(ticket.id)
            found[ticket.id] = Standing(
                place=place,
                of=len(waiting),
                why=why_of(ticket.request, decision.held_back.get(ticket.id, "")),
                estimate=estimates.get(ticket.id),
                planned=datetime.fromtimestamp(planned, timezone.utc) if planned else None,
                certain=ticket.id in latest,
            )
        return found

    def _latest(self, waiting: Sequence[Ticket], decision: Decision) -> dict[str, float]:
        """The planned starts that no session without an end can put off."""
        running = self.line.scheduler.running
        found: dict[str, float] = {}
        with self.line.lock:
            if any(lease.ends_at is None for lease in running.values()):
                return found
        for ticket in waiting:
            if ticket.id in decision.planned:
                found[ticket.id] = decision.planned[ticket.id]
            if ticket.seconds is None or ticket.id not in decision.planned:
                break
        return found

    def _estimates(
        self,
        waiting: Sequence[Ticket],
        decision: Decision,
        latest: Mapping[str, float],
        now: float,
    ) -> dict[str, Estimate]:
        """When they will probably start; of who is held back by a limit nobody can say."""
        found: dict[str, Estimate] = {}
        if closures.GRANTING in self.line.closed:
            return found
        ahead = Ahead()
        for some in _batches(waiting):
            # Whoever asks for a GPU meanwhile need not wait for all of them.
            with self.line.lock:
                there = self.line.scheduler.waiting
                walk = [there[ticket.id] for ticket in some if ticket.id in there]
                found |= self.line.expected.estimates(walk, ahead, latest, now)
        return {name: found[name] for name in found if name not in decision.held_back}

    def _reasons(self) -> Callable[[Request, str], str]:
        """What a request waits for, given the limit that holds it back, if one does."""
        if paused := self.line.closed.get(closures.GRANTING):
            text = f"the GPUs to be given out again ({paused.reason or 'maintenance'})"
            return lambda request, held_back: text

        @cache
        def why(request: Request, held_back: str) -> str:
            text = waits_for(request, self.line.free_for(request))
            return f"{text} ({held_back})" if held_back else text

        return why


def _seconds(at: datetime) -> float:
    return at.timestamp()


def _batches(waiting: Sequence[Ticket]) -> Iterator[Sequence[Ticket]]:
    return (waiting[start : start + AT_ONCE] for start in range(0, len(waiting), AT_ONCE))


OUTLOOK_FRESH_SECONDS = 2.0
"""Seconds for which one look at the line serves everybody who reads a page."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """How a request would fare that was made at this moment."""

    free: int
    """Devices that suit it and could be given right now."""
    total: int
    """Those and the ones in use."""
    at_once: bool
    """Whether it would start at once: enough are free, and nobody waits for them."""
    ahead: int = 0
    """Devices that others wait for, of those that suit it."""
    likely: timedelta | None = None
    """How long it would probably wait, where enough others have waited to learn from."""
    most: timedelta | None = None
    """How long at most, where all sessions that it would wait for have an end."""


class Outlooks(Places):
    """The part of the broker that tells what a request would meet."""

    _outlooks: tuple[float, dict[Request, Outlook]] = (-math.inf, {})

    def outlooks(self, requests: Mapping[str, Request]) -> dict[str, Outlook]:
        """How each request, by any name, would fare; at most some seconds old."""
        now = self.clock().timestamp()
        since, known = self._outlooks
        if not 0 <= now - since < OUTLOOK_FRESH_SECONDS:
            since, known = now, {}
        # Environments that need the same share one answer.
        wanted = {
            name: replace(request, environment="") if request.environment else request
            for name, request in requests.items()
        }
        missing = set(wanted.values()) - known.keys()
        if missing:
            known = known | self._look_ahead(missing, now)
            self._outlooks = (since, known)
        return {name: known[request] for name, request in wanted.items()}

    def must_fit(self, request: Request) -> None:
        """Raises TooMuchAsked when a request could never be granted, however long it waits."""
        look = self.look()
        must_run(request, look.inventory)
        with suppress(NoDeviceFree):  # it would fit, were it not for what runs there now
            look.fleet.choose(request, frozenset())

    # Steps of the above.

    def _look_ahead(self, requests: set[Request], now: float) -> dict[Request, Outlook]:
        with self.line.lock:
            self._sync()
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
        paused = closures.GRANTING in self.line.closed
        enough = any(given.get(kind, 0) >= request.devices for kind in kinds)
        if enough and not ahead and not paused:
            return Outlook(free, total, at_once=True)
        if paused:
            return Outlook(free, total, at_once=False, ahead=ahead)
        most = self._ends(kinds, ahead + request.devices - free, now)
        newcomer = Waiting(
            id="", member="", devices=request.devices, kinds=kinds, asked_at=now
        )  # fmt: skip
        estimate = self.line.expected.guess(newcomer, ahead, now, most)
        return Outlook(
            free,
            total,
            at_once=False,
            ahead=ahead,
            likely=_wait(estimate, now),
            most=_in(most, now),
        )

    def _ends(self, kinds: frozenset[str], wanted: int, now: float) -> float | None:
        """By when so many devices of these kinds come back, if ends of sessions promise it."""
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


def _wait(estimate: Estimate | None, now: float) -> timedelta | None:
    return None if estimate is None else _in(estimate.likely, now)


def _in(moment: float | None, now: float) -> timedelta | None:
    return None if moment is None else timedelta(seconds=max(0.0, moment - now))
