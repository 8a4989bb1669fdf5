"""The scheduler's state in this process: tickets, leases, free devices, and history."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import lru_cache

import sqlalchemy as sa

from ..devices import closures
from ..devices.models import Device
from ..devices.placement import PlacementIndex, leasable, suitable
from ..devices.snapshots import InventorySnapshot
from ..leases import repository as leases_repository
from ..leases.models import Lease, Request, Slot
from . import repository
from .estimates import DevicesAhead, Estimator, PastWait
from .models import EndedSession, Estimate, Priority, RunningLease, Ticket, WaitingTicket
from .repository import Start
from .scheduler import Scheduler


def kind(model: str, memory_bytes: int) -> str:
    """Return the kind: the name of devices that are interchangeable for every request."""
    return f"{model}/{memory_bytes}"


class QueueEstimator:
    """An :class:`Estimator` that gets every event of its queue.

    Callers hold the lock of the queue.
    """

    def __init__(self) -> None:
        self._estimator = Estimator()
        self._known: set[str] = set()
        """The waiting tickets that the estimator knows."""

    def learn(self, starts: Iterable[Start]) -> None:
        """Learn from starts before this process first read the store."""
        self._estimator.learn(
            PastWait(
                asked_at=start.asked_at.timestamp(),
                started_at=start.granted_at.timestamp(),
                devices=start.devices,
                kinds=frozenset({kind(start.model, start.memory_bytes)}),
                group=start.group,
            )
            for start in starts
        )

    def asked(self, ticket: WaitingTicket) -> None:
        """Record that a ticket waits or was changed."""
        self._known.add(ticket.id)
        self._estimator.asked(ticket)

    def granted(self, lease: Lease, held: Mapping[str, int]) -> None:
        """Record that devices were granted, with or without a ticket."""
        self._known.discard(lease.ticket_id or "")
        self._estimator.started(
            RunningLease(
                id=lease.id,
                member=lease.server.user,
                group=lease.group,
                held=dict(held),
                started_at=lease.granted_at.timestamp(),
                ticket_id=lease.ticket_id or "",
            )
        )

    def only(self, waiting: Iterable[str], now: datetime) -> None:
        """Withdraw all other tickets: they ended without devices."""
        gone = self._known.difference(waiting)
        for ticket_id in gone:
            self._estimator.withdrawn(ticket_id, now.timestamp())
        self._known -= gone

    def guess(
        self, newcomer: WaitingTicket, ahead: int, now: float, most: float | None
    ) -> Estimate | None:
        """Return the estimate of a ticket if it were requested now; nothing is kept."""
        return self._estimator.guess(newcomer, now, ahead, most)

    def estimates(
        self,
        line: Sequence[WaitingTicket],
        ahead: DevicesAhead,
        latest: Mapping[str, float],
        now: float,
    ) -> dict[str, Estimate]:
        """Return the estimates of the next tickets on a walk along the queue, where there are any.

        ``latest``: the times by which some of them certainly start.
        """
        found = {}
        for ticket in line:
            most = latest.get(ticket.id)
            estimate = self._estimator.estimate(ticket.id, now, ahead.of(ticket), most)
            if estimate is not None:
                found[ticket.id] = estimate
        return found


PAST = timedelta(days=28)
"""How far back a new scheduler looks: four half-lives of the default policy."""

ALONE = timedelta(minutes=2)
"""How long a ticket keeps its position in front while no spawn waits with it."""


def kind_of(device: Device) -> str:
    """Return the kind of a device."""
    return kind(device.model, device.memory_bytes)


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


class QueueState:
    """Tickets and leases of a store, passed to a :class:`Scheduler` as they change.

    Callers hold :attr:`lock`. Other processes change the store too: each :meth:`sync` compares
    versions, and reads only what is new.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.lock = threading.RLock()
        self.scheduler = scheduler
        self.expected = QueueEstimator()
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
        self._synced_at: datetime | None = None
        self._kinds = lru_cache(maxsize=4096)(self._find_kinds)

    def begin_anew(self, scheduler: Scheduler) -> None:
        """Read everything again, because the clock was set and all stored times were moved."""
        self.scheduler, self.tickets, self._synced_at = scheduler, {}, None
        self._alone, self._versions, self._leases = {}, {}, {}
        self.supply = DeviceSupply(PlacementIndex((), {}), {}, {})
        self.revision += 1

    @property
    def empty(self) -> bool:
        """True if no ticket waits, as far as this process knows."""
        return not self.tickets

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
        self.expected.only(self.tickets, now)
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

    def kinds(self, request: Request) -> frozenset[str]:
        """Return the kinds that have enough devices for the request, in use or not."""
        return self._kinds(request.model, request.models, request.memory_bytes, request.devices)

    def free_for(self, request: Request) -> int:
        """Return how many suitable devices could be granted now."""
        return sum(self.supply.free.get(kind, 0) for kind in self.kinds(request))

    # Parts of a sync.

    def _sync_supply(self, fleet: PlacementIndex, taken: frozenset[str]) -> bool:
        before = self.supply
        closed = {Slot(uuid).text for uuid in self.closed if uuid in fleet.by_uuid}
        free = fleet.free(taken | closed) - self.closed.keys()
        able = [
            d for d in fleet.devices if leasable(d) is None and d.uuid not in self.closed
        ]  # fmt: skip
        self.supply = DeviceSupply(
            fleet,
            Counter(kind_of(fleet.by_uuid[uuid]) for uuid in free),
            Counter(kind_of(device) for device in able),
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
            self.expected.learn(repository.starts_since(connection, now - PAST))
        since = self._synced_at - timedelta(minutes=5) if self._synced_at else now - PAST
        for lease in repository.ended_since(connection, since):
            ended = lease.ended_at
            new = ended and (self._synced_at is None or ended > self._synced_at)
            if new and lease.id not in self._leases:
                self.scheduler.learn([_past(lease)])
        gone = self._leases.keys() - found.keys()
        for lease in repository.some_leases(connection, gone):
            self.scheduler.ended(lease.id, _seconds(_used_until(lease) or now))
        told = self._leases
        for lease in repository.some_leases(
            connection, [i for i in found if told.get(i) != found[i]]
        ):
            self._tell_of(lease, fleet)
        self._leases = found
        return True

    def _tell_of(self, lease: Lease, fleet: PlacementIndex) -> None:
        """Tell the scheduler about a lease that is new or whose end moved."""
        ends_at = _seconds(lease.ends_at) if lease.ends_at else None
        if lease.id in self.scheduler.running:
            self.scheduler.extended(lease.id, ends_at)
            return
        held = Counter(_kind_held(place.uuid, fleet) for place in lease.devices)
        held.pop("", None)
        if held and self.synced:
            self.expected.granted(lease, held)
        if held:
            self.scheduler.started(
                RunningLease(
                    id=lease.id,
                    member=lease.server.user,
                    group=lease.group,
                    held=dict(held),
                    started_at=_seconds(lease.started_at or lease.granted_at),
                    ends_at=ends_at,
                    ticket_id=lease.ticket_id or "",
                )
            )

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
        self.expected.asked(waiting)

    def waiting(self, ticket: Ticket) -> WaitingTicket:
        """Return a ticket as the scheduler sees it."""
        return WaitingTicket(
            id=ticket.id,
            member=ticket.server.user,
            group=ticket.group,
            devices=ticket.request.devices,
            kinds=self.kinds(ticket.request) or frozenset({""}),
            asked_at=_seconds(ticket.created_at),
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


def _kind_held(uuid: str, fleet: PlacementIndex) -> str:
    device = fleet.by_uuid.get(uuid)
    return kind_of(device) if device else ""


def _used_until(lease: Lease) -> datetime | None:
    """Return the end of what counts as use: a server that never started used nothing."""
    return lease.ended_at if lease.started_at else lease.granted_at


def _past(lease: Lease) -> EndedSession:
    start = lease.started_at or lease.granted_at
    return EndedSession(
        member=lease.server.user,
        group=lease.group,
        devices=len(lease.devices),
        started_at=_seconds(start),
        ended_at=_seconds(lease.ended_at or start),
        seconds=float(lease.seconds) if lease.seconds is not None else None,
    )


def _seconds(at: datetime) -> float:
    """Convert to seconds since 1970, as the scheduler counts."""
    return at.astimezone(timezone.utc).timestamp()
