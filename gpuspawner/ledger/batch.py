"""What a job costs that runs beside servers, and the transfers that say so. Pure.

A job's time is counted by its cluster, in whole seconds. What it owes follows from its rate and
that time alone, so it can be asked for often, late or twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from functools import lru_cache

from .entries import SYSTEM_USAGE, Posting, Transfer, TransferKind
from .rules import ACTOR_ACCOUNTING, transfer_id
from .usage import SEVERAL, Use

HOUR = 3600
"""Seconds in an hour; one that runs is charged for each."""

_AND, _OR = " and ", " or "
_PART = re.compile(r"(?P<count>\d+)(?P<shares>/\d+ of)? (?P<model>.+)")


def cost(rate: int, seconds: int) -> int:
    """Microcredits for so many seconds at a rate an hour, rounded down."""
    return rate * max(0, seconds) // HOUR


def due(rate: int, seconds: int, charged: int, *, over: bool) -> int:
    """Microcredits to charge now; below zero they come back.

    A job that goes on is charged for whole hours, and never given back what it paid: the last
    word on its time comes at its end.
    """
    if over:
        return cost(rate, seconds) - charged
    return max(0, cost(rate, seconds // HOUR * HOUR) - charged)


def debit(account: str, amount: int, *, key: str, at: datetime, reason: str) -> Transfer | None:
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


def in_words(parts: Iterable[tuple[int, int, Sequence[str]]]) -> str:
    """``2 NVIDIA A100 and 3/4 of a Tesla T4``, of counts, the shares that a device has (1 for a
    whole one), and the models that it may have been."""
    return _AND.join(
        f"{count} {_OR.join(models) or 'GPU'}"
        if slots == 1
        else f"{count}/{slots} of {_OR.join(models) or 'a GPU'}"
        for count, slots, models in parts
    )


@lru_cache(maxsize=1000)
def counted(words: str) -> tuple[int, str]:
    """How many devices those words tell of, a share being one as it is in a session; and of which
    model."""
    count, models = 0, []
    for part in words.split(_AND):
        if match := _PART.fullmatch(part):
            count += int(match["count"])
            models.append(match["model"])
    names = {"" if model in ("GPU", "a GPU") else model for model in models}
    return count, SEVERAL if len(names) > 1 else next(iter(names), "")


def use_of(
    devices: int, rate: int, started_at: datetime, seconds: int, start: datetime, end: datetime
) -> Use:
    """What a job used from ``start`` up to ``end``, as if it had run on from its start; its one
    session is the job itself, when it began then."""
    until = started_at + timedelta(seconds=seconds)
    since, to = max(started_at, start), min(until, end)
    began = int(start <= started_at < end)
    if to <= since:
        return Use(sessions=began)
    before, after = ((moment - started_at) // timedelta(seconds=1) for moment in (since, to))
    micros = devices * ((to - since) // timedelta(microseconds=1))
    return Use(micros, cost(rate, after) - cost(rate, before), began)
