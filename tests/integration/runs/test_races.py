"""Submissions and stops at once. Real: threads, SQLite, PostgreSQL; devices simulated."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from threading import Barrier

import pytest

from gpuspawner.core.errors import TooManyRuns
from gpuspawner.leases.models import Lease, Request, Terms
from gpuspawner.runs.models import Run, Work
from gpuspawner.runs.rules import MOST_OPEN
from gpuspawner.services import Services
from tests.support.brokers import T0, acquire, open_services
from tests.support.parts import each_database

THREADS = 8
ROUNDS = 10


@pytest.fixture
def services(database_url: str) -> Iterator[Services]:
    services = open_services(database_url)
    services.monitoring.overview()
    yield services
    services.store.close()


def run_of(name: str, key: str = "") -> Run:
    return Run(id=name, user="ada", key=key, title="a", work=Work(command=("a",)), created_at=T0)


def asked_and_stopped(services: Services, pool: Executor, run: Run) -> str:
    """Ask for devices and stop the run at once. Return its lease's id; empty without one."""
    start = Barrier(2)

    def ask() -> str:
        start.wait(120)
        terms = Terms(wait=True, seconds=3600)
        got = services.queue.ask(run.server, Request(devices=1), engine="docker", terms=terms)
        return got.id if isinstance(got, Lease) else ""

    def stop() -> None:
        start.wait(120)
        services.runs.stop(run.id, actor="ada")

    asked, stopped = pool.submit(ask), pool.submit(stop)
    stopped.result(120)
    return asked.result(120)


@each_database
def test_one_key_submits_one_run(services: Services) -> None:
    start = Barrier(THREADS)

    def submit(number: int, turn: int) -> tuple[Run, bool]:
        start.wait(120)
        return services.runs.submit(run_of(f"run-{turn}-{number}", key=f"key-{turn}"))

    with ThreadPoolExecutor(THREADS) as pool:
        for turn in range(ROUNDS):
            found = list(pool.map(submit, range(THREADS), [turn] * THREADS))
            assert len({run.id for run, _ in found}) == 1
            assert [is_new for _, is_new in found].count(True) == 1
    assert len(services.runs.open_runs()) == ROUNDS


@each_database
def test_stop_and_grant_at_once_leave_no_run_behind(services: Services) -> None:
    """Whoever is first: a run that was stopped has ended, and neither waits nor goes on."""
    with ThreadPoolExecutor(2) as pool:
        for turn in range(4 * ROUNDS):
            run, _ = services.runs.submit(run_of(f"run-{turn}"))
            lease_id = asked_and_stopped(services, pool, run)
            followed = services.runs.get(run.id)
            if lease_id:
                lease = services.leases.get(lease_id)
                strays = services.runs.strays([lease])
                assert lease.outcome or strays == [lease], "the service ends it"
                services.leases.release(lease_id, reason="stopped")
            services.runs.settle()
            followed = services.runs.get(run.id)
            assert followed.run.outcome == "stopped"
    assert services.leases.open_leases() == [] and services.queue.waiting() == []


@each_database
def test_stop_and_wait_at_once_leave_no_ticket_behind(services: Services) -> None:
    acquire(services, "owner", 4)
    with ThreadPoolExecutor(2) as pool:
        for turn in range(4 * ROUNDS):
            run, _ = services.runs.submit(run_of(f"run-{turn}"))
            assert asked_and_stopped(services, pool, run) == ""
            if services.queue.waiting():
                assert services.runs.are_active()
            services.runs.settle()
            assert services.queue.waiting() == []
            assert services.runs.get(run.id).run.outcome == "stopped"
    assert not services.runs.are_active()


def test_member_may_have_so_many_open_runs(services: Services) -> None:
    for number in range(MOST_OPEN):
        services.runs.submit(run_of(f"run-{number}", key=f"key-{number}"))
    with pytest.raises(TooManyRuns, match="You already have 100 runs"):
        services.runs.submit(run_of("one-more"))
    again, is_new = services.runs.submit(run_of("again", key="key-7"))
    assert (again.id, is_new) == ("run-7", False), "who repeats a submission gets its run"
    services.runs.refuse("run-0", "it could not start")
    services.runs.submit(run_of("one-more"))
