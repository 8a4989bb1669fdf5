"""Rows of MIG layouts and of their changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from ..db.schema import OPEN_PLACE, devices, lease_places, mig_changes, mig_instances
from ..devices.models import MIGPlacement
from .models import MIGChange, RecordedInstance, RecordState

_ORDER = (
    sa.case((mig_instances.c.state == RecordState.UNWANTED.value, 0), else_=1),
    mig_instances.c.start,
    mig_instances.c.id,
)


def load_instances(connection: sa.Connection, gpu_uuid: str) -> list[RecordedInstance]:
    """Return the records of a GPU's instances: first those that are to be destroyed."""
    query = sa.select(mig_instances).where(mig_instances.c.gpu_uuid == gpu_uuid)
    return [_instance(row) for row in connection.execute(query.order_by(*_ORDER)).mappings()]


def load_all_instances(connection: sa.Connection) -> dict[str, list[RecordedInstance]]:
    """Return all records by GPU."""
    query = sa.select(mig_instances).order_by(mig_instances.c.gpu_uuid, *_ORDER)
    found: dict[str, list[RecordedInstance]] = {}
    for row in connection.execute(query).mappings():
        found.setdefault(row["gpu_uuid"], []).append(_instance(row))
    return found


def replace_instances(
    connection: sa.Connection, gpu_uuid: str, records: Iterable[RecordedInstance]
) -> None:
    """Replace all records of a GPU."""
    connection.execute(sa.delete(mig_instances).where(mig_instances.c.gpu_uuid == gpu_uuid))
    for record in records:
        row = {"gpu_uuid": gpu_uuid, **_row(record)}
        connection.execute(sa.insert(mig_instances).values(row))


def update_instance(connection: sa.Connection, record: RecordedInstance) -> None:
    """Write a changed record."""
    changed = sa.update(mig_instances).where(mig_instances.c.id == record.id)
    connection.execute(changed.values(_row(record)))


def delete_instance(connection: sa.Connection, record: RecordedInstance) -> None:
    """Delete the record of an instance that is gone."""
    connection.execute(sa.delete(mig_instances).where(mig_instances.c.id == record.id))


def load_changes(connection: sa.Connection) -> dict[str, MIGChange]:
    """Return the changes that are not complete, by GPU."""
    rows = connection.execute(sa.select(mig_changes).order_by(mig_changes.c.gpu_uuid)).mappings()
    return {row["gpu_uuid"]: MIGChange(**row) for row in rows}


def put_change(connection: sa.Connection, change: MIGChange) -> None:
    """Write a change; it takes the place of an earlier one of the same GPU."""
    end_change(connection, change.gpu_uuid)
    connection.execute(sa.insert(mig_changes).values(asdict(change)))


def touch_change(
    connection: sa.Connection, gpu_uuid: str, worker: str, values: Mapping[str, Any]
) -> bool:
    """Update a worker's change. False if another process has taken it over."""
    mine = (mig_changes.c.gpu_uuid == gpu_uuid) & (mig_changes.c.worker == worker)
    return connection.execute(sa.update(mig_changes).where(mine).values(**values)).rowcount > 0


def end_change(connection: sa.Connection, gpu_uuid: str) -> None:
    """Delete a change that is complete."""
    connection.execute(sa.delete(mig_changes).where(mig_changes.c.gpu_uuid == gpu_uuid))


def leased_on(connection: sa.Connection, gpu_uuid: str, instances: Collection[str]) -> list[str]:
    """Return the ids of open leases on a GPU or its instances.

    ``instances`` are UUIDs of instances that the table of devices may not have.
    """
    known = sa.select(devices.c.uuid).where(devices.c.parent_uuid == gpu_uuid)
    on_it = lease_places.c.uuid.in_([gpu_uuid, *instances]) | lease_places.c.uuid.in_(known)
    query = sa.select(lease_places.c.lease_id).where(OPEN_PLACE, on_it).distinct()
    return sorted(connection.execute(query).scalars())


def _row(record: RecordedInstance) -> dict[str, Any]:
    return {
        "state": record.state.value,
        "profile": record.profile,
        "profile_id": record.profile_id,
        "start": record.placement.start,
        "size": record.placement.size,
        "instance_id": record.instance_id,
        "uuid": record.uuid,
        "boot_id": record.boot_id,
    }


def _instance(row: sa.RowMapping) -> RecordedInstance:
    return RecordedInstance(
        profile=row["profile"],
        profile_id=row["profile_id"],
        placement=MIGPlacement(row["start"], row["size"]),
        boot_id=row["boot_id"],
        state=RecordState(row["state"]),
        instance_id=row["instance_id"],
        uuid=row["uuid"],
        id=row["id"],
    )
