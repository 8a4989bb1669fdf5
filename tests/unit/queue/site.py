"""A small site for tests of the scheduler: devices, a clock, sessions that end when they said."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

from gpuspawner.core.units import DeviceCount
from gpuspawner.queue.models import Decision, RunningLease, WaitingTicket
from gpuspawner.queue.scheduler import Scheduler

T0 = 1_700_000_000.0
HOUR = 3600.0
DAY = 24 * HOUR


def ticket(
    name: str, devices: int = 1, kinds: str = "a", at: float = T0, **more: Any
) -> WaitingTicket:
    """One that waits; each letter of ``kinds`` is a kind."""
    more = {"member": f"member of {name}", "seconds": HOUR, **more}
    return WaitingTicket(id=name, devices=devices, kinds=frozenset(kinds), asked_at=at, **more)


def lease(name: str, held: Mapping[str, DeviceCount], at: float = T0, **more: Any) -> RunningLease:
    """One that runs; without ``ends_at`` its end is not known."""
    return RunningLease(
        id=name, held=held, started_at=at, **{"member": f"member of {name}", **more}
    )


def scheduler_of(
    *tickets: WaitingTicket, capacity: Mapping[str, int], **settings: Any
) -> Scheduler:
    """A scheduler of so many devices of each kind, with these tickets."""
    scheduler = Scheduler(**settings)
    scheduler.set_capacity(capacity)
    for each in tickets:
        scheduler.submit(each)
    return scheduler


def kinds_of(decision: Decision) -> dict[str, str]:
    """The kind that each start gets its devices from; several are joined."""
    return {name: " ".join(held) for name, held in decision.takes.items()}


class Site:
    """Runs what a scheduler starts. Real: the scheduler; sessions are entries of a heap."""

    def __init__(self, scheduler: Scheduler, devices: Mapping[str, int], now: float = T0) -> None:
        self.scheduler = scheduler
        self.devices = dict(devices)
        self.free: dict[str, DeviceCount] = dict(devices)
        self.now = now
        self.started_at: dict[str, float] = {}
        self._ends: list[tuple[float, str]] = []
        scheduler.set_capacity(devices)

    def decide(self) -> Decision:
        """What the scheduler says now."""
        return self.scheduler.decide(self.now, self.free)

    def start(
        self, name: str, held: Mapping[str, DeviceCount], lasts: float, known: bool = True
    ) -> None:
        """Give a ticket its devices; ``lasts`` is how long it keeps them."""
        waiting = self.scheduler.waiting[name]
        for kind, count in held.items():
            self.free[kind] -= count
            assert self.free[kind] >= 0, "given twice"
        heapq.heappush(self._ends, (self.now + lasts, name))
        self.started_at[name] = self.now
        ends_at = self.now + lasts if known else None
        who = {"member": waiting.member, "group": waiting.group}
        self.scheduler.started(lease(name, held, self.now, ends_at=ends_at, **who))

    def step(self, lasts: Mapping[str, float] | None = None, known: bool = True) -> Decision:
        """Decide, and start what the decision says. ``lasts``: how long tickets really last."""
        decision = self.decide()
        for name in decision.starts:
            seconds = (lasts or {}).get(name) or self.scheduler.waiting[name].seconds or HOUR
            self.start(name, decision.takes[name], seconds, known)
        return decision

    def go_to(self, now: float) -> None:
        """Time passes; sessions end."""
        while self._ends and self._ends[0][0] <= now:
            at, name = heapq.heappop(self._ends)
            for kind, count in self.scheduler.running[name].held.items():
                self.free[kind] += count
            self.scheduler.ended(name, at)
        self.now = now

    @property
    def next_end(self) -> float | None:
        """When the next session ends."""
        return self._ends[0][0] if self._ends else None
