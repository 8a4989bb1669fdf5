"""Tickets that an external scheduler decides: they are handed over, and its answers are granted.

The ticket is in the store before it is handed over, and carries the only name by which it is
known there. So whoever dies in between, the next round finds it on both sides, or hands it over
again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import sqlalchemy as sa
from traitlets import Bool, Float, Unicode
from traitlets.config import LoggingConfigurable

from ..base_service import Core
from ..core.errors import GPUSpawnerError, GrantingPaused, NoDeviceFree, Refused, Unavailable
from ..devices import closures
from ..devices.placement import Fleet, texts
from ..devices.service import closed_devices
from ..engines.base import Engine
from ..engines.images import Connect
from ..leases import repository as leases_repository
from ..leases.models import Lease, LeaseState, Slot
from ..slurm.cluster import Cluster, read_cluster
from ..slurm.engine import SlurmEngine
from ..slurm.images import WantedImage, reach
from ..slurm.programs import Controller, Slurm
from ..slurm.rest import Rest
from ..slurm.scheduler import SlurmDelegate
from . import repository
from .models import Delegate, Ranked, ScorePart, Ticket, Turn
from .standing import Standing, waits_for


class GPUSlurm(LoggingConfigurable):
    """The cluster that Slurm schedules, and the way to its controller."""

    cluster_file = Unicode(
        config=True,
        help="""
        The file with the nodes of a cluster that Slurm schedules, which ``gpuspawner slurm
        config`` writes; empty for the GPUs of this machine.

        Example::

            c.GPUSlurm.cluster_file = "/etc/gpuspawner/cluster.yaml"
        """,
    )

    jobs_of_members = Bool(
        True,
        config=True,
        help="""
        Whether a server's job in Slurm belongs to its member's own user on the nodes, which
        needs a hub that runs as root, or ``rest_url``. Else it belongs to the hub's user, and
        Slurm's fair share and limits know one member only.

        Example::

            c.GPUSlurm.jobs_of_members = False
        """,
    )

    rest_url = Unicode(
        config=True,
        help="""
        Where slurmrestd is, for a hub on a machine without Slurm: an ``https://`` address, or on
        the hub's own machine ``http://127.0.0.1:6820`` or ``unix:///PATH``. Empty to use Slurm's
        programs.

        Example::

            c.GPUSlurm.rest_url = "https://head.example.org:6820"
        """,
    )

    rest_token_file = Unicode(
        config=True,
        help="""
        The file with the token that slurmrestd asks for, as ``scontrol token`` writes it, which
        only the hub's user may read. It is read each time, so a new one needs no restart. Jobs of
        members need a token of SlurmUser; with ``jobs_of_members`` off, one of the user to whom all
        jobs belong will do.

        Example::

            c.GPUSlurm.rest_token_file = "/etc/gpuspawner/slurm.token"
        """,
    )

    rest_ca_file = Unicode(
        config=True,
        help="""
        The CA that signed the certificate of an ``https://`` ``rest_url``; empty for those that
        the machine trusts.

        Example::

            c.GPUSlurm.rest_ca_file = "/etc/gpuspawner/ca.pem"
        """,
    )

    sync_seconds = Float(
        60.0,
        min=1.0,
        config=True,
        help="""
        Seconds between two looks at a cluster: at who may use it, and at the jobs beside servers.
        What those cost does not depend on it.

        Example::

            c.GPUSlurm.sync_seconds = 300
        """,
    )

    def controller_of(self, cluster: Cluster) -> Controller:
        """What asks and tells the cluster's controller. Raises ConfigError."""
        programs = Slurm(conf=cluster.slurm_conf)
        if not self.rest_url:
            return programs
        return Rest(self.rest_url, self.rest_token_file, self.rest_ca_file, programs=programs)

    def has_programs(self) -> bool:
        """Whether Slurm's database can be asked, for which only its programs are used. Without
        slurmrestd they have to be here."""
        return not self.rest_url or shutil.which("sacctmgr") is not None


