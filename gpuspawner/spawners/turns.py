"""Spawns that wait in the queue: each turn is handed to the spawn that waits for it.

Tickets live in the store; this module knows which spawn of this process waits with which ticket.
After a restart of the hub, the accounting service starts the spawns again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from ..core.aio import within
from ..core.errors import (
    AnotherHubGrants,
    GPUSpawnerError,
    GrantingPaused,
    MemberGone,
    NoDeviceFree,
    Refused,
    TicketEnded,
    TooMuchAsked,
    UnknownTicket,
)
from ..core.units import format_price
from ..db.leader import for_log
from ..devices.slots import describe_share
from ..leases.models import Lease, LeaseState, Request, ServerRef, Terms
from ..queue.models import Ticket
from ..queue.rank import QueuePosition
from ..services import Services
from .form import templates
from .progress import SpawnProgress, local_time

ROUND = 1.0
"""Seconds after which the queue is checked anyway, because others change the store too."""

REST = 4.0
"""The pause between two checks of the queue, as a multiple of the last check's duration."""

AT_ONCE = 50
"""Members who are told their position before the event loop may do other work."""

CHECKED = 20
"""Waiters checked per round, in rotation: may they still have what they wait for? Each is also
checked at its turn."""


class StartsWithoutGPU(Refused):
    """Its member chose to start without a GPU, and not to wait any longer."""


@dataclass(slots=True, eq=False)
class PendingSpawn:
    """A spawn of this hub that waits for its turn."""

    ticket: Ticket
    turn: asyncio.Future[Lease]
    check: Callable[[], Terms]
    """Returns the member's current terms. Raises Refused if they may no longer have the request."""
    said: SpawnProgress
    unsure: bool = False
    """True if the last check had no result: the waiter gets no turn until a check succeeds."""
    without_gpu: bool = False
    """True if the member chose to start without a GPU: the ticket's end is not the spawn's."""


