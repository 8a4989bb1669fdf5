"""Billing of batch jobs, each charged once, and the comparison of sessions with Slurm's records."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial

import sqlalchemy as sa

from ..core.errors import GPUSpawnerError, SlurmRefused, SlurmUnavailable, StoreUnavailable
from ..db import audit_log
from ..db.engine import Store
from ..leases.models import Lease
from ..ledger import charges, credit_repository, usage
from ..ledger import repository as ledger_repository
from ..ledger.prices import PriceService
from ..ledger.pricing import RateCard
from ..ledger.service import usual_payer
from ..queue import repository as queue_repository
from . import repository
from .accounts import by_user
from .cluster import Cluster
from .jobs import (
    JobRun,
    UsagePart,
    living,
    parts_of,
    read_holders,
    read_runs,
    read_usage,
    stays_behind,
)
from .programs import Slurm
from .repository import BatchJob
from .service import ClusterMemberService


def price_of_job(card: RateCard, parts: Iterable[UsagePart]) -> int:
    """Return the microcredits per hour; the lowest possible price if the model is unknown."""
    return sum(
        min(
            card.rate_of(model, part.slots, held_slots=part.count) for model in part.models or ("",)
        )
        for part in parts
    )


def job_reason(job: BatchJob, run: JobRun, amount: int) -> str:
    """Return the statement's reason for a charge or a refund."""
    if amount < 0:
        said = f"Charged too much for batch job {job.label} ({job.name}): it ran"
        return f"{said} {_lasted(run.seconds)}"
    what = f"Batch job {job.label} ({job.name}) on {job.devices}"
    if run.ended_at is None:
        return f"{what}: the first {_lasted(run.seconds // usage.JOB_HOUR * usage.JOB_HOUR)}"
    return f"{what}: {_lasted(run.seconds)}{' in all' if job.charged else ''}"


def _lasted(seconds: int) -> str:
    """Format a duration exactly: ``1 h 30 min``, ``2 h 5 s``."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (seconds, "s")]
    return " ".join(f"{number} {unit}" for number, unit in parts if number) or "0 s"


OVERLAP = timedelta(hours=1)
"""How much is read again each time: a job's end may be recorded late, and clocks differ."""

LOOK_BACK = timedelta(days=7)
"""How much is read again on another day, for anything recorded later than expected."""

SETTLED = timedelta(minutes=10)
"""After this time Slurm's database adds nothing more to what its controller knows."""

LATE = timedelta(hours=6)
"""After this time somebody should check why Slurm's database does not get everything."""

AT_ONCE = 200
"""Maximum jobs charged in one transaction."""


@dataclass(frozen=True, slots=True)
class BillingResult:
    """The result of a billing round."""

    jobs: int = 0
    """Jobs that paid or were refunded."""
    amount: int = 0
    """Microcredits in total."""


