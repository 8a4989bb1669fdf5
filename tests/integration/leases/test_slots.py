"""Slots of shared devices. Real: processes, threads, SQLite, PostgreSQL. Simulated: devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import sqlalchemy as sa

from gpuspawner.core.errors import NoDeviceFree
from gpuspawner.leases import repository
from gpuspawner.leases.models import Request, ServerRef, Sharing
from gpuspawner.services import Services
from tests.support import racers
from tests.support.brokers import T0, acquire, broken_invariants, open_services, problems
from tests.support.parts import each_database

pytestmark = each_database

FOUR: dict[str, Any] = {"device_source": "simulated:4xT4", "shared_devices": {"T4": 4}}
SIX = FOUR | {"device_source": "simulated:6xT4"}


@pytest.fixture
def services(database_url: str) -> Iterator[Services]:
    """Services of this process on the database that the others race for."""
    services = open_services(database_url, **FOUR)
    yield services
    services.store.close()


@pytest.mark.usefixtures("processes")
def test_200_racing_requests_share_devices_correctly(database_url: str) -> None:
    services = open_services(database_url, **SIX)
    services.monitoring.overview()
    racing = [(racers.shares_and_whole_devices, database_url, seed, 100, SIX) for seed in range(2)]
    answers, wrong = zip(*racers.together(*racing), strict=True)
    assert list(chain(*wrong)) == []
    found = Counter(answer.partition(":")[0] for answer in chain(*answers))
    assert found.keys() == {"slot", "three slots", "whole", "two", "NoDeviceFree"}
    assert found.total() == 200, "each of them happened"
    leases = services.leases.open_leases()
    assert sum(lease.device_equivalents for lease in leases) <= 6
    for lease in leases:
        services.leases.release(lease.id, reason="the end")
    assert acquire(services, "anna", 1).device_equivalents == 1
    assert problems(services.store) == [] and broken_invariants(services) == {}
    services.store.close()


@pytest.mark.usefixtures("processes")
def test_device_changes_its_slots_only_while_empty(database_url: str) -> None:
    services = open_services(database_url, device_source=racers.TWO_T4, shared_devices={"T4": 4})
    services.monitoring.overview()
    done = racers.FORKSERVER.Value("i", 0)
    asking = [(racers.slots_of_changing_devices, database_url, seed, done) for seed in range(2)]
    changed, *asked = racers.together((racers.hub_changes_slots, database_url, done, 2), *asking)
    assert changed > 3
    for found, wrong in asked:
        assert wrong == [] and len(found) > 2
    assert problems(services.store) == [] and broken_invariants(services) == {}
    services.store.close()


def test_leased_device_keeps_its_slots(services: Services) -> None:
    lease = acquire(services, "anna", sharing=Sharing.SLOT)
    services.watch.shared = {"T4": 2}
    slots = [device.slots for device in services.devices.look(fresh=True).devices]
    assert slots == [4, 2, 2, 2]
    second = acquire(services, "bert", sharing=Sharing.SLOT)
    assert second.uuids == lease.uuids and second.devices[0].share == lease.devices[0].share
    for each in (lease, second):
        services.leases.release(each.id, reason="stopped")
    slots = [device.slots for device in services.devices.look(fresh=True).devices]
    assert slots == [2, 2, 2, 2]


def test_looks_write_nothing_while_a_leased_device_waits_for_its_new_number(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = acquire(services, "anna", sharing=Sharing.SLOT)
    services.watch.shared = {"T4": 2}
    writes: list[None] = []
    begin = services.store.write

    @contextmanager
    def counted() -> Iterator[sa.Connection]:
        writes.append(None)
        with begin() as connection:
            yield connection

    def look() -> list[int]:
        writes.clear()
        return [device.slots for device in services.devices.look(fresh=True).devices]

    monkeypatch.setattr(services.store, "write", counted)
    assert look() == [4, 2, 2, 2] and writes, "the devices without a lease"
    for _ in range(3):
        assert look() == [4, 2, 2, 2] and not writes
    services.leases.release(lease.id, reason="stopped")
    assert look() == [2, 2, 2, 2] and writes
    assert look() == [2, 2, 2, 2] and not writes


def test_grant_with_an_old_number_of_slots_is_refused(services: Services) -> None:
    old = services.devices.look()
    services.watch.shared = {"T4": 2}
    new = services.devices.look(fresh=True)
    request, server = Request(devices=1, sharing=Sharing.SLOT), ServerRef("anna")
    account = services.ledger.open_account("anna").name
    terms: dict[str, Any] = {"account": account, "engine": "docker"}
    refused = pytest.raises(NoDeviceFree, match="has just changed")
    with refused, services.store.write() as connection:
        services.leases.grant_in(connection, server, request, old, T0, **terms)
    with services.store.write() as connection:
        lease = services.leases.grant_in(connection, server, request, new, T0, **terms)
    assert lease.devices[0].slots == 2


def test_database_refuses_a_second_slot_of_a_member(services: Services) -> None:
    first = acquire(services, "anna", sharing=Sharing.SLOT)
    device = replace(first.devices[0], slot=first.devices[0].slot + 1)
    again = replace(
        first, id="second", server=replace(first.server, name="second"), devices=(device,)
    )
    with pytest.raises(NoDeviceFree), services.store.write() as connection:
        repository.insert(connection, again)
    with services.store.write() as connection:
        repository.insert(connection, replace(again, server=replace(again.server, user="bert")))
    assert len(services.leases.open_leases()) == 2
