"""What Slurm says of our own sessions, held against what we say."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from ..model import Lease
from ..slurm.usage import Run, read_holders, read_usage
from ..store import batch, closures, tickets
from .batch import OVERLAP, Batch, job_id

ENGINE = "slurm"
"""The engine of the leases that jobs hold devices for."""

TOLERANCE = 1
"""Seconds by which a session and its job may differ."""


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


class ClusterAudit(Batch):
    """The part of the broker that compares sessions on a cluster with their jobs."""

    def audited_until(self) -> datetime:
        """Up to when the sessions on the cluster were compared."""
        return self._marks(self.nodes().name, self.clock()).audited_until

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
        # Whoever calls a job as servers' jobs are called has paid for it.
        named = [run for run in others if run.ticket_id]
        named += (run for runs in holders.values() for run in runs)
        keys = {job_id(self.nodes().name, run): run.key for run in named}
        paid = {keys[name] for name in self.store.run(lambda c: batch.some(c, keys))}
        true = {
            ticket: [run for run in runs if run.key not in paid] for ticket, runs in holders.items()
        }
        rest = [run for run in others if run.key not in paid]
        return len(sessions), self.compare(sessions, true, rest)

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
