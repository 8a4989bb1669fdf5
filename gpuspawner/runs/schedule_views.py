"""Schedules as JSON, and the forms on the page of runs that change them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from tornado import web

from ..core.errors import InvalidRequest, UnknownSchedule
from ..core.scopes import SESSION
from ..web.api import ALL, APIHandler, ChangingAPI, operation, refusals
from ..web.base import ServiceHandler
from ..web.fields import one_of
from .file_views import require_own
from .rules import slug_of
from .schedule_schemas import (
    RunNowBody,
    ScheduleAnswer,
    ScheduleBody,
    ScheduleChangeBody,
    SchedulesAnswer,
)
from .schedules import FollowedSchedule, Schedule
from .schemas import RunAnswer
from .views import RunForm, hub_of

OF_ONE_START = "shown_at"
"""The option with the time when a member saw the prices. Each run has the prices of its own
time."""


class SchedulesAPI(ChangingAPI):
    """The member's schedules; for admins those of all members."""

    for_servers = True

    @operation("runs/-/schedules", SchedulesAnswer, ALL, name="schedules", scope=SESSION)
    @web.authenticated
    async def get(self) -> None:
        """List my schedules, newest first. Admins get everybody's with ``?all=1``."""
        of_all = one_of(self.get_query_argument("all", "0"), "all", ("0", "1")) == "1"
        if of_all:
            self.need_admin()
        found = await self.read(self.services.schedules.of_user, None if of_all else self.user)
        told = [_answer(each) for each in found]
        self.answer(SchedulesAnswer, as_of=self.services.clock(), schedules=told)

    @operation(
        "runs/-/schedules", ScheduleAnswer, name="createSchedule", body=ScheduleBody, scope=SESSION
    )
    @web.authenticated
    async def post(self) -> None:
        """Create a schedule. Its runs start whether or not I have a session."""
        sent = self.sent(ScheduleBody)
        known = await self.read(self.services.schedules.of_key, self.user, sent.key)
        if known is None:
            known = await self._create(sent)
        self.finish(_answer(await self.read(self.services.schedules.get, known.id)).as_json())

    async def _create(self, sent: ScheduleBody) -> Schedule:
        title = sent.title_in_lists
        options = {name: x for name, x in sent.options.items() if name != OF_ONE_START}
        now = self.services.clock()
        with refusals():
            schedule = Schedule(
                id=f"{slug_of(title)}-{secrets.token_hex(4)}",
                user=self.user,
                key=sent.key,
                title=title,
                cron=sent.cron,
                zone=sent.zone,
                work=sent.repeated_work(),
                options=options,
                requeue=sent.requeue,
                preemptible=sent.preemptible,
                paused=sent.paused,
                created_at=now,
                next_at=now,
            )
            await require_possible(self, options, preemptible=sent.preemptible)
        return await self.read(self.services.schedules.create, schedule)


class ScheduleAPI(ChangingAPI):
    """One schedule."""

    for_servers = True

    @operation("runs/-/schedules/{schedule}", ScheduleAnswer, name="schedule", scope=SESSION)
    @web.authenticated
    async def get(self, schedule_id: str) -> None:
        """Return one of my schedules; an admin gets anybody's."""
        self.finish(_answer(await own_schedule(self, schedule_id)).as_json())

    @operation(
        "runs/-/schedules/{schedule}",
        ScheduleAnswer,
        name="changeSchedule",
        body=ScheduleChangeBody,
        scope=SESSION,
    )
    @web.authenticated
    async def patch(self, schedule_id: str) -> None:
        """Change, pause or resume one of my schedules. Existing runs are not affected."""
        sent = self.sent(ScheduleChangeBody)
        found = await own_schedule(self, schedule_id, or_admin=False)
        with refusals():
            if sent.parameters and found.schedule.work.command:
                raise InvalidRequest("Only a notebook has parameters.", field="parameters")
            if sent.options is not None:
                edited = sent.edit(found.schedule)
                await require_possible(self, edited.options, preemptible=edited.preemptible)
        change = partial(self.services.schedules.change, schedule_id, sent.edit, actor=self.user)
        self.finish(_answer(await self.read(change)).as_json())

    @operation("runs/-/schedules/{schedule}", ScheduleAnswer, name="deleteSchedule", scope=SESSION)
    @web.authenticated
    async def delete(self, schedule_id: str) -> None:
        """Delete a schedule, and return it as it was; its runs stay."""
        await own_schedule(self, schedule_id)
        delete = partial(self.services.schedules.delete, schedule_id, actor=self.user)
        found = await self.read(delete)
        self.finish(_answer(found).as_json())


