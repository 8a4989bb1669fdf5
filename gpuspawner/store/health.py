"""Rows of how devices are, and of the leases that were on sick ones."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from ..model import Lease
from ..telemetry.health import SICK, HealthState, returned
from . import leases as lease_rows
from .schema import OPEN_LEASE, leases
from .schema_health import UNSETTLED, device_health, sick_leases

_STATE = tuple(each.name for each in fields(HealthState))


@dataclass(frozen=True, slots=True)
class Known:
    """How a device is, as judged last."""

    uuid: str
    state: HealthState
    probe: str = ""
    """What the last probe that failed said."""


@dataclass(frozen=True, slots=True)
class SickLease:
    """A lease that was on a device when it fell sick."""

    lease_id: str
    uuid: str
    cause: str
    reason: str
    fault_at: datetime
    told_at: datetime
    settled_at: datetime | None = None
    refunded: int = 0
    """Microcredits that were given back for it."""


def load(connection: sa.Connection) -> dict[str, Known]:
    """All of them, by UUID."""
    rows = connection.execute(sa.select(device_health)).mappings()
    return {row["uuid"]: _known(row) for row in rows}


def get(connection: sa.Connection, uuid: str) -> Known | None:
    """One, which nobody else changes until the transaction ends; None when it was never judged."""
    query = sa.select(device_health).where(device_health.c.uuid == uuid).with_for_update()
    row = connection.execute(query).mappings().first()
    return _known(row) if row else None


def put(connection: sa.Connection, known: Known) -> None:
    """Write one, in the place of what was there."""
    connection.execute(sa.delete(device_health).where(device_health.c.uuid == known.uuid))
    row = {name: getattr(known.state, name) for name in _STATE}
    row |= {"accepted": ",".join(sorted(known.state.accepted))}
    row |= {"uuid": known.uuid, "probe": known.probe}
    connection.execute(sa.insert(device_health).values(row))


def holders(connection: sa.Connection, uuid: str, at: datetime) -> list[Lease]:
    """The leases that hold a device, or whose server did at a moment, and that are not known to
    have been on a sick one."""
    then = (leases.c.started_at <= at) & (leases.c.ended_at >= at)
    told = sa.select(sick_leases.c.lease_id)
    found = lease_rows.where(connection, (then | OPEN_LEASE) & leases.c.id.notin_(told))
    return [lease for lease in found if uuid in lease.uuids]


def note(connection: sa.Connection, sick: SickLease) -> None:
    """Write down that a lease is on a device that fell sick."""
    row = {each.name: getattr(sick, each.name) for each in fields(SickLease)}
    connection.execute(sa.insert(sick_leases).values(row))


def to_settle(connection: sa.Connection) -> list[str]:
    """The ids of leases that have ended and whose time on a sick device is not given back."""
    query = (
        sa.select(sick_leases.c.lease_id)
        .join(leases, leases.c.id == sick_leases.c.lease_id)
        .where(UNSETTLED, leases.c.ended_at.isnot(None))
        .order_by(sick_leases.c.lease_id)
    )
    return list(connection.execute(query).scalars())


def sick_lease(connection: sa.Connection, lease_id: str) -> SickLease | None:
    """What is known of a lease's time on a sick device."""
    query = sa.select(sick_leases).where(sick_leases.c.lease_id == lease_id)
    row = connection.execute(query).mappings().first()
    return SickLease(**row) if row else None


def open_sick_leases(connection: sa.Connection) -> dict[str, SickLease]:
    """Of leases that go on, by the lease's id."""
    query = (
        sa.select(sick_leases)
        .join(leases, leases.c.id == sick_leases.c.lease_id)
        .where(leases.c.ended_at.is_(None))
    )
    return {row["lease_id"]: SickLease(**row) for row in connection.execute(query).mappings()}


def settle(connection: sa.Connection, lease_id: str, at: datetime, refunded: int) -> None:
    """What its time cost is given back."""
    mine = sick_leases.c.lease_id == lease_id
    values = {"settled_at": at, "refunded": refunded}
    connection.execute(sa.update(sick_leases).where(mine).values(values))


def _known(row: Any) -> Known:
    values = {name: row[name] for name in _STATE}
    values["accepted"] = frozenset(filter(None, values["accepted"].split(",")))
    return Known(row["uuid"], HealthState(**values), row["probe"])


def take_back(connection: sa.Connection, uuid: str, now: datetime) -> None:
    """An admin gives a device out again as it is."""
    known = get(connection, uuid)
    if known is not None and known.state.verdict == SICK:
        put(connection, Known(uuid, returned(known.state, now, by_hand=True)))
