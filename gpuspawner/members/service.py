"""Memberships: they begin and end at sign-in, or with an entry of the roster.

Former members start nothing, lose their tickets and get no refills. Running servers continue for a
grace period, so that work can be saved. Nothing is taken from them: files, folders and credits are
there when they return.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

import sqlalchemy as sa
from traitlets import Float
from traitlets.config import LoggingConfigurable

from ..core.errors import MembershipEnded
from ..core.text import LONGEST_REASON, checked_reason
from ..db import audit_log
from ..db.engine import Store
from ..leases import repository as leases_repository
from ..leases.models import Lease, LeaseState
from ..leases.sessions import order_end
from ..ledger import repository as ledger_repository
from ..ledger.models import member_account
from ..notifications import repository as notifications_repository
from ..notifications.models import Notice, NoticeKind
from ..notifications.service import compose
from ..queue import repository as queue_repository
from ..queue.models import Ticket
from ..queue.state import QueueState
from . import repository
from .repository import Membership

GONE = "member_gone"
"""The outcome of leases and tickets of former members."""


class GPUMembers(LoggingConfigurable):
    """What happens when a membership ends."""

    grace_minutes = Float(
        60.0,
        min=0.0,
        config=True,
        help="""
        Minutes that a server keeps running after its member's membership ended and they were told.

        Example::

            c.GPUMembers.grace_minutes = 24 * 60
        """,
    )


@dataclass(frozen=True, slots=True)
class EndedMembership:
    """A membership that is over."""

    reason: str
    stops_at: datetime
    """When running servers are stopped."""


def require_member(connection: sa.Connection, user: str) -> None:
    """Raise MembershipEnded for a former member."""
    known = repository.find_membership(connection, user)
    if known and known.ended_at:
        raise MembershipEnded(why=known.reason)


@dataclass(eq=False)
class MemberService:
    """Manages memberships, and what former members still have."""

    store: Store
    clock: Callable[[], datetime]
    settings: GPUMembers
    line: QueueState
    log: logging.Logger

    @property
    def membership_grace(self) -> timedelta:
        """How long servers continue after the membership of their member ended."""
        return timedelta(minutes=self.settings.grace_minutes)

    def membership(self, user: str) -> Membership | None:
        """Return a membership; None for somebody who never signed in as a member."""
        return self.store.run(lambda connection: repository.find_membership(connection, user))

    def membership_end(self, user: str) -> EndedMembership | None:
        """Return how a membership ended; None while somebody is a member, or never was."""
        known = self.membership(user)
        if known is None or known.ended_at is None:
            return None
        return EndedMembership(known.reason, known.ended_at + self.membership_grace)

    def count_members(self) -> int:
        """Return how many are members now, by the roster or without it."""
        return self.store.run(repository.count_members)

    def former_members(self) -> list[Membership]:
        """Return all former members, by name."""
        return self.store.run(repository.former_members)

    def membership_returned(self, user: str, *, actor: str, by_roster: bool = False) -> bool:
        """Record that somebody is a member, for the first time or again: everything is as before.

        ``by_roster``: only because of the roster, so that the membership ends with the entry.
        Returns False if nothing changed; call it at each sign-in and refresh.
        """
        now = self.clock()
        known = self.membership(user)
        if known and known.ended_at is None and known.by_roster == by_roster:
            return False
        with self.store.write() as connection:
            return self._return(connection, user, actor, by_roster, now)

    def membership_ended(self, user: str, reason: str, *, actor: str) -> bool:
        """Record that a membership ended, for a reason that the person reads.

        Ends their tickets and warns about their running servers, which :meth:`see_to_former` stops
        after the grace period. Returns False if nothing changed: it had already ended, or nobody
        with this name was ever a member or has an account.
        """
        reason = checked_reason(reason[:LONGEST_REASON], needed=True).rstrip(".")
        now = self.clock()
        known = self.membership(user)
        if known and known.ended_at:
            return False
        with self.store.write() as connection:
            ended = self._end_membership(connection, user, reason, actor, now)
            gone, _ = self._see_to(connection, user, now) if ended else ([], False)
        self._drop(gone)
        return ended

    # The welcome page.

    def welcome_due(self, user: str) -> bool:
        """Return True if somebody has not seen the welcome page yet."""
        known = self.membership(user)
        return known is None or known.welcomed_at is None

    def welcomed(self, user: str) -> None:
        """Record that somebody saw the welcome page: once is enough."""
        now = self.clock()
        with self.store.write() as connection:
            repository.begin_membership(connection, user, now)
            repository.update_membership(connection, user, welcomed_at=now)

    # What the accounting service asks.

    def former_holding(self) -> list[str]:
        """Return former members with a server or a ticket, for :meth:`see_to_former`."""
        return self.store.run(repository.members_with_leases)

    def see_to_former(self, user: str) -> bool:
        """End the tickets of a former member, and warn about or stop their servers.

        Nothing is reported or ordered twice. Returns True if there was anything to do.
        """
        now = self.clock()
        with self.store.write() as connection:
            gone, told = self._see_to(connection, user, now)
        self._drop(gone)
        return told

    # Helpers.

    def _return(
        self, connection: sa.Connection, user: str, actor: str, by_roster: bool, now: datetime
    ) -> bool:
        if repository.begin_membership(connection, user, now):
            repository.update_membership(connection, user, by_roster=by_roster)
            _note(connection, user, "membership began", actor, "", now)
            return True
        known = repository.find_membership(connection, user, lock=True)
        if known is None:
            raise RuntimeError(f"the membership of {user} cannot be read")
        if known.ended_at is None and known.by_roster == by_roster:
            return False
        repository.update_membership(
            connection, user, by_roster=by_roster, ended_at=None, reason="", actor=""
        )
        if known.ended_at is None:
            return True
        detail = f"it had ended at {known.ended_at:%Y-%m-%d %H:%M} UTC: {known.reason}"
        _note(connection, user, "membership returned", actor, detail, now)
        for lease in _open_of(connection, user):
            if not lease.outcome and now < known.ended_at + self.membership_grace:
                key = f"membership_returned:{lease.id}:{_since(known.ended_at)}"
                told = compose(
                    "membership_returned", NoticeKind.SESSION_ENDS, key, user, now, lease=lease
                )
                notifications_repository.add(connection, told)
        return True

    def _end_membership(
        self, connection: sa.Connection, user: str, reason: str, actor: str, now: datetime
    ) -> bool:
        known = repository.find_membership(connection, user, lock=True)
        if known is None:
            # Somebody who is refused at sign-in and was never a member leaves no trace here.
            if not ledger_repository.find_account(connection, member_account(user)):
                return False
            repository.begin_membership(connection, user, now)
        elif known.ended_at:
            return False
        repository.update_membership(connection, user, ended_at=now, reason=reason, actor=actor)
        _note(connection, user, "membership ended", actor, reason, now)
        return True

    def _see_to(
        self, connection: sa.Connection, user: str, now: datetime
    ) -> tuple[list[str], bool]:
        """Return the ids of the ended tickets, and True if the member was told anything."""
        known = repository.find_membership(connection, user, lock=True)
        if known is None or known.ended_at is None:
            return [], False  # they returned meanwhile
        waiting = _waiting_of(connection, user)
        for ticket in waiting:
            reason = f"your membership has ended: {known.reason}"
            queue_repository.end_ticket(connection, ticket.id, now, GONE, reason)
            key, kind = f"ticket_ended:{ticket.id}", NoticeKind.TICKET_ENDED
            gone = compose("membership_ended_in_line", kind, key, user, now, reason=known.reason)
            notifications_repository.add(connection, gone)
        told = bool(waiting)
        stops_at = known.ended_at + self.membership_grace
        for lease in _open_of(connection, user):
            if lease.outcome:
                continue
            if now < stops_at:
                told |= notifications_repository.add(
                    connection, _stops_soon(lease, known, stops_at, now)
                )
            else:
                reason = f"the membership of {user} ended: {known.reason}"
                order_end(connection, lease, GONE, reason, _stopped(lease, known, now), self.log)
                told = True
        return [ticket.id for ticket in waiting], told

    def _drop(self, tickets_gone: list[str]) -> None:
        if tickets_gone:
            with self.line.lock:
                for ticket_id in tickets_gone:
                    self.line.drop(ticket_id)


def _waiting_of(connection: sa.Connection, user: str) -> list[Ticket]:
    mine = [ticket.id for ticket in queue_repository.open_of_member(connection, user)]
    locked = [queue_repository.get_ticket(connection, ticket_id, lock=True) for ticket_id in mine]
    return [ticket for ticket in locked if not ticket.outcome]


def _open_of(connection: sa.Connection, user: str) -> list[Lease]:
    mine = [x.id for x in leases_repository.open_leases(connection) if x.server.user == user]
    locked = [leases_repository.get(connection, lease_id, lock=True) for lease_id in mine]
    return [lease for lease in locked if lease.state is not LeaseState.ENDED]


def _note(
    connection: sa.Connection, user: str, action: str, actor: str, detail: str, now: datetime
) -> None:
    subject = member_account(user)
    audit_log.note(connection, at=now, actor=actor, action=action, subject=subject, detail=detail)


def _stops_soon(lease: Lease, known: Membership, stops_at: datetime, now: datetime) -> Notice:
    return compose(
        "membership_ended",
        NoticeKind.SESSION_ENDS,
        # With the moment: who comes back and leaves again is told anew.
        f"membership_ended:{lease.id}:{_since(known.ended_at)}",
        lease.server.user,
        now,
        lease=lease,
        reason=known.reason,
        stops_at=min(stops_at, lease.ends_at or stops_at),
    )


def _stopped(lease: Lease, known: Membership, now: datetime) -> Notice:
    return compose(
        "membership_ended_stopped",
        NoticeKind.STOPPED,
        f"stopped:{lease.id}",
        lease.server.user,
        now,
        lease=lease,
        reason=known.reason,
    )


def _since(moment: datetime | None) -> str:
    return f"{moment.timestamp():.6f}" if moment else ""
