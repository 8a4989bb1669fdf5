"""The ledger's rules: charges, holds, settlements, and who may pay for whom. Pure.

What a lease owes follows from its rate (microcredits per hour) and its time alone; a tick charges
what is owed less what was charged, so ticks can be late, doubled or lost. A transfer's key follows
from what it settles: of two ticks that saw the same lease, the store accepts one.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from ..core.errors import InvalidRequest, LedgerError, NotAllowed
from ..leases.models import Lease, LeaseState, ServerRef
from .models import (
    SYSTEM_GRANTS,
    SYSTEM_USAGE,
    Account,
    Posting,
    Transfer,
    TransferKind,
    check_account,
    group_account,
    member_account,
)

HOUR = 3_600_000_000
"""Microseconds in an hour."""

ACTOR_ACCOUNTING, ACTOR_BROKER = "accounting", "broker"
"""The actors of charges and of settlements."""

_MICROSECOND = timedelta(microseconds=1)
_IDS = uuid.UUID("6d1f9c0e-5b0a-4c58-9f5e-1a7d3f0c2b44")


# What is owed.


def owed(rate: int, started_at: datetime | None, until: datetime) -> int:
    """Return the microcredits owed from ``started_at`` to ``until``, rounded down.

    Zero if the server never started or ``until`` is not after the start.
    """
    if started_at is None or until <= started_at:
        return 0
    return rate * ((until - started_at) // _MICROSECOND) // HOUR


def charge_due(lease: Lease, until: datetime) -> int:
    """Return what a tick at ``until`` must charge: owed less charged so far, never negative.

    An ended lease is settled, and nothing is due on it.
    """
    if lease.state is LeaseState.ENDED:
        return 0
    return max(0, owed(lease.rate, lease.started_at, until) - lease.charged)


def settlement(lease: Lease, ended_at: datetime, failed: bool) -> int:
    """Return what is left to charge at the proven end; negative is a refund.

    A failed start costs nothing: all that was charged comes back.
    """
    total = 0 if failed else owed(lease.rate, lease.started_at, ended_at)
    return total - lease.charged


# Before the start.


def hold_for(rate: int, lead: timedelta) -> int:
    """Return the microcredits to set aside so that ``lead`` of time is covered, rounded up.

    A rate above zero holds at least one, so that an empty account never gets a paid GPU.
    """
    if rate <= 0:
        return 0
    micros = max(0, lead // _MICROSECOND)
    return max(1, -(-rate * micros // HOUR))


def can_afford(available: int, hold: int) -> bool:
    """Return True if the hold can be set aside. A hold of zero always can."""
    return hold <= 0 or available >= hold


def owing(leases: Iterable[Lease], account: Account, until: datetime) -> Account:
    """Return the account as if all that these leases owe until then were already charged."""
    due = freed = 0
    for lease in leases:
        mine = charge_due(lease, until)
        due += mine
        freed += lease.held - max(0, lease.held - mine)
    return replace(account, balance=account.balance - due, held=account.held - freed)


# How long credits last.


def time_left(available: int, rate: int) -> timedelta | None:
    """Return how long ``available`` microcredits last at ``rate``; None if for ever."""
    if rate <= 0:
        return None
    micros = max(0, available) * HOUR // rate
    try:
        return timedelta(microseconds=micros)
    except OverflowError:  # millions of years
        return None


def runs_dry_at(available: int, rate: int, now: datetime) -> datetime | None:
    """Return when ``available`` microcredits are used up at ``rate``; None if never."""
    return after(now, time_left(available, rate))


def after(now: datetime, left: timedelta | None) -> datetime | None:
    """Return ``now`` plus ``left``; None if that is never, or past the year 9999."""
    try:
        return None if left is None else now + left
    except OverflowError:
        return None


def format_time_left(left: timedelta) -> str:
    """Format as ``3 h 20 min``, ``5 min``, ``2 d 4 h`` or ``less than a minute``; rounded down."""
    minutes = left // timedelta(minutes=1)
    if minutes < 1:
        return "less than a minute"
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min")]
    if days:
        parts = parts[:2]  # nobody plans days ahead by the minute
    return " ".join(f"{count} {unit}" for count, unit in parts if count)


# Builders of transfers.


def move(
    source: str,
    target: str,
    amount: int,
    kind: TransferKind,
    key: str,
    at: datetime,
    actor: str,
    reason: str,
    lease_id: str | None = None,
) -> Transfer:
    """Return a transfer of ``amount`` microcredits from ``source`` to ``target``."""
    return Transfer(
        id=transfer_id(key),
        key=key,
        kind=kind,
        at=at,
        actor=actor,
        reason=reason,
        postings=(Posting(target, amount), Posting(source, -amount)),
        lease_id=lease_id,
    )


def grant(
    account: str, amount: int, *, key: str, at: datetime, actor: str, reason: str
) -> Transfer:
    """Grant credits from the system to an account. ``amount`` is above zero."""
    _check_receiver(account)
    if amount <= 0:
        raise LedgerError(
            f"The ledger refused a grant of {amount} microcredits to {account}: a grant is more "
            "than zero. Take credits back with an adjustment."
        )
    return move(SYSTEM_GRANTS, account, amount, TransferKind.GRANT, key, at, actor, reason)


def opening_key(account: str) -> str:
    """Return the key of an account's opening grant: an account opens once."""
    return f"opening:{account}"


