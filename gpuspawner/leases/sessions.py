"""Sessions: how long they last, warnings, extensions and stops.

What is ordered here is done by the accounting service, which asks the Hub to stop the server
until it is gone. So every order is in the store, with its reason, before anything happens.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from ..core.errors import CannotExtend, CannotStop, GPUSpawnerError, Refused
from ..core.units import format_credits
from ..devices import closures
from ..devices.closures import Closure
from ..devices.service import checked_reason
from ..devices.snapshots import clock
from ..ledger import repository as ledger_repository
from ..ledger import rules as ledger_rules
from ..ledger.credit_policy import SESSION
from ..notifications import repository as notifications_repository
from ..notifications.models import Notice, NoticeKind
from ..queue import repository as queue_repository
from ..queue.models import Decision, QueueLimits, Running, Waiting
from ..queue.scheduler import Scheduler
from ..queue.service import Queue
from . import repository
from .models import Lease, LeaseState

EXACT = 1.0
"""Seconds by which two planned starts may differ and still be the same."""

PLANNED = 100
"""Starts that are planned for the question; who is behind them counts as delayed."""

NO_KIND = ""
"""The kind of a request that no device seen by this process suits."""


def delayed(
    scheduler: Scheduler, lease_id: str, ends_at: float, now: float, free: Mapping[str, int]
) -> list[Waiting]:
    """Whoever waits and would start later if the lease went on until ``ends_at``.

    Times in seconds since 1970; ``free`` counts devices by kind. Who has no planned start, and
    could use these devices, may well start later, and is among them. The lease's own member is
    not: it is theirs to choose. Leaves the scheduler as it was.
    """
    lease = scheduler.running.get(lease_id)
    member = lease.member if lease else ""
    others = [ticket for ticket in scheduler.waiting.values() if ticket.member != member]
    if not others or lease is None:
        return others  # nobody can say what devices this process does not know
    before = scheduler.decide(now, free, planned=PLANNED, reasons=True)
    scheduler.extended(lease_id, ends_at)
    try:
        after = scheduler.decide(now, free, planned=PLANNED, reasons=True)
    finally:
        scheduler.extended(lease_id, lease.ends_at)
    left = Counter(free)
    for ticket_id, kind in after.on.items():
        left[kind] -= scheduler.waiting[ticket_id].devices
    return [ticket for ticket in others if _starts_later(ticket, lease, before, after, left)]


def too_many_hours(
    running: Collection[Running], lease: Lease, ends_at: float, now: float, limits: QueueLimits
) -> str:
    """Why ``limits`` forbid it that the lease, one of ``running``, goes on until ``ends_at``;
    empty when they do not. ``running`` are those that these limits hold for together."""
    if limits.gpu_hours is None:
        return ""
    held = len(lease.devices) * (ends_at - now)
    for other in running:
        if other.id != lease.id and other.ends_at is not None:
            held += other.devices * max(0.0, other.ends_at - now)
    if held <= 3600 * limits.gpu_hours:
        return ""
    return (
        f"{limits.gpu_hours:g} GPU-hours may be held at once, and with it they would be "
        f"{held / 3600:.1f}"
    )


def drained(lease: Lease, closed: Mapping[str, Closure]) -> str:
    """Why an admin's work on a device of the lease forbids it; empty when none does."""
    for device in lease.devices:
        if found := closed.get(device.uuid):
            why = f" ({found.reason})" if found.reason else ""
            return f"GPU {device.index} is needed for maintenance after this session{why}"
    return ""


def who_waits(tickets: Collection[Waiting], lease: Lease) -> str:
    """``2 members wait for this GPU and would start later``."""
    members = len({ticket.member for ticket in tickets})
    what = "this GPU" if len(lease.devices) == 1 else "these GPUs"
    who = "1 member waits" if members == 1 else f"{members} members wait"
    return f"{who} for {what} and would start later"


def _starts_later(
    ticket: Waiting, lease: Running, before: Decision, after: Decision, left: Mapping[str, int]
) -> bool:
    """``left`` are the devices that nobody needs now."""
    if ticket.id in after.starts:
        return False
    if ticket.id in before.starts:
        return True
    start, then = before.planned.get(ticket.id), after.planned.get(ticket.id)
    if start is not None:
        return then is None or then > start + EXACT
    if ticket.id in before.held_back:
        if ticket.group and ticket.group == lease.group:
            return True  # by a limit that the lease itself may use up
        if any(left.get(kind, 0) >= ticket.devices for kind in ticket.kinds):
            return False  # by a limit alone
    return NO_KIND in ticket.kinds or bool(ticket.kinds & lease.held.keys())


