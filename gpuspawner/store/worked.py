"""How much of the time for which GPUs were held they worked, lease by lease.

Minutes tell it exactly, and are added up by the database. Of the time whose minutes are gone there
are hours, and an hour counts for the lease that held the GPU in its middle. A GPU that several
share is told whole to each of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import sqlalchemy as sa

from ..ledger.usage import SEVERAL
from ..model import ServerRef
from ..telemetry.rollup import beginning
from ..telemetry.values import HOUR, MINUTE
from .schema import lease_places, leases
from .schema_use import device_use

_HALF = timedelta(minutes=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worked:
    """A lease with GPUs, and what they did between two moments. All in seconds of one GPU."""

    lease_id: str
    server: ServerRef
    group: str
    model: str
    devices: int
    since: datetime
    until: datetime | None
    """None while it is open."""
    held: float
    measured: float = 0.0
    """For how long of that it is known whether they worked."""
    busy: float = 0.0
    """For how long they worked."""

    @property
    def rested(self) -> float:
        """For how long they are known not to have worked."""
        return max(0.0, self.measured - self.busy)


def between(connection: sa.Connection, start: datetime, end: datetime) -> list[Worked]:
    """Every lease with GPUs whose server was up between the two moments."""
    found, places = _leases(connection, start, end)
    exact = _exact_from(connection, start, end)
    sums = _by_minutes(connection, exact, end)
    for lease_id, measured, busy in _by_hours(connection, start, exact, found, places):
        before = sums.get(lease_id, (0.0, 0.0))
        sums[lease_id] = (before[0] + measured, before[1] + busy)
    return [
        replace(lease, measured=min(lease.held, measured), busy=min(lease.held, measured, busy))
        for lease in found.values()
        for measured, busy in [sums.get(lease.lease_id, (0.0, 0.0))]
    ]


def _leases(
    connection: sa.Connection, start: datetime, end: datetime
) -> tuple[dict[str, Worked], dict[str, list[str]]]:
    """The leases by id, nothing of their GPUs' work yet; and which of them held each GPU."""
    query = (
        sa.select(
            leases.c.id,
            leases.c.user,
            leases.c.server_name,
            leases.c.group,
            leases.c.started_at,
            leases.c.ended_at,
            lease_places.c.uuid,
            lease_places.c.model,
        )
        .join(lease_places, lease_places.c.lease_id == leases.c.id)
        .where(leases.c.started_at < end)
        .where(sa.or_(leases.c.ended_at.is_(None), leases.c.ended_at > start))
        .order_by(leases.c.started_at, leases.c.id)
    )
    found: dict[str, Worked] = {}
    places: dict[str, list[str]] = {}
    for row in connection.execute(query):
        began, ended = max(start, row.started_at), min(end, row.ended_at or end)
        held = max(0.0, (ended - began).total_seconds())
        places.setdefault(row.uuid, []).append(row.id)
        if (so_far := found.get(row.id)) is not None:
            model = row.model if row.model == so_far.model else SEVERAL
            held += so_far.held
            found[row.id] = replace(so_far, devices=so_far.devices + 1, held=held, model=model)
            continue
        found[row.id] = Worked(
            lease_id=row.id,
            server=ServerRef(row.user, row.server_name),
            group=row.group,
            model=row.model,
            devices=1,
            since=row.started_at,
            until=row.ended_at,
            held=held,
        )
    return found, places


def _exact_from(connection: sa.Connection, start: datetime, end: datetime) -> datetime:
    """From when on there is every minute that there was; what is before is told by hours."""
    query = sa.select(sa.func.min(device_use.c.since)).where(device_use.c.seconds == MINUTE)
    first = connection.execute(query).scalar()
    if first is None:
        return end
    begins = beginning(first, HOUR)
    whole = begins if begins == first else begins + timedelta(hours=1)
    return min(end, max(start, whole)) if _has_hours(connection, whole) else start


def _has_hours(connection: sa.Connection, before: datetime) -> bool:
    """Whether anything is told by hours that began earlier."""
    query = sa.select(sa.literal(1)).where(
        device_use.c.seconds == HOUR, device_use.c.since < before
    )
    return connection.execute(query.limit(1)).first() is not None


def _by_minutes(
    connection: sa.Connection, start: datetime, end: datetime
) -> dict[str, tuple[float, float]]:
    """Seconds measured and at work, by lease, of the minutes that began while it was up."""
    samples = sa.cast(device_use.c.samples, sa.Float)
    query = (
        sa.select(
            leases.c.id,
            sa.func.sum(MINUTE * device_use.c.known / samples),
            sa.func.sum(MINUTE * device_use.c.busy / samples),
        )
        .join(lease_places, lease_places.c.lease_id == leases.c.id)
        .join(device_use, device_use.c.uuid == lease_places.c.uuid)
        .where(
            device_use.c.seconds == MINUTE,
            device_use.c.since >= start,
            device_use.c.since < end,
            device_use.c.samples > 0,
            device_use.c.since >= leases.c.started_at,
            sa.or_(leases.c.ended_at.is_(None), device_use.c.since < leases.c.ended_at),
            leases.c.started_at < end,
            sa.or_(leases.c.ended_at.is_(None), leases.c.ended_at > start),
        )
        .group_by(leases.c.id)
    )
    return {row[0]: (float(row[1]), float(row[2])) for row in connection.execute(query)}


def _by_hours(
    connection: sa.Connection,
    start: datetime,
    end: datetime,
    found: dict[str, Worked],
    places: dict[str, list[str]],
) -> Iterable[tuple[str, float, float]]:
    """The same of hours, for the lease that held the GPU in the middle of each."""
    query = sa.select(
        device_use.c.uuid,
        device_use.c.since,
        device_use.c.samples,
        device_use.c.known,
        device_use.c.busy,
    ).where(
        device_use.c.seconds == HOUR,
        device_use.c.since >= beginning(start, HOUR),
        device_use.c.since < end,
        device_use.c.samples > 0,
    )
    hours: dict[str, list[tuple[datetime, float, float]]] = {}
    for uuid, since, samples, known, busy in connection.execute(query.order_by(device_use.c.since)):
        some = hours.setdefault(uuid, [])
        some.append((since + _HALF, HOUR * known / samples, HOUR * busy / samples))
    for uuid, some in hours.items():
        middles = [middle for middle, _, _ in some]
        for lease_id in places.get(uuid, ()):
            lease = found[lease_id]
            first = bisect_left(middles, max(start, lease.since))
            last = bisect_left(middles, min(end, lease.until or end))
            for _, measured, busy in some[first:last]:
                yield lease_id, measured, busy
