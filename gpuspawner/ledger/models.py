"""Postings and transfers: the only way credits move.

A transfer is one event (a grant, a charge, a refund ...) with at least two postings that sum to
zero. An invalid one raises LedgerError.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum

from ..core.errors import LedgerError

SYSTEM_GRANTS = "system:grants"
"""The source of granted credits. Its balance is minus all grants ever."""

SYSTEM_USAGE = "system:usage"
"""The target of charges. Its balance is the cost of all GPU time ever."""

MAX_AMOUNT = 2**63 - 1
"""The largest amount of one posting in microcredits: what a database's BIGINT holds."""

_PREFIXES = ("member", "group", "system")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class TransferKind(str, Enum):
    """The kind of event that a transfer records."""

    GRANT = "grant"
    """An admin, or the opening of an account, grants credits."""
    CHARGE = "charge"
    """A lease pays for time that has passed."""
    REFUND = "refund"
    """A lease gets back what was charged too much (a failed start, an earlier end)."""
    ADJUSTMENT = "adjustment"
    """An admin corrects a balance, up or down."""
    REVERSAL = "reversal"
    """An earlier transfer is undone by its opposite."""
    EXPIRY = "expiry"
    """What is left of expiring credits is taken back at their end."""
    BATCH = "batch"
    """A batch job pays for its time, or gets back what was too much."""


@dataclass(frozen=True, slots=True)
class Posting:
    """One line of a transfer: ``amount`` microcredits into (minus: out of) an account."""

    account: str
    amount: int

    def __post_init__(self) -> None:
        check_account(self.account)
        # bool is an int to Python, and a float would silently lose microcredits.
        if type(self.amount) is not int:
            raise LedgerError(
                f"The ledger refused an entry: {self.amount!r} for {self.account} is not a whole "
                "number of microcredits. Convert credits with parse_credits first."
            )
        if self.amount == 0:
            raise LedgerError(
                f"The ledger refused an entry: it moves nothing into or out of {self.account}. "
                "Leave out postings of zero."
            )
        if abs(self.amount) > MAX_AMOUNT:
            raise LedgerError(
                f"The ledger refused an entry: {self.amount} microcredits for {self.account} are "
                "more than one posting holds. Use a smaller amount."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One event in the ledger, with its zero-sum postings.

    ``key`` makes posting safe to repeat: the store accepts each key once.
    """

    id: str
    key: str
    kind: TransferKind
    at: datetime
    """When it happened; timezone-aware, in UTC."""
    actor: str
    """Who caused it: a member, an admin, or a part of gpuspawner."""
    reason: str
    """Why, in words for the statement."""
    postings: tuple[Posting, ...]
    lease_id: str | None = None

    def __post_init__(self) -> None:
        for name in ("id", "key", "actor", "reason"):
            if not getattr(self, name).strip():
                raise LedgerError(
                    f"The ledger refused an entry: its {name} is empty. Say the {name}, so that "
                    "the entry can be understood later."
                )
        if self.at.utcoffset() != timedelta(0):
            raise LedgerError(
                f"The ledger refused an entry: its time {self.at.isoformat()} is not in UTC. "
                "Pass an aware datetime in UTC."
            )
        if len(self.postings) < 2:
            raise LedgerError(
                f"The ledger refused an entry: it has {len(self.postings)} posting(s). Say both "
                "where the credits come from and where they go."
            )
        total = sum(posting.amount for posting in self.postings)
        if total:
            raise LedgerError(
                f"The ledger refused an entry: its postings sum to {total} microcredits. They "
                "must sum to zero."
            )

    @property
    def apart(self) -> bool:
        """True if it does not follow from a lease's times and rate, as its charges do."""
        of_lease = self.kind in (TransferKind.CHARGE, TransferKind.REFUND)
        return not of_lease or self.key.startswith("refund:")

    def amount_for(self, account: str) -> int:
        """Return the microcredits that this moves into ``account`` (negative: out of it)."""
        return sum(p.amount for p in self.postings if p.account == account)


def check_account(name: str) -> str:
    """Return a well-formed account name, else raise LedgerError."""
    prefix, colon, rest = name.partition(":")
    if not colon or prefix not in _PREFIXES:
        raise LedgerError(
            f"The ledger refused an entry: {name!r} is not an account name. Write member:NAME, "
            "group:NAME or system:NAME."
        )
    if not rest or rest != rest.strip() or _CONTROL.search(rest):
        raise LedgerError(
            f"The ledger refused an entry: the account name {name!r} has no usable name after "
            f"'{prefix}:'. Write {prefix}:NAME without spaces around NAME."
        )
    return name


def group_account(group: str) -> str:
    """Return the account name of a group."""
    return f"group:{group}"


def is_system(account: str) -> bool:
    """Return True if the account is the ledger's own, which nobody can spend."""
    return account.startswith("system:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """An account of credits. ``balance`` is the sum of its postings."""

    name: str
    """``member:NAME``, ``group:NAME`` or ``system:NAME``."""
    balance: int = 0
    held: int = 0
    """Set aside by open leases."""

    @property
    def available(self) -> int:
        """The microcredits that are not set aside."""
        return self.balance - self.held


def member_account(user: str) -> str:
    """Return the account name of a member."""
    return f"member:{user}"
