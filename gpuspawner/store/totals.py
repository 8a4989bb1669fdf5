"""Totals over everything that ever was, added up once and then only from what came since.

Postings are append-only and writers come one at a time, so a posting's number says which are
new. A lease that has ended does not change its times any more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from ..ledger.entries import SYSTEM_USAGE
from . import history
from .schema import OPEN_LEASE, accounts, lease_places, leases, postings

KEEP = timedelta(days=1)
"""Leases that were granted longer ago are added up once, the others each time."""

_amount = postings.c.amount
_NEW = sa.select(
    sa.func.max(postings.c.id),
    sa.func.coalesce(sa.func.sum(sa.case((_amount > 0, _amount), else_=0)), 0),
    sa.func.coalesce(sa.func.sum(sa.case((_amount < 0, -_amount), else_=0)), 0),
).where(postings.c.account == sa.bindparam("account"), postings.c.id > sa.bindparam("last"))


@dataclass(slots=True)
class Moved:
    """Microcredits that went from and to the ledger's own accounts, ever."""

    granted: int = 0
    taken: int = 0
    """Taken back by admins, or when they expired."""
    charged: int = 0
    refunded: int = 0
    left: int = 0
    """On all members' and groups' accounts together."""
    _last: dict[str, int] = field(default_factory=dict)

    def read(self, connection: sa.Connection) -> None:
        """Add what came since the last time."""
        own = sa.select(accounts.c.name, accounts.c.balance).where(
            accounts.c.name.startswith("system:")
        )
        self.left = 0
        for name, balance in connection.execute(own).all():
            self.left -= balance
            parameters = {"account": name, "last": self._last.get(name, 0)}
            last, plus, minus = connection.execute(_NEW, parameters).one()
            if last is None:
                continue
            self._last[name] = last
            if name == SYSTEM_USAGE:
                self.charged += int(plus)
                self.refunded += int(minus)
            else:
                self.taken += int(plus)
                self.granted += int(minus)


Use = dict[tuple[str, str], float]
"""Seconds of leased devices, by model and group."""


@dataclass(slots=True)
class Used:
    """Leases that ended, and the GPU-seconds of those."""

    seconds: Use = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    """How many, by outcome."""
    waits: list[float] = field(default_factory=list)
    """Seconds that each lease of the last day had been asked for before, in order."""
    _before: datetime | None = None
    _old: Use = field(default_factory=dict)
    _old_ended: dict[str, int] = field(default_factory=dict)
    _open: frozenset[str] = frozenset()
    """Leases granted before ``_before`` that were open when the old ones were added up."""

    def read(self, connection: sa.Connection, now: datetime) -> None:
        """Bring all figures up to ``now``."""
        before = self._before
        if before is None or not before <= now <= before + 2 * KEEP:
            before = self._add_up_old(connection, now - KEEP)
        later = (leases.c.ended_at >= before) & (leases.c.granted_at >= before)
        wanted = sa.or_(later, leases.c.id.in_(self._open)) if self._open else later
        recent, ended = _ended(connection, wanted)
        self.seconds = _sum(self._old, recent)
        self.ended = _sum(self._old_ended, ended)
        starts = history.starts_since(connection, now - KEEP)
        self.waits = sorted(
            max(0.0, (start.granted_at - start.asked_at).total_seconds()) for start in starts
        )

    def _add_up_old(self, connection: sa.Connection, before: datetime) -> datetime:
        earlier = leases.c.granted_at < before
        self._old, self._old_ended = _ended(connection, earlier)
        opened = sa.select(leases.c.id).where(OPEN_LEASE, earlier)
        self._open = frozenset(connection.execute(opened).scalars())
        self._before = before
        return before


def _ended(connection: sa.Connection, wanted: Any) -> tuple[Use, dict[str, int]]:
    """GPU-seconds and numbers of those wanted leases that have ended."""
    columns = (leases.c.started_at, leases.c.ended_at, lease_places.c.model, leases.c.group)
    query = (
        sa.select(*columns)
        .select_from(leases.join(lease_places, lease_places.c.lease_id == leases.c.id))
        .where(~OPEN_LEASE, leases.c.started_at.isnot(None), wanted)
    )
    seconds: Use = defaultdict(float)
    rows = connection.execute(query, execution_options={"yield_per": 5000})
    for started, ended, model, group in rows:
        seconds[model, group] += max(0.0, (ended - started).total_seconds())
    numbers = (
        sa.select(leases.c.outcome, sa.func.count())
        .where(~OPEN_LEASE, wanted)
        .group_by(leases.c.outcome)
    )
    return seconds, {outcome: int(n) for outcome, n in connection.execute(numbers).all()}


def _sum(some: Any, others: Any) -> Any:
    return dict(Counter(some) + Counter(others))
