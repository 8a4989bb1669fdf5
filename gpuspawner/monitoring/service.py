"""Device use and idle servers: recorded, warned about, and stopped where configured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import groupby

import sqlalchemy as sa
from traitlets import Bool, Dict, Float
from traitlets.config import LoggingConfigurable

from ..core.errors import CannotSnooze, ConfigError
from ..db.engine import Store
from ..devices import closures, snapshots
from ..devices.service import DeviceService
from ..leases import repository as leases_repository
from ..leases.models import Lease, LeaseKind, LeaseState, ServerRef
from ..ledger.prices import PriceService
from ..notifications import repository as notifications_repository
from ..notifications.models import Notice, NoticeKind
from ..notifications.service import compose
from ..queue import repository as queue_repository
from ..queue.models import Ticket
from ..queue.service import AT_ONCE
from . import repository
from .idle import (
    IdlePolicies,
    IdlePolicy,
    IdleState,
    activity_of,
    after_gap,
    begin,
    judge,
    own_use,
    snooze,
)
from .models import HOUR, MINUTE, DeviceUse, combine
from .repository import LeaseUtilization, WatchedLease

BY_MINUTES = timedelta(hours=6)
"""Sessions up to this length are summed from minutes, longer ones from hours."""


@dataclass(eq=False)
class MonitoringService:
    """Records, sums up and reads the use of devices."""

    store: Store
    clock: Callable[[], datetime]
    devices: DeviceService
    prices: PriceService

    def overview(self) -> snapshots.Overview:
        """Return all devices with their state, for pages and tables."""
        look = self.devices.look()
        with self.store.read() as connection:
            taken, closed = leases_repository.taken(connection), closures.load(connection)
            waiting = queue_repository.count_tickets(connection)
            rates = self.prices.rates_in(connection)
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

    def remember_use(self, minutes: Collection[DeviceUse]) -> None:
        """Store complete minutes. Raises StoreUnavailable, and then none is stored."""
        with self.store.write() as connection:
            repository.remember_use(connection, minutes)

    def tidy_use(self, keep_minutes: timedelta, keep_hours: timedelta) -> None:
        """Sum up the hours that are over, and delete what is no longer kept."""
        now = self.clock()
        with self.store.write() as connection:
            repository.sum_up_use(connection, now)
            repository.forget_use(connection, now - keep_minutes, now - keep_hours)

    def use_now(self) -> dict[str, DeviceUse]:
        """Return the last minute of each sampled device, by UUID."""
        now = self.clock()
        return self.store.run(lambda connection: repository.newest_use(connection, now))

    def use_between(
        self,
        since: datetime,
        until: datetime,
        *,
        seconds: int = MINUTE,
        uuids: Sequence[str] | None = None,
    ) -> list[DeviceUse]:
        """Return minutes, or hours (``seconds=3600``), that began in this period, by time."""
        with self.store.read() as connection:
            return repository.device_use_between(
                connection, since, until, seconds=seconds, uuids=uuids
            )

    def lease_use_between(
        self, lease: Lease, since: datetime, until: datetime, *, seconds: int = MINUTE
    ) -> list[DeviceUse]:
        """Return the same of a lease's devices; of a shared one, only its own work."""
        with self.store.read() as connection:
            found = repository.device_use_between(
                connection,
                since,
                until,
                seconds=seconds,
                uuids=lease.uuids,
                lease_ids=("", lease.id),
            )
        shared = _shared(lease)
        return [each for each in found if bool(each.lease_id) == (each.uuid in shared)]

    def worked_between(self, since: datetime, until: datetime) -> list[LeaseUtilization]:
        """Return every lease with GPUs in this period and how much they worked, by start."""
        until = min(until, self.clock())
        if until <= since:
            return []
        return self.store.run(
            lambda connection: repository.worked_between(connection, since, until)
        )

    def session_use(self, lease: Lease) -> dict[str, DeviceUse]:
        """Return what each device of a session did, by UUID; devices without samples are absent.

        From whole minutes within the session, or from whole hours if it was long or its minutes are
        deleted. Of a shared device, only the session's own work.
        """
        if lease.started_at is None or not lease.devices:
            return {}
        since, until = lease.started_at, lease.ended_at or self.clock()
        found: list[DeviceUse] = []
        for seconds in (MINUTE, HOUR) if until - since <= BY_MINUTES else (HOUR, MINUTE):
            whole = until - timedelta(seconds=seconds) + timedelta(microseconds=1)
            found = self.lease_use_between(lease, since, whole, seconds=seconds)
            if found:
                break
        by_device: dict[str, list[DeviceUse]] = {}
        for each in found:
            by_device.setdefault(each.uuid, []).append(each)
        return {uuid: combine(some, since, found[0].seconds) for uuid, some in by_device.items()}