class ScheduleRunAPI(ChangingAPI):
    """Submits a run of a schedule at once."""

    for_servers = True

    @operation(
        "runs/-/schedules/{schedule}/run",
        RunAnswer,
        name="runSchedule",
        body=RunNowBody,
        scope=SESSION,
    )
    @web.authenticated
    async def post(self, schedule_id: str) -> None:
        """Submit a run of one of my schedules now; its next time does not change."""
        sent = self.sent(RunNowBody)
        found = (await own_schedule(self, schedule_id, or_admin=False)).schedule
        with refusals():
            run_id = await hub_of(self).submit_run(self.user, _fields(self, found, sent.key))
        followed = await self.read(self.services.runs.get, run_id)
        await self.read(self.services.schedules.note_run_now, schedule_id, followed.run)
        self.answer(RunAnswer, followed)


class PauseSchedulePage(RunForm):
    """The form that pauses or resumes a schedule."""

    @web.authenticated
    async def post(self, schedule_id: str, what: str) -> None:
        """Pause or resume the schedule."""
        await own_schedule(self, schedule_id)
        edit = partial(replace, paused=what == "pause")
        change = self.services.schedules.change
        await self.read(partial(change, schedule_id, edit, actor=self.user))
        self.go(f"runs?schedule={what}d")


class DeleteSchedulePage(RunForm):
    """The form that deletes a schedule, after a confirmation."""

    @web.authenticated
    async def post(self, schedule_id: str) -> None:
        """Ask for confirmation, or delete the schedule."""
        found = await own_schedule(self, schedule_id)
        if not self.confirmed:
            action = f"schedules/{schedule_id}/delete"
            self.confirm("delete_schedule", action=action, back="runs", schedule=found.schedule)
            return
        await self.read(partial(self.services.schedules.delete, schedule_id, actor=self.user))
        self.go("runs?schedule=deleted")


async def own_schedule(
    handler: ServiceHandler, schedule_id: str, *, or_admin: bool = True
) -> FollowedSchedule:
    """Return a schedule of the user's, or with ``or_admin`` any for an admin. Raises HTTPError."""
    found: FollowedSchedule = await handler.read(handler.services.schedules.get, schedule_id)
    unknown = UnknownSchedule(schedule=schedule_id)
    require_own(handler, found.schedule.user, unknown, or_admin=or_admin)
    return found


async def require_possible(
    handler: ServiceHandler, options: Mapping[str, Any], *, preemptible: bool
) -> None:
    """Raise a GPUSpawnerError with its sentence if these options can never become a run."""
    asked = {"options": dict(options), "server": None, "preemptible": preemptible}
    asked["must_fit"] = True
    await hub_of(handler).quote_run(handler.user, asked)


def _fields(handler: APIHandler, schedule: Schedule, key: str) -> dict[str, Any]:
    folder = f"runs/{handler.services.clock():%Y-%m-%d-%H%M%S}-{schedule.id}"
    return schedule.submission(f"{folder}-{secrets.token_hex(2)}", key)


def _answer(found: FollowedSchedule) -> ScheduleAnswer:
    schedule = found.schedule
    next_at = None if schedule.paused else schedule.next_at
    return ScheduleAnswer.of(found, next_at=next_at)


HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    (r"schedules/([0-9a-z-]{1,64})/(pause|resume)", PauseSchedulePage),
    (r"schedules/([0-9a-z-]{1,64})/delete", DeleteSchedulePage),
    ("api/runs/-/schedules", SchedulesAPI),
    (r"api/runs/-/schedules/([0-9a-z-]{1,64})", ScheduleAPI),
    (r"api/runs/-/schedules/([0-9a-z-]{1,64})/run", ScheduleRunAPI),
]
