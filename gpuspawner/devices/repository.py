"""Rows of devices and of their health."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from ..db.schema import (
    OPEN_LEASE,
    UNSETTLED,
    device_health,
    devices,
    leases,
    mig_changes,
    nvml_clients,
    sick_leases,
)
from ..leases import repository as leases_repository
from ..leases.models import Lease
from ..monitoring.health import SICK, HealthState, returned
from .models import Device, DeviceProcess, DeviceStatus, Inventory
from .source import unknown

DEVICE_GONE = "no longer present"


def load_devices(connection: sa.Connection, source: str) -> tuple[Device, ...]:
    """Return every device that a source has ever shown, by index."""
    query = sa.select(devices).where(devices.c.source == source)
    rows = connection.execute(query.order_by(devices.c.index, devices.c.uuid))
    return tuple(_device(row) for row in rows.mappings())


def source_of(connection: sa.Connection) -> str:
    """Return the source whose devices are in the table; empty if there are none."""
    found: str | None = connection.execute(sa.select(devices.c.source).limit(1)).scalar()
    return found or ""


def as_seen(known: tuple[Device, ...], inventory: Inventory) -> tuple[Device, ...]:
    """Update the known devices from a snapshot: one that was not seen is unknown, never free.

    Only a MIG instance may disappear for good: admins remove them and create new ones.
    """
    seen = {device.uuid: device for device in inventory.devices}
    reason = inventory.error or DEVICE_GONE
    missing = (
        unknown(device, reason)
        for device in known
        if device.uuid not in seen and (inventory.error or device.parent_uuid is None)
    )
    merged = [*inventory.devices, *missing]
    return tuple(sorted(merged, key=lambda device: (device.index, device.uuid)))


def save_devices(
    connection: sa.Connection, known: tuple[Device, ...], inventory: Inventory
) -> None:
    """Write what changed between ``known`` and ``inventory``; delete what disappeared for good."""
    before = {device.uuid: device for device in known}
    seen = {device.uuid: device for device in as_seen(known, inventory)}
    other_source = devices.c.source != inventory.source
    gone = before.keys() - seen.keys()
    connection.execute(sa.delete(devices).where(other_source | devices.c.uuid.in_(gone)))
    for uuid, device in seen.items():
        if uuid not in before:
            connection.execute(sa.insert(devices).values(_row(device, inventory)))
        elif device != before[uuid]:
            changed = sa.update(devices).where(devices.c.uuid == uuid)
            connection.execute(changed.values(_row(device, inventory)))


def without_lease(connection: sa.Connection, uuids: Collection[str]) -> frozenset[str]:
    """Return which of the devices no open lease has."""
    return frozenset(uuids) - {place.uuid for place in leases_repository.taken(connection)}


def change_slots(connection: sa.Connection, wanted: Mapping[str, int]) -> frozenset[str]:
    """Change the number of slots of devices without a lease; returns the UUIDs of these.

    Grants compare the number in their own transaction (:func:`slots_of`).
    """
    unused = without_lease(connection, wanted)
    for uuid in unused:
        this = sa.update(devices).where(devices.c.uuid == uuid)
        connection.execute(this.values(slots=wanted[uuid]))
    return unused


def slots_of(connection: sa.Connection, uuids: Collection[str]) -> dict[str, int]:
    """Return the number of slots of each of these devices."""
    query = sa.select(devices.c.uuid, devices.c.slots).where(devices.c.uuid.in_(uuids))
    return {row.uuid: row.slots for row in connection.execute(query)}


def _row(device: Device, inventory: Inventory) -> dict[str, Any]:
    row = asdict(device)
    row["status"] = device.status.value
    for name in ("processes", "reserved_for"):
        row[name] = json.dumps(row[name])
    return row | {"source": inventory.source, "observed_at": inventory.observed_at}


def _device(row: Any) -> Device:
    fields = {name: row[name] for name in row if name not in ("source", "observed_at")}
    fields["status"] = DeviceStatus(fields["status"])
    fields["reserved_for"] = tuple(json.loads(fields["reserved_for"]))
    fields["processes"] = tuple(DeviceProcess(**p) for p in json.loads(fields["processes"]))
    return Device(**fields)


_STATE = tuple(each.name for each in fields(HealthState))


@dataclass(frozen=True, slots=True)
class StoredHealth:
    """The health of a device as last judged."""

    uuid: str
    state: HealthState
    probe: str = ""
    """What the last failed probe reported."""


@dataclass(frozen=True, slots=True)
class SickLease:
    """A lease that was on a device when it became sick."""

    lease_id: str
    uuid: str
    cause: str
    reason: str
    fault_at: datetime
    told_at: datetime
    settled_at: datetime | None = None
    refunded: int = 0
    """Microcredits that were refunded for it."""


def load_health(connection: sa.Connection) -> dict[str, StoredHealth]:
    """Return the health of all devices, by UUID."""
    rows = connection.execute(sa.select(device_health)).mappings()
    return {row["uuid"]: _known(row) for row in rows}


def get_health(connection: sa.Connection, uuid: str) -> StoredHealth | None:
    """Lock and return the health of a device; None if it was never judged."""
    query = sa.select(device_health).where(device_health.c.uuid == uuid).with_for_update()
    row = connection.execute(query).mappings().first()
    return _known(row) if row else None


def put_health(connection: sa.Connection, known: StoredHealth) -> None:
    """Replace the stored health of a device."""
    connection.execute(sa.delete(device_health).where(device_health.c.uuid == known.uuid))
    row = {name: getattr(known.state, name) for name in _STATE}
    row["accepted"] = ",".join(sorted(known.state.accepted))
    row |= {"uuid": known.uuid, "probe": known.probe}
    connection.execute(sa.insert(device_health).values(row))


def holders_of_device(connection: sa.Connection, uuid: str, at: datetime) -> list[Lease]:
    """Return the leases that held a device at a moment or hold it now.

    Leases already noted as on a sick device are left out.
    """
    then = (leases.c.started_at <= at) & (leases.c.ended_at >= at)
    told = sa.select(sick_leases.c.lease_id)
    found = leases_repository.where(connection, (then | OPEN_LEASE) & leases.c.id.notin_(told))
    return [lease for lease in found if uuid in lease.uuids]


def note_sick_lease(connection: sa.Connection, sick: SickLease) -> None:
    """Record that a lease is on a device that became sick."""
    connection.execute(sa.insert(sick_leases).values(asdict(sick)))


def sick_leases_to_settle(connection: sa.Connection) -> list[str]:
    """Return the ids of ended leases whose time on a sick device is not refunded yet."""
    query = (
        sa.select(sick_leases.c.lease_id)
        .join(leases, leases.c.id == sick_leases.c.lease_id)
        .where(UNSETTLED, leases.c.ended_at.isnot(None))
        .order_by(sick_leases.c.lease_id)
    )
    return list(connection.execute(query).scalars())


def sick_lease(connection: sa.Connection, lease_id: str) -> SickLease | None:
    """Return what is recorded about a lease's time on a sick device."""
    query = sa.select(sick_leases).where(sick_leases.c.lease_id == lease_id)
    row = connection.execute(query).mappings().first()
    return SickLease(**row) if row else None


