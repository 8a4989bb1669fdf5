"""Rows of device use, of idle servers, and reports of utilization.

A minute that comes twice, after the clock was set back or the service was restarted, is stored as
one minute with both in it. An hour is made only of its minutes, so making it twice changes nothing.

Minutes are exact. Where they were deleted there are hours, and an hour counts for the lease that
held the GPU in its middle. A lease on a GPU that others share has rows of its own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa

from ..db.schema import (
    COUNTED_PLACE,
    OPEN_JOB,
    TO_SUM,
    batch_jobs,
    batch_marks,
    device_use,
    idle,
    lease_places,
    leases,
)
from ..leases.models import ServerRef
from ..ledger.usage import JOB_HOUR, SEVERAL, LeaseUse, counted_jobs, use_of_job
from .idle import IdleState
from .models import HOUR, MINUTE, DeviceUse, beginning, combine

NOW_IS = timedelta(minutes=3)
"""How old the last minute may be to show a device's present use."""

_COLUMNS = tuple(device_use.c[each.name] for each in fields(DeviceUse))
_STATE = tuple(each.name for each in fields(IdleState))


def remember_use(connection: sa.Connection, minutes: Iterable[DeviceUse]) -> None:
    """Store complete minutes; an already stored minute is combined with the new one."""
    added: dict[tuple[str, str, datetime], list[DeviceUse]] = {}
    for minute in minutes:
        added.setdefault((minute.uuid, minute.lease_id, minute.since), []).append(minute)
    times = {since for _, _, since in added}
    there = (device_use.c.seconds == MINUTE) & device_use.c.since.in_(times)
    for minute in _select(connection, there):
        if (key := (minute.uuid, minute.lease_id, minute.since)) in added:
            added[key].append(minute)
            connection.execute(sa.delete(device_use).where(_is(minute)))
    rows = [_row(combine(parts, since, MINUTE)) for (_, _, since), parts in added.items()]
    if rows:
        connection.execute(sa.insert(device_use), rows)


def sum_up_use(connection: sa.Connection, now: datetime) -> int:
    """Create the hours that are over from their minutes, and return how many minutes were new."""
    over = TO_SUM & (device_use.c.since < beginning(now, HOUR))
    new = _select(connection, over)
    for uuid, lease_id, since in {(x.uuid, x.lease_id, beginning(x.since, HOUR)) for x in new}:
        inside = (
            (device_use.c.uuid == uuid)
            & (device_use.c.lease_id == lease_id)
            & (device_use.c.seconds == MINUTE)
            & (device_use.c.since >= since)
            & (device_use.c.since < since + timedelta(hours=1))
        )
        hour = combine(_select(connection, inside), since, HOUR)
        connection.execute(sa.delete(device_use).where(_is(hour)))
        connection.execute(sa.insert(device_use).values(_row(hour)))
        connection.execute(sa.update(device_use).where(inside).values(summed=True))
    return len(new)


def forget_use(connection: sa.Connection, minutes_before: datetime, hours_before: datetime) -> int:
    """Delete older rows, minutes only when included in their hour. Returns how many."""
    old = sa.or_(
        (device_use.c.seconds == MINUTE)
        & (device_use.c.since < minutes_before)
        & device_use.c.summed,
        (device_use.c.seconds == HOUR) & (device_use.c.since < hours_before),
    )
    return connection.execute(sa.delete(device_use).where(old)).rowcount


def device_use_between(
    connection: sa.Connection,
    since: datetime,
    until: datetime,
    *,
    seconds: int = MINUTE,
    uuids: Collection[str] | None = None,
    lease_ids: Collection[str] = ("",),
) -> list[DeviceUse]:
    """Return the use in periods that began in ``[since, until)``, by time.

    Only of these devices, if any are given. ``lease_ids``: the leases of :class:`DeviceUse`.
    """
    wanted = (
        (device_use.c.seconds == seconds)
        & (device_use.c.since >= since)
        & (device_use.c.since < until)
        & device_use.c.lease_id.in_(list(lease_ids))
    )
    if uuids is not None:
        wanted &= device_use.c.uuid.in_(list(uuids))
    return _select(connection, wanted)


