"""The rounds of the accounting service, their supervision, and the watchdog of its event loop."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

from ..core.errors import (
    AnotherHubGrants,
    EngineUnavailable,
    GPUSpawnerError,
    Unavailable,
    UnknownTicket,
)
from ..db.leader import for_log
from ..engines.base import Engine, EngineWithHistory, EngineWithJobs
from ..leases.clock_corrections import clock_says
from ..leases.models import Lease, LeaseKind, LeaseState, ServerRef, Sighting
from ..leases.reconciliation import Action, Confirm, HubState, Release, Remove, Unknown
from ..queue.models import Ticket
from ..services import Services
from .hub_client import HubClient, StartAnswer

PAUSES = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Seconds before a duty is restarted, after its first failure, its second and so on."""

SETTLED_SECONDS = 600.0
"""A duty that ran this long before it failed is restarted after the first pause."""


@dataclass(slots=True)
class DutyState:
    """The state of one duty since the service started."""

    is_running: bool = False
    failures: int = 0
    last_error: str = ""


class Supervisor:
    """Runs duties side by side. No duty ends another one, and none ends unnoticed."""

    def __init__(self, log: logging.Logger, pauses: Sequence[float] = PAUSES) -> None:
        self._log = log
        self._pauses = pauses
        self.states: dict[str, DutyState] = {}
        """Every duty that was started and has more to do, by name."""

    async def keep(self, name: str, start: Callable[[], Awaitable[object]]) -> None:
        """Run the duty that ``start`` makes until it returns; start it again whenever it raises."""
        state = self.states.setdefault(name, DutyState())
        now = asyncio.get_running_loop().time
        in_a_row = 0
        while True:
            state.is_running, began = True, now()
            try:
                await start()
                del self.states[name]
                return
            except Exception as error:
                state.failures += 1
                state.last_error = f"{type(error).__name__}: {error}"
                in_a_row = 1 if now() - began > SETTLED_SECONDS else in_a_row + 1
                pause = self._pauses[min(in_a_row, len(self._pauses)) - 1]
                message = "The duty %r failed, and starts again in %g s"
                self._log.error(message, name, pause, exc_info=error)
            finally:
                state.is_running = False
            await asyncio.sleep(pause)


HANGS_SECONDS = 30.0
"""An event loop that did not respond for this long is considered hung."""

STEP_SECONDS = 1.0
"""Seconds between two checks of the event loop."""

EXIT_STATUS = 70
"""The exit status of a service that ended itself: EX_SOFTWARE."""


class Watchdog:
    """Checks from a thread that the event loop still answers."""

    def __init__(self, loop: asyncio.AbstractEventLoop, log: logging.Logger) -> None:
        """Create it in the thread of the event loop."""
        self._loop = loop
        self._log = log
        self._watched = threading.get_ident()
        self._answered = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def _watch(self) -> None:
        # Steps are counted, not time: a machine that slept does not have a hung event loop.
        missed = 0
        self._ask()
        while not self._stopped.wait(STEP_SECONDS):
            # For code that never lets another thread run, such as a long regular expression match.
            with suppress(AttributeError, OSError, RuntimeError, ValueError):  # no file to print to
                faulthandler.dump_traceback_later(4 * HANGS_SECONDS, exit=True)
            if self._answered.is_set():
                missed = 0
                self._ask()
            else:
                missed += 1
                if missed * STEP_SECONDS >= HANGS_SECONDS:
                    self._end()
        faulthandler.cancel_dump_traceback_later()

    def _ask(self) -> None:
        self._answered.clear()
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._answered.set)

    def _end(self) -> None:
        frame = sys._current_frames().get(self._watched)
        stack = "".join(traceback.format_stack(frame)) if frame else "unknown\n"
        self._log.critical(
            "The event loop did not respond for %g s. The service ends itself with status %d, and "
            "its supervisor starts it again. Its main thread was here:\n%s",
            HANGS_SECONDS,
            EXIT_STATUS,
            stack,
        )
        for handler in self._log.handlers:
            handler.flush()
        os._exit(EXIT_STATUS)


THE_HUB_FIRST = 3.0
"""Seconds in which the Hub itself can end tickets without a spawn.

It knows which spawns were stopped while the database was away, and who was renamed or removed.
"""

TICKET_DAYS = 14
"""Days after which a waiting ticket expires."""

AT_ONCE = 50
"""Spawns requested at once: the Hub handles each in some hundredths of a second."""


