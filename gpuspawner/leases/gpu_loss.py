"""Restarts of servers that lost their devices inside the container, with the same devices.

A restart is an ordinary stop order; the same transaction closes the devices to everybody else.
While they are closed, the server's memory and CPU of the host stay reserved, too. The accounting
service has the server stopped and started again with the same options, and its grant reopens the
devices. If that fails, they are reopened for everybody after some minutes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from ..core.errors import CannotRestart
from ..db.engine import Store
from ..devices import closures
from ..devices.closures import GRANTING, Closure
from ..notifications import repository as notifications_repository
from ..notifications.models import Notice, NoticeKind
from ..notifications.service import compose
from ..queue.models import Delegate
from . import repository
from .models import Lease, LeaseKind, LeaseState, ServerRef
from .repository import LEAST_SECONDS, OUTCOME
from .sessions import goes_on, note_lease, order_end

KEPT = timedelta(minutes=5)
"""How long devices stay reserved after their last lease ended."""

_REASON = "kept for a server that starts again"
_WHY = "it starts again with the same GPUs"


@dataclass(frozen=True, slots=True)
class Restart:
    """A server that is being stopped and started again."""

    server: ServerRef
    lease: Lease | None
    """The lease that ends for the restart."""
    since: datetime
    """When the restart was ordered or, once the server is gone, when it stopped."""
    is_gone: bool
    """True if the server has stopped, so that it can be started."""


@dataclass(eq=False)
class RestartService:
    """Tracks servers that lost their devices and servers that restart."""

    store: Store
    clock: Callable[[], datetime]
    delegate: Delegate | None
    log: logging.Logger

    def tell_lost(self, lease_id: str) -> bool:
        """Tell a member that their server can no longer reach its devices.

        Returns False if they were told before or the lease has ended.
        """
        now = self.clock()
        with self.store.write() as connection:
            lease = repository.get(connection, lease_id, lock=True)
            if lease.state is LeaseState.ENDED:
                return False
            told = _notice("gpu_lost", NoticeKind.GPU_SICK, _key(lease.id), lease, now)
            return notifications_repository.add(connection, told)

    def lost_of(self, user: str) -> list[Lease]:
        """Return a member's running servers that were reported to have lost their devices."""
        with self.store.read() as connection:
            held = [x for x in repository.open_leases(connection) if x.server.user == user]
            told = notifications_repository.told(
                connection, [_key(lease.id) for lease in held if goes_on(lease)]
            )
        return [lease for lease in held if _key(lease.id) in told]

    def restart(self, lease_id: str, *, actor: str) -> Lease:
        """Stop a server and start it again with the devices that it has now.

        Nobody else gets them in between, and the session ends at the same time as before. Raises
        UnknownLease, or CannotRestart with the reason.
        """
        now = self.clock()
        with self.store.write() as connection:
            lease = repository.get(connection, lease_id, lock=True)
            _must_be_restartable(lease, now)
            if self.delegate is not None and lease.engine == self.delegate.engine:
                raise CannotRestart(why="its GPUs go to others when it stops; start it again then")
            if not notifications_repository.told(connection, [_key(lease.id)]):
                raise CannotRestart(why="it reaches them, as far as is known")
            closed = closures.load(connection)
            if GRANTING in closed:
                raise CannotRestart(why="new GPU sessions are paused")
            for device in lease.devices:
                if found := closed.get(device.uuid):
                    because = f": {found.reason}" if found.reason else ""
                    raise CannotRestart(why=f"GPU {device.index} is drained{because}")
                who = closures.keeper(lease.server)
                closures.close(connection, Closure(device.uuid, now, who, _REASON))
            note_lease(connection, lease, OUTCOME, actor, _WHY, now)
            told = _notice("restarts", NoticeKind.STOPPED, f"stopped:{lease.id}", lease, now)
            return order_end(connection, lease, OUTCOME, _WHY, told, self.log)

    def all_restarts(self) -> list[Restart]:
        """Return all restarts in progress."""
        with self.store.read() as connection:
            found = []
            for server, kept in repository.all_kept_devices(connection).items():
                lease = repository.last_lease(connection, server)
                ended = lease.ended_at if lease else None
                since = max([closure.at for closure in kept] + ([ended] if ended else []))
                is_gone = repository.open_of(connection, server) is None
                found.append(Restart(server, lease, since, is_gone))
            return found

    def end_restart(self, server: ServerRef, why: str = "") -> None:
        """Reopen the devices reserved for a server.

        If ``why`` is given, the server did not start again and its member is told the reason.
        """
        now = self.clock()
        with self.store.write() as connection:
            for closure in repository.kept_devices(connection, server):
                closures.reopen(connection, closure.subject)
            lease = repository.last_lease(connection, server)
            if why and lease:
                key, kind = f"restart:{lease.id}", NoticeKind.STOPPED
                told = _notice("not_restarted", kind, key, lease, now, reason=why)
                notifications_repository.add(connection, told)
        self.log.info("No devices are reserved for %s now%s", server, f": {why}" if why else "")


def _key(lease_id: str) -> str:
    """Return the key of the notice that a server cannot reach its devices."""
    return f"lost:{lease_id}"


def _must_be_restartable(lease: Lease, now: datetime) -> None:
    if lease.state is not LeaseState.RUNNING:
        raise CannotRestart(why="it does not run")
    if lease.server.kind is not LeaseKind.SERVER:
        raise CannotRestart(why="it is a run; stop it, and submit it again")
    if lease.outcome:
        raise CannotRestart(why=f"it is being stopped already ({lease.end_reason})")
    if not lease.devices:
        raise CannotRestart(why="it has no GPU")
    if lease.ends_at and (lease.ends_at - now).total_seconds() < LEAST_SECONDS:
        raise CannotRestart(why="its session ends within a minute")


def _notice(
    template: str, kind: NoticeKind, key: str, lease: Lease, now: datetime, **values: Any
) -> Notice:
    return compose(template, kind, key, lease.server.user, now, lease=lease, **values)
