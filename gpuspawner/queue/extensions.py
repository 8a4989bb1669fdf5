"""Extensions: a session's time starts again, unless a waiting ticket would start later."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime
from functools import partial
from types import MappingProxyType

import sqlalchemy as sa

from ..core.errors import CannotExtend, GPUSpawnerError, Refused
from ..core.units import DeviceCount, format_credits
from ..db.clock import Timekeeper
from ..db.engine import Store
from ..devices.closures import Closure
from ..leases import repository as leases_repository
from ..leases.host_resources import NOTHING, HostAmount
from ..leases.models import Lease, LeaseState
from ..leases.service import LeaseService
from ..leases.sessions import format_session_end, is_over, note_lease, session_end_of
from ..ledger import repository as ledger_repository
from ..ledger import rules as ledger_rules
from ..ledger.credit_policy import SESSION
from ..ledger.settings import GPUCredits
from .delegation import DelegationService
from .host_admission import HostUse
from .kinds import NO_KIND, count_kinds, subtract
from .models import Decision, QueueLimits, RunningLease, WaitingTicket
from .positions import PositionService
from .scheduler import Scheduler
from .settings import GPUQueue

EXACT = 1.0
"""Two planned starts that differ by at most this many seconds count as the same."""

PLANNED = 100
"""How many starts are planned for the check; tickets behind them count as delayed."""


def delayed(
    scheduler: Scheduler,
    lease_id: str,
    ends_at: float,
    now: float,
    free: Mapping[str, DeviceCount],
    drained: Mapping[str, float] = MappingProxyType({}),
    host: HostUse | None = None,
    reserved: HostAmount = NOTHING,
) -> list[WaitingTicket]:
    """Return the tickets that would start later if the lease continued until ``ends_at``.

    Times are in seconds since 1970; ``free`` counts devices by kind; ``drained`` are the leases
    whose devices nobody gets next, each with infinity; ``host`` is what is used of it, and
    ``reserved`` what the lease has of that. A ticket without a planned
    start that could use these devices may well start later, and is included. Tickets of the lease's
    own member are not: that is their choice. The scheduler is left unchanged.
    """
    lease = scheduler.running.get(lease_id)
    member = lease.member if lease else ""
    others = [ticket for ticket in scheduler.waiting.values() if ticket.member != member]
    if not others or lease is None:
        return others  # for devices that this process does not know, nobody can say
    decide = partial(
        scheduler.decide, now, free, planned=PLANNED, reasons=True, likely_ends=drained, host=host
    )
    before = decide()
    scheduler.extended(lease_id, ends_at)
    try:
        after = decide()
    finally:
        scheduler.extended(lease_id, lease.ends_at)
    started = count_kinds(each for held in after.takes.values() for each in held.items())
    left = subtract(free, started)
    return [
        ticket
        for ticket in others
        if (reserved and ticket.id in before.waits_for_host)
        or _starts_later(ticket, lease, before, after, left)
    ]


def too_many_hours(
    running: Collection[RunningLease], lease: Lease, ends_at: float, now: float, limits: QueueLimits
) -> str:
    """Return why ``limits`` do not allow the lease to continue until ``ends_at``, or "".

    ``running`` are all leases to which these limits apply together, including this one.
    """
    if limits.gpu_hours is None:
        return ""
    held = float(lease.device_equivalents) * (ends_at - now)
    for other in running:
        if other.id != lease.id and other.ends_at is not None:
            held += other.equivalents * max(0.0, other.ends_at - now)
    if held <= 3600 * limits.gpu_hours:
        return ""
    return (
        f"{limits.gpu_hours:g} GPU-hours may be held at once, and with it they would be "
        f"{held / 3600:.1f}"
    )


def drained(lease: Lease, closed: Mapping[str, Closure]) -> str:
    """Return why maintenance of one of the lease's devices forbids it, or ""."""
    for device in lease.devices:
        if found := closed.get(device.uuid):
            why = f" ({found.reason})" if found.reason else ""
            return f"GPU {device.index} is needed for maintenance after this session{why}"
    return ""


def who_waits(tickets: Collection[WaitingTicket], lease: Lease) -> str:
    """Format who waits: ``2 members wait for this GPU and would start later``."""
    members = len({ticket.member for ticket in tickets})
    what = "this GPU" if len(lease.devices) == 1 else "these GPUs"
    who = "1 member waits" if members == 1 else f"{members} members wait"
    return f"{who} for {what} and would start later"


def _starts_later(
    ticket: WaitingTicket,
    lease: RunningLease,
    before: Decision,
    after: Decision,
    left: Mapping[str, DeviceCount],
) -> bool:
    """Return True if the ticket would start later; ``left`` are the devices nobody needs now."""
    if ticket.id in after.starts:
        return False
    if ticket.id in before.starts:
        return True
    for starts, now in ((before.latest, after.latest), (before.planned, after.planned)):
        start, then = starts.get(ticket.id), now.get(ticket.id)
        if start is not None and (then is None or then > start + EXACT):
            return True
    if ticket.id in before.planned:
        return False
    if ticket.id in before.held_back:
        if ticket.group and ticket.group == lease.group:
            return True  # held back by a limit that the lease itself may use up
        if any(left.get(kind, 0) >= ticket.devices for kind in ticket.kinds):
            return False  # held back by a limit alone
    return NO_KIND in ticket.kinds or bool(ticket.kinds & lease.held.keys())


