"""The duty that submits the runs of schedules."""

from __future__ import annotations

from dataclasses import asdict, replace

from ..core.errors import GPUSpawnerError, Unavailable
from ..runs.schedules import DueRun
from .worker import TickDuty

NO_MEMBER = "The hub has no member of this name any more."


class ScheduleDuty(TickDuty):
    """Has the Hub submit a run for each time of a schedule that has come."""

    async def round(self) -> None:
        """Handle every schedule that has come once; one that fails does not delay others."""
        for due in await self.services.run(self.services.schedules.find_due):
            with self.tick.going_on(f"Schedule {due.schedule.id}"):
                await self._submit(due)

    async def _submit(self, due: DueRun) -> None:
        """Have a run submitted, or note why not. Raises Unavailable; the next round tries again."""
        schedules, schedule = self.services.schedules, due.schedule
        fields = {
            "title": schedule.title,
            "work": asdict(replace(schedule.work, folder=due.folder)),
            "options": dict(schedule.options),
            "requeue": schedule.requeue,
            "preemptible": schedule.preemptible,
            "key": due.key,
        }
        try:
            # Of a run that is there, nothing is checked again: the money of now is not its price.
            known = await self.services.run(schedules.run_of, due)
            run = known.id if known else await self.tick.hub.submit_run(schedule.user, fields)
        except Unavailable:
            if await self.tick.hub.has_member(schedule.user):
                raise
            await self._refuse(due, NO_MEMBER)
        except GPUSpawnerError as error:
            if error.status_code >= 500:
                raise
            await self._refuse(due, error.message)
        else:
            await self.services.run(schedules.note_run, due, run)

    async def _refuse(self, due: DueRun, reason: str) -> None:
        if await self.services.run(self.services.schedules.note_refused, due, reason):
            self.poke()