@dataclass(eq=False)
class JobBillingService:
    """Charges for batch jobs."""

    store: Store
    clock: Callable[[], datetime]
    members: ClusterMemberService
    prices: PriceService
    log: logging.Logger
    _told: dict[str, str] = field(default_factory=dict, init=False)
    """The jobs that could not be charged, and the logged reasons."""
    _unclear: dict[str, datetime] = field(default_factory=dict, init=False)
    """The runs with incomplete data for their price, and since when."""
    _in_step: datetime | None = field(default=None, init=False)
    """Since when Slurm's database has had everything that its controller knows."""

    def debit_cluster(self) -> BillingResult:
        """Read the use of the cluster's jobs and charge what is due. Blocks.

        Raises SlurmUnavailable or SlurmRefused.
        """
        cluster, slurm, now = self.members.nodes(), self.members.slurm(), self.clock()
        marks = self.marks(cluster.name, now)
        unended = self.store.run(lambda connection: repository.open_jobs(connection, cluster.name))
        try:
            complete = self._is_complete(slurm, now)  # before the database is queried
            alive = living(slurm)
            read = min(marks.until, now)  # the clock may have been set back
            another_day = complete and read.date() != now.date()
            start = read - (LOOK_BACK if another_day else OVERLAP)
            runs = read_usage(slurm, max(marks.since, start), now)
            # A job's end can be recorded long after it: then it is in no recent hour.
            seen = {job_id(cluster.name, run) for run in runs}
            if lost := [job for job in unended if job.id not in seen]:
                numbers = {job.id.split(":")[1] for job in lost}
                runs += read_runs(slurm, numbers, min(job.started_at for job in lost))
        except (SlurmUnavailable, SlurmRefused):
            self._in_step = None
            raise
        return self.debit(cluster, runs, living=alive, until=now if complete else None)

    def debit(
        self,
        cluster: Cluster,
        runs: Collection[JobRun],
        *,
        living: Collection[str] | None = None,
        until: datetime | None = None,
    ) -> BillingResult:
        """Charge what is due for these runs and was not charged yet.

        It may be done twice, late, or be killed anywhere: what a run owes follows from its rate and
        its time. A run that cannot be charged does not affect others.

        Args:
            cluster: The cluster of the runs.
            runs: Runs of jobs.
            living: The jobs that Slurm's controller knows; running ones that it lost cost nothing.
            until: Everything up to then is among the runs.
        """
        now = self.clock()
        marks = self.marks(cluster.name, now)
        clear, open_since = self._cleared(cluster, runs, now)
        some = [
            run
            for run in self._not_holders(cluster, clear)
            if run.started_at and run.started_at >= marks.since
        ]
        amounts: list[int] = []
        for first in range(0, len(some), AT_ONCE):
            part = self._with_news(cluster, some[first : first + AT_ONCE], living)
            amounts += self._debit_some(cluster, part, living, now)
        if until is not None:
            self._read_up_to(cluster.name, marks, min([until, now, *open_since]), now)
        return BillingResult(len(amounts), sum(amounts))

    def unread_since(self) -> datetime | None:
        """Return the time up to which all is paid, if that is long ago and Slurm still lags."""
        now = self.clock()
        until = self.marks(self.members.nodes().name, now).until
        return until if self._in_step is None and now - until > LATE else None

    def jobs_since(self, cluster: str, moment: datetime) -> list[BatchJob]:
        """Return the batch jobs of a cluster that run or ended after a moment."""
        return self.store.run(lambda connection: repository.since(connection, cluster, moment))

    # Helpers.

    def marks(self, cluster: str, now: datetime) -> repository.BillingMarks:
        """Return how far this cluster's jobs were read; initialized at the first call."""
        found = self.store.run(lambda connection: repository.find_marks(connection, cluster))
        if found is None:
            with self.store.write() as connection:
                found = repository.marks(connection, cluster, now)
        return found

    def _read_up_to(
        self, cluster: str, marks: repository.BillingMarks, until: datetime, now: datetime
    ) -> None:
        """Record up to when everything was read: not in each round, because reads overlap.

        A mark ahead of a clock that was set back is reduced.
        """
        until = max(marks.since, until)
        another_day = marks.until.date() < until.date()
        if marks.until > now or another_day or until - marks.until >= OVERLAP / 2:
            with self.store.write() as connection:
                repository.mark(connection, cluster, until=until)

    def _is_complete(self, slurm: Slurm, now: datetime) -> bool:
        """Return True if Slurm's database has had everything for a while.

        A job's devices are recorded some seconds after its end.
        """
        if stays_behind(slurm):
            self._in_step = None
        elif self._in_step is None or self._in_step > now:
            self._in_step = now
        return self._in_step is not None and now - self._in_step >= SETTLED

    def _cleared(
        self, cluster: Cluster, runs: Iterable[JobRun], now: datetime
    ) -> tuple[list[JobRun], list[datetime]]:
        """Return the runs with final data, and from when on the others must be read again.

        A price is final: it waits for data that comes late, but no longer than that.
        """
        unclear: dict[str, datetime] = {}
        clear, again = [], []
        for run in runs:
            if not _is_unclear(run, cluster):
                clear.append(run)
                continue
            since = unclear[run.key] = self._unclear.get(run.key, now)
            if now - since >= SETTLED:
                clear.append(run)
            else:
                again.append(min(since, run.ended_at or since))
        self._unclear = unclear
        return clear, again

    def _with_news(
        self, cluster: Cluster, runs: Collection[JobRun], living: Collection[str] | None
    ) -> list[JobRun]:
        """Return the runs that are new or have something to record: mostly none."""
        with self.store.read() as connection:
            known = repository.some(connection, {job_id(cluster.name, run) for run in runs})
        return [
            run
            for run in runs
            if (job := known.get(job_id(cluster.name, run))) is None
            or (not _is_lost(run, living) and _changes(job, run))
        ]

    def _debit_some(
        self,
        cluster: Cluster,
        runs: Sequence[JobRun],
        living: Collection[str] | None,
        now: datetime,
    ) -> list[int]:
        """Charge these together, or one by one if that fails because of one of them."""
        try:
            return self._debit_together(cluster, runs, living, now) if runs else []
        except StoreUnavailable:
            raise
        except Exception as error:
            if len(runs) == 1:
                self._complain(cluster, runs[0], error)
                return []
        return [paid for run in runs for paid in self._debit_some(cluster, [run], living, now)]

    def _debit_together(
        self,
        cluster: Cluster,
        runs: Iterable[JobRun],
        living: Collection[str] | None,
        now: datetime,
    ) -> list[int]:
        """Charge some in one transaction, and return what each paid, without those that did not."""
        amounts = []
        with self.store.write() as connection:
            users = by_user(repository.members(connection))
            groups = self.members.groups_of_members(connection)
            for run in runs:
                job = repository.find(connection, job_id(cluster.name, run))
                job = job or self._new_job(connection, cluster, run, users, groups)
                if not _is_lost(run, living):
                    amounts.append(self._debit(connection, job, run, now))
        return [amount for amount in amounts if amount]

    def _complain(self, cluster: Cluster, run: JobRun, error: Exception) -> None:
        """Log once what keeps a job from being charged."""
        said = f"{type(error).__name__}: {error}"
        if self._told.get(run.key) == said:
            return
        self._told = {**self._told, run.key: said}
        self.log.error(
            "Job %s of %s on %s cannot be charged (%s); other jobs are. gpuspawner audit says what "
            "is wrong with the books: repair it. The hub retries daily for %d days; after that, "
            "take the credits by hand with gpuspawner grant.",
            *(run.label, run.user, cluster.name, said, LOOK_BACK.days),
            exc_info=None if isinstance(error, GPUSpawnerError) else error,
        )

    def _not_holders(self, cluster: Cluster, runs: Collection[JobRun]) -> list[JobRun]:
        """Return the runs with devices that do not belong to servers.

        A name alone proves nothing, because everybody can choose it. The job of a server was the
        first with that name, submitted while its ticket waited, and began before ticket and session
        were over. A batch job never becomes a server's, even if all others with its name are
        forgotten.
        """
        some = [run for run in runs if run.uses_devices]
        named = {run.ticket_id for run in some if run.ticket_id}
        keys = {job_id(cluster.name, run) for run in some if run.ticket_id}
        with self.store.read() as connection:
            tickets = queue_repository.some_tickets(connection, named)
            granted = [ticket.lease_id for ticket in tickets if ticket.lease_id]
            leases = queue_repository.some_leases(connection, granted)
            batch = repository.some(connection, keys).keys()
        known = {ticket.id: ticket for ticket in tickets}
        ends = {lease.id: lease.ended_at for lease in leases}
        first: dict[str, str] = {}
        for run in sorted(runs, key=lambda run: (run.submitted_at, int(run.id))):
            ticket = known.get(run.ticket_id)
            if ticket is None or run.submitted_at < ticket.created_at - OVERLAP:
                continue
            if job_id(cluster.name, run) in batch:
                continue
            over = ends.get(ticket.lease_id or "", ticket.ended_at)
            began = run.started_at or run.submitted_at
            if over is None or began <= over + timedelta(seconds=5):
                first.setdefault(run.ticket_id, run.id)
        return [run for run in some if first.get(run.ticket_id) != run.id]

    def _new_job(
        self,
        connection: sa.Connection,
        cluster: Cluster,
        run: JobRun,
        users: Mapping[str, str],
        groups: Mapping[str, Collection[str]],
    ) -> BatchJob:
        """Record a run, with its price and payer as of now: neither changes later."""
        if run.started_at is None:
            raise ValueError(f"job {run.label} has not started: there is nothing to charge")
        member = users.get(run.user)
        parts = parts_of(run, cluster)
        payer = usual_payer(connection, member, groups.get(member, ())) if member else None
        job = BatchJob(
            id=job_id(cluster.name, run),
            cluster=cluster.name,
            label=run.label,
            name="".join(c if c.isprintable() else "?" for c in run.name)[:60],
            user=run.user,
            member=member,
            account=payer,
            rate=price_of_job(self.prices.rates_in(connection).card(run.started_at), parts),
            devices=usage.job_in_words((part.count, part.slots, part.models) for part in parts),
            started_at=run.started_at,
        )
        repository.insert(connection, job)
        if member is None:
            self.log.warning(
                "Job %s of %s on %s has %s, but this user is not a member: nobody is charged",
                *(run.label, run.user, cluster.name, job.devices),
            )
        return job

    def _debit(self, connection: sa.Connection, job: BatchJob, run: JobRun, now: datetime) -> int:
        if not _changes(job, run):
            return 0
        amount = _due(job, run)
        until = run.ended_at or job.started_at + timedelta(seconds=run.seconds)
        until = max(job.started_at, min(now, until))
        if job.account is not None:
            transfer = usage.debit_for_job(
                job.account,
                amount,
                key=f"{repository.KEY}{job.id}:{job.entries}",
                at=until,
                reason=job_reason(job, run, amount),
            )
            posted = transfer is not None and ledger_repository.post(connection, transfer)
            if posted and credit_repository.lots_closed_since(connection, job.account, until):
                charges.settle_lots(connection, job.account, now)
        repository.update(
            connection,
            job.id,
            ended_at=run.ended_at,
            seconds=run.seconds,
            charged=job.charged + amount,
            entries=job.entries + bool(amount),
        )
        return amount


