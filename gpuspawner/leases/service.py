"""Grant, confirm, follow and release leases, in one transaction each."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

import sqlalchemy as sa

from ..core.clock import engine_time
from ..core.errors import (
    GrantingPaused,
    HostFull,
    NoCredits,
    NoDeviceFree,
    ServerHasLease,
    TooMuchAsked,
    UnknownLease,
)
from ..core.units import format_credits, format_price
from ..db.clock import Timekeeper
from ..db.engine import Store
from ..devices import closures as devices_closures
from ..devices.closures import GRANTING
from ..devices.models import Device
from ..devices.placement import PlacementIndex, texts
from ..devices.service import DeviceService
from ..devices.snapshots import InventorySnapshot
from ..devices.suitability import asks_for, must_run
from ..ledger import charges
from ..ledger import repository as ledger_repository
from ..ledger import rules as ledger_rules
from ..ledger.credit_policy import OVERDRAFT
from ..ledger.models import Account
from ..ledger.prices import PriceService, priced_at
from ..ledger.service import LedgerService, note
from ..ledger.settings import GPUCredits
from ..members.service import require_member
from . import allocation, reconciliation, repository
from .host_resources import HostAmount, HostBudget
from .models import Lease, LeasedDevice, LeaseState, Request, ServerRef, Sighting, Slot, Terms

PAUSED = Slot.closure(GRANTING).text
"""What is taken while granting is paused."""

ON_THIS_HOST = ("docker", "local")
"""Engines whose servers end when this machine goes down."""


@dataclass(eq=False)
class LeaseService:
    """The only code that grants and releases.

    Methods are synchronous and thread-safe; code in an event loop calls them through
    :meth:`gpuspawner.services.Services.run`.
    """

    store: Store
    clock: Timekeeper
    settings: GPUCredits
    _: KW_ONLY
    devices: DeviceService
    prices: PriceService
    ledger: LedgerService
    take_back: Callable[[str | None, str], None]
    """Tells the external scheduler that the server of a ticket is gone."""
    log: logging.Logger
    budget: HostBudget | None = None
    """How much of the host's memory and CPU leases may reserve; None if that has no budget."""
    engine_ids: dict[str, str] = field(default_factory=dict)
    """The last known identity of each engine, by the engine's name."""

    def open_leases(self) -> list[Lease]:
        """Return all open leases, oldest first."""
        return self.store.run(repository.open_leases)

    def of_server(self, server: ServerRef) -> Lease | None:
        """Return the open lease of a server, if it has one."""
        return self.store.run(lambda connection: repository.open_of(connection, server))

    def get(self, lease_id: str) -> Lease:
        """Return a lease, open or ended. Raises UnknownLease."""
        return self.store.run(lambda connection: repository.get(connection, lease_id))

    def of_account(self, account: str | None, limit: int = 50) -> list[Lease]:
        """Return the newest leases of an account (None: of all accounts), newest first."""
        return self.store.run(lambda connection: repository.of_account(connection, account, limit))

    def grant(
        self,
        server: ServerRef,
        request: Request,
        *,
        engine: str,
        account: str = "",
        group: str = "",
        terms: Terms | None = None,
        kept: frozenset[str] = frozenset(),
    ) -> Lease:
        """Grant devices to a server and hold credits, on disk before the engine creates anything.

        This ignores the queue and never waits: members go through :meth:`QueueService.ask`.
        ``account`` pays; the default is the member's own. No slot in ``kept`` is granted. Raises
        NoDeviceFree, TooMuchAsked, NoCredits, MembershipEnded, GrantingPaused, ServerHasLease or
        StoreUnavailable; then nothing was written.
        """
        terms = terms or Terms()
        free = not request.devices
        account = account or self.ledger.payer(server.user, terms.groups, terms.account, free=free)
        policy = self.settings.policy_for(account, terms.groups)
        look = self.devices.look()
        grant = partial(
            self._try_grant,
            server,
            look.fleet.of_member(request, terms.groups, preemptible=terms.preemptible),
            engine=engine,
            account=account,
            group=group,
            seconds=terms.seconds if request.devices else None,
            when_dry=policy.when_dry,
            overdraft=policy.overdraft,
            shown_at=terms.shown_at,
            preemptible=terms.preemptible,
            kept=kept,
        )
        try:
            return grant(look)
        except NoDeviceFree as error:
            # A process of the previous server may have ended since the last snapshot.
            if not error.fields.get("occupied"):
                raise
        return grant(self.devices.look(fresh=True))

    def _try_grant(
        self,
        server: ServerRef,
        request: Request,
        look: InventorySnapshot,
        *,
        account: str,
        **terms: Any,
    ) -> Lease:
        now = self.clock()
        require_seen(look, request)
        with self.store.write() as connection:
            lease = self.grant_in(connection, server, request, look, now, account=account, **terms)
        self.log.info("Lease %s: %s got %s", lease.id, server, lease.uuids or "no device")
        return lease

    def grant_in(
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
        """Choose slots, hold credits and insert the lease, in the caller's transaction."""
        known = allocation.read(connection, server, account, with_host=self.budget is not None)
        if known.is_former:
            require_member(connection, server.user)
        if known.lease_id:
            raise ServerHasLease()
        devices: tuple[LeasedDevice, ...] = ()
        places: tuple[Slot, ...] = ()
        is_share = look.fleet.is_for_share(request)
        taken = known.taken
        if known.kept:
            for uuid in known.kept:  # reopened, whatever is requested
                devices_closures.reopen(connection, uuid)
            taken = repository.places_taken(connection)
            if asks_for(request, look.devices, known.kept):
                kept = slots_beside(known.kept, look.fleet)
                seconds = terms.get("seconds"), repository.left_of(connection, server, now)
                terms["seconds"] = min((x for x in seconds if x is not None), default=None)
        if known.reserved is not None:
            self._require_room(request, known.reserved, look.fleet, taken)
        if request.devices:
            if PAUSED in taken:
                raise GrantingPaused(
                    why=devices_closures.load(connection)[GRANTING].reason or "maintenance"
                )
            fleet = look.fleet
            own: Collection[str] = ()
            if is_share and not fleet.is_external:  # that gives several of a device
                own = repository.shared_by(connection, server.user)
            places = fleet.choose(request, taken | kept if kept else taken, shared=own)
            devices = _leased_devices(places, fleet.by_uuid, is_share=is_share)
            if look.can_be_shared:
                self.devices.require_same_slots(connection, devices)
        rates = self.prices.rates_in(connection) if known.has_rates else self.prices.configured
        cards = (rates.card(at, request.environment) for at in priced_at(now, shown_at))
        rate = min(card.price(devices) for card in cards)
        if terms.get("preemptible"):
            rate = self.prices.preemptible(rate)
        payer = known.account
        if payer is None or known.is_paying or (known.first_due and known.first_due <= now):
            payer = self.payer_now(connection, account, now)
        if known.overdraft is not None and terms.get("when_dry") == OVERDRAFT:
            terms["overdraft"] = known.overdraft  # an account has one at a time
        lead = self.settings.lead(terms.get("seconds"))
        hold = ledger_rules.hold_for(rate, lead)
        self.require_credits(payer, hold, rate, lead)
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
            **request.host.as_fields(),
            **terms,
        )
        repository.insert(
            connection,
            lease,
            places if is_share else (),
            one_share_a_device=not look.fleet.is_external,
        )
        if known.kept:
            repository.go_on_resting(connection, lease)
        return lease

    def host_reserved(self) -> HostAmount:
        """Return how much of the host's memory and CPU is reserved, also for restarts."""
        return self.store.run(repository.reserved)

    def require_budget(self, request: Request) -> None:
        """Raise TooMuchAsked if the host can never guarantee so much, however long it waits."""
        if self.budget is None or request.host.fits(self.budget.total):
            return
        raise TooMuchAsked(
            f"This environment guarantees its server {request.host}, but this machine has "
            f"{self.budget.total.less_than(request.host)} for all servers together. Choose less or "
            "another environment, or tell your admin.",
            field="environment",
        )

    def _require_room(
        self, request: Request, reserved: HostAmount, fleet: PlacementIndex, taken: frozenset[str]
    ) -> None:
        """Raise HostFull if the host has too little memory or CPU left, or TooMuchAsked."""
        self.require_budget(request)
        if self.budget is None or not request.host:
            return
        has_devices = bool(request.devices)
        free = 0 if has_devices else fleet.count_free(taken)
        left = self.budget.left(reserved, free, has_devices=has_devices)
        if not request.host.fits(left):
            raise HostFull(lacking=request.host.lacking(left))

    def payer_now(self, connection: sa.Connection, name: str, now: datetime) -> Account:
        """Return the account, less everything its servers owe but were not charged yet."""
        account = self.ledger.open_in(connection, name, now)
        return ledger_rules.owing(
            [lease for lease, _ in repository.paying(connection, name)], account, now
        )

    def require_credits(self, account: Account, hold: int, rate: int, lead: timedelta) -> None:
        """Raise NoCredits if the hold cannot be paid; ``lead`` is the time that it covers."""
        if ledger_rules.can_afford(account.available, hold):
            return
        set_aside = ""
        if account.held:
            set_aside = f" ({format_credits(account.held)} more are set aside for running servers)"
        kind, _, name = account.name.partition(":")
        whose = f"The group {name}'s" if kind == "group" else "Your"
        first = f"the first {self.settings.hold_minutes:g} minutes"
        if self.settings.hold_session and lead != self.settings.lead(None):
            first = f"the whole session of {ledger_rules.format_time_left(lead)}"
        raise NoCredits(
            f"{whose} balance of {format_credits(account.available)} credits{set_aside} does not "
            f"cover this: it costs {format_price(rate)} credits an hour, and {first} "
            f"({format_credits(-(-hold // 10_000) * 10_000)}) must "
            f"be there at the start. {self.settings.help_text} You can start without a GPU: "
            "that is free.",
            balance=account.available,
            hold=hold,
        )

    # From confirmation to release.

    def confirm(
        self,
        lease_id: str,
        engine_ref: str = "",
        *,
        started_at: datetime | None = None,
        devices: Sequence[LeasedDevice] | None = None,
    ) -> Lease:
        """Record that the server responded or was adopted. Calling it twice changes nothing.

        It is charged from ``started_at`` by the engine's wall clock, or from now if that is
        unknown. ``devices`` are the lease's devices, if the caller has them: they never change.
        """
        now = self.clock().astimezone(timezone.utc)
        times = self.clock.possible_times(started_at)
        with self.store.write() as connection:
            row = repository.confirm(connection, lease_id, now, engine_ref)
            if row is None:
                return repository.get(connection, lease_id)
            lease = repository.from_row(row, ())
            granted = lease.granted_at
            if granted < now:
                began = engine_time(times, granted, now, costs_least=max)
                if began is not None:
                    began = min(max(began, granted), now).astimezone(timezone.utc)
                    row = repository.began(connection, lease_id, began)
            if devices is None:
                devices = repository.devices_of(connection, lease_id)
        return repository.from_row(row, devices)

    def note_engine(self, lease_id: str, engine_id: str) -> None:
        """Record which engine runs a lease's server, before anything of it is created."""
        with self.store.write() as connection:
            repository.update(connection, lease_id, engine_id=engine_id)

    def follow_rename(self, lease_id: str, server: ServerRef) -> Lease:
        """Record that a running server has a new name because its member was renamed at the Hub.

        The paying account stays, and so does everything else of the old name. Ended leases, and
        those whose new name already has a lease, are left alone. Raises UnknownLease.
        """
        with self.store.write() as connection:
            lease = repository.get(connection, lease_id, lock=True)
            ended = lease.state is LeaseState.ENDED
            if ended or lease.server == server or repository.open_of(connection, server):
                return lease
            repository.update(connection, lease_id, user=server.user, server_name=server.name)
            old, new, payer = lease.server.user, server.user, lease.account
            detail = (
                f"lease {lease.id}: {lease.server} is {server} at the Hub; {payer} keeps paying"
            )
            note(connection, "hub", "renamed", old, detail, self.clock())
        self.log.warning(
            "The member %s was renamed to %s at the Hub. The server continues; %s pays for it. "
            "Credits, history and files are still those of %s: give them the new name with "
            "`gpuspawner members rename %s %s`, or rename the member back.",
            *(old, new, payer, old, old, new),
        )
        return replace(lease, server=server)

    def release(
        self,
        lease_id: str,
        *,
        ended_at: datetime | None = None,
        stopped_at: datetime | None = None,
        reason: str,
        failed: bool = False,
        lost: bool = False,
        still: LeaseState | None = None,
    ) -> Lease:
        """Settle a lease and free its devices. Only for a server that is proven gone.

        Calling it twice changes nothing.

        Args:
            lease_id: The lease.
            ended_at: The server's proven end by the engine's wall clock.
            stopped_at: Used if ``ended_at`` is unknown, by :attr:`clock`. Without either, the lease
                is charged up to when its server was last seen alive.
            reason: Why it ended.
            failed: The start failed; it costs nothing.
            lost: It went down with the hub that started it. If its member had not connected yet, it
                costs nothing, and its ticket returns to its position in the queue.
            still: Release only if the lease is still in this state; it may have started since the
                proof.
        """
        now, times = self.clock(), self.clock.possible_times(ended_at)
        with self.store.write() as connection:
            lease, newest = repository.get_to_end(connection, lease_id)
            if lease.state is LeaseState.ENDED or still not in (None, lease.state):
                return lease
            end = self._end_of(lease, times, stopped_at, now)
            # A server that nobody connected to costs nothing, like a failed start.
            back = (
                lost
                and _awaited(lease)
                and repository.reopen_ticket(connection, lease.ticket_id or "")
            )
            if back or (failed and not lease.outcome):
                # For the settlement: it owes nothing.
                lease = replace(lease, outcome="lost" if back else "failed")
                repository.update(connection, lease.id, outcome=lease.outcome)
            failed = failed or lease.outcome in ("no_show", "lost")
            owed = ledger_rules.settlement(lease, end, failed)
            due = charges.payable(connection, lease, owed, end)
            if transfer := ledger_rules.settle(lease, due, end):
                ledger_repository.post(connection, transfer)
            charged, waived = lease.charged + due, owed - due
            reason = lease.end_reason or reason  # the reason of the stop order wins
            repository.end(connection, lease.id, end, reason, charged, waived, lease.devices)
            charges.settle_lots_since(connection, lease, now, newest)
        lease = replace(
            lease,
            state=LeaseState.ENDED,
            ended_at=end,
            end_reason=reason,
            charged=charged,
            waived=waived,
        )
        self.devices.inventory.forget()
        self.log.info("Lease %s of %s ended: %s", lease.id, lease.server, reason)
        if back:
            self.log.info("Ticket %s of %s is back in the queue", lease.ticket_id, lease.server)
        else:
            self.take_back(lease.ticket_id, lease.engine)
        return lease

    def give_up(self, lease_id: str, reason: str) -> None:
        """Record that a start was aborted although its server is not proven gone yet.

        When the lease is settled later, it is then not mistaken for one that was lost with its hub.
        """
        with self.store.write() as connection:
            lease = repository.get(connection, lease_id, lock=True)
            if lease.state is LeaseState.GRANTED and lease.ticket_id and not lease.end_reason:
                repository.update(connection, lease_id, end_reason=reason)

    def reconcile(
        self,
        sightings: Mapping[str, Sequence[Sighting] | None],
        servers: Mapping[ServerRef, reconciliation.HubState] | None,
        *,
        grace_seconds: float = 60.0,
    ) -> list[reconciliation.Action]:
        """Adopt what lives and settle what does not; see :mod:`gpuspawner.leases.reconciliation`.

        The caller must carry out the ``Remove`` actions in the result: ending a server is the
        engine's work, and the next round then settles its lease. They never include servers of
        another hub on the same engine, whose leases are not in this store.
        """
        now = self.clock()
        grace = timedelta(seconds=grace_seconds)
        opened = self.open_leases()
        planned = reconciliation.plan(opened, sightings, servers, now, grace, self.clock.skew)
        actions = [
            action
            for action in planned
            if not isinstance(action, reconciliation.Remove) or self._is_ours(action.sighting)
        ]
        self._mark_seen([a.lease.id for a in actions if isinstance(a, reconciliation.Seen)], now)
        for action in actions:
            match action:
                case reconciliation.Confirm(lease, ref, started_at):
                    self.confirm(lease.id, ref, started_at=started_at)
                case reconciliation.Release(lease, ended_at, reason, lost):
                    self.release(
                        lease.id, ended_at=ended_at, reason=reason, lost=lost, still=lease.state
                    )
        return actions

    # Helpers.

    def _end_of(
        self,
        lease: Lease,
        times: Sequence[datetime],
        stopped_at: datetime | None,
        now: datetime,
    ) -> datetime:
        """Return when a server ended that is proven gone; arguments as of :func:`end_of`."""
        end = end_of(lease, times, stopped_at, now)
        before = self.clock.last_boot_end
        if lease.engine in ON_THIS_HOST and before and _last_proof(lease) < before:
            end = min(end, before)  # Docker reports that such a server ended after the next boot
        return end

    def _is_ours(self, sighting: Sighting) -> bool:
        try:
            self.get(sighting.lease_id)
        except UnknownLease:
            return False
        return True

    def _mark_seen(self, lease_ids: list[str], now: datetime) -> None:
        if lease_ids:
            with self.store.write() as connection:
                for lease_id in lease_ids:
                    repository.update(connection, lease_id, seen_at=now)


