"""Real: both databases, threads, another process. What a grant knows of taken places is true."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import sqlalchemy as sa

from gpuspawner.core.errors import NoDeviceFree
from gpuspawner.db.engine import Store
from gpuspawner.devices import closures
from gpuspawner.devices.placement import texts
from gpuspawner.leases import allocation
from gpuspawner.leases import repository as leases_repository
from gpuspawner.leases.models import Lease, LeasedDevice, ServerRef, Slot
from gpuspawner.ledger import repository as ledger_repository
from tests.support.brokers import T0
from tests.support.parts import each_database

pytestmark = each_database

T = TypeVar("T")

FREES = """
import sys
from datetime import datetime, timezone
from gpuspawner.db.engine import Store; from gpuspawner.leases import repository as leases
with Store(sys.argv[1]).write() as connection:
    leases.end(connection, sys.argv[2], datetime.now(timezone.utc), "stopped", charged=0)
"""
"""Another process, which ends a lease."""


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    store = Store(database_url)
    with store.write() as connection:
        ledger_repository.open_account(connection, "member:anna", T0)
    yield store
    store.close()


def lease(name: str, uuid: str, slot: int = 0) -> Lease:
    return Lease(
        id=name,
        server=ServerRef("anna", name),
        account="member:anna",
        environment="",
        devices=(LeasedDevice(uuid, slot, 0, "A100", 80),),
        rate=0,
        hold=0,
        granted_at=T0,
    )


def inside(store: Store, work: Callable[[sa.Connection], T]) -> T:
    """As the services of a hub does it: in a transaction, on one of the store's own threads."""
    return store.executor.submit(store.run, work, write=True).result()


def grant(store: Store, name: str, uuid: str, slot: int = 0) -> None:
    inside(store, lambda connection: leases_repository.insert(connection, lease(name, uuid, slot)))


def end(store: Store, name: str) -> None:
    inside(
        store, lambda connection: leases_repository.end(connection, name, T0, "stopped", charged=0)
    )


def seen(store: Store) -> set[str]:
    """What the next grant takes for taken; it must be what is in the rows."""

    def look(connection: sa.Connection) -> set[str]:
        taken = allocation.read(connection, ServerRef("bert"), "member:anna").taken
        assert taken == leases_repository.places_taken(connection)
        return set(taken)

    return inside(store, look)


def test_allocation_sees_grants_and_ends_of_its_own_hub(store: Store) -> None:
    assert seen(store) == set()
    for number in range(6):  # on whichever of the threads
        grant(store, f"lease-{number}", "GPU-1", number)
    end(store, "lease-2")
    end(store, "lease-5")
    end(store, "lease-5")
    assert seen(store) == texts(Slot("GPU-1", slot) for slot in (0, 1, 3, 4))


def test_repeated_end_frees_no_slot_of_another_lease(store: Store) -> None:
    assert seen(store) == set()
    grant(store, "one", "GPU-1")
    end(store, "one")
    grant(store, "two", "GPU-1")
    end(store, "one")
    assert seen(store) == {"GPU-1:0"}


def test_allocation_sees_changes_by_other_writers(store: Store) -> None:
    grant(store, "one", "GPU-1")
    assert seen(store) == {"GPU-1:0"}
    with store.write() as connection:  # a thread that is none of the store's
        leases_repository.insert(connection, lease("two", "GPU-2"))
    assert seen(store) == {"GPU-1:0", "GPU-2:0"}
    grant(store, "three", "GPU-3")
    subprocess.run([sys.executable, "-c", FREES, store.url, "one"], check=True, timeout=60)
    assert seen(store) == {"GPU-2:0", "GPU-3:0"}
    grant(store, "four", "GPU-1")
    assert seen(store) == {"GPU-1:0", "GPU-2:0", "GPU-3:0"}


def test_rolled_back_changes_do_not_affect_allocation(store: Store) -> None:
    grant(store, "one", "GPU-1")
    assert seen(store) == {"GPU-1:0"}

    def undone(connection: sa.Connection) -> None:
        leases_repository.end(connection, "one", T0, "stopped", charged=0)
        leases_repository.insert(connection, lease("two", "GPU-2"))
        raise RuntimeError("the power is cut")

    with pytest.raises(RuntimeError, match="power"):
        inside(store, undone)
    assert seen(store) == {"GPU-1:0"}
    with pytest.raises(NoDeviceFree):
        grant(store, "three", "GPU-1")
    assert seen(store) == {"GPU-1:0"}


def test_drained_device_stays_taken_after_its_lease_ends(store: Store) -> None:
    grant(store, "one", "GPU-1")
    assert seen(store) == {"GPU-1:0"}
    closed = closures.Closure("GPU-1", T0, "kim", "a new fan")
    inside(store, lambda connection: closures.close(connection, closed))
    end(store, "one")
    assert seen(store) == {"GPU-1:0"}
    inside(store, lambda connection: closures.reopen(connection, "GPU-1"))
    assert seen(store) == set()
