"""Who used what by jobs beside servers: what reports and metrics tell of them.

There are no totals of them: the database adds up those that lie in the time that is asked for, and
those that begin before or end after it are read one by one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

import sqlalchemy as sa

from ..ledger.batch import HOUR, counted, use_of
from ..ledger.usage import Use
from .schema_batch import OPEN_JOB, batch_jobs, batch_marks

BATCH = "batch jobs"
"""The name of them all where reports are by environment, of which they have none."""

_GROUP = "group:"
_c = batch_jobs.c
_rate = sa.case((_c.account.is_(None), 0), else_=_c.rate)
_seconds = sa.case((OPEN_JOB, _c.seconds - _c.seconds % HOUR), else_=_c.seconds)
_SINGLE = sa.select(_c.member, _c.account, _rate, _c.devices, _c.started_at, _seconds)
_WHOLE = sa.select(
    *(_c.member, _c.account, _c.devices),
    *(sa.func.sum(_c.seconds), sa.func.sum(_c.charged), sa.func.count()),
).group_by(_c.member, _c.account, _c.devices)


class Used(NamedTuple):
    """What all jobs of one kind used, ever."""

    seconds: int
    """Of a GPU, for each one."""
    jobs: int


def use(
    connection: sa.Connection, bounds: Sequence[datetime], by: str, name: str | None = None
) -> list[dict[str, Use]]:
    """What was used between each two of the moments, by one of the names of a kind; with ``name``
    only what has this one. What goes on counts as far as it was charged."""
    start, end = bounds[0], bounds[-1]
    mine = _c.cluster.in_(sa.select(batch_marks.c.cluster))  # which an index begins with
    within = (_c.started_at >= start) & (_c.ended_at >= start) & (_c.ended_at <= end)
    there = (_c.started_at < end) & (OPEN_JOB | (_c.ended_at >= start))
    found: list[dict[str, Use]] = [{} for _ in range(len(bounds) - 1)]

    def add(at: int, member: str | None, account: str | None, model: str, part: Use) -> None:
        called = _name(by, member or "", account or "", model)
        if any(part) and name in (None, called):
            found[at][called] = found[at].get(called, Use()).plus(part)

    if len(found) == 1:  # what lies in it as a whole is added up by the database
        for member, account, devices, seconds, cost, jobs in connection.execute(
            _WHOLE.where(mine, within)
        ):
            count, model = counted(devices)
            add(0, member, account, model, Use(count * int(seconds) * 1_000_000, int(cost), jobs))
        there &= ~within | OPEN_JOB
    for member, account, rate, devices, began, seconds in connection.execute(
        _SINGLE.where(mine, there)
    ):
        count, model = counted(devices)
        at = max(0, bisect_right(bounds, began) - 1)
        while at < len(found) and (bounds[at] <= began + timedelta(seconds=seconds)):
            both = bounds[at], bounds[at + 1]
            add(at, member, account, model, use_of(count, rate, began, seconds, *both))
            at += 1
    return found


def all_used(connection: sa.Connection) -> dict[str, Used]:
    """What all jobs used, by model."""
    sums = (_c.devices, sa.func.sum(_c.seconds), sa.func.count())
    found: dict[str, Used] = {}
    for devices, seconds, jobs in connection.execute(sa.select(*sums).group_by(_c.devices)):
        count, model = counted(devices)
        before = found.get(model, Used(0, 0))
        found[model] = Used(before.seconds + count * int(seconds), before.jobs + jobs)
    return found


def _name(by: str, member: str, account: str, model: str) -> str:
    """Of one name of :class:`gpuspawner.ledger.usage.Kind`: a job's group is the one that pays."""
    if by == "group":
        return account.removeprefix(_GROUP) if account.startswith(_GROUP) else ""
    return {"user": member, "account": account, "model": model}.get(by, BATCH)
