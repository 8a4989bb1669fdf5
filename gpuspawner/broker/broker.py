"""The broker: every grant, charge and release goes through here, in one transaction each.

Methods are synchronous and thread-safe; whoever runs an event loop calls them through
:meth:`Broker.run`, off the loop.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any, TypeVar

import sqlalchemy as sa

from .. import reconcile
from ..devices.base import DeviceSource, open_source
from ..errors import ConfigError, NoCredits, NoDeviceFree, ServerHasLease, UnknownLease
from ..ledger import rules
from ..ledger.entries import Transfer
from ..ledger.pricing import RateCard
from ..model import (
    Account,
    Device,
    Lease,
    LeasedDevice,
    LeaseState,
    Place,
    Request,
    ServerRef,
    Sighting,
    format_credits,
    member_account,
    model_matches,
    parse_credits,
)
from ..store import Store, book, leases
from . import view
from .reads import Reads
from .settings import BrokerSettings
from .watch import Look, Watch

T = TypeVar("T")


STOPPING = timedelta(minutes=2)
"""What it takes beyond the grace: a round of the accounting service to notice that an account
is dry, and one to stop its servers."""


def utcnow() -> datetime:
    """The only clock of the broker; tests put their own in its place."""
    return datetime.now(timezone.utc)


class Broker(Reads, BrokerSettings):
    """Grants leases, charges them and releases them."""

    def __init__(self, *, clock: Callable[[], datetime] = utcnow, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.clock = clock
        self.rates = RateCard.from_config(self.gpu_rates)
        self.store = Store.open(self.database_url)
        self.watch = Watch(self.source(), self.store, timedelta(seconds=self.refresh_seconds))

    def source(self) -> DeviceSource:
        """The device source that ``device_source`` names."""
        return open_source(self.device_source)

    async def run(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a method of the broker off the event loop.

        Cancelling the caller does not cancel the work: a transaction runs to its end.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.store.executor, partial(work, *args, **kwargs))

    # Devices.

    def look(self, *, fresh: bool = False) -> Look:
        """The newest look at the devices (at most ``refresh_seconds`` old)."""
        return self.watch.look(self.clock(), fresh=fresh)

    def overview(self) -> view.Overview:
        """All devices with their state, for pages and tables."""
        look = self.look()
        views = view.device_views(look.devices, self.store.run(leases.taken))
        return view.Overview(
            devices=views,
            models=view.count_models(views, self.rates),
            source=look.inventory.source,
            error=look.inventory.error,
            driver_version=look.inventory.driver_version,
            cuda_version=look.inventory.cuda_version,
        )

    # From grant to release.

    def acquire(
        self, server: ServerRef, request: Request, *, engine: str, account: str = ""
    ) -> Lease:
        """Grant devices to a server, hold credits, and write it all down. Then, not before,
        may the engine create anything.

        ``account`` pays; the default is the member's own. Raises NoDeviceFree, TooMuchAsked,
        NoCredits, ServerHasLease or StoreUnavailable; then nothing was written.
        """
        grant = partial(self._grant, server, request, engine, account)
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
        self, server: ServerRef, request: Request, engine: str, account: str, look: Look
    ) -> Lease:
        now = self.clock()
        account = account or member_account(server.user)
        if request.devices and look.inventory.error and not look.devices:
            # Nothing was ever seen: that is not to have no GPU.
            raise NoDeviceFree(
                f"The GPUs cannot be seen just now, so none is given out: {look.inventory.error}",
                unknown=0,
            )
        with self.store.write() as connection:
            if leases.open_of(connection, server):
                raise ServerHasLease()
            places: tuple[Place, ...] = ()
            if request.devices:
                places = look.fleet.choose(request, leases.places_taken(connection))
            devices = tuple(_leased(place, look.fleet.by_uuid[place.uuid]) for place in places)
            rate = self.rates.lease_rate(device.model for device in devices)
            payer = self._open_account(connection, account, now)
            hold = rules.hold_for(rate, timedelta(minutes=self.hold_minutes))
            self._check_credits(payer, hold, rate)
            lease = Lease(
                id=secrets.token_hex(8),
                server=server,
                account=account,
                environment=request.environment,
                devices=devices,
                rate=rate,
                hold=hold,
                engine=engine,
                granted_at=now,
            )
            leases.insert(connection, lease)
        self.log.info("Lease %s: %s got %s", lease.id, server, lease.uuids or "no device")
        return lease

    def confirm(self, lease_id: str, engine_ref: str = "") -> Lease:
        """The server answered: charges run from now. Doing it twice changes nothing."""
        now = self.clock()
        with self.store.write() as connection:
            lease = leases.get(connection, lease_id, lock=True)
            if lease.state is not LeaseState.GRANTED:
                return lease
            changes: dict[str, Any] = {
                "state": LeaseState.RUNNING,
                "engine_ref": engine_ref or lease.engine_ref,
                "started_at": now,
                "seen_at": now,
            }
            leases.update(connection, lease_id, **changes)
        return replace(lease, **changes)

    def release(
        self,
        lease_id: str,
        *,
        ended_at: datetime | None = None,
        reason: str,
        failed: bool = False,
        still: LeaseState | None = None,
    ) -> Lease:
        """Settle and free the devices. Only for a server that is proved gone.

        ``ended_at`` is its proven end; None charges up to when it was last seen alive.
        A start that failed costs nothing. Doing it twice changes nothing. ``still``: do it
        only if the lease is as it was when the proof was made; it may have started since.
        """
        now = self.clock()
        with self.store.write() as connection:
            lease = leases.get(connection, lease_id, lock=True)
            if lease.state is LeaseState.ENDED or still not in (None, lease.state):
                return lease
            last_proof = lease.seen_at or lease.started_at or lease.granted_at
            end = min(max(ended_at or last_proof, lease.started_at or lease.granted_at), now)
            end = end.astimezone(timezone.utc)
            due = rules.settlement(lease, end, failed)
            if transfer := rules.settle(lease, due, end):
                book.post(connection, transfer)
            charged = lease.charged + due
            leases.end(connection, lease.id, end, reason, charged)
        lease = replace(
            lease, state=LeaseState.ENDED, ended_at=end, end_reason=reason, charged=charged
        )
        self.watch.forget()
        self.log.info("Lease %s of %s ended: %s", lease.id, lease.server, reason)
        return lease

    def charge_all(self) -> int:
        """Charge every running lease up to now. The number of leases charged.

        Late, doubled or killed runs change no sum: see :mod:`gpuspawner.ledger.rules`.
        """
        now = self.clock()
        count = 0
        with self.store.write() as connection:
            for lease in leases.open_leases(connection):
                due = rules.charge_due(lease, now)
                if transfer := rules.charge(lease, due, now):
                    book.post(connection, transfer)
                    leases.update(connection, lease.id, charged=lease.charged + due)
                    count += 1
        return count

    def reconcile(
        self,
        sightings: Mapping[str, Sequence[Sighting] | None],
        servers: Mapping[ServerRef, reconcile.HubState] | None,
        *,
        grace_seconds: float = 60.0,
    ) -> list[reconcile.Action]:
        """Adopt what lives and settle what does not; see :mod:`gpuspawner.reconcile`.

        What is left for the caller are the ``Remove`` actions in the result: ending a
        server is the engine's work, and the next look then settles its lease. Servers of
        another hub on the same engine, whose leases are not in this store, are not among them.
        """
        now = self.clock()
        grace = timedelta(seconds=grace_seconds)
        planned = reconcile.plan(self.open_leases(), sightings, servers, now, grace)
        actions = [
            action
            for action in planned
            if not isinstance(action, reconcile.Remove) or self._is_ours(action.sighting)
        ]
        self._mark_seen([a.lease.id for a in actions if isinstance(a, reconcile.Seen)], now)
        for action in actions:
            match action:
                case reconcile.Confirm(lease, ref):
                    self.confirm(lease.id, ref)
                case reconcile.Release(lease, ended_at, reason):
                    self.release(lease.id, ended_at=ended_at, reason=reason, still=lease.state)
        return actions

    # Credits.

    def open_account(self, user: str) -> Account:
        """Open a member's account with the opening grant, unless it is there."""
        name = member_account(user)
        with self.store.write() as connection:
            return self._open_account(connection, name, self.clock())

    def grant(self, account: str, amount: int, *, actor: str, reason: str, key: str = "") -> bool:
        """Give microcredits to an account. False when ``key`` was used for it before."""
        key = key or f"grant:{secrets.token_hex(8)}"
        now = self.clock()
        make: Callable[..., Transfer] = rules.grant if amount > 0 else rules.adjustment
        transfer = make(account, amount, key=key, at=now, actor=actor, reason=reason)
        with self.store.write() as connection:
            return book.post(connection, transfer)

    def warn(self, lease_id: str) -> None:
        """Note that the member was told that the credits ran out: the grace begins."""
        now = self.clock()
        with self.store.write() as connection:
            if leases.get(connection, lease_id, lock=True).warned_at is None:
                leases.update(connection, lease_id, warned_at=now)

    def unwarn(self, lease_id: str) -> None:
        """Take the warning back: there are credits again."""
        with self.store.write() as connection:
            leases.update(connection, lease_id, warned_at=None)

    # Steps of the above.

    def _open_account(self, connection: sa.Connection, name: str, now: datetime) -> Account:
        """The account, opened with the opening grant if it is a member's and not there yet."""
        if found := book.find(connection, name):
            return found
        book.open_account(connection, name, now)
        if name.startswith("member:"):
            try:
                amount = parse_credits(self.opening_grant)
            except ValueError as error:
                raise ConfigError(what=f"Broker.opening_grant: {error}") from None
            if transfer := rules.opening_grant(name, amount, at=now, actor="gpuspawner"):
                book.post(connection, transfer)
        return book.account(connection, name)

    def _check_credits(self, account: Account, hold: int, rate: int) -> None:
        if rules.can_afford(account.available, hold):
            return
        set_aside = ""
        if account.held:
            set_aside = f" ({format_credits(account.held)} more are set aside for running servers)"
        raise NoCredits(
            f"Your balance of {format_credits(account.available)} credits{set_aside} does not "
            f"cover this: it costs {format_credits(rate)} credits an hour, and the first "
            f"{self.hold_minutes:g} minutes ({format_credits(-(-hold // 10_000) * 10_000)}) must "
            f"be there at the start. {self.credits_help} You can start without a GPU: that is "
            "free.",
            balance=account.available,
            hold=hold,
        )

    def _with_end(self, error: NoDeviceFree, request: Request) -> NoDeviceFree:
        """The refusal with when devices come back at the latest, and what to do now."""
        now = self.clock()
        running = self.open_leases()
        accounts = {account.name: account for account in self.accounts()}
        grace = timedelta(seconds=self.grace_seconds) + STOPPING
        ends = view.latest_ends(running, accounts, grace, now)
        fitting = [
            ends[lease.id]
            for lease in running
            for device in lease.devices
            if lease.id in ends and _fits(device, request)
        ]
        promise = view.free_by(fitting, request.devices, now)
        sentence = error.message.rstrip(".") + (f" ({promise})" if promise else "")
        advice = "Start without a GPU, or try again."
        return NoDeviceFree(f"{sentence}. {advice}", **error.fields)

    def _is_ours(self, sighting: Sighting) -> bool:
        try:
            self.lease(sighting.lease_id)
        except UnknownLease:
            return False
        return True

    def _mark_seen(self, lease_ids: list[str], now: datetime) -> None:
        if lease_ids:
            with self.store.write() as connection:
                for lease_id in lease_ids:
                    leases.update(connection, lease_id, seen_at=now)


def _leased(place: Place, device: Device) -> LeasedDevice:
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
