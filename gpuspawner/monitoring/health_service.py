"""Sick devices: drained, their users told and refunded, and returned to service.

Each change of a verdict is a single transaction with all its consequences.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import sqlalchemy as sa
from traitlets import Dict, Enum
from traitlets.config import LoggingConfigurable

from ..core.errors import ConfigError, Refused
from ..core.times import deadline
from ..db.engine import Store
from ..devices import closures
from ..devices import repository as devices_repository
from ..devices.closures import HEALTH, KEEPER, LEAK, Closure
from ..devices.repository import SickLease, StoredHealth
from ..devices.service import MachineService, closed_devices
from ..devices.snapshots import InventoryCache
from ..leases import repository as leases_repository
from ..leases.models import Lease, LeasedDevice
from ..ledger import repository as ledger_repository
from ..ledger import rules as ledger_rules
from ..ledger.service import note, refund_lease, refundable
from ..notifications import repository as notifications_repository
from ..notifications.models import NoticeKind
from ..notifications.service import compose
from .health import (
    SICK,
    HealthPolicy,
    HealthState,
    Symptom,
    checked_actions,
    judge,
    needs_admin,
    probe_failed,
    returned,
)

REFUND_KEY = "sick"
"""One refund of this kind per lease."""

REFUND_TIME = timedelta(hours=1)
"""Refunds cover the cost up to this long after the fault: members are told of it, and those who
continue for longer pay again."""

QUIET_MINUTES = 10.0
"""How long a sick device must be without symptoms before its probe: a driver's reset is over."""

MOST_RELAPSES = 3
"""After this many relapses, each within a day of the one before, only an admin returns a device."""


@dataclass(frozen=True, slots=True)
class FoundSymptoms:
    """Symptoms of a device since the last time."""

    symptoms: tuple[Symptom, ...] = ()
    going_on: frozenset[str] = frozenset()
    """As in :func:`gpuspawner.monitoring.health.judge`."""


@dataclass(frozen=True, slots=True)
class HealthChange:
    """A change of a device's health."""

    uuid: str
    event: str
    """As in :class:`gpuspawner.monitoring.health.HealthVerdict`."""
    reason: str
    told: tuple[Lease, ...] = ()
    """The leases whose members were told."""


@dataclass(frozen=True, slots=True)
class AffectedServer:
    """A server on a sick device."""

    lease: Lease
    sick: SickLease
    promise: str
    """The refund that its member will get, as a sentence; empty if none."""

    @property
    def device(self) -> LeasedDevice:
        """The sick device."""
        return next(each for each in self.lease.devices if each.uuid == self.sick.uuid)


class GPUHealth(LoggingConfigurable):
    """What is done about sick GPUs."""

    actions = Dict(
        {},
        config=True,
        help="""
        What to do about a GPU, by what is wrong with it: ``ignore``, ``watch`` (only show it) or
        ``drain`` (start no new session on it, tell the members who have it, and return it to
        service after a successful probe). Causes that are not named keep their default.
        The documentation's page "Health of GPUs" lists all causes with their defaults; ``xid 79``
        is one error of the driver.
        Example::

            c.GPUHealth.actions = {"hot": "watch", "xid minor": "ignore", "xid 63": "drain"}
        """,
    )

    refund = Enum(
        ("since_fault", "session", "none"),
        "since_fault",
        config=True,
        help="""
        What a member whose GPU fell sick gets back once their server has ended: its cost
        ``since_fault`` (the default), the cost of the whole ``session``, or ``none``. Cost that
        arises more than an hour after the fault is not refunded. Example::

            c.GPUHealth.refund = "session"
        """,
    )

    def read_policy(self) -> HealthPolicy:
        """Return the policy from the settings. Raises ConfigError."""
        try:
            actions = checked_actions(self.actions)
        except (ValueError, AttributeError, TypeError) as error:
            raise ConfigError(what=f"c.GPUHealth.actions: {error}") from None
        return HealthPolicy(actions, timedelta(minutes=QUIET_MINUTES), MOST_RELAPSES)


