"""The latest snapshot of the devices, and the views of it that pages and commands show."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import sqlalchemy as sa

from ..core.units import DeviceCount
from ..db.engine import Store
from ..leases.models import Lease, LeaseState, Request, Slot
from ..ledger import rules as ledger_rules
from ..ledger.credit_policy import SESSION
from ..ledger.models import Account
from ..ledger.pricing import RateCard, Rates
from . import repository
from .closures import LEAK, Closure, kept_for
from .models import Device, DeviceStatus, Inventory, slots_for
from .placement import PlacementIndex, leasable
from .reservations import (
    Reservation,
    count_reserved,
    describe_reservation,
    may_use,
    reservation_of,
    with_reservations,
)
from .slots import share_label, slots_wanted, with_slots
from .source import DeviceSource

SAVE_EVERY = timedelta(minutes=1)
"""How often even an unchanged snapshot is compared with the store."""


@dataclass(frozen=True, slots=True)
class InventorySnapshot:
    """The devices as last seen; known devices that were not seen are unknown."""

    devices: tuple[Device, ...]
    inventory: Inventory
    fleet: PlacementIndex
    """The same devices, prepared for placement."""
    can_be_shared: bool = False
    """True if the number of slots of a device may change."""


class InventoryCache:
    """Observes a source at most every ``refresh`` and keeps the store's device table current.

    ``shared`` has the numbers of slots that an admin wants, by model or UUID; None if the source
    says itself how its devices are shared. ``reserved`` has the reservations, likewise. Only the
    hub changes both, the slots when nobody uses a device: all other processes take them from the
    table. So the hub, which alone grants, has the same reservations for as long as it runs.
    """

    def __init__(
        self,
        source: DeviceSource,
        store: Store,
        refresh: timedelta,
        shared: Mapping[str, int] | None = None,
        reserved: Mapping[str, Reservation] | None = None,
    ) -> None:
        self.source = source
        self.store = store
        self.refresh = refresh
        self.shared = shared
        self.reserved = reserved or {}
        self.changes_slots = False
        """True in the hub."""
        self._lock = threading.Lock()
        self._look: InventorySnapshot | None = None
        self._stale = False
        self._known: tuple[Device, ...] | None = None
        self._saved_at: datetime | None = None

    def look(self, now: datetime, *, fresh: bool = False) -> InventorySnapshot:
        """Return the latest snapshot; a new one if it is older than ``refresh``, or ``fresh``."""
        with self._lock:
            last = self._look
            # After the clock is set back, an old snapshot must not stay the latest for hours.
            recent = last and abs(now - last.inventory.observed_at) < self.refresh
            if last and recent and not fresh and not self._stale:
                return last
            self._stale = False
            inventory = self.source.observe(now)
            late = self._saved_at is None or abs(now - self._saved_at) >= SAVE_EVERY
            if self._known is None or (late and not self.changes_slots):
                self._known = self.store.run(self._rows)
            inventory = self._with_slots(inventory, self._known)
            if last and _nothing_new(last.inventory, inventory):
                seen, fleet = last.devices, last.fleet
            else:
                seen = repository.as_seen(self._known, inventory)
                fleet = PlacementIndex(seen, inventory.links, is_external=self.shared is None)
            if late or seen != self._known:
                self._save(inventory)
                self._saved_at = now
            self._known = seen
            can_be_shared = self.shared is not None and (
                bool(self.shared) or any(device.slots > 1 for device in seen)
            )
            self._look = InventorySnapshot(seen, inventory, fleet, can_be_shared)
            return self._look

    def _with_slots(self, inventory: Inventory, known: Sequence[Device]) -> Inventory:
        """Return the inventory with slots and reservations; the hub changes the slots here."""
        if self.shared is None:
            return inventory
        slots = {device.uuid: device.slots for device in known}
        devices = self.as_known(inventory, known)
        wanted = {device.uuid: slots_wanted(device, self.shared) for device in devices}
        other = {d.uuid: wanted[d.uuid] for d in devices if d.slots != wanted[d.uuid]}
        # Read first: a device may be leased for days, and every look comes here.
        if self.changes_slots and self._any_without_lease(other):
            with self.store.write() as connection:
                changed = repository.change_slots(connection, other)
            devices = with_slots(devices, self.shared, slots, changed)
        return replace(inventory, devices=devices)

    def _any_without_lease(self, uuids: Collection[str]) -> bool:
        return bool(uuids) and bool(self.store.run(lambda c: repository.without_lease(c, uuids)))

    def forget(self) -> None:
        """Take a new snapshot next time: a server is gone, and so are its processes."""
        self._stale = True

    def _rows(self, connection: sa.Connection) -> tuple[Device, ...]:
        return repository.load_devices(connection, self.source.name)

    def _save(self, inventory: Inventory) -> None:
        # Another process may have written what it saw: compare with the rows themselves.
        known = self.store.run(self._rows)
        if repository.as_seen(known, self._keep_slots(inventory, known)) != known:
            with self.store.write() as connection:
                known = self._rows(connection)
                inventory = self._keep_slots(inventory, known)
                repository.save_devices(connection, known, inventory)

    def _keep_slots(self, inventory: Inventory, known: Sequence[Device]) -> Inventory:
        """Return the inventory with slots and reservations of the table, unless this is the hub."""
        if self.changes_slots:
            return inventory
        return replace(inventory, devices=self.as_known(inventory, known))

    def as_known(self, inventory: Inventory, known: Sequence[Device]) -> tuple[Device, ...]:
        """Return the devices with the slots and, unless this is the hub, reservations they have."""
        if self.shared is None:
            return inventory.devices
        slots = {device.uuid: device.slots for device in known}
        kept = {} if self.changes_slots else {d.uuid: reservation_of(d) for d in known}
        devices = with_slots(inventory.devices, self.shared, slots, ())
        return with_reservations(devices, self.reserved, kept)


def _nothing_new(before: Inventory, now: Inventory) -> bool:
    return (
        before.devices == now.devices
        and before.error == now.error
        and (before.links is now.links or before.links == now.links)
    )


IN_USE = ("leased", "partly_leased")
"""States of devices with leases, in service."""

COUNTED = ("free", *IN_USE, "occupied", "draining", "drained")
"""States of devices that can be leased sooner or later; some only when they are back in service."""


def is_in_service(device: Device, *, leased: bool, closed: bool) -> bool:
    """Return True if a device is free, or will be when its server stops.

    This is the one rule for "3 of 4 free" on pages, in the queue and in commands: a device that is
    drained, in quarantine, occupied without a lease or not answering counts in neither number.
    """
    return leasable(device) is None and not closed and (leased or device.empty)


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device with its current state."""

    device: Device
    state: str
    """``free``, ``leased``, ``partly_leased``, ``occupied``, ``unknown``, ``parent`` or
    ``prohibited``.

    A shared device is ``partly_leased`` while some of its slots could be granted and others are
    leased. Of the devices that an admin closed, a free one is ``drained`` and a leased one is
    ``draining``.
    """
    detail: str
    """Why, in words; for a free device other useful information, usually none."""
    lease_id: str | None = None
    """The lease on it, if there is exactly one."""
    machine: str = ""
    """The name of its machine, if there are several."""
    leases: tuple[str | None, ...] = ()
    """The lease of each slot, None for a slot without one. A lease of the whole device has all."""
    free_slots: int = 0
    """How many slots could be granted now; 1 for a free device that is not shared."""

    @property
    def in_service(self) -> bool:
        """True if it is free, or will be when its server stops."""
        closed = self.state in ("draining", "drained")
        return is_in_service(self.device, leased=self.state in IN_USE, closed=closed)

    @property
    def reservation(self) -> str:
        """Who the device is reserved for, in words; empty if it is open to everybody."""
        return describe_reservation(self.device)

    @property
    def name(self) -> str:
        """The name for people: the index, and the machine if there are several."""
        return f"{self.device.index} on {self.machine}" if self.machine else str(self.device.index)


