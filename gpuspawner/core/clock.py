"""The rules of a clock that wall-clock steps cannot move. Pure.

The steady time is the kernel's time since boot, which nobody can set, plus a stored offset. When
the wall clock is set, the offset follows: a small correction at once, a step only when it has
lasted, because a wrong one would end memberships, credits and bookings. Everything open in the
store moves along (:func:`gpuspawner.db.clock.shift_open`), so no duration changes. Only the wall
clock shows how long the machine was off between two boots; if it is set soon after a boot, that
duration is measured again.

All times are whole microseconds: since 1970 in UTC, or since the boot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone

SECOND = 1_000_000
MINUTE = 60 * SECOND
DAY = 86_400 * SECOND

TOLERATED = SECOND // 10
"""Differences up to this are ignored."""
STEP = MINUTE
"""A larger difference is a step; a smaller one is a correction, and followed at once."""
LASTS = 10 * MINUTE
"""How long a step of up to a day must last before the steady time follows it."""
LASTS_LONG = DAY
"""How long a larger step must last."""
LONGEST_OFF = 30 * DAY
"""How long a machine may plausibly be off; a wall clock further ahead is doubted."""
SETTLES = 60 * MINUTE
"""A wall clock that is set within this time after the first reading of a boot was wrong then."""

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
    """Time since boot when this was last read, to a few seconds."""
    version: int = 1
    """Increases with each new offset, so that other processes notice."""
    step: int = 0
    """Wall clock less steady time while a step is not followed; else 0."""
    stepped_at: int = 0
    """Time since boot when that was noticed."""
    stepped_after: int = 0
    """Time since boot when there was no step yet."""
    before: int | None = None
    """The last steady time known of an earlier boot; None when there was none."""
    measured_at: int = 0
    """Time since boot when the wall clock showed how long the machine had been off."""
    moved: int = 0
    """By how much the steady time last followed the wall clock in this boot."""
    moved_at: int = 0
    """Time since boot when that setting of the wall clock was noticed."""
    moved_after: int = 0
    """Time since boot when it was not set yet."""
    raised: int = 0
    """By how much it was moved forward in this boot, in total."""

    def at(self, since_boot: int) -> int:
        """Return the steady time at this time since boot."""
        return since_boot + self.offset

    @property
    def last(self) -> int:
        """The last known steady time of this boot."""
        return self.at(self.kept_at)

    def follows_at(self) -> int:
        """Return the steady time when the step will be followed, if it lasts."""
        return self.at(self.stepped_at + patience(self.step))


@dataclass(frozen=True, slots=True)
class ClockVerdict:
    """The conclusion from a reading."""

    offset: Offset
    event: str = ""
    """What happened; empty if nothing did.

    ``corrected``: a small difference was followed. ``stepped``: a step was noticed. ``followed``:
    it lasted, and was followed. ``back``: the wall clock is right again.
    """
    shift: int = 0
    """By how much the steady time was moved: everything open in the store moves with it."""
    recount: int = 0
    """How much longer the machine was off before this boot than measured; negative: shorter.

    What began before the boot moves by ``shift - recount``.
    """


def begin(reading: Reading, last: int | None) -> Offset:
    """Return the offset for a boot that the store does not know yet.

    ``last`` is the last steady time in the store. After a reboot only the wall clock shows how long
    the machine was off. If it is before ``last``, or too far after it, it is doubted: the steady
    time then continues from ``last`` plus the time since boot, which is the least that passed.
    """
    since_boot = reading.since_boot
    new = Offset(
        reading.boot_id, reading.wall - since_boot, kept_at=since_boot, measured_at=since_boot
    )
    if last is None:
        return new
    new = replace(new, before=last)
    if last - STEP <= reading.wall <= last + LONGEST_OFF:
        return new
    return replace(new, offset=last)


def judge(offset: Offset, reading: Reading) -> ClockVerdict:
    """Compare the clocks with the stored offset of this boot."""
    skew = reading.wall - offset.at(reading.since_boot)
    if abs(skew) <= STEP:
        event = "back" if offset.step else ""
        if abs(skew) <= TOLERATED:
            return ClockVerdict(replace(offset, step=0, stepped_at=0, stepped_after=0), event)
        return _follow(offset, skew, reading, event or "corrected")
    if not offset.step or abs(skew - offset.step) > STEP:
        stepped = replace(
            offset, step=skew, stepped_at=reading.since_boot, stepped_after=_right_until(offset)
        )
        return ClockVerdict(stepped, "stepped")
    if reading.since_boot - offset.stepped_at < patience(skew):
        return ClockVerdict(offset)
    return _follow(offset, skew, reading, "followed")


def kept(offset: Offset, reading: Reading) -> Offset:
    """Return the offset as it is stored at this moment."""
    return replace(offset, kept_at=reading.since_boot)


def patience(step: int) -> int:
    """Return how long a step must last before it is followed."""
    return LASTS if abs(step) <= DAY else LASTS_LONG


def engine_time(
    times: Sequence[datetime],
    low: datetime,
    high: datetime,
    *,
    costs_least: Callable[[Iterable[datetime]], datetime],
) -> datetime | None:
    """Return the steady time of an event from the time that an engine reported.

    Another machine's clock may differ from ours by up to a minute, so the result may also differ
    from ``low`` and ``high`` by that. None if every time is impossible: the report is then useless.

    Args:
        times: Possible meanings of the engine's time; see :func:`possible_times`.
        low: A steady time that is certainly before the event.
        high: A steady time that is certainly after the event.
        costs_least: Chooses the possible time that costs the member least: ``max`` for a start,
            ``min`` for an end.
    """
    for slack in (timedelta(), timedelta(microseconds=STEP)):
        if possible := [at for at in times if low - slack <= at <= high + slack]:
            return costs_least(possible)
    return None


def possible_times(stamp: datetime, offset: Offset, reading: Reading) -> list[datetime]:
    """Return the steady times that a time of the wall clock may mean.

    It is one, unless the wall clock was set close to it, or was set back and showed the same time
    twice; and never none. The wall clock may have been set and not followed yet, or set after the
    event and followed.
    """
    at, now = from_datetime(stamp), offset.at(reading.since_boot)
    skew, first, last = reading.wall - now, offset.at(0), now
    found = []
    if abs(skew) > TOLERATED:
        is_noticed = bool(offset.step)
        set_after = offset.stepped_after if is_noticed else _right_until(offset)
        if offset.at(set_after) <= at - skew <= now:
            found.append(at - skew)
        last = offset.at(offset.stepped_at) if is_noticed else now
    if offset.moved:
        if at + offset.moved <= offset.at(offset.moved_at):
            found.append(at + offset.moved)
        first = offset.at(offset.moved_after)
    if first <= at <= last:
        found.append(at)
    return [to_datetime(each) for each in found] or [stamp]


def stamp_error(offset: Offset, reading: Reading) -> timedelta:
    """Return by how much an engine's time of an event may be before its steady time."""
    skew = reading.wall - offset.at(reading.since_boot)
    return (offset.raised + max(0, -skew)) * _MICROSECOND


