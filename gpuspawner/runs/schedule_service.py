"""Schedules of runs: each time submits one run, whether or not the member has a server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import sqlalchemy as sa

from ..core.errors import TooManySchedules, UnknownSchedule
from ..db import audit_log
from ..db.clock import Timekeeper
from ..db.engine import Store
from ..members.service import require_member
from ..notifications import repository as notifications_repository
from ..notifications.models import NoticeKind
from ..notifications.service import compose
from . import repository as runs_repository
from . import schedule_repository as repository
from .models import Run
from .schedules import (
    KEPT_TIMES,
    MOST_SCHEDULES,
    SKIPPED,
    DueRun,
    FollowedSchedule,
    Schedule,
    newest_due,
    require_cron,
)

SHOWN_TIMES = 10
"""How many times of each schedule a list shows."""


@dataclass(eq=False)
class ScheduleService:
    """The only code that changes schedules and decides which of their times submit a run.

    A time is recorded before its run is submitted, and the run's key is made from the time. So
    there is one run, even if a process is killed in between or two services submit it.
    """

    store: Store
    clock: Timekeeper
    log: logging.Logger

    def create(self, schedule: Schedule) -> Schedule:
        """Save a schedule, or return the earlier one with the same key.

        Raises MembershipEnded, TooManySchedules or InvalidRequest.
        """
        schedule = replace(
            schedule, next_at=require_cron(schedule.cron, schedule.zone, self.clock())
        )
        with self.store.write() as connection:
            require_member(connection, schedule.user)
            if schedule.key and (
                known := repository.of_key(connection, schedule.user, schedule.key)
            ):
                return known
            count = repository.count(connection, schedule.user)
            if count >= MOST_SCHEDULES:
                raise TooManySchedules(count=count, most=MOST_SCHEDULES)
            if not repository.insert(connection, schedule):
                known = repository.of_key(connection, schedule.user, schedule.key)
                if known is None:
                    raise RuntimeError(f"the key of {schedule.id} is taken by no schedule")
                return known
        self.log.info("Schedule %s of %s: created", schedule.id, schedule.user)
        return schedule

    def of_key(self, user: str, key: str) -> Schedule | None:
        """Return a member's schedule with this idempotency key, or None."""
        return self.store.run(lambda c: repository.of_key(c, user, key)) if key else None

    def get(self, schedule_id: str) -> FollowedSchedule:
        """Return a schedule with all its recorded times. Raises UnknownSchedule."""
        with self.store.read() as connection:
            found = [repository.get(connection, schedule_id)]
            return _followed(connection, found, KEPT_TIMES)[0]

    def of_user(self, user: str | None) -> list[FollowedSchedule]:
        """Return a member's schedules (None: everybody's), newest first."""
        with self.store.read() as connection:
            return _followed(connection, repository.of_user(connection, user), SHOWN_TIMES)

    def change(
        self, schedule_id: str, edit: Callable[[Schedule], Schedule], *, actor: str
    ) -> FollowedSchedule:
        """Change a schedule with ``edit``. A changed cron expression applies from now on.

        Times that are already recorded as due still submit their run. Raises UnknownSchedule or
        InvalidRequest.
        """
        now = self.clock()
        with self.store.write() as connection:
            before = repository.get(connection, schedule_id, lock=True)
            changed = edit(before)
            if (changed.cron, changed.zone, changed.paused) != (
                *(before.cron, before.zone),
                before.paused,
            ):
                changed = replace(changed, next_at=require_cron(changed.cron, changed.zone, now))
            repository.update(connection, changed)
            what = f"paused: {'yes' if changed.paused else 'no'}"
            _note(connection, before, "change schedule", what, actor, now)
        self.log.info("Schedule %s of %s: changed", schedule_id, before.user)
        return self.get(schedule_id)

    def delete(self, schedule_id: str, *, actor: str) -> FollowedSchedule:
        """Delete a schedule, and return it as it was; its runs stay. Raises UnknownSchedule."""
        with self.store.write() as connection:
            found = repository.get(connection, schedule_id, lock=True)
            followed = _followed(connection, [found], KEPT_TIMES)[0]
            repository.delete(connection, schedule_id)
            _note(connection, found, "delete schedule", found.title, actor, self.clock())
        self.log.info("Schedule %s of %s: deleted", schedule_id, found.user)
        return followed

    def find_due(self) -> list[DueRun]:
        """Record the times that have come, and return those whose run is still to be submitted.

        If several were missed, only the latest submits a run.
        """
        now = self.clock()
        for schedule_id in self.store.run(lambda c: repository.find_due_ids(c, now)):
            self._write_time(schedule_id, now)
        return self.store.run(repository.due_runs)

    def _write_time(self, schedule_id: str, now: datetime) -> None:
        with self.store.write() as connection:
            try:
                schedule = repository.get(connection, schedule_id, lock=True)
            except UnknownSchedule:  # deleted meanwhile
                return
            if schedule.paused or schedule.next_at > now:
                return  # another service was faster
            due_at, next_at = newest_due(schedule, now)
            if due_at > schedule.next_at and repository.add_time(
                connection, schedule_id, schedule.next_at
            ):
                repository.note_reason(connection, schedule_id, schedule.next_at, SKIPPED)
            for due in repository.due_runs(connection, schedule_id):
                run = runs_repository.of_key(connection, schedule.user, due.key)
                if run is None:
                    repository.note_reason(connection, schedule_id, due.due_at, SKIPPED)
                else:  # submitted by a service that was killed before it recorded the run
                    repository.note_run(connection, schedule_id, due.due_at, run.id)
            repository.add_time(connection, schedule_id, due_at)
            repository.forget_times(connection, schedule_id, KEPT_TIMES)
            repository.update(connection, replace(schedule, next_at=next_at))

    def run_of(self, due: DueRun) -> Run | None:
        """Return the run of a time, if it was submitted."""
        return self.store.run(lambda c: runs_repository.of_key(c, due.schedule.user, due.key))

    def note_run(self, due: DueRun, run: str) -> None:
        """Record the run that was submitted for a time."""
        schedule_id = due.schedule.id
        with self.store.write() as connection:
            if repository.note_run(connection, schedule_id, due.due_at, run):
                repository.note_refusal(connection, schedule_id, "")
        self.log.info("Schedule %s of %s: run %s", schedule_id, due.schedule.user, run)

    def note_run_now(self, schedule_id: str, run: Run) -> None:
        """Record a run that its member submitted before the next time."""
        with self.store.write() as connection:
            try:
                repository.get(connection, schedule_id, lock=True)
            except UnknownSchedule:  # deleted meanwhile
                return
            if not repository.add_time(connection, schedule_id, run.created_at, run.id):
                return
            repository.forget_times(connection, schedule_id, KEPT_TIMES)

    def note_refused(self, due: DueRun, reason: str) -> bool:
        """Record why a run was refused. Returns True if the member gets a notice.

        Several refusals in a row cause one notice.
        """
        schedule_id, now = due.schedule.id, self.clock()
        with self.store.write() as connection:
            if not repository.note_reason(connection, schedule_id, due.due_at, reason):
                return False
            schedule = repository.get(connection, schedule_id, lock=True)
            repository.note_refusal(connection, schedule_id, reason)
            self.log.info("Schedule %s of %s: %s", schedule_id, schedule.user, reason)
            if schedule.refusal:
                return False
            key, kind = f"schedule:{schedule_id}:{due.due_at.isoformat()}", NoticeKind.RUN_ENDED
            values = {"schedule": schedule, "reason": reason}
            told = compose("schedule_refused", kind, key, schedule.user, now, **values)
            notifications_repository.add(connection, told)
        return True


def _note(
    connection: sa.Connection,
    schedule: Schedule,
    action: str,
    detail: str,
    actor: str,
    now: datetime,
) -> None:
    """Record in the audit log what somebody else did to a member's schedule."""
    if actor != schedule.user:
        about = f"schedule {schedule.id} of {schedule.user}"
        audit_log.note(connection, at=now, actor=actor, action=action, subject=about, detail=detail)


def _followed(
    connection: sa.Connection, found: Sequence[Schedule], most: int
) -> list[FollowedSchedule]:
    times = repository.times_of(connection, [schedule.id for schedule in found], most)
    return [FollowedSchedule(each, tuple(times.get(each.id, ()))) for each in found]
