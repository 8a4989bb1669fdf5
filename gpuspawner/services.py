"""All services of a process, built from one configuration around one store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, MutableMapping
from concurrent.futures import Executor, ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any, TypeVar

import docker
from traitlets.config import Config, LoggingConfigurable

from .core.errors import ClockWasSet, EngineUnavailable
from .db.audit import AuditService
from .db.clock import Timekeeper
from .db.engine import Store
from .db.leader import LeaderLock, identity_file, make_identity
from .devices.discovery import open_source
from .devices.driver_gate import StoredDriverGate
from .devices.service import DeviceService, LeakService, MachineService
from .devices.snapshots import InventoryCache
from .devices.source import DeviceSource
from .engines.base import ProcessOwners
from .engines.docker import client_from_environment
from .leases.clock_corrections import ClockCorrectionService
from .leases.gpu_loss import RestartService
from .leases.service import LeaseService
from .leases.sessions import SessionService
from .ledger.exhaustion import ExhaustionService
from .ledger.grants import BulkGrantService, RefillService
from .ledger.prices import PriceService
from .ledger.reports import ReportService
from .ledger.service import LedgerService
from .members.renames import RenameService
from .members.roster import RosterService
from .members.service import MemberService
from .monitoring.health_service import HealthService
from .monitoring.resource_service import ResourceService
from .monitoring.service import IdleService, MonitoringService
from .notifications.service import NotificationService
from .queue.delegation import DelegationService, make_delegate
from .queue.drains import DrainService
from .queue.extensions import ExtensionService
from .queue.positions import PositionService
from .queue.service import QueueService
from .queue.state import QueueState
from .runs.schedule_service import ScheduleService
from .runs.service import RunService
from .settings import ServiceSettings
from .sharing.memory_service import MemoryGuardService
from .sharing.service import MIGService
from .slurm.job_billing import ClusterAuditService, JobBillingService
from .slurm.service import ClusterMemberService
from .storage.archives import WorkspaceArchiver, WorkspaceJobs, archives_folder
from .storage.disk_limits import DiskLimitService
from .storage.service import StorageService
from .storage.shared_folders import SharedFolderService

T = TypeVar("T")

OUTSIDE = 8
"""Maximum number of concurrent calls to engines, registries, Slurm and file systems."""


ARCHIVE_SECONDS = 600.0
"""Seconds without a word after which the engine is given up, while it reads or fills a volume."""


def _archive_client() -> docker.APIClient:
    try:
        return client_from_environment(ARCHIVE_SECONDS)
    except (docker.errors.DockerException, OSError) as error:
        raise EngineUnavailable() from error


def utcnow() -> datetime:
    """Return the wall-clock time, for observations only; all else uses the services' clock."""
    return datetime.now(timezone.utc)