@dataclass(frozen=True, slots=True)
class ModelCount:
    """The devices of one model and memory size, and of one part of a GPU."""

    model: str
    memory_bytes: int
    total: int
    """Devices in service, free or leased; 0 if all of them are out of service."""
    free: int
    """Devices without a lease."""
    rate: int
    """Current microcredits per GPU-hour, for environments without a rate of their own."""
    free_slots: int = 0
    """Slots of shared devices that could be granted now, on free devices and others."""
    reserved: str = ""
    """Which are reserved, such as ``2 reserved for vision-lab``; empty if none is."""
    part: DeviceCount = 1
    """How much of a GPU each is: 1, or a fraction such as 1/7 for MIG instances."""


@dataclass(frozen=True, slots=True)
class ShareCount:
    """The shares that devices of one model, memory size and number of slots are divided into."""

    model: str
    memory_bytes: int
    """Memory of a whole device."""
    slots: int
    """How many slots each device has."""
    free_slots: tuple[int, ...]
    """For each device in service, free or leased, how many slots could be granted now."""
    held_slots: int = 1
    """How many slots of one device a share has."""
    reserved: str = ""
    """Of the devices, as in :class:`ModelCount`."""
    part: DeviceCount = 1
    """How much of a GPU each device is: 1, or a fraction such as 1/7 for MIG instances."""

    def with_memory(self, memory_bytes: int) -> ShareCount | None:
        """Return the smallest shares with so much memory; None if only a whole device has it."""
        held_slots = slots_for(memory_bytes, self.memory_bytes, self.slots)
        return replace(self, held_slots=held_slots) if held_slots < self.slots else None

    def up(self) -> Iterator[ShareCount]:
        """Yield this and all larger shares of the same devices, the smallest first."""
        for held_slots in range(self.held_slots, self.slots):
            yield replace(self, held_slots=held_slots)

    @property
    def total(self) -> int:
        """How many there are, free or leased; 0 if all devices are out of service."""
        return len(self.free_slots) * (self.slots // self.held_slots)

    @property
    def free(self) -> int:
        """How many could be granted now."""
        return sum(left // self.held_slots for left in self.free_slots)

    @property
    def label(self) -> str:
        """A share in words: ``1/4 of NVIDIA A100-SXM4-80GB, about 20 GB``."""
        return share_label(self.model, self.memory_bytes, self.slots, self.held_slots)

    @property
    def share_bytes(self) -> int:
        """The memory of a share: the device's, divided equally among its slots."""
        return self.memory_bytes * self.held_slots // self.slots


@dataclass(frozen=True, slots=True)
class Overview:
    """All devices at one moment."""

    devices: tuple[DeviceView, ...]
    models: tuple[ModelCount, ...]
    source: str
    error: str
    """Why the devices cannot be seen; empty if they can."""
    driver_version: str
    cuda_version: str
    waiting: int = 0
    """Waiting tickets."""
    paused: Closure | None = None
    """Why granting is paused, and by whom; None if it is not."""
    rates: Rates = field(default_factory=Rates)
    """All rates that apply now or later."""

    def usable_by(
        self, groups: Collection[str], now: datetime, *, preemptible: bool = False
    ) -> Overview:
        """Return the overview without devices that are reserved for other groups than these.

        For ``preemptible`` runs, it keeps the devices that other groups lend.
        """
        if not any(view.device.reserved_for for view in self.devices):
            return self
        request = Request(groups=tuple(groups), preemptible=preemptible)
        views = tuple(view for view in self.devices if may_use(request, view.device))
        return replace(self, devices=views, models=count_models(views, self.rates.card(now)))

    @property
    def shares(self) -> tuple[ShareCount, ...]:
        """The smallest shares that members may ask for."""
        return count_shares(self.devices)

    @property
    def total(self) -> int:
        """The number of devices in service, free or leased."""
        return sum(count.total for count in self.models)

    @property
    def free(self) -> int:
        """The number of free devices."""
        return sum(count.free for count in self.models)


def device_views(
    devices: Sequence[Device],
    taken: Mapping[Slot, str],
    closed: Mapping[str, Closure] | None = None,
) -> tuple[DeviceView, ...]:
    """Return each device with its state; a leased one stays leased no matter what NVML reports.

    ``closed`` are the closures by subject; only those of devices count here.
    """
    leases: dict[str, dict[int, str]] = {}
    for place, lease in taken.items():
        leases.setdefault(place.uuid, {})[place.slot] = lease
    views = (_view(device, leases.get(device.uuid, {})) for device in devices)
    shut = closed or {}
    return tuple(
        _closed(view, shut[view.device.uuid]) if view.device.uuid in shut else view
        for view in views
    )


def _view(device: Device, leases: Mapping[int, str]) -> DeviceView:
    """Return a device's view; ``leases`` are those on it, by slot."""
    why_not = leasable(device)
    if leases:
        return _view_in_use(device, leases)
    if device.status is DeviceStatus.OK and why_not is None:
        if busy := device.compute_processes:
            named = ", ".join(f"{p.name or 'process'} (pid {p.pid})" for p in busy[:3])
            return DeviceView(device, "occupied", f"used without a lease by {named}")
        if device.held_bytes:
            return DeviceView(device, "occupied", describe_held_memory(device))
        nobody = (None,) * device.slots
        return DeviceView(device, "free", device.reason, leases=nobody, free_slots=device.slots)
    state = device.status.value if device.status is not DeviceStatus.OK else "prohibited"
    return DeviceView(device, state, why_not or device.reason)


def _view_in_use(device: Device, leases: Mapping[int, str]) -> DeviceView:
    some = tuple(dict.fromkeys(leases[slot] for slot in sorted(leases)))
    detail = f"lease {some[0]}" if len(some) == 1 else f"leases {', '.join(some)}"
    if device.status is DeviceStatus.UNKNOWN:
        detail += f"; not answering: {device.reason}"
    state, free_slots = "leased", 0
    if device.status is DeviceStatus.DRAINED:
        state, detail = "draining", f"{detail}; {device.reason}"
    elif leasable(device) is None and len(leases) < device.slots:
        state, free_slots = "partly_leased", device.slots - len(leases)
    return DeviceView(
        device,
        state,
        detail,
        lease_id=some[0] if len(some) == 1 else None,
        leases=tuple(map(leases.get, range(device.slots))),
        free_slots=free_slots,
    )


def describe_held_memory(device: Device) -> str:
    """Describe memory that no visible process explains."""
    return f"{device.held_bytes / 2**30:.1f} GB of its memory are in use, but by no visible process"


def _closed(view: DeviceView, closure: Closure) -> DeviceView:
    """Return the view of a closed device; one that could not be leased anyway keeps its state."""
    state = "drained" if view.state == "free" else view.state
    state = "draining" if state in IN_USE else state
    drained = f"drained by {closure.actor}" + (f": {closure.reason}" if closure.reason else "")
    before = view.detail
    if view.device.status is DeviceStatus.DRAINED:
        before = view.detail.partition("; ")[0] if any(view.leases) else ""  # not twice
    if server := kept_for(closure):
        drained = f"kept for {server}, which starts again"
    if closure.actor == LEAK:
        drained = (
            "in quarantine" if view.state == "occupied" else f"in quarantine: {closure.reason}"
        )
    detail = f"{before.rstrip('.')}; {drained}" if before else drained
    return replace(view, state=state, detail=detail, free_slots=0)


def count_models(views: Sequence[DeviceView], rates: RateCard) -> tuple[ModelCount, ...]:
    """Return totals by model and memory, largest first.

    A model is listed while one of its devices can be leased sooner or later, but only devices in
    service are counted. The rate is that of a whole device.
    """
    found: dict[tuple[str, int, DeviceCount], list[DeviceView]] = {}
    for view in views:
        if view.state in COUNTED:
            key = (view.device.model, view.device.memory_bytes, view.device.part)
            found.setdefault(key, []).append(view)
    counts = [
        ModelCount(
            model=model,
            memory_bytes=memory,
            total=sum(view.in_service for view in some),
            free=sum(view.state == "free" for view in some),
            rate=rates.rate_of(model, part=part),
            free_slots=sum(view.free_slots for view in some if view.device.slots > 1),
            reserved=count_reserved([view.device for view in some]),
            part=part,
        )
        for (model, memory, part), some in found.items()
    ]
    return tuple(sorted(counts, key=lambda c: (-c.memory_bytes, c.model, -c.part)))


def count_shares(views: Sequence[DeviceView]) -> tuple[ShareCount, ...]:
    """Return the shares of one slot by model, memory and number of slots, largest first."""
    found: dict[tuple[str, int, int, DeviceCount], list[DeviceView]] = {}
    for view in views:
        device = view.device
        if view.state in COUNTED and device.slots > 1:
            key = (device.model, device.memory_bytes, device.slots, device.part)
            found.setdefault(key, []).append(view)
    counts = (
        ShareCount(
            model=model,
            memory_bytes=memory,
            slots=slots,
            free_slots=tuple(view.free_slots for view in some if view.in_service),
            reserved=count_reserved([view.device for view in some]),
            part=part,
        )
        for (model, memory, slots, part), some in found.items()
    )
    return tuple(sorted(counts, key=lambda c: (-c.share_bytes, c.model, -c.part)))


def credit_ends(
    leases: Collection[Lease],
    accounts: Mapping[str, Account],
    grace: timedelta,
    now: datetime,
) -> dict[str, datetime]:
    """Return when each lease ends because its account runs dry, unless it gets credits, by id.

    Leases of one account draw on it together. A lease that costs nothing has no such end.
    """
    rates: dict[str, int] = {}
    due: dict[str, int] = {}
    for lease in leases:
        if lease.state is LeaseState.RUNNING:
            rates[lease.account] = rates.get(lease.account, 0) + lease.rate
            due[lease.account] = due.get(lease.account, 0) + ledger_rules.charge_due(lease, now)
    ends = {}
    for lease in leases:
        account = accounts.get(lease.account)
        if account is None or not rates.get(lease.account) or not lease.rate:
            continue
        if lease.when_dry == SESSION and lease.ends_at:
            ends[lease.id] = lease.ends_at + grace
            continue
        left = account.balance - due[lease.account] + lease.overdraft
        dry = ledger_rules.runs_dry_at(left, rates[lease.account], now)
        if dry is not None:
            ends[lease.id] = dry + grace
    return ends