@dataclass(eq=False)
class ExtensionService:
    """Extends sessions."""

    store: Store
    clock: Timekeeper
    settings: GPUQueue
    credits: GPUCredits
    _: KW_ONLY
    positions: PositionService
    delegation: DelegationService
    leases: LeaseService
    log: logging.Logger

    def __post_init__(self) -> None:
        self.line = self.positions.line

    def extend(self, lease_id: str, *, actor: str) -> Lease:
        """Extend a session so that its full original length starts again now.

        A lease without an end stays as it is, and an end never moves to an earlier time. ``actor``
        is a member's or an admin's name. Raises UnknownLease, or CannotExtend if a waiting ticket
        would start later.
        """
        # Before the transaction, not in it: the external scheduler may take long to answer.
        if self.delegation.delegate is None:
            return self._extend_here(lease_id, actor)
        known = self.store.run(lambda connection: leases_repository.get(connection, lease_id))
        self.delegation.extend(replace(known, extended=_longer(known, self.clock())))
        try:
            return self._extend_here(lease_id, actor)
        except Refused:
            with suppress(GPUSpawnerError):  # a job that could last longer than its session
                self.delegation.extend(known)
            raise

    def _extend_here(self, lease_id: str, actor: str) -> Lease:
        with self.line.lock:
            look = self.positions.sync()
            with self.store.write() as connection:
                lease = leases_repository.get(connection, lease_id, lock=True)
                now = self.clock()
                longer = _longer(lease, now)
                if longer == lease.extended:
                    return lease
                extended = replace(lease, extended=longer, told_minutes=None)
                hold = self._longer_hold(connection, extended)
                self._must_be_covered(connection, lease, now)
                # In this transaction: nobody joins the queue between the check and the extension.
                self.line.sync(connection, look, now)
                self._must_delay_nobody(extended, now)
                leases_repository.update(
                    connection, lease_id, extended=longer, hold=hold, told_minutes=None
                )
                if actor != lease.server.user:
                    note_lease(
                        connection, lease, "extend", actor, format_session_end(extended, now), now
                    )
        self.log.info("Lease %s of %s ends at %s", lease_id, lease.server, extended.ends_at)
        return extended

    # Helpers.

    def _must_delay_nobody(self, extended: Lease, now: datetime) -> None:
        """Raise CannotExtend if anybody would be delayed; ``extended`` is the lease as extended."""
        end, at = session_end_of(extended).timestamp(), now.timestamp()
        running = self.line.scheduler.running.values()
        mine = [x for x in running if x.member == extended.server.user]
        groups = [x for x in running if extended.group and x.group == extended.group]
        limits = zip((mine, groups), self.settings.limits_of(extended.group), strict=True)
        free = self.line.supply.grantable
        late = delayed(
            self.line.scheduler,
            extended.id,
            end,
            at,
            free,
            self.line.drained(),
            host=self.line.host_use,
            reserved=extended.host if self.line.budget is not None else NOTHING,
        )
        reasons = [
            drained(extended, self.line.closed),
            *(too_many_hours(some, extended, end, at, limit) for some, limit in limits),
            who_waits(late, extended) if late else "",
        ]
        if why := next(filter(None, reasons), ""):
            raise CannotExtend(why=why)

    def _must_be_covered(self, connection: sa.Connection, lease: Lease, now: datetime) -> None:
        """Raise CannotExtend if a session could be extended for ever without credits."""
        if lease.when_dry != SESSION:
            return
        balance = self.leases.payer_now(connection, lease.account, now).balance
        needed = ledger_rules.hold_for(lease.rate, self.credits.lead(None))
        if not ledger_rules.can_afford(balance, needed):
            sums = f"{format_credits(balance)} credits left, and needs {format_credits(needed)}"
            raise CannotExtend(why=f"{lease.account} has {sums}")

    def _longer_hold(self, connection: sa.Connection, extended: Lease) -> int:
        """Return the hold of the extended session. Raises CannotExtend."""
        if not self.credits.hold_session:
            return extended.hold
        whole = self.credits.lead((extended.seconds or 0) + extended.extended)
        hold = max(extended.hold, ledger_rules.hold_for(extended.rate, whole))
        missing = hold - max(extended.hold, extended.charged)
        available = ledger_repository.get_account(connection, extended.account).available
        if not ledger_rules.can_afford(available, missing):
            sums = f"{format_credits(missing)} credits more, and has {format_credits(available)}"
            raise CannotExtend(why=f"{extended.account} needs {sums}")
        return hold


def _longer(lease: Lease, now: datetime) -> int:
    """Return ``extended`` if the full length starts again now. Raises CannotExtend."""
    if lease.state is LeaseState.ENDED:
        raise CannotExtend(why="it has ended")
    if lease.outcome or is_over(lease, now):
        raise CannotExtend(why="its server is being stopped")
    if lease.started_at is None:
        raise CannotExtend(why="its server is not up yet, and its time begins then")
    if lease.seconds is None:
        return lease.extended
    return max(lease.extended, math.ceil((now - (lease.up_since or now)).total_seconds()))