class SpawnResumer:
    """Ensures that a spawn waits for every ticket; the ticket's server identifies it."""

    def __init__(self, services: Services, hub: HubClient, log: logging.Logger) -> None:
        self.services = services
        self.hub = hub
        self.log = log

    async def resume(self, servers: Collection[ServerRef], pause: float = 0.0) -> int:
        """Start the spawn of every ticket whose server the Hub does not have, and return how many.

        Tickets that waited too long, or whose member is gone, end with that reason. ``pause``:
        seconds to wait first, for the Hub to end them. Raises Unavailable if the Hub does not
        answer; the next call tries the remaining tickets.
        """
        waiting = await self._not_expired(await self.services.run(self.services.queue.waiting))
        waiting = [ticket for ticket in waiting if ticket.server.kind is LeaseKind.SERVER]
        missing = [ticket for ticket in waiting if ticket.server not in servers]
        if missing and pause:
            await asyncio.sleep(pause)
            still = {ticket.id for ticket in await self.services.run(self.services.queue.waiting)}
            missing = [ticket for ticket in missing if ticket.id in still]
        gate = asyncio.Semaphore(AT_ONCE)

        async def start(ticket: Ticket) -> None:
            async with gate:
                await self._start(ticket)

        for error in await asyncio.gather(*map(start, missing), return_exceptions=True):
            if error is not None:
                raise error
        return len(missing)

    async def _not_expired(self, waiting: list[Ticket]) -> list[Ticket]:
        now = self.services.clock()
        kept = []
        for ticket in waiting:
            if now - ticket.created_at < timedelta(days=TICKET_DAYS):
                kept.append(ticket)
            else:
                await self._end(ticket, "expired", f"it waited for {TICKET_DAYS} days")
        return kept

    async def _start(self, ticket: Ticket) -> None:
        started = await self.hub.start_server(ticket.server, ticket.options)
        if started is StartAnswer.NO_MEMBER:
            await self._end(ticket, "member_gone", "the member was removed or renamed")
        elif started is StartAnswer.REFUSED:
            await self._end(ticket, "refused", "the Hub no longer starts this server")
        else:
            self.log.info("Ticket %s: %s keeps waiting", ticket.id, ticket.server)

    async def _end(self, ticket: Ticket, outcome: str, reason: str) -> None:
        try:
            await self.services.run(self.services.queue.end_ticket, ticket.id, outcome, reason)
        except UnknownTicket as error:  # only if somebody cleaned the database meanwhile
            raise Unavailable(error.message) from error
        self.log.info("Ticket %s of %s ended: %s", ticket.id, ticket.server, reason)


PORTION = 200
"""Maximum leases charged in one transaction."""

OWNED = 1.0
"""Seconds for which one check of the database's owner serves every duty."""

BETWEEN_PORTIONS = 0.02
"""Seconds in which others can write."""

Round = tuple[float, str, Callable[[], Awaitable[object]]]
"""Seconds between two rounds of a duty, its name, and its work."""


class Sightings(Mapping[str, Sequence[Sighting] | None]):
    """What the engines run. An engine is queried once, when it is first needed.

    The leases are read before the engines are queried. So if a running lease has no server in here,
    its server is gone: it existed before the query, which did not find it. Lookups block: use a
    thread.
    """

    def __init__(self, engines: Mapping[str, Engine], leases: Collection[Lease]) -> None:
        self._engines = engines
        self._leases = leases
        self.found: dict[str, Sequence[Sighting] | None] = {}
        """What was queried so far."""
        self.errors: dict[str, EngineUnavailable] = {}
        """The errors of engines that did not respond."""

    def __getitem__(self, name: str) -> Sequence[Sighting] | None:
        if name not in self.found:
            engine = self._engines[name]
            try:
                found = engine.sightings()
                if isinstance(engine, EngineWithHistory):
                    found += engine.removed(self._leases, found)
                self.found[name] = found
            except EngineUnavailable as error:
                self.errors[name] = error
                self.found[name] = None
        return self.found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)