@dataclass(frozen=True, slots=True)
class DueSessions:
    """What is to be done about sessions now."""

    warn: tuple[Lease, ...] = ()
    """Whose member is to be told that the session ends soon."""
    over: tuple[Lease, ...] = ()
    """Whose time is over, and whose stop is not ordered yet."""
    stop: tuple[Lease, ...] = ()
    """Whose server is to be stopped: somebody ordered it."""


class SessionService(Queue):
    """The part of the broker that knows when a session ends."""

    def extend(self, lease_id: str, *, actor: str) -> Lease:
        """Let a session last as long from now as was asked for at first.

        A lease without an end stays as it is, and no end ever moves to an earlier time.
        ``actor``: a member's name or an admin's. Raises UnknownLease, or CannotExtend when
        anybody who waits would start later.
        """
        # Before, and not in the transaction: somebody else's programs may take long to answer.
        if self.delegate is None:
            return self._extend_here(lease_id, actor)
        known = self.store.run(lambda connection: repository.get(connection, lease_id))
        self._extend_there(replace(known, extended=_longer(known, self.clock())))
        try:
            return self._extend_here(lease_id, actor)
        except Refused:
            with suppress(GPUSpawnerError):  # a job that could last longer than its session
                self._extend_there(known)
            raise

    def _extend_here(self, lease_id: str, actor: str) -> Lease:
        with self.line.lock:
            look = self._sync()
            with self.store.write() as connection:
                lease = repository.get(connection, lease_id, lock=True)
                now = self.clock()
                longer = _longer(lease, now)
                if longer == lease.extended:
                    return lease
                extended = replace(lease, extended=longer, told_minutes=None)
                hold = self._longer_hold(connection, extended)
                self._must_be_covered(connection, lease, now)
                # In this transaction: nobody comes to the line between the question and the answer.
                self.line.sync(connection, look, now)
                self._must_delay_nobody(extended, now)
                repository.update(
                    connection, lease_id, extended=longer, hold=hold, told_minutes=None
                )
                if actor != lease.server.user:
                    note_lease(connection, lease, "extend", actor, _until(extended, now), now)
        self.log.info("Lease %s of %s ends at %s", lease_id, lease.server, extended.ends_at)
        return extended

    def claim(self, lease_id: str) -> Lease:
        """The member connected to a server from the queue. Too late is too late."""
        now = self.clock()
        with self.store.write() as connection:
            lease = repository.get(connection, lease_id, lock=True)
            if lease.claim_by is None or lease.outcome or lease.state is LeaseState.ENDED:
                return lease
            repository.update(connection, lease_id, claimed_at=now)
        return replace(lease, claimed_at=now)

    def no_show(self, lease_id: str) -> Lease:
        """Nobody connected in time: the server is to be stopped, and costs nothing.

        A lease that was claimed, or whose time for it is not over, stays as it is.
        """
        now = self.clock()
        with self.store.write() as connection:
            lease = repository.get(connection, lease_id, lock=True)
            if lease.claim_by is None or now < lease.claim_by or not goes_on(lease):
                return lease
            twice = queue_repository.no_shows_in_a_row(connection, lease.server.user) >= 1
            reason = f"nobody connected within {_minutes(lease.claim_seconds or 0)} of its start"
            return order_end(
                connection, lease, "no_show", reason, _no_show(lease, twice, now), self.log
            )

    def stop(self, lease_id: str, *, actor: str, reason: str) -> Lease:
        """Have a member's server stopped, for a reason that the member reads.

        Raises UnknownLease, InvalidRequest without a reason, or CannotStop when it has ended or
        its stop was ordered before.
        """
        reason = checked_reason(reason, needed=True)
        now = self.clock()
        with self.store.write() as connection:
            lease = repository.get(connection, lease_id, lock=True)
            if not goes_on(lease):
                raise CannotStop(why=_why_not(lease))
            return self._order_for_admin(connection, lease, "admin", actor, reason, now)

    def order_stop(self, lease_id: str, outcome: str, *, actor: str = "", reason: str) -> Lease:
        """Have a server stopped: ``outcome`` as in :attr:`gpuspawner.leases.models.Lease.outcome`.

        An earlier order, or an end, stays as it is. ``actor`` is an admin, for the audit trail.
        """
        now = self.clock()
        with self.store.write() as connection:
            lease = repository.get(connection, lease_id, lock=True)
            if not goes_on(lease):
                return lease
            return self._order_for_admin(connection, lease, outcome, actor, reason, now)

    # What the accounting service asks every other second.

    def due_sessions(self, warn_minutes: Sequence[float] = ()) -> DueSessions:
        """What is to be done now; each part has its own method, which looks again."""
        now = self.clock()
        watched = self.store.run(repository.with_an_end)
        return DueSessions(
            warn=tuple(x for x in watched if warning_due(x, now, warn_minutes) is not None),
            over=tuple(x for x in watched if _is_over(x, now)),
            stop=tuple(x for x in watched if x.outcome),
        )

    def warn_session(self, lease_id: str, warn_minutes: Sequence[float]) -> Lease | None:
        """Tell the member that the session ends soon, once for each of ``warn_minutes``.

        None when there is nothing to tell, else the lease with the warning that was given.
        """
        now = self.clock()
        with self.store.write() as connection:
            lease = repository.get(connection, lease_id, lock=True)
            due = warning_due(lease, now, warn_minutes)
            if due is None:
                return None
            repository.update(connection, lease_id, told_minutes=due)
            notifications_repository.add(connection, _ends_soon(lease, due, now))
        return replace(lease, told_minutes=due)

    def end_session(self, lease_id: str) -> Lease | None:
        """Order the stop of a server whose time is over; None when it is not, or was ordered."""
        now = self.clock()
        with self.store.write() as connection:
            lease = repository.get(connection, lease_id, lock=True)
            if not _is_over(lease, now):
                return None
            ended_at = _until(lease, now)
            told = _stopped(lease, "its time is over", f"It was to end at {ended_at}. {_KEPT}", now)
            reason = f"its time was over at {ended_at}"
            return order_end(connection, lease, "session_end", reason, told, self.log)

    # Steps of the above.

    def _must_delay_nobody(self, extended: Lease, now: datetime) -> None:
        """Raises CannotExtend; ``extended`` is the lease as it is to be."""
        end, at = _end_of(extended).timestamp(), now.timestamp()
        running = self.line.scheduler.running.values()
        mine = [x for x in running if x.member == extended.server.user]
        groups = [x for x in running if extended.group and x.group == extended.group]
        limits = zip((mine, groups), self.settings.queue.limits_of(extended.group), strict=True)
        free = self.line.supply.free
        late = delayed(self.line.scheduler, extended.id, end, at, free)
        reasons = [
            drained(extended, self.line.closed),
            *(too_many_hours(some, extended, end, at, limit) for some, limit in limits),
            who_waits(late, extended) if late else "",
        ]
        if why := next(filter(None, reasons), ""):
            raise CannotExtend(why=why)

    def _must_be_covered(self, connection: sa.Connection, lease: Lease, now: datetime) -> None:
        """A session that goes on without credits is longer only for what a start takes: else it
        would go on for ever. Raises CannotExtend."""
        if lease.when_dry != SESSION:
            return
        balance = self._payer_now(connection, lease.account, now).balance
        needed = ledger_rules.hold_for(lease.rate, self.settings.credits.lead(None))
        if not ledger_rules.can_afford(balance, needed):
            sums = f"{format_credits(balance)} credits left, and needs {format_credits(needed)}"
            raise CannotExtend(why=f"{lease.account} has {sums}")

    def _longer_hold(self, connection: sa.Connection, extended: Lease) -> int:
        """What a longer session holds, where sessions are held whole. Raises CannotExtend."""
        if not self.settings.credits.hold_session:
            return extended.hold
        whole = self.settings.credits.lead((extended.seconds or 0) + extended.extended)
        hold = max(extended.hold, ledger_rules.hold_for(extended.rate, whole))
        missing = hold - max(extended.hold, extended.charged)
        available = ledger_repository.get_account(connection, extended.account).available
        if not ledger_rules.can_afford(available, missing):
            sums = f"{format_credits(missing)} credits more, and has {format_credits(available)}"
            raise CannotExtend(why=f"{extended.account} needs {sums}")
        return hold

    def _order_for_admin(
        self,
        connection: sa.Connection,
        lease: Lease,
        outcome: str,
        actor: str,
        reason: str,
        now: datetime,
    ) -> Lease:
        if actor:
            note_lease(connection, lease, "stop", actor, reason, now)
        told = _stopped(lease, "an admin stopped it", f"{_sentence(reason)} {_KEPT}", now)
        return order_end(connection, lease, outcome, reason, told, self.log)


