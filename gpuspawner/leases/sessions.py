"""Sessions: length, warnings, extensions and stops.

The accounting service carries out stop orders: it asks the Hub until the server is gone. Every
order is therefore in the store, with its reason, before anything happens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from ..core.errors import CannotStop
from ..core.text import checked_reason
from ..core.times import deadline
from ..db import audit_log
from ..db.engine import Store
from ..notifications import repository as notifications_repository
from ..notifications.models import Notice, NoticeKind
from ..notifications.service import compose
from . import repository
from .models import Lease, LeaseState


@dataclass(frozen=True, slots=True)
class DueSessions:
    """What has to be done about sessions now."""

    warn: tuple[Lease, ...] = ()
    """Leases whose member must be warned that the session ends soon."""
    over: tuple[Lease, ...] = ()
    """Leases whose time is over and whose stop is not ordered yet."""
    stop: tuple[Lease, ...] = ()
    """Leases whose server must be stopped because of an order."""


class SessionService:
    """Tracks when sessions end: warns the members and orders the stops."""

    def __init__(self, store: Store, clock: Callable[[], datetime], log: logging.Logger) -> None:
        self.store = store
        self.clock = clock
        self.log = log

    def claim(self, lease_id: str) -> Lease:
        """Record that a member connected to a server from the queue; too late changes nothing."""
        now = self.clock()
        with self.store.write() as connection:
            lease = repository.get(connection, lease_id, lock=True)
            if lease.claim_by is None or lease.outcome or lease.state is LeaseState.ENDED:
                return lease
            repository.update(connection, lease_id, claimed_at=now)
        return replace(lease, claimed_at=now)

    def no_show(self, lease_id: str) -> Lease:
        """Order the stop of a server that nobody connected to in time; it costs nothing.

        A lease that was claimed, or whose deadline has not passed, stays as it is.
        """
        now = self.clock()
        with self.store.write() as connection:
            lease = repository.get(connection, lease_id, lock=True)
            if lease.claim_by is None or now < lease.claim_by or not goes_on(lease):
                return lease
            twice = repository.no_shows_in_a_row(connection, lease.server.user) >= 1
            minutes = (lease.claim_seconds or 0) / 60
            reason = f"no one connected within {minutes:g} min of its start"
            told = _stopped("no_show", lease, now, twice=twice)
            return order_end(connection, lease, "no_show", reason, told, self.log)

    def stop(self, lease_id: str, *, actor: str, reason: str) -> Lease:
        """Order the stop of a member's server, with a reason that the member reads.

        Raises UnknownLease, InvalidRequest without a reason, or CannotStop if the lease has ended
        or its stop was already ordered.
        """
        reason = checked_reason(reason, needed=True)
        now = self.clock()
        with self.store.write() as connection:
            lease = repository.get(connection, lease_id, lock=True)
            if not goes_on(lease):
                ended = lease.state is LeaseState.ENDED
                going = f"it is being stopped already ({lease.end_reason})"
                raise CannotStop(why="it has stopped already" if ended else going)
            note_lease(connection, lease, "stop", actor, reason, now)
            told = _stopped("stopped_by_admin", lease, now, reason=reason)
            return order_end(connection, lease, "admin", reason, told, self.log)

    # What the accounting service asks every other second.

    def due_sessions(self, warn_minutes: Sequence[float] = ()) -> DueSessions:
        """Return what has to be done now; the method for each part checks again."""
        now = self.clock()
        watched = self.store.run(repository.with_an_end)
        return DueSessions(
            warn=tuple(x for x in watched if warning_due(x, now, warn_minutes) is not None),
            over=tuple(x for x in watched if is_over(x, now)),
            stop=tuple(x for x in watched if x.outcome),
        )

    def warn_session(self, lease_id: str, warn_minutes: Sequence[float]) -> Lease | None:
        """Warn the member that the session ends soon, once for each of ``warn_minutes``.

        Returns the lease with the warning that was given, or None if no warning is due.
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
        """Order the stop of a server whose time is over; None if not over or already ordered."""
        now = self.clock()
        with self.store.write() as connection:
            lease = repository.get(connection, lease_id, lock=True)
            if not is_over(lease, now):
                return None
            ended_at = format_session_end(lease, now)
            told = _stopped("session_over", lease, now, ends_at=lease.ends_at or now)
            reason = f"its time was over at {ended_at}"
            return order_end(connection, lease, "session_end", reason, told, self.log)


def order_end(
    connection: sa.Connection,
    lease: Lease,
    outcome: str,
    reason: str,
    told: Notice,
    log: logging.Logger,
) -> Lease:
    """Order the end of a lease and tell its member, in the caller's transaction.

    ``outcome`` as in :attr:`gpuspawner.leases.models.Lease.outcome`.
    """
    changes: dict[str, Any] = {"outcome": outcome, "end_reason": reason}
    repository.update(connection, lease.id, **changes)
    told = replace(told, facts={**told.facts, "reason": reason})
    notifications_repository.add(connection, told)
    log.info("Lease %s of %s is to end: %s", lease.id, lease.server, reason)
    return replace(lease, **changes)


def note_lease(
    connection: sa.Connection, lease: Lease, action: str, actor: str, detail: str, now: datetime
) -> None:
    """Record an action on a lease in the audit log."""
    subject = f"lease {lease.id} of {lease.server}"
    audit_log.note(connection, at=now, actor=actor, action=action, subject=subject, detail=detail)


def warning_due(lease: Lease, now: datetime, warn_minutes: Sequence[float]) -> float | None:
    """Return the warning that is due and was not given, in minutes left, or None.

    A session no longer than a warning's minutes gets no such warning at its very start.
    """
    running = lease.state is LeaseState.RUNNING and not lease.outcome
    if not running or lease.ends_at is None or now >= lease.ends_at:
        return None
    left = (lease.ends_at - now).total_seconds()
    due = [m for m in warn_minutes if left <= 60 * m < (lease.seconds or 0)]
    told = math.inf if lease.told_minutes is None else lease.told_minutes
    return min(due) if due and min(due) < told else None


def goes_on(lease: Lease) -> bool:
    """Return True if a lease is open and its stop was not ordered."""
    return lease.state is not LeaseState.ENDED and not lease.outcome


def is_over(lease: Lease, now: datetime) -> bool:
    """Return True if a running session's time is over and its stop is not ordered."""
    running = lease.state is LeaseState.RUNNING and not lease.outcome
    return running and lease.ends_at is not None and now >= lease.ends_at


def session_end_of(lease: Lease) -> datetime:
    """Return when a session ends. Raises ValueError if it has no end."""
    if lease.ends_at is None:
        raise ValueError(f"the session of lease {lease.id} has no end")
    return lease.ends_at


# Notices to members.


def _ends_soon(lease: Lease, minutes: float, now: datetime) -> Notice:
    ends_at = session_end_of(lease)
    # With the end: after an extension it is told anew.
    key = f"session_ends:{lease.id}:{ends_at.timestamp():.0f}:{minutes:g}"
    values = {"lease": lease, "ends_at": ends_at, "minutes": minutes}
    return compose("session_ends", NoticeKind.SESSION_ENDS, key, lease.server.user, now, **values)


def _stopped(template: str, lease: Lease, now: datetime, **values: Any) -> Notice:
    key, user = f"stopped:{lease.id}", lease.server.user
    return compose(template, NoticeKind.STOPPED, key, user, now, lease=lease, **values)


def format_session_end(lease: Lease, now: datetime) -> str:
    """Return the end with its zone: its reader may be elsewhere."""
    return deadline(lease.ends_at or now, now)
