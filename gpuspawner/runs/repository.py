"""Rows of runs."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, fields
from datetime import datetime
from typing import Any, Generic, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from ..core.errors import UnknownRun, UnknownSweep
from ..db.schema import OPEN_LEASE, OPEN_RUN, OPEN_TICKET, leases, runs, tickets
from ..leases.models import RUN_PREFIX
from .models import Run, Work
from .rules import RunEnd
from .schedules import Schedule
from .sweeps import FIRST

R = TypeVar("R", Run, Schedule)


class WorkTable(Generic[R]):
    """A table of runs or of schedules, with their work and their options as JSON."""

    def __init__(self, table: sa.Table, row_class: type[R], one_a_key: str) -> None:
        self._table = table
        self._class: type[R] = row_class
        self._one_a_key = one_a_key
        self._fields = [x.name for x in fields(row_class) if x.name not in ("work", "options")]
        self.columns = [table.c[name] for name in (*self._fields, "work", "options")]
        self.all = sa.select(*self.columns)

    def insert(self, connection: sa.Connection, new: R) -> bool:
        """Insert a row. Returns False if its member already has one with the same key."""
        with connection.begin_nested() as savepoint:
            try:
                connection.execute(sa.insert(self._table), self.row_of(new))
            except IntegrityError as error:
                if self._one_a_key not in str(error) and f"{self._table}.user" not in str(error):
                    raise
                savepoint.rollback()
                return False
        return True

    def find(self, connection: sa.Connection, row_id: str, *, lock: bool) -> R | None:
        """Return the row with this id, or None. ``lock`` locks it until the transaction ends."""
        one = self.all.where(self._table.c.id == row_id)
        row = connection.execute(one.with_for_update() if lock else one).one_or_none()
        return None if row is None else self.parse(row)

    def of_key(self, connection: sa.Connection, user: str, key: str) -> R | None:
        """Return a member's row with this idempotency key, or None."""
        one = self.all.where(self._table.c.user == user, self._table.c.key == key)
        row = connection.execute(one).one_or_none()
        return None if row is None else self.parse(row)

    def select(self, connection: sa.Connection, query: sa.Select[Any]) -> list[R]:
        """Return the rows of a query, made from :attr:`all`."""
        return [self.parse(row) for row in connection.execute(query)]

    def parse(self, row: Sequence[Any]) -> R:
        """Return the values of :attr:`columns` as an object."""
        *values, work, options = row
        told = json.loads(work)
        told["command"] = tuple(told["command"])
        named = dict(zip(self._fields, values, strict=True))
        return self._class(work=Work(**told), options=json.loads(options), **named)

    def row_of(self, found: R) -> dict[str, Any]:
        """Return the row of an object."""
        row = {name: getattr(found, name) for name in self._fields}
        work, options = json.dumps(asdict(found.work)), json.dumps(dict(found.options))
        return {**row, "work": work, "options": options}


_RUNS = WorkTable(runs, Run, "one_run_a_key")
_OPEN = _RUNS.all.where(OPEN_RUN).order_by(runs.c.created_at, runs.c.id)
_HELD_BACK = runs.c.sweep.is_not(None) & runs.c.admitted_at.is_(None)
_END = (
    sa.update(runs)
    .where(runs.c.id == sa.bindparam("run"), OPEN_RUN)
    .values(
        ended_at=sa.bindparam("at"),
        outcome=sa.bindparam("how"),
        reason=sa.bindparam("why"),
        exit_code=sa.bindparam("status"),
    )
)


def insert(connection: sa.Connection, run: Run) -> bool:
    """Insert a run. Returns False if its member already has one with the same key."""
    return _RUNS.insert(connection, run)


def get(connection: sa.Connection, run_id: str, *, lock: bool = False) -> Run:
    """Return a run. ``lock`` locks its row until the transaction ends. Raises UnknownRun."""
    if (run := _RUNS.find(connection, run_id, lock=lock)) is None:
        raise UnknownRun(run=run_id)
    return run


def of_key(connection: sa.Connection, user: str, key: str) -> Run | None:
    """Return a member's run with this idempotency key, or None."""
    return _RUNS.of_key(connection, user, key)


def open_runs(connection: sa.Connection) -> list[Run]:
    """Return all runs that have not ended, oldest first."""
    return _RUNS.select(connection, _OPEN)