class TurnDispatcher:
    """All spawns of this hub that wait in the queue."""

    def __init__(self, services: Services, log: logging.Logger | Any) -> None:
        self.services = services
        self.log = log
        self.looks = 0
        """How often the queue was checked, including failed attempts."""
        self._waiters: dict[str, PendingSpawn] = {}
        self._ending: dict[str, Callable[[], Ticket]] = {}
        """Functions, by ticket id, that end a ticket as soon as the database answers."""
        self._wake = asyncio.Event()
        self._rounds: asyncio.Task[None] | None = None
        self._checked = 0
        self._trouble = ""

    def ask(
        self, server: ServerRef, request: Request, *, engine: str, terms: Terms, said: SpawnProgress
    ) -> asyncio.Future[Lease | Ticket]:
        """Begin to ask for a lease; the result is one, or a ticket to :meth:`wait` with.

        The thread that writes the result to the store also reports it to ``said``, since the
        event loop may be busy with a thousand others.
        """

        def ask() -> Lease | Ticket:
            got = self.services.queue.ask(server, request, engine=engine, terms=terms)
            if isinstance(got, Lease):
                said.say(what_you_got(got), 10)
            elif place := self.services.positions.place_of(got.id):
                _tell(said, f"You are number {place} in the queue.")
            return got

        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self.services.delegation.asking, ask)

    async def wait(self, ticket: Ticket, check: Callable[[], Terms], said: SpawnProgress) -> Lease:
        """Return the lease when the turn has come. Raises Refused if the ticket ends otherwise.

        Cancelling leaves the ticket in the queue: stopping the server ends it, and a hub that
        shuts down does not.
        """
        turn: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        waiter = self._waiters[ticket.id] = PendingSpawn(ticket, turn, check, said)
        self._ending.pop(ticket.id, None)  # the member is back before the end was written
        if self.services.positions.could_start(ticket):
            self._wake.set()
        self._go_on()
        try:
            return await turn
        finally:
            if self._waiters.get(ticket.id) is waiter:
                del self._waiters[ticket.id]

    async def end(self, ticket_id: str, outcome: str, reason: str, *, tell: bool = True) -> None:
        """Remove a ticket from the queue, now or as soon as the database answers again."""

        def is_wanted() -> bool:  # the member may be back while this waits for the database
            return self._ending.get(ticket_id) is end

        end = partial(
            self.services.queue.end_ticket,
            ticket_id,
            outcome,
            reason,
            tell=tell,
            is_wanted=is_wanted,
        )
        self._ending[ticket_id] = end
        try:
            await self._end_tickets()
        except GPUSpawnerError as error:
            self._note(error)
        self.kick()

    async def stop_waiting(self, ticket_id: str) -> None:
        """End the wait of a spawn that goes on without a GPU.

        Nothing changes for one that no longer waits. Raises StoreUnavailable.
        """
        waiter = self._waiters.get(ticket_id)
        if waiter is None:
            return
        # Said before: the round may see the end first.
        waiter.without_gpu = True
        await self.end(ticket_id, "cancelled", "the server was started without a GPU", tell=False)
        await self._ended(waiter)  # or it was granted a moment ago: then it starts with its GPU

    async def remove(self, user: str) -> bool:
        """End all waits of a member who is being removed. Return True if there was one."""
        mine = [w for w in self._waiters.values() if w.ticket.server.user == user]
        for waiter in mine:
            await self._refuse(waiter, MemberGone(why="the member was removed"))
        return bool(mine)

    def kick(self) -> None:
        """Check the queue now, because something has changed."""
        self._wake.set()
        self._go_on()

    def _go_on(self) -> None:
        is_busy = self._waiters or self._ending
        if is_busy and (self._rounds is None or self._rounds.done()):
            self._rounds = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while self._waiters or self._ending:
            self._wake.clear()
            began = time.monotonic()
            try:
                await self._round()
                self._trouble = ""
            except GPUSpawnerError as error:
                self._note(error)
            except Exception:
                self.log.exception("The queue could not be checked; trying again")
            finally:
                self.looks += 1
            # Checking a long queue takes a while, and the hub has other work to do.
            rest = min(ROUND, REST * (time.monotonic() - began))
            await asyncio.sleep(rest)
            pause = max(0.0, self.services.delegation.next_look(ROUND) - rest)
            with suppress(asyncio.TimeoutError):
                await within(pause, self._wake.wait())

    async def _round(self) -> None:
        await self._end_tickets()
        if not await self.services.run(self.services.granter.take):
            raise AnotherHubGrants()
        await self._look_at_members()
        present = frozenset(i for i, waiter in self._waiters.items() if not waiter.unsure)
        for ticket_id in await self.services.run(self.services.queue.turns, present):
            if waiter := self._waiters.get(ticket_id):
                await self._start(waiter)
        for ticket_id, waiter in list(self._waiters.items()):
            if not waiter.turn.done() and not self.services.positions.in_line(ticket_id):
                await self._ended(waiter)
        await self.services.run(self.services.positions.store_estimates)
        await self._tell_readers()

    async def _tell_readers(self) -> None:
        watched = {i: waiter.said for i, waiter in self._waiters.items() if waiter.said.followed}
        if not watched:
            return
        told = await self.services.read(self._positions, list(watched))
        for number, (ticket_id, (sentence, card)) in enumerate(told.items(), start=1):
            waiter = self._waiters.get(ticket_id)
            if waiter and not waiter.turn.done():
                _tell(waiter.said, sentence, card)
            if not number % AT_ONCE:
                await asyncio.sleep(0)  # let the hub do other work

    def _positions(self, ticket_ids: list[str]) -> dict[str, tuple[str, str]]:
        """Return the sentence and the card of each ticket."""
        standings, now = self.services.positions.standings(), self.services.clock()
        found = {i: standings[i] for i in ticket_ids if i in standings}
        return {i: (its.sentence(now), queue_card(its, now)) for i, its in found.items()}

    async def _end_tickets(self) -> None:
        for ticket_id, end in list(self._ending.items()):
            with suppress(UnknownTicket):
                await self.services.run(end)
            if self._ending.get(ticket_id) is end:
                del self._ending[ticket_id]

    # Members who are gone, or may no longer have what they wait for.

    async def _look_at_members(self) -> None:
        waiters = list(self._waiters.values())
        first = self._checked if self._checked < len(waiters) else 0
        self._checked = first + CHECKED
        for waiter in waiters[first : self._checked]:
            await self._may_still(waiter)
            await asyncio.sleep(0)

    async def _may_still(self, waiter: PendingSpawn) -> bool:
        """Return True if the member may still have what they wait for; a refusal ends the wait."""
        if waiter.turn.done():
            return False
        try:
            terms = waiter.check()
        except Refused as error:
            await self._refuse(waiter, error)
            return False
        except GPUSpawnerError as error:  # such as a catalog that currently cannot be read
            waiter.unsure = True
            self._note(error)
            return False
        except Exception as error:  # raised by an admin's own function
            if not waiter.unsure:
                who = waiter.ticket.server
                self.log.error("Cannot check what %s may have", who, exc_info=error)
            waiter.unsure = True
            return False
        waiter.unsure = False
        if changes := self.services.queue.regrouped(waiter.ticket, terms.groups):
            regroup = self.services.queue.regroup
            try:
                waiter.ticket = await self.services.run(regroup, waiter.ticket.id, changes)
            except TooMuchAsked as error:
                await self._refuse(waiter, error)
                return False
        return True

    async def _refuse(self, waiter: PendingSpawn, error: GPUSpawnerError) -> None:
        if waiter.turn.done():
            return
        outcome = "member_gone" if isinstance(error, MemberGone) else "refused"
        reason = str(error.fields["why"]) if isinstance(error, TicketEnded) else error.message
        await self.end(waiter.ticket.id, outcome, reason)
        _fail(waiter, error)

    # Turns, and tickets that others ended.

    async def _start(self, waiter: PendingSpawn) -> None:
        """Give a waiter its turn, unless its member may no longer have it."""
        if not await self._may_still(waiter):
            return
        try:
            lease = await self.services.run(self.services.queue.start_ticket, waiter.ticket.id)
        except (NoDeviceFree, GrantingPaused):
            return  # the store has newer data, so the ticket waits on
        except TicketEnded:
            await self._ended(waiter)
        except Refused as error:
            _fail(waiter, error)
        else:
            await self._hand_over(waiter, lease)

    async def _ended(self, waiter: PendingSpawn) -> None:
        """Handle a ticket that left the queue: tell why, or hand over what it was granted.

        If the connection to the database was lost, a grant may have been written unnoticed.
        """
        try:
            ticket = await self.services.run(self.services.queue.ticket, waiter.ticket.id)
        except UnknownTicket as error:
            _fail(waiter, error)
            return
        if ticket.outcome == "granted" and ticket.lease_id:
            lease = await self.services.run(self.services.leases.get, ticket.lease_id)
            await self._hand_over(waiter, lease)
        elif ticket.outcome and waiter.without_gpu:
            _fail(waiter, StartsWithoutGPU())
        elif ticket.outcome:
            _fail(waiter, TicketEnded(why=ticket.end_reason.rstrip(".")))

    async def _hand_over(self, waiter: PendingSpawn, lease: Lease) -> None:
        if lease.state is LeaseState.ENDED:
            _fail(waiter, TicketEnded(why="its devices were taken back"))
        elif waiter.turn.done():  # stopped meanwhile, so nothing will use these devices
            why = "the start was cancelled"
            await self.services.run(self.services.leases.release, lease.id, reason=why)
        else:
            waiter.turn.set_result(lease)

    def _note(self, error: GPUSpawnerError) -> None:
        said = for_log(error) if isinstance(error, AnotherHubGrants) else error.message
        if said != self._trouble:
            self._trouble = said
            self.log.warning("The queue cannot be served: %s", said)


