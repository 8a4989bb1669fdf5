"""Who is a member: it begins and ends at sign-in, or with an entry of the roster.

Who is none any more starts nothing, waits for nothing and gets no refills. What runs goes on for
a grace, so that work can be saved. Nothing of theirs is taken: files, folders and credits are
there when they come back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

import sqlalchemy as sa
from traitlets import Float
from traitlets.config import LoggingConfigurable

from ..db.engine import Store
from ..devices import closures
from ..devices.service import LONGEST_REASON, checked_reason
from ..leases import repository as leases_repository
from ..leases.models import Lease, LeaseState
from ..leases.sessions import end_clock, order_end
from ..ledger import repository as ledger_repository
from ..ledger.models import member_account
from ..notifications import repository as notifications_repository
from ..notifications.models import Notice, NoticeKind
from ..queue import repository as queue_repository
from ..queue.models import Ticket
from ..queue.state import QueueState
from . import repository
from .repository import Membership

GONE = "member_gone"
"""The outcome of leases and tickets whose member is none any more."""


class GPUMembers(LoggingConfigurable):
    """What happens when a membership ends."""

    grace_minutes = Float(
        60.0,
        min=0.0,
        config=True,
        help="""
        Minutes that a server goes on after its member is a member no more, and was told so.

        Example::

            c.GPUMembers.grace_minutes = 24 * 60
        """,
    )


@dataclass(frozen=True, slots=True)
class EndedMembership:
    """A membership that is over."""

    reason: str
    stops_at: datetime
    """When what still runs is stopped."""


class MemberService:
    """Knows who is a member, and sees to what former members have."""

    def __init__(
        self,
        store: Store,
        clock: Callable[[], datetime],
        settings: GPUMembers,
        line: QueueState,
        log: logging.Logger,
    ) -> None:
        self.store = store
        self.clock = clock
        self.settings = settings
        self.line = line
        self.log = log

    @property
    def membership_grace(self) -> timedelta:
        """How long what runs goes on after its member is a member no more."""
        return timedelta(minutes=self.settings.grace_minutes)

    def membership(self, user: str) -> Membership | None:
        """What is known of somebody; None of who never signed in as a member."""
        return self.store.run(lambda connection: repository.find_membership(connection, user))

    def membership_end(self, user: str) -> EndedMembership | None:
        """How somebody's membership ended; None while they are a member, or never were one."""
        known = self.membership(user)
        if known is None or known.ended_at is None:
            return None
        return EndedMembership(known.reason, known.ended_at + self.membership_grace)

    def former_members(self) -> list[Membership]:
        """Everybody who is no member any more, by name."""
        return self.store.run(repository.former_members)

    def membership_returned(self, user: str, *, actor: str, by_roster: bool = False) -> bool:
        """Somebody is a member, for the first time or again: all is as it was before.

        ``by_roster``: only because the roster has them, so that they are none any more when their
        time on it is over. False when nothing changed; call it at each sign-in and refresh.
        """
        now = self.clock()
        known = self.membership(user)
        if known and known.ended_at is None and known.by_roster == by_roster:
            return False
        with self.store.write() as connection:
            return self._return(connection, user, actor, by_roster, now)

    def membership_ended(self, user: str, reason: str, *, actor: str) -> bool:
        """Somebody is a member no more, for a reason that they read.

        It ends their places in line and warns whose servers run; :meth:`see_to_former` stops
        these after the grace. False when nothing changed: it was so before, or nobody of this
        name was ever a member or has an account.
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
        """Whether somebody was not shown the welcome page yet."""
        known = self.membership(user)
        return known is None or known.welcomed_at is None

    def welcomed(self, user: str) -> None:
        """Somebody was shown the welcome page: once is enough."""
        now = self.clock()
        with self.store.write() as connection:
            repository.begin_membership(connection, user, now)
            repository.update_membership(connection, user, welcomed_at=now)

    # What the accounting service asks.

    def former_holding(self) -> list[str]:
        """Who is no member any more and has a server or a place in line; see to them."""
        return self.store.run(repository.members_with_leases)

    def see_to_former(self, user: str) -> bool:
        """End the places in line of a former member, and warn or stop their servers.

        What was told or ordered before is not done again. Whether there was anything to do.
        """
        now = self.clock()
        with self.store.write() as connection:
            gone, told = self._see_to(connection, user, now)
        self._drop(gone)
        return told

    # Steps of the above.

    def _return(
        self, connection: sa.Connection, user: str, actor: str, by_roster: bool, now: datetime
    ) -> bool:
        if repository.begin_membership(connection, user, now):
            repository.update_membership(connection, user, by_roster=by_roster)
            self._note_membership(connection, user, "membership began", actor, "", now)
            return True
        known = repository.find_membership(connection, user, lock=True)
        if known is None:
            raise RuntimeError(f"the membership of {user} cannot be read back")
        if known.ended_at is None and known.by_roster == by_roster:
            return False
        repository.update_membership(
            connection, user, by_roster=by_roster, ended_at=None, reason="", actor=""
        )
        if known.ended_at is None:
            return True
        detail = f"it had ended at {known.ended_at:%Y-%m-%d %H:%M} UTC: {known.reason}"
        self._note_membership(connection, user, "membership returned", actor, detail, now)
        for lease in self._open_of(connection, user):
            if not lease.outcome and now < known.ended_at + self.membership_grace:
                notifications_repository.add(connection, _goes_on_again(lease, known.ended_at, now))
        return True

    def _end_membership(
        self, connection: sa.Connection, user: str, reason: str, actor: str, now: datetime
    ) -> bool:
        known = repository.find_membership(connection, user, lock=True)
        if known is None:
            # Whoever is refused at the door and was never let in leaves no trace here.
            if not ledger_repository.find_account(connection, member_account(user)):
                return False
            repository.begin_membership(connection, user, now)
        elif known.ended_at:
            return False
        repository.update_membership(connection, user, ended_at=now, reason=reason, actor=actor)
        self._note_membership(connection, user, "membership ended", actor, reason, now)
        return True

    def _see_to(
        self, connection: sa.Connection, user: str, now: datetime
    ) -> tuple[list[str], bool]:
        """The ids of the tickets that were ended, and whether the member was told anything."""
        known = repository.find_membership(connection, user, lock=True)
        if known is None or known.ended_at is None:
            return [], False  # they came back meanwhile
        waiting = self._waiting_of(connection, user)
        for ticket in waiting:
            reason = f"your membership has ended: {known.reason}"
            queue_repository.end_ticket(connection, ticket.id, now, GONE, reason)
            notifications_repository.add(connection, _place_gone(ticket, known.reason, now))
        told = bool(waiting)
        stops_at = known.ended_at + self.membership_grace
        for lease in self._open_of(connection, user):
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

    def _waiting_of(self, connection: sa.Connection, user: str) -> list[Ticket]:
        mine = [ticket.id for ticket in queue_repository.open_of_member(connection, user)]
        locked = [
            queue_repository.get_ticket(connection, ticket_id, lock=True) for ticket_id in mine
        ]
        return [ticket for ticket in locked if not ticket.outcome]

    def _open_of(self, connection: sa.Connection, user: str) -> list[Lease]:
        mine = [x.id for x in leases_repository.open_leases(connection) if x.server.user == user]
        locked = [leases_repository.get(connection, lease_id, lock=True) for lease_id in mine]
        return [lease for lease in locked if lease.state is not LeaseState.ENDED]

    def _drop(self, tickets_gone: list[str]) -> None:
        if tickets_gone:
            with self.line.lock:
                for ticket_id in tickets_gone:
                    self.line.drop(ticket_id)

    def _note_membership(
        self,
        connection: sa.Connection,
        user: str,
        action: str,
        actor: str,
        detail: str,
        now: datetime,
    ) -> None:
        subject = member_account(user)
        closures.note(
            connection,
            at=now,
            actor=actor,
            action=action,
            subject=subject,
            detail=detail,
        )


# What members are told.

_KEPT = "Your files and your credits are kept."


def _place_gone(ticket: Ticket, why: str, now: datetime) -> Notice:
    return Notice(
        key=f"ticket_ended:{ticket.id}",
        user=ticket.server.user,
        kind=NoticeKind.TICKET_ENDED,
        title="Your place in line is gone: your membership has ended",
        body=f"Why: {why}. {_KEPT}",
        at=now,
    )


def _stops_soon(lease: Lease, known: Membership, stops_at: datetime, now: datetime) -> Notice:
    until = f"{end_clock(stops_at, now)} ({stops_at.astimezone():%Z})"
    return Notice(
        # With the moment: who comes back and leaves again is told anew.
        key=f"membership_ended:{lease.id}:{_since(known.ended_at)}",
        user=lease.server.user,
        kind=NoticeKind.SESSION_ENDS,
        title=f"Your server {lease.server.name}".rstrip() + f" stops at {until}",
        body=f"Your membership has ended: {known.reason}. Save your work until then. {_KEPT}",
        at=now,
    )


def _goes_on_again(lease: Lease, ended_at: datetime, now: datetime) -> Notice:
    return Notice(
        key=f"membership_returned:{lease.id}:{_since(ended_at)}",
        user=lease.server.user,
        kind=NoticeKind.SESSION_ENDS,
        title=f"Your server {lease.server.name}".rstrip() + " goes on",
        body="You are a member again: it is not stopped, and all is as it was before.",
        at=now,
    )


def _stopped(lease: Lease, known: Membership, now: datetime) -> Notice:
    return Notice(
        key=f"stopped:{lease.id}",
        user=lease.server.user,
        kind=NoticeKind.STOPPED,
        title=f"Your server {lease.server.name}".rstrip()
        + " is stopped: your membership has ended",
        body=f"Why: {known.reason}. {_KEPT}",
        at=now,
    )


def _since(moment: datetime | None) -> str:
    return f"{moment.timestamp():.6f}" if moment else ""
