"""Times of day for people, in the hub's own zone."""

from __future__ import annotations

from datetime import datetime, timedelta


def clock(moment: datetime, now: datetime) -> str:
    """A time of day in the hub's own zone, rounded up to the minute, with the day if not today."""
    local = (moment + timedelta(minutes=1) - timedelta.resolution).astimezone()
    if local.date() == now.astimezone().date():
        return local.strftime("%H:%M")
    return local.strftime("%H:%M on %-d %B")


def end_clock(moment: datetime, now: datetime) -> str:
    """A time of day as :func:`clock`, rounded down: what ends then is not said to end later."""
    return clock(moment.replace(second=0, microsecond=0), now)


def deadline(moment: datetime, now: datetime) -> str:
    """The same with its zone: who reads it may be elsewhere."""
    return f"{end_clock(moment, now)} ({moment.astimezone():%Z})"
