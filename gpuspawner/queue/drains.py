"""Drains by admins: refused if members who wait could start later than they were told."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from datetime import datetime, timezone

from ..core.errors import CannotDrain
from ..core.times import zoned
from ..db.clock import Timekeeper
from ..db.engine import Store
from ..devices.service import DeviceService
from .extensions import EXACT
from .positions import PLANNED, PositionService


@dataclass(eq=False)
class DrainService:
    """Drains devices for admins."""

    store: Store
    clock: Timekeeper
    _: KW_ONLY
    devices: DeviceService
    positions: PositionService

    def __post_init__(self) -> None:
        self.line = self.positions.line

    def drain(self, device: str, *, actor: str, reason: str = "", anyway: bool = False) -> bool:
        """Drain a device as :meth:`DeviceService.drain` does, if every latest start shown is kept.

        With ``anyway`` it is drained in any case. Raises CannotDrain, also what that method raises.
        """
        if anyway or self.devices.machines.delegate is not None:  # Slurm names no latest start
            return self.devices.drain(device, actor=actor, reason=reason)
        found = self.devices.find_device(device)
        with self.line.lock:
            look = self.positions.sync()
            try:
                with self.store.write() as connection:
                    # In this transaction: nobody is told a time between the check and the drain.
                    now = self.clock()
                    self.line.sync(connection, look, now)
                    before = self._latest_starts(now)
                    done = self.devices.drain_in(connection, found.uuid, actor=actor, reason=reason)
                    self.line.sync(connection, look, now)
                    if late := self._late(before, self._latest_starts(now), now):
                        sentence = f"GPU {found.index} is not drained: without it, {late}. "
                        advice = "Wait until they have started, or drain it anyway."
                        raise CannotDrain(sentence + advice, device=found)
            except CannotDrain:
                self.positions.sync()  # without the drain that was rolled back
                raise
        return done

    def _latest_starts(self, now: datetime) -> dict[str, float]:
        """Return the latest starts shown, in seconds since 1970; now for tickets that start now."""
        if self.line.paused:
            return {}
        decision = self.line.scheduler.decide(
            now.timestamp(),
            self.line.supply.grantable,
            planned=PLANNED,
            likely_ends=self.line.drained(),
            yielded=self.line.supply.yielded,
            host=self.line.host_use,
        )
        return dict(decision.latest) | dict.fromkeys(decision.starts, now.timestamp())

    def _late(self, before: Mapping[str, float], after: Mapping[str, float], now: datetime) -> str:
        """Describe who could start later than they were told; empty if nobody."""
        members: dict[str, set[str]] = defaultdict(set)
        for ticket_id, latest in sorted(before.items(), key=lambda each: each[1]):
            if after.get(ticket_id, float("inf")) > latest + EXACT:
                at = datetime.fromtimestamp(latest, timezone.utc)
                members[zoned(max(at, now), now)].add(self.line.tickets[ticket_id].server.user)
        count = len(set().union(*members.values()))
        if not count:
            return ""
        who = "1 waiting member" if count == 1 else f"{count} waiting members"
        times = [f"by {time}" for time in members]
        if len(times) > 1:
            times = [f"{len(users)} by {time}" for time, users in members.items()]
        return f"{who} could start later than they were told ({', '.join(times)} at the latest)"
