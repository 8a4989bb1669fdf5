"""The scheduler's state in this process: tickets, leases, free devices, and history."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from fractions import Fraction
from functools import lru_cache

import sqlalchemy as sa

from ..core.units import DeviceCount
from ..devices import closures
from ..devices.placement import PlacementIndex
from ..devices.snapshots import InventorySnapshot, is_in_service
from ..devices.suitability import suitable
from ..leases import repository as leases_repository
from ..leases.host_resources import NOTHING, HostAmount, HostBudget
from ..leases.models import Lease, LeasedDevice, Request, Sharing, Slot
from . import repository
from .estimates import Estimator, PastWait
from .host_admission import HostUse
from .kinds import (
    CPU_ONLY,
    NO_KIND,
    add,
    count_kinds,
    kind_of,
    parts_of,
    pool_kind,
    pool_of,
    shared_pools,
    taken_of,
)
from .models import EndedSession, Priority, RunningLease, Ticket, WaitingTicket
from .repository import Start
from .scheduler import Scheduler

PAST = timedelta(days=28)
"""How far back a new scheduler looks: four half-lives of the default policy."""

_CPU_ONLY = frozenset({CPU_ONLY})

ALONE = timedelta(minutes=2)
"""How long a ticket keeps its position in front while no spawn waits with it."""


@dataclass(frozen=True, slots=True)
class DeviceSupply:
    """What the queue is served from, at one moment."""

    fleet: PlacementIndex
    free: Mapping[str, DeviceCount]
    """Devices that could be granted now, by kind."""
    usable: Mapping[str, int]
    """These and the ones in use, by kind."""
    yielded: Mapping[str, DeviceCount] = field(default_factory=dict)
    """Devices of preemptible runs, by kind: free two minutes after somebody else needs them."""

    @property
    def grantable(self) -> Mapping[str, DeviceCount]:
        """What tickets are served from, by kind: the free devices and those that are yielded."""
        return add(self.free, self.yielded) if self.yielded else self.free


class QueueState:
    """Tickets and leases of a store, passed to a :class:`Scheduler` as they change.

    Callers hold :attr:`lock`. Other processes change the store too: each :meth:`sync` compares
    versions, and reads only what is new.
    """

    def __init__(self, scheduler: Scheduler, budget: HostBudget | None = None) -> None:
        self.lock = threading.RLock()
        self.scheduler = scheduler
        self.budget = budget
        """How much of the host's memory and CPU leases may reserve; None if that has no budget."""
        self.reserved = NOTHING
        """How much of them they have reserved, if there is a budget."""
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
        self._slots: dict[str, dict[str, frozenset[str]]] = {}
        """By member and lease, the kinds of the devices on which the lease has a share."""
        self._synced_at: datetime | None = None
        self._kinds = lru_cache(maxsize=4096)(self._find_kinds)

    def begin_anew(self, scheduler: Scheduler) -> None:
        """Read everything again, because the clock was set and all stored times were moved."""
        self.scheduler, self.tickets, self._synced_at = scheduler, {}, None
        self._alone, self._versions, self._leases, self._uuids = {}, {}, {}, {}
        self.preemptible, self._slots = {}, {}
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
        if self.budget is not None:
            before, self.reserved = self.reserved, leases_repository.reserved(connection)
            changed |= self.reserved != before
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

    @property
    def host_use(self) -> HostUse:
        """What a decision finds on the host: preemptible runs yield their memory and CPU, too."""
        return HostUse(
            reserved=self.reserved - self.reserved_by_preemptible,
            free_devices=sum(self.supply.grantable.values()),
        )

    @property
    def reserved_by_preemptible(self) -> HostAmount:
        """How much of the host's memory and CPU preemptible runs have reserved."""
        return sum((lease.host for lease in self.preemptible.values()), NOTHING)

    def host_left(self, request: Request) -> HostAmount | None:
        """Return how much of the host a request could be granted now; None without a budget."""
        if self.budget is None:
            return None
        free, has_devices = sum(self.supply.free.values()), request.devices > 0
        return self.budget.left(self.reserved, free, has_devices=has_devices)

    def kinds_of(self, lease: Lease) -> dict[str, DeviceCount]:
        """Return the devices of a lease that come back to the queue, by kind."""
        closed = self.closed.keys()
        fleet = self.supply.fleet
        return count_kinds(
            (_kind_of_leased(d, fleet), d.share) for d in lease.devices if d.uuid not in closed
        )

    def kinds(self, request: Request, user: str = "") -> frozenset[str]:
        """Return the kinds that have enough devices for the request, in use or not.

        For a share without those on which the member ``user``, if given, has one already.
        """
        if not request.devices:
            return _CPU_ONLY
        found = self._kinds(
            request.model,
            request.models,
            request.memory_bytes,
            request.devices,
            self.is_for_share(request),
            request.groups,
            request.preemptible,
        )
        own = self._slots.get(user)
        return found.difference(*own.values()) if own and self.is_for_share(request) else found

    def is_for_share(self, request: Request) -> bool:
        """Return True if the request gets a share of a device instead of whole devices."""
        return self.supply.fleet.is_for_share(request)

    def asked(self, request: Request) -> DeviceCount:
        """Return how many devices a request counts as: the smallest share that it may get."""
        if not self.is_for_share(request):
            return request.devices
        parts = map(parts_of, self.kinds(request))
        shares = (Fraction(p.slots_for(request.memory_bytes), p.slots) for p in parts)
        return min(shares, default=Fraction(1))

    def taken_of(self, kind: str, request: Request) -> DeviceCount:
        """Return how many devices of a kind a request takes; for a share whole slots."""
        return taken_of(kind, self.asked(request), self.share_bytes(request))

    def share_bytes(self, request: Request) -> int:
        """Return the memory that a share must have; 0 for whole devices."""
        return request.memory_bytes if self.is_for_share(request) else 0

    def free_for(self, request: Request, user: str = "") -> DeviceCount:
        """Return how many suitable devices could be granted now, to this member if given."""
        return self.count_for(request, self.supply.free, user)

    def count_for(
        self, request: Request, devices: Mapping[str, DeviceCount], user: str = ""
    ) -> DeviceCount:
        """Return how many of these devices, by kind, suit a request; for a whole one, whole.

        For a share, devices that have fewer free slots than it needs do not count.
        """
        kinds = self.kinds(request, user)
        if not self.is_for_share(request):
            return sum(int(devices.get(kind, 0)) for kind in kinds)
        found = ((devices.get(kind, 0), self.taken_of(kind, request)) for kind in kinds)
        return sum(count for count, taken in found if count >= taken)

    def has_enough(
        self, request: Request, devices: Mapping[str, DeviceCount], user: str = ""
    ) -> bool:
        """Return True if a request fits these devices, by kind."""
        asked, kinds = self.asked(request), self.kinds(request, user)
        if any(devices.get(kind, 0) >= self.taken_of(kind, request) for kind in kinds):
            return True
        return asked > 1 and any(
            sum(int(devices.get(kind, 0)) for kind in pool) >= asked
            for pool in shared_pools(kinds).values()
        )

    # Parts of a sync.

    def _sync_supply(self, fleet: PlacementIndex, taken: frozenset[str]) -> bool:
        before = self.supply
        self.supply = replace(before, fleet=fleet)  # kinds below are those of this fleet
        closed = {Slot.closure(uuid).text for uuid in self.closed if uuid in fleet.by_uuid}
        held = {Slot.from_text(text).uuid for text in taken}
        unavailable = taken | closed
        free: dict[str, DeviceCount] = dict(
            Counter(kind_of(fleet.by_uuid[uuid]) for uuid in fleet.free(unavailable))
        )
        for uuid, slots in fleet.free_slots(unavailable).items():
            device = fleet.by_uuid[uuid]
            free[kind_of(device)] = Fraction(slots, device.slots) if slots < device.slots else 1
        self.supply = DeviceSupply(
            fleet,
            free,
            Counter(
                kind_of(d)
                for d in fleet.devices
                if is_in_service(d, leased=d.uuid in held, closed=d.uuid in self.closed)
            ),
            count_kinds(
                each for lease in self.preemptible.values() for each in self.kinds_of(lease).items()
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
            self.estimator.learn(_past_wait(start, fleet) for start in starts)
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
        new_slots: dict[str, dict[str, frozenset[str]]] = {}
        changed = [name for name, mark in found.items() if self._leases.get(name) != mark]
        for lease in repository.some_leases(connection, changed):
            self._tell_of(lease, fleet)
            slots = frozenset(_kind_of_leased(d, fleet) for d in lease.devices if d.is_shared)
            if slots and not fleet.is_external:  # which gives members several slots of a device
                new_slots.setdefault(lease.server.user, {})[lease.id] = slots
        self._leases = found
        self._sync_slots(gone, new_slots)
        return True

    def _sync_slots(
        self, gone: AbstractSet[str], new: Mapping[str, Mapping[str, frozenset[str]]]
    ) -> None:
        """Update who has slots, and the tickets of members whose slots have changed."""
        changed = {user: held for user, held in self._slots.items() if gone & held.keys()}
        changed |= {user: self._slots.get(user, {}) for user in new}
        for user, before in changed.items():
            now = {name: kinds for name, kinds in before.items() if name not in gone}
            self._slots[user] = {**now, **new.get(user, {})}
            if not self._slots[user]:
                del self._slots[user]
        for ticket in self.tickets.values() if changed else ():
            if ticket.server.user in changed and self.is_for_share(ticket.request):
                self._submit(ticket)

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
        held = count_kinds(
            (kind_of(fleet.by_uuid[leased.uuid]), leased.share)
            for leased in lease.devices
            if leased.uuid in fleet.by_uuid
        )
        if not held:
            return
        running = RunningLease(
            id=lease.id,
            member=lease.server.user,
            group=lease.group,
            held=held,
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
        if not waiting.devices:
            return  # what it waits for teaches nothing of waits for devices
        # How long it has waited now is no example for others if the wait counts from earlier.
        self.estimator.asked(replace(waiting, asked_at=ticket.created_at.timestamp()))

    def waiting(self, ticket: Ticket) -> WaitingTicket:
        """Return a ticket as the scheduler sees it."""
        request = ticket.request
        return WaitingTicket(
            id=ticket.id,
            member=ticket.server.user,
            group=ticket.group,
            devices=self.asked(request),
            kinds=self.kinds(request, ticket.server.user) or frozenset({NO_KIND}),
            share_bytes=self.share_bytes(request),
            smallest=request.smallest,
            asked_at=(ticket.since or ticket.created_at).timestamp(),
            seconds=float(ticket.seconds) if ticket.seconds is not None else None,
            priority=Priority(ticket.priority),
            boost=ticket.boost,
            position=ticket.position,
            last=ticket.last,
            host=NOTHING if self.budget is None else request.host,
        )

    def _find_kinds(
        self,
        model: str | None,
        models: tuple[str, ...],
        memory: int,
        count: int,
        is_slot: bool,
        groups: tuple[str, ...],
        preemptible: bool,
    ) -> frozenset[str]:
        request = Request(
            devices=count,
            model=model,
            models=models,
            memory_bytes=memory,
            sharing=Sharing.SLOT if is_slot else Sharing.WHOLE,
            groups=groups,
            preemptible=preemptible,
        )
        fleet = self.supply.fleet
        fitting = [kind_of(device) for device in suitable(request, fleet.devices)]
        counts = Counter(map(pool_of, fitting))  # shared devices are kinds of their own
        return frozenset(kind for kind in fitting if counts[pool_of(kind)] >= count)


def _kind_of_leased(leased: LeasedDevice, fleet: PlacementIndex) -> str:
    """Return the kind of a leased device, reserved or not as it is now."""
    return kind_of(fleet.by_uuid.get(leased.uuid, leased))


def _past_wait(start: Start, fleet: PlacementIndex) -> PastWait:
    device = fleet.by_uuid.get(start.uuid)
    pool = pool_kind(start.model, start.memory_bytes, start.slots, start.part)
    if device is not None and device.reserved_for and device.slots == start.slots:
        pool = pool_of(kind_of(device))
    return PastWait(
        asked_at=start.asked_at.timestamp(),
        started_at=start.granted_at.timestamp(),
        devices=start.devices,
        kinds=frozenset({pool}),
        group=start.group,
    )


def _past(lease: Lease) -> EndedSession:
    start = lease.started_at or lease.granted_at
    return EndedSession(
        member=lease.server.user,
        group=lease.group,
        devices=lease.device_count,
        part=lease.devices[0].part,
        started_at=start.timestamp(),
        ended_at=(lease.ended_at or start).timestamp(),
    )