def job_id(cluster: str, run: JobRun) -> str:
    """Return the id of a run in the store."""
    return f"{cluster}:{run.key}"


def _is_lost(run: JobRun, living: Collection[str] | None) -> bool:
    """Return True if the database has a running job that the controller does not know."""
    return run.ended_at is None and living is not None and run.id not in living


def _is_unclear(run: JobRun, cluster: Cluster) -> bool:
    """Return True if more may become known of a run's devices, or of their model."""
    if not run.told:
        return bool(run.started_at and (run.seconds or run.ended_at is None))
    return run.uses_devices and any(len(part.models) != 1 for part in parts_of(run, cluster))


def _due(job: BatchJob, run: JobRun) -> int:
    """Return the microcredits to charge now; negative ones come back."""
    if job.account is None:
        return 0
    return usage.due_for_job(job.rate, run.seconds, job.charged, over=run.ended_at is not None)


def _changes(job: BatchJob, run: JobRun) -> bool:
    """Return True if a known job must pay something, or if its final data must be recorded."""
    same = (job.ended_at, job.seconds) == (run.ended_at, run.seconds)
    return bool(_due(job, run)) or (run.ended_at is not None and not same)


ENGINE = "slurm"
"""The engine of the leases whose devices jobs hold."""

TOLERANCE = 1
"""Seconds by which a session and its job may differ."""


