"""What the pages and the JSON show, read from the broker. Blocks: use :meth:`Broker.run`.

The accounting service charges once a minute; what is shown here is up to the second.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from ..broker import Broker, DeviceView, Overview, Standing
from ..ledger import lots, rules
from ..model import Account, Lease, LeaseState, Ticket
from ..scheduler import Ranked
from ..store.closures import GRANTING, Change, Closure

SESSIONS = 10
TICKETS = 20
PAYING = 200
CHANGES = 50


@dataclass(frozen=True, slots=True)
class LeaseFigures:
    """An open or ended lease, and what it cost so far."""

    lease: Lease
    cost: int
    """Microcredits, up to now or to its end."""
    stops_at: datetime | None = None
    """When the server is stopped unless credits are given: its account ran dry."""

    @property
    def since(self) -> datetime:
        """When it came up, or was granted if it never did."""
        return self.lease.started_at or self.lease.granted_at


@dataclass(frozen=True, slots=True)
class Ending:
    """Credits that end."""

    ends_at: datetime
    left: int
    """Microcredits."""


@dataclass(frozen=True, slots=True)
class Funds:
    """An account right now."""

    account: Account
    rate: int
    """Microcredits per hour of its running leases together."""
    lasts: timedelta | None
    """How long the balance lasts at that rate, with the overdraft that all of them may take; None
    when nothing is running that costs."""
    dry_at: datetime | None
    warning: float | None = None
    """The warning that is due, in minutes left; None while there is time enough."""
    ending: tuple[Ending, ...] = ()
    """What of the balance ends, first what ends first."""


@dataclass(frozen=True, slots=True)
class Member:
    """All that a member sees of their own."""

    now: datetime
    funds: Funds
    running: tuple[LeaseFigures, ...]
    sessions: tuple[LeaseFigures, ...]


@dataclass(frozen=True, slots=True)
class Everyone:
    """What admins see."""

    now: datetime
    accounts: tuple[Funds, ...]
    running: tuple[LeaseFigures, ...]


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """A device as one member may see it."""

    view: DeviceView
    rate: int
    lease: Lease | None
    """The lease on it, when the reader may know: their own, or any for an admin."""
    detail: str


@dataclass(frozen=True, slots=True)
class InLine:
    """A ticket that waits, with the arithmetic of its place."""

    ticket: Ticket
    ranked: Ranked
    standing: Standing


@dataclass(frozen=True, slots=True)
class WholeLine:
    """The line as admins see it."""

    now: datetime
    tickets: tuple[InLine, ...]
    """First next."""
    closed: dict[str, Closure]
    """What is drained, and whether granting is paused, by subject."""
    trail: tuple[Change, ...]
    """Newest first."""

    @property
    def paused(self) -> Closure | None:
        """Why nothing is given out, if so."""
        return self.closed.get(GRANTING)

    def find(self, ticket_id: str) -> InLine | None:
        """The ticket of this id; None when it does not wait."""
        return next((some for some in self.tickets if some.ticket.id == ticket_id), None)


@dataclass(frozen=True, slots=True)
class OwnTickets:
    """A member's part of the line."""

    now: datetime
    waiting: tuple[tuple[Ticket, Standing | None], ...]
    """Without a standing: it got its turn, or was ended, a moment ago."""
    ended: tuple[Ticket, ...]
    """Newest first."""
    of: int
    """How many tickets wait, of whomever."""


def member(broker: Broker, user: str, warn_minutes: Sequence[float]) -> Member:
    """The figures of one member."""
    now = broker.clock()
    opened = broker.open_leases()
    account = broker.member(user)
    past = broker.find_leases(user=user, limit=SESSIONS).found
    return Member(
        now=now,
        funds=funds(account, opened, now, warn_minutes, ending_of(broker, account.name)),
        running=lease_figures(broker, [s for s in opened if s.server.user == user], now),
        sessions=lease_figures(broker, [s for s in past if s.state is LeaseState.ENDED], now),
    )


def everyone(broker: Broker, warn_minutes: Sequence[float]) -> Everyone:
    """The figures of all open leases, and of the accounts that pay for them."""
    now = broker.clock()
    opened = broker.open_leases()
    paying = {lease.account for lease in opened}
    return Everyone(
        now=now,
        accounts=all_funds(
            broker,
            broker.find_accounts(limit=PAYING, among=paying).found,
            opened,
            now,
            warn_minutes,
        ),
        running=lease_figures(broker, opened, now),
    )


def devices(broker: Broker, user: str, admin: bool) -> tuple[Overview, tuple[DeviceFigures, ...]]:
    """All devices; whose a leased one is, is told to its member and to admins."""
    overview = broker.overview()
    opened = {lease.id: lease for lease in broker.open_leases()}
    found = []
    for view in overview.devices:
        lease = opened.get(view.lease_id or "")
        told = lease if lease and (admin or lease.server.user == user) else None
        detail = view.detail if admin else ""
        rate = broker.rates.rate_of(view.device.model)
        found.append(DeviceFigures(view, rate, told, detail))
    return overview, tuple(found)


