"""The duty that submits the runs of schedules."""

from __future__ import annotations

from ..core.errors import GPUSpawnerError, Unavailable
from ..runs.schedules import DueRun
from .worker import TickDuty

NO_MEMBER = "The hub no longer has a member with this name."


class ScheduleDuty(TickDuty):
    """Has the Hub submit the runs of schedules when they are due."""

    async def round(self) -> None:
        """Submit each due run once; one that fails does not delay the others."""
        for due in await self.services.run(self.services.schedules.find_due):
            with self.tick.going_on(f"Schedule {due.schedule.id}"):
                await self._submit(due)

    async def _submit(self, due: DueRun) -> None:
        """Submit a run, or record its refusal. Raises Unavailable; the next round tries again."""
        schedules, schedule = self.services.schedules, due.schedule
        fields = schedule.submission(due.folder, due.key)
        try:
            # An existing run is not checked again: its member may have spent the credits since.
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
