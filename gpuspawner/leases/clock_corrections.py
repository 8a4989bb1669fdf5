"""Refunds of charges that were caused by a wrong wall clock."""

from __future__ import annotations

from datetime import timedelta

import sqlalchemy as sa

from ..core.clock import ClockVerdict, Offset, to_datetime
from ..db.clock import Timekeeper
from ..db.engine import Store
from ..ledger import rules as ledger_rules
from ..ledger.service import note, refund_lease, refundable
from . import repository


class ClockCorrectionService:
    """Follows the wall clock and corrects charges that a wrong clock caused."""

    def __init__(self, store: Store, time: Timekeeper) -> None:
        self.store = store
        self.time = time

    def keep(self) -> ClockVerdict | None:
        """Detect steps of the wall clock; see :mod:`gpuspawner.core.clock`.

        Only the accounting service calls this, every few seconds. Returns None with a test's clock.
        """
        steady = self.time.steady
        if steady is None:
            return None
        verdict = steady.keep(self._count_again)
        if verdict.event in ("stepped", "followed", "back"):
            with self.store.write() as connection:
                said = clock_says(verdict)
                note(connection, "accounting", "clock", "wall clock", said, self.time())
        return verdict

    def _count_again(
        self, connection: sa.Connection, offset: Offset, verdict: ClockVerdict
    ) -> None:
        """Refund what ended leases were charged for time that never passed.

        While the machine was off, only the wall clock showed for how long, and it was wrong.
        """
        if verdict.recount >= 0 or offset.before is None:
            return
        before, recount = to_datetime(offset.before), timedelta(microseconds=verdict.recount)
        for lease in repository.ended_across(connection, before):
            end = max((lease.ended_at or before) + recount, before)
            too_much = lease.charged - ledger_rules.owed(lease.rate, lease.started_at, end)
            amount = min(too_much, refundable(connection, lease))
            if amount > 0:
                ahead = _seconds(verdict.recount)
                reason = f"the clock was {ahead} ahead after the machine's start"
                key = ledger_rules.refund_key(lease.id, f"clock:{offset.boot_id}:{offset.version}")
                now = to_datetime(verdict.offset.last)
                actor = ledger_rules.ACTOR_ACCOUNTING
                refund_lease(connection, lease, amount, key, now, actor=actor, reason=reason)


def clock_says(verdict: ClockVerdict) -> str:
    """Describe what happened to the wall clock in a sentence, for admins."""
    offset, day = verdict.offset, "%Y-%m-%d %H:%M:%S UTC"
    if verdict.event == "back":
        return "The wall clock is right again."
    if verdict.event == "followed":
        said = (
            f"The wall clock was set by {_apart(verdict.shift)} and stayed so: times follow "
            "it now. What runs is charged for as long as it ran, and sessions keep their length."
        )
        if verdict.recount:
            much = f"{_seconds(verdict.recount)} {'more' if verdict.recount > 0 else 'less'}"
            said += (
                f" The machine had been off for {much} than was counted: what ran elsewhere "
                "meanwhile is charged for the right time."
            )
        return said
    return (
        f"The wall clock was set by {_apart(offset.step)}. What runs is charged by the time since "
        "boot, and nothing ends because of this. If the new time is wrong, correct it; else it is "
        f"followed at {to_datetime(offset.follows_at()):{day}} by the old one."
    )


def _apart(micros: int) -> str:
    return f"{micros / 1_000_000:+,.0f} s"


def _seconds(micros: int) -> str:
    return f"{abs(micros) / 1_000_000:,.0f} s"