LEAST = 0.05
"""Seconds between two looks at the line, however much happens."""

ASKING = 8
"""Who may ask another scheduler for devices at once."""

ROUND = 5.0
"""Seconds that a comparison of store and engines may take: one look at the other side's jobs
serves all of it."""


class Delegating(Core):
    """The part of the broker that knows a scheduler beside its own. ``delegate`` is None where
    there is none, and nothing here is called then."""

    delegate: Delegate | None = None
    _said: Mapping[str, Turn] = {}
    _asking: ThreadPoolExecutor | None = None
    _troubles: Mapping[str, str] = {}
    """Why tickets were not handed over, by id: those of late."""

    def make_delegate(self) -> Delegate | None:
        """The scheduler that decides in our place, if one does. Raises ConfigError."""
        settings = self.settings.slurm
        if not settings.cluster_file:
            return None
        cluster = read_cluster(settings.cluster_file)
        slurm = settings.controller_of(cluster)
        if not settings.jobs_of_members or not settings.has_programs():
            return SlurmDelegate(cluster, slurm, as_member=settings.jobs_of_members, log=self.log)
        return SlurmDelegate(
            cluster, slurm, before=self.cluster_members.admit_to_cluster, log=self.log
        )

    @property
    def asking(self) -> ThreadPoolExecutor:
        """The threads for who asks for devices. Another scheduler may take its time over each:
        nobody who stops a server waits behind all who start one."""
        if self.delegate is None:
            return self.store.ask_executor
        if self._asking is None:
            self._asking = ThreadPoolExecutor(ASKING, thread_name_prefix="gpuspawner-asking")
        return self._asking

    def delegated_engine(self) -> Engine | None:
        """What runs the servers whose devices come from there."""
        if isinstance(self.delegate, SlurmDelegate):
            return SlurmEngine(self.delegate, self.log)
        return None

    def engines_elsewhere(self) -> dict[str, Connect]:
        """The Docker Engines of the machines that servers run on beside this one, by name."""
        if not isinstance(self.delegate, SlurmDelegate):
            return {}
        return {node.name: reach(node) for node in self.delegate.cluster.nodes}

    def name_images(self, image_of: Callable[[Ticket], str]) -> None:
        """From now on also tell who waits for an image, in a process that hands nothing over.
        ``image_of`` says which one a ticket's server needs; empty where it is not known."""
        if isinstance(self.delegate, SlurmDelegate):
            images = self.delegate.images
            images.wanted = lambda ticket: WantedImage(name) if (name := image_of(ticket)) else None

    def _ask_there(self, ticket: Ticket, *, wait: bool) -> Ticket:
        """A place in the line of the scheduler that decides in our place."""
        if not wait:
            self._must_be_free(ticket)
        with self.line.lock:
            ticket = self._enqueue(ticket)
        self._hand_over(ticket, tell=False)
        return ticket

    def next_look(self, most: float) -> float:
        """Seconds, at most so many, after which another look at the line may show something."""
        return most if self.delegate is None else min(most, max(LEAST, self.delegate.soon()))

    def _delegated_turns(self, present: frozenset[str]) -> list[str]:
        """The tickets that got devices and that a spawn waits with, the first of them first.
        Hands over those that were not; ends those that the other side gave up; gives back what
        nobody may have."""
        delegate = self._other()
        with self.line.lock:
            self._see_line()
            waiting = list(self.line.tickets.values())
            deserted = self.line.deserted()
            closed = self.line.closed
        paused = closures.GRANTING in closed
        self._said = said = delegate.turns()
        self.machines.keep_closed(closed)
        delegate.tend(waiting, paused=paused)
        if paused:
            return []
        shut = delegate.drained().union(closed_devices(closed))
        mine = []
        for ticket in waiting:
            turn = said.get(ticket.id)
            if ticket.id in deserted:
                if turn and not turn.over:  # it holds what others wait for
                    delegate.cancel(ticket.id)
            elif turn is None or turn.again:
                if delegate.is_missing(ticket):
                    with suppress(Refused):  # its member is told, and the others go on
                        self._hand_over(ticket, tell=True)
            elif turn.over:
                self.end_ticket(ticket.id, "refused", turn.over)
            elif shut.intersection(turn.uuids):
                self._give_back(ticket, turn)
            elif turn.uuids:
                mine.append(turn)
        mine.sort(key=lambda turn: (turn.since or self.clock(), turn.ticket_id))
        return [turn.ticket_id for turn in mine if turn.ticket_id in present]

    def _give_back(self, ticket: Ticket, turn: Turn) -> None:
        """A ticket got what is closed meanwhile, and nobody may have: it waits for others, and
        does not hold that. Raises Unavailable."""
        with self.line.lock:
            if ticket.id not in self.line.tickets:
                return  # it was granted before that was closed
        where = self.machines.machine_of(turn.uuids[0])
        self.log.warning("Ticket %s got GPUs of %s, which is closed: it waits on", ticket.id, where)
        self._other().decline(ticket.id)

    def _hand_over(self, ticket: Ticket, *, tell: bool) -> None:
        """Raises Refused, with the ticket ended, when it will never be served; what nobody
        answers to is tried again in the next round."""
        if closures.GRANTING in self.line.closed:
            return  # it would hold devices that nobody may have
        try:
            self._other().submit(ticket)
        except Unavailable as error:
            if self._troubles.get(ticket.id) != error.reason:  # said once, and not every second
                self.log.warning("Ticket %s is not handed over yet: %s", ticket.id, error.message)
            self._troubles = {ticket.id: error.reason, **dict(list(self._troubles.items())[:99])}
        except Refused as error:
            self.end_ticket(ticket.id, "refused", error.message, tell=tell)
            raise
        else:
            self._troubles = {k: v for k, v in self._troubles.items() if k != ticket.id}

    def _must_be_free(self, ticket: Ticket) -> None:
        """Raises NoDeviceFree for who does not want to wait, when somebody does already or all
        that suits is in use."""
        look = self.look()
        with self.line.lock:
            self._see_line()
            said = (self._said.get(ticket_id) for ticket_id in self.line.tickets)
            others = sum(turn is not None and turn.place > 0 for turn in said)
        if paused := self.line.closed.get(closures.GRANTING):
            raise GrantingPaused(why=paused.reason or "maintenance")
        look.fleet.choose(ticket.request, self.store.run(leases_repository.places_taken))
        if others:
            who = "1 server waits" if others == 1 else f"{others} servers wait"
            sentence = f"{who} for a GPU before you. Start without a GPU, or wait in line."
            raise NoDeviceFree(sentence, waiting=others)

    def _allotted(self, ticket: Ticket, fleet: Fleet) -> tuple[Turn, frozenset[str]]:
        """What a ticket got, and the places on all other devices. Raises NoDeviceFree when it
        has none just now."""
        turn = self._said.get(ticket.id)
        if turn is None or not turn.uuids or turn.over:
            raise NoDeviceFree()
        others = [device for device in fleet.devices if device.uuid not in turn.uuids]
        kept = texts(Slot(each.uuid, slot) for each in others for slot in range(each.slots))
        return turn, kept

    def _delegated_standings(self) -> dict[str, Standing]:
        """Where every ticket stands, as the other side says."""
        with self.line.lock:
            self._see_line()
            waiting = list(self.line.tickets.values())
        with suppress(Unavailable):  # then they stand as somebody last said
            self._said = self._other().turns()
        return {ticket.id: self._standing(ticket) for ticket in waiting}

    def _standing(self, ticket: Ticket) -> Standing:
        turn = self._said.get(ticket.id)
        why = waits_for(ticket.request, self.line.free_for(ticket.request))
        if paused := self.line.closed.get(closures.GRANTING):
            why = f"the GPUs to be given out again ({paused.reason or 'maintenance'})"
        if turn is None or turn.over:
            reason = "" if paused else self._other().why_not_yet(ticket) or self._trouble(ticket)
            return Standing(place=1, of=1, why=f"{why} ({reason or 'about to be handed over'})",
                            estimate=None, planned=None)  # fmt: skip
        if paused:
            place = max(1, turn.place)
            return Standing(place=place, of=max(place, turn.of), why=why, estimate=None,
                            planned=None)  # fmt: skip
        return Standing(
            place=max(1, turn.place),
            of=max(1, turn.of),
            why=f"{why} ({turn.why})" if turn.why else why,
            estimate=None,
            planned=turn.start,
        )

    def _trouble(self, ticket: Ticket) -> str:
        """Why it was not handed over, for its member; nothing if nobody tried in vain."""
        if ticket.id not in self._troubles:
            return ""
        who = self._other().engine.capitalize()
        return f"{who} does not answer just now; it is asked again until it does"

    def _delegated_order(self) -> list[tuple[Ticket, Ranked, Standing]]:
        """The line as the other side orders it, first next."""
        standings = self._delegated_standings()
        found = []
        with self.line.lock:
            for ticket in self.line.tickets.values():
                turn = self._said.get(ticket.id)
                score = turn.score if turn else 0.0
                parts = (ScorePart(self._other().engine, score, "what the order goes by there"),)
                ranked = Ranked(ticket.id, standings[ticket.id].place, score, parts)
                found.append((ticket, ranked, standings[ticket.id]))
        return sorted(found, key=lambda each: (each[1].place, each[0].created_at))

    # What the other side holds for us, and whose server is gone.

    def end_deserted(self) -> list[str]:
        """Take back what was handed over for tickets that wait no more and servers that are
        gone; their ids. Raises Unavailable."""
        if self.delegate is None:
            return []
        said = {name for name, turn in self.delegate.turns(ROUND).items() if not turn.over}

        def find_lost(connection: sa.Connection) -> list[str]:
            # In one transaction: between two, a ticket could become a lease, and be in neither.
            needed = {lease.ticket_id for lease in leases_repository.open_leases(connection)}
            needed |= {ticket.id for ticket in repository.waiting_tickets(connection)}
            # What no ticket of ours ever was is another hub's on the same cluster.
            return sorted(
                ticket.id for ticket in repository.some_tickets(connection, said - needed)
            )

        lost = self.store.run(find_lost)
        for ticket_id in lost:
            self.log.warning("Nobody waits with ticket %s any more: taking it back", ticket_id)
            self.delegate.cancel(ticket_id)
        return lost

    def _take_back(self, ticket_id: str | None, engine: str) -> None:
        """A ticket waits no more, or its server is gone. What nobody answers to now is taken back
        by :meth:`end_deserted`."""
        if self.delegate is None or not ticket_id or engine != self.delegate.engine:
            return
        try:
            self.delegate.cancel(ticket_id)
        except GPUSpawnerError as error:
            self.log.warning("Ticket %s is taken back later: %s", ticket_id, error.message)

    def _extend_there(self, lease: Lease) -> None:
        """A session lasts longer: also for the other side. Raises Refused or Unavailable."""
        if self.delegate is None or lease.engine != self.delegate.engine or not lease.ticket_id:
            return
        if lease.seconds is not None and lease.state is not LeaseState.ENDED:
            self.delegate.extend(lease.ticket_id, lease.seconds + lease.extended)

    def _see_line(self) -> None:
        look, now = self.look(), self.clock()
        self.store.run(lambda connection: self.line.sync(connection, look, now))

    def _other(self) -> Delegate:
        if self.delegate is None:
            raise RuntimeError("this hub gives out its devices itself: there is no other scheduler")
        return self.delegate
