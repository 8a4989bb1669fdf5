"""Slots and whole devices in any order. Real: the services on SQLite and PostgreSQL; simulated: the
clock and the devices."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import pytest
import sqlalchemy as sa
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpuspawner.core.errors import NoDeviceFree, TooMuchAsked
from gpuspawner.db.schema import OPEN_PLACE, lease_places
from gpuspawner.devices.models import Device
from gpuspawner.leases.models import Lease, Sharing
from tests.support.brokers import Clock, acquire, open_services, problems
from tests.support.machines import run_machine
from tests.support.postgres import PrivatePostgres
from tests.support.racers import shared_wrongly
from tests.support.tier import SOAK

FLEET = "simulated:3xT4,2xA100-80GB"
"""The first three can be shared."""
T4_BYTES = 16 * 2**30
members = st.sampled_from(("anna", "bert", "cara"))


class SlotMachine(RuleBasedStateMachine):
    """Members take slots and whole devices and give them back; an admin changes the slots."""

    def __init__(self, new_url: Callable[[], str]) -> None:
        super().__init__()
        self.services = open_services(
            new_url(), Clock(), device_source=FLEET, shared_devices={"T4": 3}, refresh_seconds=0
        )
        self.names = map(str, itertools.count())
        self.wanted = 3
        self.open: dict[str, Lease] = {}
        self.slots: dict[str, int] = {}

    @initialize()
    def hub_starts(self) -> None:
        self.slots = {device.uuid: device.slots for device in self.look()}
        assert Counter(self.slots.values()) == {3: 3, 1: 2}

    def look(self) -> tuple[Device, ...]:
        return self.services.devices.look(fresh=True).devices

    def taken(self) -> dict[str, set[int]]:
        """The slots of each device that open leases hold, of whole devices all."""
        found: dict[str, set[int]] = {uuid: set() for uuid in self.slots}
        rows = self.services.store.run(self.rows)
        for uuid, slot, _ in rows:
            assert slot not in found[uuid], "two leases on one slot"
            found[uuid].add(slot)
        held = Counter((uuid, lease_id) for uuid, _, lease_id in rows)
        assert held == {
            (device.uuid, lease.id): device.held_slots
            for lease in self.open.values()
            for device in lease.devices
        }
        return found

    @staticmethod
    def rows(connection: sa.Connection) -> list[tuple[str, int, str]]:
        """UUID, slot and lease of each row."""
        columns = lease_places.c.uuid, lease_places.c.slot, lease_places.c.lease_id
        return [(*row,) for row in connection.execute(sa.select(*columns).where(OPEN_PLACE))]

    @rule(slots=st.integers(1, 4))
    def slots_change(self, slots: int) -> None:
        self.wanted = slots
        self.services.watch.shared = {"T4": slots} if slots > 1 else {}
        taken = self.taken()
        for device in self.look():
            is_free = device.model.endswith("T4") and not taken[device.uuid]
            assert device.slots == (slots if is_free else self.slots[device.uuid])
            self.slots[device.uuid] = device.slots

    def changed_since(self) -> None:
        """A device whose last lease ended has the number of slots that is set meanwhile."""
        self.slots = {device.uuid: device.slots for device in self.look()}

    @rule(user=members, gigabytes=st.sampled_from((0, 0, 5, 8, 11, 14)))
    def share_is_asked_for(self, user: str, gigabytes: int) -> None:
        taken = self.taken()
        mine = {uuid for lease in self.open.values() if lease.server.user == user
                for uuid in lease.uuids}  # fmt: skip
        # How many slots of each device come to this memory; all of them are no share.
        needed = {
            uuid: next(n for n in range(1, slots + 1) if T4_BYTES * n >= gigabytes * 10**9 * slots)
            for uuid, slots in self.slots.items()
            if slots > 1
        }
        shared = {uuid for uuid, slots in needed.items() if slots < self.slots[uuid]}
        left = {u for u in shared if self.slots[u] - len(taken[u]) >= needed[u]}
        try:
            lease = acquire(
                self.services,
                user,
                server=next(self.names),
                sharing=Sharing.SLOT,
                memory_bytes=gigabytes * 10**9,
            )
        except NoDeviceFree:
            assert shared and not left - mine
        except TooMuchAsked:
            assert not shared
        else:
            (device,) = lease.devices
            assert device.uuid in left - mine and device.slot not in taken[device.uuid]
            assert device.is_shared and device.slots == self.slots[device.uuid]
            assert device.held_slots == needed[device.uuid]
            assert taken[device.uuid] or not any(taken[uuid] for uuid in left - mine)
            self.open[lease.id] = lease

    @rule(user=members, count=st.integers(1, 3))
    def whole_devices_are_asked_for(self, user: str, count: int) -> None:
        taken = self.taken()
        models = {device.uuid: device.model for device in self.look()}
        empty = {uuid for uuid in taken if not taken[uuid]}
        most = max(Counter((models[u], self.slots[u]) for u in taken).values())
        alike = Counter((models[uuid], self.slots[uuid]) for uuid in empty)
        most_empty = max(alike.values(), default=0)
        try:
            lease = acquire(self.services, user, count, next(self.names))
        except NoDeviceFree:
            assert most_empty < count <= most
        except TooMuchAsked:
            assert most < count
        else:
            assert len(set(lease.uuids)) == count and set(lease.uuids) <= empty
            assert len({device.slots for device in lease.devices}) == 1
            assert all(device.held_slots == device.slots for device in lease.devices)
            self.open[lease.id] = lease

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def lease_ends(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(list(self.open)))
        self.services.leases.release(lease_id, reason="stopped")
        del self.open[lease_id]
        self.changed_since()

    @invariant()
    def each_slot_has_one_lease_and_each_member_one_share_of_a_device(self) -> None:
        assert {lease.id for lease in self.services.leases.open_leases()} == set(self.open)
        self.taken()
        sharers = Counter(
            (lease.server.user, device.uuid)
            for lease in self.open.values()
            for device in lease.devices
            if device.is_shared
        )
        assert max(sharers.values(), default=1) == 1
        assert self.services.store.run(shared_wrongly) == []

    def teardown(self) -> None:
        try:
            for lease_id in self.open:
                self.services.leases.release(lease_id, reason="the day is over")
            assert problems(self.services.store) == []
        finally:
            self.services.store.close()


@pytest.mark.usefixtures("processes")
def test_slots_and_whole_devices_exclude_each_other_on_sqlite(new_file: Callable[[], str]) -> None:
    examples, steps = (300, 50) if SOAK else (25, 30)
    run_machine(lambda: SlotMachine(new_file), examples, steps)


@pytest.mark.usefixtures("soak")
def test_slots_and_whole_devices_exclude_each_other_on_postgresql(
    postgres: PrivatePostgres,
) -> None:
    run_machine(lambda: SlotMachine(postgres.migrated_database), examples=40, steps=30)