LONGEST_LOOK_BACK = timedelta(hours=12)
"""Older unjudged minutes are ignored: the service was down for that long."""
OUTPUT_COUNTS = timedelta(minutes=1)
"""Output counts for a minute if it came in that minute, later, or up to this long before it.

The Hub learns of it with a delay.
"""


@dataclass(frozen=True, slots=True)
class IdleEvent:
    """What was reported or ordered about an idle server."""

    lease: Lease
    event: str
    """``warn``, ``back`` or ``stop``."""


@dataclass(frozen=True, slots=True)
class IdleServer:
    """A server whose member was told that its GPUs are idle."""

    lease: Lease
    stops_at: datetime | None
    """None if nothing is stopped for that."""
    snooze_minutes: float
    """By how much it can be snoozed; 0 if it cannot."""


class GPUIdle(LoggingConfigurable):
    """What happens to servers with idle GPUs."""

    policy = Dict(
        {},
        config=True,
        help="""
        What happens to a server with idle GPUs. ``"*"`` is for all servers, ``"group:NAME"`` and
        ``"environment:NAME"`` are for some; each changes only the keys that it names.

        * ``mode``: ``off`` (the default), ``advise`` (the member is warned) or ``enforce`` (the
          member is warned, then the server is stopped).
        * ``mode_waiting``: the mode while others wait for GPUs; by default the same.
        * ``first_minutes`` (30): how long GPUs may be idle at first.
        * ``most_minutes`` (260): how long they may be idle at most, after much work.
        * ``sooner_minutes`` (0): how much sooner they count as idle while others wait.
        * ``countdown_minutes`` (10): from the warning to the stop.
        * ``snooze_minutes`` (30) and ``most_snoozes`` (2): by how much, and how often, the member
          can put off the stop.
        * ``gain`` (40): how many seconds of rest a second at full use earns. With 40, a server that
          uses a fortieth of a GPU is never idle.
        * ``output`` (0.5): how fast credit falls in a minute in which a kernel had output, relative
          to other minutes.

        Example::

            c.GPUIdle.policy = {
                "*": {"mode": "advise", "mode_waiting": "enforce"},
                "group:ml101": {"mode": "enforce", "most_minutes": 120},
            }
        """,
    )

    def read_policies(self) -> IdlePolicies:
        """Return the policies of ``policy``. Raises ConfigError."""
        try:
            return IdlePolicies(self.policy)
        except (ValueError, AttributeError, TypeError) as error:
            raise ConfigError(what=f"c.GPUIdle.policy: {error}") from None


class GPUMonitoring(LoggingConfigurable):
    """What is sampled of GPUs, how long it is kept, and who sees it."""

    sample_seconds = Float(
        1.0,
        min=0.0,
        config=True,
        help="""
        Seconds between two samples of each GPU. 0: no samples are taken, and everything that needs
        them (use, idle GPUs, sick GPUs) does not work. Example::

            c.GPUMonitoring.sample_seconds = 2
        """,
    )

    members_see_names = Bool(
        False,
        config=True,
        help="""
        Show members, on the page of the cluster, who has each GPU. Off by default. Admins always
        see it, and everybody sees which are their own. Example::

            c.GPUMonitoring.members_see_names = True
        """,
    )