class Acquisition:
    """How one server gets its leases: it asks, waits in the queue, and can be cancelled anytime."""

    def __init__(self, queueing: TurnDispatcher) -> None:
        self.queueing = queueing
        self._acquiring: asyncio.Future[Lease | Ticket] | None = None
        self._asked: asyncio.Future[Lease | Ticket] | None = None
        """The same, until the answer is taken."""
        self._left_ticket = ""
        """The ticket of a cancelled wait; stopping the server ends it."""
        self._left_server: ServerRef | None = None
        """The server whose ticket, if it has one, is left in the same way."""

    @property
    def was_begun(self) -> bool:
        """True if this hub's process, not an earlier one, has asked for a lease for the server."""
        return self._acquiring is not None

    @property
    def is_asked(self) -> bool:
        """True if a lease was asked for and the answer has not been taken."""
        return self._asked is not None

    def begin(self, asked: asyncio.Future[Lease | Ticket]) -> None:
        """Follow a request of :meth:`TurnDispatcher.ask`; :meth:`answer` returns its result."""
        self._left_ticket, self._left_server = "", None
        self._asked = self._acquiring = asked

    def leave(self, server: ServerRef) -> None:
        """Give up the ticket that the server may have from before a restart of the hub.

        Its start was cancelled before it asked for a lease. As after a cancelled wait, stopping the
        server ends the ticket.
        """
        self._left_server = server

    async def answer(self) -> Lease | Ticket:
        """Return the lease, or the ticket to :meth:`wait` with."""
        if self._asked is None:
            raise RuntimeError("nobody has asked for a lease")
        asked, self._asked = self._asked, None
        # The transaction ends even if this spawn is cancelled. What it granted is then released
        # by the hook after the stop or by this callback, whichever runs first.
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(self._give_back)
            raise

    async def wait(self, ticket: Ticket, check: Callable[[], Terms], said: SpawnProgress) -> Lease:
        """Return the lease when the turn has come; see :meth:`TurnDispatcher.wait`."""
        try:
            return await self.queueing.wait(ticket, check, said)
        except asyncio.CancelledError:
            # Cancelled by the member's stop, which ends the ticket, or by a shutdown of the hub,
            # which does not: the next hub continues with the ticket.
            self._left_ticket = ticket.id
            raise

    async def written(self) -> None:
        """Wait until the transaction of the last request has ended, successfully or not."""
        if self._acquiring is not None and not self._acquiring.done():
            await asyncio.wait([self._acquiring])

    async def leave_line(self) -> None:
        """Give up the place in the queue, because the member stopped the start."""
        await self.written()
        if self._asked is not None:  # stopped before the answer was taken
            self._give_back(self._asked)
            self._asked = None
        server, self._left_server = self._left_server, None
        if server is not None:
            services = self.queueing.services
            with suppress(GPUSpawnerError):  # then the accounting service starts the spawn again
                if earlier := await services.run(services.queue.ticket_of, server):
                    self._left_ticket = earlier.id
        ticket, self._left_ticket = self._left_ticket, ""
        if ticket:
            await self.queueing.end(ticket, "cancelled", "the start was stopped", tell=False)

    def _give_back(self, acquired: asyncio.Future[Lease | Ticket]) -> None:
        if acquired.cancelled() or acquired.exception():
            return
        got = acquired.result()
        if isinstance(got, Ticket):
            self._left_ticket = got.id
            return
        services = self.queueing.services
        give_back = partial(services.leases.release, got.id, reason="the start was cancelled")
        services.store.executor.submit(give_back)


def what_you_got(lease: Lease) -> str:
    """Describe a lease to its member."""
    if not lease.devices:
        return "A server without a GPU (free of charge)"
    named = ", ".join(
        f"A share of GPU {d.index} ({described})"
        if (described := describe_share(d))
        else f"GPU {d.index} ({d.model})"
        for d in lease.devices
    )
    return f"{named} is yours, {format_price(lease.rate)} credits an hour"


def queue_card(position: QueuePosition, now: datetime) -> str:
    """Return what the pending page shows of a waiting ticket, as HTML."""
    return templates.get_template("gpuspawner/queue_card.html").render(
        position=position, now=now, local_time=local_time
    )


def _tell(said: SpawnProgress, sentence: str, card: str = "") -> None:
    said.say(sentence, 5, replaces=True, queue=card)


def _fail(waiter: PendingSpawn, error: GPUSpawnerError) -> None:
    if not waiter.turn.done():
        waiter.turn.set_exception(error)
