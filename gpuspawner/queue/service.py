"""Requests for devices: granted now, or queued as tickets with turns and positions.

One process per database grants (see :mod:`gpuspawner.db.leader`): the hub. Others may end, move or
boost a ticket; the hub's queue sees it at its next look.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

import sqlalchemy as sa

from ..core.errors import (
    GrantingPaused,
    HostFull,
    InvalidRequest,
    NoDeviceFree,
    Refused,
    ServerHasLease,
    TicketEnded,
    TooManyTickets,
    TooMuchAsked,
)
from ..core.text import checked_reason, short_text
from ..core.units import DeviceCount, format_gpus
from ..db import audit_log
from ..db.clock import Timekeeper
from ..db.engine import Store
from ..devices.placement import texts
from ..devices.reservations import preference
from ..devices.snapshots import InventorySnapshot
from ..devices.suitability import asks_for, must_run
from ..leases import repository as leases_repository
from ..leases.host_resources import NOTHING, HostAmount
from ..leases.models import YIELD_SECONDS, Lease, LeaseKind, Request, ServerRef, Slot, Terms
from ..leases.service import LeaseService, require_seen
from ..ledger import rules as ledger_rules
from ..ledger.prices import PriceService
from ..ledger.pricing import RateCard
from ..ledger.settings import GPUCredits
from ..members.service import require_member
from ..notifications import repository as notifications_repository
from ..notifications.models import NoticeKind
from ..notifications.service import compose
from . import repository
from .delegation import DelegationService
from .kinds import (
    Preference,
    add,
    kind_of,
    kind_preference,
    most_equivalents,
    parts_of,
    shared_pools,
    subtract,
)
from .models import Decision, QueueLimits, Ticket
from .positions import PositionService
from .settings import GPUQueue
from .state import QueueState

CHANGEABLE = ("seconds", "account", "when_dry", "overdraft", "request")
"""What may change without losing the position in the queue; of a request, its member's groups."""

MOST_POINTS = 1_000_000
"""The largest boost in either direction."""

LAST_POSITION = 1_000_000
"""The largest position that an admin can set."""

STOPPING_SECONDS = 15.0
"""Seconds that the end of a program takes at most, once it is ordered."""

AT_ONCE = 15.0
"""Seconds within which an allocation of an external scheduler counts as immediate.

Also for members who are new to it: they are still watching the page. Longer counts as queued.
"""