def to_datetime(micros: int) -> datetime:
    """Convert a steady or wall time to an aware time in UTC."""
    return _EPOCH + micros * _MICROSECOND


def from_datetime(moment: datetime) -> int:
    """Convert back what :func:`to_datetime` returned."""
    return (moment - _EPOCH) // _MICROSECOND


def _follow(offset: Offset, skew: int, reading: Reading, event: str) -> ClockVerdict:
    recount = _recount(offset, skew, reading)
    moved = replace(
        offset,
        offset=offset.offset + skew,
        version=offset.version + 1,
        step=0,
        stepped_at=0,
        stepped_after=0,
        before=None if offset.before is None else offset.before + skew - recount,
        moved=skew,
        moved_at=offset.stepped_at if offset.step else reading.since_boot,
        moved_after=offset.stepped_after if offset.step else _right_until(offset),
        raised=offset.raised + max(0, skew),
    )
    return ClockVerdict(moved, event, skew, recount)


def _recount(offset: Offset, skew: int, reading: Reading) -> int:
    """Return how much longer the machine was off than measured, if the wall clock is right now."""
    set_at = offset.stepped_at if offset.step else reading.since_boot
    if offset.before is None or set_at - offset.measured_at > SETTLES:
        return 0
    counted = offset.at(offset.measured_at) - offset.before
    least = min(counted, offset.measured_at)
    found = max(counted + skew, least)
    return found - counted if found <= LONGEST_OFF else 0


def _right_until(offset: Offset) -> int:
    """Return the time since boot until which the wall clock was as it is known; 0 if never."""
    return 0 if offset.kept_at == offset.measured_at else offset.kept_at
