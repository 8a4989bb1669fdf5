"""What members are told about their credits: the words, and the keys that tell it once. Pure."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta

from ..broker.view import clock
from ..model import Account, Lease, Notice, NoticeKind, format_credits
from ..web.figures import Funds


def first_of_each(leases: Collection[Lease]) -> dict[str, Lease]:
    """The oldest lease of each member whose servers an account pays for, by member."""
    found: dict[str, Lease] = {}
    for lease in sorted(leases, key=lambda lease: (lease.granted_at, lease.id)):
        found.setdefault(lease.server.user, lease)
    return found


def credits_low(
    funds: Funds, leases: Collection[Lease], gift: int, now: datetime, credits_help: str
) -> list[Notice]:
    """To everybody whose servers the account pays for: until when it lasts.

    ``gift`` counts what the account was given: after new credits, it is told again. None when
    nothing is due, or no end in sight.
    """
    if funds.warning is None or funds.dry_at is None:
        return []
    until = _at(funds.dry_at, now)
    account = funds.account
    return [
        Notice(
            key=f"credits_low:{account.name}:{gift}:{lease.id}:{funds.warning:g}",
            user=user,
            kind=NoticeKind.CREDITS_LOW,
            title=f"{_whose(account)} last until {until}",
            body=(
                f"{format_credits(account.balance)} credits are left, and the servers that they "
                f"pay for cost {format_credits(funds.rate)} an hour. They last until {until}; a "
                f"while after that, {_servers(leases, user)} will be stopped. {credits_help}"
            ),
            at=now,
        )
        for user, lease in first_of_each(leases).items()
    ]


def ran_dry(
    account: Account, lease: Lease, gift: int, now: datetime, grace: timedelta, credits_help: str
) -> Notice:
    """To the member of a server that will be stopped: save your work."""
    until = _at(now + grace, now)
    return Notice(
        key=f"credits_low:{account.name}:{gift}:{lease.id}:0",
        user=lease.server.user,
        kind=NoticeKind.CREDITS_LOW,
        title=f"{_whose(account)} have run out",
        body=f"{_named(lease)} will be stopped at {until}: save your work. {credits_help}",
        at=now,
    )


def stopped(account: Account, lease: Lease, now: datetime, credits_help: str) -> Notice:
    """To the member of a server that is being stopped, and why."""
    return Notice(
        key=f"stopped:{lease.id}",
        user=lease.server.user,
        kind=NoticeKind.STOPPED,
        title=f"{_named(lease)} is stopped: the credits have run out",
        body=(
            f"{_whose(account)} have run out, and the time to give new ones is over. Your files "
            f"are where you left them; a server without a GPU starts all the same. {credits_help}"
        ),
        at=now,
    )


def _whose(account: Account) -> str:
    kind, _, name = account.name.partition(":")
    return "Your credits" if kind == "member" else f"The credits of the group {name}"


def _named(lease: Lease) -> str:
    return f"Your server {lease.server.name}" if lease.server.name else "Your server"


def _servers(leases: Collection[Lease], user: str) -> str:
    mine = sum(lease.server.user == user for lease in leases)
    return "your servers" if mine > 1 else "your server"


def _at(moment: datetime, now: datetime) -> str:
    """A time to hurry to, so rounded down, with its zone: who reads it may be elsewhere."""
    minute = moment.replace(second=0, microsecond=0)
    return f"{clock(minute, now)} ({minute.astimezone():%Z})"