def newest_use(connection: sa.Connection, now: datetime) -> dict[str, DeviceUse]:
    """Return the last minute of each device that is not older than :data:`NOW_IS`, by UUID."""
    found = device_use_between(connection, now - NOW_IS, now + timedelta(minutes=1))
    return {minute.uuid: minute for minute in found}


def _is(minute: DeviceUse) -> sa.ColumnElement[bool]:
    return (
        (device_use.c.uuid == minute.uuid)
        & (device_use.c.lease_id == minute.lease_id)
        & (device_use.c.seconds == minute.seconds)
        & (device_use.c.since == minute.since)
    )


def _select(connection: sa.Connection, wanted: sa.ColumnElement[bool]) -> list[DeviceUse]:
    by_time = device_use.c.since, device_use.c.uuid, device_use.c.lease_id
    query = sa.select(*_COLUMNS).where(wanted).order_by(*by_time)
    return [
        DeviceUse(**row | {"xids": tuple(int(xid) for xid in row["xids"].split(",") if xid)})
        for row in map(dict, connection.execute(query).mappings())
    ]


def _row(use: DeviceUse) -> dict[str, Any]:
    return asdict(use) | {"xids": ",".join(map(str, use.xids))}


@dataclass(frozen=True, slots=True)
class WatchedLease:
    """A lease's idle state, as last judged."""

    state: IdleState
    judged_until: datetime
    """Everything before this time has been judged."""


def load_watched(connection: sa.Connection) -> dict[str, WatchedLease]:
    """Return all watched leases, by lease id."""
    rows = connection.execute(sa.select(idle)).mappings()
    return {row["lease_id"]: _watched(row) for row in rows}


def get_watched(connection: sa.Connection, lease_id: str) -> WatchedLease | None:
    """Return a watched lease; None if its GPUs were not sampled yet."""
    query = sa.select(idle).where(idle.c.lease_id == lease_id)
    row = connection.execute(query).mappings().first()
    return _watched(row) if row else None


def put_watched(connection: sa.Connection, lease_id: str, watched: WatchedLease) -> None:
    """Replace the stored state of a watched lease."""
    connection.execute(sa.delete(idle).where(idle.c.lease_id == lease_id))
    row = {"lease_id": lease_id, "judged_until": watched.judged_until, **asdict(watched.state)}
    connection.execute(sa.insert(idle).values(row))


def keep_only_watched(connection: sa.Connection, lease_ids: Collection[str]) -> None:
    """Delete all others: their leases have ended."""
    known = set(connection.execute(sa.select(idle.c.lease_id)).scalars())
    for lease_id in known - set(lease_ids):
        connection.execute(sa.delete(idle).where(idle.c.lease_id == lease_id))


def _watched(row: sa.RowMapping) -> WatchedLease:
    return WatchedLease(IdleState(**{name: row[name] for name in _STATE}), row["judged_until"])


_HALF = timedelta(minutes=30)

_RowKey = tuple[str, str]
"""The UUID and the lease id of rows of device use."""

_Holder = tuple[str, float]
"""A lease, and the part of a device that it has."""

_SHARE = sa.cast(lease_places.c.held_slots, sa.Float) / lease_places.c.slots

