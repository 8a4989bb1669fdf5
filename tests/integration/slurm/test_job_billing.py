"""Batch jobs are paid once, by whom it concerns; how far they were read, what waits, what
fails.

Real: SQLite, PostgreSQL, processes, SIGKILL, the services. Not real: what sacct says, which is
written here; tests/slurm has the real one.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from gpuspawner.core.units import MICRO
from gpuspawner.ledger.usage import cost_of_job
from gpuspawner.queue import repository as queue_repository
from gpuspawner.services import Services
from gpuspawner.slurm.job_billing import SETTLED, BillingResult
from gpuspawner.slurm.jobs import JobRun
from gpuspawner.slurm.repository import BatchJob
from tests.support import racers
from tests.support.batch_jobs import (
    A100,
    CLUSTER,
    H100,
    HOURS,
    LATER,
    a_day_later,
    debit_together,
    debit_until_killed,
    many,
    open_group,
    run,
    wait_in_line,
)
from tests.support.brokers import T0, Clock, credits_of, problems
from tests.support.parts import each_database
from tests.support.processes import wait_for
from tests.support.tier import Rounds


@pytest.fixture
def services(database_url: str) -> Iterator[Services]:
    with a_day_later(database_url) as services:
        yield services


def debit(services: Services, runs: list[JobRun], **more: Any) -> BillingResult:
    return services.job_billing.debit(CLUSTER, runs, **more)


def jobs_of(services: Services) -> list[BatchJob]:
    return services.job_billing.jobs_since("lab", T0)


def lines(services: Services) -> list[str]:
    found = services.ledger.statement("member:anna", limit=100_000)
    return [line.reason for line in found if line.kind == "batch"]


# Debits.


def test_job_is_charged_once_at_its_device_rate(services: Services) -> None:
    runs = [run(7, seconds=5400, gpus={"a100": 2})]
    assert debit(services, runs).amount == 12 * MICRO
    assert debit(services, runs).amount == 0
    assert credits_of(services) == 88
    assert lines(services) == [f"Batch job 7 (train.py) on 2 {A100}: 1 h 30 min"]


@pytest.mark.parametrize(
    ("cells", "paid"),
    [
        ({"gpus": {"h100": 1}, "nodes": ("m2",)}, 10),
        ({"gpus": {"a100": 1, "h100": 1}, "nodes": ("m1", "m2")}, 14),
        ({"gpus": {}, "shards": {"": 3}}, 3),  # three quarters of an A100
        ({"gpus": {}}, 0),
        ({"seconds": 1}, cost_of_job(4 * MICRO, 1) / MICRO),
        ({"seconds": 0}, 0),
        ({"begins": T0 - timedelta(seconds=1)}, 0),  # before the first look: not ours
        ({"user": "u-_41nn_20_4cee"}, 4),  # Ann Lee, whose name Linux does not take
    ],
    ids=str,
)
def test_job_charge_follows_devices_time_and_rate(
    services: Services, cells: dict[str, Any], paid: float
) -> None:
    services.ledger.open_account("Ann Lee")
    assert debit(services, [run(1, **cells)]).amount == round(paid * MICRO)
    again = run(1, T0 + timedelta(hours=3))  # the same number, and another job
    assert debit(services, [again]).amount == 4 * MICRO
    services.prices.set_rate("40", model="A100", actor="admin")
    later = run(2, T0 + LATER + timedelta(minutes=1))
    assert debit(services, [again, later]).amount == 40 * MICRO


def test_running_job_is_charged_hourly_and_exactly_at_end(services: Services) -> None:
    for minutes, paid in ((59, 0), (60, 4), (61, 4), (119, 4), (125, 8)):
        debit(services, [run(1, seconds=None, ran=minutes * 60)])
        assert credits_of(services) == 100 - paid
    end = [run(1, seconds=2 * 3600 + 900)]
    for _ in range(2):
        debit(services, end)
        assert credits_of(services) == 91
    # Slurm found out later that it had ended before.
    debit(services, [run(1, seconds=3600)])
    assert credits_of(services) == 96
    assert lines(services) == [
        "Charged too much for batch job 1 (train.py): it ran 1 h",
        f"Batch job 1 (train.py) on 1 {A100}: 2 h 15 min in all",
        f"Batch job 1 (train.py) on 1 {A100}: the first 2 h",
        f"Batch job 1 (train.py) on 1 {A100}: the first 1 h",
    ]


def test_job_lost_by_the_controller_is_not_charged(services: Services) -> None:
    going = [run(1, seconds=None, ran=3600), run(2, seconds=None, ran=3600)]
    debit(services, going, living={"1"})
    assert credits_of(services) == 96


def test_unknown_user_is_reported_and_not_charged(
    services: Services, caplog: pytest.LogCaptureFixture
) -> None:
    runs = [run(1, user="bert"), run(2, user="u-_zz")]
    debit(services, runs)
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(" on ")[0] for text in said] == ["Job 1 of bert", "Job 2 of u-_zz"]
    services.ledger.open_account("bert")  # for what comes, not for what was
    assert debit(services, runs) == debit(services, [])
    assert credits_of(services, "bert") == 100
    assert {job.user for job in jobs_of(services) if not job.member} == {"bert", "u-_zz"}


def test_default_group_account_pays_only_for_its_members(services: Services) -> None:
    open_group(services, "lab")
    services.ledger.grant("group:lab", 50 * MICRO, actor="admin", reason="start")
    services.ledger.keep_payer("anna", "group:lab", actor="anna", groups=["lab"])
    services.cluster_members.note_groups({"lab": ["anna"]})
    debit(services, [run(1)])
    assert services.ledger.account("group:lab").balance == 46 * MICRO
    services.cluster_members.note_groups({"lab": []})
    debit(services, [run(2)])
    assert services.ledger.account("group:lab").balance == 46 * MICRO
    assert credits_of(services) == 96


def test_job_name_is_sanitized_on_the_statement(services: Services) -> None:
    debit(services, [run(1, name="a\nb\x1b[31m" + "x" * 200)])
    assert lines(services)[0].startswith("Batch job 1 (a?b?[31mxxx")
    assert len(lines(services)[0]) < 200


def test_late_job_uses_credits_valid_at_its_time(services: Services) -> None:
    ends = T0 + LATER + timedelta(hours=1)
    services.ledger.grant("member:anna", 10 * MICRO, actor="admin", reason="week", until=ends)
    Clock.of(services).forward(hours=2)
    services.ledger.end_lots()
    assert credits_of(services) == 100
    begins = T0 + LATER + timedelta(seconds=60)
    debit(services, [run(1, begins, 1800)])
    assert credits_of(services) == 100  # the two credits came out of those that ended


# Which jobs are servers'.


def granted_ticket(services: Services, name: str, minutes: int) -> None:
    """A ticket since T0 that was granted so much later."""
    wait_in_line(services, name)
    with services.store.write() as connection:
        at = T0 + timedelta(minutes=minutes)
        queue_repository.end_ticket(connection, name, at, "granted", "")


def test_only_the_genuine_server_job_is_free_of_charge(services: Services) -> None:
    wait_in_line(services, "cc")
    debit(services, [run(9, name="gpuspawner-cc", seconds=None, ran=7200)])
    assert credits_of(services) == 100
    granted_ticket(services, "aa", minutes=1)
    late = T0 + timedelta(hours=5)
    true, second = (run(number, name="gpuspawner-aa") for number in (1, 2))
    of_no_ticket = run(3, name="gpuspawner-bb")
    debit(services, [true, second, of_no_ticket])
    assert credits_of(services) == 92
    debit(services, [run(4, late, name="gpuspawner-aa")])  # long after
    assert credits_of(services) == 88


def test_forged_server_job_is_charged_when_listed_alone(services: Services) -> None:
    """A second job by a server's name goes on for days, and nothing is read of the first one."""
    granted_ticket(services, "aa", minutes=60)
    true = run(1, name="gpuspawner-aa")
    forged = {"begins": T0 + timedelta(minutes=5), "name": "gpuspawner-aa"}
    debit(services, [true, run(2, seconds=None, ran=600, **forged)])
    assert credits_of(services) == 100
    debit(services, [run(2, seconds=None, ran=5 * 3600, **forged)])
    assert credits_of(services) == 80
    debit(services, [run(2, seconds=9 * 3600, **forged)])
    assert credits_of(services) == 64


