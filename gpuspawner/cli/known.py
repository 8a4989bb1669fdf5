"""A broker for commands about the line: it goes by what the hub saw of the devices."""

from __future__ import annotations

from datetime import datetime, timedelta

from ..broker import Broker
from ..broker.watch import Watch
from ..model import Inventory
from ..store import Store, devices
from .config import Settings


class KnownDevices:
    """The devices as the store has them, whatever can be seen by whoever types this."""

    def __init__(self, store: Store) -> None:
        self.name = store.run(devices.source_of)
        self._store = store

    def observe(self, now: datetime) -> Inventory:
        """What the hub saw last; no links, which are for choosing devices only."""
        known = self._store.run(lambda connection: devices.load(connection, self.name))
        return Inventory(devices=known, observed_at=now, source=self.name)


class Glance(Watch):
    """A watch that writes nothing: the device table is the hub's."""

    def _save(self, inventory: Inventory) -> None:
        return


def line_broker(settings: Settings) -> Broker:
    """The broker on the hub's database, for reading and changing the line.

    Raises StoreUnavailable when there is no database yet.
    """
    broker = settings.open_broker()
    broker.watch = Glance(
        KnownDevices(broker.store), broker.store, timedelta(seconds=broker.refresh_seconds)
    )
    return broker
