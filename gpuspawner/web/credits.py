"""What pages and JSON tell of one account, read from the broker. Blocks: use :meth:`Broker.run`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from ..broker import Broker, Overview
from ..errors import UnknownAccount
from ..ledger import lots
from ..ledger.usage import Use
from ..model import Account
from ..store.statements import Page
from . import figures, weeks

LINES = 50
"""Lines of a statement on a page."""

WEEKS = 8
"""Weeks of the chart."""


@dataclass(frozen=True, slots=True)
class Lasting:
    """What a balance means in hours of one kind of device."""

    model: str
    memory_bytes: int
    rate: int
    """Microcredits per GPU-hour."""
    lasts: timedelta | None
    """None when it costs nothing."""


@dataclass(frozen=True, slots=True)
class Week:
    """One bar of the chart."""

    start: datetime
    end: datetime
    use: Use


@dataclass(frozen=True, slots=True)
class Credits:
    """An account's past, and what is left of it."""

    statement: Page
    weeks: tuple[Week, ...]

    @property
    def used(self) -> bool:
        """Whether anything was used in these weeks."""
        return any(any(week.use) for week in self.weeks)


def of_account(broker: Broker, account: str, before: int | None = None) -> Credits:
    """The account's statement as people read it, and its last weeks; empty when not opened."""
    bounds = weeks.last_weeks(broker.clock(), WEEKS)
    used = broker.use_of_account(account, bounds)
    told = (Week(*parts) for parts in zip(bounds, bounds[1:], used, strict=False))
    return Credits(statement(broker, account, before), tuple(told))


def statement(broker: Broker, account: str, before: int | None = None) -> Page:
    """A page of the statement as people read it; empty when the account is not opened yet."""
    try:
        return broker.statement_page(account, before, LINES, folded=True)
    except UnknownAccount:  # a member's opens with the first sign-in
        return Page((), None)


def lasting(some: figures.Funds, overview: Overview, now: datetime) -> tuple[Lasting, ...]:
    """What an account's credits mean in hours of each kind of device, the cheapest last."""
    available = some.account.available
    ending = [(each.ends_at - now, each.left) for each in some.ending]
    return tuple(
        Lasting(
            model=count.model,
            memory_bytes=count.memory_bytes,
            rate=count.rate,
            lasts=lots.lasts(ending, available, count.rate),
        )
        for count in overview.models
    )


def funds_of(broker: Broker, account: str, warn_minutes: tuple[float, ...]) -> figures.Funds:
    """Balance and holds of an account up to this second. Raises UnknownAccount."""
    found: Account = broker.account(account)
    ending = figures.ending_of(broker, account)
    return figures.funds(found, broker.open_leases(), broker.clock(), warn_minutes, ending)


def running_of(broker: Broker, account: str) -> tuple[figures.LeaseFigures, ...]:
    """The servers that an account pays for just now."""
    mine = [lease for lease in broker.open_leases() if lease.account == account]
    return figures.lease_figures(broker, mine, broker.clock())
