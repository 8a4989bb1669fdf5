"""What batch jobs used, in reports. Real: both databases, services whose clock the test
sets. Not real: what sacct says."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import timedelta
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest

from gpuspawner.core.units import MICRO, DeviceCount
from gpuspawner.ledger.usage import Kind, LeaseUse, counted_jobs, job_in_words
from gpuspawner.monitoring.repository import BATCH
from gpuspawner.services import Services
from gpuspawner.slurm.jobs import JobRun
from tests.support.batch_jobs import A100, CLUSTER, H100, open_books, open_group, run
from tests.support.brokers import T0, Clock, problems
from tests.support.parts import each_database

HOUR = timedelta(hours=1)
BOUNDS = {
    "hours": [T0 + n * HOUR for n in range(-2, 60)],
    "no whole seconds": [T0 + n * timedelta(hours=7, microseconds=333_333) for n in range(9)],
    "all": [T0, T0 + timedelta(days=30)],
    "a minute": [T0 + 5 * HOUR, T0 + 5 * HOUR + timedelta(minutes=1)],
}
KINDS: list[tuple[dict[str, Any], DeviceCount, str, int]] = [
    ({"gpus": {"a100": 2}}, 2, A100, 8),
    ({"gpus": {"h100": 1}, "nodes": ("m2",)}, 1, H100, 10),
    ({"gpus": {"a100": 1, "h100": 1}, "nodes": ("m1", "m2")}, 2, "several models", 14),
    ({"gpus": {}, "shards": {"": 3}}, Fraction(3, 4), A100, 3),
]
"""What some jobs have: cells, how many devices, of which model, credits an hour."""


@pytest.fixture
def services(database_url: str) -> Iterator[Services]:
    services = open_books(database_url, Clock())
    for user in ("anna", "bert"):
        services.ledger.open_account(user)
    open_group(services, "lab")
    services.ledger.keep_payer("bert", "group:lab", actor="bert", groups=["lab"])
    services.cluster_members.note_groups({"lab": ["bert"]})
    yield services
    assert problems(services.store) == []
    services.store.close()


def some_jobs() -> list[tuple[JobRun, DeviceCount, str, int]]:
    """Of two members and of somebody who is none; some go on."""
    chance = random.Random(11)
    found = []
    for number in range(1, 60):
        cells, count, model, rate = chance.choice(KINDS)
        begins = T0 + timedelta(seconds=chance.randrange(40 * 3600))
        user = chance.choice(["anna", "bert", "eve"])
        lasts = chance.randrange(9 * 3600)
        going = {"seconds": None, "ran": lasts} if chance.random() < 0.2 else {"seconds": lasts}
        made = run(number, begins, user=user, **going, **cells)
        found.append((made, count, model, rate if user != "eve" else 0))
    return found


def by_hand(
    some: list[tuple[JobRun, DeviceCount, str, int]], bounds: list[Any], by: str
) -> list[Any]:
    """Second by second would be the same: each job is cut at the bounds."""
    found = []
    for start, end in pairwise(bounds):
        sums: dict[str, LeaseUse] = {}
        for job, count, model, rate in some:
            assert job.started_at is not None
            seconds = job.seconds if job.ended_at else job.seconds // 3600 * 3600
            if job.ended_at is None and not (seconds and rate):
                seconds = 0  # nothing was charged yet
            until = job.started_at + timedelta(seconds=seconds)
            since, to = max(start, job.started_at), min(end, until)
            cost = micros = 0
            if to > since:
                paid = [
                    rate * MICRO * ((at - job.started_at) // timedelta(seconds=1)) // 3600
                    for at in (since, to)
                ]
                cost = paid[1] - paid[0]
                used = [
                    int(count * ((at - job.started_at) // timedelta(microseconds=1)))
                    for at in (since, to)
                ]
                micros = used[1] - used[0]
            part = LeaseUse(micros, cost, int(start <= job.started_at < end))
            account = {"anna": "member:anna", "bert": "group:lab"}.get(job.user, "")
            member = "" if job.user == "eve" else job.user
            kind = Kind(member, "lab" if job.user == "bert" else "", account, BATCH, model)
            if any(part):
                name = getattr(kind, by)
                sums[name] = sums.get(name, LeaseUse()).plus(part)
        found.append(sums)
    return found


@each_database
def test_job_usage_report_equals_the_sum_of_jobs(services: Services) -> None:
    some = some_jobs()
    Clock.of(services).forward(days=3)
    services.job_billing.debit(CLUSTER, [job for job, *_ in some])
    for bounds in BOUNDS.values():
        for by in Kind._fields:
            assert services.reports.use_of_jobs(bounds, by) == by_hand(some, bounds, by)
    everything = services.reports.use_of_jobs(BOUNDS["all"], "account")[0]
    for account in ("member:anna", "group:lab"):
        lines = [x for x in services.ledger.statement(account, 1000) if x.kind == "batch"]
        assert everything[account].cost == -sum(line.amount for line in lines)
        (whole,) = services.reports.use_of_account(account, BOUNDS["all"])
        assert whole == LeaseUse(*everything[account][:2], 0), "jobs are no sessions"


def test_job_device_text_round_trips() -> None:
    cases: list[tuple[list[tuple[int, int, list[str]]], tuple[DeviceCount, str]]] = [
        ([(2, 1, ["NVIDIA A100"])], (2, "NVIDIA A100")),
        ([(3, 4, ["Tesla T4"])], (Fraction(3, 4), "Tesla T4")),
        ([(1, 1, [])], (1, "")),
        ([(3, 4, [])], (Fraction(3, 4), "")),
        ([(1, 1, ["A", "B 2"])], (1, "A or B 2")),
        ([(2, 1, ["A"]), (1, 1, ["B"])], (3, "several models")),
        ([(2, 1, ["A"]), (1, 4, ["A"])], (Fraction(9, 4), "A")),
        ([], (0, "")),
    ]
    for parts, found in cases:
        assert counted_jobs(job_in_words(parts)) == found
