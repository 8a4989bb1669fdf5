"""Rows of schedules and of their times."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from ..core.errors import UnknownSchedule
from ..db.schema import DUE_TIME, schedule_times, schedules
from .repository import WorkTable
from .schedules import DueRun, Schedule, ScheduledTime

_SCHEDULES = WorkTable(schedules, Schedule, "one_schedule_a_key")
_NEWEST = schedule_times.c.due_at.desc()


def insert(connection: sa.Connection, schedule: Schedule) -> bool:
    """Insert a schedule. Returns False if its member already has one with the same key."""
    return _SCHEDULES.insert(connection, schedule)


def get(connection: sa.Connection, schedule_id: str, *, lock: bool = False) -> Schedule:
    """Return a schedule. ``lock`` locks its row until the transaction ends.

    Raises UnknownSchedule.
    """
    if (schedule := _SCHEDULES.find(connection, schedule_id, lock=lock)) is None:
        raise UnknownSchedule(schedule=schedule_id)
    return schedule


def of_key(connection: sa.Connection, user: str, key: str) -> Schedule | None:
    """Return a member's schedule with this idempotency key, or None."""
    return _SCHEDULES.of_key(connection, user, key)


def of_user(connection: sa.Connection, user: str | None) -> list[Schedule]:
    """Return a member's schedules (None: everybody's), newest first."""
    query = _SCHEDULES.all.order_by(schedules.c.created_at.desc(), schedules.c.id)
    if user is not None:
        query = query.where(schedules.c.user == user)
    return _SCHEDULES.select(connection, query)


def count(connection: sa.Connection, user: str) -> int:
    """Return how many schedules a member has."""
    query = sa.select(sa.func.count()).select_from(schedules).where(schedules.c.user == user)
    return int(connection.execute(query).scalar_one())


def update(connection: sa.Connection, schedule: Schedule) -> None:
    """Write all fields of a schedule."""
    this = sa.update(schedules).where(schedules.c.id == schedule.id)
    connection.execute(this.values(_SCHEDULES.row_of(schedule)))


def note_refusal(connection: sa.Connection, schedule_id: str, refusal: str) -> None:
    """Record why the latest run of a schedule was refused; empty if it was accepted."""
    this = sa.update(schedules).where(schedules.c.id == schedule_id)
    connection.execute(this.values(refusal=refusal))


def delete(connection: sa.Connection, schedule_id: str) -> None:
    """Delete a schedule and its times."""
    theirs = schedule_times.c.schedule_id == schedule_id
    connection.execute(sa.delete(schedule_times).where(theirs))
    connection.execute(sa.delete(schedules).where(schedules.c.id == schedule_id))


def find_due_ids(connection: sa.Connection, now: datetime) -> list[str]:
    """Return the ids of the schedules whose next time has come, earliest first."""
    query = sa.select(schedules.c.id).where(
        schedules.c.next_at <= now, schedules.c.paused.is_(sa.false())
    )
    return list(connection.execute(query.order_by(schedules.c.next_at)).scalars())


def add_time(
    connection: sa.Connection, schedule_id: str, due_at: datetime, run: str | None = None
) -> bool:
    """Record a time of a schedule. Returns False if it is already recorded."""
    row = {"schedule_id": schedule_id, "due_at": due_at, "run_id": run, "reason": ""}
    with connection.begin_nested() as savepoint:
        try:
            connection.execute(sa.insert(schedule_times), row)
        except IntegrityError:
            savepoint.rollback()
            return False
    return True


def due_runs(connection: sa.Connection, schedule_id: str | None = None) -> list[DueRun]:
    """Return the runs still to be submitted, of one schedule or of all, oldest first."""
    joined = schedule_times.join(schedules, schedules.c.id == schedule_times.c.schedule_id)
    columns = (schedule_times.c.due_at, *_SCHEDULES.columns)
    query = sa.select(*columns).select_from(joined).where(DUE_TIME)
    if schedule_id is not None:
        query = query.where(schedules.c.id == schedule_id)
    found = connection.execute(query.order_by(schedule_times.c.due_at))
    return [DueRun(_SCHEDULES.parse(row), due_at) for due_at, *row in found]


def note_run(connection: sa.Connection, schedule_id: str, due_at: datetime, run: str) -> bool:
    """Record the run of a time, once. Returns False if it was recorded before."""
    this = sa.update(schedule_times).where(
        schedule_times.c.schedule_id == schedule_id,
        schedule_times.c.due_at == due_at,
        schedule_times.c.run_id.is_(None),
    )
    return connection.execute(this.values(run_id=run, reason="")).rowcount == 1


def note_reason(connection: sa.Connection, schedule_id: str, due_at: datetime, reason: str) -> bool:
    """Record why a time submits no run. Returns False if it already has a run or a reason."""
    this = sa.update(schedule_times).where(
        schedule_times.c.schedule_id == schedule_id, schedule_times.c.due_at == due_at, DUE_TIME
    )
    return connection.execute(this.values(reason=reason)).rowcount == 1


def times_of(
    connection: sa.Connection, ids: Collection[str], most: int
) -> dict[str, list[ScheduledTime]]:
    """Return the latest times of each schedule, newest first."""
    number = sa.func.row_number().over(partition_by=schedule_times.c.schedule_id, order_by=_NEWEST)
    ranked = sa.select(schedule_times, number.label("number"))
    newest = ranked.where(schedule_times.c.schedule_id.in_(ids)).subquery()
    query = sa.select(newest).where(newest.c.number <= most).order_by(newest.c.due_at.desc())
    found: dict[str, list[ScheduledTime]] = {}
    for schedule_id, due_at, run, reason, _ in connection.execute(query):
        found.setdefault(schedule_id, []).append(ScheduledTime(due_at, run, reason))
    return found


def forget_times(connection: sa.Connection, schedule_id: str, most: int) -> None:
    """Delete all but the latest times of a schedule; due ones stay."""
    theirs = schedule_times.c.schedule_id == schedule_id
    oldest = sa.select(schedule_times.c.due_at).where(theirs).order_by(_NEWEST)
    limit = connection.execute(oldest.offset(most).limit(1)).scalar_one_or_none()
    if limit is not None:
        old = schedule_times.c.due_at <= limit
        connection.execute(sa.delete(schedule_times).where(theirs, old, sa.not_(DUE_TIME)))