# Killed, doubled, at the same time.


def balance(services: Services) -> int:
    return services.ledger.account("member:anna").balance


def left() -> int:
    """What all of the jobs leave."""
    return 100 * MICRO - sum(cost_of_job(4 * MICRO, job.seconds) for job in many(HOURS))


@each_database
def test_concurrent_services_charge_each_job_once(services: Services, database_url: str) -> None:
    amounts = racers.together(*[(debit_together, database_url)] * 3)
    assert balance(services) == left() == 100 * MICRO - sum(amounts)


@each_database
def test_job_is_charged_once_whenever_the_service_is_killed(
    services: Services, database_url: str, rounds: Rounds, chance: random.Random
) -> None:
    for _ in range(rounds(60)):
        victim = racers.Victim(debit_until_killed, database_url)
        victim.wait_round()
        before, more = len(lines(services)), chance.randrange(3)

        def has_worked(more: int = before + more) -> bool:
            return len(lines(services)) >= more or balance(services) == left()  # or all is done

        wait_for(has_worked, "work", interval=0.002)
        time.sleep(chance.uniform(0, 0.02))
        victim.kill()
        assert problems(services.store) == []
    assert lines(services), "there was work that could break"
    debit(services, many(HOURS))
    assert balance(services) == left()


@pytest.fixture
def clock(services: Services) -> Clock:
    return Clock.of(services)


