"""Accounts that run dry: members are told, and what must stop is ordered to.

Each account is seen to in a transaction of its own, with what is told in it: whoever is killed
here has told and ordered all of it, or nothing, and the next one goes on from there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from ..ledger import dry, rules
from ..ledger.dry import Purse, Step
from ..model import Lease
from ..store import leases, lots, notices
from . import telling
from .core import Core


@dataclass(frozen=True, slots=True)
class Happened:
    """What was told or ordered about a lease just now."""

    event: str
    """As in :attr:`gpuspawner.ledger.dry.Step.event`, but never ``quiet``."""
    lease: Lease
    purse: Purse
    minutes: float | None = None
    """Of ``low``: which warning it was."""
    stops_at: datetime | None = None
    """When the server is stopped; None when it is not known or not going to be."""


class Dry(Core):
    """The part of the broker that sees to accounts that run dry."""

    @property
    def grace(self) -> timedelta:
        """How long a server goes on after its member was told that nothing is left."""
        return timedelta(seconds=self.grace_seconds)

    def accounts_to_see_to(self, warn_minutes: Sequence[float]) -> list[str]:
        """The accounts about whose leases something is due; :meth:`see_to` does it."""
        now, found = self.clock(), []
        with self.store.read() as connection:
            most = max(warn_minutes, default=0)
            soon = lots.due(connection, now + timedelta(minutes=most))
            for name in _worth_a_look(leases.sums(connection), now, most, soon):
                balance, paid_for = _paying(connection, name)[name]
                purse = Purse.of(balance, paid_for, now, self._ending(connection, name, now))
                steps = (dry.next_step(x, purse, now, self.grace, warn_minutes) for x in paid_for)
                if any(steps):
                    found.append(name)
        return found

    def see_to(self, account: str, warn_minutes: Sequence[float]) -> list[Happened]:
        """Tell and order what is due about the leases of one account; each thing once."""
        now = self.clock()
        with self.store.write() as connection:
            self._end_due_lots(connection, account, now)
            balance, paid_for = _paying(connection, account).get(account, (0, []))
            purse = Purse.of(balance, paid_for, now, self._ending(connection, account, now))
            due = [(x, dry.next_step(x, purse, now, self.grace, warn_minutes)) for x in paid_for]
            done = [self._do(connection, lease, step, purse, now) for lease, step in due if step]
            happened = [each for each in done if each]
            low = [each.lease for each in happened if each.event == "low"]
            for lease in telling.first_of_each(low).values():
                several = sum(x.server.user == lease.server.user for x in paid_for) > 1
                notice = telling.credits_low(
                    lease, purse, lease.told_dry or 0.0, now, self.credits_help, several=several
                )
                notices.add(connection, notice)
        return happened

    def dry_stops(self, some: Collection[Lease]) -> dict[str, datetime]:
        """When each of these leases is stopped of which it was told that nothing is left."""
        if not any(lease.warned_at for lease in some):
            return {}
        now, found = self.clock(), {}
        for account, (balance, paid_for) in self.store.run(_paying).items():
            purse = Purse.of(balance, paid_for, now)
            for lease in some:
                if lease.account == account:
                    found[lease.id] = dry.stops_at(lease, purse, now, self.grace)
        return {lease_id: moment for lease_id, moment in found.items() if moment}

    # Steps of the above.

    def _do(
        self, connection: sa.Connection, lease: Lease, step: Step, purse: Purse, now: datetime
    ) -> Happened | None:
        """One step, written down; None when there is nobody to tell."""
        changes: dict[str, Any] = {}
        match step.event:
            case "low" | "quiet":
                changes = {"told_dry": step.minutes}
            case "dry":
                changes = {"warned_at": now}
            case "back":
                changes = {"warned_at": None}
            case "stop":
                changes = {"outcome": "credits", "end_reason": _why(lease)}
        lease = replace(lease, **changes)
        leases.update(connection, lease.id, **changes)
        stops_at = now if step.event == "stop" else dry.stops_at(lease, purse, now, self.grace)
        if step.event == "dry":
            notice = telling.ran_dry(lease, purse, now, stops_at, self.credits_help)
            notices.add(connection, notice)
        elif step.event == "stop":
            notices.add(connection, telling.stopped(lease, now, self.credits_help))
        if step.event == "quiet":
            return None
        return Happened(step.event, lease, purse, step.minutes, stops_at)


def _worth_a_look(
    sums: Iterable[tuple[str, int, int, int, datetime, bool]],
    now: datetime,
    minutes: float,
    ending: Collection[str],
) -> list[str]:
    """The accounts that may last ``minutes`` at most, or about which something was told;
    ``ending``: those of which some credits end by then."""
    left: dict[str, int] = {}
    rates: dict[str, int] = defaultdict(int)
    told = set()
    for account, balance, rate, charged, started_at, was_told in sums:
        due = max(0, rules.owed(rate, started_at, now) - charged)
        left[account] = left.get(account, balance) - due
        rates[account] += rate
        if was_told:
            told.add(account)
    soon = timedelta(minutes=minutes)
    return [
        account
        for account, amount in left.items()
        if account in told
        or account in ending
        or (rules.time_left(amount, rates[account]) or timedelta(0)) <= soon
    ]


def _paying(
    connection: sa.Connection, account: str | None = None
) -> dict[str, tuple[int, list[Lease]]]:
    """The running leases that cost something, and the balance that pays, by account."""
    found: dict[str, list[Lease]] = defaultdict(list)
    rows: Iterable[tuple[Lease, int]] = leases.paying(connection, account)
    balances: dict[str, int] = {}
    for lease, balance in rows:
        found[lease.account].append(lease)
        balances[lease.account] = balance
    return {name: (balances[name], some) for name, some in found.items()}


def _why(lease: Lease) -> str:
    return "the overdraft was used up" if lease.when_dry == dry.OVERDRAFT else "the credits ran out"
