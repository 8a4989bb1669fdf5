"""Times of day, days and weeks in the hub's own zone. Pure but for that zone."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime, timedelta, timezone

from .errors import InvalidRequest


def clock(moment: datetime, now: datetime) -> str:
    """A time of day in the hub's own zone, rounded up to the minute, with the day if not today."""
    local = minute_after(moment).astimezone()
    if local.date() == now.astimezone().date():
        return local.strftime("%H:%M")
    return local.strftime("%H:%M on %-d %B")


def at_second(seconds: float) -> datetime:
    """Return the time so many seconds after 1970, in UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc)


def minute_after(moment: datetime) -> datetime:
    """Return the time rounded up to the minute."""
    return minute_of(moment + timedelta(minutes=1) - timedelta.resolution)


def minute_of(moment: datetime) -> datetime:
    """Return the time rounded down to the minute."""
    return moment.replace(second=0, microsecond=0)


def end_clock(moment: datetime, now: datetime) -> str:
    """A time of day as :func:`clock`, rounded down: what ends then is not said to end later."""
    return clock(minute_of(moment), now)


def deadline(moment: datetime, now: datetime) -> str:
    """The same with its zone: who reads it may be elsewhere."""
    return f"{end_clock(moment, now)} ({moment.astimezone():%Z})"


def zoned(moment: datetime, now: datetime) -> str:
    """A time of day as :func:`clock`, with its zone: ``14:20 UTC``."""
    time, on, day = clock(moment, now).partition(" on ")
    return f"{time} {moment.astimezone():%Z}{on}{day}"


LONGEST = timedelta(weeks=106)
"""The longest period of one report: two years."""


def midnight(day: date) -> datetime:
    """Return when a day of the hub's own zone begins."""
    return datetime(day.year, day.month, day.day).astimezone().astimezone(timezone.utc)


def today(now: datetime) -> date:
    """Return the day in the hub's own zone."""
    return now.astimezone().date()


def monday(day: date) -> date:
    """Return the first day of a day's week."""
    return day - timedelta(days=day.weekday())


def last_weeks(now: datetime, count: int) -> list[datetime]:
    """Return the starts of the last ``count`` weeks including this one, and its end."""
    first = monday(today(now)) - timedelta(weeks=count - 1)
    return [midnight(first + timedelta(weeks=n)) for n in range(count + 1)]


def split(first: date, last: date) -> Iterator[tuple[date, date]]:
    """Yield the weeks from the first to the last day, inclusive; the outer ones may be cut off."""
    while first <= last:
        end = min(last, monday(first) + timedelta(days=6))
        yield first, end
        first = end + timedelta(days=1)


def period(since: str, until: str, now: datetime) -> tuple[date, date]:
    """Return the requested days, inclusive; by default four weeks. Raises InvalidRequest."""
    last = day(until, "to") if until else today(now)
    first = day(since, "from") if since else monday(last) - timedelta(weeks=3)
    if first > last:
        sentence = f"The field 'from' is {first}, which is after 'to' ({last}). Change one of them."
        raise InvalidRequest(sentence, field="from")
    if last - first > LONGEST:
        sentence = f"From {first} to {last} is too long: ask for two years at most."
        raise InvalidRequest(sentence, field="from")
    return first, last


def day(text: str, field: str) -> date:
    """Parse a day such as 2026-03-01. Raises InvalidRequest naming the field."""
    try:
        found = datetime.strptime(text, "%Y-%m-%d").date()
    except ValueError:
        found = None
    if found is None or not text.isascii() or len(text) != 10 or not 2000 <= found.year < 2200:
        sentence = f"The field {field!r} is {text[:60]!r}: write a day such as 2026-03-01."
        raise InvalidRequest(sentence, field=field)
    return found
