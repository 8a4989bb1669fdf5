"""Waiting in the spawn: one a hub, it hands every turn to the spawn that waits for it.

Tickets live in the store. What is here is only who waits for which in this process: after a
restart of the hub the accounting service starts the spawns again, and they find their tickets.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..broker import Broker, Standing, Terms
from ..errors import (
    GPUSpawnerError,
    GrantingPaused,
    NoDeviceFree,
    Refused,
    StoreUnavailable,
    TicketEnded,
)
from ..model import Lease, Request, ServerRef, Ticket

ROUND = 1.0
"""Seconds after which the line is looked at all the same: others change the store too."""


@dataclass(slots=True)
class Waiter:
    """A spawn of this hub that waits for its turn."""

    ticket: Ticket
    turn: asyncio.Future[Lease]
    check: Callable[[], None]
    """Raises a GPUSpawnerError when the member may not have this any more."""
    tell: Callable[[str], None]


class Queueing:
    """All spawns of this hub that wait."""

    def __init__(self, broker: Broker, log: logging.Logger | Any) -> None:
        self.broker = broker
        self.log = log
        self._waiters: dict[str, Waiter] = {}
        self._wake = asyncio.Event()
        self._rounds: asyncio.Task[None] | None = None
        self._trouble = ""

    async def ask(
        self, server: ServerRef, request: Request, *, engine: str, terms: Terms
    ) -> Lease | Ticket:
        """A lease, or the ticket to :meth:`wait` with."""
        asked = self.broker.run(self.broker.ask, server, request, engine=engine, terms=terms)
        return await asked

    async def wait(
        self, ticket: Ticket, check: Callable[[], None], tell: Callable[[str], None]
    ) -> Lease:
        """The lease, when the turn has come. Raises Refused when the ticket ends otherwise.

        Cancelling leaves the ticket where it is: whoever stops the server ends it, and a hub
        that shuts down does not.
        """
        turn: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._waiters[ticket.id] = Waiter(ticket, turn, check, tell)
        self.kick()
        try:
            place = await self.broker.run(self.broker.place_of, ticket.id)
            if place and not turn.done():
                tell(f"You are number {place} in line.")
            return await turn
        finally:
            del self._waiters[ticket.id]

    def kick(self) -> None:
        """Something has changed: look at the line now."""
        self._wake.set()
        if self._waiters and (self._rounds is None or self._rounds.done()):
            self._rounds = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while self._waiters:
            self._wake.clear()
            try:
                await self._round()
                self._trouble = ""
            except GPUSpawnerError as error:
                self._note(error)
            except Exception:
                self.log.exception("The line could not be looked at; it is tried again")
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), ROUND)

    async def _round(self) -> None:
        present = frozenset(self._waiters)
        for ticket_id in await self.broker.run(self.broker.turns, present):
            if waiter := self._waiters.get(ticket_id):
                await self._start(waiter)
        standings = await self.broker.run(self.broker.standings)
        for ticket_id, waiter in list(self._waiters.items()):
            if waiter.turn.done():
                continue
            if standing := standings.get(ticket_id):
                self._tell(waiter, standing)
            else:
                await self._ended(waiter)

    async def _start(self, waiter: Waiter) -> None:
        """Give a waiter its turn, unless its member may not have it any more."""
        if waiter.turn.done():
            return
        ticket = waiter.ticket.id
        try:
            waiter.check()
        except GPUSpawnerError as error:
            end = self.broker.end_ticket
            await self.broker.run(end, ticket, "refused", error.message)
            _fail(waiter, error)
            return
        try:
            lease = await self.broker.run(self.broker.start_ticket, ticket)
        except (NoDeviceFree, GrantingPaused):
            return  # the database knew better; it waits on
        except StoreUnavailable:
            raise
        except Refused as error:
            _fail(waiter, error)
            return
        if waiter.turn.done():
            # It was cancelled meanwhile: nobody is there to start anything on these devices.
            gone = "the start was cancelled"
            await self.broker.run(self.broker.release, lease.id, reason=gone)
        else:
            waiter.turn.set_result(lease)

    async def _ended(self, waiter: Waiter) -> None:
        """It is not in line any more: say why, or hand over what somebody granted."""
        ticket = await self.broker.run(self.broker.ticket, waiter.ticket.id)
        if ticket.outcome and not waiter.turn.done():
            _fail(waiter, TicketEnded(why=ticket.end_reason.rstrip(".")))

    def _tell(self, waiter: Waiter, standing: Standing) -> None:
        waiter.tell(standing.sentence(self.broker.clock()))

    def _note(self, error: GPUSpawnerError) -> None:
        if error.message != self._trouble:
            self._trouble = error.message
            self.log.warning("The line waits: %s", error.message)


def _fail(waiter: Waiter, error: GPUSpawnerError) -> None:
    if not waiter.turn.done():
        waiter.turn.set_exception(error)
