"""Where tickets stand: their places in line, what they wait for, and when they will start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import cache

from ..model import Request, Ticket
from ..scheduler import Ahead, Decision, Estimate, Ranked
from ..store import closures
from .delegating import Delegating
from .line import Line
from .standing import Standing, waits_for
from .watch import Look

PLANNED = 8
"""Tickets, the first in line, that are told when they start at the latest."""

FRESH = 1.0
"""Seconds for which places and estimates serve everybody who asks, if nothing changes."""


AT_ONCE = 200
"""Tickets that are estimated before others may have the line."""


class Places(Delegating):
    """The part of the broker that knows the line."""

    line: Line
    _standings: tuple[tuple[int, float], dict[str, Standing]] = ((-1, 0.0), {})

    def standings(self) -> dict[str, Standing]:
        """Where every ticket stands: place, reason and estimate, by ticket id."""
        if self.delegate is not None:
            return self._delegated_standings()
        with self.line.lock:
            decision = self._decide(PLANNED)
            now = _seconds(self.clock())
            revision, since = self._standings[0]
            if revision == self.line.revision and 0 <= now - since < FRESH:
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

    def _sync(self) -> Look:
        """Bring the line up to date with the store."""
        look: Look = self.look()
        now = self.clock()
        if self.clock_version != self.line.clock_version:
            self.line.clock_version = self.clock_version
            if self.line.synced:
                self.line.begin_anew(self.make_scheduler())
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
