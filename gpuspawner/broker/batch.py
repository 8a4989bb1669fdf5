"""Jobs that run beside servers: paid from the same accounts at the same rates, exactly once; and
what Slurm says of our own sessions, held against what we say."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import sqlalchemy as sa

from ..ledger import batch as pure
from ..ledger.pricing import RateCard
from ..model import Lease
from ..slurm.cluster import Cluster
from ..slurm.names import by_user
from ..slurm.usage import Part, Run, living, parts_of, read_holders, read_runs, read_usage
from ..store import batch, book, closures, history, lots, tickets
from ..store.batch import BatchJob
from .admitting import Admitting

ENGINE = "slurm"
"""The engine of the leases that jobs hold devices for."""

OVERLAP = timedelta(hours=1)
"""What is read again each time: the end of a job can become known late, and clocks differ."""

AT_ONCE = 200
"""Jobs that are debited in one transaction, at the most."""

TOLERANCE = 1
"""Seconds by which a session and its job may differ."""


@dataclass(frozen=True, slots=True)
class Debited:
    """What a look at the jobs of a cluster did."""

    jobs: int = 0
    """Those that paid or got something back."""
    amount: int = 0
    """Microcredits in all."""
    unknown: tuple[str, ...] = ()
    """Users of jobs that were new and that no member is."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A session of ours and a job of Slurm's that do not agree."""

    subject: str
    what: str
    ours: int = 0
    """Seconds."""
    theirs: int = 0

    def __str__(self) -> str:
        return f"{self.subject}: {self.what}"