class Services(LoggingConfigurable):
    """The services, and the thread pools in which an event loop calls them.

    Every service is synchronous and thread-safe, and makes each change in one transaction. No
    service inherits from another: the constructor passes each one the other services that it needs.
    """

    def __init__(
        self, config: Config | None = None, *, clock: Callable[[], datetime] | None = None
    ) -> None:
        """Create all services; ``clock`` is a test's. Raises ConfigError or TraitError."""
        super().__init__(config=config or Config())
        self.settings = settings = ServiceSettings.read(self.config)
        settings.require_valid()
        self.store = store = Store.open(settings.database.url)
        self.time = now = Timekeeper(clock or store.clock)
        self._outside = ThreadPoolExecutor(OUTSIDE, thread_name_prefix="gpuspawner-outside")
        self.granter = LeaderLock(store)
        self.prices = PriceService(store, now, settings.rates, self.log)
        self.cluster_members = ClusterMemberService(
            store, now, settings.queue, settings.slurm.cluster_file, self.prices, self.log
        )
        self._make_devices()
        self._make_leases()
        self._make_queue()
        self._make_members()
        self._make_monitoring()

    def _make_devices(self) -> None:
        admit = self.cluster_members.admit_to_cluster
        self._delegate = delegate = make_delegate(self.settings.slurm, admit, self.log)
        gate = StoredDriverGate(self.store, self.time, self.log)
        source: DeviceSource = delegate or open_source(self.settings.devices.source, gate)
        fresh_for = timedelta(seconds=self.settings.devices.refresh_seconds)
        # An external scheduler says itself how its devices are shared.
        shared = None if delegate else self.settings.devices.read_shared_devices()
        reserved = self.settings.devices.read_reserved()
        self.watch = InventoryCache(source, self.store, fresh_for, shared, reserved)
        self.machines = MachineService(self.store, delegate, self.log)
        self.devices = DeviceService(self.store, self.time, self.watch, self.machines)
        self.mig = MIGService(self.store, self.time, self.settings.sharing, source.name, self.log)
        look = self.devices.look
        self.leaks = LeakService(self.store, self.time, look, ProcessOwners, self.log)

    def _make_leases(self) -> None:
        store, now, settings = self.store, self.time, self.settings
        self.ledger = LedgerService(store, now, settings.credits)
        self.refills = RefillService(store, now, self.log)
        self.bulk_grants = BulkGrantService(store, now, self.ledger)
        self.exhaustion = ExhaustionService(store, now, settings.credits)
        self.reports = ReportService(store, now)
        budget = settings.host.read_budget()
        self.line = QueueState(settings.queue.make_scheduler(budget), budget)
        self.delegation = DelegationService(
            store, now, self._delegate, line=self.line, devices=self.devices, log=self.log
        )
        self.leases = LeaseService(
            store,
            now,
            settings.credits,
            devices=self.devices,
            prices=self.prices,
            ledger=self.ledger,
            take_back=self.delegation.take_back,
            log=self.log,
            budget=budget,
        )
        self.sessions = SessionService(store, now, self.log)
        self.restarts = RestartService(store, now, self._delegate, self.log)
        self.clock_corrections = ClockCorrectionService(store, now)

    def _make_queue(self) -> None:
        store, now, settings = self.store, self.time, self.settings
        self.positions = PositionService(
            store,
            now,
            settings.queue,
            settings.credits,
            line=self.line,
            devices=self.devices,
            delegation=self.delegation,
        )
        self.queue = QueueService(
            store,
            now,
            settings.queue,
            settings.credits,
            leases=self.leases,
            positions=self.positions,
            delegation=self.delegation,
            prices=self.prices,
            log=self.log,
        )
        self.extensions = ExtensionService(
            store,
            now,
            settings.queue,
            settings.credits,
            positions=self.positions,
            delegation=self.delegation,
            leases=self.leases,
            log=self.log,
        )

        self.drains = DrainService(store, now, devices=self.devices, positions=self.positions)
        self.runs = RunService(store, now, queue=self.queue, log=self.log)
        self.schedules = ScheduleService(store, now, self.log)

    def _make_members(self) -> None:
        store, now, settings = self.store, self.time, self.settings
        self.members = MemberService(store, now, settings.members, self.line, self.log)
        self.roster = RosterService(store, now, settings.rates, self.members)
        self.renames = RenameService(store, now, self.log)
        self.notifications = NotificationService(store, now)
        self.storage = StorageService(store, now, settings.folders, self.log)
        # By the setting with which GPUs are probed: "process" is a hub without an engine.
        injection = self.config.GPUDockerSpawner.get("gpu_injection", "auto")
        self.workspace_jobs = WorkspaceJobs(
            WorkspaceArchiver(self.storage, _archive_client, injection != "process"),
            archives_folder(settings.folders, settings.database.url),
            now,
            self.log,
        )
        self.shared_folders = SharedFolderService(store, now, settings.folders)
        self.disk_limits = DiskLimitService(store, now, self.log)

    def _make_monitoring(self) -> None:
        store, now, settings = self.store, self.time, self.settings
        self.audit = AuditService(store)
        self.memory_guard = MemoryGuardService(store, now)
        self.monitoring = MonitoringService(store, now, self.devices, self.prices)
        self.idle = IdleService(store, now, lambda: now.skew, settings.idle, self.log)
        self.resources = ResourceService(store, now, self.log)
        self.health = HealthService(
            store, now, settings.health, self.watch, self.machines, self.log
        )
        self.job_billing = JobBillingService(
            store, now, self.cluster_members, self.prices, self.log
        )
        self.cluster_audit = ClusterAuditService(
            store, now, self.cluster_members, self.job_billing, self.log
        )

    @property
    def clock(self) -> Callable[[], datetime]:
        """The function that tells the services the time; tests replace it."""
        return self.time.clock

    @clock.setter
    def clock(self, clock: Callable[[], datetime]) -> None:
        self.time.clock = clock

    async def run(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a service method in the thread pool for changes, off the event loop.

        Cancelling the caller does not cancel the work: a transaction runs to its end. If the clock
        was set in between, nothing was written and the work is called once more.
        """
        return await _run_in(self.store.executor, partial(work, *args, **kwargs))

    async def read(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call ``work`` like :meth:`run`, in the thread pool for pages and forms."""
        return await _run_in(self.store.read_executor, partial(work, *args, **kwargs))

    async def report(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call ``work`` like :meth:`run`, in the thread pool for slow reports and exports."""
        return await _run_in(self.store.report_executor, partial(work, *args, **kwargs))

    async def run_outside(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call ``work`` in the thread pool for engines, registries, Slurm and file systems.

        These calls may hang, and must not block the threads that use the store.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._outside, partial(work, *args, **kwargs))


async def _run_in(executor: Executor, work: Callable[[], T]) -> T:
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(executor, work)
    except ClockWasSet:
        return await loop.run_in_executor(executor, work)


KEY = "gpuspawner_services"


def hub_services(
    settings: MutableMapping[str, Any], config: Config, log: logging.Logger | Any
) -> Services:
    """Return the hub's services; the first page or spawner that needs them creates them.

    They carry the hub's identity, without which the accounting service would take this process for
    another hub. ``settings`` are the Hub's own, which all of its spawners and pages share.
    """
    if KEY in settings:
        found: Services = settings[KEY]
        return found
    services = Services(config)
    services.watch.changes_slots = True
    path = identity_file(config)
    try:
        services.granter.identity = make_identity(path)
    except OSError as error:
        log.warning(
            "The hub's id cannot be kept in %s (%s). Until it can, another hub on the same "
            "database could take this one's leases for its own.",
            path,
            error.strerror,
        )
    settings[KEY] = services
    return services
