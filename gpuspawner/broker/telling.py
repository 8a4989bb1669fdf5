"""What members are told about their credits, in words. Pure."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta

from ..ledger.dry import OVERDRAFT, SESSION, Purse
from ..model import Lease, Notice, NoticeKind, format_credits
from .view import clock


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