@dataclass(frozen=True, slots=True)
class SessionDifference:
    """A session of ours and a job of Slurm's that disagree."""

    subject: str
    what: str
    ours: int = 0
    """Seconds."""
    theirs: int = 0

    def __str__(self) -> str:
        return f"{self.subject}: {self.what}"


@dataclass(frozen=True, eq=False)
class ClusterAuditService:
    """Compares sessions on a cluster with their jobs."""

    store: Store
    clock: Callable[[], datetime]
    members: ClusterMemberService
    billing: JobBillingService
    log: logging.Logger

    def audited_until(self) -> datetime:
        """Return up to when the sessions on the cluster were compared."""
        return self.billing.marks(self.members.nodes().name, self.clock()).audited_until

    def audit_cluster(
        self, since: datetime, until: datetime
    ) -> tuple[int, list[SessionDifference]]:
        """Compare the sessions that ended between two moments with their jobs in Slurm.

        Returns how many there were, and the differences. Blocks. Raises SlurmUnavailable or
        SlurmRefused.
        """
        slurm = self.members.slurm()
        sessions = self.store.run(lambda c: repository.sessions_ended(c, ENGINE, since, until))
        first = min((lease.granted_at for lease in sessions), default=since)
        ids = {lease.ticket_id for lease in sessions if lease.ticket_id}
        last = max(until, self.clock()) + OVERLAP
        holders = read_holders(slurm, ids, min(first, since) - OVERLAP, last)
        others = read_usage(slurm, since, until)
        # A batch job that is named like servers' jobs has paid for it.
        named = [run for run in others if run.ticket_id]
        named += (run for runs in holders.values() for run in runs)
        keys = {job_id(self.members.nodes().name, run): run.key for run in named}
        paid = {keys[name] for name in self.store.run(lambda c: repository.some(c, keys))}
        true = {
            ticket: [run for run in runs if run.key not in paid] for ticket, runs in holders.items()
        }
        rest = [run for run in others if run.key not in paid]
        return len(sessions), self.compare(sessions, true, rest)

    def compare(
        self,
        sessions: Iterable[Lease],
        holders: Mapping[str, Iterable[JobRun]],
        others: Iterable[JobRun] = (),
    ) -> list[SessionDifference]:
        """Return where our sessions and their jobs differ by more than a second.

        ``holders``: the jobs of each session's ticket. ``others``: jobs of the same time, none of
        which may hold devices for a ticket without a session.
        """
        by_ticket = defaultdict(list)
        for lease in sessions:
            by_ticket[lease.ticket_id or ""].append(lease)
        found = []
        for ticket_id, mine in by_ticket.items():
            runs = [run for run in holders.get(ticket_id, ()) if run.started_at]
            found += _compared(mine, runs)
        held = {run.ticket_id: run for run in others if run.ticket_id and run.uses_devices}
        with self.store.read() as connection:
            there = queue_repository.some_tickets(connection, held)
            served = repository.served(connection, held)
        for ticket in there:
            run = held[ticket.id]
            if ticket.id not in served and run.ended_at and run.seconds > TOLERANCE:
                what = f"job {run.label} had its devices for {run.seconds} s, but no session did"
                subject = f"ticket {ticket.id} of {ticket.server}"
                found.append(SessionDifference(subject, what, 0, run.seconds))
        return found

    def note_audit(
        self, differences: Collection[SessionDifference], until: datetime, *, actor: str
    ) -> None:
        """Record how far sessions were compared, and each difference in the audit log."""
        now, cluster = self.clock(), self.members.nodes().name
        with self.store.write() as connection:
            if until > repository.marks(connection, cluster, now).audited_until:
                repository.mark(connection, cluster, audited_until=until)
            note = partial(audit_log.note, connection, at=now, actor=actor, action="slurm audit")
            for each in differences:
                note(subject=each.subject, detail=each.what)
        for each in differences:
            self.log.warning("Slurm and the books differ: %s", each)


