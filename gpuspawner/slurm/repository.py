"""Rows of batch jobs, of how far they were read, and of members' groups."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from ..db.schema import (
    OPEN_JOB,
    accounts,
    batch_jobs,
    batch_marks,
    leases,
    member_groups,
    postings,
    transfers,
)
from ..leases import repository as leases_repository
from ..leases.models import Lease
from ..ledger.usage import cost_of_job

KEY = "slurm:"
"""Prefix of the keys of these jobs' transfers; the job's id follows."""

_SEPARATOR = "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """A run of a job that is not a server's."""

    id: str
    cluster: str
    label: str
    """Its number as people see it."""
    name: str
    user: str
    """Its user on the nodes."""
    member: str | None
    """None for somebody who is not a member of ours: then nobody is charged."""
    account: str | None
    rate: int
    """Microcredits per hour for all its devices, as of when the run was first seen."""
    devices: str
    started_at: datetime
    ended_at: datetime | None = None
    seconds: int = 0
    """How long it ran, as far as known."""
    charged: int = 0
    """Microcredits."""
    entries: int = 0
    """How many transfers charged it."""


@dataclass(frozen=True, slots=True)
class BillingMarks:
    """How far the jobs of a cluster were read."""

    since: datetime
    """Earlier jobs are not ours to charge."""
    until: datetime
    audited_until: datetime


def find(connection: sa.Connection, job_id: str) -> BatchJob | None:
    """Lock and return a job."""
    query = sa.select(batch_jobs).where(batch_jobs.c.id == job_id).with_for_update()
    row = connection.execute(query).mappings().first()
    return _job(row) if row else None


def some(connection: sa.Connection, job_ids: Collection[str]) -> dict[str, BatchJob]:
    """Return those of the jobs that exist, by id."""
    found: dict[str, BatchJob] = {}
    listed = sorted(job_ids)
    for first in range(0, len(listed), 500):
        query = sa.select(batch_jobs).where(batch_jobs.c.id.in_(listed[first : first + 500]))
        found |= {row["id"]: _job(row) for row in connection.execute(query).mappings()}
    return found


def insert(connection: sa.Connection, job: BatchJob) -> None:
    """Insert a job."""
    connection.execute(sa.insert(batch_jobs).values(asdict(job)))


def update(connection: sa.Connection, job_id: str, **values: Any) -> None:
    """Change some columns of a job."""
    connection.execute(sa.update(batch_jobs).where(batch_jobs.c.id == job_id).values(values))


def since(connection: sa.Connection, cluster: str, moment: datetime) -> list[BatchJob]:
    """Return the jobs of a cluster that run or ended after a moment, by start."""
    return _listed(connection, cluster, OPEN_JOB | (batch_jobs.c.ended_at >= moment))


def open_jobs(connection: sa.Connection, cluster: str) -> list[BatchJob]:
    """Return the jobs of a cluster without a known end, by start."""
    return _listed(connection, cluster, OPEN_JOB)


def _listed(
    connection: sa.Connection, cluster: str, which: sa.ColumnElement[bool]
) -> list[BatchJob]:
    query = sa.select(batch_jobs).where(batch_jobs.c.cluster == cluster, which)
    ordered = query.order_by(batch_jobs.c.started_at, batch_jobs.c.id)
    return [_job(row) for row in connection.execute(ordered).mappings()]


# Sessions on a cluster.


def sessions_ended(
    connection: sa.Connection, engine: str, since: datetime, until: datetime
) -> list[Lease]:
    """Return an engine's leases with devices that ended after one moment and up to another."""
    ended = (leases.c.ended_at > since) & (leases.c.ended_at <= until)
    found = leases_repository.where(connection, (leases.c.engine == engine) & ended)
    return [lease for lease in found if lease.devices]


def served(connection: sa.Connection, ticket_ids: Collection[str]) -> set[str]:
    """Return those of the tickets that got a lease."""
    found: set[str] = set()
    listed = sorted(ticket_ids)
    for first in range(0, len(listed), 500):
        some = leases.c.ticket_id.in_(listed[first : first + 500])
        found |= set(connection.execute(sa.select(leases.c.ticket_id).where(some)).scalars())
    return found


# Marks.


def find_marks(connection: sa.Connection, cluster: str) -> BillingMarks | None:
    """Return the marks of a cluster; None if there are none yet."""
    row = connection.execute(sa.select(batch_marks).where(batch_marks.c.cluster == cluster)).first()
    return BillingMarks(*row[1:]) if row else None


def marks(connection: sa.Connection, cluster: str, now: datetime) -> BillingMarks:
    """Return the marks of a cluster, set to now if there are none. Writers only."""
    if known := find_marks(connection, cluster):
        return known
    found = BillingMarks(now, now, now)
    connection.execute(sa.insert(batch_marks).values(cluster=cluster, **asdict(found)))
    return found


def mark(connection: sa.Connection, cluster: str, **values: datetime) -> None:
    """Move some of the marks."""
    mine = batch_marks.c.cluster == cluster
    connection.execute(sa.update(batch_marks).where(mine).values(values))


# Groups.


def groups(connection: sa.Connection) -> dict[str, frozenset[str]]:
    """Return the known groups of members."""
    rows = connection.execute(sa.select(member_groups.c.user, member_groups.c.groups))
    return {user: frozenset(found.split(_SEPARATOR)) - {""} for user, found in rows}


def put_groups(
    connection: sa.Connection, found: Mapping[str, Collection[str]], now: datetime
) -> None:
    """Write the groups of these members, replacing the previous ones."""
    for user, mine in found.items():
        connection.execute(sa.delete(member_groups).where(member_groups.c.user == user))
        row = {"user": user, "groups": _SEPARATOR.join(sorted(mine)), "at": now}
        connection.execute(sa.insert(member_groups).values(row))


def members(connection: sa.Connection) -> list[str]:
    """Return everybody with an account of their own, by name."""
    query = sa.select(accounts.c.name).where(accounts.c.name.startswith("member:"))
    return sorted(name.removeprefix("member:") for name in connection.execute(query).scalars())


# Checks.


def check(connection: sa.Connection) -> Iterator[str]:
    """A job beside servers paid what it owed, and what it says it paid is what moved."""
    moved: dict[str, int] = {}
    joined = postings.join(transfers, transfers.c.id == postings.c.transfer_id)
    query = sa.select(transfers.c.key, postings.c.amount).select_from(joined)
    theirs = query.where(transfers.c.key.startswith(KEY), ~postings.c.account.startswith("system:"))
    for key, amount in connection.execute(theirs):
        name = key.removeprefix(KEY).rpartition(":")[0]
        moved[name] = moved.get(name, 0) - amount
    for row in connection.execute(sa.select(batch_jobs).order_by(batch_jobs.c.id)).mappings():
        job = _job(row)
        total = moved.pop(job.id, 0)
        if total != job.charged:
            yield (
                f"Job {job.id} says {job.charged} microcredits were charged, but its postings "
                f"took {total} from {job.account}."
            )
        due = cost_of_job(job.rate, job.seconds) if job.account else 0
        if job.charged > due or (job.ended_at and job.charged != due):
            yield f"Job {job.id} owes {due} microcredits, but {job.charged} were charged."
    for name in moved:
        yield f"Credits moved for the job {name}, and there is no such job."


def _job(row: sa.RowMapping) -> BatchJob:
    return BatchJob(**row)
