"""What devices did: remembered, summed up and told."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

from ..store import use
from ..telemetry import DeviceUse
from ..telemetry.values import MINUTE
from .core import Core


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