def order_end(
    connection: sa.Connection,
    lease: Lease,
    outcome: str,
    reason: str,
    told: Notice,
    log: logging.Logger,
) -> Lease:
    """Order the end of a lease, and tell its member. In the caller's transaction.

    ``outcome`` as in :attr:`gpuspawner.leases.models.Lease.outcome`.
    """
    changes: dict[str, Any] = {"outcome": outcome, "end_reason": reason}
    repository.update(connection, lease.id, **changes)
    notifications_repository.add(connection, told)
    log.info("Lease %s of %s is to end: %s", lease.id, lease.server, reason)
    return replace(lease, **changes)


def note_lease(
    connection: sa.Connection, lease: Lease, action: str, actor: str, detail: str, now: datetime
) -> None:
    """Write in the audit trail what was done with a lease."""
    subject = f"lease {lease.id} of {lease.server}"
    closures.note(connection, at=now, actor=actor, action=action, subject=subject, detail=detail)


def warning_due(lease: Lease, now: datetime, warn_minutes: Sequence[float]) -> float | None:
    """The warning that is due and was not given, in minutes left; None when there is none.

    A session that is no longer than a warning's minutes is not warned at its very start.
    """
    running = lease.state is LeaseState.RUNNING and not lease.outcome
    if not running or lease.ends_at is None or now >= lease.ends_at:
        return None
    left = (lease.ends_at - now).total_seconds()
    due = [m for m in warn_minutes if left <= 60 * m < (lease.seconds or 0)]
    told = math.inf if lease.told_minutes is None else lease.told_minutes
    return min(due) if due and min(due) < told else None