@dataclass(eq=False)
class IdleService:
    """Tracks idle servers: warns their members, and orders their stop."""

    store: Store
    clock: Callable[[], datetime]
    skew: Callable[[], timedelta]
    """Returns the wall clock less ``clock``."""
    settings: GPUIdle
    log: logging.Logger

    def idle_policy(self, lease: Lease) -> IdlePolicy:
        """Return the policy of a server."""
        return self.settings.read_policies().of(lease.group, lease.environment)

    def holding_gpus(self) -> list[Lease]:
        """Return every lease with GPUs whose server is up and not being stopped."""
        return [x for x in self.store.run(leases_repository.open_leases) if _is_watched(x)]

    def judge_idle(self, last_output: Mapping[ServerRef, datetime | None]) -> list[IdleEvent]:
        """Judge the minutes complete by now, and return what was reported or ordered.

        ``last_output``: when each server last had output or an action of its member. A missing
        server is not judged this time: unknown is not idle. All of it is one transaction.
        """
        now = self.clock()
        # The Hub records what it sees by the wall clock, before or after it was set.
        ahead = max(-self.skew(), timedelta())
        policies = self.settings.read_policies()
        done: list[IdleEvent] = []
        with self.store.write() as connection:
            going_on = leases_repository.open_leases(connection)
            held = [lease for lease in going_on if _is_watched(lease)]
            repository.keep_only_watched(
                connection, [x.id for x in (*going_on, *leases_repository.ending(connection))]
            )
            waiting = _others_wait(queue_repository.waiting_tickets(connection), now)
            known = repository.load_watched(connection)
            for lease in held:
                if lease.server not in last_output:
                    continue
                policy = policies.of(lease.group, lease.environment)
                before = known.get(lease.id) or WatchedLease(begin(policy), _first_minute(lease))
                output = last_output[lease.server]
                output = output and output + ahead
                found = self._judge(connection, lease, policy, before, output, waiting, now)
                if found is not None:
                    done.append(found)
        return done

    def snooze(self, lease_id: str) -> Lease:
        """Give more time to a server that will be stopped because its GPUs are idle.

        Raises UnknownLease, or CannotSnooze with the reason.
        """
        now = self.clock()
        with self.store.write() as connection:
            lease = leases_repository.get(connection, lease_id, lock=True)
            watched = repository.get_watched(connection, lease_id)
            if lease.outcome or lease.state is LeaseState.ENDED:
                raise CannotSnooze(why="it is being stopped already")
            policy = self.idle_policy(lease)
            if watched is None or watched.state.stops_at is None:
                raise CannotSnooze(why="it is not going to be stopped for that")
            later = snooze(policy, watched.state, now)
            if later is None:
                raise CannotSnooze(
                    why=f"it was already postponed {policy.most_snoozes} times, the maximum"
                )
            repository.put_watched(connection, lease_id, replace(watched, state=later))
        self.log.info("Lease %s of %s is snoozed until %s", lease_id, lease.server, later.stops_at)
        return lease

    def idle_state(self, server: ServerRef) -> tuple[Lease | None, WatchedLease | None]:
        """Return the open lease of a server, and its idle state as last judged."""
        with self.store.read() as connection:
            lease = leases_repository.open_of(connection, server)
            return lease, repository.get_watched(connection, lease.id) if lease else None

    def resting(self, user: str) -> list[IdleServer]:
        """Return a member's servers that were reported to have idle GPUs."""
        waiting = _others_wait(self.store.run(queue_repository.waiting_tickets), self.clock())
        with self.store.read() as connection:
            known = repository.load_watched(connection)
            opened = leases_repository.open_leases(connection)
        found = []
        for lease in opened:
            if lease.server.user != user or lease.id not in known or not _is_watched(lease):
                continue
            state, policy = known[lease.id].state, self.idle_policy(lease)
            if state.warned_at is not None:
                stops_at = state.stops_at if policy.mode_now(waiting) == "enforce" else None
                more = stops_at is not None and state.snoozes < policy.most_snoozes
                found.append(IdleServer(lease, stops_at, policy.snooze_minutes if more else 0.0))
        return found

    # Helpers.

    def _judge(
        self,
        connection: sa.Connection,
        lease: Lease,
        policy: IdlePolicy,
        before: WatchedLease,
        last_output: datetime | None,
        waiting: bool,
        now: datetime,
    ) -> IdleEvent | None:
        since = max(before.judged_until, now - LONGEST_LOOK_BACK)
        rows = repository.device_use_between(
            connection, since, now, uuids=lease.uuids, lease_ids=("", lease.id)
        )
        state, until, stops = before.state, before.judged_until, False
        for began, minutes in groupby(rows, key=lambda minute: minute.since):
            state = after_gap(state, began - until)
            until = began + timedelta(minutes=1)
            output = last_output is not None and last_output + OUTPUT_COUNTS >= began
            done = activity_of(_of_lease(lease, minutes), float(MINUTE), output=output)
            # By the present time, also for late judgements: a countdown is never over at once.
            verdict = judge(policy, state, done, now, waiting=waiting)
            state, stops = verdict.state, verdict.event == "stop"
            if stops:
                break
        repository.put_watched(connection, lease.id, WatchedLease(state, until))
        event = "stop" if stops else _changed(before.state, state)
        if not event:
            return None
        if event == "stop":
            leases_repository.update(connection, lease.id, outcome="idle", end_reason=_WHY)
        notifications_repository.add(
            connection, _told(lease, policy, event, state.stops_at, waiting, now)
        )
        self.log.info("Lease %s (%s) is idle: %s", lease.id, lease.server, event)
        return IdleEvent(lease, event)