def _compared(mine: list[Lease], runs: list[JobRun]) -> list[SessionDifference]:
    """Return the differences of one ticket's sessions.

    There are several if the first was lost with its hub while its job continued.
    """
    last = mine[-1]
    subject = f"lease {last.id} of {last.server}"
    ends = [lease.ended_at for lease in mine if lease.ended_at]
    ours = round((max(ends) - min(lease.granted_at for lease in mine)).total_seconds())
    if not runs:
        what = f"it had devices for {ours} s, but Slurm has no job for it"
        return [SessionDifference(subject, what, ours, 0)] if ours > TOLERANCE else []
    theirs = sum(run.seconds for run in runs)
    found = []
    labels = ", ".join(run.label for run in runs)
    if len(runs) > 1:
        what = f"Slurm had {len(runs)} jobs for it ({labels}), together {theirs} s"
        found.append(SessionDifference(subject, what, ours, theirs))
    if abs(ours - theirs) > TOLERANCE:
        what = f"{ours} s here, and {theirs} s in Slurm (job {labels})"
        found.append(SessionDifference(subject, what, ours, theirs))
    # A job's devices are recorded some seconds after the rest of it.
    held = _amount(
        sum(not device.is_shared for device in last.devices),
        sum(device.held_slots for device in last.devices if device.is_shared),
    )
    amounts = {_amount(run.devices, sum(run.shards.values())) for run in runs if run.uses_devices}
    if amounts - {held}:
        what = f"{held} here, and {' and '.join(sorted(amounts))} in Slurm (job {labels})"
        found.append(SessionDifference(subject, what, ours, theirs))
    return found


def _amount(devices: int, shards: int) -> str:
    """Format whole devices and shards: ``2 devices``, ``1 shard``."""
    some = ((devices, "device"), (shards, "shard"))
    return " and ".join(f"{n} {word}{'s' * (n > 1)}" for n, word in some if n) or "no device"
