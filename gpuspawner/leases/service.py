"""Grants and reads of leases."""

from __future__ import annotations

import secrets
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import sqlalchemy as sa

from ..core.errors import (
    GrantingPaused,
    NoCredits,
    NoDeviceFree,
    ServerHasLease,
    TicketEnded,
)
from ..core.units import format_credits
from ..db import audit as db_audit
from ..db import hash_chain
from ..db.engine import Store
from ..devices import closures as devices_closures
from ..devices import snapshots
from ..devices.closures import GRANTING, AuditEntry, Closure
from ..devices.models import Device, model_matches
from ..devices.placement import Fleet, asks_for, must_run, texts
from ..devices.snapshots import InventorySnapshot
from ..ledger import rules as ledger_rules
from ..ledger.credit_policy import OVERDRAFT
from ..ledger.models import Account
from ..ledger.prices import priced_at
from ..notifications import repository as notifications_repository
from ..queue import repository as queue_repository
from ..queue.models import Ticket
from ..queue.service import Queue, Terms, must_be_member, your_turn
from . import allocation, repository
from .models import Lease, LeasedDevice, Request, ServerRef, Slot


class Reads:
    """Questions to the store; each one is answered from one consistent view."""

    store: Store

    def open_leases(self) -> list[Lease]:
        """All open leases, oldest first."""
        return self.store.run(repository.open_leases)

    def lease_of(self, server: ServerRef) -> Lease | None:
        """The open lease of a server, if it has one."""
        return self.store.run(lambda connection: repository.open_of(connection, server))

    def lease(self, lease_id: str) -> Lease:
        """One lease, open or ended. Raises UnknownLease."""
        return self.store.run(lambda connection: repository.get(connection, lease_id))

    def leases_of(self, account: str | None, limit: int = 50) -> list[Lease]:
        """The newest leases of an account (None: of everybody), newest first."""
        return self.store.run(lambda connection: repository.of_account(connection, account, limit))

    def ticket(self, ticket_id: str) -> Ticket:
        """One ticket, waiting or ended. Raises UnknownTicket."""
        return self.store.run(lambda connection: queue_repository.get_ticket(connection, ticket_id))

    def tickets_of(self, user: str, limit: int = 20) -> list[Ticket]:
        """A member's newest tickets, newest first."""
        return self.store.run(
            lambda connection: queue_repository.tickets_of_user(connection, user, limit)
        )

    def waiting(self) -> list[Ticket]:
        """Every ticket that waits, oldest first."""
        return self.store.run(queue_repository.waiting_tickets)

    def closures(self) -> dict[str, Closure]:
        """Everything that is closed to new leases, by subject."""
        return self.store.run(devices_closures.load)

    def asked_for(self, since: datetime) -> list[tuple[datetime, Lease]]:
        """Leases with devices that ended since then, and when each was asked for, in order."""
        return self.store.run(lambda connection: queue_repository.asked_for(connection, since))

    def trail(self, limit: int = 100) -> list[AuditEntry]:
        """The newest lines of the audit trail, newest first."""
        return self.store.run(lambda connection: devices_closures.trail(connection, limit))

    def audit(self) -> tuple[list[db_audit.AuditFinding], dict[str, int]]:
        """Every invariant held against every row, and how many rows there are, by table."""
        return self.store.run(lambda c: (list(db_audit.audit(c)), db_audit.sizes(c)))

    def chain_head(self) -> str:
        """Return the head of the audit chain, to be noted elsewhere."""
        return self.store.run(hash_chain.head)

    def knows_head(self, noted: str) -> bool:
        """Return True if a head of the audit chain that was noted earlier is still in it."""
        return self.store.run(lambda connection: hash_chain.knows(connection, noted))


PAUSED = Slot(GRANTING).text
"""Taken while granting is paused."""

STOPPING = timedelta(minutes=2)
"""What it takes beyond the grace: a round of the accounting service to notice that an account
is dry, and one to stop its servers."""

AT_ONCE = 15.0
"""Seconds in which another scheduler gives devices at once, also to who is new to it: whoever asked
is still there. Who waited longer stood in line."""


