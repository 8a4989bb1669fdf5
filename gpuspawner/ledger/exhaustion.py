"""Accounts that run out of credits: the warnings, and the stops that their policy requires.

Each account is handled in one transaction, including its notices, so that a kill loses nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ..db.engine import Store
from ..leases import repository as leases_repository
from ..leases.models import Lease
from ..notifications import repository as notifications_repository
from ..notifications.models import Notice, NoticeKind
from ..notifications.service import compose
from . import charges, credit_policy, credit_repository, rules
from .credit_policy import AccountRunway, PolicyStep

if TYPE_CHECKING:
    from .settings import GPUCredits


def first_of_each(leases: Collection[Lease]) -> dict[str, Lease]:
    """Return the oldest lease of each member whose servers an account pays for, by member."""
    found: dict[str, Lease] = {}
    for lease in sorted(leases, key=lambda lease: (lease.granted_at, lease.id)):
        found.setdefault(lease.server.user, lease)
    return found


def _notice(
    template: str,
    kind: NoticeKind,
    key: str,
    lease: Lease,
    purse: AccountRunway,
    now: datetime,
    **values: Any,
) -> Notice:
    """To the lease's member. ``values`` are those of the template besides the usual ones."""
    values |= {"lease": lease, "balance": purse.balance, "rate": purse.rate}
    return compose(template, kind, key, lease.server.user, now, **values)


def credits_back(lease: Lease, purse: AccountRunway, now: datetime) -> Notice:
    """For the admin's command only: a server goes on whose member was told that nothing is left."""
    key = f"credits_back:{lease.id}:{now.timestamp():.6f}"
    return _notice("credits_back", NoticeKind.CREDITS_LOW, key, lease, purse, now)


@dataclass(frozen=True, slots=True)
class CreditEvent:
    """What was just reported or ordered about a lease."""

    event: str
    """As in :attr:`gpuspawner.ledger.credit_policy.PolicyStep.event`, but never ``quiet``."""
    lease: Lease
    purse: AccountRunway
    minutes: float | None = None
    """For ``low``: which warning it was."""
    stops_at: datetime | None = None
    """When the server is stopped; None if unknown, or if it will not be."""


