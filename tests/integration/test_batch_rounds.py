"""Rounds over jobs beside servers: how far they were read, what waits, what fails, what is written.

Real: SQLite, PostgreSQL, the broker. Not real: what sacct says, which is written here; tests/slurm
has the real one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from gpuspawner.services import Broker
from gpuspawner.slurm import repository as slurm_repository
from gpuspawner.slurm.job_billing import SETTLED
from tests.support.batch_jobs import A100, CLUSTER, H100, LATER, a_day_later, run
from tests.support.brokers import T0, Clock, credits_of


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    with a_day_later(database_url) as broker:
        yield broker


@pytest.fixture
def clock(broker: Broker) -> Clock:
    return Clock.of(broker)


def read_up_to(broker: Broker) -> Any:
    """Up to when jobs were read, since T0."""
    found = broker.store.run(
        lambda connection: slurm_repository.find_marks(connection, CLUSTER.name)
    )
    assert found is not None
    return found.until - T0


def writes(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many transactions that write have begun since it was asked last."""
    count, real = [0], broker.store.write

    def counted() -> Any:
        count[0] += 1
        return real()

    def since() -> int:
        found, count[0] = count[0], 0
        return found

    monkeypatch.setattr(broker.store, "write", counted)
    return since


# What is known only later.


def test_a_price_waits_for_the_model_that_comes_late(broker: Broker, clock: Clock) -> None:
    half = {"gpus": {"": 1}, "nodes": ("m1", "m2")}
    for _ in range(2):
        assert broker.job_billing.debit(CLUSTER, [run(1, **half)], until=clock.now).jobs == 0
    assert broker.job_billing.jobs_since("lab", T0) == []
    assert read_up_to(broker) == timedelta(hours=1), "it is read again from its end on"
    broker.job_billing.debit(CLUSTER, [run(1, gpus={"h100": 1}, nodes=("m2",))], until=clock.now)
    assert credits_of(broker) == 90
    assert [job.devices for job in broker.job_billing.jobs_since("lab", T0)] == [f"1 {H100}"]
    assert read_up_to(broker) == LATER


def test_what_nobody_can_ever_say_costs_the_lowest(broker: Broker, clock: Clock) -> None:
    lost = [
        run(1, gpus={"": 1}, nodes=("gone",)),
        run(2, seconds=None, ran=7200, gpus={"": 1}, nodes=()),
    ]
    broker.job_billing.debit(CLUSTER, lost, until=clock.now)
    clock.now += SETTLED - timedelta(seconds=1)
    broker.job_billing.debit(CLUSTER, lost, until=clock.now)
    assert credits_of(broker) == 100
    clock.forward(seconds=1)
    broker.job_billing.debit(CLUSTER, lost, until=clock.now)
    assert credits_of(broker) == 100 - 4 - 8
    assert read_up_to(broker) == LATER + SETTLED
    assert {job.devices for job in broker.job_billing.jobs_since("lab", T0)} == {
        f"1 {A100} or {H100}"
    }


def test_what_a_job_had_may_come_after_its_end(broker: Broker, clock: Clock) -> None:
    nothing = {"gpus": {}, "told": False}
    broker.job_billing.debit(
        CLUSTER, [run(1, **nothing), run(2, seconds=0, **nothing)], until=clock.now
    )
    assert read_up_to(broker) == timedelta(hours=1)
    broker.job_billing.debit(CLUSTER, [run(1)], until=clock.now)
    assert (credits_of(broker), read_up_to(broker)) == (96, LATER)


# How far it was read.


def test_what_a_clock_ahead_wrote_is_taken_back(broker: Broker, clock: Clock) -> None:
    broker.job_billing.debit(CLUSTER, [], until=clock.now)
    clock.forward(days=2)
    broker.job_billing.debit(CLUSTER, [], until=clock.now)
    assert read_up_to(broker) == LATER + timedelta(days=2)
    clock.now = T0 + LATER + timedelta(minutes=1)
    broker.job_billing.debit(CLUSTER, [], until=clock.now)
    assert read_up_to(broker) == LATER + timedelta(minutes=1)


def test_who_reads_only_a_part_says_nothing_of_the_rest(broker: Broker) -> None:
    broker.job_billing.debit(CLUSTER, [run(1)])
    assert (credits_of(broker), read_up_to(broker)) == (96, timedelta())


# What fails.


def test_a_job_that_cannot_be_charged_keeps_no_other_from_it(
    broker: Broker, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """More devices than any number in a database: no other is the worse for it."""
    runs = [run(number) for number in range(1, 8)]
    runs[3] = run(4, name="strange.py", gpus={"a100": 10**13})
    with caplog.at_level(logging.ERROR):
        assert broker.job_billing.debit(CLUSTER, runs, until=clock.now).jobs == 6
        for _ in range(2):
            assert broker.job_billing.debit(CLUSTER, runs, until=clock.now).jobs == 0
    assert credits_of(broker) == 100 - 6 * 4
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("Job 4 of anna on lab cannot be charged, all others are (")
    assert "gpuspawner audit" in said and "gpuspawner grant" in said
    assert [job.label for job in broker.job_billing.jobs_since("lab", T0)] == [
        "1",
        "2",
        "3",
        "5",
        "6",
        "7",
    ]
    assert broker.job_billing.debit(CLUSTER, [run(4)]).jobs == 1  # when it is mended


# What is written.


def test_a_round_without_news_writes_nothing(
    broker: Broker, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    going = [run(1), run(2, seconds=None, ran=3700), run(3, user="nobody"), run(4, gpus={})]
    broker.cluster_members.note_groups({"lab": ["anna"]})
    broker.job_billing.debit(CLUSTER, going, until=clock.now)
    begun = writes(broker, monkeypatch)
    for _ in range(5):
        clock.forward(minutes=1)
        broker.cluster_members.note_groups({"lab": ["anna"]})
        broker.job_billing.debit(CLUSTER, going, living={"2"}, until=clock.now)
    assert begun() == 0
    clock.forward(minutes=30)
    broker.job_billing.debit(CLUSTER, going, until=clock.now)
    assert begun() == 1, "how far it was read"
    broker.job_billing.debit(CLUSTER, [run(2, seconds=None, ran=7200)], until=clock.now)
    assert begun() == 1
    broker.cluster_members.note_groups({"lab": []})
    assert begun() == 1
