"""Asking for devices when they may all be in use: tickets, turns and places in line.

One process a database grants (see :mod:`gpuspawner.db.leader`): the hub. Others may end,
move or boost a ticket; the line of the hub sees it at its next look.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

import sqlalchemy as sa

from ..core.errors import (
    GrantingPaused,
    InvalidRequest,
    MembershipEnded,
    NoDeviceFree,
    Refused,
    ServerHasLease,
    TicketEnded,
    TooManyTickets,
    TooMuchAsked,
)
from ..devices import closures
from ..devices.placement import asks_for, must_run, texts
from ..devices.service import checked_reason, short_text
from ..devices.snapshots import InventorySnapshot
from ..leases import repository as leases_repository
from ..leases.models import Lease, Request, ServerRef, Slot
from ..ledger import rules as ledger_rules
from ..ledger.models import Account
from ..ledger.pricing import RateCard
from ..members import repository as members_repository
from ..notifications import repository as notifications_repository
from ..notifications.models import Notice, NoticeKind
from . import repository
from .models import QueueLimits, Ticket
from .positions import Places
from .state import kind_of, model_of

CHANGEABLE = ("seconds", "account", "when_dry", "overdraft")
"""What a member may ask for anew without losing the place in line."""


MOST_POINTS = 1_000_000
"""The greatest boost either way."""

LAST_POSITION = 1_000_000
"""The greatest place of an admin's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """On which terms a server is asked for, beside its devices."""

    groups: frozenset[str] = frozenset()
    """The member's groups; one of them may give weight, priority and limits."""
    seconds: int | None = None
    """Session length; None when there is no end."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The member's choices, to start the server with after a restart of the hub."""
    wait: bool = False
    """Whether to wait in line when no device is free."""
    account: str = ""
    """Which account pays; nothing: the member's usual one."""
    shown_at: datetime | None = None
    """When a form showed the price: a start at once costs no more than it said."""


