"""Tickets that an external scheduler decides: submits them and grants what it allocates.

A ticket is stored before it is submitted, and its id is its only name at the other scheduler.
Whichever process crashes in between, the next round finds the ticket on both sides, or submits it
again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass

import sqlalchemy as sa
from traitlets import Bool, Unicode
from traitlets.config import LoggingConfigurable

from ..core.errors import GPUSpawnerError, GrantingPaused, NoDeviceFree, Unavailable
from ..db.clock import Timekeeper
from ..db.engine import Store
from ..devices.placement import PlacementIndex
from ..devices.service import DeviceService, closed_devices
from ..engines.base import Engine
from ..engines.images import Connect
from ..leases import repository as leases_repository
from ..leases.models import Lease, LeaseState
from ..leases.service import slots_beside
from ..slurm.accounts import Admission
from ..slurm.cluster import read_cluster
from ..slurm.engine import SlurmEngine
from ..slurm.images import WantedImage, reach
from ..slurm.programs import Slurm
from ..slurm.scheduler import SlurmDelegate
from . import repository
from .models import Delegate, RankedTicket, ScorePart, Ticket, Turn
from .rank import QueuePosition, waits_for
from .state import QueueState


class GPUSlurm(LoggingConfigurable):
    """The cluster that Slurm schedules."""

    cluster_file = Unicode(
        config=True,
        help="""
        The file with the nodes of a cluster that Slurm schedules, as ``gpuspawner slurm config``
        writes it. Empty: the hub uses the GPUs of its own machine.

        Example::

            c.GPUSlurm.cluster_file = "/etc/gpuspawner/cluster.yaml"
        """,
    )

    jobs_of_members = Bool(
        True,
        config=True,
        help="""
        Run each server's Slurm job as its member's own user on the nodes. On by default. This needs
        a hub that runs as root. If it is off, all jobs belong to the hub's user, and Slurm's fair
        share and limits see a single member.

        Example::

            c.GPUSlurm.jobs_of_members = False
        """,
    )


LEAST = 0.05
"""Minimum seconds between two looks at the queue, however much happens."""

ASKING = 8
"""How many threads may request devices from an external scheduler at once."""

ROUND = 5.0
"""Seconds that a reconciliation of store and engines may take.

