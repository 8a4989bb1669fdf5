"""The broker: every grant, charge and release, in one transaction each.

Methods are synchronous and thread-safe; whoever runs an event loop calls them through
:meth:`Broker.run`, off the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from traitlets.config import Config

from .core.clock import ClockVerdict, Offset, engine_time, to_datetime
from .core.errors import ClockWasSet, UnknownLease
from .db.clock import SteadyClock
from .db.engine import Store
from .db.leader import Granter, identity_file, make_identity
from .devices import closures, snapshots
from .devices.service import DeviceService, LeakService, MachineService
from .devices.snapshots import InventoryCache, InventorySnapshot
from .devices.source import DeviceSource, open_source
from .leases import reconciliation
from .leases import repository as leases_repository
from .leases.gpu_loss import RestartService
from .leases.models import Lease, LeasedDevice, LeaseState, ServerRef, Sighting
from .leases.service import Grants
from .leases.sessions import SessionService
from .ledger import charges, lot_settlement
from .ledger import repository as ledger_repository
from .ledger import rules as ledger_rules
from .ledger.exhaustion import ExhaustionService
from .ledger.grants import BulkGrantService, RefillService
from .ledger.prices import PriceService
from .ledger.reports import ReportService
from .ledger.service import LedgerService, note, refund_lease, refundable
from .members.renames import RenameService
from .members.roster import RosterService
from .members.service import MemberService
from .monitoring.health_service import HealthService
from .monitoring.service import IdleService, MonitoringService
from .notifications.service import NotificationService
from .queue import repository as queue_repository
from .queue.positions import Outlooks
from .queue.state import QueueState
from .settings import BrokerSettings
from .slurm.job_billing import ClusterAuditService, JobBillingService
from .slurm.service import ClusterMemberService
from .storage.disk_limits import DiskLimitService
from .storage.service import SharedFolderService, StorageService

T = TypeVar("T")

OUTSIDE = 8
"""How many calls to engines, registries, Slurm and file systems run at the same time."""

ON_THIS_HOST = ("docker", "local")
"""Engines whose servers end when this machine does."""


def utcnow() -> datetime:
    """The wall clock, for looks that are not kept. Everything else asks :attr:`Broker.clock`."""
    return datetime.now(timezone.utc)


class Broker(Grants, SessionService, Outlooks):
    """Grants leases, charges them and releases them."""

    def __init__(
        self, config: Config | None = None, *, clock: Callable[[], datetime] | None = None
    ) -> None:
        """``clock``: tests put their own in the place of the store's.

        Raises ConfigError naming a setting that cannot be, and TraitError.
        """
        super().__init__(config=config or Config())
        self.settings = settings = BrokerSettings.read(self.config)
        settings.require_valid()
        self.store = Store.open(settings.database.url)
        self.clock = clock or self.store.clock
        self.prices = PriceService(self.store, self._now, settings.rates, self.log)
        self.cluster_members = ClusterMemberService(
            self.store,
            self._now,
            settings.queue,
            settings.slurm.cluster_file,
            self.prices,
            self.log,
        )
        self.delegate = self.make_delegate()
        self.watch = InventoryCache(
            self.source(), self.store, timedelta(seconds=settings.devices.refresh_seconds)
        )
        self.line = QueueState(settings.queue.make_scheduler())
        self.granter = Granter(self.store)
        self.engine_ids: dict[str, str] = {}
        """The identity of each engine as it last answered, by the name of the engine."""
        self.machines = MachineService(self.store, self.delegate, self.log)
        self.devices = DeviceService(self.store, self._now, self.watch, self.machines)
        self.leaks = LeakService(self.store, self._now, self.look, self.log)
        self.health = HealthService(
            self.store, self._now, settings.health, self.watch, self.machines, self.log
        )
        self.ledger = LedgerService(self.store, self._now, settings.credits)
        self.refills = RefillService(self.store, self._now, self.log)
        self.bulk_grants = BulkGrantService(self.store, self._now, self.ledger)
        self.exhaustion = ExhaustionService(self.store, self._now, settings.credits)
        self.members = MemberService(self.store, self._now, settings.members, self.line, self.log)
        self.roster = RosterService(self.store, self._now, settings.rates, self.members)
        self.restarts = RestartService(self.store, self._now, self.delegate, self.log)
        self.disk_limits = DiskLimitService(self.store, self._now, self.log)
        self.notifications = NotificationService(self.store, self._now)
        self.reports = ReportService(self.store, self._now)
        self.monitoring = MonitoringService(self.store, self._now)
        self.idle = IdleService(self.store, self._now, lambda: self.skew, settings.idle, self.log)
        self.storage = StorageService(self.store, self._now, settings.folders, self.log)
        self.shared_folders = SharedFolderService(self.store, self._now, settings.folders)
        self.renames = RenameService(self.store, self._now, self.log)
        self.job_billing = JobBillingService(
            self.store, self._now, self.cluster_members, self.prices, self.log
        )
        self.cluster_audit = ClusterAuditService(
            self.store, self._now, self.cluster_members, self.job_billing, self.log
        )
        self._outside = ThreadPoolExecutor(OUTSIDE, thread_name_prefix="gpuspawner-outside")

    def _now(self) -> datetime:
        """The time by the clock that is set now: tests set another one."""
        return self.clock()

    def source(self) -> DeviceSource:
        """The device source that ``device_source`` names, or who gives devices in our place."""
        if self.delegate is not None:
            return self.delegate
        return open_source(self.settings.devices.source)

    async def run(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a method of the broker off the event loop, in the threads for changes.

        Cancelling the caller does not cancel the work: a transaction runs to its end. It is done
        once more when the clock was set in between: nothing of it was written then.
        """
        return await _run_in(self.store.executor, partial(work, *args, **kwargs))

    async def read(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Do as :meth:`run`, in the threads for what a page or a form needs."""
        return await _run_in(self.store.read_executor, partial(work, *args, **kwargs))

    async def report(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Do as :meth:`run`, in the threads for reports and exports, which may take long."""
        return await _run_in(self.store.report_executor, partial(work, *args, **kwargs))

    async def run_outside(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Do as :meth:`run`, in threads for calls to an engine, a registry, Slurm or a file system.

        They may hang, and must not block the threads that use the store.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._outside, partial(work, *args, **kwargs))

    # The clock.

    @property
    def steady(self) -> SteadyClock | None:
        """The store's clock; None where a test's clock is in its place."""
        return self.clock if isinstance(self.clock, SteadyClock) else None

    @property
    def skew(self) -> timedelta:
        """Wall clock less :attr:`clock` now; not zero while a step of the wall clock is doubted."""
        return self.steady.skew if self.steady else timedelta()

    @property
    def stamp_error(self) -> timedelta:
        """By how much an engine's time may lie before that of :attr:`clock` at the most."""
        return self.steady.stamp_error if self.steady else timedelta()

    @property
    def clock_version(self) -> int:
        """Grows whenever times in the store were moved because the clock was set."""
        return self.steady.offset.version if self.steady else 0

    @property
    def clock_step(self) -> timedelta:
        """By how much the wall clock was set, while that is doubted; else zero."""
        step = self.steady.offset.step if self.steady else 0
        return timedelta(microseconds=step)

    def _possible_times(self, stamp: datetime | None) -> list[datetime]:
        """What an engine's time may be by :attr:`clock`; nothing if it told none."""
        if stamp is None or self.steady is None:
            return [] if stamp is None else [stamp]
        return self.steady.possible_times(stamp)

    def keep_clock(self) -> ClockVerdict | None:
        """Notice when the wall clock is set; see :mod:`gpuspawner.core.clock`. None with a test's
        clock.

        For the accounting service alone, every few seconds.
        """
        if self.steady is None:
            return None
        verdict = self.steady.keep(self._count_again)
        if verdict.event in ("stepped", "followed", "back"):
            with self.store.write() as connection:
                said = clock_says(verdict)
                note(connection, "accounting", "clock", "wall clock", said, self.clock())
        return verdict

    def _count_again(
        self, connection: sa.Connection, offset: Offset, verdict: ClockVerdict
    ) -> None:
        """Give back what ended leases were charged for time in which the machine was off, and was
        not: a wrong wall clock had told how long that was."""
        if verdict.recount >= 0 or offset.before is None:
            return
        before, recount = to_datetime(offset.before), timedelta(microseconds=verdict.recount)
        for lease in leases_repository.ended_across(connection, before):
            end = max((lease.ended_at or before) + recount, before)
            too_much = lease.charged - ledger_rules.owed(lease.rate, lease.started_at, end)
            amount = min(too_much, refundable(connection, lease))
            if amount > 0:
                ahead = _seconds(verdict.recount)
                reason = f"the clock was {ahead} ahead after the machine's start"
                key = ledger_rules.refund_key(lease.id, f"clock:{offset.boot_id}:{offset.version}")
                now = to_datetime(verdict.offset.last)
                actor = ledger_rules.ACTOR_ACCOUNTING
                refund_lease(connection, lease, amount, key, now, actor=actor, reason=reason)

    # Devices.

    def look(self, *, fresh: bool = False) -> InventorySnapshot:
        """The newest look at the devices (at most ``refresh_seconds`` old)."""
        return self.watch.look(self.clock(), fresh=fresh)

    def overview(self) -> snapshots.Overview:
        """All devices with their state, for pages and tables."""
        look = self.look()
        with self.store.read() as connection:
            taken, closed = leases_repository.taken(connection), closures.load(connection)
            waiting, rates = (
                queue_repository.count_tickets(connection),
                self.prices.rates_in(connection),
            )
        views = self.devices.on_machines(snapshots.device_views(look.devices, taken, closed))
        return snapshots.Overview(
            devices=views,
            models=snapshots.count_models(views, rates.card(self.clock())),
            source=look.inventory.source,
            error=look.inventory.error,
            driver_version=look.inventory.driver_version,
            cuda_version=look.inventory.cuda_version,
            waiting=waiting,
            paused=closed.get(closures.GRANTING),
            rates=rates,
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
        """The server answered, or was adopted. Doing it twice changes nothing.

        It is charged from ``started_at`` by the engine's wall clock; from now if nobody knows.
        ``devices`` are those of the lease, where they are known: they never change.
        """
        now = self.clock().astimezone(timezone.utc)
        times = self._possible_times(started_at)
        with self.store.write() as connection:
            row = leases_repository.confirm(connection, lease_id, now, engine_ref)
            if row is None:
                return leases_repository.get(connection, lease_id)
            lease = leases_repository.from_row(row, ())
            granted = lease.granted_at
            if granted < now:
                began = engine_time(times, granted, now, costs_least=max)
                if began is not None:
                    began = min(max(began, granted), now).astimezone(timezone.utc)
                    row = leases_repository.began(connection, lease_id, began)
            if devices is None:
                devices = leases_repository.devices_of(connection, lease_id)
        return leases_repository.from_row(row, devices)

    def note_engine(self, lease_id: str, engine_id: str) -> None:
        """Write which engine runs the server of a lease, before anything of it is created."""
        with self.store.write() as connection:
            leases_repository.update(connection, lease_id, engine_id=engine_id)

    def follow_rename(self, lease_id: str, server: ServerRef) -> Lease:
        """Write that a running server has another name at the Hub: its member was renamed there.

        The account that pays stays, and so does everything else of the old name. An ended lease,
        and one whose new name has a lease of its own, are left alone. Raises UnknownLease.
        """
        with self.store.write() as connection:
            lease = leases_repository.get(connection, lease_id, lock=True)
            is_open = lease.state is not LeaseState.ENDED
            if (
                not is_open
                or lease.server == server
                or leases_repository.open_of(connection, server)
            ):
                return lease
            leases_repository.update(
                connection, lease_id, user=server.user, server_name=server.name
            )
            closures.note(
                connection,
                at=self.clock(),
                actor="hub",
                action="renamed",
                subject=lease.server.user,
                detail=f"lease {lease.id}: {lease.server} is {server} at the Hub; {lease.account} "
                "goes on paying",
            )
        self.log.warning(
            "The member %s was renamed to %s at the Hub. The server goes on, and %s pays for it. "
            "Credits, history and files are still those of %s: give them the new name with "
            "`gpuspawner members rename %s %s`, or rename the member back.",
            lease.server.user,
            server.user,
            lease.account,
            lease.server.user,
            lease.server.user,
            server.user,
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
        """Settle and free the devices. Only for a server that is proved gone.

        ``ended_at`` is its proven end by the engine's wall clock; else ``stopped_at`` by
        :attr:`clock`; else it is charged up to when it was last seen alive.
        A start that failed costs nothing. Doing it twice changes nothing. ``still``: do it
        only if the lease is as it was when the proof was made; it may have started since.
        ``lost``: it went down with the hub that started it. If its member had not come to it
        yet, that costs nothing, and the ticket that it came from is back at its place in line.
        """
        now, times = self.clock(), self._possible_times(ended_at)
        with self.store.write() as connection:
            lease, newest = leases_repository.get_to_end(connection, lease_id)
            if lease.state is LeaseState.ENDED or still not in (None, lease.state):
                return lease
            end = self._end_of(lease, times, stopped_at, now)
            # A server that nobody came to costs nothing, like one that did not start.
            back = (
                lost
                and _awaited(lease)
                and queue_repository.reopen_ticket(connection, lease.ticket_id or "")
            )
            if back:
                lease = replace(lease, outcome="lost")
                leases_repository.update(connection, lease.id, outcome=lease.outcome)
            if failed and not lease.outcome:
                lease = replace(lease, outcome="failed")  # for the books: it owes nothing
                leases_repository.update(connection, lease.id, outcome=lease.outcome)
            failed = failed or lease.outcome in ("no_show", "lost")
            owed = ledger_rules.settlement(lease, end, failed)
            due = charges.payable(connection, lease, owed, end)
            if transfer := ledger_rules.settle(lease, due, end):
                ledger_repository.post(connection, transfer)
            charged, waived = lease.charged + due, owed - due
            reason = lease.end_reason or reason  # who ordered its stop said why
            leases_repository.end(connection, lease.id, end, reason, charged, waived, lease.devices)
            lot_settlement.settle_lots_since(connection, lease, now, newest)
        lease = replace(
            lease,
            state=LeaseState.ENDED,
            ended_at=end,
            end_reason=reason,
            charged=charged,
            waived=waived,
        )
        self.watch.forget()
        self.log.info("Lease %s of %s ended: %s", lease.id, lease.server, reason)
        if not back:
            self._take_back(lease.ticket_id, lease.engine)
        if back:
            self.log.info("Ticket %s of %s is back in line", lease.ticket_id, lease.server)
        return lease

    def give_up(self, lease_id: str, reason: str) -> None:
        """Note that the start of a server was ended which is not proved gone yet.

        Whoever settles its lease then does not take it for one that was lost with its hub.
        """
        with self.store.write() as connection:
            lease = leases_repository.get(connection, lease_id, lock=True)
            if lease.state is LeaseState.GRANTED and lease.ticket_id and not lease.end_reason:
                leases_repository.update(connection, lease_id, end_reason=reason)

    def reconcile(
        self,
        sightings: Mapping[str, Sequence[Sighting] | None],
        servers: Mapping[ServerRef, reconciliation.HubState] | None,
        *,
        grace_seconds: float = 60.0,
    ) -> list[reconciliation.Action]:
        """Adopt what lives and settle what does not; see :mod:`gpuspawner.leases.reconciliation`.

        What is left for the caller are the ``Remove`` actions in the result: ending a
        server is the engine's work, and the next look then settles its lease. Servers of
        another hub on the same engine, whose leases are not in this store, are not among them.
        """
        now = self.clock()
        grace = timedelta(seconds=grace_seconds)
        opened = self.open_leases()
        planned = reconciliation.plan(opened, sightings, servers, now, grace, self.skew)
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

    # Steps of the above.

    def _end_of(
        self,
        lease: Lease,
        times: Sequence[datetime],
        stopped_at: datetime | None,
        now: datetime,
    ) -> datetime:
        """When a server ended that is proved gone; arguments as of :func:`end_of`."""
        end = end_of(lease, times, stopped_at, now)
        if lease.engine in ON_THIS_HOST and self.steady:
            # Docker says that what a crash of the machine ended, ended after its next boot.
            before = self.steady.offset.before
            if before is not None and _last_proof(lease) < to_datetime(before):
                end = min(end, to_datetime(before))
        return end

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
                    leases_repository.update(connection, lease_id, seen_at=now)


async def _run_in(executor: Executor, work: Callable[[], T]) -> T:
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(executor, work)
    except ClockWasSet:
        return await loop.run_in_executor(executor, work)


def clock_says(verdict: ClockVerdict) -> str:
    """What became of the wall clock, for admins, as a sentence."""
    offset, day = verdict.offset, "%Y-%m-%d %H:%M:%S UTC"
    if verdict.event == "back":
        return "The wall clock is right again."
    if verdict.event == "followed":
        said = (
            f"The wall clock was set by {_apart(verdict.shift)} and stayed so: times follow "
            "it now. What runs is charged for as long as it ran, and sessions keep their length."
        )
        if verdict.recount:
            much = f"{_seconds(verdict.recount)} {'more' if verdict.recount > 0 else 'less'}"
            said += (
                f" The machine had been off for {much} than was counted: what ran elsewhere "
                "meanwhile is charged for the right time."
            )
        return said
    return (
        f"The wall clock was set by {_apart(offset.step)}. What runs is charged by the time since "
        "boot, and nothing ends because of this. If the new time is wrong, correct it; else it is "
        f"followed at {to_datetime(offset.follows_at()):{day}} by the old one."
    )


def _apart(micros: int) -> str:
    return f"{micros / 1_000_000:+,.0f} s"


def _seconds(micros: int) -> str:
    return f"{abs(micros) / 1_000_000:,.0f} s"


def end_of(
    lease: Lease, times: Sequence[datetime], stopped_at: datetime | None, now: datetime
) -> datetime:
    """When a server ended that is proved gone. ``times`` are what the engine's word for it may
    mean; else ``stopped_at`` counts, else when the server was last seen alive."""
    began, last_proof = lease.started_at or lease.granted_at, _last_proof(lease)
    if now < last_proof:
        return last_proof.astimezone(timezone.utc)
    end = engine_time(times, last_proof, now, costs_least=min) or stopped_at or last_proof
    return min(max(end, began), now).astimezone(timezone.utc)


def _last_proof(lease: Lease) -> datetime:
    """When the server was last known to live."""
    began = lease.started_at or lease.granted_at
    return max(lease.seen_at or began, began)


def _awaited(lease: Lease) -> bool:
    """Whether a lease came from the line, nobody ended it, and its member never came to it."""
    if not lease.ticket_id or lease.end_reason:
        return False
    unclaimed = lease.claim_seconds is not None and lease.claimed_at is None
    return lease.state is LeaseState.GRANTED or unclaimed


KEY = "gpuspawner_broker"


def hub_broker(
    settings: MutableMapping[str, Any], config: Config, log: logging.Logger | Any
) -> Broker:
    """Return the hub's broker, made by whoever needs it first: a page or a spawner.

    It knows the hub's identity, without which the hub's own service would take it for another hub.
    ``settings`` are the Hub's own, which all of its spawners and pages share.
    """
    if KEY not in settings:
        settings[KEY] = _open_broker(config, log)
    found: Broker = settings[KEY]
    return found


def _open_broker(config: Config, log: logging.Logger | Any) -> Broker:
    broker = Broker(config)
    path = Path(broker.settings.database.hub_id_file or identity_file(config))
    try:
        broker.granter.identity = make_identity(path)
    except OSError as error:
        log.warning(
            "The hub's id cannot be kept in %s (%s): name another file with "
            "c.GPUDatabase.hub_id_file. Until then another hub on the same database could take "
            "this one's leases for its own.",
            path,
            error.strerror,
        )
    return broker
