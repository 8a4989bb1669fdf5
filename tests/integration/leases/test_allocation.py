"""What a grant knows of taken slots is true. Real: both databases."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpuspawner.core.errors import NoDeviceFree
from gpuspawner.db.engine import Store
from gpuspawner.devices import closures
from gpuspawner.devices.placement import texts
from gpuspawner.leases import allocation
from gpuspawner.leases import repository as leases_repository
from gpuspawner.leases.models import Lease, LeasedDevice, ServerRef, Slot
from gpuspawner.ledger import repository as ledger_repository
from tests.support.brokers import T0
from tests.support.leases import lease_of
from tests.support.parts import each_database

pytestmark = each_database


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    store = Store(database_url)
    with store.write() as connection:
        ledger_repository.open_account(connection, "member:anna", T0)
    yield store
    store.close()


def lease(name: str, uuid: str, slot: int = 0) -> Lease:
    devices = (LeasedDevice(uuid, slot, 0, "A100", 80),)
    return lease_of("anna", id=name, server=ServerRef("anna", name), devices=devices)


def grant(store: Store, name: str, uuid: str, slot: int = 0) -> None:
    with store.write() as connection:
        leases_repository.insert(connection, lease(name, uuid, slot))


def end(store: Store, name: str) -> None:
    with store.write() as connection:
        leases_repository.end(connection, name, T0, "stopped", charged=0)


def seen(store: Store) -> set[str]:
    """What the next grant takes for taken; it must be what is in the rows."""
    with store.read() as connection:
        taken = allocation.read(connection, ServerRef("bert"), "member:anna").taken
        assert taken == leases_repository.places_taken(connection)
    return set(taken)


def test_allocation_sees_grants_and_ends(store: Store) -> None:
    assert seen(store) == set()
    for number in range(6):
        grant(store, f"lease-{number}", "GPU-1", number)
    end(store, "lease-2")
    end(store, "lease-5")
    end(store, "lease-5")
    assert seen(store) == texts(Slot("GPU-1", slot) for slot in (0, 1, 3, 4))
    with pytest.raises(NoDeviceFree):
        grant(store, "another", "GPU-1", 3)
    grant(store, "another", "GPU-1", 2)
    end(store, "lease-2")  # once more: the slot is another lease's
    assert seen(store) == texts(Slot("GPU-1", slot) for slot in range(5))


def test_drained_device_stays_taken_after_its_lease_ends(store: Store) -> None:
    grant(store, "one", "GPU-1")
    assert seen(store) == {"GPU-1:0"}
    closed = Slot.closure("GPU-1").text
    with store.write() as connection:
        closures.close(connection, closures.Closure("GPU-1", T0, "kim", "a new fan"))
    assert seen(store) == {"GPU-1:0", closed}
    end(store, "one")
    assert seen(store) == {closed}
    with store.write() as connection:
        closures.reopen(connection, "GPU-1")
    assert seen(store) == set()