def read_up_to(services: Services) -> timedelta:
    """Up to when jobs were read, since T0."""
    return services.job_billing.marks(CLUSTER.name, services.clock()).until - T0


def writes(services: Services, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many transactions that write have begun since it was asked last."""
    count, real = [0], services.store.write

    def counted() -> Any:
        count[0] += 1
        return real()

    def since() -> int:
        found, count[0] = count[0], 0
        return found

    monkeypatch.setattr(services.store, "write", counted)
    return since


# What is known only later.


def test_charge_waits_until_the_device_model_is_known(services: Services, clock: Clock) -> None:
    half = {"gpus": {"": 1}, "nodes": ("m1", "m2")}
    for _ in range(2):
        assert debit(services, [run(1, **half)], until=clock.now).jobs == 0
    assert jobs_of(services) == []
    assert read_up_to(services) == timedelta(hours=1), "it is read again from its end on"
    debit(services, [run(1, gpus={"h100": 1}, nodes=("m2",))], until=clock.now)
    assert credits_of(services) == 90
    assert [job.devices for job in jobs_of(services)] == [f"1 {H100}"]
    assert read_up_to(services) == LATER


def test_unknown_device_model_is_charged_at_the_lowest_rate(
    services: Services, clock: Clock
) -> None:
    lost = [
        run(1, gpus={"": 1}, nodes=("gone",)),
        run(2, seconds=None, ran=7200, gpus={"": 1}, nodes=()),
    ]
    debit(services, lost, until=clock.now)
    clock.now += SETTLED - timedelta(seconds=1)
    debit(services, lost, until=clock.now)
    assert credits_of(services) == 100
    clock.forward(seconds=1)
    debit(services, lost, until=clock.now)
    assert credits_of(services) == 100 - 4 - 8
    assert read_up_to(services) == LATER + SETTLED
    assert {job.devices for job in jobs_of(services)} == {f"1 {A100} or {H100}"}


def test_devices_reported_after_the_job_end_are_charged(services: Services, clock: Clock) -> None:
    nothing = {"gpus": {}, "told": False}
    debit(services, [run(1, **nothing), run(2, seconds=0, **nothing)], until=clock.now)
    assert read_up_to(services) == timedelta(hours=1)
    debit(services, [run(1)], until=clock.now)
    assert (credits_of(services), read_up_to(services)) == (96, LATER)


# How far it was read.


def test_read_position_from_a_fast_clock_is_reset(services: Services, clock: Clock) -> None:
    debit(services, [], until=clock.now)
    clock.forward(days=2)
    debit(services, [], until=clock.now)
    assert read_up_to(services) == LATER + timedelta(days=2)
    clock.now = T0 + LATER + timedelta(minutes=1)
    debit(services, [], until=clock.now)
    assert read_up_to(services) == LATER + timedelta(minutes=1)


def test_partial_read_does_not_move_the_read_position(services: Services) -> None:
    debit(services, [run(1)])
    assert (credits_of(services), read_up_to(services)) == (96, timedelta())


# What fails.


def test_unchargeable_job_does_not_block_other_jobs(
    services: Services, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """More devices than any number in a database: no other is the worse for it."""
    runs = [run(number) for number in range(1, 8)]
    runs[3] = run(4, name="strange.py", gpus={"a100": 10**13})
    with caplog.at_level(logging.ERROR):
        assert debit(services, runs, until=clock.now).jobs == 6
        for _ in range(2):
            assert debit(services, runs, until=clock.now).jobs == 0
    assert credits_of(services) == 100 - 6 * 4
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("Job 4 of anna on lab cannot be charged (")
    assert "gpuspawner audit" in said and "gpuspawner grant" in said
    assert [job.label for job in jobs_of(services)] == ["1", "2", "3", "5", "6", "7"]
    assert debit(services, [run(4)]).jobs == 1  # when it is mended


# What is written.


def test_billing_round_without_news_writes_nothing(
    services: Services, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    going = [run(1), run(2, seconds=None, ran=3700), run(3, user="nobody"), run(4, gpus={})]
    services.cluster_members.note_groups({"lab": ["anna"]})
    debit(services, going, until=clock.now)
    begun = writes(services, monkeypatch)
    for _ in range(5):
        clock.forward(minutes=1)
        services.cluster_members.note_groups({"lab": ["anna"]})
        debit(services, going, living={"2"}, until=clock.now)
    assert begun() == 0
    clock.forward(minutes=30)
    debit(services, going, until=clock.now)
    assert begun() == 1, "how far it was read"
    debit(services, [run(2, seconds=None, ran=7200)], until=clock.now)
    assert begun() == 1
    services.cluster_members.note_groups({"lab": []})
    assert begun() == 1
