"""What a member's page is made of. Real: both databases, and another writer in between."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from gpuspawner.core.units import MICRO
from gpuspawner.ledger.models import member_account
from gpuspawner.services import Services
from gpuspawner.web import view_models
from tests.support.brokers import Clock, open_services, running
from tests.support.parts import each_database

pytestmark = each_database

ADA = member_account("ada")


@pytest.fixture
def services(database_url: str) -> Iterator[Services]:
    clock = Clock()
    services = open_services(database_url, clock, opening_grant=1000, gpu_rates={"*": 1})
    running(services, "ada")
    clock.forward(minutes=90)
    services.ledger.charge_all()
    clock.forward(seconds=40)  # for which a charge is due
    yield services
    services.store.close()


def look(services: Services) -> view_models.MemberView:
    return view_models.look(services, "ada", frozenset({"lab"}), (30,))


def test_member_page_is_consistent_during_concurrent_writes(services: Services) -> None:
    """It is read in one transaction: after each statement, somebody else gives a credit and closes
    another device."""
    look(services)  # the first look at the devices writes what it saw
    begun: list[sa.Connection] = []
    note = begun.append
    sa.event.listen(services.store.engine, "begin", note)
    seen = look(services)
    sa.event.remove(services.store.engine, "begin", note)
    assert len(begun) == 1
    assert len(seen.mine.running) == 1 and len(seen.overview.devices) == 4

    uuids = [device.uuid for device in services.devices.look().devices]
    writes = 0

    def write() -> None:
        nonlocal writes
        services.ledger.grant(ADA, MICRO, actor="root", reason=f"gift {writes}")
        services.devices.drain(uuids[writes % 4], actor="root", reason=f"fan {writes}")
        writes += 1

    with ThreadPoolExecutor(1) as other:
        page = threading.get_ident()

        def after_statement(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
            if threading.get_ident() == page and statement.startswith("SELECT"):
                other.submit(write).result()

        sa.event.listen(services.store.read_engine, "after_cursor_execute", after_statement)
        seen = look(services)
        sa.event.remove(services.store.read_engine, "after_cursor_execute", after_statement)
    assert writes > 5
    balance = seen.mine.funds.account.balance
    cost = seen.mine.running[0].cost
    assert balance == seen.past.statement.entries[0].balance
    assert balance == 1000 * MICRO - cost
    assert seen.payers.accounts[0].balance == balance
    states = [view.state for view in seen.overview.devices]
    assert states.count("leased") == 1
    assert not [state for state in states if "drain" in state]
    assert look(services).mine.funds.account.balance == balance + writes * MICRO