def end_of(
    lease: Lease, times: Sequence[datetime], stopped_at: datetime | None, now: datetime
) -> datetime:
    """Return when a server ended that is proven gone.

    ``times`` are the possible meanings of the engine's report; without any, ``stopped_at`` counts,
    else the time when the server was last seen alive.
    """
    began, last_proof = lease.started_at or lease.granted_at, _last_proof(lease)
    if now < last_proof:
        return last_proof.astimezone(timezone.utc)
    end = engine_time(times, last_proof, now, costs_least=min) or stopped_at or last_proof
    return min(max(end, began), now).astimezone(timezone.utc)


def _last_proof(lease: Lease) -> datetime:
    """Return when the server was last known to be alive."""
    began = lease.started_at or lease.granted_at
    return max(lease.seen_at or began, began)


def _awaited(lease: Lease) -> bool:
    """Return True if a lease came from the queue, was not ended, and its member never connected."""
    if not lease.ticket_id or lease.end_reason:
        return False
    unclaimed = lease.claim_seconds is not None and lease.claimed_at is None
    return lease.state is LeaseState.GRANTED or unclaimed


def slots_beside(uuids: Collection[str], fleet: PlacementIndex) -> frozenset[str]:
    """Return the closures of all devices but these, as texts."""
    return texts(Slot.closure(d.uuid) for d in fleet.devices if d.uuid not in uuids)


def require_seen(look: InventorySnapshot, request: Request) -> None:
    """Raise if the snapshot cannot serve the request.

    Raises NoDeviceFree if no device was ever seen, which does not mean that there are none, and
    TooMuchAsked if the driver is too old.
    """
    if request.devices and look.inventory.error and not look.devices:
        raise NoDeviceFree(
            f"GPU status is unavailable, so no GPU session can start: {look.inventory.error}",
            unknown=0,
        )
    must_run(request, look.inventory)


def _leased_devices(
    places: Iterable[Slot], devices: Mapping[str, Device], *, is_share: bool
) -> tuple[LeasedDevice, ...]:
    """Return what a lease has of each device: the slots of a share, or all."""
    slots: dict[str, list[int]] = {}
    for uuid, slot in places:
        slots.setdefault(uuid, []).append(slot)
    held = ((devices[uuid], some) for uuid, some in slots.items())
    return tuple(
        LeasedDevice(
            device.uuid,
            some[0],
            device.index,
            device.model,
            device.memory_bytes,
            device.slots,
            len(some) if is_share else device.slots,
            device.part,
        )
        for device, some in held
    )
