"""How much of what was held worked. Real: both databases."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from gpuspawner.leases.models import Lease
from gpuspawner.monitoring.models import DeviceUse
from gpuspawner.monitoring.repository import Worked
from gpuspawner.services import Broker
from tests.support.brokers import T0, Clock, acquire, open_broker, running

HOUR = timedelta(hours=1)


@pytest.fixture
def database_url(each_database_url: str) -> str:
    """The queries, locks and constraints here are each database's own."""
    return each_database_url


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    broker = open_broker(database_url, Clock(), opening_grant=1000, gpu_rates={"*": 1})
    yield broker
    broker.store.close()


def forward(broker: Broker, **time: float) -> None:
    clock = broker.clock
    assert isinstance(clock, Clock)
    clock.forward(**time)


def stop(broker: Broker, lease: Lease) -> None:
    broker.release(lease.id, ended_at=broker.clock(), reason="stopped")


def work(broker: Broker, uuid: str, first: int, last: int, share: float, known: int = 60) -> None:
    """Minutes from the first to the last after T0 in which a GPU worked in this part of them."""
    broker.monitoring.remember_use(
        [
            DeviceUse(
                uuid=uuid,
                since=T0 + timedelta(minutes=n),
                seconds=60,
                samples=60,
                known=known,
                busy=round(known * share),
            )
            for n in range(first, last)
        ]
    )


def worked(broker: Broker, since: timedelta = timedelta(), until: timedelta = 24 * HOUR) -> dict:
    found = broker.monitoring.worked_between(T0 + since, T0 + until)
    return {some.server.user: some for some in found}


def seconds(some: Worked) -> tuple[int, int, int]:
    return round(some.held), round(some.measured), round(some.busy)


def test_each_minute_counts_for_who_held_the_gpu(broker: Broker) -> None:
    ada = running(broker, "ada", 1)
    gpu = ada.uuids[0]
    forward(broker, minutes=30)
    stop(broker, ada)
    others = running(broker, "bob", 4)
    forward(broker, minutes=60)
    work(broker, gpu, 0, 30, 1.0)
    work(broker, gpu, 30, 90, 0.25)
    for uuid in set(others.uuids) - {gpu}:
        work(broker, uuid, 30, 60, 0.0, known=0)  # it did not tell
    found = worked(broker)
    assert seconds(found["ada"]) == (1800, 1800, 1800)
    assert seconds(found["bob"]) == (4 * 3600, 3600, 900)
    assert found["bob"].rested == 2700
    assert (found["bob"].devices, found["bob"].until, found["bob"].model) == (4, None, "A100-80GB")
    # A part of the time: what was before and after is not counted.
    part = worked(broker, timedelta(minutes=20), timedelta(minutes=40))
    assert seconds(part["ada"]) == (600, 600, 600)
    assert seconds(part["bob"]) == (2400, 600, 150)
    assert worked(broker, 3 * HOUR) == {}


def test_hours_tell_what_minutes_do_not_any_more(broker: Broker) -> None:
    ada = running(broker, "ada", 1)
    gpu = ada.uuids[0]
    forward(broker, hours=2, minutes=10)
    stop(broker, ada)
    bob = running(broker, "bob", 1)
    forward(broker, hours=1, minutes=50)
    stop(broker, bob)
    forward(broker, hours=20)
    work(broker, gpu, 0, 130, 0.5)
    work(broker, gpu, 130, 240, 0.1)
    exact = worked(broker)
    broker.monitoring.tidy_use(timedelta(days=14), timedelta(days=400))
    assert worked(broker) == exact, "hours beside minutes are counted once"
    broker.monitoring.tidy_use(timedelta(hours=1), timedelta(days=400))
    rough = worked(broker)
    assert seconds(exact["ada"]) == (7800, 7800, 3900)
    # The third hour was Bob's for the most part, and the greater part of Ada's is told.
    assert seconds(rough["ada"]) == (7800, 7200, 3600)
    assert rough["bob"].measured == min(2 * 3600, exact["bob"].held)
    assert rough["bob"].busy == pytest.approx(600 + 360)
    assert rough["ada"].busy + rough["bob"].busy == pytest.approx(
        exact["ada"].busy + exact["bob"].busy
    )


def test_the_newest_time_by_minutes_and_the_older_by_hours(broker: Broker) -> None:
    lease = running(broker, "ada", 1)
    work(broker, lease.uuids[0], 0, 600, 0.2)
    forward(broker, hours=10)
    exact = worked(broker)["ada"]
    broker.monitoring.tidy_use(timedelta(hours=3.5), timedelta(days=400))
    assert seconds(worked(broker)["ada"]) == seconds(exact) == (36000, 36000, 7200)


def test_what_was_not_measured_is_neither_used_nor_at_rest(broker: Broker) -> None:
    running(broker, "ada", 2)
    running(broker, "cpu", 0)
    forward(broker, hours=1)
    found = worked(broker)
    assert set(found) == {"ada"}
    assert seconds(found["ada"]) == (7200, 0, 0)
    assert found["ada"].rested == 0


def test_a_server_that_never_came_up_held_nothing(broker: Broker) -> None:
    acquire(broker, "ada", 1)
    forward(broker, hours=1)
    assert worked(broker) == {}
