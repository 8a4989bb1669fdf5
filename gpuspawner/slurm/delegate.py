"""Slurm in the broker's place: it says whose turn it is, and which devices they get."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

from ..errors import ConfigError, GPUSpawnerError, SlurmRefused, SlurmUnavailable
from ..model import Ticket
from ..scheduler.delegated import Turn
from . import holder
from .asking import AWAY_PATIENCE, PATIENCE, Asker
from .cluster import Cluster
from .controller import Controller, Holder
from .jobs import HOLDER, Job, read_jobs
from .names import user_of
from .telemetry import SamplesNodes
from .tending import Tending
from .together import Together

LOG = logging.getLogger(__name__)

EVERY = 1.35
"""Seconds that one answer of Slurm serves everybody who asks: it is asked once in them. With what
the accounting service asks, the two ask less than once a second."""

SOON, EAGER = 0.3, 3.0
"""Who hands in a job while Slurm is hardly asked hears of it sooner: for so long it may be asked
again so many seconds after an answer."""

SAVED = 2
"""Looks that may come before their time, at most; they are saved up by not asking."""

AT_ONCE = 16
"""Tickets that are submitted at once."""

OLD = timedelta(seconds=5)
"""Of this age, a ticket may have a job that we did not submit."""

SETTLING = 0.3
"""Seconds that Slurm gets to act on what it was told, before it is asked what came of it."""

ENDING = 10.0
"""Seconds after which a job that was told to end and runs on was not told: Slurm refused it."""

FRESH = 2.0
"""Seconds for which a look says what jobs a ticket has."""

SWITCHED_ON = "its machine is being switched on"


class SlurmDelegate(Tending, SamplesNodes):
    """Tickets as jobs, and jobs as turns; see :class:`gpuspawner.scheduler.delegated.Delegate`."""

    engine = "slurm"
    name = "slurm"

    def __init__(
        self,
        cluster: Cluster,
        slurm: Controller,
        *,
        as_member: bool = True,
        before: Callable[[Ticket], str] = lambda ticket: "",
        log: logging.Logger | Any = LOG,
    ) -> None:
        """``as_member``: jobs belong to the members' own users on the nodes, else to ours.
        ``before`` is called with each ticket before its job is submitted; it says which account
        of its member the job counts on, and nothing for their default."""
        super().__init__(cluster, slurm, log)
        self._ending = Together(self._end)
        self._as_member = as_member
        self._before = before
        self._log = log
        self._asker = Asker(lambda: self._look())
        self._jobs: dict[str, Job] = {}
        self._turns: dict[str, Turn] = {}
        self._told_to_end: dict[str, float] = {}
        """When the jobs of tickets were told to end, by ticket, until a look has shown the end."""
        self._telling = threading.Lock()
        self._ended_by_us: set[int] = set()
        """Jobs that have ended since they were told to: their tickets may get others."""
        self._began = self._answered = self._paid = float("-inf")
        self._handed_in = self._nobody_waited = float("-inf")
        self._trouble: SlurmUnavailable | None = None
        self._told: float | None = None
        """When Slurm was first told something since the last look."""
        self._submitted: dict[str, float] = {}
        self._submitting = [threading.Lock() for _ in range(AT_ONCE)]

    # Tickets.

    def submit(self, ticket: Ticket) -> None:
        """Raises TooMuchAsked, SlurmRefused or SlurmUnavailable."""
        # Who asks and the round may both find that it has no job.
        with self._submitting[hash(ticket.id) % len(self._submitting)]:
            self._must_answer()
            if ticket.id not in self._submitted and _is_old(ticket):
                self.turns()  # an earlier hub may have submitted it
            job = self._jobs.get(ticket.id)
            if self.is_missing(ticket) and (job is None or not job.lives):
                self._submit(ticket)

    def _submit(self, ticket: Ticket) -> None:
        user = user_of(ticket.server.user) if self._as_member else ""
        lacking = {*self.must_be_open(ticket), *self.lacking(ticket)}
        account = self._before(ticket)
        job = holder.of(ticket, self.cluster, user=user, account=account, lacking=lacking)
        # Before and after: a look that begins in between proves nothing.
        self._submitted[ticket.id] = float("inf")
        try:
            self._hand_in(job)
        except SlurmRefused as error:
            if job.minutes is not None and "time limit" in error.message:
                self.must_allow(job.minutes)  # which says how long it may be
            raise _explained(error, user) from None
        finally:
            self._submitted[ticket.id] = self._handed_in = time.monotonic()
            self._has_news()
        self._hand.submitted(ticket)
        self._log.info("Ticket %s of %s is with Slurm", ticket.id, ticket.server)

    def _hand_in(self, job: Holder) -> None:
        """Raises SlurmRefused or SlurmUnavailable."""
        try:
            self.slurm.submit(job)
        except SlurmRefused as error:
            if not job.account or "Invalid account" not in error.message:
                raise
            # The controller may hear of it later than its database, or it is gone since.
            self._log.warning("Slurm does not know %s in the account %s", job.user, job.account)
            self.slurm.submit(replace(job, account=""))

    def is_missing(self, ticket: Ticket) -> bool:
        submitted = self._submitted.get(ticket.id)
        return submitted is None or submitted < self._began

    def cancel(self, ticket_id: str) -> None:
        """Every job of this ticket, waiting or not. Raises SlurmUnavailable."""
        self._must_answer()
        job = self._surely(ticket_id)
        if job is None:
            self._tell_end(ticket_id, partial(self._end_named, ticket_id))
        elif job.lives:
            self._tell_end(ticket_id, partial(self._ending.tell, job.id))

    def cancel_job(self, number: int) -> None:
        """One that lived a moment ago. Raises SlurmUnavailable."""
        jobs = self._jobs
        ticket_id = next((name for name, job in jobs.items() if job.id == number), "")
        self._tell_end(ticket_id, partial(self._ending.tell, number))

    def _tell_end(self, ticket_id: str, tell: Callable[[], object]) -> None:
        """Have the job of a ticket ended. From now on :meth:`turns` names no devices of it, though
        it runs in the last look. Raises SlurmUnavailable; then it may have been told."""
        with self._telling:
            self._told_to_end[ticket_id] = float("inf")
        try:
            tell()
        finally:
            with self._telling:
                self._told_to_end[ticket_id] = time.monotonic()
            self._has_news()

    def _end_named(self, ticket_id: str) -> None:
        with suppress(SlurmRefused):  # there is none any more
            self.slurm.cancel_named(f"{HOLDER}{ticket_id}")

    def _end(self, numbers: list[int]) -> None:
        with suppress(SlurmRefused):  # some are over already
            self.slurm.cancel(*sorted(set(numbers)))

    def _surely(self, ticket_id: str) -> Job | None:
        """The one job of a ticket, when a look of just now has shown it; None when there may be
        another one. To find it by its name, Slurm is asked for everybody's jobs; and a number that
        is not of just now may be somebody else's, once a controller has lost what it knew."""
        with suppress(SlurmUnavailable):
            self.turns(FRESH)
        began = self._began  # first: another look may come in between
        job, submitted = self._jobs.get(ticket_id), self._submitted.get(ticket_id)
        if job is None or time.monotonic() - began > 2 * FRESH:
            return None
        if submitted is None:  # by another process, which may have done it again
            return job if job.lives else None
        return job if submitted < began else None

    def extend(self, ticket_id: str, seconds: int) -> None:
        """Raises SlurmRefused or SlurmUnavailable."""
        asked_at = time.monotonic()
        self.turns()
        if ticket_id not in self._jobs:
            self._look_since(asked_at)  # the last look may be older than the job
        if (job := self._jobs.get(ticket_id)) is None or not job.lives:
            raise SlurmRefused(why="its job has ended")
        minutes = holder.minutes(seconds)
        self.must_allow(minutes)
        self.slurm.change(job.id, minutes=minutes)

    def decline(self, ticket_id: str) -> None:
        job = self._jobs.get(ticket_id)
        if job is not None and job.lives:
            self._tell_end(ticket_id, partial(self._hand.give_back, job))

    def turns(self, age: float = EVERY) -> Mapping[str, Turn]:
        def is_due() -> bool:
            return time.monotonic() >= self._due(age)

        patience = PATIENCE if self._trouble is None else AWAY_PATIENCE
        if not self._asker.wait(is_due, patience):
            why = f"it has not answered for {self._asker.seconds:.0f} seconds"
            raise self._trouble or SlurmUnavailable(why=why)
        if (trouble := self._trouble) is not None:
            raise trouble
        return self._without_ending()

    def _without_ending(self) -> Mapping[str, Turn]:
        """The turns of the last look, and no devices of jobs that were told to end."""
        with self._telling:  # first: what is taken out here was shown to have ended before that
            ending = set(self._told_to_end)
        turns = self._turns
        hidden = [name for name in ending if name in turns and turns[name].uuids]
        if not hidden:
            return turns
        return {**turns, **{name: replace(turns[name], uuids=(), since=None) for name in hidden}}

    def _look_since(self, moment: float) -> None:
        """Wait for a look that began after this moment. Raises SlurmUnavailable."""
        while self._began < moment:
            time.sleep(max(0.0, self._due(0) - time.monotonic()))
            self.turns(0)

    def _must_answer(self) -> None:
        """Before it is told something: nobody waits long where it does not answer already. Raises
        SlurmUnavailable."""
        if self._trouble is not None or self._asker.seconds > PATIENCE:
            self.turns()

    def soon(self) -> float:
        now = time.monotonic()
        if self._settled() < now - EVERY and not self._is_eager():
            return EVERY  # nobody was told anything, or nobody wants to know
        return max(0.0, self._due(EVERY) - now)

    def _due(self, age: float) -> float:
        """When Slurm is asked next, by who does with an answer of that age."""
        due = self._answered + max(age, EVERY)
        if age <= EVERY and self._is_eager():
            due = min(due, max(self._answered + SOON, self._paid - SAVED * EVERY))
        never = self._answered == float("-inf")  # then no answer is better than none
        return due if never else max(due, self._settled())

    def _is_eager(self) -> bool:
        """Whether somebody handed in a job a moment ago, and waits to hear more of a Slurm that
        answers."""
        handed_in = self._handed_in
        recent = time.monotonic() < handed_in + EAGER
        return recent and self._trouble is None and self._nobody_waited <= handed_in

    def _has_news(self) -> None:
        if self._told is None:
            self._told = time.monotonic()

    def _settled(self) -> float:
        """When a look shows what came of what Slurm was told."""
        told = self._told
        return float("-inf") if told is None else told + SETTLING

    def living(self) -> list[Job]:
        """The jobs with which tickets wait and servers run. Raises SlurmUnavailable."""
        self.turns()
        return [job for job in self._jobs.values() if job.lives]

    def known(self) -> list[Job]:
        """The jobs of tickets in the last look, those that have ended among them."""
        return list(self._jobs.values())

    def job(self, ticket_id: str) -> Job | None:
        """The job of a ticket, as of the last look that named it; with the devices that it had,
        which Slurm forgets at its end."""
        return self._jobs.get(ticket_id)

    def _look(self) -> None:
        began = time.monotonic()
        self._told = None
        self._paid = max(began, self._paid) + EVERY
        try:
            self._read(read_jobs(self.slurm), began)
        except SlurmUnavailable as error:
            self._trouble = error
        except SlurmRefused as error:
            self._trouble = SlurmUnavailable(why=error.message)
        except Exception as error:  # what it says is nothing that we can go by
            self._log.exception("Slurm's answer could not be read")
            self._trouble = SlurmUnavailable(why=f"its answer could not be read ({error!r:.80})")
        else:
            self._trouble = None
        finally:
            self._answered = time.monotonic()  # also no answer costs Slurm time

    def _read(self, jobs: list[Job], began: float) -> None:
        line = sorted((job for job in jobs if job.waits), key=lambda job: (-job.priority, job.id))
        places = {job.id: place for place, job in enumerate(line, start=1)}
        found: dict[str, Job] = {}
        for job in jobs:
            if job.ticket_id:
                found[job.ticket_id] = self._better(found.get(job.ticket_id), job)
        before = self._jobs
        self._jobs = {name: _with_devices(job, before.get(name)) for name, job in found.items()}
        self._note_ends({job.id for job in jobs})
        self._turns = {
            name: self._turn(job, places.get(job.id, 0), len(line))
            for name, job in self._jobs.items()
        }
        self._began = began
        self._forget_ends(began)
        if not any(job.waits for job in self._jobs.values()):
            self._nobody_waited = began
        for name in self._submitted.keys() - self._jobs.keys():
            if self._submitted[name] < began:
                del self._submitted[name]

    def _note_ends(self, known: Collection[int]) -> None:
        """Keep which jobs have ended since they were told to, as long as Slurm knows them."""
        with self._telling:
            told = [job for name in self._told_to_end if (job := self._jobs.get(name))]
        self._ended_by_us |= {job.id for job in told if not job.lives}
        self._ended_by_us.intersection_update(known)

    def _forget_ends(self, began: float) -> None:
        """Forget who was told to end before this look, and has ended or was not told after all."""
        with self._telling:
            for name, told_at in list(self._told_to_end.items()):
                job = self._jobs.get(name)
                pause = ENDING if job is not None and job.lives else 0.0
                if told_at + pause < began:
                    del self._told_to_end[name]

    def _better(self, one: Job | None, other: Job) -> Job:
        """Which of two jobs of one ticket counts: the first, or one that was submitted after its
        end. Any other that lives is one too many: a submit that was cut off came through after
        all, or somebody took the name for a job of their own."""
        if one is None:
            return other
        first, second = sorted((one, other), key=lambda job: job.id)
        ended, submitted = first.ended_at, second.submitted_at
        if not first.lives and (ended is None or submitted is None or ended <= submitted):
            return second
        if second.lives:
            self._log.warning("Two jobs for one ticket: cancelling %s", second.id)
            with suppress(GPUSpawnerError):
                self.slurm.cancel(second.id)
        return first

    def _turn(self, job: Job, place: int, of: int) -> Turn:
        if job.waits:
            return Turn(
                ticket_id=job.ticket_id,
                place=place,
                of=of,
                score=float(job.priority),
                why=job.why,
                start=job.started_at,
            )
        if not job.lives:
            return Turn(
                ticket_id=job.ticket_id,
                over=job.end,
                again=job.may_come_again or job.id in self._ended_by_us,
                ended_at=job.ended_at,
            )
        why = SWITCHED_ON if job.state == "CONFIGURING" else ""
        return Turn(ticket_id=job.ticket_id, uuids=self._uuids(job), since=job.started_at, why=why)

    def _uuids(self, job: Job) -> tuple[str, ...]:
        """The devices of a job that runs; none while it is being cleared away."""
        if job.state != "RUNNING" or not job.indices:
            return ()
        try:
            return holder.indices_to_uuids(self.cluster.node(job.node), job.indices)
        except ConfigError as error:
            self._log.error("%s", error.message)
            return ()


def _is_old(ticket: Ticket) -> bool:
    # Either way: the wall clock may have been set since.
    return abs(datetime.now(timezone.utc) - ticket.created_at) > OLD


def _with_devices(job: Job, before: Job | None) -> Job:
    """With what it had while it ran: Slurm does not say it of one that has ended."""
    if job.indices or before is None or before.id != job.id:
        return job
    return replace(job, kind=before.kind, indices=before.indices)


def _explained(error: SlurmRefused, user: str) -> SlurmRefused:
    said = str(error.fields.get("why", ""))
    if "Invalid user" in said or "Invalid account" in said:
        who = f"the user {user} has no account there" if user else "we have no account there"
        return SlurmRefused(why=f"{who}. Tell your admin: gpuspawner slurm sync makes them")
    return error