def _shared(lease: Lease) -> set[str]:
    """Return the UUIDs of a lease's devices that others may share."""
    return {device.uuid for device in lease.devices if device.is_shared}


def _of_lease(lease: Lease, minutes: Iterable[DeviceUse]) -> list[DeviceUse]:
    """Return a minute of each of a lease's devices, from those of its devices and its own."""
    found = {(each.uuid, each.lease_id): each for each in minutes}
    shared = _shared(lease)
    return [
        own_use(found.get((uuid, lease.id)), whole) if uuid in shared else whole
        for (uuid, of), whole in found.items()
        if not of
    ]


def _others_wait(waiting: Iterable[Ticket], now: datetime) -> bool:
    """Return True if anybody waits for GPUs.

    With an external scheduler, an immediate start has a ticket for a moment, too.
    """
    since = now - timedelta(seconds=AT_ONCE)
    return any(ticket.request.devices and ticket.created_at <= since for ticket in waiting)


def _is_watched(lease: Lease) -> bool:
    """Return True if idle GPUs end it; a run ends by itself, or with its time limit."""
    is_server = lease.server.kind is LeaseKind.SERVER and bool(lease.devices)
    return is_server and lease.state is LeaseState.RUNNING and not lease.outcome


def _changed(before: IdleState, after: IdleState) -> str:
    """Return what is to be reported; of several countdowns judged at once, the last."""
    if after.stops_at is not None:
        return "warn" if after.stops_at != before.stops_at else ""
    if after.warned_at is not None:
        return "warn" if before.warned_at is None else ""
    return "back" if before.warned_at is not None else ""


def _first_minute(lease: Lease) -> datetime:
    """Return the first minute that belongs entirely to the lease."""
    began = lease.up_since or lease.granted_at
    return began.replace(second=0, microsecond=0) + timedelta(minutes=1)


# Notices to members.

_WHY = "its GPUs were not used"


def _told(
    lease: Lease,
    policy: IdlePolicy,
    event: str,
    stops_at: datetime | None,
    waiting: bool,
    now: datetime,
) -> Notice:
    kind, key = NoticeKind.SESSION_ENDS, f"idle:{event}:{lease.id}:{now.timestamp()}"
    if event == "stop":
        template, kind, key = "not_used_stopped", NoticeKind.STOPPED, f"stopped:{lease.id}"
    elif event == "back":
        template = "used_again"
    elif policy.mode_now(waiting) == "enforce":
        template = "not_used_stops"
    else:
        template = "not_used"
    why = _WHY if event == "stop" else ""
    user = lease.server.user
    return compose(template, kind, key, user, now, lease=lease, stops_at=stops_at, reason=why)
