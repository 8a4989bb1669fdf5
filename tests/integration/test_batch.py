"""Jobs beside servers are paid once, by whom it concerns.

Real: SQLite, PostgreSQL, processes, SIGKILL, the broker. Not real: what sacct says, which is
written here; tests/slurm has the real one.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from gpuspawner.core.units import MICRO
from gpuspawner.ledger.usage import cost_of_job
from gpuspawner.queue import repository as queue_repository
from gpuspawner.services import Broker
from tests.support import racers
from tests.support.batch_jobs import (
    A100,
    CLUSTER,
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
from tests.support.processes import wait_for
from tests.support.tier import Rounds


@pytest.fixture
def database_url(each_database_url: str) -> str:
    """The queries, locks and constraints here are each database's own."""
    return each_database_url


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    with a_day_later(database_url) as broker:
        yield broker


def lines(broker: Broker, account: str = "member:anna") -> list[str]:
    found = broker.ledger.statement(account, limit=100_000)
    return [line.reason for line in found if line.kind == "batch"]


# Debits.


def test_a_job_is_paid_once_at_the_rate_of_its_devices(broker: Broker) -> None:
    runs = [run(7, seconds=5400, gpus={"a100": 2})]
    assert broker.job_billing.debit(CLUSTER, runs).amount == 12 * MICRO
    assert broker.job_billing.debit(CLUSTER, runs).amount == 0
    assert credits_of(broker) == 88
    assert lines(broker) == [f"Batch job 7 (train.py) on 2 {A100}: 1 h 30 min"]


def test_what_a_job_pays(broker: Broker) -> None:
    cases: list[tuple[dict[str, Any], float]] = [
        ({"gpus": {"h100": 1}, "nodes": ("m2",)}, 10),
        ({"gpus": {"a100": 1, "h100": 1}, "nodes": ("m1", "m2")}, 14),
        ({"gpus": {}, "shards": {"": 3}}, 3),  # three quarters of an A100
        ({"gpus": {}}, 0),
        ({"seconds": 1}, cost_of_job(4 * MICRO, 1) / MICRO),
        ({"seconds": 0}, 0),
    ]
    for number, (cells, paid) in enumerate(cases, start=1):
        assert broker.job_billing.debit(CLUSTER, [run(number, **cells)]).amount == round(
            paid * MICRO
        ), cells


def test_one_that_goes_on_is_paid_by_the_hour_and_to_the_second_at_its_end(broker: Broker) -> None:
    for minutes, paid in ((59, 0), (60, 4), (61, 4), (119, 4), (125, 8)):
        broker.job_billing.debit(CLUSTER, [run(1, seconds=None, ran=minutes * 60)])
        assert credits_of(broker) == 100 - paid
    end = [run(1, seconds=2 * 3600 + 900)]
    for _ in range(2):
        broker.job_billing.debit(CLUSTER, end)
        assert credits_of(broker) == 91
    # Slurm found out later that it had ended before.
    broker.job_billing.debit(CLUSTER, [run(1, seconds=3600)])
    assert credits_of(broker) == 96
    assert lines(broker) == [
        "Charged too much for batch job 1 (train.py): it ran 1 h",
        f"Batch job 1 (train.py) on 1 {A100}: 2 h 15 min in all",
        f"Batch job 1 (train.py) on 1 {A100}: the first 2 h",
        f"Batch job 1 (train.py) on 1 {A100}: the first 1 h",
    ]


def test_a_price_that_changes_meanwhile_is_for_others(broker: Broker) -> None:
    broker.job_billing.debit(CLUSTER, [run(1, seconds=None, ran=60)])
    broker.prices.set_rate("40", model="A100", actor="admin")
    begins = T0 + LATER + timedelta(minutes=1)
    broker.job_billing.debit(CLUSTER, [run(1, seconds=3600), run(2, begins, 3600)])
    assert credits_of(broker) == 100 - 4 - 40


def test_what_the_controller_lost_is_not_paid_on_and_on(broker: Broker) -> None:
    going = [run(1, seconds=None, ran=3600), run(2, seconds=None, ran=3600)]
    broker.job_billing.debit(CLUSTER, going, living={"1"})
    assert credits_of(broker) == 96


def test_a_number_that_comes_again_is_another_job(broker: Broker) -> None:
    broker.job_billing.debit(CLUSTER, [run(1), run(1, T0 + timedelta(hours=3))])
    assert credits_of(broker) == 92


def test_what_began_before_the_first_look_is_not_ours(broker: Broker) -> None:
    broker.job_billing.debit(CLUSTER, [run(1, T0 - timedelta(seconds=1))])
    assert credits_of(broker) == 100


def test_somebody_unknown_pays_nothing_and_is_named(broker: Broker) -> None:
    runs = [run(1, user="bert"), run(2, user="u-_zz")]
    assert broker.job_billing.debit(CLUSTER, runs).unknown == ("bert", "u-_zz")
    broker.ledger.open_account("bert")  # for what comes, not for what was
    assert broker.job_billing.debit(CLUSTER, runs) == broker.job_billing.debit(CLUSTER, [])
    assert credits_of(broker, "bert") == 100
    assert {job.user for job in broker.job_billing.jobs_since("lab", T0) if not job.member} == {
        "bert",
        "u-_zz",
    }


