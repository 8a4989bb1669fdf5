"""Waiting goes on after a restart of the hub: the spawns of its tickets are started again.

A spawn finds its ticket by its server, and so its place in line. Whoever is gone loses theirs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from datetime import timedelta

from ..broker import Broker
from ..errors import Unavailable, UnknownTicket
from ..model import ServerRef, Ticket
from .hub import Hub, Started

THE_HUB_FIRST = 3.0
"""Seconds that the Hub has to write down itself what became of a ticket without a spawn: who
stopped it while the database was away, who was renamed and who removed."""

AT_ONCE = 50
"""Spawns asked for at once: the Hub takes each one up in some hundredths of a second."""


class Resuming:
    """Sees to it that every ticket has a spawn that waits with it."""

    def __init__(self, broker: Broker, hub: Hub, log: logging.Logger) -> None:
        self.broker = broker
        self.hub = hub
        self.log = log

    async def resume(self, servers: Collection[ServerRef], pause: float = 0.0) -> int:
        """Start the spawn of every ticket whose server the Hub does not have. How many.

        Tickets that waited too long, or whose member is gone, end with their reason. ``pause``:
        seconds to wait before, for the Hub to end them. Raises Unavailable when the Hub does
        not answer; what was not reached is tried again.
        """
        waiting = await self._not_expired(await self.broker.run(self.broker.waiting))
        missing = [ticket for ticket in waiting if ticket.server not in servers]
        if missing and pause:
            await asyncio.sleep(pause)
            still = {ticket.id for ticket in await self.broker.run(self.broker.waiting)}
            missing = [ticket for ticket in missing if ticket.id in still]
        gate = asyncio.Semaphore(AT_ONCE)

        async def start(ticket: Ticket) -> None:
            async with gate:
                await self._start(ticket)

        done = await asyncio.gather(*map(start, missing), return_exceptions=True)
        for error in done:
            if isinstance(error, BaseException):
                raise error
        return len(missing)

    async def _not_expired(self, waiting: list[Ticket]) -> list[Ticket]:
        days = self.broker.ticket_days
        now = self.broker.clock()
        kept = []
        for ticket in waiting:
            if now - ticket.created_at < timedelta(days=days):
                kept.append(ticket)
            else:
                await self._end(ticket, "expired", f"it waited for {days} days")
        return kept

    async def _start(self, ticket: Ticket) -> None:
        started = await self.hub.start_server(ticket.server, ticket.options)
        if started is Started.NO_MEMBER:
            await self._end(ticket, "member_gone", "the member was removed or renamed")
        elif started is Started.REFUSED:
            await self._end(ticket, "refused", "the Hub does not start this server any more")
        else:
            self.log.info("Ticket %s: %s waits on", ticket.id, ticket.server)

    async def _end(self, ticket: Ticket, outcome: str, reason: str) -> None:
        try:
            await self.broker.run(self.broker.end_ticket, ticket.id, outcome, reason)
        except UnknownTicket as error:  # only if somebody cleaned the database meanwhile
            raise Unavailable(error.message) from error
        self.log.info("Ticket %s of %s ended: %s", ticket.id, ticket.server, reason)