class Grants(Queue, Reads):
    """The part of the broker that gives devices out."""

    def acquire(
        self,
        server: ServerRef,
        request: Request,
        *,
        engine: str,
        account: str = "",
        terms: Terms | None = None,
    ) -> Lease:
        """Grant devices to a server, hold credits, and write it all down. Then, not before,
        may the engine create anything.

        Now or never, whoever waits: :meth:`ask` is the way for members. ``account`` pays; the
        default is the member's own. Raises NoDeviceFree, TooMuchAsked, NoCredits, MembershipEnded,
        GrantingPaused, ServerHasLease or StoreUnavailable; then nothing was written.
        """
        terms = terms or Terms()
        free = not request.devices
        account = account or self.ledger.payer(server.user, terms.groups, terms.account, free=free)
        policy = self.settings.credits.policy_for(account, terms.groups)
        grant = partial(
            self._grant,
            server,
            request,
            engine=engine,
            account=account,
            group=self.settings.queue.standing_of(terms.groups)[0] if terms.groups else "",
            seconds=terms.seconds if request.devices else None,
            when_dry=policy.when_dry,
            overdraft=policy.overdraft,
            shown_at=terms.shown_at,
        )
        try:
            return grant(self.look())
        except NoDeviceFree as error:
            # A process of the last server may have ended since the last look.
            if not error.fields.get("occupied"):
                raise self._with_end(error, request) from None
        try:
            return grant(self.look(fresh=True))
        except NoDeviceFree as error:
            raise self._with_end(error, request) from None

    def _grant(
        self,
        server: ServerRef,
        request: Request,
        look: InventorySnapshot,
        *,
        account: str,
        **terms: Any,
    ) -> Lease:
        now = self.clock()
        _must_be_seen(look, request)
        with self.store.write() as connection:
            lease = self._lease(connection, server, request, look, now, account=account, **terms)
        self.log.info("Lease %s: %s got %s", lease.id, server, lease.uuids or "no device")
        return lease

    def _grant_ticket(
        self,
        ticket: Ticket,
        look: InventorySnapshot,
        kept: frozenset[str],
        since: datetime | None = None,
    ) -> Lease:
        """A lease for a ticket that waits, and the ticket's end, in one transaction.

        Nothing on the places ``kept`` for others. ``since``: when another scheduler gave it its
        devices. Raises TicketEnded if it waits no more.
        """
        now = self.clock()
        _must_be_seen(look, ticket.request)
        waited = (now - ticket.created_at).total_seconds()
        # Where another scheduler decides, everybody has a ticket, also who gets devices at once.
        stood_in_line = since is None or waited > AT_ONCE
        claim = round(60 * self.settings.queue.claim_minutes) or None if stood_in_line else None
        with self.store.write() as connection:
            row = queue_repository.get_ticket(connection, ticket.id, lock=True)
            if row.outcome:
                raise TicketEnded(why=row.end_reason.rstrip("."))
            lease = self._lease(
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
            queue_repository.end_ticket(
                connection, ticket.id, now, "granted", "its turn came", lease.id
            )
            if stood_in_line:
                notifications_repository.add(connection, your_turn(ticket, lease, now))
        self.log.info("Lease %s: %s got %s after %d s", lease.id, lease.server, lease.uuids, waited)
        return lease

    def _lease(
        self,
        connection: sa.Connection,
        server: ServerRef,
        request: Request,
        look: InventorySnapshot,
        now: datetime,
        *,
        account: str,
        kept: frozenset[str] = frozenset(),
        shown_at: datetime | None = None,
        granted_at: datetime | None = None,
        **terms: Any,
    ) -> Lease:
        """Choose the places, hold the credits and write the lease, in the caller's transaction."""
        known = allocation.read(connection, server, account)
        if known.is_former:
            must_be_member(connection, server.user)
        if known.lease_id:
            raise ServerHasLease()
        places: tuple[Slot, ...] = ()
        taken = known.taken
        if known.kept:
            for uuid in known.kept:  # closed to others no more, whatever is asked for
                devices_closures.reopen(connection, uuid)
            taken = repository.places_taken(connection)
            if asks_for(request, look.devices, known.kept):
                kept = _all_but(known.kept, look.fleet)
                seconds = terms.get("seconds"), repository.left_of(connection, server, now)
                terms["seconds"] = min((x for x in seconds if x is not None), default=None)
        if request.devices:
            if PAUSED in taken:
                raise GrantingPaused(
                    why=devices_closures.load(connection)[GRANTING].reason or "maintenance"
                )
            places = look.fleet.choose(request, taken | kept if kept else taken)
        devices = tuple(_leased(place, look.fleet.by_uuid[place.uuid]) for place in places)
        prices = self.prices
        rates = prices.rates_in(connection) if known.has_rates else prices.configured
        priced = [look.fleet.by_uuid[x.uuid] for x in places]
        cards = (rates.card(at, request.environment) for at in priced_at(now, shown_at))
        rate = min(card.price(priced) for card in cards)
        payer = known.account
        if payer is None or known.is_paying or (known.first_due and known.first_due <= now):
            payer = self._payer_now(connection, account, now)
        if known.overdraft is not None and terms.get("when_dry") == OVERDRAFT:
            terms["overdraft"] = known.overdraft  # of an account there is one at a time
        lead = self.settings.credits.lead(terms.get("seconds"))
        hold = ledger_rules.hold_for(rate, lead)
        self._check_credits(payer, hold, rate, lead)
        lease = Lease(
            id=secrets.token_hex(8),
            server=server,
            account=account,
            environment=request.environment,
            devices=devices,
            rate=rate,
            hold=hold,
            granted_at=granted_at or now,
            engine_id=self.engine_ids.get(terms["engine"], ""),
            **terms,
        )
        repository.insert(connection, lease)
        if known.kept:
            repository.go_on_resting(connection, lease)
        return lease

    # Steps of the above.

    def _held_since(
        self, connection: sa.Connection, ticket: Ticket, since: datetime | None, now: datetime
    ) -> datetime:
        """Since when a ticket has its devices: they may be given to it a second time, when the
        first server was lost with its hub."""
        if since is None or repository.had_one(connection, ticket):
            return now
        return min(max(since, ticket.created_at), now)

    def _check_credits(self, account: Account, hold: int, rate: int, lead: timedelta) -> None:
        """Raises NoCredits; ``lead`` is the time that must be paid for at the start."""
        if ledger_rules.can_afford(account.available, hold):
            return
        set_aside = ""
        if account.held:
            set_aside = f" ({format_credits(account.held)} more are set aside for running servers)"
        kind, _, name = account.name.partition(":")
        whose = f"The group {name}'s" if kind == "group" else "Your"
        settings = self.settings.credits
        first = f"the first {settings.hold_minutes:g} minutes"
        if settings.hold_session and lead != settings.lead(None):
            first = f"the whole session of {ledger_rules.format_time_left(lead)}"
        raise NoCredits(
            f"{whose} balance of {format_credits(account.available)} credits{set_aside} does not "
            f"cover this: it costs {format_credits(rate)} credits an hour, and {first} "
            f"({format_credits(-(-hold // 10_000) * 10_000)}) must "
            f"be there at the start. {settings.help_text} You can start without a GPU: "
            "that is free.",
            balance=account.available,
            hold=hold,
        )

    def _with_end(self, error: NoDeviceFree, request: Request) -> NoDeviceFree:
        """The refusal with when devices come back at the latest, and what to do now."""
        now = self.clock()
        running = self.open_leases()
        accounts = {account.name: account for account in self.ledger.accounts()}
        grace = timedelta(seconds=self.settings.credits.grace_seconds) + STOPPING
        ends = snapshots.latest_ends(running, accounts, grace, now)
        fitting = [
            ends[lease.id]
            for lease in running
            for device in lease.devices
            if lease.id in ends and _fits(device, request)
        ]
        promise = snapshots.free_by(fitting, request.devices, now)
        sentence = error.message.rstrip(".") + (f" ({promise})" if promise else "")
        advice = "Start without a GPU, or try again."
        return NoDeviceFree(f"{sentence}. {advice}", **error.fields)


def _all_but(uuids: frozenset[str], fleet: Fleet) -> frozenset[str]:
    """The places on all other devices."""
    others = [device for device in fleet.devices if device.uuid not in uuids]
    return texts(Slot(device.uuid, slot) for device in others for slot in range(device.slots))


def _must_be_seen(look: InventorySnapshot, request: Request) -> None:
    """Raises NoDeviceFree when nothing was ever seen: that is not to have no GPU; TooMuchAsked
    when the driver that was seen is too old."""
    if request.devices and look.inventory.error and not look.devices:
        raise NoDeviceFree(
            f"The GPUs cannot be seen just now, so none is given out: {look.inventory.error}",
            unknown=0,
        )
    must_run(request, look.inventory)


def _leased(place: Slot, device: Device) -> LeasedDevice:
    return LeasedDevice(
        uuid=place.uuid,
        slot=place.slot,
        index=device.index,
        model=device.model,
        memory_bytes=device.memory_bytes,
    )


def _fits(device: LeasedDevice, request: Request) -> bool:
    wanted = [request.models, (request.model,) if request.model else ()]
    return device.memory_bytes >= request.memory_bytes and all(
        any(model_matches(model, device.model) for model in models) for models in wanted if models
    )
