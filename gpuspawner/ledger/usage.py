"""Use and cost of leases and batch jobs. Pure.

The cost of a lease up to a moment follows from its rate, limited by what it was charged in the end,
so that parts add up to the whole. A job's time is counted by its cluster, in whole seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple, TypeVar

from ..core.units import DeviceCount
from ..leases.models import Lease
from .models import SYSTEM_USAGE, Transfer, TransferKind
from .rules import ACTOR_ACCOUNTING, move, owed

K = TypeVar("K")

SEVERAL = "several models"
"""The model of a lease with devices of different models."""

DAY = timedelta(days=1)

_MICROSECOND = timedelta(microseconds=1)


class Kind(NamedTuple):
    """What use is grouped by."""

    user: str
    group: str
    account: str
    environment: str
    model: str
    """Empty for servers without a GPU."""


class LeaseUse(NamedTuple):
    """Use and cost."""

    micros: int = 0
    """Microseconds of a GPU, summed over GPUs; one of four slots counts as 1/4, and a MIG
    instance as its part."""
    cost: int = 0
    """Microcredits."""
    sessions: int = 0
    """Sessions that started in the period."""

    def plus(self, other: LeaseUse) -> LeaseUse:
        """Return the sum of both."""
        micros, cost, sessions = other
        return LeaseUse(self.micros + micros, self.cost + cost, self.sessions + sessions)

    def less(self, other: LeaseUse) -> LeaseUse:
        """Return the difference."""
        micros, cost, sessions = other
        return LeaseUse(self.micros - micros, self.cost - cost, self.sessions - sessions)

    @property
    def gpu_seconds(self) -> int:
        """GPU time in whole seconds."""
        return self.micros // 1_000_000


def kind_of(lease: Lease) -> Kind:
    """Return what the lease is grouped by."""
    models = {device.model for device in lease.devices}
    model = SEVERAL if len(models) > 1 else next(iter(models), "")
    return Kind(lease.server.user, lease.group, lease.account, lease.environment, model)


def use_of_lease(lease: Lease, start: datetime, end: datetime, now: datetime) -> LeaseUse:
    """Return a lease's use from ``start`` to ``end``; for an open lease, not beyond ``now``."""
    began, ended = lease.started_at, lease.ended_at or now
    if began is None or began >= end or ended < start or began < start == ended:
        return LeaseUse()
    since, until = max(began, start), min(ended, end)
    micros = _micros_up_to(lease, began, until) - _micros_up_to(lease, began, since)
    before = _cost_up_to(lease, since) if since > began else 0
    return LeaseUse(micros, _cost_up_to(lease, until) - before, int(began >= start))


def midnight(moment: datetime) -> datetime:
    """Return the start of a moment's day in UTC."""
    return moment.astimezone(timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)


def days_of(lease: Lease) -> Iterator[tuple[datetime, LeaseUse]]:
    """Yield what an ended lease used on each day of UTC, which sums up to all its use."""
    if lease.started_at is None or lease.ended_at is None:
        return
    day = midnight(lease.started_at)
    while day <= lease.ended_at:
        yield day, use_of_lease(lease, day, day + DAY, lease.ended_at)
        day += DAY


def add_use(sums: dict[K, LeaseUse], parts: Iterable[tuple[K, LeaseUse]]) -> None:
    """Add the use of each name to the sums."""
    for name, part in parts:
        sums[name] = sums[name].plus(part) if name in sums else part


def _micros_up_to(lease: Lease, began: datetime, moment: datetime) -> int:
    """Return a lease's use at a moment; rounded from its start, so that parts add up."""
    return int(lease.device_equivalents * max(0, (moment - began) // _MICROSECOND))


def _cost_up_to(lease: Lease, moment: datetime) -> int:
    """Return a lease's cost at a moment; at its end, all that it was charged."""
    cost = owed(lease.rate, lease.started_at, moment)
    if lease.ended_at is None:
        return cost
    return lease.charged if moment >= lease.ended_at else min(cost, lease.charged)


JOB_HOUR = 3600
"""Seconds in an hour; a running job is charged by the hour."""

_AND, _OR = " and ", " or "
_PART = re.compile(r"(?P<count>\d+)(/(?P<slots>\d+) of)? (?P<model>.+)")


def cost_of_job(rate: int, seconds: int) -> int:
    """Return the microcredits for a number of seconds at an hourly rate, rounded down."""
    return rate * max(0, seconds) // JOB_HOUR


def due_for_job(rate: int, seconds: int, charged: int, *, over: bool) -> int:
    """Return the microcredits to charge now; negative ones come back.

    A running job is charged for whole hours; its final time is known only at its end.
    """
    if over:
        return cost_of_job(rate, seconds) - charged
    return max(0, cost_of_job(rate, seconds // JOB_HOUR * JOB_HOUR) - charged)


def debit_for_job(
    account: str, amount: int, *, key: str, at: datetime, reason: str
) -> Transfer | None:
    """Return the transfer of microcredits from an account (negative: to it); None for zero."""
    if amount == 0:
        return None
    kind = TransferKind.BATCH
    return move(SYSTEM_USAGE, account, -amount, kind, key, at, ACTOR_ACCOUNTING, reason)


# A job's devices, in words that are stored.


def job_in_words(parts: Iterable[tuple[int, int, Sequence[str]]]) -> str:
    """Format a job's devices: ``2 NVIDIA A100 and 3/4 of a Tesla T4``.

    From counts, the number of shares per device (1 for a whole one), and the possible models.
    """
    return _AND.join(
        f"{count} {_OR.join(models) or 'GPU'}"
        if slots == 1
        else f"{count}/{slots} of {_OR.join(models) or 'a GPU'}"
        for count, slots, models in parts
    )


@lru_cache(maxsize=1000)
def counted_jobs(words: str) -> tuple[DeviceCount, str]:
    """Return how many devices those words name, and their model.

    One of four shares counts as 1/4, as in a session.
    """
    count: DeviceCount = 0
    models = []
    for part in words.split(_AND):
        if match := _PART.fullmatch(part):
            count += Fraction(int(match["count"]), int(match["slots"] or 1))
            models.append(match["model"])
    names = {"" if model in ("GPU", "a GPU") else model for model in models}
    return count, SEVERAL if len(names) > 1 else next(iter(names), "")


def use_of_job(
    devices: DeviceCount,
    rate: int,
    started_at: datetime,
    seconds: int,
    start: datetime,
    end: datetime,
) -> LeaseUse:
    """Return a job's use from ``start`` to ``end``, as if it had run without interruption.

    The job itself counts as one session, if it started in that period.
    """
    until = started_at + timedelta(seconds=seconds)
    since, to = max(started_at, start), min(until, end)
    began = int(start <= started_at < end)
    if to <= since:
        return LeaseUse(sessions=began)
    before, after = ((moment - started_at) // timedelta(seconds=1) for moment in (since, to))
    # Rounded from its start, so that parts add up.
    earlier, later = (
        int(devices * ((moment - started_at) // _MICROSECOND)) for moment in (since, to)
    )
    micros = later - earlier
    return LeaseUse(micros, cost_of_job(rate, after) - cost_of_job(rate, before), began)