class ExhaustionService:
    """Handles accounts whose credits run out: warns, waits and orders the end of servers."""

    def __init__(self, store: Store, clock: Callable[[], datetime], settings: GPUCredits) -> None:
        self.store = store
        self.clock = clock
        self.settings = settings

    @property
    def grace(self) -> timedelta:
        """How long a server continues after its member was told that nothing is left."""
        return timedelta(seconds=self.settings.grace_seconds)

    def accounts_to_see_to(self, warn_minutes: Sequence[float]) -> list[str]:
        """Return the accounts with something due about their leases, for :meth:`see_to`."""
        now, found = self.clock(), []
        with self.store.read() as connection:
            most = max(warn_minutes, default=0)
            soon = credit_repository.lots_due(connection, now + timedelta(minutes=most))
            for name in _worth_a_look(leases_repository.sums(connection), now, most, soon):
                _, steps = self._steps(connection, name, now, warn_minutes)
                if any(step for _, step in steps):
                    found.append(name)
        return found

    def see_to(self, account: str, warn_minutes: Sequence[float]) -> list[CreditEvent]:
        """Report and order what is due about the leases of one account, each thing once."""
        now = self.clock()
        with self.store.write() as connection:
            charges.end_due_lots(connection, account, now)
            purse, steps = self._steps(connection, account, now, warn_minutes)
            done = [self._do(connection, lease, step, purse, now) for lease, step in steps if step]
            happened = [each for each in done if each]
            low = [each.lease for each in happened if each.event == "low"]
            for lease in first_of_each(low).values():
                several = sum(x.server.user == lease.server.user for x, _ in steps) > 1
                notice = self._low(lease, purse, now, several=several)
                notifications_repository.add(connection, notice)
        return happened

    def credit_ends(self, leases: Collection[Lease], now: datetime) -> dict[str, datetime]:
        """Return when each lease is stopped because its account runs dry at its present rate.

        By lease id; without the leases that credits do not end.
        """
        names = {lease.account for lease in leases if lease.rate}
        if not names:
            return {}
        found = {}
        with self.store.read() as connection:
            # One account is asked for alone: a member's page needs no more.
            paying = _paying(connection, *names) if len(names) == 1 else _paying(connection)
            for name in names & paying.keys():
                ending = charges.ending_credits(connection, name, now)
                purse = AccountRunway.of(*paying[name], now, ending)
                for lease in leases:
                    if lease.account == name:
                        found[lease.id] = credit_policy.credits_end(lease, purse, now, self.grace)
        return {lease_id: moment for lease_id, moment in found.items() if moment}

    # Helpers.

    def _steps(
        self, connection: sa.Connection, account: str, now: datetime, warn_minutes: Sequence[float]
    ) -> tuple[AccountRunway, list[tuple[Lease, PolicyStep | None]]]:
        """Return the account, and what is due about each of the leases that it pays for."""
        balance, paid_for = _paying(connection, account).get(account, (0, []))
        ending = charges.ending_credits(connection, account, now)
        purse = AccountRunway.of(balance, paid_for, now, ending)
        known = (purse, now, self.grace, warn_minutes)
        return purse, [(lease, credit_policy.next_step(lease, *known)) for lease in paid_for]

    def _do(
        self,
        connection: sa.Connection,
        lease: Lease,
        step: PolicyStep,
        purse: AccountRunway,
        now: datetime,
    ) -> CreditEvent | None:
        """Carry out and record one step; None if there is nobody to tell."""
        changes: dict[str, Any] = {}
        match step.event:
            case "low" | "quiet":
                changes = {"told_dry": step.minutes}
            case "dry":
                changes = {"warned_at": now}
            case "back":
                changes = {"warned_at": None}
            case "stop":
                overdrawn = lease.when_dry == credit_policy.OVERDRAFT
                why = "the overdraft was used up" if overdrawn else "the credits ran out"
                changes = {"outcome": "credits", "end_reason": why}
        lease = replace(lease, **changes)
        leases_repository.update(connection, lease.id, **changes)
        stops_at = (
            now if step.event == "stop" else credit_policy.stops_at(lease, purse, now, self.grace)
        )
        told: dict[str, Any] = {"credits_help": self.settings.help_text}
        if step.event == "dry":
            key, told["stops_at"] = f"credits_low:{lease.id}:0:{now.timestamp():.6f}", stops_at
            kind = NoticeKind.CREDITS_LOW
            notice = _notice("credits_gone", kind, key, lease, purse, now, **told)
            notifications_repository.add(connection, notice)
        elif step.event == "stop":
            key, kind = f"stopped:{lease.id}", NoticeKind.STOPPED
            notice = _notice("credits_gone_stopped", kind, key, lease, purse, now, **told)
            notifications_repository.add(connection, notice)
        if step.event == "quiet":
            return None
        return CreditEvent(step.event, lease, purse, step.minutes, stops_at)

    def _low(self, lease: Lease, purse: AccountRunway, now: datetime, *, several: bool) -> Notice:
        """Say until when the credits last; ``several``: they pay for other servers, too."""
        minutes = lease.told_dry or 0.0
        return _notice(
            "credits_low",
            NoticeKind.CREDITS_LOW,
            f"credits_low:{lease.id}:{minutes:g}:{now.timestamp():.6f}",
            lease,
            purse,
            now,
            left=purse.balance + lease.overdraft,
            minutes=minutes,
            lasts_until=now + (purse.lasts(lease) or timedelta(0)),
            stops_at=credit_policy.credits_end(lease, purse, now, self.grace),
            several=several,
            credits_help=self.settings.help_text,
        )


def _worth_a_look(
    sums: Iterable[tuple[str, int, int, int, datetime, bool]],
    now: datetime,
    minutes: float,
    ending: Collection[str],
) -> list[str]:
    """Return the accounts that may last at most ``minutes``, or whose members were told something.

    ``ending``: accounts with credits that expire by then.
    """
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
    """Return the running leases that cost something, and the paying balance, by account."""
    found: dict[str, tuple[int, list[Lease]]] = {}
    for lease, balance in leases_repository.paying(connection, account):
        found.setdefault(lease.account, (balance, []))[1].append(lease)
    return found
