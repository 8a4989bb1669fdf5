"""Runs: each is submitted once, ends once, and begins again after an interruption."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import datetime

import sqlalchemy as sa

from ..core.errors import SweepTooLarge, TooManyRuns
from ..db.clock import Timekeeper
from ..db.engine import Store
from ..leases import repository as leases_repository
from ..leases.models import Lease, LeaseState, ServerRef
from ..leases.sessions import goes_on, note_lease
from ..members.service import require_member
from ..monitoring import resource_repository
from ..notifications import repository as notifications_repository
from ..notifications.models import NoticeKind
from ..notifications.service import compose
from ..queue import repository as queue_repository
from ..queue.service import QueueService
from . import repository
from .models import FollowedRun, Run
from .rules import (
    MOST_OPEN,
    PREEMPTED,
    RunEnd,
    end_after_ticket,
    end_of,
    may_restart,
    sentence,
    was_preempted,
)
from .sweeps import Sweep

STOPPED_BY_MEMBER = "its member stopped it"


@dataclass(eq=False)
class RunService:
    """The only code that submits and ends runs.

    Methods are synchronous and thread-safe, like those of :class:`LeaseService`.
    """

    store: Store
    clock: Timekeeper
    _: KW_ONLY
    queue: QueueService
    log: logging.Logger

    def submit(self, run: Run) -> tuple[Run, bool]:
        """Save a run; from then on it waits for its devices and survives any crash.

        Returns the run and True, or the existing run with the same key and False.
        Raises MembershipEnded or TooManyRuns.
        """
        runs, is_new = self.submit_all([run])
        return runs[0], is_new

    def submit_all(self, runs: Sequence[Run]) -> tuple[list[Run], bool]:
        """Save a member's runs, all or none. The first run of a sweep has the key.

        Returns the runs and True, or the existing run or sweep with the same key and False.
        Raises MembershipEnded, TooManyRuns or SweepTooLarge.
        """
        first = runs[0]
        with self.store.write() as connection:
            require_member(connection, first.user)
            known = repository.of_key(connection, first.user, first.key) if first.key else None
            if known is None:
                _require_room(connection, first.user, len(runs))
            if not repository.insert(connection, first):
                known = repository.of_key(connection, first.user, first.key)
                if known is None:
                    raise RuntimeError(f"the key of run {first.id} is taken by no run")
                if known.sweep is None:
                    return [known], False
                return repository.of_sweep(connection, known.sweep), False
            for run in runs[1:]:
                repository.insert(connection, run)
            if first.sweep is not None:
                repository.admit(connection, first.sweep, self.clock())
        for run in runs:
            self.log.info("Run %s of %s: submitted", run.id, run.user)
        return list(runs), True

    def require_room(self, user: str, count: int) -> None:
        """Raise TooManyRuns or SweepTooLarge if a member cannot have ``count`` more runs."""
        self.store.run(lambda c: _require_room(c, user, count))

    def admit(self) -> None:
        """Let runs of sweeps join the queue as earlier ones end."""
        for sweep in self.store.run(repository.sweeps_held_back):
            now = self.clock()
            with self.store.write() as connection:
                repository.admit(connection, sweep, now)

    def sweep(self, sweep_id: str) -> Sweep:
        """Return a sweep with its runs. Raises UnknownSweep."""
        with self.store.read() as connection:
            runs = repository.of_sweep(connection, sweep_id)
            leases = leases_repository.of_servers(connection, [run.server for run in runs])
            charged = sum(lease.charged for lease in leases)
            return Sweep(sweep_id, tuple(_followed(connection, runs)), charged)

    def stop_sweep(self, sweep_id: str, *, actor: str) -> Sweep:
        """Stop all runs of a sweep, last one first. Raises UnknownSweep."""
        for followed in reversed(self.sweep(sweep_id).runs):
            self.stop(followed.run.id, actor=actor)
        return self.sweep(sweep_id)

    def of_key(self, user: str, key: str) -> Run | None:
        """Return a member's run with this idempotency key, or None."""
        return self.store.run(lambda c: repository.of_key(c, user, key)) if key else None

    def get(self, run_id: str) -> FollowedRun:
        """Return a run, open or ended, with its newest lease. Raises UnknownRun."""
        with self.store.read() as connection:
            run = repository.get(connection, run_id)
            return _followed(connection, [run])[0]

    def open_runs(self) -> list[FollowedRun]:
        """Return all runs that have not ended, oldest first."""
        with self.store.read() as connection:
            return _followed(connection, repository.open_runs(connection))

    def are_active(self) -> bool:
        """Return True if any run has not ended, or still has a lease or a ticket."""
        return self.store.run(repository.are_active)

    def newest(
        self,
        user: str | None = None,
        limit: int = 50,
        before: str | None = None,
        *,
        leading: bool = False,
    ) -> list[FollowedRun]:
        """Return a member's runs (None: everybody's), newest first.

        ``before``: only those submitted before this run. ``leading``: only the first run
        of each sweep. Raises UnknownRun.
        """
        with self.store.read() as connection:
            last = None if before is None else repository.get(connection, before)
            found = repository.newest(connection, user, limit, last, leading=leading)
            return _followed(connection, found)

    def stop(self, run_id: str, *, actor: str, reason: str = "") -> FollowedRun:
        """Stop a run: at once if it waits, else as soon as its container has ended.

        Stopping it twice changes nothing. Raises UnknownRun.
        """
        followed = self.get(run_id)
        if followed.run.outcome:
            return followed
        own = actor == followed.run.user
        why = STOPPED_BY_MEMBER if own else (reason or "an admin stopped it")
        now = self.clock()
        with self.store.write() as connection:
            lease = leases_repository.open_of(connection, followed.run.server)
            if lease is None and _is_over(connection, followed.run):
                pass  # settle ends it, and tells its member
            elif lease is None:
                end = RunEnd("stopped", sentence(why))
                if repository.end(connection, run_id, end, now):
                    self.log.info("Run %s of %s: stopped", run_id, followed.run.user)
            elif goes_on(lease):
                outcome = "member" if own else "admin"
                leases_repository.update(connection, lease.id, outcome=outcome, end_reason=why)
                if not own:
                    note_lease(connection, lease, "stop", actor, why, now)
        # Last, so that the hub's task that waits with the ticket finds the run ended.
        if ticket := self.queue.ticket_of(followed.run.server):
            by = "" if own else actor
            self.queue.end_ticket(ticket.id, "cancelled", why, actor=by, tell=False)
        return self.get(run_id)

    def preempt(self, lease_id: str) -> None:
        """Order the end of a preemptible run whose time to yield has passed."""
        now = self.clock()
        with self.store.write() as connection:
            lease = leases_repository.get(connection, lease_id, lock=True)
            if lease.yields_at is None or now < lease.yields_at or not goes_on(lease):
                return
            why = "its GPUs went to a start that is not preemptible"
            leases_repository.update(connection, lease.id, outcome=PREEMPTED, end_reason=why)

    def note_exit(self, run_id: str, exit_code: int, last_line: str = "") -> None:
        """Record the exit status and last line of a run's program, before its lease is released."""
        note = repository.note_exit
        self.store.run(lambda c: note(c, run_id, exit_code, last_line), write=True)

    def refuse(self, run_id: str, reason: str) -> None:
        """End a run that cannot start, with the reason that its member reads."""
        end, now = RunEnd("failed", reason), self.clock()
        with self.store.write() as connection:
            if self._end(connection, run_id, end, now):
                self.log.info("Run %s failed: %s", run_id, reason)

    def settle(self) -> list[Run]:
        """End every run whose lease has ended, or let it wait again if it may begin again.

        Returns the runs that ended.
        """
        ended = []
        for followed in self.open_runs():
            if followed.lease is None:
                run = self._settle_ticket(followed.run.id)
            elif followed.lease.state is LeaseState.ENDED:
                run = self._settle_one(followed.run.id) or self._settle_ticket(followed.run.id)
            else:
                continue
            if run:
                self.log.info("Run %s of %s: %s", run.id, run.user, run.outcome)
                ended.append(run)
        self._end_stray_tickets()
        return ended

    def _end_stray_tickets(self) -> None:
        """End the tickets of runs that were stopped while they joined the queue."""
        by_run = {ticket.server.run_id: ticket for ticket in self.queue.waiting()}
        by_run.pop("", None)
        for run_id in self.store.run(lambda c: repository.ended_ids(c, list(by_run))):
            why = "its run has ended"
            self.queue.end_ticket(by_run[run_id].id, "cancelled", why, tell=False)

    def strays(self, leases: Iterable[Lease]) -> list[Lease]:
        """Return the leases whose run has ended; their containers may still be running."""
        by_run = {lease.server.run_id: lease for lease in leases}
        ended = self.store.run(lambda c: repository.ended_ids(c, list(by_run)))
        return [lease for run_id, lease in by_run.items() if run_id in ended]

    def _settle_ticket(self, run_id: str) -> Run | None:
        """End a run whose ticket ended before its turn came."""
        with self.store.read() as connection:
            ticket = queue_repository.newest_of_server(
                connection, repository.get(connection, run_id).server
            )
        if ticket is None or (end := end_after_ticket(ticket)) is None:
            return None
        now = self.clock()
        with self.store.write() as connection:
            run = repository.get(connection, run_id, lock=True)
            newest = queue_repository.newest_of_server(connection, run.server)
            if newest is None or newest.id != ticket.id:
                return None
            if leases_repository.open_of(connection, run.server):
                return None
            return self._end(connection, run_id, end, now)

    def _end(self, connection: sa.Connection, run_id: str, end: RunEnd, at: datetime) -> Run | None:
        """End a run, tell its member, and return it; None if it has already ended."""
        if not repository.end(connection, run_id, end, at):
            return None
        ended = repository.get(connection, run_id)
        self._tell(connection, ended)
        return ended

    def _tell(self, connection: sa.Connection, run: Run) -> None:
        """Tell the member how their run or sweep ended, unless they stopped it themselves."""
        if run.reason == sentence(STOPPED_BY_MEMBER) or run.ended_at is None:
            return
        if run.sweep is not None:
            self._tell_sweep(connection, run.sweep, run.user, run.ended_at)
            return
        key, kind = f"run:{run.id}", NoticeKind.RUN_ENDED
        told = compose("run_ended", kind, key, run.user, run.ended_at, run=run, reason=run.reason)
        notifications_repository.add(connection, told)

    def _tell_sweep(
        self, connection: sa.Connection, sweep: str, user: str, ended_at: datetime
    ) -> None:
        """Tell the member once that all runs of their sweep have ended."""
        outcomes = Counter(run.outcome for run in repository.of_sweep(connection, sweep))
        if "" in outcomes:
            return
        key, kind = f"sweep:{sweep}", NoticeKind.RUN_ENDED
        told = compose("sweep_ended", kind, key, user, ended_at, sweep=sweep, outcomes=outcomes)
        notifications_repository.add(connection, told)

    def _settle_one(self, run_id: str) -> Run | None:
        now = self.clock()
        with self.store.write() as connection:
            run = repository.get(connection, run_id, lock=True)
            lease = _newest_leases(connection, [run]).get(run.server)
            if run.outcome or lease is None or not _has_to_settle(connection, run, lease):
                return None
            used = resource_repository.totals_of(connection, [lease.id]).get(lease.id)
            end = end_of(lease, run.exit_code, run.reason, used)
            if end is None:
                if may_restart(run, lease):
                    preempted = was_preempted(lease)
                    repository.begin_again(connection, run.id, lease.id, preempted=preempted)
                    self.log.info("Run %s of %s begins again", run.id, run.user)
                    return None
                end = RunEnd("failed", f"It was interrupted: {lease.end_reason}.")
            return self._end(connection, run.id, end, lease.ended_at or now)


