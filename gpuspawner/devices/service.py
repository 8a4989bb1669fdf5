"""Devices taken out of service: drains, quarantine, closed nodes, and the pause of all grants.

The store records what is closed and why. An external scheduler is told afterwards, repeatedly until
it answers: no matter which process crashes in between, nothing closed here stays open there.

A device with an unexplained process is never granted, even if it is not closed: placement sees it
as occupied in the same snapshot that it grants from. A lasting problem becomes a quarantine, which
also shows it in the audit log and closes the device for processes that see less of the machine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Protocol

import sqlalchemy as sa

from ..core.errors import GPUSpawnerError, InvalidRequest, NoDeviceFree, Refused
from ..core.text import checked_reason, short_text
from ..core.units import format_bytes
from ..db import audit_log
from ..db.engine import Store
from ..leases import repository as leases_repository
from ..leases.models import Lease, LeasedDevice, LeaseState
from . import closures, repository
from .closures import GRANTING, HEALTH, LEAK, Closure, kept_for
from .models import Device, MachineScheduler
from .placement import leasable
from .snapshots import DeviceView, InventoryCache, InventorySnapshot, describe_held_memory


@dataclass(eq=False, repr=False)
class MachineService:
    """Closes and opens whole machines where an external scheduler allocates their devices.

    Without one, each device is its own machine.
    """

    store: Store
    delegate: MachineScheduler | None
    log: logging.Logger

    def on_machine(self, uuid: str) -> tuple[str, ...]:
        """Return the devices that are drained together with this one, including it."""
        return (uuid,) if self.delegate is None else self.delegate.on_machine(uuid)

    def machine_of(self, uuid: str) -> str:
        """Return the name of the machine with this device; empty if there is only this machine."""
        return "" if self.delegate is None else self.delegate.machine_of(uuid)

    def keep_closed(self, known: Mapping[str, Closure] | None = None) -> None:
        """Keep the machines of closed devices closed at the external scheduler.

        ``known`` are the closures, if the caller has just read them. What fails now is retried next
        time.
        """
        if self.delegate is None:
            return
        closed = closed_devices(self.store.run(closures.load) if known is None else known)
        told = self.delegate.keep_closed({uuid: _why(each) for uuid, each in closed.items()})
        # Somebody may have reopened one meanwhile.
        still = closed_devices(self.store.run(closures.load)) if told else {}
        for uuid in told:
            if not self.closed_on(uuid, still):
                self.open_there(uuid)

    def closed_on(self, uuid: str, closed: Collection[str]) -> list[str]:
        """Return the closed devices of the machine with this device."""
        return [each for each in self.on_machine(uuid) if each in closed]

    def open_there(self, uuid: str) -> None:
        """Reopen the machine of a device after its last closure here was lifted."""
        if self.delegate is None:
            return
        try:
            self.delegate.reopen(uuid)
        except GPUSpawnerError as error:
            machine = self.machine_of(uuid)
            self.log.warning("The machine %s stays closed: %s", machine, error.message)


def _why(closure: Closure) -> str:
    """Return the reason shown at the external scheduler."""
    if closure.actor == HEALTH:
        return f"{closure.subject} is sick: {closure.reason}"
    return closure.reason or f"drained by {closure.actor}"


def closed_devices(known: Mapping[str, Closure]) -> dict[str, Closure]:
    """Return the devices closed to everybody, without reserved ones and the general pause."""
    return {
        subject: closure
        for subject, closure in known.items()
        if subject != GRANTING and kept_for(closure) is None
    }


ENDING = timedelta(seconds=20)
"""How long a process may take to release a device after its server ended."""


class LeasedProcesses(Protocol):
    """The processes of open leases on this machine."""

    def lease_of(self, pid: int) -> Lease | None:
        """Return the lease that a process belongs to; None if there is none or it is gone."""

    def exists(self, pid: int) -> bool:
        """Return True if there is a process with this id."""


@dataclass(eq=False, repr=False)
class LeakService:
    """Finds devices that are occupied without a lease, and quarantines them.

    A device with free slots is occupied if a process of no lease is on it.
    """

    store: Store
    clock: Callable[[], datetime]
    look: Callable[[], InventorySnapshot]
    processes_of: Callable[[Sequence[Lease]], LeasedProcesses]
    log: logging.Logger
    _leaked_since: dict[str, datetime] = field(default_factory=dict, init=False)

    def judge_leaks(self) -> list[Closure]:
        """Quarantine devices that stay occupied without a lease, and end quarantines when due.

        Returns the newly quarantined devices. A device that is not responding stays as it is, and
        so does one on which a server is just starting. Reads ``/proc``.
        """
        now = self.clock()
        look = self.look()
        with self.store.read() as connection:
            closed = closures.load(connection)
            leases = leases_repository.open_leases(connection)
        owners = self.processes_of(leases)
        before, self._leaked_since = self._leaked_since, {}
        begun = []
        for device in look.devices:
            uuid = device.uuid
            closure = closed.get(uuid)
            holders = [lease for lease in leases if uuid in lease.uuids]
            if leasable(device) is not None or not _can_be_judged(device, holders):
                continue
            reason = foreign_use(device, owners) if holders else who_holds(device)
            if not reason:
                if closure is not None and closure.actor == LEAK:
                    self._reopen_leaked(uuid, now)
            elif closure is None:
                since = self._leaked_since[uuid] = min(before.get(uuid, now), now)
                if now - since >= ENDING and (done := self._quarantine(uuid, reason, holders, now)):
                    begun.append(done)
        return begun

    def _quarantine(
        self, uuid: str, reason: str, holders: Sequence[Lease], now: datetime
    ) -> Closure | None:
        """Quarantine a device; None if it is already closed or was leased meanwhile."""
        closure = Closure(uuid, now, LEAK, reason)
        known = {lease.id for lease in holders}
        with self.store.write() as connection:
            taken = leases_repository.taken(connection)
            if any(place.uuid == uuid and of not in known for place, of in taken.items()):
                return None
            if not closures.close(connection, closure):
                return None
            audit_log.note(
                connection, at=now, actor=LEAK, action="quarantine", subject=uuid, detail=reason
            )
        self.log.warning("Device %s is in quarantine: %s", uuid, reason)
        return closure

    def _reopen_leaked(self, uuid: str, now: datetime) -> None:
        with self.store.write() as connection:
            closure = closures.load(connection).get(uuid)
            if closure is not None and closure.actor == LEAK:
                closures.reopen(connection, uuid)
                detail = "it is no longer used without a lease"
                audit_log.note(
                    connection, at=now, actor=LEAK, action="undrain", subject=uuid, detail=detail
                )
        self.log.info("Device %s is no longer used without a lease", uuid)


def _can_be_judged(device: Device, holders: Sequence[Lease]) -> bool:
    """Return True if it can be known whether anything on a device belongs to no lease."""
    if not holders:
        return True
    is_shared = all(each.is_shared for lease in holders for each in lease.devices)
    return is_shared and all(lease.state is LeaseState.RUNNING for lease in holders)


def foreign_use(device: Device, owners: LeasedProcesses) -> str:
    """Describe the processes without a lease on a shared device; empty if there are none."""
    strange = [
        process
        for process in device.compute_processes
        if owners.exists(process.pid) and owners.lease_of(process.pid) is None
    ]
    names = [f"{p.name or 'a process'} (pid {p.pid})" for p in strange]
    if not names:
        return ""
    used = sum(process.used_memory_bytes or 0 for process in strange)
    figure = f", with {format_bytes(used)} of its memory" if used else ""
    return f"{', '.join(names[:5])}, not from any server of this hub{figure}"


def who_holds(device: Device) -> str:
    """Describe what occupies a device that has no lease; empty if nothing does."""
    if device.empty:
        return ""
    names = [f"{p.name or 'a process'} (pid {p.pid})" for p in device.compute_processes]
    if names:
        return f"{', '.join(names[:5])}, not from any server of this hub"
    return describe_held_memory(device)


@dataclass(eq=False, repr=False)
class DeviceService:
    """Manages the devices: takes them out of service and returns them, for admins."""

    store: Store
    clock: Callable[[], datetime]
    inventory: InventoryCache
    machines: MachineService

    def look(self, *, fresh: bool = False) -> InventorySnapshot:
        """Return the latest snapshot of the devices (at most ``refresh_seconds`` old)."""
        return self.inventory.look(self.clock(), fresh=fresh)

    def require_same_slots(
        self, connection: sa.Connection, devices: Collection[LeasedDevice]
    ) -> None:
        """Raise NoDeviceFree if a device has another number of slots by now; then look again."""
        now = repository.slots_of(connection, [device.uuid for device in devices])
        if any(now.get(device.uuid, device.slots) != device.slots for device in devices):
            raise NoDeviceFree("The way in which a GPU is shared has just changed.", occupied=1)

    def closures(self) -> dict[str, Closure]:
        """Return everything that is closed to new leases, by subject."""
        return self.store.run(closures.load)

    def pause(self, *, actor: str, reason: str = "") -> bool:
        """Grant no devices until :meth:`resume`. Returns False if granting was already paused."""
        return self._close(GRANTING, "pause", actor, reason)

    def resume(self, *, actor: str, reason: str = "") -> bool:
        """Grant devices again. Returns False if granting was not paused."""
        return self._reopen(GRANTING, "resume", actor, reason)

    def drain(self, device: str, *, actor: str, reason: str = "") -> bool:
        """Drain a device (UUID or index): the session on it ends normally, no new one starts.

        Returns False if it was already drained. Raises InvalidRequest for an unknown device. Where
        an external scheduler allocates devices, the whole machine is drained; see
        :meth:`MachineService.on_machine`. Waiting members may start later than they were told; for
        admins, use :class:`gpuspawner.queue.drains.DrainService`.
        """
        uuid, reason = self.find_device(device).uuid, checked_reason(reason)
        if self.machines.delegate is not None:
            self.machines.delegate.close(uuid, reason or f"drained by {actor}")
        beside = self.machines.on_machine(uuid)
        done = [self._close(each, "drain", actor, reason) for each in beside]
        return any(done)

    def drain_in(self, connection: sa.Connection, uuid: str, *, actor: str, reason: str) -> bool:
        """Drain one device in the caller's transaction, without its machine."""
        return self._close_in(connection, uuid, "drain", actor, reason)

    def undrain(self, device: str, *, actor: str, reason: str = "") -> bool:
        """Return a device to service, even a missing or a sick one. False if it was not drained.

        A sick device returns as it is: only new faults drain it again. Raises Refused, and changes
        nothing, if somebody else closed its machine, or if an instance is closed as its GPU is.
        """
        drained = self.store.run(closures.load).keys() - {GRANTING}
        uuid = device if device in drained else self.find_device(device).uuid
        reason = checked_reason(reason)
        if self.machines.delegate is not None:
            self.machines.delegate.reopen(uuid)
        beside = self.machines.on_machine(uuid)
        done = [self._reopen(each, "undrain", actor, reason) for each in beside]
        if not any(done) and uuid in self.store.run(closures.load):
            raise Refused(
                "It is closed because its GPU is: return the GPU to service, or complete the "
                "change of its MIG layout (gpuspawner mig show)."
            )
        if any(done):
            self.machines.open_there(uuid)  # it may have been closed again before this was written
        return any(done)

    def on_machines(self, views: Sequence[DeviceView]) -> tuple[DeviceView, ...]:
        """Return the views with the names of their machines."""
        return tuple(
            replace(each, machine=self.machines.machine_of(each.device.uuid)) for each in views
        )

    def find_device(self, device: str) -> Device:
        """Return a device by UUID or index. Raises InvalidRequest.

        From the store, because the caller may see less of the machine than the hub does.
        """
        source = self.inventory.source.name
        known = self.store.run(lambda connection: repository.load_devices(connection, source))
        named = [
            d
            for d in known or self.inventory.look(self.clock()).devices
            if device in (d.uuid, str(d.index))
        ]
        if len(named) == 1:
            return named[0]
        what = f"{len(named)} devices have" if named else "No device has"
        raise InvalidRequest(
            f"{what} the UUID or index {short_text(device)}; `gpuspawner devices` lists them.",
            field="device",
        )

    def _close(self, subject: str, action: str, actor: str, reason: str) -> bool:
        with self.store.write() as connection:
            return self._close_in(connection, subject, action, actor, reason)

    def _close_in(
        self, connection: sa.Connection, subject: str, action: str, actor: str, reason: str
    ) -> bool:
        now, reason = self.clock(), checked_reason(reason)
        before = closures.load(connection).get(subject)
        if before is not None and before.actor in (HEALTH, LEAK):
            closures.reopen(connection, subject)  # an automatic one would end by itself
        done = closures.close(connection, Closure(subject, now, actor, reason))
        if done:
            audit_log.note(
                connection, at=now, actor=actor, action=action, subject=subject, detail=reason
            )
        return done

    def _reopen(self, subject: str, action: str, actor: str, reason: str) -> bool:
        now, reason = self.clock(), checked_reason(reason)
        with self.store.write() as connection:
            done = closures.reopen(connection, subject)
            if done:
                repository.take_back_sick_lease(connection, subject, now)
                audit_log.note(
                    connection, at=now, actor=actor, action=action, subject=subject, detail=reason
                )
        return done