def goes_on(lease: Lease) -> bool:
    """Whether a lease is open and nobody ordered its stop."""
    return lease.state is not LeaseState.ENDED and not lease.outcome


def _why_not(lease: Lease) -> str:
    """Why there is no stop to order."""
    if lease.state is LeaseState.ENDED:
        return "it has stopped already"
    return f"it is being stopped already ({lease.end_reason})"


def _is_over(lease: Lease, now: datetime) -> bool:
    running = lease.state is LeaseState.RUNNING and not lease.outcome
    return running and lease.ends_at is not None and now >= lease.ends_at


def _longer(lease: Lease, now: datetime) -> int:
    """What ``extended`` comes to if the whole length begins anew now. Raises CannotExtend."""
    if lease.state is LeaseState.ENDED:
        raise CannotExtend(why="it has ended")
    if lease.outcome or _is_over(lease, now):
        raise CannotExtend(why="its server is being stopped")
    if lease.started_at is None:
        raise CannotExtend(why="its server is not up yet, and its time begins then")
    if lease.seconds is None:
        return lease.extended
    return max(lease.extended, math.ceil((now - (lease.up_since or now)).total_seconds()))


def _end_of(lease: Lease) -> datetime:
    """When a session ends. Raises ValueError for one without an end."""
    if lease.ends_at is None:
        raise ValueError(f"the session of lease {lease.id} has no end")
    return lease.ends_at


# What members are told.

_KEPT = "Your files are where you left them."


def _ends_soon(lease: Lease, minutes: float, now: datetime) -> Notice:
    until = _until(lease, now)
    return Notice(
        # With the end: after an extension it is told anew.
        key=f"session_ends:{lease.id}:{_end_of(lease).timestamp():.0f}:{minutes:g}",
        user=lease.server.user,
        kind=NoticeKind.SESSION_ENDS,
        title=f"{_named(lease)} stops at {until}",
        body=(
            f"Its session ends then: save your work. On your page of GPUs and credits you can "
            f"extend it, as long as nobody has to wait longer for that. {_KEPT}"
        ),
        at=now,
    )


def _no_show(lease: Lease, twice: bool, now: datetime) -> Notice:
    body = (
        f"Its GPU was kept for you for {_minutes(lease.claim_seconds or 0)} after it had started. "
        "Nothing was charged. Start it again when you need it."
    )
    if twice:
        body += " It was the second time in a row: next time you wait at the end of the line."
    return _stopped(lease, "nobody connected to it", body, now)


def _stopped(lease: Lease, why: str, body: str, now: datetime) -> Notice:
    return Notice(
        key=f"stopped:{lease.id}",
        user=lease.server.user,
        kind=NoticeKind.STOPPED,
        title=f"{_named(lease)} is stopped: {why}",
        body=body,
        at=now,
    )


def _named(lease: Lease) -> str:
    return f"Your server {lease.server.name}" if lease.server.name else "Your server"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:g} min"


def _sentence(reason: str) -> str:
    return f"{reason.rstrip('.')}."


def _until(lease: Lease, now: datetime) -> str:
    """The end with its zone: who reads it may be elsewhere."""
    end = lease.ends_at or now
    return f"{end_clock(end, now)} ({end.astimezone():%Z})"


def end_clock(moment: datetime, now: datetime) -> str:
    """A time of day as :func:`gpuspawner.devices.snapshots.clock`, rounded down: what ends then is
    not said to end later."""
    return clock(moment.replace(second=0, microsecond=0), now)
