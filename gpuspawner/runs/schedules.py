"""Schedules: a cron expression in a time zone says when a program or notebook runs. Pure.

A time of day that daylight saving time skips moves to the end of the gap; one that occurs twice
counts the first time only. An expression with a star for its hours or minutes follows real hours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta, timezone
from typing import Any

from cronsim import CronSim, CronSimError

from ..core.errors import InvalidRequest
from ..ledger.pricing import open_zone
from .models import Work

MOST_SCHEDULES = 50
"""How many schedules a member may have."""

LONGEST_CRON = 100
LONGEST_ZONE = 64

KEPT_TIMES = 50
"""How many of a schedule's latest times are kept."""

NO_CRON = (
    "is not a cron expression: write minute, hour, day of the month, month and day of the week, "
    "such as 30 7 * * 1-5 for half past seven on weekdays."
)
SKIPPED = "It was skipped: gpuspawner was not running then, and a later time has come since."

_WINDOWS = tuple(timedelta(days=days) for days in (1, 32, 400, 4000))


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A program or notebook that runs at the times of a cron expression."""

    id: str
    user: str
    key: str = ""
    """The client's idempotency key: a second request with it returns this schedule. Empty: none."""
    title: str
    cron: str
    zone: str
    work: Work
    """What each run does; ``folder`` is empty, as each run has its own."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The member's choices, as for a run."""
    requeue: bool = False
    preemptible: bool = False
    created_at: datetime
    paused: bool = False
    next_at: datetime
    """The next time; ignored while the schedule is paused."""
    refusal: str = ""
    """Why its latest run was refused; empty if it was accepted."""

    def submission(self, folder: str, key: str) -> dict[str, Any]:
        """Return a run of this schedule in the Hub's format; ``folder`` is for its files."""
        return {
            "title": self.title,
            "work": asdict(replace(self.work, folder=folder)),
            "options": dict(self.options),
            "requeue": self.requeue,
            "preemptible": self.preemptible,
            "key": key,
        }


@dataclass(frozen=True, slots=True)
class ScheduledTime:
    """One time of a schedule, with its run or the reason why it has none."""

    due_at: datetime
    run: str | None = None
    """The id of the submitted run; None if none was submitted."""
    reason: str = ""
    """Why no run was submitted, as a sentence; empty if one was, or if it is still due."""


@dataclass(frozen=True, slots=True)
class FollowedSchedule:
    """A schedule with its latest times, newest first."""

    schedule: Schedule
    times: tuple[ScheduledTime, ...] = ()

    @property
    def last(self) -> ScheduledTime | None:
        """Its latest time; None before the first."""
        return self.times[0] if self.times else None


@dataclass(frozen=True, slots=True)
class DueRun:
    """A time of a schedule whose run is still to be submitted."""

    schedule: Schedule
    due_at: datetime

    @property
    def key(self) -> str:
        """The idempotency key of its run, which prevents a second submission."""
        return f"schedule:{self.schedule.id}:{int(self.due_at.timestamp())}"

    @property
    def folder(self) -> str:
        """The folder of its run, relative to the workspace."""
        return f"runs/{self.due_at:%Y-%m-%d-%H%M%S}-{self.schedule.id}"


def require_cron(cron: str, zone: str, now: datetime) -> datetime:
    """Return the first time of an expression. Raises InvalidRequest if it is wrong or has none."""
    try:
        open_zone(zone)
    except ValueError as error:
        raise InvalidRequest(str(error), field="zone") from None
    wrong = InvalidRequest(f"The field 'cron' {NO_CRON}", field="cron")
    if len(cron) > LONGEST_CRON or not cron.isascii() or len(cron.split()) != 5:
        raise wrong
    try:
        return next_time(cron, zone, now)
    except CronSimError:
        raise wrong from None
    except StopIteration:
        sentence = f"The cron expression {cron!r} names no day that comes in the next 50 years."
        raise InvalidRequest(sentence, field="cron") from None


def next_time(cron: str, zone: str, after: datetime) -> datetime:
    """Return the first time after this one, in UTC.

    Raises StopIteration if the expression matches no time in the next 50 years.
    """
    times = CronSim(cron, after.astimezone(open_zone(zone)))
    while True:
        # In the hour that occurs twice, CronSim may return a time before `after`.
        found = next(times).astimezone(timezone.utc)
        if found > after:
            return found


def newest_due(schedule: Schedule, now: datetime) -> tuple[datetime, datetime]:
    """Return the latest time up to now, and the first one after now.

    ``schedule.next_at`` must not be later than ``now``.
    """
    for window in _WINDOWS:  # a schedule for each minute may have missed a year of times
        start = max(schedule.next_at, now - window)
        found, after = None, start - timedelta(seconds=1)
        while (after := next_time(schedule.cron, schedule.zone, after)) <= now:
            found = after
        if found is not None:
            return found, after
    return schedule.next_at, next_time(schedule.cron, schedule.zone, now)


def explain(cron: str) -> str:
    """Return the times of an expression in words."""
    return CronSim(cron, datetime(2000, 1, 1, tzinfo=timezone.utc)).explain()
