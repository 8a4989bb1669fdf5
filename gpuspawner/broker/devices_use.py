"""What devices did: remembered, summed up and told."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

from ..model import Lease
from ..store import use, worked
from ..store.worked import Worked
from ..telemetry import DeviceUse, combine
from ..telemetry.values import HOUR, MINUTE
from .core import Core

BY_MINUTES = timedelta(hours=6)
"""Sessions up to this length are told by their minutes, longer ones by their hours."""


class DevicesUse(Core):
    """The part of the broker that knows how much devices are used."""

    def remember_use(self, minutes: Collection[DeviceUse]) -> None:
        """Write complete minutes. Raises StoreUnavailable, and then none is written."""
        with self.store.write() as connection:
            use.remember(connection, minutes)

    def tidy_use(self, keep_minutes: timedelta, keep_hours: timedelta) -> None:
        """Sum up the hours that are over, and forget what is older than is kept."""
        now = self.clock()
        with self.store.write() as connection:
            use.sum_up(connection, now)
            use.forget(connection, now - keep_minutes, now - keep_hours)

    def use_now(self) -> dict[str, DeviceUse]:
        """The last minute of each device that is being sampled, by its UUID."""
        now = self.clock()
        return self.store.run(lambda connection: use.newest(connection, now))

    def use_between(
        self,
        since: datetime,
        until: datetime,
        *,
        seconds: int = MINUTE,
        uuids: Sequence[str] | None = None,
    ) -> list[DeviceUse]:
        """Minutes, or hours (``seconds=3600``), that began in this time, by time."""
        return self.store.run(
            lambda connection: use.between(connection, since, until, seconds=seconds, uuids=uuids)
        )

    def worked_between(self, since: datetime, until: datetime) -> list[Worked]:
        """Every lease with GPUs in this time, with how much of it they worked; by its start."""
        until = min(until, self.clock())
        if until <= since:
            return []
        return self.store.run(lambda connection: worked.between(connection, since, until))

    def session_use(self, lease: Lease) -> dict[str, DeviceUse]:
        """What each device of a session did in it, by UUID; nothing for one that was not sampled.

        Of whole minutes inside the session, or of whole hours where it was long or its minutes
        are forgotten. Of a device that is shared, all who share it.
        """
        if lease.started_at is None or not lease.devices:
            return {}
        since, until = lease.started_at, lease.ended_at or self.clock()
        found: list[DeviceUse] = []
        for seconds in (MINUTE, HOUR) if until - since <= BY_MINUTES else (HOUR, MINUTE):
            whole = until - timedelta(seconds=seconds) + timedelta(microseconds=1)
            found = self.use_between(since, whole, seconds=seconds, uuids=lease.uuids)
            if found:
                break
        by_device: dict[str, list[DeviceUse]] = {}
        for each in found:
            by_device.setdefault(each.uuid, []).append(each)
        return {uuid: combine(some, since, found[0].seconds) for uuid, some in by_device.items()}
