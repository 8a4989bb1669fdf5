"""Schedules as JSON."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import Field

from ..web.schemas import Answer, Body, DatedAnswer, Flag, Instant, Key, Written, told, written
from .models import Work
from .schedules import LONGEST_CRON, LONGEST_ZONE, Schedule
from .schemas import LONGEST_TITLE, JSONObject, RunBody

_CRON = Field(
    ...,
    examples=["30 7 * * 1-5"],
    description="Minute, hour, day of the month, month and day of the week.",
    json_schema_extra={"maxLength": LONGEST_CRON},
)


class ScheduleBody(RunBody):
    """A run to submit at each time of a cron expression."""

    cron: Written = _CRON
    zone: Written = written(LONGEST_ZONE, "Europe/Vienna", "UTC")
    paused: Flag = False

    def repeated_work(self) -> Work:
        """Return what each run does. Raises InvalidRequest unless it is a command or a notebook."""
        return replace(self.work(""), folder="")


class ScheduleChangeBody(Body):
    """Changes to a schedule. Fields that are left out keep their values."""

    title: Written | None = Field(
        None, examples=["train"], json_schema_extra={"maxLength": LONGEST_TITLE}
    )
    cron: Written | None = Field(
        None, examples=["30 7 * * 1-5"], json_schema_extra={"maxLength": LONGEST_CRON}
    )
    zone: Written | None = Field(
        None, examples=["Europe/Vienna"], json_schema_extra={"maxLength": LONGEST_ZONE}
    )
    paused: Flag | None = Field(None, description="If true, no runs are submitted.")
    parameters: JSONObject | None = Field(
        None, description="Replaces all parameters of the notebook."
    )
    options: JSONObject | None = Field(None, description="Replaces all options of the runs.")

    def edit(self, schedule: Schedule) -> Schedule:
        """Return the schedule with these changes."""
        fields = {name: value for name, value in self if value is not None}
        if "title" in fields:
            fields["title"] = fields["title"].strip()[:LONGEST_TITLE] or schedule.title
        if "parameters" in fields:
            fields["work"] = replace(schedule.work, parameters=fields.pop("parameters"))
        return replace(schedule, **fields)


class RunNowBody(Body):
    """A request to submit a run of a schedule now."""

    key: Key = ""


class ScheduledTimeAnswer(Answer):
    """A time of a schedule."""

    due_at: Instant
    run: str | None = Field(description="The run submitted for it; null if there is none.")
    reason: str = Field(
        description="Why no run was submitted; empty if one was, or if it is still due."
    )


class ScheduleAnswer(Answer):
    """A schedule."""

    id: str = told("schedule.id")
    user: str = told("schedule.user")
    title: str = told("schedule.title")
    cron: str = told("schedule.cron")
    zone: str = told("schedule.zone")
    paused: bool = told("schedule.paused")
    next_at: Instant | None = Field(description="Its next time; null while paused.")
    refusal: str = told(
        "schedule.refusal", description="Why its latest run was refused; empty if it was accepted."
    )
    command: tuple[str, ...] = told("schedule.work.command")
    notebook: str = told("schedule.work.notebook")
    parameters: dict[str, Any] = told("schedule.work.parameters")
    directory: str = told("schedule.work.directory")
    options: dict[str, Any] = told("schedule.options")
    requeue: bool = told("schedule.requeue")
    preemptible: bool = told("schedule.preemptible")
    created_at: Instant = told("schedule.created_at")
    times: tuple[ScheduledTimeAnswer, ...] = Field(description="Its latest times, newest first.")


class SchedulesAnswer(DatedAnswer):
    """Schedules, newest first."""

    schedules: tuple[ScheduleAnswer, ...]
