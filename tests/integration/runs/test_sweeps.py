"""Sweeps: submitted at once, begun a few at a time. Real: services, threads, SQLite, PostgreSQL.
Simulated: devices."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random
from threading import Barrier

import pytest
import sqlalchemy as sa

from gpuspawner.core.errors import (
    GPUSpawnerError,
    InvalidRequest,
    SweepTooLarge,
    TooManyRuns,
    UnknownSweep,
)
from gpuspawner.core.units import MICRO
from gpuspawner.db.schema import OPEN_LEASE, OPEN_RUN, OPEN_TICKET, leases, runs, tickets
from gpuspawner.leases.models import RUN_PREFIX, Lease, Request, ServerRef, Terms
from gpuspawner.queue.models import Ticket
from gpuspawner.runs.models import Run, Work
from gpuspawner.runs.rules import MOST_OPEN
from gpuspawner.runs.sweep_views import most_of
from gpuspawner.runs.sweeps import SweepRequest, filled_in
from gpuspawner.services import Services
from tests.support.brokers import T0, open_services
from tests.support.parts import each_database
from tests.support.tier import SEED

MOST = 3
RUNS = 24
TERMS = Terms(wait=True, seconds=3600)


@pytest.fixture
def services(database_url: str) -> Iterator[Services]:
    services = open_services(database_url)
    services.monitoring.overview()
    yield services
    services.store.close()


def sweep_of(count: int, token: str = "1", at_most: int | None = MOST, key: str = "") -> list[Run]:
    works = [(f"train lr={n}", Work(command=("train", str(n)))) for n in range(count)]
    asked = SweepRequest(title="Train", works=works, options={}, key=key, at_most=at_most)
    return asked.runs("ada", token, T0)


def admitted(services: Services) -> list[str]:
    return [x.run.id for x in services.runs.open_runs() if x.is_to_be_started]


def ask(services: Services, run_id: str) -> Lease | Ticket:
    """Ask for two of the four GPUs, as the hub does for a run that is to begin."""
    server = ServerRef.of_run("ada", run_id)
    got = services.queue.ask(server, Request(devices=2), engine="docker", terms=TERMS)
    if isinstance(got, Ticket) and services.queue.turns(frozenset({got.id})):
        return services.queue.start_ticket(got.id)
    return got


def begun(connection: sa.Connection) -> list[str]:
    """The runs that have not ended, and hold a lease or a ticket."""
    name = RUN_PREFIX + runs.c.id
    lease = sa.exists().where(OPEN_LEASE, leases.c.server_name == name)
    ticket = sa.exists().where(OPEN_TICKET, tickets.c.server_name == name)
    return list(connection.scalars(sa.select(runs.c.id).where(OPEN_RUN, lease | ticket)))


def test_only_so_many_begin_and_the_oldest_come_first(services: Services) -> None:
    saved, is_new = services.runs.submit_all(sweep_of(5, at_most=2))
    assert is_new and [run.id for run in saved] == [f"train-1-{n:03}" for n in range(1, 6)]
    services.runs.admit()
    assert admitted(services) == ["train-1-001", "train-1-002"]
    services.runs.refuse("train-1-002", "it could not start")
    assert admitted(services) == ["train-1-001"]
    for _ in range(2):
        services.runs.admit()
    assert admitted(services) == ["train-1-001", "train-1-003"]
    found = services.runs.sweep("train-1")
    assert found.states == {"waiting": 4, "failed": 1} and found.charged == 0
    services.runs.submit_all(sweep_of(3, "2", at_most=None))
    assert len(admitted(services)) == 5, "another sweep has room of its own"


def test_interrupted_run_keeps_its_place(services: Services) -> None:
    services.runs.submit_all(sweep_of(2, at_most=1))
    lease = ask(services, "train-1-001")
    assert isinstance(lease, Lease)
    services.leases.release(lease.id, reason="the server was gone", lost=True)
    assert services.runs.settle() == []
    services.runs.admit()
    assert admitted(services) == ["train-1-001"]


def test_sweep_is_submitted_once_all_or_none(services: Services) -> None:
    first, _ = services.runs.submit_all(sweep_of(3, "1", key="k"))
    again, is_new = services.runs.submit_all(sweep_of(3, "2", key="k"))
    assert ([run.id for run in again], is_new) == ([run.id for run in first], False)
    with pytest.raises(SweepTooLarge, match="has 98 runs, and 3 of yours wait or run"):
        services.runs.submit_all(sweep_of(MOST_OPEN - 2, "3"))
    with pytest.raises(SweepTooLarge):
        services.runs.require_room("ada", MOST_OPEN - 2)
    services.runs.require_room("bob", MOST_OPEN)
    with pytest.raises(UnknownSweep):
        services.runs.sweep("train-3")
    assert len(services.runs.open_runs()) == 3
    services.runs.submit_all(sweep_of(MOST_OPEN - 3, "4"))
    with pytest.raises(TooManyRuns):
        services.runs.submit(Run(id="x", user="ada", title="", work=Work(), created_at=T0))


def test_end_of_a_sweep_is_told_once(services: Services) -> None:
    services.runs.submit_all(sweep_of(3))
    for number in (1, 3, 2):
        assert services.notifications.notices_of("ada") == []
        services.runs.refuse(f"train-1-{number:03}", "It could not start.")
    (notice,) = services.notifications.notices_of("ada")
    assert notice.title == "Your sweep train-1 has ended"
    assert notice.body.startswith("Of its 3 runs, 0 are done, 3 failed and 0 were stopped.")


def test_price_of_a_sweep_is_what_it_was_charged_and_what_may_come(database_url: str) -> None:
    services = open_services(database_url, gpu_rates={"*": 60})
    services.monitoring.overview()
    services.runs.submit_all(sweep_of(5, at_most=2))

    def most() -> int | None:
        return most_of(services, services.runs.sweep("train-1"))

    assert most() is None, "the service does not know yet what it asks for"
    lease = ask(services, "train-1-001")
    assert isinstance(lease, Lease) and lease.rate == 120 * MICRO
    assert most() == 5 * 120 * MICRO, "each takes two GPUs for an hour"
    services.runs.refuse("train-1-002", "It could not start.")
    assert most() == 4 * 120 * MICRO
    services.leases.release(lease.id, reason="stopped")
    services.runs.stop_sweep("train-1", actor="ada")
    assert most() == services.runs.sweep("train-1").charged
    services.store.close()


def test_stop_ends_every_run(services: Services) -> None:
    services.runs.submit_all(sweep_of(5))
    lease = ask(services, "train-1-001")
    assert isinstance(lease, Lease)
    found = services.runs.stop_sweep("train-1", actor="ada")
    assert found.states == {"starting": 1, "stopped": 4}
    services.leases.release(lease.id, reason="stopped")
    services.runs.settle()
    assert services.runs.sweep("train-1").states == {"stopped": 5}
    assert not services.runs.are_active()


def test_run_that_has_ended_ends_though_it_was_asked_for_again(services: Services) -> None:
    """As by two launchers, of which one still takes it for one that is to begin."""
    services.runs.submit_all(sweep_of(3))
    lease = ask(services, "train-1-001")
    assert isinstance(lease, Lease)
    services.leases.confirm(lease.id, "container")
    services.runs.note_exit("train-1-001", 0)
    services.leases.release(lease.id, reason="exit code")
    for other in ("train-1-002", "train-1-003"):
        assert isinstance(ask(services, other), Lease)
    again = ask(services, "train-1-001")
    assert isinstance(again, Ticket), "the others have all GPUs"
    assert [run.id for run in services.runs.settle()] == ["train-1-001"]
    assert services.queue.waiting() == []


@each_database
def test_never_more_than_at_most_hold_a_lease_or_a_ticket(services: Services) -> None:
    """Several launchers at once, of which a hub has one, and runs that end as they please."""
    services.runs.submit_all(sweep_of(RUNS))
    together: list[int] = []
    first_two = iter(range(2))
    meeting = Barrier(2, action=lambda: together.append(len(services.store.run(begun))))

    def launch(seed: int) -> None:
        random = Random(f"{SEED} {seed}")
        while services.runs.are_active():
            services.runs.admit()
            for run_id in admitted(services):
                with suppress(GPUSpawnerError):  # another thread was first
                    got = ask(services, run_id)
                    if isinstance(got, Lease):
                        if next(first_two, None) is not None:
                            meeting.wait(120)
                        services.leases.confirm(got.id, "container")
                        services.runs.note_exit(run_id, random.choice((0, 1)))
                        services.leases.release(got.id, reason="exit code")
            services.runs.settle()

    with ThreadPoolExecutor(4) as pool:
        launching = [pool.submit(launch, seed) for seed in range(4)]
        while not all(each.done() for each in launching):
            found = services.store.run(begun)
            assert len(found) <= MOST, found
        for each in launching:
            each.result()
    assert together and together[0] > 1
    found = services.runs.sweep("train-1")
    assert found.states.keys() <= {"done", "failed"}
    assert len(found.runs) == RUNS


def test_command_gets_values_in_the_place_of_their_names() -> None:
    command = ("train", "--lr={lr}", "--tag", "{tag}-{lr}", "{other}", "{}")
    values = {"lr": 0.1, "tag": "{lr}"}
    filled = filled_in(command, values)
    assert filled == ("train", "--lr=0.1", "--tag", "{lr}-0.1", "{other}", "{}")
    with pytest.raises(InvalidRequest, match=r"is or has \{seed\}"):
        filled_in(command, {"seed": 1})
    assert filled_in(command, {}) == command