class Queue(Places):
    """The part of the broker that lets requests wait."""

    def ask(
        self,
        server: ServerRef,
        request: Request,
        *,
        engine: str,
        account: str = "",
        terms: Terms | None = None,
    ) -> Lease | Ticket:
        """A lease when devices are free and nobody waits for them, else a ticket.

        Who asked before and still waits for the same gets that ticket again. Raises what
        ``acquire`` raises, NoDeviceFree only when ``terms`` say not to wait.
        """
        terms = terms or Terms()
        free = not request.devices
        account = account or self.ledger.payer(server.user, terms.groups, terms.account, free=free)
        acquire = partial(
            self.acquire, server, request, engine=engine, account=account, terms=terms
        )
        if not request.devices:
            return acquire()
        if self.delegate is not None:
            ticket = self._ticket(server, request, engine, account, terms)
            return self._ask_there(ticket, wait=terms.wait)
        with self.line.lock:
            if self._nobody_is_before(server, terms) or self._has_kept(server, request):
                try:
                    return acquire()
                except (NoDeviceFree, GrantingPaused):
                    if not terms.wait:
                        raise
            elif not terms.wait:
                ticket = self._ticket(server, request, engine, account, terms)
                return self._now_or_never(ticket, acquire)
            return self._enqueue(self._ticket(server, request, engine, account, terms))

    def turns(self, present: frozenset[str]) -> list[str]:
        """The tickets whose turn it is, in order; start them with :meth:`start_ticket`.

        ``present`` are the tickets that a spawn of this hub waits with.
        """
        with self.line.lock:
            self.line.attend(present, self.clock())
        if self.delegate is not None:
            return self._delegated_turns(present)
        with self.line.lock:
            decision = self._decide()
            return [ticket for ticket in decision.starts if ticket in present]

    def start_ticket(self, ticket_id: str) -> Lease:
        """Grant what a ticket waits for. Then, not before, may the engine create anything.

        Raises TicketEnded when it waits no more, and Refused when it was ended now because
        its member can have no device any more; NoDeviceFree and GrantingPaused leave it waiting.
        """
        with self.line.lock:
            ticket = self.line.tickets.get(ticket_id)
            if ticket is None:
                raise TicketEnded(why="it was ended")
            look = self.look()
            try:
                if self.delegate is None:
                    lease = self._grant_ticket(ticket, look, self._kept_for_others(ticket))
                else:
                    turn, kept = self._allotted(ticket, look.fleet)
                    lease = self._grant_ticket(ticket, look, kept, turn.since)
            except (NoDeviceFree, GrantingPaused, ServerHasLease):
                raise
            except Refused as error:
                self.end_ticket(ticket_id, "refused", error.message)
                raise
            self.line.drop(ticket_id)
            return lease

    def end_ticket(
        self, ticket_id: str, outcome: str, reason: str, *, actor: str = "", tell: bool = True
    ) -> Ticket:
        """Take a ticket out of the line, for a reason that stays written.

        ``outcome`` as in :attr:`gpuspawner.queue.models.Ticket.outcome`. ``actor`` is an admin, for
        the audit trail. One that has ended already stays as it is. Raises UnknownTicket.
        """
        now = self.clock()
        with self.store.write() as connection:
            ticket = repository.get_ticket(connection, ticket_id, lock=True)
            if ticket.outcome:
                return ticket
            repository.end_ticket(connection, ticket_id, now, outcome, reason)
            if actor:
                subject = f"ticket {ticket_id} of {ticket.server}"
                closures.note(
                    connection, at=now, actor=actor, action=outcome, subject=subject, detail=reason
                )
            if tell:
                notifications_repository.add(connection, _ticket_ended(ticket, reason, now))
            ended = repository.get_ticket(connection, ticket_id)
        with self.line.lock:
            self.line.drop(ticket_id)
        self._take_back(ticket_id, ticket.engine)
        self.log.info("Ticket %s of %s ended (%s): %s", ticket_id, ticket.server, outcome, reason)
        return ended

    def regrouped(self, ticket: Ticket, groups: frozenset[str]) -> dict[str, Any]:
        """What is another thing for a ticket when its member is in these groups; asks no store."""
        group, priority = self.settings.queue.standing_of(groups)
        policy = self.settings.credits.policy_for(ticket.account, groups)
        terms = {"group": group, "priority": priority}
        terms |= {"when_dry": policy.when_dry, "overdraft": policy.overdraft}
        return {name: value for name, value in terms.items() if getattr(ticket, name) != value}

    def regroup(self, ticket_id: str, changes: Mapping[str, Any]) -> Ticket:
        """The member's groups changed while they wait: from now on another one has a say."""
        with self.store.write() as connection:
            repository.update_ticket(connection, ticket_id, **changes)
            return repository.get_ticket(connection, ticket_id)

    # What an admin changes.

    @property
    def hours_a_point(self) -> float:
        """How long a ticket waits for one point more."""
        return self.line.scheduler.policy.waiting_point_seconds / 3600

    def boost(self, ticket_id: str, points: float, *, actor: str, reason: str = "") -> Ticket:
        """Set the points that an admin adds to a ticket's score; 0 takes them away.

        Raises UnknownTicket, TicketEnded, or InvalidRequest for what is no number of points.
        """
        if not _is_number(points) or not abs(points) <= MOST_POINTS:  # so, NaN is refused too
            raise InvalidRequest(
                f"{short_text(points)} is no number of points: write one from {-MOST_POINTS} "
                f"to {MOST_POINTS}; one is worth {self.hours_a_point:g} hours of waiting.",
                field="points",
            )
        return self._change(ticket_id, "boost", f"{points:+g} points", actor, reason, boost=points)

    def move(self, ticket_id: str, position: int | None, *, actor: str, reason: str = "") -> Ticket:
        """Put a ticket at a place of the admin's own: 1 goes before 2, both before all others.

        None gives it back to the order. Raises UnknownTicket, TicketEnded or InvalidRequest.
        """
        whole = _is_number(position) and isinstance(position, int)
        if position is not None and not (whole and 1 <= position <= LAST_POSITION):
            raise InvalidRequest(
                f"{short_text(position)} is no position in line: write 1 for next, 2 for the one "
                "after it.",
                field="position",
            )
        detail = f"to place {position}" if position is not None else "back to the order"
        return self._change(ticket_id, "move", detail, actor, reason, position=position)

    def cancel(self, ticket_id: str, *, actor: str, reason: str) -> Ticket:
        """Take a ticket out of the line; its member is told the reason.

        Raises UnknownTicket, TicketEnded, or InvalidRequest without a reason.
        """
        why = f"an admin cancelled it: {checked_reason(reason, needed=True)}"
        if (ticket := self.store.run(lambda c: repository.get_ticket(c, ticket_id))).outcome:
            raise TicketEnded(_has_ended(ticket))
        ended = self.end_ticket(ticket_id, "cancelled", why, actor=actor)
        if ended.end_reason != why:  # its turn came, or somebody was quicker
            raise TicketEnded(_has_ended(ended))
        return ended

    # Steps of the above.

    def _change(
        self, ticket_id: str, action: str, detail: str, actor: str, reason: str, **values: Any
    ) -> Ticket:
        reason = checked_reason(reason)
        with self.store.write() as connection:
            ticket = repository.get_ticket(connection, ticket_id, lock=True)
            if ticket.outcome:
                raise TicketEnded(_has_ended(ticket))
            repository.update_ticket(connection, ticket_id, **values)
            closures.note(
                connection,
                at=self.clock(),
                actor=actor,
                action=action,
                subject=f"ticket {ticket_id} of {ticket.server}",
                detail=f"{detail}: {reason}" if reason else detail,
            )
            return repository.get_ticket(connection, ticket_id)

    def _nobody_is_before(self, server: ServerRef, terms: Terms) -> bool:
        """Whether a request may go straight to the devices: no line, and no limit to count."""
        if not self.line.synced:
            self._sync()
        if not self.line.empty:
            return False
        limits = self.settings.queue.limits_of(self.settings.queue.standing_of(terms.groups)[0])
        limited = any(limit.devices is not None or limit.gpu_hours is not None for limit in limits)
        return not limited

    def _has_kept(self, server: ServerRef, request: Request) -> bool:
        """Whether just these devices are kept for a server that starts again: it has been in line
        before. Who asks for others waits like everybody."""
        kept = self.store.run(lambda connection: leases_repository.kept_devices(connection, server))
        return asks_for(request, self.look().devices, {closure.subject for closure in kept})

    def _now_or_never(self, probe: Ticket, acquire: Callable[[], Lease]) -> Lease:
        """A lease if the scheduler lets this request go before those who wait."""
        self._sync()
        waiting = self.line.waiting(probe)
        self.line.scheduler.submit(waiting)
        try:
            decision = self.line.scheduler.decide(
                waiting.asked_at, self.line.supply.free, reasons=True
            )
        finally:
            self.line.scheduler.withdraw(probe.id)
        if probe.id in decision.starts:
            return acquire()
        why = decision.held_back.get(probe.id)
        others = len(self.line.tickets)
        ahead = f"{others} {'server waits' if others == 1 else 'servers wait'} for a GPU before you"
        sentence = f"{why or ahead}. Start without a GPU, or wait in line."
        raise NoDeviceFree(sentence[0].upper() + sentence[1:], waiting=others)

    def _enqueue(self, ticket: Ticket) -> Ticket:
        """A place in line. It needs no look at what others did: the next round has one."""
        server, request = ticket.server, ticket.request
        self._must_fit(self.look(), request)
        with self.store.write() as connection:
            must_be_member(connection, server.user)
            if leases_repository.open_of(connection, server):
                raise ServerHasLease()
            mine = repository.open_of_member(connection, server.user)
            known = next((each for each in mine if each.server == server), None)
            if known and known.request == request:
                return self._asked_again(connection, known, ticket)
            if known:
                why = "another request was made for the same server"
                repository.end_ticket(connection, known.id, ticket.created_at, "replaced", why)
            self._must_be_allowed(connection, ticket, len(mine) - bool(known))
            ticket = self._at_the_end_if_twice(connection, ticket)
            repository.insert_ticket(connection, ticket)
        if known:
            self.line.drop(known.id)
        self.line.add(ticket)
        self.log.info("Ticket %s: %s waits for %d GPUs", ticket.id, server, request.devices)
        return ticket

    def _asked_again(self, connection: sa.Connection, known: Ticket, ticket: Ticket) -> Ticket:
        """The same devices, maybe for other hours or paid by others: the ticket keeps its place."""
        if any(getattr(known, name) != getattr(ticket, name) for name in CHANGEABLE):
            self._must_be_paid(connection, ticket)
            for limit in self.settings.queue.limits_of(known.group):
                _must_be_within(limit, ticket)
            changes = {name: getattr(ticket, name) for name in (*CHANGEABLE, "options")}
            repository.update_ticket(connection, known.id, **changes)
            known = repository.get_ticket(connection, known.id)
            self.line.add(known)
        elif known.id not in self.line.tickets:
            self.line.add(known)
        return known

    def _ticket(
        self, server: ServerRef, request: Request, engine: str, account: str, terms: Terms
    ) -> Ticket:
        group, priority = self.settings.queue.standing_of(terms.groups)
        policy = self.settings.credits.policy_for(account, terms.groups)
        return Ticket(
            id=secrets.token_hex(8),
            server=server,
            request=request,
            options=dict(terms.options),
            engine=engine,
            account=account,
            group=group,
            seconds=terms.seconds,
            priority=priority,
            when_dry=policy.when_dry,
            overdraft=policy.overdraft,
            created_at=self.clock().astimezone(timezone.utc),
        )

    def _must_fit(self, look: InventorySnapshot, request: Request) -> None:
        """Raises TooMuchAsked when waiting would not help."""
        must_run(request, look.inventory)
        if self.line.kinds(request):
            return
        try:
            look.fleet.choose(request, frozenset())
        except TooMuchAsked:
            raise
        except NoDeviceFree:
            pass  # it would fit, were it not for what runs there now

    def _must_be_allowed(self, connection: sa.Connection, ticket: Ticket, others: int) -> None:
        """Raises NoCredits, TooManyTickets, or TooMuchAsked for what no turn would ever bring.

        ``others`` is how many servers of the member wait beside this one.
        """
        self._must_be_paid(connection, ticket)
        of_member, of_group = self.settings.queue.limits_of(ticket.group)
        in_group = 0
        if of_group.tickets is not None:
            in_group = repository.count_of_group(connection, ticket.group)
        for count, limit in ((others, of_member), (in_group, of_group)):
            if limit.tickets is not None and count >= limit.tickets:
                raise TooManyTickets(count=count, most=limit.tickets)
            _must_be_within(limit, ticket)

    def _must_be_paid(self, connection: sa.Connection, ticket: Ticket) -> None:
        """Raises NoCredits when there is not enough for the cheapest devices that fit."""
        payer = self._payer_now(connection, ticket.account, ticket.created_at)
        card = self.prices.rates_in(connection).card(ticket.created_at, ticket.request.environment)
        rate, lead = (
            self._least_rate(card, ticket.request),
            self.settings.credits.lead(ticket.seconds),
        )
        self._check_credits(payer, ledger_rules.hold_for(rate, lead), rate, lead)

    def _payer_now(self, connection: sa.Connection, name: str, now: datetime) -> Account:
        """The account less all that its servers owe, though it was not charged yet."""
        account = self.ledger.open_in(connection, name, now)
        return ledger_rules.owing(
            [lease for lease, _ in leases_repository.paying(connection, name)], account, now
        )

    def _least_rate(self, card: RateCard, request: Request) -> int:
        """What the request costs an hour on the cheapest devices that fit."""
        models = {model_of(kind) for kind in self.line.kinds(request)}
        rates = (card.lease_rate([model] * request.devices) for model in models)
        return min(rates, default=0)

    def _at_the_end_if_twice(self, connection: sa.Connection, ticket: Ticket) -> Ticket:
        if repository.no_shows_in_a_row(connection, ticket.server.user) < 2:
            return ticket
        return replace(ticket, last=True)

    def _kept_for_others(self, ticket: Ticket) -> frozenset[str]:
        """Devices of other kinds than the one that the scheduler means for the ticket, as the
        texts of their first places."""
        decision = self._decide()
        kind = decision.on.get(ticket.id)
        fleet = self.line.supply.fleet
        closed = {Slot(uuid) for uuid in self.line.closed if uuid in fleet.by_uuid}
        if kind is None:
            return texts(closed)
        return texts(closed | {Slot(d.uuid) for d in fleet.devices if kind_of(d) != kind})


