"""Credits that come again and again: how much, for whom, when. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from enum import Enum

from ..errors import InvalidRequest
from ..model import Account, format_credits, member_account
from .entries import check_account
from .recurrence import Recurrence

EVERYBODY = "everybody"
"""Every member who has an account."""

_MEMBERS_OF = "members:"

LONGEST_KEPT = timedelta(days=3660)
"""The longest that credits of a refill are kept."""


class Mode(str, Enum):
    """What an occurrence does to a balance."""

    ADD = "add"
    """The amount comes to it."""
    TOP_UP = "top_up"
    """It is filled up to the amount."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refill:
    """A recurring refill."""

    id: str
    recurrence: Recurrence
    mode: Mode
    amount: int
    """Microcredits, for each account."""
    audience: tuple[str, ...]
    """``everybody``, ``members:GROUP`` (each member of a group of the Hub), or accounts:
    ``member:NAME``, ``group:NAME``."""
    cap: int | None = None
    """No balance is brought above so many microcredits."""
    keep: timedelta | None = None
    """After so long, what is left of an occurrence's credits is taken back."""
    reason: str
    made_at: datetime
    made_by: str
    next_at: datetime | None = None
    """The occurrence that is given next; None when there is no other."""
    ended_at: datetime | None = None
    """When an admin ended it."""

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of the Hub whose members get it."""
        return tuple(
            name.removeprefix(_MEMBERS_OF) for name in self.audience if name.startswith(_MEMBERS_OF)
        )

    def gift(self, balance: int) -> int:
        """Microcredits that an account with this balance gets; never below zero."""
        gift = self.amount if self.mode is Mode.ADD else self.amount - balance
        if self.cap is not None:
            gift = min(gift, self.cap - balance)
        return max(0, gift)

    def accounts(
        self,
        known: Iterable[tuple[Account, datetime]],
        members: Mapping[str, Collection[str]],
        occurrence: datetime,
    ) -> list[Account]:
        """Who gets an occurrence: of the accounts that were open then, with when they were opened.

        ``members`` are those of each of :attr:`groups`.
        """
        named = set(self.audience)
        for group in self.groups:
            named |= {member_account(user) for user in members.get(group, ())}
        everybody = EVERYBODY in named
        return [
            account
            for account, opened_at in known
            if opened_at <= occurrence
            and (account.name in named or (everybody and account.name.startswith("member:")))
        ]

    def key(self, occurrence: datetime, account: str) -> str:
        """The idempotency key of what an account gets at an occurrence."""
        moment = occurrence.astimezone(timezone.utc)
        return f"refill:{self.id}:{moment:%Y%m%dT%H%M%S}:{account}"


def check_audience(names: Iterable[str]) -> tuple[str, ...]:
    """Who is to get a refill. Raises InvalidRequest for what names nobody, or nobody alone."""
    found = tuple(dict.fromkeys(name.strip() for name in names))
    if not found:
        raise InvalidRequest(
            f"Say who gets it: {EVERYBODY}, members:GROUP, member:NAME or group:NAME.",
            field="audience",
        )
    for name in found:
        if name == EVERYBODY or name.removeprefix(_MEMBERS_OF).strip() not in ("", name):
            continue
        if not name.startswith(("member:", "group:")):
            raise InvalidRequest(
                f"{name[:60]!r} names nobody: write {EVERYBODY}, members:GROUP (each member of a "
                "group), member:NAME or group:NAME (a group's account).",
                field="audience",
            )
        check_account(name)
    return found


def check_amounts(mode: Mode, amount: int, cap: int | None, keep: timedelta | None) -> None:
    """Raises InvalidRequest for amounts that can give nothing, or too much."""
    if amount <= 0:
        raise InvalidRequest(
            f"A refill of {format_credits(amount)} credits gives nothing: write more than 0.",
            field="amount",
        )
    if cap is not None and (cap <= 0 or (mode is Mode.TOP_UP and cap < amount)):
        what = f"the amount of {format_credits(amount)}" if cap > 0 else "0"
        raise InvalidRequest(
            f"The cap of {format_credits(cap)} credits is not above {what}: it would never be "
            "reached. Write a greater one, or leave it out.",
            field="cap",
        )
    if keep is not None and not timedelta(0) < keep <= LONGEST_KEPT:
        raise InvalidRequest(
            f"The credits of a refill can be kept for up to {LONGEST_KEPT.days} days, and for "
            "longer than nothing.",
            field="keep",
        )