class Batch(Admitting):
    """The part of the broker that charges for jobs beside servers, and compares."""

    if TYPE_CHECKING:

        def _usual_payer(
            self, connection: sa.Connection, user: str, groups: Collection[str]
        ) -> str: ...

        def _settle_lots(self, connection: sa.Connection, account: str, now: datetime) -> None: ...

    def debit_cluster(self) -> Debited:
        """Read what the cluster's jobs used and charge what is due. Blocks. Raises
        SlurmUnavailable or SlurmRefused."""
        cluster, slurm, now = self.nodes(), self.slurm(), self.clock()
        with self.store.write() as connection:
            marks = batch.marks(connection, cluster.name, now)
            unended = batch.open_jobs(connection, cluster.name)
        alive = living(slurm)
        runs = read_usage(slurm, max(marks.since, marks.until - OVERLAP), now)
        # What ended long ago can become known only now: its end is in no recent hour.
        seen = {job_id(cluster.name, run) for run in runs}
        if lost := [job for job in unended if job.id not in seen]:
            numbers = {job.id.split(":")[1] for job in lost}
            runs += read_runs(slurm, numbers, min(job.started_at for job in lost))
        return self.debit(cluster, runs, living=alive, until=now)

    def debit(
        self,
        cluster: Cluster,
        runs: Iterable[Run],
        *,
        living: Collection[str] | None = None,
        until: datetime | None = None,
    ) -> Debited:
        """Charge these runs what is due and not charged yet.

        ``living``: the jobs that Slurm's controller knows, so that those which it lost are not
        charged on and on. ``until``: everything up to then is among the runs. It may be done
        twice, late, or be killed anywhere: what a run owes follows from its rate and its time.
        """
        now = self.clock()
        mine = self._not_holders(runs)
        with self.store.write() as connection:
            since = batch.marks(connection, cluster.name, now).since
        some = [run for run in mine if run.started_at and run.started_at >= since]
        done: list[tuple[str, int]] = []
        unknown: list[str] = []
        for first in range(0, len(some), AT_ONCE):
            with self.store.write() as connection:
                users = by_user(batch.members(connection))
                groups = self._groups(connection)
                for run in some[first : first + AT_ONCE]:
                    job = batch.find(connection, job_id(cluster.name, run))
                    if job is None:
                        job = self._new_job(connection, cluster, run, users, groups)
                        if job.member is None:
                            unknown.append(run.user)
                    if run.ended_at is None and living is not None and run.id not in living:
                        continue
                    if amount := self._debit(connection, job, run, now):
                        done.append((job.id, amount))
        if until is not None:
            with self.store.write() as connection:
                batch.mark(connection, cluster.name, until=max(since, min(until, now)))
        return Debited(len(done), sum(amount for _, amount in done), tuple(dict.fromkeys(unknown)))

    def jobs_since(self, cluster: str, moment: datetime) -> list[BatchJob]:
        """The jobs of a cluster beside servers that go on or ended after a moment."""
        return self.store.run(lambda connection: batch.since(connection, cluster, moment))

    # The audit.

    def audited_until(self) -> datetime:
        """Up to when the sessions on the cluster were compared."""
        name = self.nodes().name
        with self.store.write() as connection:
            return batch.marks(connection, name, self.clock()).audited_until

    def audit_cluster(self, since: datetime, until: datetime) -> tuple[int, list[Difference]]:
        """Hold the sessions that ended between two moments against Slurm's jobs for them: how
        many there were, and what differs. Blocks. Raises SlurmUnavailable or SlurmRefused."""
        slurm = self.slurm()
        sessions = self.store.run(lambda c: batch.sessions_ended(c, ENGINE, since, until))
        first = min((lease.granted_at for lease in sessions), default=since)
        ids = {lease.ticket_id for lease in sessions if lease.ticket_id}
        last = max(until, self.clock()) + OVERLAP
        holders = read_holders(slurm, ids, min(first, since) - OVERLAP, last)
        others = read_usage(slurm, since, until)
        return len(sessions), self.compare(sessions, holders, others)

    def compare(
        self,
        sessions: Iterable[Lease],
        holders: Mapping[str, Iterable[Run]],
        others: Iterable[Run] = (),
    ) -> list[Difference]:
        """Where our sessions and Slurm's jobs for them differ by more than a second.

        ``holders``: the jobs of each session's ticket. ``others``: jobs of the same time, of
        which none may hold devices for a ticket that got no session.
        """
        by_ticket: dict[str, list[Lease]] = {}
        for lease in sessions:
            by_ticket.setdefault(lease.ticket_id or "", []).append(lease)
        found = []
        for ticket_id, mine in by_ticket.items():
            runs = [run for run in holders.get(ticket_id, ()) if run.started_at]
            found += _compared(mine, runs)
        held = {run.ticket_id: run for run in others if run.ticket_id and run.uses_devices}
        with self.store.read() as connection:
            there = tickets.some(connection, held)
            served = batch.served(connection, held)
        for ticket in there:
            run = held[ticket.id]
            if ticket.id not in served and run.ended_at and run.seconds > TOLERANCE:
                what = f"job {run.label} had its devices for {run.seconds} s, and no session did"
                subject = f"ticket {ticket.id} of {ticket.server}"
                found.append(Difference(subject, what, 0, run.seconds))
        return found

    def note_audit(
        self, differences: Collection[Difference], until: datetime, *, actor: str
    ) -> None:
        """Write down how far sessions were compared, and each difference in the trail."""
        now, cluster = self.clock(), self.nodes().name
        with self.store.write() as connection:
            if until > batch.marks(connection, cluster, now).audited_until:
                batch.mark(connection, cluster, audited_until=until)
            for each in differences:
                closures.note(
                    connection,
                    at=now,
                    actor=actor,
                    action="slurm audit",
                    subject=each.subject,
                    detail=each.what,
                )
        for each in differences:
            self.log.warning("Slurm and the books differ: %s", each)

    # Steps of the above.

    def _not_holders(self, runs: Iterable[Run]) -> list[Run]:
        """The runs with devices that are no server's: a name alone proves nothing, for everybody
        can give any to a job. What a server runs on was submitted first by that name, while its
        ticket waited, and began before ticket and session were over."""
        some = [run for run in runs if run.uses_devices]
        named = {run.ticket_id for run in some if run.ticket_id}
        with self.store.read() as connection:
            known = {ticket.id: ticket for ticket in tickets.some(connection, named)}
            granted = [ticket.lease_id for ticket in known.values() if ticket.lease_id]
            ends = {lease.id: lease.ended_at for lease in history.some(connection, granted)}
        first: dict[str, str] = {}
        for run in sorted(runs, key=lambda run: (run.submitted_at, int(run.id))):
            ticket = known.get(run.ticket_id)
            if ticket is None or run.submitted_at < ticket.created_at - OVERLAP:
                continue
            over = (
                ends.get(ticket.lease_id, ticket.ended_at) if ticket.lease_id else ticket.ended_at
            )
            began = run.started_at or run.submitted_at
            if over is None or began <= over + timedelta(seconds=5):
                first.setdefault(run.ticket_id, run.id)
        return [run for run in some if first.get(run.ticket_id) != run.id]

    def _new_job(
        self,
        connection: sa.Connection,
        cluster: Cluster,
        run: Run,
        users: Mapping[str, str],
        groups: Mapping[str, Collection[str]],
    ) -> BatchJob:
        """Write a run down, with its price and who pays as of now: neither changes any more."""
        assert run.started_at is not None
        member = users.get(run.user)
        parts = parts_of(run, cluster)
        payer = self._usual_payer(connection, member, groups.get(member, ())) if member else None
        job = BatchJob(
            id=job_id(cluster.name, run),
            cluster=cluster.name,
            label=run.label,
            name=_shown(run.name),
            user=run.user,
            member=member,
            account=payer,
            rate=_price(self.rates_in(connection).card(run.started_at), parts),
            devices=_words(parts),
            started_at=run.started_at,
        )
        batch.insert(connection, job)
        if member is None:
            self.log.warning(
                "Job %s of %s on %s has %s, and no member is that user: nobody is charged",
                *(run.label, run.user, cluster.name, job.devices),
            )
        return job

    def _debit(self, connection: sa.Connection, job: BatchJob, run: Run, now: datetime) -> int:
        """Charge one; the microcredits that moved."""
        assert run.started_at is not None
        over = run.ended_at is not None
        if job.account is None:
            amount = 0
        else:
            amount = pure.due(job.rate, run.seconds, job.charged, over=over)
        same = (job.ended_at, job.seconds) == (run.ended_at, run.seconds)
        if not amount and (same or not over):
            return 0
        until = run.ended_at or run.started_at + timedelta(seconds=run.seconds)
        until = max(run.started_at, min(now, until))
        if job.account is not None:
            transfer = pure.debit(
                job.account,
                amount,
                key=f"{batch.KEY}{job.id}:{job.entries}",
                at=until,
                reason=_reason(job, run, amount),
            )
            posted = transfer is not None and book.post(connection, transfer)
            if posted and lots.closed_since(connection, job.account, until):
                self._settle_lots(connection, job.account, now)
        batch.update(
            connection,
            job.id,
            ended_at=run.ended_at,
            seconds=run.seconds,
            charged=job.charged + amount,
            entries=job.entries + bool(amount),
        )
        return amount