_OWN_ROWS = (device_use.c.uuid == lease_places.c.uuid) & (
    device_use.c.lease_id
    == sa.case((lease_places.c.held_slots == lease_places.c.slots, ""), else_=leases.c.id)
)
"""The rows that show what a lease did: those of the whole device, if it had all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseUtilization:
    """The use of a lease's GPUs between two times, in seconds of one GPU.

    Of a share of a GPU, only the work of the lease's own programs is measured.
    """

    lease_id: str
    server: ServerRef
    group: str
    model: str
    devices: int
    """How many GPUs it has, whole or in part."""
    since: datetime
    until: datetime | None
    """None while it is open."""
    held: float
    """Its time: a quarter of it with one of four slots, a seventh of it with a 1g MIG instance."""
    part: float = 1.0
    """How much of a GPU each of its devices is; ``held``, ``measured`` and ``busy`` include it."""
    measured: float = 0.0
    """The part of ``held`` for which it is known whether they worked."""
    busy: float = 0.0
    """The part of ``measured`` in which they worked."""

    @property
    def rested(self) -> float:
        """The part of ``measured`` in which they were idle."""
        return max(0.0, self.measured - self.busy)


def worked_between(
    connection: sa.Connection, start: datetime, end: datetime
) -> list[LeaseUtilization]:
    """Return every lease with GPUs whose server was up between the two times."""
    found, places = _leases(connection, start, end)
    exact = _exact_from(connection, start, end)
    sums = _by_minutes(connection, exact, end)
    for lease_id, measured, busy in _by_hours(connection, start, exact, found, places):
        before = sums.get(lease_id, (0.0, 0.0))
        sums[lease_id] = (before[0] + measured, before[1] + busy)
    return [
        replace(
            lease,
            held=lease.held * lease.part,
            measured=min(lease.held, measured) * lease.part,
            busy=min(lease.held, measured, busy) * lease.part,
        )
        for lease in found.values()
        for measured, busy in [sums.get(lease.lease_id, (0.0, 0.0))]
    ]


def _leases(
    connection: sa.Connection, start: datetime, end: datetime
) -> tuple[dict[str, LeaseUtilization], dict[_RowKey, list[_Holder]]]:
    """Return the leases by id, without work yet, and who worked by which rows."""
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
            lease_places.c.slots,
            lease_places.c.held_slots,
            lease_places.c.part,
        )
        .join_from(leases, lease_places, (lease_places.c.lease_id == leases.c.id) & COUNTED_PLACE)
        .where(leases.c.started_at < end)
        .where(sa.or_(leases.c.ended_at.is_(None), leases.c.ended_at > start))
        .order_by(leases.c.started_at, leases.c.id)
    )
    found: dict[str, LeaseUtilization] = {}
    places: dict[_RowKey, list[_Holder]] = {}
    for row in connection.execute(query):
        began, ended = max(start, row.started_at), min(end, row.ended_at or end)
        share = row.held_slots / row.slots
        held = max(0.0, (ended - began).total_seconds()) * share
        key = row.uuid, row.id if share < 1 else ""
        places.setdefault(key, []).append((row.id, share))
        if (so_far := found.get(row.id)) is not None:
            model = row.model if row.model == so_far.model else SEVERAL
            held += so_far.held
            found[row.id] = replace(so_far, devices=so_far.devices + 1, held=held, model=model)
            continue
        found[row.id] = LeaseUtilization(
            lease_id=row.id,
            server=ServerRef(row.user, row.server_name),
            group=row.group,
            model=row.model,
            devices=1,
            part=float(row.part),
            since=row.started_at,
            until=row.ended_at,
            held=held,
        )
    return found, places


def _exact_from(connection: sa.Connection, start: datetime, end: datetime) -> datetime:
    """Return the time from which all minutes still exist; before it there are hours."""
    query = sa.select(sa.func.min(device_use.c.since)).where(device_use.c.seconds == MINUTE)
    first = connection.execute(query).scalar()
    if first is None:
        return end
    begins = beginning(first, HOUR)
    whole = begins if begins == first else begins + timedelta(hours=1)
    hours = sa.exists().where(device_use.c.seconds == HOUR, device_use.c.since < whole)
    has_hours = connection.execute(sa.select(hours)).scalar_one()
    return min(end, max(start, whole)) if has_hours else start


def _by_minutes(
    connection: sa.Connection, start: datetime, end: datetime
) -> dict[str, tuple[float, float]]:
    """Return seconds measured and worked, by lease, from minutes that began while it was up."""
    samples = sa.cast(device_use.c.samples, sa.Float)
    query = (
        sa.select(
            leases.c.id,
            sa.func.sum(MINUTE * device_use.c.known / samples * _SHARE),
            sa.func.sum(MINUTE * device_use.c.busy / samples * _SHARE),
        )
        .join_from(leases, lease_places, (lease_places.c.lease_id == leases.c.id) & COUNTED_PLACE)
        .join(device_use, _OWN_ROWS)
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
    found: dict[str, LeaseUtilization],
    places: dict[_RowKey, list[_Holder]],
) -> Iterable[tuple[str, float, float]]:
    """Yield the same from hours, for the lease that held the GPU in the middle of each."""
    query = sa.select(
        device_use.c.uuid,
        device_use.c.lease_id,
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
    hours: dict[_RowKey, list[tuple[datetime, float, float]]] = {}
    rows = connection.execute(query.order_by(device_use.c.since))
    for uuid, of, since, samples, known, busy in rows:
        some = hours.setdefault((uuid, of), [])
        some.append((since + _HALF, HOUR * known / samples, HOUR * busy / samples))
    for key, some in hours.items():
        middles = [middle for middle, _, _ in some]
        for lease_id, share in places.get(key, ()):
            lease = found[lease_id]
            first = bisect_left(middles, max(start, lease.since))
            last = bisect_left(middles, min(end, lease.until or end))
            for _, measured, busy in some[first:last]:
                yield lease_id, measured * share, busy * share


BATCH = "batch jobs"
"""The name of all batch jobs in reports by environment, because they have none."""

_GROUP = "group:"
_c = batch_jobs.c
_rate = sa.case((_c.account.is_(None), 0), else_=_c.rate)
_seconds = sa.case((OPEN_JOB, _c.seconds - _c.seconds % JOB_HOUR), else_=_c.seconds)
_SINGLE = sa.select(_c.member, _c.account, _rate, _c.devices, _c.started_at, _seconds)
_WHOLE = sa.select(
    *(_c.member, _c.account, _c.devices),
    *(sa.func.sum(_c.seconds), sa.func.sum(_c.charged), sa.func.count()),
).group_by(_c.member, _c.account, _c.devices)


class JobUse(NamedTuple):
    """The total use of all jobs of one kind."""

    seconds: float
    """GPU-seconds."""
    jobs: int


def job_use_between(
    connection: sa.Connection, bounds: Sequence[datetime], by: str, name: str | None = None
) -> list[dict[str, LeaseUse]]:
    """Return what was used between each time and the next, by a field of Kind.

    With ``name``, only what has this value. Running jobs count as far as they were charged.
    """
    start, end = bounds[0], bounds[-1]
    mine = _c.cluster.in_(sa.select(batch_marks.c.cluster))  # which the index starts with
    within = (_c.started_at >= start) & (_c.ended_at >= start) & (_c.ended_at <= end)
    there = (_c.started_at < end) & (OPEN_JOB | (_c.ended_at >= start))
    found: list[dict[str, LeaseUse]] = [{} for _ in range(len(bounds) - 1)]

    def add(at: int, member: str | None, account: str | None, model: str, part: LeaseUse) -> None:
        called = _name(by, member or "", account or "", model)
        if any(part) and name in (None, called):
            found[at][called] = found[at].get(called, LeaseUse()).plus(part)

    if len(found) == 1:  # the database sums what lies entirely within
        for member, account, devices, seconds, cost, jobs in connection.execute(
            _WHOLE.where(mine, within)
        ):
            count, model = counted_jobs(devices)
            whole = LeaseUse(int(count * int(seconds) * 1_000_000), int(cost), jobs)
            add(0, member, account, model, whole)
        there &= ~within | OPEN_JOB
    for member, account, rate, devices, began, seconds in connection.execute(
        _SINGLE.where(mine, there)
    ):
        count, model = counted_jobs(devices)
        at = max(0, bisect_right(bounds, began) - 1)
        while at < len(found) and bounds[at] <= began + timedelta(seconds=seconds):
            both = bounds[at], bounds[at + 1]
            add(at, member, account, model, use_of_job(count, rate, began, seconds, *both))
            at += 1
    return found


def all_job_use(connection: sa.Connection) -> dict[str, JobUse]:
    """Return what all jobs used, by model."""
    sums = (_c.devices, sa.func.sum(_c.seconds), sa.func.count())
    found: dict[str, JobUse] = {}
    for devices, seconds, jobs in connection.execute(sa.select(*sums).group_by(_c.devices)):
        count, model = counted_jobs(devices)
        before = found.get(model, JobUse(0, 0))
        found[model] = JobUse(before.seconds + float(count * seconds), before.jobs + jobs)
    return found


def _name(by: str, member: str, account: str, model: str) -> str:
    """Return a job's value for a field of :class:`gpuspawner.ledger.usage.Kind`.

    A job's group is the one that pays.
    """
    if by == "group":
        return account.removeprefix(_GROUP) if account.startswith(_GROUP) else ""
    return {"user": member, "account": account, "model": model}.get(by, BATCH)