def opening_grant(
    account: str, amount: int, *, at: datetime, actor: str, key: str = ""
) -> Transfer | None:
    """Return the grant that opens an account; None if new accounts get nothing."""
    if amount == 0:
        return None
    key = key or opening_key(account)
    return grant(account, amount, key=key, at=at, actor=actor, reason="Opening grant")


def adjustment(
    account: str, amount: int, *, key: str, at: datetime, actor: str, reason: str
) -> Transfer:
    """Correct a balance for an admin: up if ``amount`` is above zero, else down."""
    _check_receiver(account)
    return move(SYSTEM_GRANTS, account, amount, TransferKind.ADJUSTMENT, key, at, actor, reason)


def charge(lease: Lease, amount: int, until: datetime) -> Transfer | None:
    """Return the charge of a tick at ``until``; None if ``amount`` is zero.

    The key contains what was charged before, so that two ticks that saw the same lease are one.
    """
    if amount == 0:
        return None
    reason = charge_reason([device.model for device in lease.devices], lease.server)
    return charge_transfer(lease.id, lease.account, lease.charged, amount, until, reason)


def charge_transfer(
    lease_id: str, account: str, charged: int, amount: int, until: datetime, reason: str
) -> Transfer:
    """Return a charge for a lease, from the few columns that it needs.

    ``charged`` is what the lease was charged before, in microcredits: it makes the key.
    """
    key, kind = f"charge:{lease_id}:{charged}", TransferKind.CHARGE
    return move(account, SYSTEM_USAGE, amount, kind, key, until, ACTOR_ACCOUNTING, reason, lease_id)


def charge_reason(models: Sequence[str], server: ServerRef) -> str:
    """Return what a charge is for, as the statement says it."""
    what = f"{len(models)} x {', '.join(sorted(set(models)))}" if models else "Time"
    return f"{what} of {server}"


def settle(lease: Lease, amount: int, ended_at: datetime) -> Transfer | None:
    """Return the last charge of a lease, or a refund if ``amount`` is negative; None if zero."""
    if amount == 0:
        return None
    key = f"settle:{lease.id}"
    if amount > 0:
        models = [device.model for device in lease.devices]
        reason = f"{charge_reason(models, lease.server)}, up to its end"
        source, target, kind = lease.account, SYSTEM_USAGE, TransferKind.CHARGE
    else:
        reason = f"Charged too much for {lease.server}"
        source, target, kind = SYSTEM_USAGE, lease.account, TransferKind.REFUND
    return move(source, target, abs(amount), kind, key, ended_at, ACTOR_BROKER, reason, lease.id)


def refund(
    lease: Lease, amount: int, *, key: str, at: datetime, actor: str, reason: str
) -> Transfer:
    """Refund microcredits of what a lease was charged, for an admin's reason."""
    kind = TransferKind.REFUND
    return move(SYSTEM_USAGE, lease.account, amount, kind, key, at, actor, reason, lease.id)


def refund_key(lease_id: str, key: str) -> str:
    """Return the key of a refund, which distinguishes the refunds of one lease."""
    return f"refund:{lease_id}:{key}"


def reversal_key(transfer: str) -> str:
    """Return the key of the reversal of the transfer with this id: it is undone once."""
    return f"reversal:{transfer}"


def reversal(transfer: Transfer, *, key: str, at: datetime, actor: str, reason: str) -> Transfer:
    """Return the opposite of ``transfer``: together they move nothing."""
    return Transfer(
        id=transfer_id(key),
        key=key,
        kind=TransferKind.REVERSAL,
        at=at,
        actor=actor,
        reason=reason,
        postings=tuple(Posting(p.account, -p.amount) for p in transfer.postings),
        lease_id=transfer.lease_id,
    )


def transfer_id(key: str) -> str:
    """Return the id of the transfer with this key: the same key always gives the same id."""
    return uuid.uuid5(_IDS, key).hex


def _check_receiver(account: str) -> None:
    if check_account(account).startswith("system:"):
        raise LedgerError(
            f"The ledger refused an entry: {account} is the ledger's own account. Name a member's "
            "or a group's."
        )


LONGEST = 300
"""Maximum characters of an account's name in a request."""


def accounts_of(user: str, groups: Collection[str]) -> tuple[str, ...]:
    """Return the accounts that a member may draw on, their own first; some may not be open."""
    return (member_account(user), *(group_account(group) for group in sorted(groups)))


def check_payer(asked: str, user: str, groups: Collection[str]) -> str:
    """Return the account that is to pay, if the member may draw on it. Raises NotAllowed."""
    mine = accounts_of(user, groups)
    if asked in mine:
        return asked
    allowed = " or ".join(mine[:5])
    raise NotAllowed(
        f"The field 'account' names {asked[:60]!r}, which you cannot use: write {allowed}, "
        "or leave it out.",
        field="account",
    )


def parse_account(value: object) -> str:
    """Parse the account named in a form. Raises InvalidRequest."""
    text = value.strip() if isinstance(value, str) and len(value) <= LONGEST else ""
    kind, _, name = text.partition(":")
    if kind not in ("member", "group") or not name.strip() or not text.isprintable():
        said = "so much" if isinstance(value, int) else repr(str(value)[:60])
        raise InvalidRequest(
            f"The field 'account' must be member:NAME or group:NAME, not {said}.", field="account"
        )
    return text