One query of the external scheduler's jobs serves all of it.
"""


def make_delegate(
    settings: GPUSlurm, admit: Callable[[Ticket], Admission], log: logging.Logger
) -> SlurmDelegate | None:
    """Create the client of the external scheduler, or return None if none is configured.

    ``admit`` gives the ticket's member an account there before the ticket is submitted. Raises
    ConfigError.
    """
    if not settings.cluster_file:
        return None
    cluster = read_cluster(settings.cluster_file)
    slurm = Slurm(conf=cluster.slurm_conf)
    if not settings.jobs_of_members:
        return SlurmDelegate(cluster, slurm, as_member=False, log=log)
    return SlurmDelegate(cluster, slurm, before=admit, log=log)


@dataclass(frozen=True, slots=True)
class ExternalRound:
    """What the external scheduler decided about the waiting tickets."""

    granted: tuple[Turn, ...] = ()
    """Tickets that got devices, earliest first."""
    refused: tuple[Turn, ...] = ()
    """Tickets that it gave up; ``over`` says why."""
    missing: tuple[Ticket, ...] = ()
    """Tickets that it does not know, or that may be submitted once more."""


@dataclass(eq=False)
class DelegationService:
    """Talks to the external scheduler, if there is one.

    If ``delegate`` is None, only the methods that mention that case may be called.
    """

    store: Store
    clock: Timekeeper
    delegate: Delegate | None
    _: KW_ONLY
    line: QueueState
    devices: DeviceService
    log: logging.Logger

    def __post_init__(self) -> None:
        self._said: Mapping[str, Turn] = {}
        self._asking: ThreadPoolExecutor | None = None
        self._troubles: Mapping[str, str] = {}
        """Recent reasons why tickets could not be submitted, by ticket id."""

    @property
    def asking(self) -> ThreadPoolExecutor:
        """The threads that request devices.

        Slow external submissions run in their own pool, so that they never delay the stop of a
        server.
        """
        if self.delegate is None:
            return self.store.ask_executor
        if self._asking is None:
            self._asking = ThreadPoolExecutor(ASKING, thread_name_prefix="gpuspawner-asking")
        return self._asking

    def engine(self) -> Engine | None:
        """Return the engine for servers whose devices the external scheduler allocates, if any."""
        if isinstance(self.delegate, SlurmDelegate):
            return SlurmEngine(self.delegate, self.log)
        return None

    def engines_elsewhere(self) -> dict[str, Connect]:
        """Return connections to the Docker Engines of the cluster's other machines, by name."""
        if not isinstance(self.delegate, SlurmDelegate):
            return {}
        return {node.name: reach(node) for node in self.delegate.cluster.nodes}

    def name_images(self, image_of: Callable[[Ticket], str]) -> None:
        """Let a process that submits nothing also name the image that a ticket waits for.

        ``image_of`` returns the image that a ticket's server needs; empty if unknown.
        """
        if isinstance(self.delegate, SlurmDelegate):
            images = self.delegate.images
            images.wanted = lambda ticket: WantedImage(name) if (name := image_of(ticket)) else None

    def next_look(self, most: float) -> float:
        """Return the seconds, at most ``most``, after which the queue may have changed."""
        return most if self.delegate is None else min(most, max(LEAST, self.delegate.soon()))

    def next_round(self) -> ExternalRound:
        """Fetch what the external scheduler decided, and return devices that are closed here.

        Raises Unavailable.
        """
        delegate = self._other()
        with self.line.lock:
            self._see_line()
            waiting = list(self.line.tickets.values())
            deserted = self.line.deserted()
            closed, paused = self.line.closed, bool(self.line.paused)
        self._said = said = delegate.turns()
        self.devices.machines.keep_closed(closed)
        delegate.tend(waiting, paused=paused)
        if paused:
            return ExternalRound()
        shut = delegate.drained().union(closed_devices(closed))
        granted, refused, missing = [], [], []
        for ticket in waiting:
            turn = said.get(ticket.id)
            if ticket.id in deserted:
                if turn and not turn.over:  # it occupies what others wait for
                    delegate.cancel(ticket.id)
            elif turn is None or turn.again:
                if delegate.is_missing(ticket):
                    missing.append(ticket)
            elif turn.over:
                refused.append(turn)
            elif turn.got_none:
                self._give_back(ticket, "no GPU by a mistake of the scheduler")
            elif shut.intersection(turn.uuids):
                where = self.devices.machines.machine_of(turn.uuids[0])
                self._give_back(ticket, f"GPUs of {where}, which is closed")
            elif turn.uuids:
                granted.append(turn)
        granted.sort(key=lambda turn: (turn.since or self.clock(), turn.ticket_id))
        return ExternalRound(tuple(granted), tuple(refused), tuple(missing))

    def submit(self, ticket: Ticket) -> None:
        """Submit a ticket. If nobody answers, the next round tries again.

        Raises Refused if it can never be served.
        """
        if self.line.paused:
            return  # it would occupy devices that nobody may use
        try:
            self._other().submit(ticket)
        except Unavailable as error:
            if self._troubles.get(ticket.id) != error.reason:  # log it once, not every second
                self.log.warning("Ticket %s is not handed over yet: %s", ticket.id, error.message)
            self._troubles = {ticket.id: error.reason, **dict(list(self._troubles.items())[:99])}
        else:
            self._troubles = {k: v for k, v in self._troubles.items() if k != ticket.id}

    def require_free(self, ticket: Ticket) -> None:
        """Raise NoDeviceFree for a request that must not wait.

        That is if others wait already, or if everything suitable is in use.
        """
        look = self.devices.look()
        with self.line.lock:
            self._see_line()
            said = (self._said.get(ticket_id) for ticket_id in self.line.tickets)
            others = sum(turn is not None and turn.place > 0 for turn in said)
        if paused := self.line.paused:
            raise GrantingPaused(why=paused.reason or "maintenance")
        look.fleet.choose(ticket.request, self.store.run(leases_repository.places_taken))
        if others:
            who = "1 server waits" if others == 1 else f"{others} servers wait"
            sentence = f"{who} for a GPU before you. Start without a GPU, or wait in the queue."
            raise NoDeviceFree(sentence, waiting=others)

    def allotted(self, ticket: Ticket, fleet: PlacementIndex) -> tuple[Turn, frozenset[str]]:
        """Return the ticket's allocation and the slots on all other devices.

        Raises NoDeviceFree if it has no allocation at the moment.
        """
        turn = self._said.get(ticket.id)
        if turn is None or not turn.uuids or turn.over:
            raise NoDeviceFree()
        return turn, slots_beside(turn.uuids, fleet)

    def standings(self) -> dict[str, QueuePosition]:
        """Return the standing of every ticket according to the external scheduler."""
        with self.line.lock:
            self._see_line()
            waiting = list(self.line.tickets.values())
        with suppress(Unavailable):  # else the last known standings stay
            self._said = self._other().turns()
        return {ticket.id: self._standing(ticket) for ticket in waiting}

    def _standing(self, ticket: Ticket) -> QueuePosition:
        turn = self._said.get(ticket.id)
        paused = self.line.paused
        request = ticket.request
        why = waits_for(request, self.line.free_for(request), self.line.asked(request), paused)
        if turn is None or turn.over:
            reason = "" if paused else self._other().why_not_yet(ticket) or self._trouble(ticket)
            why = f"{why} ({reason or 'about to be handed over'})"
            return QueuePosition(place=1, of=1, why=why)
        place = max(1, turn.place)
        if paused:
            return QueuePosition(place=place, of=max(place, turn.of), why=why)
        why = f"{why} ({turn.why})" if turn.why else why
        return QueuePosition(place=place, of=max(1, turn.of), why=why, planned=turn.start)

    def _trouble(self, ticket: Ticket) -> str:
        """Return why a ticket was not submitted, for its member; empty if no attempt failed."""
        if ticket.id not in self._troubles:
            return ""
        who = self._other().engine.capitalize()
        return f"{who} is not responding; the hub retries until it does"

    def order(self) -> list[tuple[Ticket, RankedTicket, QueuePosition]]:
        """Return the queue in the order of the external scheduler, first to start first."""
        standings = self.standings()
        found = []
        with self.line.lock:
            for ticket in self.line.tickets.values():
                turn = self._said.get(ticket.id)
                score = turn.score if turn else 0.0
                parts = (ScorePart(self._other().engine, score, "what the order goes by there"),)
                ranked = RankedTicket(ticket.id, standings[ticket.id].place, score, parts)
                found.append((ticket, ranked, standings[ticket.id]))
        return sorted(found, key=lambda each: (each[1].place, each[0].created_at))

    # What the external scheduler holds for us, and whose server is gone.

    def end_deserted(self) -> list[str]:
        """Cancel what was submitted for tickets that ended and servers that are gone.

        Returns the ids of the tickets. Raises Unavailable.
        """
        if self.delegate is None:
            return []
        said = {name for name, turn in self.delegate.turns(ROUND).items() if not turn.over}

        def find_lost(connection: sa.Connection) -> list[str]:
            # In one transaction: between two, a ticket could become a lease and be in neither.
            needed = {lease.ticket_id for lease in leases_repository.open_leases(connection)}
            needed |= {ticket.id for ticket in repository.waiting_tickets(connection)}
            # What was never a ticket of ours belongs to another hub on the same cluster.
            return sorted(
                ticket.id for ticket in repository.some_tickets(connection, said - needed)
            )

        lost = self.store.run(find_lost)
        for ticket_id in lost:
            self.log.warning("Nobody waits with ticket %s: taking it back", ticket_id)
            self.delegate.cancel(ticket_id)
        return lost

    def take_back(self, ticket_id: str | None, engine: str) -> None:
        """Cancel a ticket whose wait ended or whose server is gone.

        If nobody answers now, :meth:`end_deserted` cancels it later.
        """
        if self.delegate is None or not ticket_id or engine != self.delegate.engine:
            return
        try:
            self.delegate.cancel(ticket_id)
        except GPUSpawnerError as error:
            self.log.warning("Ticket %s is taken back later: %s", ticket_id, error.message)

    def extend(self, lease: Lease) -> None:
        """Extend a session at the external scheduler too. Raises Refused or Unavailable."""
        if self.delegate is None or lease.engine != self.delegate.engine or not lease.ticket_id:
            return
        if lease.seconds is not None and lease.state is not LeaseState.ENDED:
            self.delegate.extend(lease.ticket_id, lease.seconds + lease.extended)

    def _give_back(self, ticket: Ticket, what: str) -> None:
        """Return an allocation that is of no use: the ticket waits for another one."""
        with self.line.lock:
            if ticket.id not in self.line.tickets:
                return  # it was granted meanwhile
        self.log.warning("Ticket %s got %s: it waits on", ticket.id, what)
        self._other().decline(ticket.id)

    def _see_line(self) -> None:
        look, now = self.devices.look(), self.clock()
        self.store.run(lambda connection: self.line.sync(connection, look, now))

    def _other(self) -> Delegate:
        if self.delegate is None:
            raise RuntimeError(
                "this hub schedules its devices itself: there is no external scheduler"
            )
        return self.delegate
