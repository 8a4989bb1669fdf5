"""Rows of what devices did: minutes, and hours that are made of them.

A minute that comes twice, after the clock was set back or the service was started anew, is one
minute with both in it. An hour is made of its minutes alone, so that to make it twice is nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, fields
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from ..telemetry import DeviceUse, combine
from ..telemetry.rollup import beginning
from ..telemetry.values import HOUR, MINUTE
from .schema_use import TO_SUM, device_use

NOW_IS = timedelta(minutes=3)
"""How old the last minute may be to say what a device does now."""

_NAMES = tuple(each.name for each in fields(DeviceUse))
_COLUMNS = tuple(device_use.c[name] for name in _NAMES)


def remember(connection: sa.Connection, minutes: Iterable[DeviceUse]) -> None:
    """Write complete minutes; what is there of one already is kept in it."""
    added: dict[tuple[str, datetime], list[DeviceUse]] = {}
    for minute in minutes:
        added.setdefault((minute.uuid, minute.since), []).append(minute)
    times = {since for _, since in added}
    there = (device_use.c.seconds == MINUTE) & device_use.c.since.in_(times)
    for minute in _select(connection, there):
        if (minute.uuid, minute.since) in added:
            added[minute.uuid, minute.since].append(minute)
            connection.execute(sa.delete(device_use).where(_is(minute)))
    rows = [_row(combine(parts, since, MINUTE)) for (_, since), parts in added.items()]
    if rows:
        connection.execute(sa.insert(device_use), rows)


def sum_up(connection: sa.Connection, now: datetime) -> int:
    """Make the hours that are over of their minutes; of how many minutes that are new."""
    over = TO_SUM & (device_use.c.since < beginning(now, HOUR))
    new = _select(connection, over)
    for uuid, since in {(minute.uuid, beginning(minute.since, HOUR)) for minute in new}:
        inside = (
            (device_use.c.uuid == uuid)
            & (device_use.c.seconds == MINUTE)
            & (device_use.c.since >= since)
            & (device_use.c.since < since + timedelta(hours=1))
        )
        _put(connection, combine(_select(connection, inside), since, HOUR))
        connection.execute(sa.update(device_use).where(inside).values(summed=True))
    return len(new)


def forget(connection: sa.Connection, minutes_before: datetime, hours_before: datetime) -> int:
    """Delete what is older; a minute only when it is in its hour. How many rows."""
    old = sa.or_(
        (device_use.c.seconds == MINUTE)
        & (device_use.c.since < minutes_before)
        & device_use.c.summed,
        (device_use.c.seconds == HOUR) & (device_use.c.since < hours_before),
    )
    return connection.execute(sa.delete(device_use).where(old)).rowcount


def between(
    connection: sa.Connection,
    since: datetime,
    until: datetime,
    *,
    seconds: int = MINUTE,
    uuids: Collection[str] | None = None,
) -> list[DeviceUse]:
    """What began in ``[since, until)``, by time; of these devices only, if any are named."""
    wanted = (
        (device_use.c.seconds == seconds)
        & (device_use.c.since >= since)
        & (device_use.c.since < until)
    )
    if uuids is not None:
        wanted &= device_use.c.uuid.in_(list(uuids))
    return _select(connection, wanted)


def newest(connection: sa.Connection, now: datetime) -> dict[str, DeviceUse]:
    """The last minute of each device that is not older than :data:`NOW_IS`, by its UUID."""
    found = between(connection, now - NOW_IS, now + timedelta(minutes=1))
    return {minute.uuid: minute for minute in found}


def _is(minute: DeviceUse) -> sa.ColumnElement[bool]:
    return (
        (device_use.c.uuid == minute.uuid)
        & (device_use.c.seconds == minute.seconds)
        & (device_use.c.since == minute.since)
    )


def _select(connection: sa.Connection, wanted: sa.ColumnElement[bool]) -> list[DeviceUse]:
    query = sa.select(*_COLUMNS).where(wanted).order_by(device_use.c.since, device_use.c.uuid)
    return [_from_row(row) for row in connection.execute(query)]


def _put(connection: sa.Connection, use: DeviceUse) -> None:
    connection.execute(sa.delete(device_use).where(_is(use)))
    connection.execute(sa.insert(device_use).values(_row(use)))


def _row(use: DeviceUse) -> dict[str, Any]:
    return asdict(use) | {"xids": ",".join(map(str, use.xids))}


def _from_row(row: Sequence[Any]) -> DeviceUse:
    values = dict(zip(_NAMES, row, strict=True))
    values["xids"] = tuple(int(xid) for xid in values["xids"].split(",") if xid)
    return DeviceUse(**values)
