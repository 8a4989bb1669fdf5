"""Rows of what leases used of CPU, memory, disk and network, and their sums for reports."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import asdict, fields
from datetime import datetime

import sqlalchemy as sa

from ..db.schema import OPEN_LEASE, environment_use, lease_places, leases, resource_use
from ..engines.resource_use import ResourceUse
from ..ledger.usage import SEVERAL
from .resource_totals import (
    COUNTERS,
    EnvironmentUse,
    ResourceRecord,
    ResourceSum,
    ResourceTotals,
)

_TOTALS = tuple(each.name for each in fields(ResourceTotals))
AT_ONCE = 500
"""How many leases one query names; databases limit their parameters."""


def totals_of(connection: sa.Connection, lease_ids: Collection[str]) -> dict[str, ResourceTotals]:
    """Return the totals of leases by id, without those that were never sampled."""
    wanted, found = list(lease_ids), {}
    columns = (resource_use.c.lease_id, *(resource_use.c[name] for name in _TOTALS))
    for start in range(0, len(wanted), AT_ONCE):
        some = resource_use.c.lease_id.in_(wanted[start : start + AT_ONCE])
        for row in connection.execute(sa.select(*columns).where(some)).mappings():
            found[row["lease_id"]] = _totals(row)
    return found


def get(connection: sa.Connection, lease_id: str) -> ResourceRecord:
    """Return the record of a lease; an empty one if it was never sampled."""
    query = sa.select(resource_use).where(resource_use.c.lease_id == lease_id)
    row = connection.execute(query).mappings().first()
    if row is None:
        return ResourceRecord()
    return ResourceRecord(
        totals=_totals(row),
        container_id=row["container_id"],
        last=ResourceUse(**{name: row[f"last_{name}"] for name in COUNTERS}),
        last_kill_nanoseconds=row["last_kill_nanoseconds"],
        told_at=row["told_at"],
    )


def put(connection: sa.Connection, lease_id: str, record: ResourceRecord) -> None:
    """Replace the record of a lease."""
    row = {
        "lease_id": lease_id,
        **{name: getattr(record.totals, name) for name in _TOTALS},
        **{f"last_{name}": getattr(record.last, name) for name in COUNTERS},
        "container_id": record.container_id,
        "last_kill_nanoseconds": record.last_kill_nanoseconds,
        "told_at": record.told_at,
    }
    connection.execute(sa.delete(resource_use).where(resource_use.c.lease_id == lease_id))
    connection.execute(sa.insert(resource_use).values(row))


def count(connection: sa.Connection, lease_id: str, used: EnvironmentUse) -> None:
    """Add what a lease used to the use of its environment."""
    if used == EnvironmentUse():
        return
    name = connection.execute(_ENVIRONMENT, {"lease": lease_id}).scalar_one()
    known = environment_use.c.environment == name
    more = {each: environment_use.c[each] + value for each, value in asdict(used).items()}
    if not connection.execute(sa.update(environment_use).where(known).values(more)).rowcount:
        row = {"environment": name, **asdict(used)}
        connection.execute(sa.insert(environment_use).values(row))


def use_of_environments(connection: sa.Connection) -> dict[str, EnvironmentUse]:
    """Return what was used by environment, since its first sample."""
    found = connection.execute(sa.select(environment_use)).mappings()
    names = [each.name for each in fields(EnvironmentUse)]
    return {
        row["environment"]: EnvironmentUse(**{name: row[name] for name in names}) for row in found
    }


def memory_in_use(connection: sa.Connection) -> dict[str, int]:
    """Return the bytes of memory that open leases used at their last samples, by environment."""
    return {name: int(used) for name, used in connection.execute(_MEMORY)}


_ENVIRONMENT = sa.select(leases.c.environment).where(leases.c.id == sa.bindparam("lease"))
_MEMORY = (
    sa.select(leases.c.environment, sa.func.sum(resource_use.c.memory_bytes))
    .join_from(leases, resource_use, leases.c.id == resource_use.c.lease_id)
    .where(OPEN_LEASE, resource_use.c.memory_bytes.isnot(None))
    .group_by(leases.c.environment)
)


def sums_between(
    connection: sa.Connection, bounds: Sequence[datetime], by: str
) -> list[dict[str, ResourceSum]]:
    """Return what leases used that started between each time and the next, by a field of Kind.

    A lease's whole use counts in the period in which it started.
    """
    name = _MODEL if by == "model" else leases.c[by]
    query = (
        sa.select(name, leases.c.started_at, *_SUMMED)
        .join(leases, leases.c.id == resource_use.c.lease_id)
        .where(leases.c.started_at >= bounds[0], leases.c.started_at < bounds[-1])
    )
    found: list[dict[str, ResourceSum]] = [{} for _ in range(len(bounds) - 1)]
    for called, started_at, *figures in connection.execute(query):
        sums = found[bisect_right(bounds, started_at) - 1]
        sums[called] = sums.get(called, ResourceSum()).plus(ResourceSum(*figures))
    return found


_SUMMED = (resource_use.c.cpu_seconds, resource_use.c.memory_peak_bytes)
_first, _last = sa.func.min(lease_places.c.model), sa.func.max(lease_places.c.model)
_MODEL = (
    sa.select(sa.case((_first.is_(None), ""), (_first == _last, _first), else_=SEVERAL))
    .where(lease_places.c.lease_id == leases.c.id)
    .correlate(leases)
    .scalar_subquery()
)


def _totals(row: sa.RowMapping) -> ResourceTotals:
    return ResourceTotals(**{name: row[name] for name in _TOTALS})