def test_a_member_whose_name_linux_does_not_take_pays_too(broker: Broker) -> None:
    broker.ledger.open_account("Ann Lee")
    broker.job_billing.debit(CLUSTER, [run(1, user="u-_41nn_20_4cee")])
    assert credits_of(broker, "Ann Lee") == 96


def test_the_group_pays_that_usually_does(broker: Broker) -> None:
    open_group(broker, "lab")
    broker.ledger.grant("group:lab", 50 * MICRO, actor="admin", reason="start")
    broker.ledger.keep_payer("anna", "group:lab", actor="anna", groups=["lab"])
    broker.cluster_members.note_groups({"lab": ["anna"]})
    broker.job_billing.debit(CLUSTER, [run(1)])
    assert broker.ledger.account("group:lab").balance == 46 * MICRO
    broker.cluster_members.note_groups({"lab": []})
    broker.job_billing.debit(CLUSTER, [run(2)])
    assert broker.ledger.account("group:lab").balance == 46 * MICRO
    assert credits_of(broker) == 96


def test_any_name_can_stand_on_a_statement(broker: Broker) -> None:
    broker.job_billing.debit(CLUSTER, [run(1, name="a\nb\x1b[31m" + "x" * 200)])
    assert lines(broker)[0].startswith("Batch job 1 (a?b?[31mxxx")
    assert len(lines(broker)[0]) < 200


def test_late_news_of_a_job_spends_the_credits_that_were_there_then(broker: Broker) -> None:
    ends = T0 + LATER + timedelta(hours=1)
    broker.ledger.grant("member:anna", 10 * MICRO, actor="admin", reason="week", until=ends)
    Clock.of(broker).forward(hours=2)
    broker.ledger.end_lots()
    assert credits_of(broker) == 100
    begins = T0 + LATER + timedelta(seconds=60)
    broker.job_billing.debit(CLUSTER, [run(1, begins, 1800)])
    assert credits_of(broker) == 100  # the two credits came out of those that ended


# Which jobs are servers'.


def test_what_a_server_runs_on_is_no_job_beside_it(broker: Broker) -> None:
    wait_in_line(broker, "aa")
    broker.job_billing.debit(CLUSTER, [run(1, name="gpuspawner-aa", seconds=None, ran=7200)])
    assert credits_of(broker) == 100


def test_a_name_alone_makes_no_job_free(broker: Broker) -> None:
    ticket = wait_in_line(broker, "aa")
    with broker.store.write() as connection:
        queue_repository.end_ticket(connection, ticket.id, T0 + timedelta(minutes=1), "granted", "")
    late = T0 + timedelta(hours=5)
    broker.job_billing.debit(
        CLUSTER,
        [
            run(1, name="gpuspawner-aa"),  # the true one
            run(2, name="gpuspawner-aa"),  # a second one by its name
            run(3, name="gpuspawner-bb"),  # of no ticket
        ],
    )
    assert credits_of(broker) == 92
    broker.job_billing.debit(CLUSTER, [run(4, late, name="gpuspawner-aa")])  # long after
    assert credits_of(broker) == 88


def test_what_was_once_paid_is_paid_when_its_namesakes_are_forgotten(broker: Broker) -> None:
    """A second job by a server's name goes on for days, and nothing is read of the first one."""
    ticket = wait_in_line(broker, "aa")
    with broker.store.write() as connection:
        queue_repository.end_ticket(connection, ticket.id, T0 + timedelta(hours=1), "granted", "")
    true = run(1, name="gpuspawner-aa")
    forged = {"begins": T0 + timedelta(minutes=5), "name": "gpuspawner-aa"}
    broker.job_billing.debit(CLUSTER, [true, run(2, seconds=None, ran=600, **forged)])
    assert credits_of(broker) == 100
    broker.job_billing.debit(CLUSTER, [run(2, seconds=None, ran=5 * 3600, **forged)])
    assert credits_of(broker) == 80
    broker.job_billing.debit(CLUSTER, [run(2, seconds=9 * 3600, **forged)])
    assert credits_of(broker) == 64


# Killed, doubled, at the same time.


def paid_exactly(broker: Broker) -> None:
    owed = sum(cost_of_job(4 * MICRO, job.seconds) for job in many(HOURS))
    assert broker.ledger.account("member:anna").balance == 100 * MICRO - owed


def test_two_services_at_once_charge_once(broker: Broker, database_url: str) -> None:
    amounts = racers.together(*[(debit_together, database_url)] * 3)
    paid_exactly(broker)
    assert sum(amounts) == 100 * MICRO - broker.ledger.account("member:anna").balance


def test_killed_anywhere_every_job_is_paid_once(
    broker: Broker, database_url: str, rounds: Rounds, chance: random.Random
) -> None:
    for _ in range(rounds(60)):
        ready, theirs = racers.FORKSERVER.Pipe()
        victim = racers.FORKSERVER.Process(
            target=debit_until_killed, args=(theirs, database_url), daemon=True
        )
        victim.start()
        assert ready.poll(60) and ready.recv() == "working"
        before, more = len(lines(broker)), chance.randrange(3)
        wait_for(lambda more=before + more: len(lines(broker)) >= more, "work", interval=0.002)
        time.sleep(chance.uniform(0, 0.02))
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        wait_for(lambda victim=victim: not victim.is_alive(), "its end")
        assert problems(broker.store) == []
    assert lines(broker), "there was work that could break"
    broker.job_billing.debit(CLUSTER, many(HOURS))
    paid_exactly(broker)
