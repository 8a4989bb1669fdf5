"""The duties for sessions: warnings, ends, and ordered stops.

What is due is read from the store every time, so a service that was killed continues where it was:
a warning is given once, and an order is carried out until the server is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from traitlets import Float, List
from traitlets.config import LoggingConfigurable

from ..leases.models import Lease, LeaseState
from .worker import Tick, TickDuty

AT_ONCE = 10
"""How many stops are requested from the Hub at the same time."""

AGAIN = 10.0
"""Seconds after which the Hub is asked again for a stop that it accepted."""

LONGEST_PAUSE = 60.0
"""Maximum seconds between two tries, however often it failed."""


class GPUSessions(LoggingConfigurable):
    """Warnings before a session ends."""

    warn_minutes = List(
        Float(min=0.0),
        default_value=[30.0, 10.0, 2.0],
        config=True,
        help="""
        Minutes before the end of a session at which its member is warned, once each.

        Example::

            c.GPUSessions.warn_minutes = [60, 10]
        """,
    )


@dataclass(slots=True)
class Stop:
    """One order, as far as this process carried it out."""

    task: asyncio.Task[None] | None = None
    tries: int = 0
    not_before: float = 0.0
    """When the Hub may be asked again, by the event loop's clock."""

    @property
    def under_way(self) -> bool:
        """True while the Hub is being asked."""
        return self.task is not None and not self.task.done()


class SessionDuty(TickDuty):
    """Rounds of this duty, one after the other; stops run beside them."""

    def __init__(
        self, tick: Tick, *, warn_minutes: Sequence[float], poke: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(tick, poke)
        self.warn_minutes = tuple(warn_minutes)
        self._stops: dict[str, Stop] = {}
        self._gate = asyncio.Semaphore(AT_ONCE)

    async def round(self) -> None:
        """Give due warnings, end sessions that are over, and carry out the stops."""
        due = await self.services.run(self.services.sessions.due_sessions, self.warn_minutes)
        for lease in due.warn:
            if await self.services.run(
                self.services.sessions.warn_session, lease.id, self.warn_minutes
            ):
                self.poke()
                end = lease.ends_at
                self.log.info("%s was told that its session ends at %s", lease.server, end)
        stops = list(due.stop)
        for lease in due.over:
            if ended := await self.services.run(self.services.sessions.end_session, lease.id):
                self.poke()
                stops.append(ended)
        self._carry_out(stops)

    async def close(self) -> None:
        """Leave everything as it is: the next service continues."""
        tasks = [stop.task for stop in self._stops.values() if stop.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _carry_out(self, ordered: Sequence[Lease]) -> None:
        now = asyncio.get_running_loop().time()
        wanted = {lease.id for lease in ordered}
        for gone in [name for name, stop in self._stops.items() if name not in wanted]:
            if not self._stops[gone].under_way:
                del self._stops[gone]
        for lease in ordered:
            stop = self._stops.setdefault(lease.id, Stop())
            if not stop.under_way and now >= stop.not_before:
                stop.task = asyncio.ensure_future(self._stop(lease, stop))

    async def _stop(self, lease: Lease, stop: Stop) -> None:
        part = f"Stop of {lease.server}"
        async with self._gate:
            pause = AGAIN
            try:
                known = await self._ask(lease)
            except Exception as error:  # whatever went wrong, it is tried again
                self.tick.trouble(part, error)
                stop.tries += 1
                pause = min(LONGEST_PAUSE, 2.0 ** min(stop.tries, 10))
            else:
                stop.tries = 0
                self.tick.well(part)
                if known is False:
                    # The lease is settled when an engine proves the end, and not before.
                    self.log.warning(
                        "%s is to be stopped, but the Hub does not have it", lease.server
                    )
            stop.not_before = asyncio.get_running_loop().time() + pause

    async def _ask(self, lease: Lease) -> bool | None:
        """Ask the Hub; returns True if it has the server, None if that is gone meanwhile."""
        # The member may have started another one with this name since the round began.
        newest = await self.services.run(self.services.leases.get, lease.id)
        if newest.state is LeaseState.ENDED:
            return None
        known = await self.tick.hub.stop_server(lease.server)
        if known:
            self.log.warning("Stopping %s: %s", lease.server, newest.end_reason)
        return known