@dataclass(eq=False)
class HealthService:
    """Tracks sick devices: drains them, tells their users, and refunds credits."""

    store: Store
    clock: Callable[[], datetime]
    settings: GPUHealth
    inventory: InventoryCache
    machines: MachineService
    log: logging.Logger

    def device_states(self) -> dict[str, StoredHealth]:
        """Return the health of every device that was ever judged, by UUID."""
        return self.store.run(devices_repository.load_health)

    def judge_health(self, found: Mapping[str, FoundSymptoms]) -> list[HealthChange]:
        """Judge symptoms, and return what changed and which devices need a probe now."""
        now, policy = self.clock(), self.settings.read_policy()
        with self.store.read() as connection:
            known = devices_repository.load_health(connection)
            held = {place.uuid for place in leases_repository.taken(connection)}
        changes, probes = [], []
        for uuid, it in found.items():
            before = known.get(uuid) or StoredHealth(uuid, HealthState(since=now))
            verdict = judge(policy, before.state, it.symptoms, now, it.going_on)
            if verdict.event == "probe":
                if uuid not in held:
                    probes.append(HealthChange(uuid, "probe", before.state.reason))
            elif verdict.state != before.state:
                changes += self._judged(uuid, it, policy, now)
        if any(change.event == "sick" for change in changes):
            self.machines.keep_closed()
        return [*changes, *probes]

    def probed(self, uuid: str, failure: str = "") -> bool:
        """Record a probe: the sick device returns to service, or stays out for ``failure``.

        Returns False, and changes nothing, if it is no longer sick or was leased. Raises
        Unavailable if the external scheduler of its machine is not responding: try again then.
        """
        now = self.clock()
        opened = not failure and self._opened_there(uuid)
        with self.store.write() as connection:
            known = devices_repository.get_health(connection, uuid)
            if known is None or known.state.verdict != SICK:
                return False
            if failure:
                devices_repository.put_health(
                    connection, StoredHealth(uuid, probe_failed(known.state, now), failure)
                )
                note(connection, HEALTH, "probe", uuid, f"failed: {failure}", now)
                return True
            devices_repository.put_health(
                connection, StoredHealth(uuid, returned(known.state, now))
            )
            closed = closures.load(connection).get(uuid)
            if closed is not None and closed.actor == HEALTH:
                closures.reopen(connection, uuid)
                note(connection, HEALTH, "undrain", uuid, "the probe passed", now)
            left = self.machines.closed_on(uuid, closed_devices(closures.load(connection)))
        if opened and not left:
            self.machines.open_there(uuid)  # it may have been closed again before this was written
        return True

    def sick_of(self, user: str) -> list[AffectedServer]:
        """Return a member's servers on devices that became sick during their leases."""
        now = self.clock()
        with self.store.read() as connection:
            known = devices_repository.open_sick_leases(connection)
            opened = leases_repository.open_leases(connection) if known else []
        return [
            AffectedServer(lease, known[lease.id], self.sick_promise(known[lease.id], now))
            for lease in opened
            if lease.id in known and lease.server.user == user
        ]

    def settle_sick(self) -> int:
        """Refund what ended leases cost on sick devices, each once, and return how many."""
        ids = self.store.run(devices_repository.sick_leases_to_settle)
        for lease_id in ids:
            with self.store.write() as connection:
                self._settle_one(connection, lease_id)
        return len(ids)

    # Helpers.

    def _opened_there(self, uuid: str) -> bool:
        """Reopen a device's machine at the external scheduler, if nothing else of it is closed.

        Call this before the device is reopened here. Returns False if it was refused, because only
        the person who closed the machine may open it. Raises Unavailable.
        """
        if self.machines.delegate is None:
            return False
        closed = closed_devices(self.store.run(closures.load))
        mine = closed.get(uuid)
        if mine is None or self.machines.closed_on(uuid, closed.keys() - {uuid}):
            return True
        if mine.actor != HEALTH:
            return True
        try:
            self.machines.delegate.reopen(uuid)
        except Refused as error:
            self.log.warning("Device %s is well, and %s", uuid, error.message)
            return False
        return True

    def _judged(
        self, uuid: str, it: FoundSymptoms, policy: HealthPolicy, now: datetime
    ) -> list[HealthChange]:
        """Judge a device again within a transaction, and record the consequences."""
        told: list[Lease] = []
        with self.store.write() as connection:
            before = devices_repository.get_health(connection, uuid) or StoredHealth(
                uuid, HealthState(since=now)
            )
            verdict = judge(policy, before.state, it.symptoms, now, it.going_on)
            if verdict.state != before.state:
                devices_repository.put_health(connection, replace(before, state=verdict.state))
            if verdict.event == "sick":
                told = self._fell_sick(connection, uuid, policy, verdict.state, now)
        reason = verdict.state.reason
        if verdict.event not in ("sick", "watch", "fine"):
            return []
        self.log.info("Device %s: %s %s", uuid, verdict.event, reason)
        return [HealthChange(uuid, verdict.event, reason, tuple(told))]

    def _fell_sick(
        self,
        connection: sa.Connection,
        uuid: str,
        policy: HealthPolicy,
        state: HealthState,
        now: datetime,
    ) -> list[Lease]:
        """Drain it, and tell its users."""
        reason = state.reason
        if needs_admin(policy, state):
            reason += f"; it fell sick {state.falls} times within a day"
        before = closures.load(connection).get(uuid)
        if before is not None and (before.actor == LEAK or before.actor.startswith(KEEPER)):
            closures.reopen(connection, uuid)  # no longer reserved or quarantined
        if closures.close(connection, Closure(uuid, now, HEALTH, reason)):
            note(connection, HEALTH, "drain", uuid, reason, now)
        fault_at = state.fault_at or now
        known = devices_repository.load_devices(connection, self.inventory.source.name)
        told = devices_repository.holders_of_device(connection, uuid, fault_at)
        for lease in told:
            sick = SickLease(lease.id, uuid, state.cause, state.reason, fault_at, now)
            devices_repository.note_sick_lease(connection, sick)
            warning = compose(
                "gpu_sick",
                NoticeKind.GPU_SICK,
                f"gpu_sick:{lease.id}",
                lease.server.user,
                now,
                lease=lease,
                device=next((each for each in known if each.uuid == uuid), None),
                sick=sick,
                reason=sick.reason,
                refund=self.sick_promise(sick, now),
            )
            notifications_repository.add(connection, warning)
        return told

    def sick_promise(self, sick: SickLease, now: datetime) -> str:
        """Return the refund that the member will get, as a sentence; empty if none."""
        rule = self.settings.refund
        if rule == "none":
            return ""
        until = sick.fault_at + REFUND_TIME
        what = "since then" if rule == "since_fault" else "from its start"
        upto = deadline(until, now)
        return f"The server's cost {what}, up to {upto}, is refunded when it has stopped."

    def _settle_one(self, connection: sa.Connection, lease_id: str) -> None:
        lease = leases_repository.get(connection, lease_id, lock=True)
        sick = devices_repository.sick_lease(connection, lease_id)
        if sick is None or sick.settled_at is not None:
            return  # another process was faster
        now, key = self.clock(), ledger_rules.refund_key(lease.id, REFUND_KEY)
        amount = min(self._owed_back(lease, sick), refundable(connection, lease))
        if amount and ledger_repository.of_key(connection, key) is None:
            reason = f"a GPU was sick: {sick.reason}"
            refund_lease(connection, lease, amount, key, now, actor=HEALTH, reason=reason)
            self.log.info("Lease %s of %s: %s", lease.id, lease.server, reason)
        devices_repository.settle_sick_lease(connection, lease_id, now, amount)

    def _owed_back(self, lease: Lease, sick: SickLease) -> int:
        """Return the microcredits that the settings refund, whatever was charged."""
        if self.settings.refund == "none" or lease.started_at is None or lease.ended_at is None:
            return 0
        until = min(lease.ended_at, sick.fault_at + REFUND_TIME)
        whole = ledger_rules.owed(lease.rate, lease.started_at, max(until, lease.started_at))
        if self.settings.refund == "session":
            return whole
        before = max(lease.started_at, min(sick.fault_at, until))
        return max(0, whole - ledger_rules.owed(lease.rate, lease.started_at, before))
