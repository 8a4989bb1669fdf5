"""Figures for pages and JSON, exact to the second. Blocks: use :meth:`Services.run`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from ..core import times as core_weeks
from ..core.errors import UnknownAccount
from ..db.audit_log import AuditEntry
from ..devices.closures import GRANTING, Closure
from ..devices.snapshots import DeviceView, Overview
from ..leases.models import EndReason, Lease, LeaseState, SessionEnd, first_end
from ..ledger import lots
from ..ledger import rules as ledger_rules
from ..ledger.models import Account, member_account
from ..ledger.reports import EntryPage
from ..ledger.service import Payers
from ..ledger.usage import LeaseUse
from ..members.service import EndedMembership
from ..monitoring.charts import DeviceCurves, of_leases
from ..monitoring.health_service import AffectedServer
from ..monitoring.resource_totals import ResourceTotals
from ..monitoring.service import IdleServer
from ..queue.models import RankedTicket, Ticket
from ..queue.rank import QueuePosition
from ..services import Services
from ..storage.repository import Folder
from ..storage.service import WorkspaceUse

SESSIONS = 10
TICKETS = 20
PAYING = 200
CHANGES = 50


@dataclass(frozen=True, slots=True)
class LeaseFigures:
    """A lease and its cost so far."""

    lease: Lease
    cost: int
    """Microcredits until now, or until the lease ended."""
    end: SessionEnd | None = None
    """When and why a running session ends by itself; None if it does not, or is being stopped."""
    usage: ResourceTotals | None = None
    """What it used of CPU, memory, disk and network; None if it was never measured."""

    @property
    def stops_at(self) -> datetime | None:
        """When the server stops whose member was told that its account ran dry."""
        return self.end.at if self.end and self.lease.warned_at else None

    @property
    def since(self) -> datetime:
        """When the server started, or when the lease was granted if it never did."""
        return self.lease.started_at or self.lease.granted_at


@dataclass(frozen=True, slots=True)
class ExpiringCredits:
    """Credits that expire."""

    ends_at: datetime
    left: int
    """Microcredits."""


@dataclass(frozen=True, slots=True)
class Funds:
    """An account's current figures."""

    account: Account
    rate: int
    """Microcredits per hour of all its running leases."""
    lasts: timedelta | None
    """How long the balance lasts at that rate, with the overdraft that all leases allow.

    None if nothing that costs credits is running.
    """
    dry_at: datetime | None
    warning: float | None = None
    """The warning that is due, in minutes left; None if none is due."""
    ending: tuple[ExpiringCredits, ...] = ()
    """Parts of the balance that expire, the earliest first."""


@dataclass(frozen=True, slots=True)
class Member:
    """All figures of a member's own page."""

    now: datetime
    funds: Funds
    running: tuple[LeaseFigures, ...]
    sessions: tuple[LeaseFigures, ...]


@dataclass(frozen=True, slots=True)
class AllSessions:
    """All open leases and the accounts that pay for them, for admins."""

    now: datetime
    accounts: tuple[Funds, ...]
    running: tuple[LeaseFigures, ...]


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """A device as one user may see it."""

    view: DeviceView
    rate: int
    lease: Lease | None
    """The device's lease if it is the user's own or the user is an admin, else None."""
    detail: str


@dataclass(frozen=True, slots=True)
class InLine:
    """A waiting ticket, with its score and position."""

    ticket: Ticket
    ranked: RankedTicket
    standing: QueuePosition


@dataclass(frozen=True, slots=True)
class QueueView:
    """The queue as admins see it."""

    now: datetime
    tickets: tuple[InLine, ...]
    """The next one first."""
    closed: dict[str, Closure]
    """Drained devices and a pause of granting, by subject."""
    trail: tuple[AuditEntry, ...]
    """Audit entries, newest first."""

    @property
    def paused(self) -> Closure | None:
        """Why granting is paused; None if it is not."""
        return self.closed.get(GRANTING)

    def find(self, ticket_id: str) -> InLine | None:
        """Return the waiting ticket with this id, or None."""
        return next((some for some in self.tickets if some.ticket.id == ticket_id), None)