@dataclass(slots=True)
class Tick:
    """One round of each duty. Rounds of one duty never overlap: the caller awaits them."""

    services: Services
    hub: HubClient
    engines: Mapping[str, Engine]
    """Every available engine, by name."""
    log: logging.Logger
    start_grace_seconds: float = 60.0
    """A server younger than this is not ended just because the Hub does not list it."""
    charge_seconds: float = 60.0
    """Seconds between two charges of a running lease; each lease has its own moment."""
    hub_name: str = ""
    """Our Hub's name in the leader lock; empty if it did not start us."""
    rounds: Counter[str] = field(default_factory=Counter)
    """How many rounds each duty has finished since the process started, including failed ones."""
    _owned_at: float = float("-inf")
    _resumed: bool = False
    _stuck: set[str] = field(default_factory=set)
    """Log messages about leases that wait for an admin."""
    _trouble: dict[str, str] = field(default_factory=dict)

    async def keep_clock(self) -> None:
        """Detect steps of the wall clock. Raises Unavailable while a step is in doubt."""
        verdict = await self.services.run(self.services.clock_corrections.keep)
        if verdict is None:
            return
        if verdict.event in ("followed", "back"):
            self.log.warning("%s", clock_says(verdict))
        if verdict.offset.step:
            raise Unavailable(clock_says(verdict))

    async def charge(self) -> None:
        """Charge every running lease that is due, in portions between which others can write."""
        every = timedelta(seconds=self.charge_seconds)
        while (
            await self.services.run(self.services.ledger.charge_portion, every, PORTION) >= PORTION
        ):
            await asyncio.sleep(BETWEEN_PORTIONS)

    @property
    def charge_pause(self) -> float:
        """Seconds between two checks for leases to charge, so that each charges a few."""
        return min(self.charge_seconds, max(1.0, self.charge_seconds / 60))

    # Comparing store, engines and Hub.

    async def reconcile(self) -> list[Action]:
        """Adopt running servers, settle leases of lost servers, end servers without owners.

        Raises AnotherHubGrants while another hub grants from this store: our Hub knows nothing of
        its servers and its queue, and they are not ours.
        """
        await self._require_owner()
        # The Hub is asked first: a server that starts after its answer was pending in it, or its
        # lease is too young to be touched.
        servers = await self._servers()
        await self._resume(servers)
        leases = await self.services.run(self.services.leases.open_leases)
        servers = await self._with_missing(servers, leases)
        recent = await self.services.run(self.services.leases.of_account, None)
        names = {lease.engine for lease in (*leases, *recent)}
        asked = {name: engine for name, engine in self.engines.items() if name in names}
        sightings = Sightings(asked, leases)
        grace = self.start_grace_seconds
        actions = await asyncio.to_thread(
            self.services.leases.reconcile, sightings, servers, grace_seconds=grace
        )
        for name in asked:
            self._note_engine(name, sightings.errors.get(name))
        await self._end_jobs(sightings)
        stuck = set()
        for action in actions:
            match action:
                case Confirm(lease):
                    self.log.info("Lease %s of %s adopted: it runs", lease.id, lease.server)
                case Release(lease, _, reason):
                    self.log.info("Lease %s of %s settled: %s", lease.id, lease.server, reason)
                case Unknown(lease, reason, is_stuck=True):
                    stuck.add(part := f"Lease {lease.id} of {lease.server}")
                    self.trouble(part, EngineUnavailable(f"it stays: {reason}"))
                case Unknown(lease, reason):
                    self.log.debug("Lease %s of %s left: %s", lease.id, lease.server, reason)
                case Remove():
                    await self._remove(action)
        for part in self._stuck - stuck:
            self.well(part)
        self._stuck = stuck
        with self.going_on("Scheduler", Unavailable):
            # Unused allocations end there, and devices closed here stay closed there.
            await self.services.run(self.services.delegation.end_deserted)
            await self.services.run(self.services.machines.keep_closed)
        return actions

    async def _end_jobs(self, sightings: Sightings) -> None:
        """End the jobs of servers whose container has exited.

        Those of runs end as soon as their exit status is recorded.
        """
        for name, engine in self.engines.items():
            if not isinstance(engine, EngineWithJobs):
                continue
            for sighting in sightings.found.get(name) or ():
                exited = sighting.alive and sighting.exit_code is not None
                if exited and sighting.server.kind is LeaseKind.SERVER:
                    with self.going_on(f"Job of {sighting.server}", Unavailable):
                        await asyncio.to_thread(engine.end_job, sighting)

    async def _require_owner(self) -> None:
        """Raise AnotherHubGrants or NotTheOwner if leases and tickets are not this hub's."""
        holder = await self.services.run(self.services.granter.holder)
        if self.hub_name and holder not in ("", self.hub_name):
            raise AnotherHubGrants()
        await self.services.run(self.services.granter.require_owner)

    async def _servers(self) -> dict[ServerRef, HubState] | None:
        try:
            servers = await self.hub.servers()
            if await self.services.run(self.services.runs.are_active):
                starting = await self.hub.starting_runs()
                servers |= dict.fromkeys(starting, HubState.PENDING)
        except Unavailable as error:
            self.trouble("Hub", error)
            return None
        self.well("Hub")
        return servers

    async def _resume(self, servers: Collection[ServerRef] | None) -> None:
        """Start the missing spawns of tickets, if the Hub lost them."""
        if servers is None:
            return
        pause = THE_HUB_FIRST if self._resumed else 0.0  # a new Hub ends no tickets
        with self.going_on("Line", Unavailable):
            await SpawnResumer(self.services, self.hub, self.log).resume(servers, pause)
            self._resumed = True

    async def _with_missing(
        self, servers: dict[ServerRef, HubState] | None, leases: Collection[Lease]
    ) -> dict[ServerRef, HubState] | None:
        """Add servers with a lease that the paged list missed while others stopped."""
        if servers is None:
            return None
        found = dict(servers)
        known = {x.server for x in leases if x.server.kind is LeaseKind.SERVER}
        # The Hub's servers all have leases. One without may belong to a member who was renamed
        # there, and then the Hub writes the new name into its lease.
        is_renaming = any(
            state is HubState.READY for ref, state in servers.items() if ref not in known
        )
        for server in known - set(servers):
            try:
                if state := await self.hub.server(server):
                    found[server] = state
                elif is_renaming and not await self.hub.has_member(server.user):
                    found[server] = HubState.PENDING
            except Unavailable as error:
                self.trouble("Hub", error)
                return None
        return found

    async def _remove(self, action: Remove) -> None:
        """End a server, unless the Hub knows it after all."""
        sighting = action.sighting
        with self.going_on(f"End of {sighting.ref}", Unavailable):
            lease = await self.services.run(self.services.leases.get, sighting.lease_id)
            # Its labels are not enough proof: the store decides.
            is_server = lease.server.kind is LeaseKind.SERVER
            is_open = lease.state is not LeaseState.ENDED
            if is_open and is_server and await self.hub.server(lease.server):
                return
            await asyncio.to_thread(self.engines[action.engine].end, sighting)
            self.log.warning(
                "Ended %s of %s (%s): %s",
                sighting.ref[:12],
                sighting.server,
                action.engine,
                action.reason,
            )

    # Rounds of any duty.

    async def every(self, seconds: float, part: str, work: Callable[[], Awaitable[object]]) -> None:
        """Run rounds for ever, one after the other, so that they never overlap."""
        while True:
            await asyncio.sleep(seconds)
            await self.round(part, work)

    async def round(self, part: str, work: Callable[[], Awaitable[object]]) -> None:
        """Run one round. If it fails, the next one still follows."""
        try:
            if time.monotonic() - self._owned_at >= OWNED:
                await self._require_owner()
                self._owned_at = time.monotonic()
            await work()
        except AnotherHubGrants as error:
            self.trouble(part, type(error)(for_log(error)))
        except Exception as error:
            self.trouble(part, error)
        else:
            self.well(part)
        self.rounds[part] += 1

    # Log messages about parts that are not responding: one when it begins, one when it ends.

    @contextmanager
    def going_on(self, part: str, expected: type[Exception] = GPUSpawnerError) -> Iterator[None]:
        """Log an expected error of the block once, and go on; log once more when all is well."""
        try:
            yield
        except expected as error:
            self.trouble(part, error)
        else:
            self.well(part)

    def trouble(self, part: str, error: Exception) -> None:
        """Log once that a part is not responding, with a traceback if that is unexpected."""
        trace = not isinstance(error, GPUSpawnerError)
        said = f"{type(error).__name__}: {error}" if trace else str(error)
        if self._trouble.get(part) != said:
            self._trouble[part] = said
            line = " ".join(said.split())  # one record per line, for searching the log
            self.log.warning("%s: %s", part, line, exc_info=error if trace else None)

    def well(self, part: str) -> None:
        """Log once that a part answers again."""
        if self._trouble.pop(part, None) is not None:
            self.log.info("%s: all is well again", part)

    def _note_engine(self, name: str, error: EngineUnavailable | None) -> None:
        part = f"Engine {name}"
        if error is None:
            self.well(part)
            return
        why = f" ({error.__cause__})" if error.__cause__ else ""
        said = f"it is not responding{why}; its leases stay as they are until it does"
        self.trouble(part, EngineUnavailable(said))


class TickDuty:
    """A duty of the service in rounds; ``poke`` is called when a notice is ready to be sent."""

    def __init__(self, tick: Tick, poke: Callable[[], None] = lambda: None) -> None:
        self.tick = tick
        self.services = tick.services
        self.log = tick.log
        self.poke = poke
