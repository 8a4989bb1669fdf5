"""Services whose database fails, and what must hold then and afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

from gpuspawner.core.errors import StoreUnavailable
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import ServerRef
from gpuspawner.services import Services
from tests.support.brokers import Clock, acquire, open_services, problems, running

SENTENCE = "Database unavailable. No changes were made. Try again in a moment."


@contextmanager
def in_use(url: str) -> Iterator[Services]:
    """Services in the middle of its life: one server runs, one has come and gone."""
    clock = Clock()
    services = open_services(url, clock, gpu_rates={"*": 4})
    try:
        running(services, "anna", 2)
        gone = running(services, "bert")
        clock.forward(hours=1)
        services.ledger.charge_all()
        services.leases.release(gone.id, ended_at=clock.now, reason="stopped")
        yield services
        assert problems(services.store) == []
    finally:
        services.store.close()


@contextmanager
def by_hand(services: Services) -> Iterator[sa.Connection]:
    """A connection on which nothing is forbidden: triggers and foreign keys are gone."""
    with services.store.engine.connect() as connection:
        if services.store.dialect == "sqlite":
            connection.exec_driver_sql("PRAGMA foreign_keys=OFF")
            triggers = "SELECT name FROM sqlite_master WHERE type = 'trigger'"
            for name in connection.exec_driver_sql(triggers).scalars().all():
                connection.exec_driver_sql(f"DROP TRIGGER {name}")
        else:
            connection.exec_driver_sql("SET session_replication_role = replica")
        yield connection
        connection.commit()
        connection.invalidate()


def assert_unavailable(services: Services, *, reads: bool = True) -> None:
    """Nothing can be written (nor read), and that is said in words, while it is so."""
    works: list[Callable[[], Any]] = [
        partial(acquire, services, "cara"),
        partial(services.leases.confirm, "any"),
        partial(services.leases.release, "any", reason="stopped"),
        partial(services.ledger.grant, "member:anna", 1, actor="admin", reason="gift"),
        partial(services.ledger.open_account, "cara"),
        services.ledger.charge_all,
    ]
    if reads:
        works += [services.leases.open_leases, services.ledger.accounts]
    for work in works:
        with pytest.raises(StoreUnavailable) as caught:
            work()
        assert caught.value.message == SENTENCE


def assert_works(services: Services) -> None:
    """As it was before, and it goes on."""
    (lease,) = services.leases.open_leases()
    assert lease.server == ServerRef("anna") and lease.charged == 8 * MICRO
    assert services.ledger.member("bert").balance == 96 * MICRO
    assert [account.name for account in services.ledger.accounts()] == [
        "member:anna",
        "member:bert",
    ]
    added = acquire(services, "cara")
    services.leases.release(added.id, reason="enough")
    assert services.ledger.grant("member:bert", 4 * MICRO, actor="admin", reason="gift")
    assert problems(services.store) == []