def whole_line(broker: Broker) -> WholeLine:
    """Everybody's tickets and what admins changed of late."""
    return WholeLine(
        now=broker.clock(),
        tickets=tuple(InLine(*entry) for entry in broker.order()),
        closed=broker.closures(),
        trail=tuple(broker.trail(CHANGES)),
    )


def own_tickets(broker: Broker, user: str) -> OwnTickets:
    """A member's tickets: those that wait, and the last ones that ended."""
    return with_standings(broker, broker.tickets_of(user, TICKETS), len(broker.waiting()))


def with_standings(broker: Broker, found: Sequence[Ticket], of: int) -> OwnTickets:
    """These tickets of a member, newest first, with their places among ``of`` that wait.

    The line has its own view of the store and may ask another scheduler: call it outside
    transactions.
    """
    waiting = [ticket for ticket in found if not ticket.outcome]
    # Who does not wait needs no estimate, for which the line learns from thousands of sessions.
    standings = broker.standings() if waiting else {}
    return OwnTickets(
        now=broker.clock(),
        waiting=tuple((ticket, standings.get(ticket.id)) for ticket in reversed(waiting)),
        ended=tuple(ticket for ticket in found if ticket.outcome),
        of=len(standings) if waiting else of,
    )


def lease_figures(
    broker: Broker, leases: Collection[Lease], now: datetime
) -> tuple[LeaseFigures, ...]:
    """Leases with their cost up to ``now``."""
    stops = broker.dry_stops(leases)
    return tuple(
        LeaseFigures(
            lease=lease,
            cost=lease.charged + rules.charge_due(lease, now),
            stops_at=stops.get(lease.id),
        )
        for lease in leases
    )


def all_funds(
    broker: Broker,
    accounts: Collection[Account],
    opened: Collection[Lease],
    now: datetime,
    warn_minutes: Sequence[float],
) -> tuple[Funds, ...]:
    """Several accounts; what of them ends is looked at where something runs that costs."""
    ending = broker.ending_of({lease.account for lease in opened if lease.rate})
    return tuple(
        funds(account, opened, now, warn_minutes, _told(ending.get(account.name, ())))
        for account in accounts
    )


def ending_of(broker: Broker, account: str) -> tuple[Ending, ...]:
    """What of an account's balance ends."""
    return _told(broker.ending_of([account]).get(account, ()))


def _told(ending: Collection[tuple[datetime, int]]) -> tuple[Ending, ...]:
    return tuple(Ending(*some) for some in ending)


def funds(
    account: Account,
    opened: Collection[Lease],
    now: datetime,
    warn_minutes: Sequence[float],
    ending: tuple[Ending, ...] = (),
) -> Funds:
    """An account with all that its running leases owe up to ``now`` taken off; ``ending``: what
    of its balance ends."""
    mine = [lease for lease in opened if lease.account == account.name]
    rate = sum(lease.rate for lease in mine if lease.state is LeaseState.RUNNING)
    dues = {lease.id: rules.charge_due(lease, now) for lease in mine}
    held = sum(max(0, lease.hold - lease.charged - dues[lease.id]) for lease in mine)
    current = replace(account, balance=account.balance - sum(dues.values()), held=held)
    spendable = current.balance + min((s.overdraft for s in mine if s.rate), default=0)
    lasts = lots.lasts([(some.ends_at - now, some.left) for some in ending], spendable, rate)
    return Funds(
        account=current,
        rate=rate,
        lasts=lasts,
        dry_at=rules.after(now, lasts),
        warning=due_warning(warn_minutes, lasts),
        ending=ending,
    )


def ending(mine: Member, warn_minutes: Sequence[float]) -> tuple[LeaseFigures, ...]:
    """The member's servers whose session ends so soon that the page warns of it."""
    return tuple(some for some in mine.running if ends_soon(some, mine.now, warn_minutes))


def ends_soon(some: LeaseFigures, now: datetime, warn_minutes: Sequence[float]) -> bool:
    """Whether a server's session ends so soon that its member is warned."""
    end, seconds = some.lease.ends_at, some.lease.seconds
    if end is None or seconds is None or not some.lease.started_at or some.lease.outcome:
        return False
    minutes = [m for m in warn_minutes if 60 * m < seconds]
    return due_warning(minutes, end - now) is not None


def due_warning(minutes: Sequence[float], left: timedelta | None) -> float | None:
    """The smallest of ``minutes`` that covers the time left; None when none does."""
    if left is None:
        return None
    return min((m for m in minutes if left <= timedelta(minutes=m)), default=None)
