"""What somebody would get who asked now, told before they ask. Names nobody."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta

from ..errors import NoDeviceFree
from ..model import Request
from ..pool import must_run
from ..scheduler import Estimate, Waiting
from ..store import closures
from .places import Places

FRESH = 2.0
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
        if not 0 <= now - since < FRESH:
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
