"""What pages and JSON show, read from the services. Blocks: use :meth:`Services.run`.

The accounting service charges once a minute; what is shown here is up to the second.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from ..core import weeks as core_weeks
from ..core.errors import UnknownAccount
from ..db.audit_log import AuditEntry
from ..devices.closures import GRANTING, Closure
from ..devices.snapshots import DeviceView, Overview
from ..leases.models import Lease, LeaseState
from ..ledger import lots
from ..ledger import rules as ledger_rules
from ..ledger.models import Account, member_account
from ..ledger.service import Payers
from ..ledger.statements import EntryPage
from ..ledger.usage import LeaseUse
from ..members.service import EndedMembership
from ..monitoring.charts import DeviceCurves, of_leases
from ..monitoring.health_service import OnSick
from ..monitoring.service import Resting
from ..queue.models import Ranked, Ticket
from ..queue.standing import Standing
from ..services import Services
from ..storage.repository import Folder
from ..storage.service import Held

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
    trail: tuple[AuditEntry, ...]
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


def member(services: Services, user: str, warn_minutes: Sequence[float]) -> Member:
    """The figures of one member."""
    now = services.clock()
    opened = services.leases.open_leases()
    account = services.ledger.member(user)
    past = services.reports.find_leases(user=user, limit=SESSIONS).found
    return Member(
        now=now,
        funds=funds(account, opened, now, warn_minutes, ending_of(services, account.name)),
        running=lease_figures(services, [s for s in opened if s.server.user == user], now),
        sessions=lease_figures(services, [s for s in past if s.state is LeaseState.ENDED], now),
    )


def everyone(services: Services, warn_minutes: Sequence[float]) -> Everyone:
    """The figures of all open leases, and of the accounts that pay for them."""
    now = services.clock()
    opened = services.leases.open_leases()
    paying = {lease.account for lease in opened}
    return Everyone(
        now=now,
        accounts=all_funds(
            services,
            services.reports.find_accounts(limit=PAYING, among=paying).found,
            opened,
            now,
            warn_minutes,
        ),
        running=lease_figures(services, opened, now),
    )


def device_figures(
    services: Services, user: str, admin: bool
) -> tuple[Overview, tuple[DeviceFigures, ...]]:
    """All devices; whose a leased one is, is told to its member and to admins."""
    overview = services.monitoring.overview()
    opened = {lease.id: lease for lease in services.leases.open_leases()}
    found = []
    for view in overview.devices:
        lease = opened.get(view.lease_id or "")
        told = lease if lease and (admin or lease.server.user == user) else None
        detail = view.detail if admin else ""
        rate = services.prices.rates.rate_of(view.device.model)
        found.append(DeviceFigures(view, rate, told, detail))
    return overview, tuple(found)


def whole_line(services: Services) -> WholeLine:
    """Everybody's tickets and what admins changed of late."""
    return WholeLine(
        now=services.clock(),
        tickets=tuple(InLine(*entry) for entry in services.positions.order()),
        closed=services.devices.closures(),
        trail=tuple(services.audit.trail(CHANGES)),
    )


def own_tickets(services: Services, user: str) -> OwnTickets:
    """A member's tickets: those that wait, and the last ones that ended."""
    return with_standings(
        services, services.queue.tickets_of(user, TICKETS), len(services.queue.waiting())
    )


def with_standings(services: Services, found: Sequence[Ticket], of: int) -> OwnTickets:
    """These tickets of a member, newest first, with their places among ``of`` that wait.

    The line has its own view of the store and may ask another scheduler: call it outside
    transactions.
    """
    waiting = [ticket for ticket in found if not ticket.outcome]
    # Who does not wait needs no estimate, for which the line learns from thousands of sessions.
    standings = services.positions.standings() if waiting else {}
    return OwnTickets(
        now=services.clock(),
        waiting=tuple((ticket, standings.get(ticket.id)) for ticket in reversed(waiting)),
        ended=tuple(ticket for ticket in found if ticket.outcome),
        of=len(standings) if waiting else of,
    )


def lease_figures(
    services: Services, leases: Collection[Lease], now: datetime
) -> tuple[LeaseFigures, ...]:
    """Leases with their cost up to ``now``."""
    stops = services.exhaustion.dry_stops(leases)
    return tuple(
        LeaseFigures(
            lease=lease,
            cost=lease.charged + ledger_rules.charge_due(lease, now),
            stops_at=stops.get(lease.id),
        )
        for lease in leases
    )


def all_funds(
    services: Services,
    accounts: Collection[Account],
    opened: Collection[Lease],
    now: datetime,
    warn_minutes: Sequence[float],
) -> tuple[Funds, ...]:
    """Several accounts; what of them ends is looked at where something runs that costs."""
    ending = services.ledger.ending_of({lease.account for lease in opened if lease.rate})
    return tuple(
        funds(account, opened, now, warn_minutes, _told(ending.get(account.name, ())))
        for account in accounts
    )


