"""The scheduler's state in this process: tickets, leases, free devices, and history."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import lru_cache

import sqlalchemy as sa

from ..devices import closures
from ..devices.models import Device
from ..devices.placement import PlacementIndex, suitable
from ..devices.snapshots import InventorySnapshot, is_in_service
from ..leases import repository as leases_repository
from ..leases.models import Lease, LeasedDevice, Request, Slot
from . import repository
from .estimates import Estimator, PastWait
from .models import EndedSession, Priority, RunningLease, Ticket, WaitingTicket
from .repository import Start
from .scheduler import Scheduler

PAST = timedelta(days=28)
"""How far back a new scheduler looks: four half-lives of the default policy."""

ALONE = timedelta(minutes=2)
"""How long a ticket keeps its position in front while no spawn waits with it."""


def kind_of(device: Device | LeasedDevice | Start) -> str:
    """Return the kind of a device: the name of all that any request could use instead."""
    return f"{device.model}/{device.memory_bytes}"


def model_of(kind: str) -> str:
    """Return the model of a kind's devices."""
    return kind.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class DeviceSupply:
    """What the queue is served from, at one moment."""

    fleet: PlacementIndex
    free: Mapping[str, int]
    """Devices that could be granted now, by kind."""
    usable: Mapping[str, int]
    """These and the ones in use, by kind."""
    yielded: Mapping[str, int] = field(default_factory=dict)
    """Devices of preemptible runs, by kind: free two minutes after somebody else needs them."""

    @property
    def grantable(self) -> Mapping[str, int]:
        """What tickets are served from, by kind: the free devices and those that are yielded."""
        return Counter(self.free) + Counter(self.yielded)