def must_be_member(connection: sa.Connection, user: str) -> None:
    """Raises MembershipEnded for who is a member no more."""
    known = members_repository.find_membership(connection, user)
    if known and known.ended_at:
        raise MembershipEnded(why=known.reason)


def _must_be_within(limit: QueueLimits, ticket: Ticket) -> None:
    """Raises TooMuchAsked when a ticket alone is more than a limit allows."""
    asked = ticket.request.devices
    if limit.devices is not None and asked > limit.devices:
        raise TooMuchAsked(
            f"You asked for {asked} GPUs, and {limit.devices} at once is your limit. "
            f"Ask for {limit.devices} at most.",
            asked=asked,
            most=limit.devices,
        )
    hours = asked * (ticket.seconds or 0) / 3600
    if limit.gpu_hours is not None and hours > limit.gpu_hours:
        raise TooMuchAsked(
            f"You asked for {hours:g} GPU-hours, and {limit.gpu_hours:g} is your limit. "
            "Ask for fewer GPUs, or for fewer hours.",
            asked=asked,
        )


def _has_ended(ticket: Ticket) -> str:
    return (
        f"The ticket of {ticket.server} does not wait any more ({ticket.outcome}: "
        f"{ticket.end_reason.rstrip('.')}). Nothing was changed."
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _ticket_ended(ticket: Ticket, reason: str, now: datetime) -> Notice:
    return Notice(
        key=f"ticket_ended:{ticket.id}",
        user=ticket.server.user,
        kind=NoticeKind.TICKET_ENDED,
        title="Your place in line is gone",
        body=f"{reason.rstrip('.')}. Start the server again to get a new place.",
        at=now,
    )


def your_turn(ticket: Ticket, lease: Lease, now: datetime) -> Notice:
    """What a member is told when the devices that they waited for are theirs."""
    body = "The GPU that you waited for is yours, and your server starts."
    if lease.claim_seconds:
        minutes = lease.claim_seconds / 60
        body += f" Connect to it within {minutes:g} minutes of its start, else it stops again."
    return Notice(
        key=f"turn:{lease.id}",
        user=ticket.server.user,
        kind=NoticeKind.TURN,
        title="It is your turn",
        body=body,
        at=now,
    )


def _seconds(at: datetime) -> float:
    return at.timestamp()
