"""The rules of a clock that wall-clock steps cannot move. Pure.

The steady time is the time since the machine's boot plus an offset that the store keeps. The
kernel's clock since boot runs on, also while the machine sleeps, and nobody can set it; the
frequency corrections of NTP act on it as on the wall clock. So the two differ by a constant until
somebody sets the wall clock.

When the wall clock is set, the steady time follows by a new offset, and everything open in the
store (see :func:`gpuspawner.store.clock.shift_open`) moves with it: no duration changes. A small
correction is followed at once; a step only when it has lasted, because a wrong one would end
memberships, credits and bookings.

All times are whole microseconds: of the wall clock and the steady clock since 1970 in UTC, of the
boot clock since the boot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone

SECOND = 1_000_000
MINUTE = 60 * SECOND
DAY = 86_400 * SECOND

TOLERATED = SECOND // 10
"""Differences up to this are left alone."""
STEP = MINUTE
"""A larger difference is a step. A smaller one is a correction, and followed at once."""
LASTS = 10 * MINUTE
"""How long a step of up to a day must last until the steady time follows it."""
LASTS_LONG = DAY
"""How long a larger step must last."""
LONGEST_OFF = 30 * DAY
"""How long a machine may plausibly have been off; a wall clock further ahead is doubted."""

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Reading:
    """This machine's clocks, read at the same moment."""

    wall: int
    since_boot: int
    boot_id: str


@dataclass(frozen=True, slots=True)
class Offset:
    """How steady time follows from the time since one boot."""

    boot_id: str
    offset: int
    """Steady time less time since boot."""
    kept_at: int
    """Time since boot when this was written last."""
    version: int = 1
    """Grows with each new offset, so that other processes notice."""
    step: int = 0
    """Wall clock less steady time, while a step is not followed; else 0."""
    stepped_at: int = 0
    """Time since boot when that was noticed."""
    before: int | None = None
    """The last steady time known of an earlier boot; None when there was none."""

    def at(self, since_boot: int) -> int:
        """The steady time at this time since boot."""
        return since_boot + self.offset

    @property
    def last(self) -> int:
        """The last steady time that is known of this boot."""
        return self.at(self.kept_at)

    def follows_at(self) -> int:
        """The steady time when the step will be followed, if it lasts."""
        return self.at(self.stepped_at + patience(self.step))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to make of a reading."""

    offset: Offset
    event: str = ""
    """``corrected``: a small difference was followed. ``stepped``: a step was noticed.
    ``followed``: it has lasted, and was followed. ``back``: the wall clock is right again."""
    shift: int = 0
    """By how much the steady time was moved: everything open in the store moves with it."""


def begin(reading: Reading, last: int | None) -> Offset:
    """Return the offset for a boot that the store does not know yet.

    ``last`` is the last steady time in the store. After a reboot only the wall clock can say how
    long the machine was off. One that lies before ``last``, or too far after it, is doubted: then
    the steady time goes on from ``last`` by the time since boot, which is the least that passed.
    """
    new = Offset(reading.boot_id, reading.wall - reading.since_boot, reading.since_boot)
    if last is None:
        return new
    new = replace(new, before=last)
    if last - STEP <= reading.wall <= last + LONGEST_OFF:
        return new
    return replace(new, offset=last)


def judge(offset: Offset, reading: Reading) -> Verdict:
    """Compare the clocks with the offset that the store has for this boot."""
    skew = reading.wall - offset.at(reading.since_boot)
    if abs(skew) <= STEP:
        event = "back" if offset.step else ""
        offset = replace(offset, step=0, stepped_at=0)
        if abs(skew) <= TOLERATED:
            return Verdict(offset, event)
        return Verdict(_moved(offset, skew), event or "corrected", skew)
    if not offset.step or abs(skew - offset.step) > STEP:
        return Verdict(replace(offset, step=skew, stepped_at=reading.since_boot), "stepped")
    if reading.since_boot - offset.stepped_at < patience(skew):
        return Verdict(offset)
    return Verdict(_moved(offset, skew), "followed", skew)


def kept(offset: Offset, reading: Reading) -> Offset:
    """Return the offset as it is written at this moment."""
    return replace(offset, kept_at=reading.since_boot)


def patience(step: int) -> int:
    """Return how long a step must last until it is followed."""
    return LASTS if abs(step) <= DAY else LASTS_LONG


def engine_time(
    at: datetime,
    low: datetime,
    high: datetime,
    skew: timedelta,
    *,
    costs_least: Callable[[Iterable[datetime]], datetime],
) -> datetime | None:
    """Return the steady time of an event that an engine stamped with the wall clock.

    The wall clock may have been set before the event or after it: ``at`` is right either as it is
    or less the skew. None when both are impossible: then it says nothing.

    Args:
        at: the engine's time.
        low, high: steady times between which the event certainly lies.
        skew: wall clock less steady time now.
        costs_least: which of several possible times costs the member least: ``max`` for a start,
            ``min`` for an end.
    """
    slack = timedelta(microseconds=STEP)  # another machine's clock is never quite ours
    possible = [x for x in (at - skew, at) if low - slack <= x <= high + slack]
    return min(max(costs_least(possible), low), high) if possible else None


def to_datetime(micros: int) -> datetime:
    """Return a steady or wall time as an aware time in UTC."""
    return _EPOCH + micros * _MICROSECOND


def from_datetime(moment: datetime) -> int:
    """Return the reverse of :func:`to_datetime`."""
    return (moment - _EPOCH) // _MICROSECOND


def _moved(offset: Offset, skew: int) -> Offset:
    return replace(
        offset, offset=offset.offset + skew, version=offset.version + 1, step=0, stepped_at=0
    )