class QueueState:
    """Tickets and leases of a store, passed to a :class:`Scheduler` as they change.

    Callers hold :attr:`lock`. Other processes change the store too: each :meth:`sync` compares
    versions, and reads only what is new.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.lock = threading.RLock()
        self.scheduler = scheduler
        self.estimator = Estimator()
        self.tickets: dict[str, Ticket] = {}
        self.closed: dict[str, closures.Closure] = {}
        self.supply = DeviceSupply(PlacementIndex((), {}), {}, {})
        self.revision = 0
        """Increases with everything that may change an order, a position or an estimate."""
        self.clock_version = 0
        """The version of the clock that the scheduler's times are based on."""
        self._alone: dict[str, datetime] = {}
        self._versions: dict[str, str] = {}
        self._leases: dict[str, str] = {}
        self._uuids: dict[str, tuple[str, ...]] = {}
        self.preemptible: dict[str, Lease] = {}
        """Open leases of preemptible runs; the scheduler does not know them, for they yield."""
        self._synced_at: datetime | None = None
        self._kinds = lru_cache(maxsize=4096)(self._find_kinds)

    def begin_anew(self, scheduler: Scheduler) -> None:
        """Read everything again, because the clock was set and all stored times were moved."""
        self.scheduler, self.tickets, self._synced_at = scheduler, {}, None
        self._alone, self._versions, self._leases, self._uuids = {}, {}, {}, {}
        self.preemptible = {}
        self.supply = DeviceSupply(PlacementIndex((), {}), {}, {})
        self.revision += 1

    @property
    def paused(self) -> closures.Closure | None:
        """Why nothing is granted at the moment; None if granting is not paused."""
        return self.closed.get(closures.GRANTING)

    @property
    def synced(self) -> bool:
        """True if the store was ever read."""
        return self._synced_at is not None

    def attend(self, present: frozenset[str], now: datetime) -> None:
        """Record the tickets that a spawn of this hub waits with; others lose their turn in time.

        After a restart of the hub its spawns come back one by one; a ticket that nobody comes back
        for must not hold up those behind it for ever.
        """
        for ticket_id, ticket in self.tickets.items():
            if ticket_id in present:
                self._alone.pop(ticket_id, None)
                if ticket_id not in self.scheduler.waiting:
                    self.scheduler.submit(self.waiting(ticket))
                    self.revision += 1
            else:
                since = min(now, self._alone.get(ticket_id, now))  # the clock may be set back
                self._alone[ticket_id] = since
                if now - since > ALONE:
                    self.scheduler.withdraw(ticket_id)
        for gone in self._alone.keys() - self.tickets.keys():
            del self._alone[gone]

    def deserted(self) -> frozenset[str]:
        """Return the tickets that no spawn has waited with for a while."""
        return frozenset(self.tickets.keys() - self.scheduler.waiting.keys())

    def sync(self, connection: sa.Connection, look: InventorySnapshot, now: datetime) -> None:
        """Update everything, within one read of the store."""
        closed = closures.load(connection)
        changed = closed != self.closed
        self.closed = closed
        changed |= self._sync_leases(connection, look.fleet, now)
        changed |= self._sync_supply(look.fleet, leases_repository.places_taken(connection))
        changed |= self._sync_tickets(connection)
        self.estimator.withdraw_others(self.tickets, now.timestamp())
        self._synced_at = now
        if changed:
            self.revision += 1

    def add(self, ticket: Ticket) -> None:
        """Add a ticket that this process has just written."""
        self.tickets[ticket.id] = ticket
        self._versions[ticket.id] = str(ticket.version)
        self._submit(ticket)
        self.revision += 1

    def drop(self, ticket_id: str) -> None:
        """Remove a ticket that this process has just ended."""
        self.tickets.pop(ticket_id, None)
        self._versions.pop(ticket_id, None)
        self.scheduler.withdraw(ticket_id)
        self.revision += 1

    def drained(self) -> dict[str, float]:
        """Return the leases whose devices do not come back to the queue, each with infinity.

        These are ``likely_ends`` of :meth:`Scheduler.decide`.
        """
        return {
            lease_id: math.inf
            for lease_id, held in self._uuids.items()
            if not self.closed.keys().isdisjoint(held)
        }

    def kinds_of(self, lease: Lease) -> Counter[str]:
        """Return the devices of a lease that come back to the queue, by kind."""
        closed = self.closed.keys()
        return Counter(kind_of(device) for device in lease.devices if device.uuid not in closed)

    def kinds(self, request: Request) -> frozenset[str]:
        """Return the kinds that have enough devices for the request, in use or not."""
        return self._kinds(request.model, request.models, request.memory_bytes, request.devices)

    def free_for(self, request: Request) -> int:
        """Return how many suitable devices could be granted now."""
        return sum(self.supply.free.get(kind, 0) for kind in self.kinds(request))

    # Parts of a sync.

    def _sync_supply(self, fleet: PlacementIndex, taken: frozenset[str]) -> bool:
        before = self.supply
        closed = {Slot.closure(uuid).text for uuid in self.closed if uuid in fleet.by_uuid}
        held = {Slot.from_text(text).uuid for text in taken}
        free = fleet.free(taken | closed) - self.closed.keys()
        self.supply = DeviceSupply(
            fleet,
            Counter(kind_of(fleet.by_uuid[uuid]) for uuid in free),
            Counter(
                kind_of(d)
                for d in fleet.devices
                if is_in_service(d, leased=d.uuid in held, closed=d.uuid in self.closed)
            ),
            Counter(
                kind
                for lease in self.preemptible.values()
                for kind in self.kinds_of(lease).elements()
            ),
        )
        if fleet is not before.fleet:
            self._kinds.cache_clear()
            self._versions.clear()  # the suitable kinds may have changed: read all tickets again
        if self.supply.usable != before.usable:
            self.scheduler.set_capacity(self.supply.usable)
        return fleet is not before.fleet or self.supply != before

    def _sync_leases(self, connection: sa.Connection, fleet: PlacementIndex, now: datetime) -> bool:
        found = repository.lease_marks(connection)
        if found == self._leases and self._synced_at is not None:
            return False
        if self._synced_at is None:
            starts = repository.starts_since(connection, now - PAST)
            self.estimator.learn(map(_past_wait, starts))
        since = self._synced_at - timedelta(minutes=5) if self._synced_at else now - PAST
        for lease in repository.ended_since(connection, since):
            ended = lease.ended_at
            new = ended and (self._synced_at is None or ended > self._synced_at)
            if new and lease.id not in self._leases and not lease.preemptible:
                self.scheduler.learn([_past(lease)])
        gone = self._leases.keys() - found.keys()
        for lease in repository.some_leases(connection, gone):
            # A server that never started used nothing.
            used_until = lease.ended_at if lease.started_at else lease.granted_at
            self.scheduler.ended(lease.id, (used_until or now).timestamp())
            self._uuids.pop(lease.id, None)
            self.preemptible.pop(lease.id, None)
        changed = [name for name, mark in found.items() if self._leases.get(name) != mark]
        for lease in repository.some_leases(connection, changed):
            self._tell_of(lease, fleet)
        self._leases = found
        return True

    def _tell_of(self, lease: Lease, fleet: PlacementIndex) -> None:
        """Tell the scheduler about a lease that is new or whose end moved."""
        if lease.preemptible:
            self.preemptible[lease.id] = lease
            return
        self._uuids[lease.id] = lease.uuids
        ends_at = lease.ends_at.timestamp() if lease.ends_at else None
        if lease.id in self.scheduler.running:
            self.scheduler.extended(lease.id, ends_at)
            return
        devices = (fleet.by_uuid.get(uuid) for uuid in lease.uuids)
        held = Counter(kind_of(device) for device in devices if device)
        if not held:
            return
        running = RunningLease(
            id=lease.id,
            member=lease.server.user,
            group=lease.group,
            held=dict(held),
            started_at=(lease.started_at or lease.granted_at).timestamp(),
            ends_at=ends_at,
            ticket_id=lease.ticket_id or "",
        )
        if self.synced:
            self.estimator.started(replace(running, started_at=lease.granted_at.timestamp()))
        self.scheduler.started(running)

    def _sync_tickets(self, connection: sa.Connection) -> bool:
        found = repository.ticket_versions(connection)
        if found == self._versions:
            return False
        for gone in self.tickets.keys() - found.keys():
            del self.tickets[gone]
            self.scheduler.withdraw(gone)
        new = [i for i, version in found.items() if self._versions.get(i) != version]
        for ticket in repository.some_tickets(connection, new):
            self.tickets[ticket.id] = ticket
            self._submit(ticket)
        self._versions = found
        return True

    def _submit(self, ticket: Ticket) -> None:
        waiting = self.waiting(ticket)
        self.scheduler.submit(waiting)
        # How long it has waited now is no example for others if the wait counts from earlier.
        self.estimator.asked(replace(waiting, asked_at=ticket.created_at.timestamp()))

    def waiting(self, ticket: Ticket) -> WaitingTicket:
        """Return a ticket as the scheduler sees it."""
        return WaitingTicket(
            id=ticket.id,
            member=ticket.server.user,
            group=ticket.group,
            devices=ticket.request.devices,
            kinds=self.kinds(ticket.request) or frozenset({""}),
            asked_at=(ticket.since or ticket.created_at).timestamp(),
            seconds=float(ticket.seconds) if ticket.seconds is not None else None,
            priority=Priority(ticket.priority),
            boost=ticket.boost,
            position=ticket.position,
            last=ticket.last,
        )

    def _find_kinds(
        self, model: str | None, models: tuple[str, ...], memory: int, count: int
    ) -> frozenset[str]:
        request = Request(devices=count, model=model, models=models, memory_bytes=memory)
        fitting = Counter(kind_of(d) for d in suitable(request, self.supply.fleet.devices))
        return frozenset(kind for kind, devices in fitting.items() if devices >= count)


def _past_wait(start: Start) -> PastWait:
    return PastWait(
        asked_at=start.asked_at.timestamp(),
        started_at=start.granted_at.timestamp(),
        devices=start.devices,
        kinds=frozenset({kind_of(start)}),
        group=start.group,
    )


def _past(lease: Lease) -> EndedSession:
    start = lease.started_at or lease.granted_at
    return EndedSession(
        member=lease.server.user,
        group=lease.group,
        devices=len(lease.devices),
        started_at=start.timestamp(),
        ended_at=(lease.ended_at or start).timestamp(),
    )