def _require_room(connection: sa.Connection, user: str, runs: int) -> None:
    count = repository.count_open(connection, user)
    if count + runs > MOST_OPEN and runs > 1:
        raise SweepTooLarge(runs=runs, count=count, most=MOST_OPEN)
    if count + runs > MOST_OPEN:
        raise TooManyRuns(count=count, most=MOST_OPEN)


def _has_to_settle(connection: sa.Connection, run: Run, lease: Lease) -> bool:
    """Return True if the run's newest lease has ended and this was not handled yet."""
    if lease.state is not LeaseState.ENDED or lease.id == run.after_lease:
        return False
    if run.exit_code is not None and end_of(lease, run.exit_code) is not None:
        return True  # a ticket that it got since then is a stray
    # A lease that was lost with its hub puts the ticket back into the queue.
    waiting = queue_repository.open_of_member(connection, run.user)
    return all(ticket.server != run.server for ticket in waiting)


def _is_over(connection: sa.Connection, run: Run) -> bool:
    """Return True if a run's container has ended, and the run only has to be settled."""
    lease = _newest_leases(connection, [run]).get(run.server)
    if lease is None or not _has_to_settle(connection, run, lease):
        return False
    return end_of(lease, run.exit_code) is not None


def _newest_leases(connection: sa.Connection, runs: Iterable[Run]) -> dict[ServerRef, Lease]:
    """Return the newest lease of each run that ever had one."""
    found = leases_repository.of_servers(connection, [run.server for run in runs])
    return {lease.server: lease for lease in found}  # the last of each is the newest


def _followed(connection: sa.Connection, runs: Sequence[Run]) -> list[FollowedRun]:
    leases = _newest_leases(connection, runs)
    return [FollowedRun(run, leases.get(run.server)) for run in runs]
