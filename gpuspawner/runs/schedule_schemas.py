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
    """A run that is submitted again and again."""

    cron: Written = _CRON
    zone: Written = written(LONGEST_ZONE, "Europe/Vienna", "UTC")
    paused: Flag = False

    def repeated_work(self) -> Work:
        """Return what each run does. Raises InvalidRequest if that is not one thing."""
        return replace(self.work(""), folder="")


class ScheduleChangeBody(Body):
    """What is to be otherwise; what is left out stays."""

    title: Written | None = Field(
        None, examples=["train"], json_schema_extra={"maxLength": LONGEST_TITLE}
    )
    cron: Written | None = Field(
        None, examples=["30 7 * * 1-5"], json_schema_extra={"maxLength": LONGEST_CRON}
    )
    zone: Written | None = Field(
        None, examples=["Europe/Vienna"], json_schema_extra={"maxLength": LONGEST_ZONE}
    )
    paused: Flag | None = Field(None, description="Whether its times pass without a run.")
    parameters: JSONObject | None = Field(None, description="Of the notebook; all of them.")
    options: JSONObject | None = Field(None, description="What each run needs; all of them.")

    def edit(self, schedule: Schedule) -> Schedule:
        """Return the schedule as it is to be."""
        fields = {name: value for name, value in self if value is not None}
        if "title" in fields:
            fields["title"] = fields["title"].strip()[:LONGEST_TITLE] or schedule.title
        if "parameters" in fields:
            fields["work"] = replace(schedule.work, parameters=fields.pop("parameters"))
        return replace(schedule, **fields)


class RunNowBody(Body):
    """A run of a schedule, before its next time."""

    key: Key = ""


class ScheduledTimeAnswer(Answer):
    """A time of a schedule."""

    due_at: Instant
    run: str | None = Field(description="The run that it became.")
    reason: str = Field(description="Why it became no run; empty while it is to become one.")


class ScheduleAnswer(Answer):
    """A schedule."""

    id: str = told("schedule.id")
    user: str = told("schedule.user")
    title: str = told("schedule.title")
    cron: str = told("schedule.cron")
    zone: str = told("schedule.zone")
    paused: bool = told("schedule.paused")
    next_at: Instant | None = Field(description="Its next time; null while it is paused.")
    refusal: str = told(
        "schedule.refusal", description="Why its newest time became no run; empty if it did."
    )
    command: tuple[str, ...] = told("schedule.work.command")
    notebook: str = told("schedule.work.notebook")
    parameters: dict[str, Any] = told("schedule.work.parameters")
    directory: str = told("schedule.work.directory")
    options: dict[str, Any] = told("schedule.options")
    requeue: bool = told("schedule.requeue")
    preemptible: bool = told("schedule.preemptible")
    created_at: Instant = told("schedule.created_at")
    times: tuple[ScheduledTimeAnswer, ...] = Field(description="Its newest times, newest first.")


class SchedulesAnswer(DatedAnswer):
    """Schedules, newest first."""

    schedules: tuple[ScheduleAnswer, ...]
