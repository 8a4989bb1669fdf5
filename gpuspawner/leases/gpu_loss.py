"""Servers that lost their devices inside their container, and start again with the same ones.

A restart is an order to stop, as others are, and the devices closed to everybody else in the same
transaction. The accounting service has the server stopped, and then started as it was; its grant
opens the devices. What becomes of none of that within some minutes is opened to all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from ..core.errors import CannotRestart
from ..db.engine import Store
from ..devices import closures
from ..devices.closures import GRANTING, Closure
from ..notifications import repository as notifications_repository
from ..notifications.models import Notice, NoticeKind
from ..queue.models import Delegate
from . import repository
from .models import Lease, LeaseState, ServerRef
from .repository import LEAST_SECONDS, OUTCOME
from .sessions import goes_on, note_lease, order_end

KEPT = timedelta(minutes=5)
"""How long devices are kept after the end of the server that they were leased to."""

_REASON = "kept for a server that starts again"
_WHY = "it starts again with the same GPUs"


@dataclass(frozen=True, slots=True)
class Restart:
    """A server that stops and starts again."""

    server: ServerRef
    lease: Lease | None
    """The one that ends for it."""
    since: datetime
    """When it was ordered, or when its server was gone."""
    is_gone: bool
    """Whether the server has stopped, so that it can be started."""


class RestartService:
    """Knows servers that lost their devices, and those that start again."""

    def __init__(
        self,
        store: Store,
        clock: Callable[[], datetime],
        delegate: Delegate | None,
        log: logging.Logger,
    ) -> None:
        self.store = store
        self.clock = clock
        self.delegate = delegate
        self.log = log

    def tell_lost(self, lease_id: str) -> bool:
        """Tell a member that their server does not reach its devices any more. False when they
        were told before, or it has ended."""
        now = self.clock()
        with self.store.write() as connection:
            lease = repository.get(connection, lease_id, lock=True)
            if lease.state is LeaseState.ENDED:
                return False
            return notifications_repository.add(connection, _lost(lease, now))

    def lost_of(self, user: str) -> list[Lease]:
        """A member's servers that run and do not reach their devices, as they were told."""
        with self.store.read() as connection:
            held = [x for x in repository.open_leases(connection) if x.server.user == user]
            told = notifications_repository.told(
                connection, [_key(lease.id) for lease in held if goes_on(lease)]
            )
        return [lease for lease in held if _key(lease.id) in told]

    def restart(self, lease_id: str, *, actor: str) -> Lease:
        """Have a server stopped, and started again with the devices that it has now.

        Nobody else gets them in between, and its session ends when it would have. Raises
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
                raise CannotRestart(why="no GPUs are given out just now")
            for device in lease.devices:
                if found := closed.get(device.uuid):
                    because = f": {found.reason}" if found.reason else ""
                    raise CannotRestart(why=f"GPU {device.index} is drained{because}")
                who = closures.keeper(lease.server)
                closures.close(connection, Closure(device.uuid, now, who, _REASON))
            note_lease(connection, lease, OUTCOME, actor, _WHY, now)
            return order_end(connection, lease, OUTCOME, _WHY, _restarts(lease, now), self.log)

    def all_restarts(self) -> list[Restart]:
        """Every restart that goes on."""
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
        """Keep nothing for a server any more. ``why``: its member is told, as it did not start."""
        now = self.clock()
        with self.store.write() as connection:
            for closure in repository.kept_devices(connection, server):
                closures.reopen(connection, closure.subject)
            lease = repository.last_lease(connection, server)
            if why and lease:
                notifications_repository.add(connection, _not_again(lease, why, now))
        self.log.info("Nothing is kept for %s any more%s", server, f": {why}" if why else "")


def _key(lease_id: str) -> str:
    """Of the notice that a server does not reach its devices any more."""
    return f"lost:{lease_id}"


def _must_be_restartable(lease: Lease, now: datetime) -> None:
    """Raises CannotRestart."""
    if lease.state is not LeaseState.RUNNING:
        raise CannotRestart(why="it does not run")
    if lease.outcome:
        raise CannotRestart(why=f"it is being stopped already ({lease.end_reason})")
    if not lease.devices:
        raise CannotRestart(why="it has no GPU")
    if lease.ends_at and (lease.ends_at - now).total_seconds() < LEAST_SECONDS:
        raise CannotRestart(why="its session ends within a minute")


# What members are told.

_KEPT = "Your files are where you left them."


def _lost(lease: Lease, now: datetime) -> Notice:
    gpus = "GPU" if len(lease.devices) == 1 else "GPUs"
    return Notice(
        key=_key(lease.id),
        user=lease.server.user,
        kind=NoticeKind.GPU_SICK,
        title=f"{_named(lease)} cannot reach its {gpus} any more",
        body=(
            f"Something on the machine took the {gpus} from its container: programs in it say "
            f"“Failed to initialize NVML: Unknown Error”. Save your work, then restart it on your "
            f"page of GPUs and credits: it keeps the same {gpus}. {_KEPT}"
        ),
        at=now,
    )


def _restarts(lease: Lease, now: datetime) -> Notice:
    gpus = "GPU" if len(lease.devices) == 1 else "GPUs"
    return Notice(
        key=f"stopped:{lease.id}",
        user=lease.server.user,
        kind=NoticeKind.STOPPED,
        title=f"{_named(lease)} starts again with the same {gpus}",
        body=f"It is stopped now, and starts by itself in a moment. {_KEPT}",
        at=now,
    )


def _not_again(lease: Lease, why: str, now: datetime) -> Notice:
    return Notice(
        key=f"restart:{lease.id}",
        user=lease.server.user,
        kind=NoticeKind.STOPPED,
        title=f"{_named(lease)} did not start again",
        body=f"{why[0].upper()}{why[1:]}. Its GPUs are kept no longer: start it yourself. {_KEPT}",
        at=now,
    )


def _named(lease: Lease) -> str:
    return f"Your server {lease.server.name}".rstrip()