@dataclass(frozen=True, slots=True)
class OwnTickets:
    """A member's own tickets."""

    now: datetime
    waiting: tuple[tuple[Ticket, QueuePosition | None], ...]
    """A ticket without a standing was granted or ended a moment ago."""
    ended: tuple[Ticket, ...]
    """Newest first."""
    of: int
    """Number of waiting tickets of all members."""


def member(services: Services, user: str, warn_minutes: Sequence[float]) -> Member:
    """Return the figures of one member."""
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


def everyone(services: Services, warn_minutes: Sequence[float]) -> AllSessions:
    """Return the figures of all open leases and of the accounts that pay for them."""
    now = services.clock()
    opened = services.leases.open_leases()
    paying = {lease.account for lease in opened}
    return AllSessions(
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
    """Return all devices; members only see their own leases on them, admins see all."""
    overview = services.monitoring.overview()
    opened = {lease.id: lease for lease in services.leases.open_leases()}
    found = []
    for view in overview.devices:
        lease = opened.get(view.lease_id or "")
        told = lease if lease and (admin or lease.server.user == user) else None
        detail = view.detail if admin else ""
        rate = services.prices.rates.rate_of(view.device.model, part=view.device.part)
        found.append(DeviceFigures(view, rate, told, detail))
    return overview, tuple(found)


def whole_line(services: Services) -> QueueView:
    """Return all waiting tickets, closed devices and recent changes by admins."""
    return QueueView(
        now=services.clock(),
        tickets=tuple(InLine(*entry) for entry in services.positions.order()),
        closed=services.devices.closures(),
        trail=tuple(services.audit.trail(CHANGES)),
    )


def own_tickets(services: Services, user: str) -> OwnTickets:
    """Return a member's waiting tickets and the last ones that ended."""
    return with_standings(
        services, services.queue.tickets_of(user, TICKETS), len(services.queue.waiting())
    )


def with_standings(services: Services, found: Sequence[Ticket], of: int) -> OwnTickets:
    """Return a member's tickets with their positions among ``of`` waiting ones.

    ``found`` is sorted newest first. Call this outside transactions: the queue reads the store
    itself and may call an external scheduler.
    """
    waiting = [ticket for ticket in found if not ticket.outcome]
    # Estimates are expensive, as they use thousands of sessions: skip them if nothing waits.
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
    """Return leases with their cost until ``now``, and what they used of their machine."""
    ends = session_ends(services, leases, now)
    usage = services.resources.totals_of([lease.id for lease in leases])
    return tuple(
        LeaseFigures(
            lease=lease,
            cost=lease.charged + ledger_rules.charge_due(lease, now),
            end=ends.get(lease.id),
            usage=usage.get(lease.id),
        )
        for lease in leases
    )


def session_ends(
    services: Services, leases: Collection[Lease], now: datetime
) -> dict[str, SessionEnd]:
    """Return when and why each running session ends by itself, by lease id.

    By its time limit, its credits at the account's present rate, or the end of its membership,
    whichever comes first.
    """
    running = [x for x in leases if x.state is LeaseState.RUNNING and not x.outcome]
    if not running:
        return {}
    credits = services.exhaustion.credit_ends(running, now)
    members = services.roster.membership_stops({lease.server.user for lease in running})
    found = {
        lease.id: first_end(lease.ends_at, credits.get(lease.id), members.get(lease.server.user))
        for lease in running
    }
    return {lease_id: end for lease_id, end in found.items() if end}


def all_funds(
    services: Services,
    accounts: Collection[Account],
    opened: Collection[Lease],
    now: datetime,
    warn_minutes: Sequence[float],
) -> tuple[Funds, ...]:
    """Return the figures of several accounts; expiring credits only of those that pay now."""
    ending = services.ledger.ending_of({lease.account for lease in opened if lease.rate})
    return tuple(
        funds(account, opened, now, warn_minutes, _told(ending.get(account.name, ())))
        for account in accounts
    )


def ending_of(services: Services, account: str) -> tuple[ExpiringCredits, ...]:
    """Return the credits of an account that expire."""
    return _told(services.ledger.ending_of([account]).get(account, ()))


def _told(ending: Collection[tuple[datetime, int]]) -> tuple[ExpiringCredits, ...]:
    return tuple(ExpiringCredits(*some) for some in ending)


def funds(
    account: Account,
    opened: Collection[Lease],
    now: datetime,
    warn_minutes: Sequence[float],
    ending: tuple[ExpiringCredits, ...] = (),
) -> Funds:
    """Return an account's figures, with all charges that are due until ``now`` subtracted.

    ``ending`` are the credits of the account that expire.
    """
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


def ends_soon(some: LeaseFigures, now: datetime, warn_minutes: Sequence[float]) -> bool:
    """Return True if a session's time limit ends it so soon that its member is warned."""
    end, seconds = some.end, some.lease.seconds
    if end is None or end.reason is not EndReason.TIME or seconds is None:
        return False
    minutes = [m for m in warn_minutes if 60 * m < seconds]
    return due_warning(minutes, end.at - now) is not None


def due_warning(minutes: Sequence[float], left: timedelta | None) -> float | None:
    """Return the smallest of ``minutes`` that covers the time left, or None."""
    if left is None:
        return None
    return min((m for m in minutes if left <= timedelta(minutes=m)), default=None)


@dataclass(frozen=True, slots=True)
class MyFolder:
    """A shared folder as one member sees it."""

    folder: Folder
    called: str
    """Its name below ``~/shared``; empty if the member has not accepted it."""
    owner: bool
    write: bool


def files_of(
    services: Services, user: str
) -> tuple[list[WorkspaceUse], list[MyFolder], list[MyFolder]]:
    """Return the use of a member's workspaces, their folders, and those that are offered."""
    with services.store.view():
        spaces = services.storage.workspaces_of(user)
        had, offered = folders_of(services, user)
    return services.storage.held_in(spaces), had, offered


def folders_of(services: Services, user: str) -> tuple[list[MyFolder], list[MyFolder]]:
    """Return the folders that a member has, and those that they are invited to."""
    called = {mount.folder_id: mount.name for mount in services.shared_folders.folder_mounts(user)}
    found = [
        MyFolder(
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
"""Statement entries per page."""

NEWEST = 15
"""Statement entries beside an account's balance."""

WEEKS = 8
"""Weeks in the chart."""


@dataclass(frozen=True, slots=True)
class Runway:
    """How many hours a balance pays for one kind of device."""

    model: str
    memory_bytes: int
    rate: int
    """Microcredits per GPU-hour."""
    lasts: timedelta | None
    """None if the device costs nothing."""


@dataclass(frozen=True, slots=True)
class Week:
    """One bar of the chart."""

    start: datetime
    end: datetime
    use: LeaseUse


@dataclass(frozen=True, slots=True)
class AccountCredits:
    """An account's statement and its last weeks of use."""

    statement: EntryPage
    weeks: tuple[Week, ...]

    @property
    def used(self) -> bool:
        """True if anything was used in these weeks."""
        return any(any(week.use) for week in self.weeks)


def credits_of_account(services: Services, account: str, now: datetime) -> AccountCredits:
    """Return an account's newest statement lines and last weeks; empty if it is not opened yet."""
    bounds = core_weeks.last_weeks(now, WEEKS)
    used = services.reports.use_of_account(account, bounds)
    told = (Week(*parts) for parts in zip(bounds, bounds[1:], used, strict=False))
    return AccountCredits(account_statement(services, account, now, limit=NEWEST), tuple(told))


def account_statement(
    services: Services,
    account: str,
    now: datetime,
    before: int | None = None,
    limit: int = LINES,
) -> EntryPage:
    """Return a page of the statement, sessions' charges combined; empty if not opened yet."""
    try:
        return services.reports.folded_page(account, now, before, limit)
    except UnknownAccount:  # a member's first sign-in opens it
        return EntryPage((), None)


def lasting(some: Funds, overview: Overview, now: datetime) -> tuple[Runway, ...]:
    """Return how long an account's credits last on each kind of device, most memory first."""
    available = some.account.available
    ending = [(each.ends_at - now, each.left) for each in some.ending]
    return tuple(
        Runway(
            model=count.model,
            memory_bytes=count.memory_bytes,
            rate=count.rate,
            lasts=lots.lasts(ending, available, count.rate),
        )
        for count in overview.models
    )


@dataclass(frozen=True, slots=True)
class AccountFigures:
    """All figures of an account's own page."""

    now: datetime
    funds: Funds
    running: tuple[LeaseFigures, ...]
    """The open leases that it pays for."""
    past: AccountCredits


def account_figures(
    services: Services, account: str, warn_minutes: Sequence[float]
) -> AccountFigures:
    """Read an account in one transaction, so that its figures agree. Raises UnknownAccount."""
    with services.store.view():
        now = services.clock()
        opened = services.leases.open_leases()
        mine = [lease for lease in opened if lease.account == account]
        found, ending = services.ledger.account(account), ending_of(services, account)
        return AccountFigures(
            now=now,
            funds=funds(found, mine, now, warn_minutes, ending),
            running=lease_figures(services, mine, now),
            past=credits_of_account(services, account, now),
        )


def funds_of(services: Services, account: str, warn_minutes: Sequence[float]) -> Funds:
    """Return the current figures of an account. Raises UnknownAccount."""
    found: Account = services.ledger.account(account)
    ending = ending_of(services, account)
    return funds(found, services.leases.open_leases(), services.clock(), warn_minutes, ending)


@dataclass(frozen=True, slots=True)
class MemberView:
    """The member's figures, with the names that ``member.html`` uses."""

    mine: Member
    overview: Overview
    tickets: OwnTickets
    past: AccountCredits
    ended: EndedMembership | None
    files: list[WorkspaceUse]
    offered: list[MyFolder]
    payers: Payers
    resting: list[IdleServer]
    sick: list[AffectedServer]
    lost: list[Lease]
    curves: dict[str, list[DeviceCurves]]


def look(
    services: Services, user: str, groups: Collection[str], warn_minutes: Sequence[float]
) -> MemberView:
    """Read everything in one transaction, so that all figures are of the same moment.

    Devices are inspected before it, positions and directories after it, because a driver, an
    external scheduler or a file system may be slow.
    """
    services.devices.look()
    with services.store.view():
        mine = member(services, user, warn_minutes)
        overview = services.monitoring.overview().usable_by(groups, mine.now)
        tickets = services.queue.tickets_of(user, TICKETS)
        past = credits_of_account(services, member_account(user), mine.now)
        offered = folders_of(services, user)[1]
        ended = services.members.membership_end(user)
        spaces = services.storage.workspaces_of(user)
        payers = services.ledger.payers(user, groups)
        resting, sick = services.idle.resting(user), services.health.sick_of(user)
        lost = services.restarts.lost_of(user)
        drawn = of_leases(services, [some.lease for some in mine.running])
    return MemberView(
        mine=mine,
        overview=overview,
        tickets=with_standings(services, tickets, overview.waiting),
        past=past,
        ended=ended,
        files=services.storage.held_in(spaces),
        offered=offered,
        payers=payers,
        resting=resting,
        sick=sick,
        lost=lost,
        curves=drawn,
    )