def open_sick_leases(connection: sa.Connection) -> dict[str, SickLease]:
    """Return the records of open leases, by lease id."""
    query = (
        sa.select(sick_leases)
        .join(leases, leases.c.id == sick_leases.c.lease_id)
        .where(leases.c.ended_at.is_(None))
    )
    return {row["lease_id"]: SickLease(**row) for row in connection.execute(query).mappings()}


def settle_sick_lease(
    connection: sa.Connection, lease_id: str, at: datetime, refunded: int
) -> None:
    """Record the refund for a lease's time on a sick device."""
    mine = sick_leases.c.lease_id == lease_id
    values = {"settled_at": at, "refunded": refunded}
    connection.execute(sa.update(sick_leases).where(mine).values(values))


def _known(row: Any) -> StoredHealth:
    values = {name: row[name] for name in _STATE}
    values["accepted"] = frozenset(filter(None, values["accepted"].split(",")))
    return StoredHealth(row["uuid"], HealthState(**values), row["probe"])


def take_back_sick_lease(connection: sa.Connection, uuid: str, now: datetime) -> None:
    """Record that an admin returns a sick device to service as it is."""
    known = get_health(connection, uuid)
    if known is not None and known.state.verdict == SICK:
        put_health(connection, StoredHealth(uuid, returned(known.state, now, by_hand=True)))


HELD_SECONDS = 90.0
"""Seconds for which a step of a MIG change keeps NVML closed; no command may take so long."""


def is_nvml_held(connection: sa.Connection, now: datetime) -> bool:
    """Return True while a MIG layout is being changed: no process of the hub may open NVML then.

    A change whose process was killed no longer counts :data:`HELD_SECONDS` after its last step.
    """
    since = now - timedelta(seconds=HELD_SECONDS)
    going_on = (mig_changes.c.failure == "") & (mig_changes.c.stepped_at > since)
    return bool(connection.execute(sa.select(sa.exists().where(going_on))).scalar_one())


def add_nvml_client(connection: sa.Connection, process: str, now: datetime) -> None:
    """Record that a process is about to open NVML."""
    remove_nvml_client(connection, process)
    connection.execute(sa.insert(nvml_clients).values(process=process, opened_at=now))


def remove_nvml_client(connection: sa.Connection, process: str) -> None:
    """Record that a process has closed NVML, or is gone."""
    connection.execute(sa.delete(nvml_clients).where(nvml_clients.c.process == process))


def load_nvml_clients(connection: sa.Connection) -> list[str]:
    """Return the processes that have NVML open or were killed while they had."""
    query = sa.select(nvml_clients.c.process).order_by(nvml_clients.c.process)
    return list(connection.execute(query).scalars())
