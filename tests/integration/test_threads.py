"""Which work waits for which. Real: both databases, and the threads of a broker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from gpuspawner.leases.models import LeaseState
from gpuspawner.services import Broker
from tests.support.brokers import open_broker, problems, running

RELEASES = 50


@pytest.fixture
def broker(each_database_url: str) -> Iterator[Broker]:
    broker = open_broker(
        each_database_url, device_source=f"simulated:{RELEASES}xA100-80GB", opening_grant=1000
    )
    yield broker
    broker.store.close()


async def test_reports_pages_and_requests_delay_no_release(broker: Broker) -> None:
    """More of each than there are threads, and all of them hold a transaction open."""
    leases = [running(broker, f"member{n}") for n in range(RELEASES)]
    done = threading.Event()

    def hold_open() -> None:
        with broker.store.read() as connection:
            connection.exec_driver_sql("SELECT count(*) FROM leases").all()
            assert done.wait(600)

    def hold_on() -> None:
        assert done.wait(600)

    loop = asyncio.get_running_loop()
    held = [asyncio.ensure_future(broker.report(hold_open)) for _ in range(8)]
    held += [asyncio.ensure_future(broker.read(hold_open)) for _ in range(8)]
    held += [loop.run_in_executor(broker.asking, hold_on) for _ in range(2000)]
    held += [asyncio.ensure_future(broker.run_outside(hold_on)) for _ in range(20)]
    try:
        ended = await asyncio.gather(
            *(broker.run(broker.release, lease.id, reason="stopped") for lease in leases)
        )
        assert {lease.state for lease in ended} == {LeaseState.ENDED}
        assert not any(task.done() for task in held)
    finally:
        done.set()
        await asyncio.gather(*held)
    assert problems(broker.store) == []
