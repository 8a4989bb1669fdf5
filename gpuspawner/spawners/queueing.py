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
from functools import partial
from typing import Any

from ..broker import Broker, Standing, Terms
from ..errors import (
    AnotherHubGrants,
    GPUSpawnerError,
    GrantingPaused,
    MemberGone,
    NoDeviceFree,
    Refused,
    TicketEnded,
    UnknownTicket,
)
from ..model import Lease, LeaseState, Request, ServerRef, Ticket

ROUND = 1.0
"""Seconds after which the line is looked at all the same: others change the store too."""

CHECKED = 20
"""How many waiters are looked at in each round, one after the other: whether they may still
have what they wait for. At their turn everybody is."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A spawn of this hub that waits for its turn."""

    ticket: Ticket
    turn: asyncio.Future[Lease]
    check: Callable[[], Terms]
    """On which terms the member would ask now. Raises Refused when they may not any more."""
    tell: Callable[[str], None]
    unsure: bool = False
    """Nobody could say whether the member may still have it: no turn until somebody can."""


class Queueing:
    """All spawns of this hub that wait."""

    def __init__(self, broker: Broker, log: logging.Logger | Any) -> None:
        self.broker = broker
        self.log = log
        self._waiters: dict[str, Waiter] = {}
        self._ending: dict[str, Callable[[], Ticket]] = {}
        """Tickets whose end is to be written as soon as the database answers."""
        self._wake = asyncio.Event()
        self._rounds: asyncio.Task[None] | None = None
        self._checked = 0
        self._trouble = ""

    async def ask(
        self, server: ServerRef, request: Request, *, engine: str, terms: Terms
    ) -> Lease | Ticket:
        """A lease, or the ticket to :meth:`wait` with."""
        asked = self.broker.run(self.broker.ask, server, request, engine=engine, terms=terms)
        return await asked

    async def wait(
        self, ticket: Ticket, check: Callable[[], Terms], tell: Callable[[str], None]
    ) -> Lease:
        """The lease, when the turn has come. Raises Refused when the ticket ends otherwise.

        Cancelling leaves the ticket where it is: whoever stops the server ends it, and a hub
        that shuts down does not.
        """
        turn: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        waiter = self._waiters[ticket.id] = Waiter(ticket, turn, check, tell)
        self._ending.pop(ticket.id, None)  # its member is back before the end was written
        self.kick()
        try:
            place = await self.broker.run(self.broker.place_of, ticket.id)
            if place and not turn.done():
                tell(f"You are number {place} in line.")
            return await turn
        finally:
            if self._waiters.get(ticket.id) is waiter:
                del self._waiters[ticket.id]

    async def end(self, ticket_id: str, outcome: str, reason: str, *, tell: bool = True) -> None:
        """Take a ticket out of the line: now, or when the database answers again."""
        end = self.broker.end_ticket
        self._ending[ticket_id] = partial(end, ticket_id, outcome, reason, tell=tell)
        try:
            await self._end_tickets()
        except GPUSpawnerError as error:
            self._note(error)
        self.kick()

    async def remove(self, user: str) -> bool:
        """End every wait of a member who is being removed. Whether there was any."""
        mine = [w for w in self._waiters.values() if w.ticket.server.user == user]
        for waiter in mine:
            await self._refuse(waiter, MemberGone(why="the member was removed"))
        return bool(mine)

    def kick(self) -> None:
        """Something has changed: look at the line now."""
        self._wake.set()
        if self._busy and (self._rounds is None or self._rounds.done()):
            self._rounds = asyncio.ensure_future(self._run())

    @property
    def _busy(self) -> bool:
        return bool(self._waiters or self._ending)

    async def _run(self) -> None:
        while self._busy:
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
        await self._end_tickets()
        if not await self.broker.run(self.broker.granter.take):
            raise AnotherHubGrants()
        await self._look_at_members()
        present = frozenset(i for i, waiter in self._waiters.items() if not waiter.unsure)
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

    async def _end_tickets(self) -> None:
        for ticket_id, end in list(self._ending.items()):
            with suppress(UnknownTicket):
                await self.broker.run(end)
            if self._ending.get(ticket_id) is end:
                del self._ending[ticket_id]

    # Members who are gone, or may not have any more what they wait for.

    async def _look_at_members(self) -> None:
        waiters = list(self._waiters.values())
        first = self._checked if self._checked < len(waiters) else 0
        self._checked = first + CHECKED
        for waiter in waiters[first : self._checked]:
            await self._may_still(waiter)

    async def _may_still(self, waiter: Waiter) -> bool:
        """Whether the member may still have it; who may not is told, and loses the place."""
        if waiter.turn.done():
            return False
        try:
            terms = waiter.check()
        except Refused as error:
            await self._refuse(waiter, error)
            return False
        except GPUSpawnerError as error:  # such as a catalog that cannot be read just now
            waiter.unsure = True
            self._note(error)
            return False
        except Exception as error:  # out of an admin's own function
            if not waiter.unsure:
                who = waiter.ticket.server
                self.log.error("What %s may have cannot be told", who, exc_info=error)
            waiter.unsure = True
            return False
        waiter.unsure = False
        standing = self.broker.standing_of(terms.groups)
        if standing != (waiter.ticket.group, waiter.ticket.priority):
            regroup = self.broker.regroup
            waiter.ticket = await self.broker.run(regroup, waiter.ticket.id, *standing)
        return True

    async def _refuse(self, waiter: Waiter, error: GPUSpawnerError) -> None:
        """End a wait, with the reason written in the ticket."""
        if waiter.turn.done():
            return
        outcome = "member_gone" if isinstance(error, MemberGone) else "refused"
        reason = str(error.fields["why"]) if isinstance(error, TicketEnded) else error.message
        await self.end(waiter.ticket.id, outcome, reason)
        _fail(waiter, error)

    # Turns, and ends that others made.

    async def _start(self, waiter: Waiter) -> None:
        """Give a waiter its turn, unless its member may not have it any more."""
        if not await self._may_still(waiter):
            return
        try:
            lease = await self.broker.run(self.broker.start_ticket, waiter.ticket.id)
        except (NoDeviceFree, GrantingPaused):
            return  # the database knew better; it waits on
        except TicketEnded:
            await self._ended(waiter)
        except Refused as error:
            _fail(waiter, error)
        else:
            await self._hand_over(waiter, lease)

    async def _ended(self, waiter: Waiter) -> None:
        """It is not in line any more: say why, or hand over what it was granted.

        A database that was cut off may have written a grant without our hearing of it.
        """
        try:
            ticket = await self.broker.run(self.broker.ticket, waiter.ticket.id)
        except UnknownTicket as error:
            _fail(waiter, error)
            return
        if ticket.outcome == "granted" and ticket.lease_id:
            await self._hand_over(waiter, await self.broker.run(self.broker.lease, ticket.lease_id))
        elif ticket.outcome:
            _fail(waiter, TicketEnded(why=ticket.end_reason.rstrip(".")))

    async def _hand_over(self, waiter: Waiter, lease: Lease) -> None:
        if lease.state is LeaseState.ENDED:
            _fail(waiter, TicketEnded(why="its devices were taken back"))
        elif waiter.turn.done():
            # It was stopped meanwhile: nobody is there to start anything on these devices.
            gone = "the start was cancelled"
            await self.broker.run(self.broker.release, lease.id, reason=gone)
        else:
            waiter.turn.set_result(lease)

    def _tell(self, waiter: Waiter, standing: Standing) -> None:
        waiter.tell(standing.sentence(self.broker.clock()))

    def _note(self, error: GPUSpawnerError) -> None:
        if error.message != self._trouble:
            self._trouble = error.message
            self.log.warning("The line waits: %s", error.message)


def _fail(waiter: Waiter, error: GPUSpawnerError) -> None:
    if not waiter.turn.done():
        waiter.turn.set_exception(error)