@dataclass(eq=False)
class QueueService:
    """Grants what is free, and queues requests for what is not."""

    store: Store
    clock: Timekeeper
    settings: GPUQueue
    credits: GPUCredits
    _: KW_ONLY
    leases: LeaseService
    positions: PositionService
    delegation: DelegationService
    prices: PriceService
    log: logging.Logger

    def __post_init__(self) -> None:
        self.line = self.positions.line

    def ticket(self, ticket_id: str) -> Ticket:
        """Return a ticket, waiting or ended. Raises UnknownTicket."""
        return self.store.run(lambda connection: repository.get_ticket(connection, ticket_id))

    def ticket_of(self, server: ServerRef) -> Ticket | None:
        """Return the ticket with which a server waits; None if it does not wait."""
        mine = self.store.run(lambda c: repository.open_of_member(c, server.user))
        return next((ticket for ticket in mine if ticket.server == server), None)

    def tickets_of(self, user: str, limit: int = 20) -> list[Ticket]:
        """Return a member's newest tickets, newest first."""
        return self.store.run(lambda c: repository.tickets_of_user(c, user, limit))

    def waiting(self) -> list[Ticket]:
        """Return all waiting tickets, oldest first."""
        return self.store.run(repository.waiting_tickets)

    def asked_for(self, since: datetime) -> list[tuple[datetime, Lease]]:
        """Return leases with devices that ended since then, in order of their request time."""
        return self.store.run(lambda connection: repository.asked_for(connection, since))

    def ask(
        self,
        server: ServerRef,
        request: Request,
        *,
        engine: str,
        account: str = "",
        terms: Terms | None = None,
    ) -> Lease | Ticket:
        """Return a lease if devices are free and nobody waits for them, else a ticket.

        Asking again for the same while waiting returns the same ticket. Raises what
        :meth:`LeaseService.grant` raises, NoDeviceFree only if ``terms`` say not to wait.
        """
        terms = terms or Terms()
        free = not request.devices
        if not free:
            request = self._of_member(request, terms)
        ledger = self.leases.ledger
        account = account or ledger.payer(server.user, terms.groups, terms.account, free=free)
        group = self.settings.standing_of(terms.groups)[0]
        grant = partial(
            self.leases.grant,
            server,
            request,
            engine=engine,
            account=account,
            group=group,
            terms=terms,
        )
        self.leases.require_budget(request)
        if free and not (self.leases.budget and request.host):
            return grant()
        if terms.preemptible and not free:
            return self._grant_spare(server, request, grant)
        new_ticket = partial(self._ticket, server, request, engine, account, terms)
        if self.delegation.delegate is not None:
            return self._ask_there(new_ticket(), wait=terms.wait)
        with self.line.lock:
            if free:
                return self._ask_without_device(new_ticket(), grant, wait=terms.wait)
            if self._nobody_is_before(terms) or self._has_kept(server, request):
                try:
                    return grant()
                except GrantingPaused:
                    if not terms.wait:
                        raise
                except NoDeviceFree as error:
                    yields = not isinstance(error, HostFull)
                    yields = yields and self._would_get_yielded(server, request)
                    if not (terms.wait or yields):
                        raise self._with_start(error, server, request, terms) from None
            elif not terms.wait:
                try:
                    return self._now_or_never(new_ticket(), grant)
                except NoDeviceFree as error:
                    raise self._with_start(error, server, request, terms) from None
            return self._enqueue(new_ticket())

    def require_possible(
        self, server: ServerRef, request: Request, *, engine: str, terms: Terms
    ) -> None:
        """Raise the error of a request that would be refused now, however many devices are free.

        For who is to wait unattended, and would read the refusal too late. Raises NoCredits,
        TooMuchAsked, or that no device of this hub fits.
        """
        free = not request.devices
        account = self.leases.ledger.payer(server.user, terms.groups, terms.account, free=free)
        if free and terms.preemptible:
            raise InvalidRequest(
                "Only a run with a GPU can be preemptible: this one asks for none.",
                field="preemptible",
            )
        self.leases.require_budget(request)
        if free:
            return
        if terms.preemptible and self.delegation.delegate is not None:
            raise InvalidRequest(
                "On this cluster Slurm gives out the GPUs, and it knows no preemptible runs. "
                "Submit an ordinary one.",
                field="preemptible",
            )
        request = self._of_member(request, terms)
        ticket = self._ticket(server, request, engine, account, terms)
        with self.line.lock:
            must_run(request, self.positions.devices.look().inventory)
            if not self.line.kinds(request):
                self.positions.require_fit(request)
            with self.store.write() as connection:
                self._must_be_paid(connection, ticket, preemptible=terms.preemptible)
        for limit in self.settings.limits_of(ticket.group):
            _must_be_within(limit, ticket, self.line)

    def dearest(self, request: Request, terms: Terms) -> tuple[int, int]:
        """Return the most microcredits per hour that a request can cost now, and their hold."""
        card = self.prices.all_rates().card(self.clock(), request.environment)
        with self.line.lock:
            rate = max(self._rates(request, card), default=0)
        if terms.preemptible:
            rate = self.prices.preemptible(rate)
        return rate, ledger_rules.hold_for(rate, self.credits.lead(terms.seconds))

    def turns(self, present: frozenset[str]) -> list[str]:
        """Return the tickets whose turn it is, in order; start them with :meth:`start_ticket`.

        ``present`` are the tickets that a spawn of this hub waits with.
        """
        with self.line.lock:
            self.line.attend(present, self.clock())
        if self.delegation.delegate is not None:
            return self._external_turns(present)
        with self.line.lock:
            decision = self.positions.decide()
            starts = [ticket for ticket in decision.starts if ticket in present]
            return self._make_room(starts, decision)

    def count_spare(self) -> int:
        """Return how many devices, and slots of shared ones, preemptible runs could get now."""
        with self.line.lock:
            return sum(int(some * parts_of(kind).slots) for kind, some in self._spare().items())

    def has_spare(
        self, request: Request, user: str = "", groups: frozenset[str] = frozenset()
    ) -> bool:
        """Return True if a member's preemptible run would get its devices now."""
        request = self.positions.of_member(request, groups, preemptible=True)
        with self.line.lock:
            return bool(self._spare_devices(request, user))

    def _spare(self) -> dict[str, DeviceCount]:
        """Return how many devices of each kind preemptible runs may use: no start needs them."""
        if self.delegation.delegate is not None:
            return {}
        decision = self.positions.decide()
        # Positive counts only: of what is left, preemptible runs hold some.
        return subtract(decision.left, self.line.supply.yielded)

    def _spare_devices(self, request: Request, user: str) -> Collection[str]:
        """Return the kinds that a request gets its spare devices from; none if too few are left.

        A request without a device has a kind that is not spare.
        """
        spare, line = self._spare(), self.line
        kinds = line.kinds(request, user)
        order = {kind: place for place, kind in enumerate(line.supply.usable)}

        def rank(kind: str, left: DeviceCount, devices: DeviceCount) -> Preference:
            own = preference(parts_of(kind).groups, request.groups)
            key = kind_preference(kind, left, devices, smallest=request.smallest)
            return own, *key, order.get(kind, 0)

        found = [
            (rank(kind, left, devices), [kind])
            for kind in kinds
            if (left := spare.get(kind, 0)) >= (devices := line.taken_of(kind, request))
        ]
        for pool in shared_pools(kinds).values() if request.devices > 1 else ():
            some = [kind for kind in pool if spare.get(kind, 0) >= 1]
            if len(some) >= request.devices:
                key = rank(some[0], len(some), request.devices)
                found.append((key, some[: request.devices]))
        return min(found, default=((), []))[1]

    def _make_room(self, starts: list[str], decision: Decision) -> list[str]:
        """Return the starts that find all they need; for the others, preemptible runs yield."""
        free, missing = dict(self.line.supply.free), dict[str, DeviceCount]()
        reserved, lacking = NOTHING, NOTHING
        ready = []
        for ticket_id in starts:
            request, held = self.line.tickets[ticket_id].request, decision.takes[ticket_id]
            left = self.line.host_left(request)
            is_room = left is None or request.host.fits(left - reserved)
            lacks = {kind: some for kind, some in held.items() if free.get(kind, 0) < some}
            if is_room and not lacks:
                free = subtract(free, held)
                reserved += request.host
                ready.append(ticket_id)
                continue
            missing = add(missing, lacks)
            if left is not None and not is_room:
                lacking = (lacking + request.host - (left - reserved)).at_least(NOTHING)
        missing = subtract(missing, free)
        if missing or lacking:
            self._let_yield(missing, lacking)
        return ready

    def _let_yield(self, missing: Mapping[str, DeviceCount], lacking: HostAmount) -> None:
        """Have preemptible runs yield what is missing: the youngest, who lose least.

        Devices by kind, and memory and CPU that the host lacks.
        """
        chosen = []
        held = sorted(self.line.preemptible.values(), key=lambda x: x.granted_at, reverse=True)
        for lease in sorted(held, key=lambda x: x.yields_at is None):  # those that do already first
            devices = self.line.kinds_of(lease)
            if devices.keys() & missing.keys() or lease.host.at_most(lacking):
                missing = subtract(missing, devices)
                lacking = (lacking - lease.host).at_least(NOTHING)
                if lease.yields_at is None:
                    chosen.append(lease)
        if not chosen:
            return
        at = self.clock() + timedelta(seconds=YIELD_SECONDS - STOPPING_SECONDS)
        with self.store.write() as connection:
            for lease in chosen:
                leases_repository.update(connection, lease.id, yields_at=at)
        for lease in chosen:
            self.log.info("Lease %s: %s yields its devices to others", lease.id, lease.server)

    def start_ticket(self, ticket_id: str) -> Lease:
        """Grant what a ticket waits for, on disk before the engine creates anything.

        Raises TicketEnded if it waits no more, and Refused if it was ended now because its member
        can no longer have devices; NoDeviceFree and GrantingPaused leave it waiting.
        """
        with self.line.lock:
            ticket = self.line.tickets.get(ticket_id)
            if ticket is None:
                raise TicketEnded(why="it was ended")
            look = self.positions.devices.look()
            try:
                if self.delegation.delegate is None:
                    lease = self._grant_ticket(ticket, look, self._kept_for_others(ticket))
                else:
                    turn, kept = self.delegation.allotted(ticket, look.fleet)
                    lease = self._grant_ticket(ticket, look, kept, turn.since)
            except (NoDeviceFree, GrantingPaused, ServerHasLease):
                raise
            except Refused as error:
                self.end_ticket(ticket_id, "refused", error.message)
                raise
            self.line.drop(ticket_id)
            return lease

    def end_ticket(
        self,
        ticket_id: str,
        outcome: str,
        reason: str,
        *,
        actor: str = "",
        tell: bool = True,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Ticket:
        """Take a ticket out of the queue and record the reason.

        ``outcome`` as in :attr:`gpuspawner.queue.models.Ticket.outcome`. ``actor`` is an admin, for
        the audit log. A ticket that already ended stays as it is, and so does one whose end is no
        longer ``is_wanted`` when the database lets us write. Raises UnknownTicket.
        """
        now = self.clock()
        with self.store.write() as connection:
            ticket = repository.get_ticket(connection, ticket_id, lock=True)
            if ticket.outcome or not is_wanted():
                return ticket
            repository.end_ticket(connection, ticket_id, now, outcome, reason)
            if actor:
                _note(connection, ticket, outcome, actor, reason, now)
            if tell:
                key, kind = f"ticket_ended:{ticket.id}", NoticeKind.TICKET_ENDED
                user = ticket.server.user
                notice = compose("ticket_ended", kind, key, user, now, reason=reason)
                notifications_repository.add(connection, notice)
            ended = repository.get_ticket(connection, ticket_id)
        with self.line.lock:
            self.line.drop(ticket_id)
        self.delegation.take_back(ticket_id, ticket.engine)
        self.log.info("Ticket %s of %s ended (%s): %s", ticket_id, ticket.server, outcome, reason)
        return ended

    def regrouped(self, ticket: Ticket, groups: frozenset[str]) -> dict[str, Any]:
        """Return what changes for a ticket if its member is in these groups, without the store."""
        terms = self._terms_of(ticket.account, groups)
        if self.line.synced:
            terms["request"] = self.line.supply.fleet.of_member(ticket.request, groups)
        return {name: value for name, value in terms.items() if getattr(ticket, name) != value}

    def regroup(self, ticket_id: str, changes: Mapping[str, Any]) -> Ticket:
        """Apply a change of the member's groups to a waiting ticket.

        Raises TooMuchAsked if what it waits for is reserved for groups that the member left.
        """
        if "request" in changes:
            self.positions.require_fit(changes["request"])
        with self.store.write() as connection:
            repository.update_ticket(connection, ticket_id, **changes)
            return repository.get_ticket(connection, ticket_id)

    # Changes by admins.

    @property
    def hours_a_point(self) -> float:
        """How many hours of waiting are worth one point."""
        return self.line.scheduler.policy.waiting_point_seconds / 3600

    def boost(self, ticket_id: str, points: float, *, actor: str, reason: str = "") -> Ticket:
        """Set the points that an admin adds to a ticket's score; 0 removes them.

        Raises UnknownTicket, TicketEnded, or InvalidRequest for an invalid number of points.
        """
        number = isinstance(points, (int, float)) and not isinstance(points, bool)
        if not number or not abs(points) <= MOST_POINTS:  # NaN is refused too
            raise InvalidRequest(
                f"{short_text(points)} is not a number of points: write one from {-MOST_POINTS} "
                f"to {MOST_POINTS}; one is worth {self.hours_a_point:g} hours of waiting.",
                field="points",
            )
        return self._change(ticket_id, "boost", f"{points:+g} points", actor, reason, boost=points)

    def move(self, ticket_id: str, position: int | None, *, actor: str, reason: str = "") -> Ticket:
        """Put a ticket at a position: 1 goes before 2, both before all tickets without one.

        None removes the position. Raises UnknownTicket, TicketEnded or InvalidRequest.
        """
        whole = isinstance(position, int) and not isinstance(position, bool)
        if position is not None and not (whole and 1 <= position <= LAST_POSITION):
            raise InvalidRequest(
                f"{short_text(position)} is not a position in the queue: write 1 for next, 2 "
                "for the one after it.",
                field="position",
            )
        detail = f"to place {position}" if position is not None else "back to the order"
        return self._change(ticket_id, "move", detail, actor, reason, position=position)

    def cancel(self, ticket_id: str, *, actor: str, reason: str) -> Ticket:
        """Take a ticket out of the queue; its member is told the reason.

        Raises UnknownTicket, TicketEnded, or InvalidRequest without a reason.
        """
        why = f"an admin cancelled it: {checked_reason(reason, needed=True)}"
        if (ticket := self.ticket(ticket_id)).outcome:
            raise TicketEnded(_has_ended(ticket))
        ended = self.end_ticket(ticket_id, "cancelled", why, actor=actor)
        if ended.end_reason != why:  # it got its turn, or another admin was faster
            raise TicketEnded(_has_ended(ended))
        return ended

    # Helpers.

    def _change(
        self, ticket_id: str, action: str, detail: str, actor: str, reason: str, **values: Any
    ) -> Ticket:
        reason = checked_reason(reason)
        with self.store.write() as connection:
            ticket = repository.get_ticket(connection, ticket_id, lock=True)
            if ticket.outcome:
                raise TicketEnded(_has_ended(ticket))
            repository.update_ticket(connection, ticket_id, **values)
            detail = f"{detail}: {reason}" if reason else detail
            _note(connection, ticket, action, actor, detail, self.clock())
            return repository.get_ticket(connection, ticket_id)

    def _ask_there(self, ticket: Ticket, *, wait: bool) -> Ticket:
        if not wait:
            self.delegation.require_free(ticket)
        with self.line.lock:
            ticket = self._enqueue(ticket)
        self._hand_over(ticket, tell=False)
        return ticket

    def _external_turns(self, present: frozenset[str]) -> list[str]:
        """Return the tickets that got devices and that a spawn waits with, and submit new ones."""
        decided = self.delegation.next_round()
        for ticket in decided.missing:
            with suppress(Refused):  # its member is told, and the others continue
                self._hand_over(ticket, tell=True)
        for turn in decided.refused:
            self.end_ticket(turn.ticket_id, "refused", turn.over)
        return [turn.ticket_id for turn in decided.granted if turn.ticket_id in present]

    def _hand_over(self, ticket: Ticket, *, tell: bool) -> None:
        """Submit a ticket. If it can never be served, end it and raise Refused."""
        try:
            self.delegation.submit(ticket)
        except Refused as error:
            self.end_ticket(ticket.id, "refused", error.message, tell=tell)
            raise

    def _grant_ticket(
        self,
        ticket: Ticket,
        look: InventorySnapshot,
        kept: frozenset[str],
        since: datetime | None = None,
    ) -> Lease:
        """Grant a lease for a waiting ticket and end the ticket, in one transaction.

        Nothing on the slots ``kept`` for others. ``since``: when an external scheduler allocated
        its devices. Raises TicketEnded if it waits no more.
        """
        now = self.clock()
        require_seen(look, ticket.request)
        waited = (now - ticket.created_at).total_seconds()
        # With an external scheduler everybody has a ticket, also who gets devices at once.
        stood_in_line = since is None or waited > AT_ONCE
        stood_in_line = stood_in_line and ticket.server.kind is LeaseKind.SERVER
        claim = round(60 * self.settings.claim_minutes) or None if stood_in_line else None
        with self.store.write() as connection:
            row = repository.get_ticket(connection, ticket.id, lock=True)
            if row.outcome:
                raise TicketEnded(why=row.end_reason.rstrip("."))
            lease = self.leases.grant_in(
                connection,
                ticket.server,
                ticket.request,
                look,
                now,
                kept=kept,
                granted_at=self._held_since(connection, ticket, since, now),
                account=ticket.account,
                engine=ticket.engine,
                group=ticket.group,
                seconds=ticket.seconds,
                ticket_id=ticket.id,
                claim_seconds=claim,
                when_dry=ticket.when_dry,
                overdraft=ticket.overdraft,
            )
            repository.end_ticket(connection, ticket.id, now, "granted", "its turn came", lease.id)
            if stood_in_line:
                key, user = f"turn:{lease.id}", ticket.server.user
                notice = compose("turn", NoticeKind.TURN, key, user, now, lease=lease)
                notifications_repository.add(connection, notice)
        self.log.info("Lease %s: %s got %s after %d s", lease.id, lease.server, lease.uuids, waited)
        return lease

    def _held_since(
        self, connection: sa.Connection, ticket: Ticket, since: datetime | None, now: datetime
    ) -> datetime:
        # Granted before: that server was lost with its hub.
        if since is None or leases_repository.had_one(connection, ticket.id, ticket.server):
            return now
        return min(max(since, ticket.created_at), now)

    def _grant_spare(
        self, server: ServerRef, request: Request, grant: Callable[..., Lease]
    ) -> Lease:
        """Grant a preemptible run what nobody else can use now. Raises NoDeviceFree."""
        with self.line.lock:
            kinds = self._spare_devices(request, server.user)
            if not kinds:
                raise NoDeviceFree()
            left = self.positions.decide().host_left
            if left and not request.host.fits(left - self.line.reserved_by_preemptible):
                raise HostFull(lacking=request.host.lacking(left))
            return grant(kept=self._of_other_kinds(kinds))

    def _ask_without_device(
        self, ticket: Ticket, grant: Callable[..., Lease], *, wait: bool
    ) -> Lease | Ticket:
        """Return a lease if the host has enough left that nobody else gets first, else a ticket."""
        if not self.line.synced:
            self.positions.sync()
        try:
            return self._now_or_never(ticket, grant) if self.line.tickets else grant()
        except HostFull:
            if not wait:
                raise
        return self._enqueue(ticket)

    def _would_get_yielded(self, server: ServerRef, request: Request) -> bool:
        """Return True if it starts in two minutes, because preemptible runs yield enough."""
        self.positions.sync()
        return self.line.has_enough(request, self.line.supply.grantable, server.user)

    def _nobody_is_before(self, terms: Terms) -> bool:
        """Return True if a request may bypass the queue: nobody waits, and no limits apply."""
        if not self.line.synced:
            self.positions.sync()
        if self.line.tickets:
            return False
        limits = self.settings.limits_of(self.settings.standing_of(terms.groups)[0])
        return not any(limit.can_hold_back for limit in limits)

    def _has_kept(self, server: ServerRef, request: Request) -> bool:
        """Return True if exactly these devices are reserved for a server that restarts."""
        kept = self.store.run(lambda connection: leases_repository.kept_devices(connection, server))
        return asks_for(
            request, self.positions.devices.look().devices, {closure.subject for closure in kept}
        )

    def _now_or_never(self, probe: Ticket, grant: Callable[..., Lease]) -> Lease:
        """Return a lease if the scheduler lets this request go before all waiting tickets."""
        self.positions.sync()
        waiting = self.line.waiting(probe)
        self.line.scheduler.submit(waiting)
        try:
            decision = self.line.scheduler.decide(
                waiting.asked_at, self.line.supply.free, reasons=True, host=self.line.host_use
            )
        finally:
            self.line.scheduler.withdraw(probe.id)
        if probe.id in decision.starts:
            return grant(kept=self._of_other_kinds(decision.takes[probe.id]))
        if lacking := decision.waits_for_host.get(probe.id):
            raise HostFull(lacking=lacking)
        why = decision.held_back.get(probe.id)
        others = len(self.line.tickets)
        ahead = f"{others} {'server waits' if others == 1 else 'servers wait'} for a GPU before you"
        sentence = f"{why or ahead}."
        raise NoDeviceFree(sentence[0].upper() + sentence[1:], waiting=others)

    def _with_start(
        self, error: NoDeviceFree, server: ServerRef, request: Request, terms: Terms
    ) -> NoDeviceFree:
        """Return the refusal with the expected start of the same request in the queue."""
        now = self.clock()
        ask = self.positions.outlooks
        outlook = ask({"": request}, server.user, terms.groups, seconds=terms.seconds)[""]
        start = outlook.start(now)
        when = f" Expected start in the queue: {start}." if start else ""
        advice = "Join the queue, or start without a GPU."
        summary = error.message.rstrip(".")
        return NoDeviceFree(
            f"{summary}.{when} {advice}",
            **error.fields,
            summary=f"{summary}.",
            outlook=outlook,
            now=now,
            advice=advice,
        )

    def _enqueue(self, ticket: Ticket) -> Ticket:
        """Queue a ticket. No sync with the store is needed: the next round has one."""
        server, request = ticket.server, ticket.request
        must_run(request, self.positions.devices.look().inventory)
        if not self.line.kinds(request):
            self.positions.require_fit(request)
        first = self.positions.first_estimate(ticket)
        with self.store.write() as connection:
            require_member(connection, server.user)
            if leases_repository.open_of(connection, server):
                raise ServerHasLease()
            mine = repository.open_of_member(connection, server.user)
            known = next((each for each in mine if each.server == server), None)
            if known and _is_same(known.request, request):
                return self._asked_again(connection, known, ticket)
            if known:
                why = "another request was made for the same server"
                repository.end_ticket(connection, known.id, ticket.created_at, "replaced", why)
            self._must_be_allowed(connection, ticket, len(mine) - bool(known))
            if leases_repository.no_shows_in_a_row(connection, server.user) >= 2:
                ticket = replace(ticket, last=True)
            if known or ticket.last:
                first = None  # it was for another place in the queue: the next round has a new one
            repository.insert_ticket(connection, ticket, first)
        if known:
            self.line.drop(known.id)
        self.line.add(ticket)
        what = format_gpus(request.devices) if request.devices else str(request.host)
        self.log.info("Ticket %s: %s waits for %s", ticket.id, server, what)
        return ticket

    def _asked_again(self, connection: sa.Connection, known: Ticket, ticket: Ticket) -> Ticket:
        """Update a repeated request: same devices, maybe other hours or payer; same position."""
        if any(getattr(known, name) != getattr(ticket, name) for name in CHANGEABLE):
            self._must_be_paid(connection, ticket)
            for limit in self.settings.limits_of(known.group):
                _must_be_within(limit, ticket, self.line)
            changes = {name: getattr(ticket, name) for name in (*CHANGEABLE, "options")}
            repository.update_ticket(connection, known.id, **changes)
            known = repository.get_ticket(connection, known.id)
            self.line.add(known)
        elif known.id not in self.line.tickets:
            self.line.add(known)
        return known

    def _of_member(self, request: Request, terms: Terms) -> Request:
        return self.positions.of_member(request, terms.groups, preemptible=terms.preemptible)

    def _ticket(
        self, server: ServerRef, request: Request, engine: str, account: str, terms: Terms
    ) -> Ticket:
        return Ticket(
            id=secrets.token_hex(8),
            server=server,
            request=request,
            options=dict(terms.options),
            engine=engine,
            account=account,
            seconds=terms.seconds,
            created_at=self.clock().astimezone(timezone.utc),
            since=terms.since,
            **self._terms_of(account, terms.groups),
        )

    def _terms_of(self, account: str, groups: frozenset[str]) -> dict[str, Any]:
        """Return the fields of a ticket that follow from its member's groups."""
        group, priority = self.settings.standing_of(groups)
        policy = self.credits.policy_for(account, groups)
        terms = {"group": group, "priority": priority}
        return terms | {"when_dry": policy.when_dry, "overdraft": policy.overdraft}

    def _must_be_allowed(self, connection: sa.Connection, ticket: Ticket, others: int) -> None:
        """Raise NoCredits, TooManyTickets, or TooMuchAsked if it could never get its turn.

        ``others`` is how many other servers of the member wait.
        """
        self._must_be_paid(connection, ticket)
        of_member, of_group = self.settings.limits_of(ticket.group)
        in_group = 0
        if of_group.tickets is not None:
            in_group = repository.count_of_group(connection, ticket.group)
        for count, limit in ((others, of_member), (in_group, of_group)):
            if limit.tickets is not None and count >= limit.tickets:
                raise TooManyTickets(count=count, most=limit.tickets)
            _must_be_within(limit, ticket, self.line)

    def _must_be_paid(
        self, connection: sa.Connection, ticket: Ticket, *, preemptible: bool = False
    ) -> None:
        """Raise NoCredits if the account cannot pay for the cheapest devices that fit."""
        payer = self.leases.payer_now(connection, ticket.account, ticket.created_at)
        request = ticket.request
        card = self.prices.rates_in(connection).card(ticket.created_at, request.environment)
        rate = min(self._rates(request, card), default=0)
        lead = self.credits.lead(ticket.seconds)
        if preemptible:
            rate = self.prices.preemptible(rate)
        hold = ledger_rules.hold_for(rate, lead)
        self.leases.require_credits(payer, hold, rate, lead)

    def _rates(self, request: Request, card: RateCard) -> list[int]:
        """Return the microcredits per hour that a request would cost on each kind that fits."""
        is_share = self.line.is_for_share(request)
        kinds = map(parts_of, self.line.kinds(request))
        return [
            card.rate_of(p.model, p.slots, p.part, p.slots_for(request.memory_bytes))
            if is_share
            else card.rate_of(p.model, part=p.part) * request.devices
            for p in kinds
        ]

    def _kept_for_others(self, ticket: Ticket) -> frozenset[str]:
        """Return the closures, as texts, of devices of other kinds than the scheduler chose.

        Raises NoDeviceFree if it chose none any more, and the ticket might get a share of a device
        that is kept until it is empty.
        """
        kinds = self.positions.decide().takes.get(ticket.id)
        if kinds is None and self.leases.budget and ticket.request.host:
            raise HostFull(lacking=str(ticket.request.host))
        if kinds is None and not self.line.paused and self.line.is_for_share(ticket.request):
            raise NoDeviceFree()
        return self._of_other_kinds(kinds)

    def _of_other_kinds(self, kinds: Collection[str] | None) -> frozenset[str]:
        fleet = self.line.supply.fleet
        kept = {Slot.closure(uuid) for uuid in self.line.closed if uuid in fleet.by_uuid}
        if kinds is not None:
            kept |= {Slot.closure(d.uuid) for d in fleet.devices if kind_of(d) not in kinds}
        return texts(kept)


def _must_be_within(limit: QueueLimits, ticket: Ticket, line: QueueState) -> None:
    """Raise TooMuchAsked if a ticket alone exceeds a limit."""
    asked = line.asked(ticket.request)
    if limit.devices is not None and asked > limit.devices:
        raise TooMuchAsked(
            f"You asked for {format_gpus(asked)}, but your limit is {limit.devices} at once. "
            f"Ask for {limit.devices} or fewer.",
            asked=ticket.request.devices,
            most=limit.devices,
        )
    gpus = most_equivalents(asked, line.kinds(ticket.request))
    hours = float(gpus * (ticket.seconds or 0)) / 3600
    if limit.gpu_hours is not None and hours > limit.gpu_hours:
        raise TooMuchAsked(
            f"You asked for {hours:g} GPU-hours, but your limit is {limit.gpu_hours:g}. "
            "Ask for fewer GPUs or fewer hours.",
            asked=ticket.request.devices,
        )


def _is_same(known: Request, request: Request) -> bool:
    """Return True if both ask for the same, whatever groups their member has come to be in."""
    return replace(known, groups=request.groups) == request


def _has_ended(ticket: Ticket) -> str:
    return (
        f"The ticket of {ticket.server} is no longer waiting ({ticket.outcome}: "
        f"{ticket.end_reason.rstrip('.')}). Nothing was changed."
    )


def _note(
    connection: sa.Connection, ticket: Ticket, action: str, actor: str, detail: str, now: datetime
) -> None:
    subject = f"ticket {ticket.id} of {ticket.server}"
    audit_log.note(connection, at=now, actor=actor, action=action, subject=subject, detail=detail)
