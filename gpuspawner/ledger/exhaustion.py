"""Accounts that run out of credits: the warnings, and the stops that their policy asks for.

Each account is seen to in a transaction of its own, with what is told in it: whoever is killed
here has told and ordered all of it, or nothing, and the next one goes on from there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ..core.units import format_credits
from ..db.engine import Store
from ..devices.snapshots import clock
from ..leases import repository as leases_repository
from ..leases.models import Lease
from ..notifications import repository as notifications_repository
from ..notifications.models import Notice, NoticeKind
from . import credit_policy, credit_repository, lot_settlement, rules
from .credit_policy import OVERDRAFT, SESSION, PolicyStep, Purse

if TYPE_CHECKING:
    from .settings import GPUCredits


def first_of_each(leases: Collection[Lease]) -> dict[str, Lease]:
    """The oldest lease of each member whose servers an account pays for, by member."""
    found: dict[str, Lease] = {}
    for lease in sorted(leases, key=lambda lease: (lease.granted_at, lease.id)):
        found.setdefault(lease.server.user, lease)
    return found


def credits_low(
    lease: Lease,
    purse: Purse,
    minutes: float,
    now: datetime,
    credits_help: str,
    *,
    several: bool = False,
) -> Notice:
    """To a member: until when the credits last. ``several``: they pay for others of theirs too."""
    lasts = purse.lasts(lease) or timedelta(0)
    until = _at(now + lasts, now)
    left = f"{format_credits(purse.balance + lease.overdraft)} credits are left"
    if lease.when_dry == OVERDRAFT:
        left += f" with the overdraft of {format_credits(lease.overdraft)}"
    return Notice(
        key=f"credits_low:{lease.id}:{minutes:g}:{now.timestamp():.6f}",
        user=lease.server.user,
        kind=NoticeKind.CREDITS_LOW,
        title=f"{_whose(lease)} last until {until}",
        body=(
            f"{left}; the servers that they pay for cost {format_credits(purse.rate)} an hour. "
            f"They last until {until}; {_then(lease, now, several)}. {credits_help}"
        ),
        at=now,
    )


def ran_dry(
    lease: Lease, purse: Purse, now: datetime, stops_at: datetime | None, credits_help: str
) -> Notice:
    """To the member of a server that the account cannot pay for any more: save your work."""
    if lease.when_dry == OVERDRAFT:
        until = f"about {_at(stops_at, now)}" if stops_at else "then"
        body = (
            f"{_named(lease)} goes on until the overdraft of {format_credits(lease.overdraft)} "
            f"credits is used up, {until}, and is stopped then. {_MEANWHILE} {credits_help}"
        )
    elif lease.when_dry == SESSION and lease.ends_at:
        body = (
            f"{_named(lease)} goes on until its session ends at {_at(lease.ends_at, now)}. "
            f"{_MEANWHILE} {credits_help}"
        )
    else:
        until = _at(stops_at or now, now)
        body = f"{_named(lease)} will be stopped at {until}: save your work. {credits_help}"
    return Notice(
        key=f"credits_low:{lease.id}:0:{now.timestamp():.6f}",
        user=lease.server.user,
        kind=NoticeKind.CREDITS_LOW,
        title=f"{_whose(lease)} have run out",
        body=body,
        at=now,
    )


def stopped(lease: Lease, now: datetime, credits_help: str) -> Notice:
    """To the member of a server that is being stopped, and why."""
    why = "the time to give new ones is over"
    if lease.when_dry == OVERDRAFT:
        why = f"the overdraft of {format_credits(lease.overdraft)} credits is used up"
    return Notice(
        key=f"stopped:{lease.id}",
        user=lease.server.user,
        kind=NoticeKind.STOPPED,
        title=f"{_named(lease)} is stopped: the credits have run out",
        body=(
            f"{_whose(lease)} have run out, and {why}. Your files are where you left them; a "
            f"server without a GPU starts all the same. {credits_help}"
        ),
        at=now,
    )


_MEANWHILE = "Other servers with a GPU do not start meanwhile."


def _then(lease: Lease, now: datetime, several: bool) -> str:
    """What happens when the credits have run out."""
    servers = "your servers" if several else "your server"
    if lease.when_dry == OVERDRAFT:
        return f"then {servers} will be stopped"
    if lease.when_dry == SESSION and lease.ends_at:
        return f"your server goes on until its session ends at {_at(lease.ends_at, now)}"
    return f"a while after that, {servers} will be stopped"


def _whose(lease: Lease) -> str:
    kind, _, name = lease.account.partition(":")
    return "Your credits" if kind == "member" else f"The credits of the group {name}"


def _named(lease: Lease) -> str:
    return f"Your server {lease.server.name}" if lease.server.name else "Your server"


def _at(moment: datetime, now: datetime) -> str:
    """A time to hurry to, so rounded down, with its zone: who reads it may be elsewhere."""
    minute = moment.replace(second=0, microsecond=0)
    return f"{clock(minute, now)} ({minute.astimezone():%Z})"


@dataclass(frozen=True, slots=True)
class Happened:
    """What was told or ordered about a lease just now."""

    event: str
    """As in :attr:`gpuspawner.ledger.credit_policy.PolicyStep.event`, but never ``quiet``."""
    lease: Lease
    purse: Purse
    minutes: float | None = None
    """Of ``low``: which warning it was."""
    stops_at: datetime | None = None
    """When the server is stopped; None when it is not known or not going to be."""


class ExhaustionService:
    """Sees to accounts whose credits run out: warns, waits and orders the end of servers."""

    def __init__(self, store: Store, clock: Callable[[], datetime], settings: GPUCredits) -> None:
        self.store = store
        self.clock = clock
        self.settings = settings

    @property
    def grace(self) -> timedelta:
        """How long a server goes on after its member was told that nothing is left."""
        return timedelta(seconds=self.settings.grace_seconds)

    def accounts_to_see_to(self, warn_minutes: Sequence[float]) -> list[str]:
        """The accounts about whose leases something is due; :meth:`see_to` does it."""
        now, found = self.clock(), []
        with self.store.read() as connection:
            most = max(warn_minutes, default=0)
            soon = credit_repository.lots_due(connection, now + timedelta(minutes=most))
            for name in _worth_a_look(leases_repository.sums(connection), now, most, soon):
                balance, paid_for = _paying(connection, name)[name]
                purse = Purse.of(
                    balance, paid_for, now, lot_settlement.ending_credits(connection, name, now)
                )
                steps = (
                    credit_policy.next_step(x, purse, now, self.grace, warn_minutes)
                    for x in paid_for
                )
                if any(steps):
                    found.append(name)
        return found

    def see_to(self, account: str, warn_minutes: Sequence[float]) -> list[Happened]:
        """Tell and order what is due about the leases of one account; each thing once."""
        now = self.clock()
        with self.store.write() as connection:
            lot_settlement.end_due_lots(connection, account, now)
            balance, paid_for = _paying(connection, account).get(account, (0, []))
            purse = Purse.of(
                balance, paid_for, now, lot_settlement.ending_credits(connection, account, now)
            )
            due = [
                (x, credit_policy.next_step(x, purse, now, self.grace, warn_minutes))
                for x in paid_for
            ]
            done = [self._do(connection, lease, step, purse, now) for lease, step in due if step]
            happened = [each for each in done if each]
            low = [each.lease for each in happened if each.event == "low"]
            for lease in first_of_each(low).values():
                several = sum(x.server.user == lease.server.user for x in paid_for) > 1
                notice = credits_low(
                    lease,
                    purse,
                    lease.told_dry or 0.0,
                    now,
                    self.settings.help_text,
                    several=several,
                )
                notifications_repository.add(connection, notice)
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
                    found[lease.id] = credit_policy.stops_at(lease, purse, now, self.grace)
        return {lease_id: moment for lease_id, moment in found.items() if moment}

    # Steps of the above.

    def _do(
        self, connection: sa.Connection, lease: Lease, step: PolicyStep, purse: Purse, now: datetime
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
        leases_repository.update(connection, lease.id, **changes)
        stops_at = (
            now if step.event == "stop" else credit_policy.stops_at(lease, purse, now, self.grace)
        )
        if step.event == "dry":
            notice = ran_dry(lease, purse, now, stops_at, self.settings.help_text)
            notifications_repository.add(connection, notice)
        elif step.event == "stop":
            notifications_repository.add(connection, stopped(lease, now, self.settings.help_text))
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
    rows: Iterable[tuple[Lease, int]] = leases_repository.paying(connection, account)
    balances: dict[str, int] = {}
    for lease, balance in rows:
        found[lease.account].append(lease)
        balances[lease.account] = balance
    return {name: (balances[name], some) for name, some in found.items()}


def _why(lease: Lease) -> str:
    return (
        "the overdraft was used up"
        if lease.when_dry == credit_policy.OVERDRAFT
        else "the credits ran out"
    )
