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
from gpuspawner.services import Broker
from gpuspawner.web import view_models
from tests.support.brokers import Clock, open_broker, running

ADA = member_account("ada")


@pytest.fixture
def broker(each_database_url: str) -> Iterator[Broker]:
    clock = Clock()
    broker = open_broker(each_database_url, clock, opening_grant=1000, gpu_rates={"*": 1})
    running(broker, "ada")
    clock.forward(minutes=90)
    broker.ledger.charge_all()
    yield broker
    broker.store.close()


def look(broker: Broker) -> view_models.MemberView:
    return view_models.look(broker, "ada", frozenset({"lab"}), (30,))


def test_a_member_page_is_one_transaction(broker: Broker) -> None:
    look(broker)  # the first look at the devices writes what it saw
    begun: list[sa.Connection] = []
    sa.event.listen(broker.store.engine, "begin", begun.append)
    seen = look(broker)
    assert len(begun) == 1
    assert len(seen.mine.running) == 1 and len(seen.devices) == 4


def test_its_figures_are_of_one_moment_while_others_write(broker: Broker) -> None:
    """After each statement of the page, somebody else gives a credit and closes another device."""
    look(broker)
    uuids = [device.uuid for device in broker.look().devices]
    writes = 0

    def write() -> None:
        nonlocal writes
        broker.ledger.grant(ADA, MICRO, actor="root", reason=f"gift {writes}")
        broker.devices.drain(uuids[writes % 4], actor="root", reason=f"fan {writes}")
        writes += 1

    with ThreadPoolExecutor(1) as other:
        page = threading.get_ident()

        def after_statement(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
            if threading.get_ident() == page and statement.startswith("SELECT"):
                other.submit(write).result()

        sa.event.listen(broker.store.read_engine, "after_cursor_execute", after_statement)
        seen = look(broker)
        sa.event.remove(broker.store.read_engine, "after_cursor_execute", after_statement)
    assert writes > 5
    balance = seen.mine.funds.account.balance
    cost = seen.mine.running[0].cost
    assert balance == seen.past.statement.entries[0].balance
    assert balance == 1000 * MICRO - cost
    assert seen.payers.accounts[0].balance == balance
    assert [figure.view.state for figure in seen.devices].count("leased") == 1
    assert not [figure for figure in seen.devices if "drain" in figure.view.state]
    assert look(broker).mine.funds.account.balance == balance + writes * MICRO
