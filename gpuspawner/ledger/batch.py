"""What a job costs that runs beside servers, and the transfers that say so. Pure.

A job's time is counted by its cluster, in whole seconds. What it owes follows from its rate and
that time alone, so it can be asked for often, late or twice.
"""

from __future__ import annotations

from datetime import datetime

from .entries import SYSTEM_USAGE, Posting, Transfer, TransferKind
from .rules import ACTOR_ACCOUNTING, transfer_id

HOUR = 3600
"""Seconds in an hour; one that runs is charged for each."""


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
