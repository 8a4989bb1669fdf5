"""Rows of the device table. They say what was last seen, not what is leased."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import sqlalchemy as sa

from ..model import Device, DeviceProcess, DeviceStatus, Inventory
from .schema import devices

GONE = "not there any more"


def load(connection: sa.Connection, source: str) -> tuple[Device, ...]:
    """Every device that a source has ever shown, by index."""
    query = sa.select(devices).where(devices.c.source == source)
    rows = connection.execute(query.order_by(devices.c.index, devices.c.uuid))
    return tuple(_device(row) for row in rows.mappings())


def source_of(connection: sa.Connection) -> str:
    """The source whose devices are in the table; nothing when there are none."""
    found: str | None = connection.execute(sa.select(devices.c.source).limit(1)).scalar()
    return found or ""


def as_seen(known: tuple[Device, ...], inventory: Inventory) -> tuple[Device, ...]:
    """The known devices brought up to date: one that was not seen is unknown, never free.

    Only a MIG instance may be gone for good: an admin takes them apart and makes new ones.
    """
    seen = {device.uuid: device for device in inventory.devices}
    reason = inventory.error or GONE
    missing = (
        replace(device, status=DeviceStatus.UNKNOWN, reason=reason, processes=(), held_bytes=0)
        for device in known
        if device.uuid not in seen and (inventory.error or device.parent_uuid is None)
    )
    merged = [*inventory.devices, *missing]
    return tuple(sorted(merged, key=lambda device: (device.index, device.uuid)))


def save(connection: sa.Connection, known: tuple[Device, ...], inventory: Inventory) -> None:
    """Write what changed between ``known`` and ``inventory``; forget what can be forgotten."""
    kept = {device.uuid for device in as_seen(known, inventory)}
    gone = [device.uuid for device in known if device.uuid not in kept]
    other_source = devices.c.source != inventory.source
    connection.execute(sa.delete(devices).where(other_source | devices.c.uuid.in_(gone)))
    before = {device.uuid: device for device in known}
    for device in as_seen(known, inventory):
        old = before.get(device.uuid)
        if old == device:
            continue
        row = _row(device, inventory)
        if old is None:
            connection.execute(sa.insert(devices).values(row))
        else:
            connection.execute(sa.update(devices).where(devices.c.uuid == device.uuid).values(row))


def _row(device: Device, inventory: Inventory) -> dict[str, Any]:
    row = asdict(device)
    row["status"] = device.status.value
    row["processes"] = json.dumps(row["processes"])
    return row | {"source": inventory.source, "observed_at": inventory.observed_at}


def _device(row: Any) -> Device:
    fields = {name: row[name] for name in row if name not in ("source", "observed_at")}
    fields["status"] = DeviceStatus(fields["status"])
    fields["processes"] = tuple(DeviceProcess(**p) for p in json.loads(fields["processes"]))
    return Device(**fields)