def ending_of(services: Services, account: str) -> tuple[Ending, ...]:
    """What of an account's balance ends."""
    return _told(services.ledger.ending_of([account]).get(account, ()))


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
    dues = {lease.id: ledger_rules.charge_due(lease, now) for lease in mine}
    held = sum(max(0, lease.hold - lease.charged - dues[lease.id]) for lease in mine)
    current = replace(account, balance=account.balance - sum(dues.values()), held=held)
    spendable = current.balance + min((s.overdraft for s in mine if s.rate), default=0)
    lasts = lots.lasts([(some.ends_at - now, some.left) for some in ending], spendable, rate)
    return Funds(
        account=current,
        rate=rate,
        lasts=lasts,
        dry_at=ledger_rules.after(now, lasts),
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


@dataclass(frozen=True, slots=True)
class Mine:
    """A folder as one member sees it."""

    folder: Folder
    called: str
    """Its name below ``~/shared``; nothing when they do not have it yet."""
    owner: bool
    write: bool


def folders_of(services: Services, user: str) -> tuple[list[Mine], list[Mine]]:
    """What somebody has, and what they are invited to."""
    called = {mount.folder_id: mount.name for mount in services.shared_folders.folder_mounts(user)}
    found = [
        Mine(
            folder=folder,
            called=called.get(folder.id, ""),
            owner=folder.owner == user and folder.left_at is None,
            write=folder.writes(user),
        )
        for folder in services.shared_folders.folders(user)
        if folder.owner != user or folder.left_at is None
    ]
    return [some for some in found if some.called], [some for some in found if not some.called]


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
    use: LeaseUse


@dataclass(frozen=True, slots=True)
class AccountCredits:
    """An account's past, and what is left of it."""

    statement: EntryPage
    weeks: tuple[Week, ...]

    @property
    def used(self) -> bool:
        """Whether anything was used in these weeks."""
        return any(any(week.use) for week in self.weeks)


def credits_of_account(
    services: Services, account: str, before: int | None = None
) -> AccountCredits:
    """The account's statement as people read it, and its last weeks; empty when not opened."""
    bounds = core_weeks.last_weeks(services.clock(), WEEKS)
    used = services.reports.use_of_account(account, bounds)
    told = (Week(*parts) for parts in zip(bounds, bounds[1:], used, strict=False))
    return AccountCredits(account_statement(services, account, before), tuple(told))


def account_statement(services: Services, account: str, before: int | None = None) -> EntryPage:
    """A page of the statement as people read it; empty when the account is not opened yet."""
    try:
        return services.reports.statement_page(account, before, LINES, folded=True)
    except UnknownAccount:  # a member's opens with the first sign-in
        return EntryPage((), None)


def lasting(some: Funds, overview: Overview, now: datetime) -> tuple[Lasting, ...]:
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


def funds_of(services: Services, account: str, warn_minutes: tuple[float, ...]) -> Funds:
    """Balance and holds of an account up to this second. Raises UnknownAccount."""
    found: Account = services.ledger.account(account)
    ending = ending_of(services, account)
    return funds(found, services.leases.open_leases(), services.clock(), warn_minutes, ending)


def running_of(services: Services, account: str) -> tuple[LeaseFigures, ...]:
    """The servers that an account pays for just now."""
    mine = [lease for lease in services.leases.open_leases() if lease.account == account]
    return lease_figures(services, mine, services.clock())


@dataclass(frozen=True, slots=True)
class MemberView:
    """The member's figures, as ``member.html`` names them."""

    mine: Member
    overview: Overview
    devices: tuple[DeviceFigures, ...]
    tickets: OwnTickets
    past: AccountCredits
    ended: EndedMembership | None
    files: list[Held]
    folders: list[Mine]
    offered: list[Mine]
    payers: Payers
    resting: list[Resting]
    sick: list[OnSick]
    lost: list[Lease]
    curves: dict[str, list[DeviceCurves]]


def look(
    services: Services, user: str, groups: Collection[str], warn_minutes: Sequence[float]
) -> MemberView:
    """Read everything in one transaction, so that all figures are of one moment.

    Devices, places in line and directories are looked at before and after it: a driver, another
    scheduler or a file system may take long.
    """
    services.devices.look()
    with services.store.view():
        mine = member(services, user, warn_minutes)
        overview, devices = device_figures(services, user, False)
        tickets = services.queue.tickets_of(user, TICKETS)
        past = credits_of_account(services, member_account(user))
        had, offered = folders_of(services, user)
        ended = services.members.membership_end(user)
        spaces = services.storage.workspaces_of(user)
        payers = services.ledger.payers(user, groups)
        resting, sick, lost = (
            services.idle.resting(user),
            services.health.sick_of(user),
            services.restarts.lost_of(user),
        )
        drawn = of_leases(services, [some.lease for some in mine.running])
    return MemberView(
        mine=mine,
        overview=overview,
        devices=devices,
        tickets=with_standings(services, tickets, overview.waiting),
        past=past,
        ended=ended,
        files=services.storage.held_in(spaces),
        folders=had,
        offered=offered,
        payers=payers,
        resting=resting,
        sick=sick,
        lost=lost,
        curves=drawn,
    )
