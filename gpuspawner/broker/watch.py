"""The newest look at the devices, shared by everybody in this process who asks the broker."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import datetime, timedelta

import sqlalchemy as sa

from ..devices.base import DeviceSource
from ..model import Device, Inventory
from ..pool import Fleet
from ..store import Store, devices

SAVE_EVERY = timedelta(minutes=1)
"""How often an unchanged look is compared with the store all the same."""


@dataclass(frozen=True, slots=True)
class Look:
    """Devices as last seen; those that were known and not seen are unknown."""

    devices: tuple[Device, ...]
    inventory: Inventory
    fleet: Fleet
    """The same devices, prepared for choosing among them."""


class Watch:
    """Observes a source at most every ``refresh`` and keeps the store's device table true."""

    def __init__(self, source: DeviceSource, store: Store, refresh: timedelta) -> None:
        self.source = source
        self.store = store
        self.refresh = refresh
        self._lock = threading.Lock()
        self._look: Look | None = None
        self._stale = False
        self._known: tuple[Device, ...] | None = None
        self._saved_at: datetime | None = None

    def look(self, now: datetime, *, fresh: bool = False) -> Look:
        """The newest look; a new one when the last is older than ``refresh`` or ``fresh``."""
        with self._lock:
            last = self._look
            # A clock that was set back must not make the last look the newest for hours.
            recent = last and abs(now - last.inventory.observed_at) < self.refresh
            if last and recent and not fresh and not self._stale:
                return last
            self._stale = False
            inventory = self.source.observe(now)
            if self._known is None:
                self._known = self.store.run(self._rows)
            if last and _nothing_new(last.inventory, inventory):
                seen, fleet = last.devices, last.fleet
            else:
                seen = devices.as_seen(self._known, inventory)
                fleet = Fleet(seen, inventory.links)
            if self._must_save(seen, now):
                self._save(inventory)
                self._saved_at = now
            self._known = seen
            self._look = Look(seen, inventory, fleet)
            return self._look

    def forget(self) -> None:
        """Look anew next time: a server is gone, and so are its processes."""
        self._stale = True

    def _rows(self, connection: sa.Connection) -> tuple[Device, ...]:
        return devices.load(connection, self.source.name)

    def _must_save(self, seen: tuple[Device, ...], now: datetime) -> bool:
        late = self._saved_at is None or abs(now - self._saved_at) >= SAVE_EVERY
        return late or seen != self._known

    def _save(self, inventory: Inventory) -> None:
        # Another process may have written what it saw: compare with the rows themselves.
        known = self.store.run(self._rows)
        if devices.as_seen(known, inventory) != known:
            with self.store.write() as connection:
                devices.save(connection, self._rows(connection), inventory)


def _nothing_new(before: Inventory, now: Inventory) -> bool:
    return (
        before.devices == now.devices
        and before.error == now.error
        and (before.links is now.links or before.links == now.links)
    )
