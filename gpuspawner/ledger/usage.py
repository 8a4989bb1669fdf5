"""What leases and jobs beside servers used and cost. Pure.

What a lease cost up to a moment follows from its rate, up to what it was charged in the end. So
the parts of a lease in the weeks that it went through add up to the whole, to the microcredit.

A job's time is counted by its cluster, in whole seconds. What it owes follows from its rate and
that time alone, so it can be asked for often, late or twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from typing import NamedTuple

from ..leases.models import Lease
from .models import SYSTEM_USAGE, Posting, Transfer, TransferKind
from .rules import ACTOR_ACCOUNTING, owed, transfer_id

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


class LeaseUse(NamedTuple):
    """What was used."""

    micros: int = 0
    """Microseconds of a GPU, for each one."""
    cost: int = 0
    """Microcredits."""
    sessions: int = 0
    """Those that began between the two moments."""

    def plus(self, other: LeaseUse) -> LeaseUse:
        """Both together."""
        micros, cost, sessions = other
        return LeaseUse(self.micros + micros, self.cost + cost, self.sessions + sessions)

    def less(self, other: LeaseUse) -> LeaseUse:
        """What is left of it without the other."""
        micros, cost, sessions = other
        return LeaseUse(self.micros - micros, self.cost - cost, self.sessions - sessions)

    @property
    def gpu_seconds(self) -> int:
        """GPU time in whole seconds."""
        return self.micros // 1_000_000


def kind_of(lease: Lease) -> Kind:
    """What the lease is added up by."""
    models = {device.model for device in lease.devices}
    model = SEVERAL if len(models) > 1 else next(iter(models), "")
    return Kind(lease.server.user, lease.group, lease.account, lease.environment, model)


def use_of_lease(lease: Lease, start: datetime, end: datetime, now: datetime) -> LeaseUse:
    """What a lease used from ``start`` up to ``end``; one that is open, not beyond ``now``."""
    began, ended = lease.started_at, lease.ended_at or now
    if began is None or began >= end or ended < start or began < start == ended:
        return LeaseUse()
    since, until = max(began, start), min(ended, end)
    micros = len(lease.devices) * max(0, (until - since) // _MICROSECOND)
    before = _cost_up_to(lease, since) if since > began else 0
    return LeaseUse(micros, _cost_up_to(lease, until) - before, int(began >= start))


def midnight(moment: datetime) -> datetime:
    """When its day of UTC began."""
    return moment.astimezone(timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)


def days_of(lease: Lease) -> Iterator[tuple[datetime, LeaseUse]]:
    """What a lease that has ended used on each day of UTC: together, all that it used."""
    if lease.started_at is None or lease.ended_at is None:
        return
    day = midnight(lease.started_at)
    while day <= lease.ended_at:
        yield day, use_of_lease(lease, day, day + DAY, lease.ended_at)
        day += DAY


def together(parts: Iterable[tuple[Kind, LeaseUse]]) -> dict[Kind, LeaseUse]:
    """Use of the same kind, added up."""
    found: dict[Kind, LeaseUse] = {}
    for kind, use in parts:
        found[kind] = found[kind].plus(use) if kind in found else use
    return found


def _cost_up_to(lease: Lease, moment: datetime) -> int:
    """What it had cost at a moment; at its end, all that it was charged."""
    cost = owed(lease.rate, lease.started_at, moment)
    if lease.ended_at is None:
        return cost
    return lease.charged if moment >= lease.ended_at else min(cost, lease.charged)


JOB_HOUR = 3600
"""Seconds in an hour; one that runs is charged for each."""

_AND, _OR = " and ", " or "
_PART = re.compile(r"(?P<count>\d+)(?P<shares>/\d+ of)? (?P<model>.+)")


def cost_of_job(rate: int, seconds: int) -> int:
    """Microcredits for so many seconds at a rate an hour, rounded down."""
    return rate * max(0, seconds) // JOB_HOUR


def due_for_job(rate: int, seconds: int, charged: int, *, over: bool) -> int:
    """Microcredits to charge now; below zero they come back.

    A job that goes on is charged for whole hours, and never given back what it paid: the last
    word on its time comes at its end.
    """
    if over:
        return cost_of_job(rate, seconds) - charged
    return max(0, cost_of_job(rate, seconds // JOB_HOUR * JOB_HOUR) - charged)


def debit_for_job(
    account: str, amount: int, *, key: str, at: datetime, reason: str
) -> Transfer | None:
    """The transfer of so many microcredits from an account, or to it below zero; None of none."""
    if amount == 0:
        return None
    return Transfer(
        id=transfer_id(key),
        key=key,
        kind=TransferKind.BATCH,
        at=at,
        actor=ACTOR_ACCOUNTING,
        reason=reason,
        postings=(Posting(account, -amount), Posting(SYSTEM_USAGE, amount)),
    )


# What it had, in words that are kept.


def job_in_words(parts: Iterable[tuple[int, int, Sequence[str]]]) -> str:
    """``2 NVIDIA A100 and 3/4 of a Tesla T4``, of counts, the shares that a device has (1 for a
    whole one), and the models that it may have been."""
    return _AND.join(
        f"{count} {_OR.join(models) or 'GPU'}"
        if slots == 1
        else f"{count}/{slots} of {_OR.join(models) or 'a GPU'}"
        for count, slots, models in parts
    )


@lru_cache(maxsize=1000)
def counted_jobs(words: str) -> tuple[int, str]:
    """How many devices those words tell of, a share being one as it is in a session; and of which
    model."""
    count, models = 0, []
    for part in words.split(_AND):
        if match := _PART.fullmatch(part):
            count += int(match["count"])
            models.append(match["model"])
    names = {"" if model in ("GPU", "a GPU") else model for model in models}
    return count, SEVERAL if len(names) > 1 else next(iter(names), "")


def use_of_job(
    devices: int, rate: int, started_at: datetime, seconds: int, start: datetime, end: datetime
) -> LeaseUse:
    """What a job used from ``start`` up to ``end``, as if it had run on from its start; its one
    session is the job itself, when it began then."""
    until = started_at + timedelta(seconds=seconds)
    since, to = max(started_at, start), min(until, end)
    began = int(start <= started_at < end)
    if to <= since:
        return LeaseUse(sessions=began)
    before, after = ((moment - started_at) // timedelta(seconds=1) for moment in (since, to))
    micros = devices * ((to - since) // timedelta(microseconds=1))
    return LeaseUse(micros, cost_of_job(rate, after) - cost_of_job(rate, before), began)
