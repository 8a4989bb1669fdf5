"""What leases used and cost between two moments. Pure: values in, values out.

What a lease cost up to a moment follows from its rate, up to what it was charged in the end. So
the parts of a lease in the weeks that it went through add up to the whole, to the microcredit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from ..model import Lease
from .rules import owed

SEVERAL = "several models"
"""The model of a lease whose devices are not all alike."""

DAY = timedelta(days=1)

_MICROSECOND = timedelta(microseconds=1)


class Kind(NamedTuple):
    """What use is added up by."""

    user: str
    group: str
    account: str
    environment: str
    model: str
    """Empty for servers without a GPU."""


class Use(NamedTuple):
    """What was used."""

    micros: int = 0
    """Microseconds of a GPU, for each one."""
    cost: int = 0
    """Microcredits."""
    sessions: int = 0
    """Those that began between the two moments."""

    def plus(self, other: Use) -> Use:
        """Both together."""
        micros, cost, sessions = other
        return Use(self.micros + micros, self.cost + cost, self.sessions + sessions)

    def less(self, other: Use) -> Use:
        """What is left of it without the other."""
        micros, cost, sessions = other
        return Use(self.micros - micros, self.cost - cost, self.sessions - sessions)

    @property
    def gpu_seconds(self) -> int:
        """GPU time in whole seconds."""
        return self.micros // 1_000_000


def kind_of(lease: Lease) -> Kind:
    """What the lease is added up by."""
    models = {device.model for device in lease.devices}
    model = SEVERAL if len(models) > 1 else next(iter(models), "")
    return Kind(lease.server.user, lease.group, lease.account, lease.environment, model)


def use_of(lease: Lease, start: datetime, end: datetime, now: datetime) -> Use:
    """What a lease used from ``start`` up to ``end``; one that is open, not beyond ``now``."""
    began, ended = lease.started_at, lease.ended_at or now
    if began is None or began >= end or ended < start or began < start == ended:
        return Use()
    since, until = max(began, start), min(ended, end)
    micros = len(lease.devices) * max(0, (until - since) // _MICROSECOND)
    before = _cost_up_to(lease, since) if since > began else 0
    return Use(micros, _cost_up_to(lease, until) - before, int(began >= start))


def midnight(moment: datetime) -> datetime:
    """When its day of UTC began."""
    return moment.astimezone(timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)


def days_of(lease: Lease) -> Iterator[tuple[datetime, Use]]:
    """What a lease that has ended used on each day of UTC: together, all that it used."""
    if lease.started_at is None or lease.ended_at is None:
        return
    day = midnight(lease.started_at)
    while day <= lease.ended_at:
        yield day, use_of(lease, day, day + DAY, lease.ended_at)
        day += DAY


def together(parts: Iterable[tuple[Kind, Use]]) -> dict[Kind, Use]:
    """Use of the same kind, added up."""
    found: dict[Kind, Use] = {}
    for kind, use in parts:
        found[kind] = found[kind].plus(use) if kind in found else use
    return found


def _cost_up_to(lease: Lease, moment: datetime) -> int:
    """What it had cost at a moment; at its end, all that it was charged."""
    cost = owed(lease.rate, lease.started_at, moment)
    if lease.ended_at is None:
        return cost
    return lease.charged if moment >= lease.ended_at else min(cost, lease.charged)
