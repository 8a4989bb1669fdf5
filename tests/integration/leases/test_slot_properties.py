"""Slots and whole devices in any order. Real: the services on SQLite and PostgreSQL; simulated: the
clock and the devices."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpuspawner.core.errors import NoDeviceFree, TooMuchAsked
from gpuspawner.devices.models import Device
from gpuspawner.leases.models import Lease, Sharing
from tests.support.brokers import Clock, acquire, open_services, problems
from tests.support.machines import run_machine
from tests.support.postgres import PrivatePostgres
from tests.support.racers import shared_wrongly
from tests.support.tier import SOAK

FLEET = "simulated:3xT4,2xA100-80GB"
"""The first three can be shared."""
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
        for lease in self.open.values():
            for device in lease.devices:
                held = {device.slot} if device.is_shared else set(range(device.slots))
                assert not found[device.uuid] & held, "two leases on one slot"
                found[device.uuid] |= held
        return found

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

    @rule(user=members)
    def slot_is_asked_for(self, user: str) -> None:
        taken = self.taken()
        mine = {uuid for lease in self.open.values() if lease.server.user == user
                for uuid in lease.uuids}  # fmt: skip
        shared = {uuid for uuid, slots in self.slots.items() if slots > 1}
        left = {uuid for uuid in shared if len(taken[uuid]) < self.slots[uuid]}
        try:
            lease = acquire(self.services, user, server=next(self.names), sharing=Sharing.SLOT)
        except NoDeviceFree:
            assert shared and not left - mine
        except TooMuchAsked:
            assert not shared
        else:
            (device,) = lease.devices
            assert device.uuid in left - mine and device.slot not in taken[device.uuid]
            assert device.is_shared and device.slots == self.slots[device.uuid]
            assert taken[device.uuid] or not any(taken[uuid] for uuid in left - mine)
            self.open[lease.id] = lease

    @rule(user=members, count=st.integers(1, 3))
    def whole_devices_are_asked_for(self, user: str, count: int) -> None:
        taken = self.taken()
        models = {device.uuid: device.model for device in self.look()}
        empty = {uuid for uuid in taken if not taken[uuid]}
        usable = {uuid for uuid in self.slots if count == 1 or self.slots[uuid] == 1}
        most = max(Counter(models[uuid] for uuid in usable).values(), default=0)
        most_empty = max(Counter(models[uuid] for uuid in usable & empty).values(), default=0)
        try:
            lease = acquire(self.services, user, count, next(self.names))
        except NoDeviceFree:
            assert most_empty < count <= most
        except TooMuchAsked:
            assert most < count
        else:
            assert len(set(lease.uuids)) == count and set(lease.uuids) <= usable & empty
            assert all(device.held_slots == device.slots for device in lease.devices)
            self.open[lease.id] = lease

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def lease_ends(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.open)))
        self.services.leases.release(lease_id, reason="stopped")
        del self.open[lease_id]
        self.changed_since()

    @invariant()
    def each_slot_has_one_lease_and_each_member_one_slot(self) -> None:
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
