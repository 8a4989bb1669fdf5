"""When those who wait will probably start, learned from all that the store remembers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from ..model import Lease
from ..scheduler import Ahead, Estimate, Estimator, Running, Waited, Waiting
from ..store.history import Start


def kind(model: str, memory_bytes: int) -> str:
    """The devices that are the same to every request."""
    return f"{model}/{memory_bytes}"


class Expected:
    """An :class:`Estimator` that hears of everything that its line hears of.

    Whoever uses it holds the lock of the line.
    """

    def __init__(self) -> None:
        self._estimator = Estimator()
        self._known: set[str] = set()
        """Tickets that wait, as far as the estimator was told."""

    def learn(self, starts: Iterable[Start]) -> None:
        """What started before this process looked at the store for the first time."""
        self._estimator.learn(
            Waited(
                asked_at=start.asked_at.timestamp(),
                started_at=start.granted_at.timestamp(),
                devices=start.devices,
                kinds=frozenset({kind(start.model, start.memory_bytes)}),
                group=start.group,
            )
            for start in starts
        )

    def asked(self, ticket: Waiting) -> None:
        """A ticket waits, or was changed."""
        self._known.add(ticket.id)
        self._estimator.asked(ticket)

    def granted(self, lease: Lease, held: Mapping[str, int]) -> None:
        """Devices were given out, with a ticket or without one."""
        self._known.discard(lease.ticket_id or "")
        self._estimator.started(
            Running(
                id=lease.id,
                member=lease.server.user,
                group=lease.group,
                held=dict(held),
                started_at=lease.granted_at.timestamp(),
                ticket_id=lease.ticket_id or "",
            )
        )

    def only(self, waiting: Iterable[str], now: datetime) -> None:
        """All other tickets wait no longer, and got nothing."""
        gone = self._known.difference(waiting)
        for ticket_id in gone:
            self._estimator.withdrawn(ticket_id, now.timestamp())
        self._known -= gone

    def guess(
        self, newcomer: Waiting, ahead: int, now: float, most: float | None
    ) -> Estimate | None:
        """The estimate of a ticket if it were asked for now, of which nothing is kept."""
        return self._estimator.guess(newcomer, now, ahead, most)

    def estimates(
        self, line: Sequence[Waiting], ahead: Ahead, latest: Mapping[str, float], now: float
    ) -> dict[str, Estimate]:
        """The estimates of the next tickets on a walk down the line, of which something can be
        said. ``latest``: by when some of them start for certain."""
        found = {}
        for ticket in line:
            most = latest.get(ticket.id)
            estimate = self._estimator.estimate(ticket.id, now, ahead.of(ticket), most)
            if estimate is not None:
                found[ticket.id] = estimate
        return found