def job_id(cluster: str, run: Run) -> str:
    """What a run is called in the store."""
    return f"{cluster}:{run.key}"


def _price(card: RateCard, parts: Iterable[Part]) -> int:
    """Microcredits an hour; the lowest of what it may have been, where nobody can say what."""
    total = 0
    for part in parts:
        rates = [card.rate_of(model, part.slots) for model in part.models or ("",)]
        total += part.count * min(rates)
    return total


def _words(parts: Iterable[Part]) -> str:
    """``2 NVIDIA A100``, ``3/4 of a Tesla T4``."""
    return " and ".join(
        f"{part.count} {' or '.join(part.models) or 'GPU'}"
        if part.slots == 1
        else f"{part.count}/{part.slots} of {' or '.join(part.models) or 'a GPU'}"
        for part in parts
    )


def _shown(name: str) -> str:
    """A job's name as it can stand on a statement."""
    return "".join(c if c.isprintable() else "?" for c in name)[:60]


def _reason(job: BatchJob, run: Run, amount: int) -> str:
    if amount < 0:
        said = f"Charged too much for batch job {job.label} ({job.name}): it ran"
        return f"{said} {_lasted(run.seconds)}"
    what = f"Batch job {job.label} ({job.name}) on {job.devices}"
    if run.ended_at is None:
        return f"{what}: the first {_lasted(run.seconds // pure.HOUR * pure.HOUR)}"
    return f"{what}: {_lasted(run.seconds)}{' in all' if job.charged else ''}"


def _lasted(seconds: int) -> str:
    """``1 h 30 min``, ``2 h 5 s``: exact."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (seconds, "s")]
    return " ".join(f"{number} {unit}" for number, unit in parts if number) or "0 s"


def _compared(mine: list[Lease], runs: list[Run]) -> list[Difference]:
    """What does not agree about the sessions of one ticket: more than one when the first was lost
    with its hub and its job went on."""
    last = mine[-1]
    subject = f"lease {last.id} of {last.server}"
    ends = [lease.ended_at for lease in mine if lease.ended_at]
    ours = round((max(ends) - min(lease.granted_at for lease in mine)).total_seconds())
    if not runs:
        what = f"it had devices for {ours} s, and Slurm knows no job for it"
        return [Difference(subject, what, ours, 0)] if ours > TOLERANCE else []
    theirs = sum(run.seconds for run in runs)
    found = []
    labels = ", ".join(run.label for run in runs)
    if len(runs) > 1:
        what = f"Slurm had {len(runs)} jobs for it ({labels}), together {theirs} s"
        found.append(Difference(subject, what, ours, theirs))
    if abs(ours - theirs) > TOLERANCE:
        what = f"{ours} s here, and {theirs} s in Slurm (job {labels})"
        found.append(Difference(subject, what, ours, theirs))
    # What a job had is written down some seconds after the rest of it.
    counts = {run.devices or sum(run.shards.values()) for run in runs if run.uses_devices}
    if counts - {len(last.devices)}:
        said = " and ".join(str(count) for count in sorted(counts))
        what = f"{len(last.devices)} devices here, and {said} in Slurm (job {labels})"
        found.append(Difference(subject, what, ours, theirs))
    return found
