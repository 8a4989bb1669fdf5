"""Sessions are compared with Slurm's records of them.

Real: SQLite, the services. Not real: what sacct says, which is written here; tests/slurm
has the real one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from gpuspawner.leases import repository as leases_repository
from gpuspawner.leases.models import Lease, LeasedDevice, LeaseState, ServerRef
from gpuspawner.services import Services
from gpuspawner.slurm.jobs import JobRun
from tests.support.batch_jobs import A100, GIB, a_day_later, run, wait_in_line
from tests.support.brokers import T0


@pytest.fixture
def services(database_url: str) -> Iterator[Services]:
    with a_day_later(database_url) as services:
        yield services


WHOLE = LeasedDevice("GPU-1", 0, 0, A100, 80 * GIB)
SHARE = replace(WHOLE, slots=4, held_slots=3)
ALL_SLOTS = replace(WHOLE, slots=4, held_slots=4)


def session(
    services: Services, ticket: str, begins: int = 0, ends: int = 3600, device: LeasedDevice = WHOLE
) -> Lease:
    """One that ended, with its seconds since T0."""
    lease = Lease(
        id=f"l{ticket}{begins}",
        server=ServerRef("anna", ticket),
        account="member:anna",
        environment="pytorch",
        devices=(device,),
        rate=0,
        hold=0,
        state=LeaseState.GRANTED,
        engine="slurm",
        granted_at=T0 + timedelta(seconds=begins),
        ticket_id=ticket,
    )
    with services.store.write() as connection:
        leases_repository.insert(connection, lease)
        leases_repository.end(connection, lease.id, T0 + timedelta(seconds=ends), "done", 0, 0)
    return replace(lease, state=LeaseState.ENDED, ended_at=T0 + timedelta(seconds=ends))


def holder(ticket: str, number: int = 1, **cells: Any) -> JobRun:
    return run(number, name=f"gpuspawner-{ticket}", **cells)


def test_audit_reports_sessions_that_differ_from_slurm_jobs(services: Services) -> None:
    wait_in_line(services, "aa")
    lease = session(services, "aa")
    cases: list[tuple[list[JobRun], list[str]]] = [
        ([holder("aa")], []),
        ([holder("aa", seconds=3601)], []),
        ([holder("aa", seconds=3602)], ["3600 s here, and 3602 s in Slurm (job 1)"]),
        ([holder("aa", seconds=3598)], ["3600 s here, and 3598 s in Slurm (job 1)"]),
        ([], ["it had devices for 3600 s, but Slurm has no job for it"]),
        (
            [holder("aa", gpus={"a100": 2})],
            ["1 device here, and 2 devices in Slurm (job 1)"],
        ),
        (
            [holder("aa", gpus={}, shards={"": 1})],
            ["1 device here, and 1 shard in Slurm (job 1)"],
        ),
        (
            [holder("aa"), holder("aa", 2, seconds=60)],
            [
                "Slurm had 2 jobs for it (1, 2), together 3660 s",
                "3600 s here, and 3660 s in Slurm (job 1, 2)",
            ],
        ),
    ]
    for runs, said in cases:
        found = services.cluster_audit.compare([lease], {"aa": runs}, runs)
        assert [each.what for each in found] == said
        assert all(each.subject == "lease laa0 of anna/aa" for each in found)


@pytest.mark.parametrize(
    ("device", "cells", "said"),
    [
        (SHARE, {"gpus": {}, "shards": {"a100": 3}}, []),
        (SHARE, {"gpus": {}, "shards": {"": 2}}, ["3 shards here, and 2 shards in Slurm (job 1)"]),
        (SHARE, {}, ["3 shards here, and 1 device in Slurm (job 1)"]),
        (ALL_SLOTS, {}, []),  # Slurm gave the whole one
    ],
)
def test_audit_compares_the_shards_of_a_session(
    services: Services, device: LeasedDevice, cells: dict[str, Any], said: list[str]
) -> None:
    wait_in_line(services, "aa")
    lease = session(services, "aa", device=device)
    found = services.cluster_audit.compare([lease], {"aa": [holder("aa", **cells)]})
    assert [each.what for each in found] == said


def test_one_job_may_cover_two_sessions_after_a_crash(services: Services) -> None:
    wait_in_line(services, "aa")
    mine = [session(services, "aa", 0, 100), session(services, "aa", 160, 3600)]
    assert services.cluster_audit.compare(mine, {"aa": [holder("aa")]}) == []


def test_audit_reports_jobs_without_a_session(services: Services) -> None:
    wait_in_line(services, "aa")
    runs = [holder("aa", seconds=90), holder("unknown", 2)]
    assert [str(each) for each in services.cluster_audit.compare([], {}, runs)] == [
        "ticket aa of anna/aa: job 1 had its devices for 90 s, but no session did"
    ]
