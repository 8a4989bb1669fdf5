"""Admins' control of Slurm's order: positions, points and pauses.

The admins' decisions are in the store. Slurm is adjusted to them again and again, so that nothing
is lost if a process crashes in between, or if somebody changes Slurm by hand.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..core.errors import SlurmRefused
from ..queue.models import Ticket
from . import job_spec
from .jobs import GIVEN_BACK, SlurmJob
from .programs import Slurm, listed

FIRST = 4_000_000_000
"""The priority of the first position set by an admin.

Slurm keeps a priority that was set, however the fair share changes, until the job is released.
"""

PLACES = 2_000_000
"""How many priorities below :data:`FIRST` are positions; no job reaches them by itself."""


MARK = "[gpuspawner: held for a pause]"
"""Part of the admin's comment of a job while we hold it.

It stays with the job when a process restarts, and no member can write it: we do not release what an
admin holds.
"""

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 600.0
"""Seconds until Slurm is told again what it refused or did not do, doubled each time."""


@dataclass(frozen=True, slots=True)
class _Told:
    what: str
    again_at: float
    """When it is told again, if it is not done by then."""
    pause: float


class PriorityOverrides:
    """Keeps the jobs of one process's waiting tickets as admins want them."""

    def __init__(
        self,
        slurm: Slurm,
        log: logging.Logger | Any,
        clock: Callable[[], float] = time.monotonic,
        user: int | None = None,
    ) -> None:
        """Create it; ``user`` is our user in Slurm, if it is not the process's own."""
        self._slurm = slurm
        self._log = log
        self._clock = clock
        self._user = os.geteuid() if user is None else user
        self._nice: dict[str, int] = {}
        """The last value that Slurm accepted for each ticket."""
        self._told: dict[str, _Told] = {}
        """The last change that is not done yet, by ticket."""
        self._refused: set[str] = set()

    def submitted(self, ticket: Ticket, nice: int) -> None:
        """Record the nice value with which a ticket's job was submitted."""
        self._nice[ticket.id] = nice

    def pause(self, jobs: Iterable[SlurmJob]) -> None:
        """Hold each waiting job. Raises SlurmUnavailable."""
        found = [job for job in jobs if job.waits and job.priority]
        held = 0
        for note, some in _by_note(found, MARK).items():
            said = f"hold {listed(some)}"
            # Without admin rights we hold our own jobs, as their owner.
            if self._tell(partial(self._slurm.hold, some, note), said) or self._tell(
                partial(self._slurm.hold, some), said
            ):
                held += len(some)
        if held:
            self._log.info("Held %d jobs: granting is paused", held)

    def go_on(self, jobs: Iterable[SlurmJob], places: Mapping[int, int]) -> None:
        """Release what we held for a pause, jobs with an admin's position first.

        So nobody goes before them. Raises SlurmUnavailable.
        """
        ours = [job for job in jobs if job.waits and self._is_ours(job)]
        held = {job.id for job in ours if not job.priority}
        for job in ours:
            if self._nice.get(job.ticket_id):
                del self._nice[job.ticket_id]  # it is lost if a job is released twice
        for number in sorted(held & places.keys(), key=lambda each: places[each]):
            # Slurm gives no priority to a held job; the others stay held until it has its own.
            self._release([number])
            self._change(number, priority=FIRST - places[number])
            held.remove(number)
        if held and self._release(held):
            self._log.info("Released %d jobs", len(held))
        marked = [job for job in jobs if job.waits and MARK in job.note]
        for note, some in _by_note(marked, "").items():
            self._tell(partial(self._slurm.note, some, note), f"comment of {listed(some)}")

    def order(self, waiting: Collection[tuple[Ticket, SlurmJob]]) -> None:
        """Put each job at its admin's position, or in the order with its points.

        Raises SlurmUnavailable.
        """
        for ticket, job in waiting:
            if job.priority == 0:
                continue  # somebody holds it
            if ticket.position is not None:
                place = FIRST - ticket.position
                if job.priority != place:
                    self._insist(ticket, job, priority=place)
                else:
                    self._told.pop(ticket.id, None)
                continue
            if job.priority > FIRST - PLACES:
                self._release([job.id])
                self._nice.pop(ticket.id, None)
            nice = job_spec.nice_of(ticket)
            if self._nice.get(ticket.id) == nice or self._insist(ticket, job, nice=nice):
                self._nice[ticket.id] = nice
                self._told.pop(ticket.id, None)
        there = {ticket.id for ticket, _ in waiting}
        for known in (self._nice, self._told):
            for gone in known.keys() - there:
                known.pop(gone)

    def revive(self, ticket: Ticket, job: SlurmJob) -> bool:
        """Release a job that Slurm has given up; returns False if Slurm refuses that.

        Raises SlurmUnavailable.
        """
        if not self._is_due(ticket, f"{job.id} release"):
            return True
        self._nice.pop(ticket.id, None)
        return self._release([job.id])

    def exclude(self, job: SlurmJob, nodes: Collection[str]) -> None:
        """Let a waiting job run on all nodes but these. Raises SlurmUnavailable."""
        self._change(job.id, excluded=nodes)

    def give_back(self, job: SlurmJob) -> None:
        """End a job whose ticket is to get another one. Raises SlurmUnavailable."""
        note = _noted(job, GIVEN_BACK)
        self._tell(partial(self._slurm.note, [job.id], note), f"comment of {job.id}")
        self._tell(partial(self._slurm.cancel, job.id), f"end {job.id}")

    def _insist(self, ticket: Ticket, job: SlurmJob, **what: int) -> bool:
        """Make a change, repeated only after growing pauses; True if Slurm accepted it now."""
        return self._is_due(ticket, f"{job.id} {what}") and self._change(job.id, **what)

    def _is_due(self, ticket: Ticket, said: str) -> bool:
        """Return True if Slurm is to be told this now, and note that it is."""
        now = self._clock()
        before, pause = self._told.get(ticket.id), FIRST_PAUSE
        if before is not None and before.what == said:
            if now < before.again_at:
                return False
            pause = min(2 * before.pause, LONGEST_PAUSE)
        self._told[ticket.id] = _Told(said, now + pause, pause)
        return True

    def _is_ours(self, job: SlurmJob) -> bool:
        """Return True if we hold a held job for a pause, and no admin held it before or since."""
        if job.reason == "JobHeldUser":
            # An owner who is no admin can hold only in this way.
            return MARK not in job.note and job.uid == self._user != 0
        return MARK in job.note

    def _release(self, jobs: Collection[int]) -> bool:
        return self._tell(partial(self._slurm.release, jobs), f"release {listed(jobs)}")

    def _change(self, job: int, **what: Any) -> bool:
        said = ", ".join(f"{name} {value}" for name, value in what.items())
        return self._tell(partial(self._slurm.change, job, **what), f"job {job}: {said}")

    def _tell(self, tell: Callable[[], None], what: str) -> bool:
        """Make a change; returns True if Slurm did it. A refusal is logged once."""
        try:
            tell()
        except SlurmRefused as error:
            if error.message not in self._refused:
                self._refused.add(error.message)
                self._log.warning("%s: %s", what, error.message)
            return False
        return True


def _by_note(jobs: Iterable[SlurmJob], mark: str) -> dict[str, list[int]]:
    """Group the jobs by the comment that they will have; an admin's own text stays."""
    found = defaultdict(list)
    for job in jobs:
        found[_noted(job, mark)].append(job.id)
    return found


def _noted(job: SlurmJob, mark: str) -> str:
    return f"{job.note.replace(MARK, '').strip()} {mark}".strip()