def are_active(connection: sa.Connection) -> bool:
    """Return True if any run has not ended, or has a lease or a ticket that has not."""
    lease = OPEN_LEASE & leases.c.server_name.startswith(RUN_PREFIX, autoescape=True)
    ticket = OPEN_TICKET & tickets.c.server_name.startswith(RUN_PREFIX, autoescape=True)
    active = sa.or_(*(sa.exists().where(each) for each in (OPEN_RUN, lease, ticket)))
    return bool(connection.execute(sa.select(active)).scalar())


def of_sweep(connection: sa.Connection, sweep: str) -> list[Run]:
    """Return the runs of a sweep in their order. Raises UnknownSweep."""
    query = _RUNS.all.where(runs.c.sweep == sweep).order_by(runs.c.id)
    if not (found := _RUNS.select(connection, query)):
        raise UnknownSweep(sweep=sweep)
    return found


def sweeps_held_back(connection: sa.Connection) -> list[str]:
    """Return the sweeps with runs that have not joined the queue."""
    held = sa.select(runs.c.sweep).where(OPEN_RUN, _HELD_BACK)
    return list(connection.execute(held.distinct()).scalars())


def admit(connection: sa.Connection, sweep: str, at: datetime) -> None:
    """Let the next runs of a sweep join the queue, as many as its ``at_most`` leaves room for."""
    columns = (runs.c.id, runs.c.admitted_at, runs.c.at_most)
    of_it = sa.select(*columns).where(runs.c.sweep == sweep, OPEN_RUN).order_by(runs.c.id)
    found = connection.execute(of_it).all()
    held_back = [row.id for row in found if row.admitted_at is None]
    most = found[0].at_most if found else None
    room = len(held_back) if most is None else max(0, most - len(found) + len(held_back))
    if chosen := held_back[:room]:
        admitted = sa.update(runs).where(runs.c.id.in_(chosen))
        connection.execute(admitted.values(admitted_at=at))


def count_open(connection: sa.Connection, user: str) -> int:
    """Return how many of a member's runs have not ended."""
    count = sa.select(sa.func.count()).select_from(runs).where(runs.c.user == user, OPEN_RUN)
    return int(connection.execute(count).scalar_one())


def ended_ids(connection: sa.Connection, ids: Collection[str]) -> set[str]:
    """Return the ids of those runs that have ended."""
    ended = sa.select(runs.c.id).where(runs.c.id.in_(ids), sa.not_(OPEN_RUN))
    return set(connection.execute(ended).scalars())


def newest(
    connection: sa.Connection,
    user: str | None,
    limit: int,
    before: Run | None = None,
    *,
    leading: bool = False,
) -> list[Run]:
    """Return a member's runs (None: everybody's), newest first, after ``before``.

    ``leading``: only the first run of each sweep.
    """
    chosen = _RUNS.all.order_by(runs.c.created_at.desc(), runs.c.id.desc()).limit(limit)
    if user is not None:
        chosen = chosen.where(runs.c.user == user)
    if leading:
        chosen = chosen.where(runs.c.sweep.is_(None) | (runs.c.id == runs.c.sweep + FIRST))
    if before is not None:
        older = sa.tuple_(runs.c.created_at, runs.c.id) < (before.created_at, before.id)
        chosen = chosen.where(older)
    return _RUNS.select(connection, chosen)


def end(connection: sa.Connection, run_id: str, end: RunEnd, at: datetime) -> bool:
    """End a run. Returns False if it has already ended, and keeps its first end."""
    changes = {"how": end.outcome, "why": end.reason, "status": end.exit_code, "at": at}
    return connection.execute(_END, {"run": run_id, **changes}).rowcount == 1


def note_exit(connection: sa.Connection, run_id: str, exit_code: int, last_line: str) -> None:
    """Record the exit status and the last line of an open run's program, before its lease ends."""
    this = sa.update(runs).where(runs.c.id == run_id, OPEN_RUN)
    connection.execute(this.values(exit_code=exit_code, reason=last_line))


def begin_again(
    connection: sa.Connection, run_id: str, lease_id: str, *, preempted: bool = False
) -> None:
    """Let an open run begin again, after the end of this lease."""
    this = sa.update(runs).where(runs.c.id == run_id, OPEN_RUN)
    count = runs.c.preemptions if preempted else runs.c.restarts
    changes = {count.name: count + 1, "after_lease": lease_id}
    changes |= {"exit_code": None, "reason": ""}
    connection.execute(this.values(changes))
