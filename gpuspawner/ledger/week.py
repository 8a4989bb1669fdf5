"""Hours of the week in a named zone: when a rate holds. Pure: the time is passed in."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from zoneinfo import ZoneInfo

DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")

HOURS = 7 * 24
"""Hours of a week; 0 is Monday from 00:00 to 01:00."""

HOUR = timedelta(hours=1)

_DAY = "|".join(DAYS)
_PART = re.compile(
    rf"(?:(?P<first>{_DAY})(?:-(?P<last>{_DAY}))?)?\s*"
    r"(?:(?P<begin>[0-9]{1,2})(?::00)?-(?P<end>[0-9]{1,2})(?::00)?)?",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class WeekHours:
    """Some hours of each week, by the clock on the wall of a zone.

    Where daylight saving leaves an hour out, it does not come that day; where an hour comes
    twice, both count.
    """

    text: str
    """As an admin wrote it, such as ``Mon-Fri 20-8, Sat, Sun``."""
    hours: frozenset[int]
    """Of :data:`HOURS`, which."""
    zone: str
    """The zone's name, such as ``Europe/Vienna``."""

    @classmethod
    def parse(cls, text: object, zone: str) -> WeekHours:
        """``Mon-Fri 20-8`` is each night from 20:00 to 8:00 that begins on one of these days.

        Parts are parted by commas; one without days is of every day, one without hours of the
        whole day. Raises ValueError with a sentence.
        """
        open_zone(zone)
        if not isinstance(text, str):
            raise ValueError(f"{text!r} are no hours of the week. {_REMEDY}")
        hours: set[int] = set()
        for part in text.split(","):
            hours |= _hours(part.strip())
        return cls(" ".join(text.split()), frozenset(hours), zone)

    def holds(self, at: datetime) -> bool:
        """Whether the moment (aware) is in these hours."""
        local = at.astimezone(open_zone(self.zone))
        return local.weekday() * 24 + local.hour in self.hours

    def next_change(self, at: datetime) -> datetime | None:
        """The first moment after ``at`` (aware, in UTC) at which :meth:`holds` answers otherwise.

        None when it never does.
        """
        now, moment = self.holds(at), at
        for _ in range(HOURS + 2):
            moment = _next_hour(moment, self.zone)
            if self.holds(moment) != now:
                return moment
        return None


@lru_cache(maxsize=256)
def open_zone(name: str) -> ZoneInfo:
    """The zone of this name. Raises ValueError with a sentence."""
    try:
        return ZoneInfo(name)
    except Exception:  # it also says IsADirectoryError, for what is a folder of zones
        raise ValueError(
            f"{name!r} is no time zone: write a name such as 'Europe/Vienna' or 'UTC'."
        ) from None


_REMEDY = "Write them like 'Mon-Fri 20-8, Sat, Sun': days, and hours from 0 to 24."


def _hours(part: str) -> set[int]:
    """The hours of one part; ValueError with a sentence when it is none."""
    found = _PART.fullmatch(part)
    if not part or not found:
        raise ValueError(f"{part!r} are no hours of the week. {_REMEDY}")
    begin, end = int(found["begin"] or 0), int(found["end"] or 24)
    if begin > 23 or end > 24 or begin == end:
        raise ValueError(f"{part!r} are no hours of a day. {_REMEDY}")
    length = (end - begin) % 24 or 24
    return {(24 * day + begin + n) % HOURS for day in _days(found) for n in range(length)}


def _days(found: re.Match[str]) -> list[int]:
    if not found["first"]:
        return list(range(7))
    first = DAYS.index(found["first"].capitalize())
    last = DAYS.index((found["last"] or found["first"]).capitalize())
    return [(first + n) % 7 for n in range((last - first) % 7 + 1)]


def _next_hour(at: datetime, zone: str) -> datetime:
    """The next moment, in UTC, at which a new hour may begin on that zone's wall."""
    local = at.astimezone(open_zone(zone))
    gone = timedelta(minutes=local.minute, seconds=local.second, microseconds=local.microsecond)
    return at.astimezone(timezone.utc) + HOUR - gone
