"""Batch jobs as sacct would tell of them, the books that they are paid from, and who
charges for them until they are killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

from gpuspawner.leases.models import Request, ServerRef
from gpuspawner.ledger import repository as ledger_repository
from gpuspawner.queue import repository as queue_repository
from gpuspawner.queue.models import Ticket
from gpuspawner.services import Services
from gpuspawner.slurm import repository as slurm_repository
from gpuspawner.slurm.cluster import Cluster, Node, NodeDevice
from gpuspawner.slurm.jobs import JobRun
from tests.support.brokers import T0, Clock, open_services, problems

GIB = 2**30
A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"

_M1 = Node(
    name="m1",
    address="10.0.0.1",
    engine="unix:///run/docker.sock",
    devices=(
        NodeDevice("GPU-00000001", A100, 80 * GIB, gres="a100"),
        NodeDevice("GPU-00000002", A100, 80 * GIB, gres="a100"),
    ),
    shards={"a100": 4},
)
_M2 = Node(
    name="m2",
    address="10.0.0.2",
    engine="unix:///run/docker.sock",
    devices=(NodeDevice("GPU-00000003", H100, 80 * GIB, gres="h100"),),
)
CLUSTER = Cluster(name="lab", nodes=(_M1, _M2))

RATES = {"*": 1, "A100": 4, "H100": 10}

LATER = timedelta(days=1)

JOBS = 40
"""Of those who are killed."""
HOURS = 10 * JOBS + 2
"""After which all of these have ended."""


def open_books(url: str, clock: Clock, **settings: Any) -> Services:
    """Services at these rates whose cluster was looked at for the first time at its clock's now."""
    services = open_services(url, clock, gpu_rates=RATES, opening_grant=100, **settings)
    services.job_billing.debit(CLUSTER, [])
    return services


@contextmanager
def a_day_later(url: str) -> Iterator[Services]:
    """Such services, with an account for ``anna``, ``LATER`` than its first look at T0; whatever
    is done with it must leave its books in order."""
    clock = Clock()
    services = open_books(url, clock)
    services.ledger.open_account("anna")
    clock.now = T0 + LATER
    yield services
    findings, _ = services.audit.check()
    assert [finding.problem for finding in findings if finding.problem] == []
    assert problems(services.store) == []
    services.store.close()


def look_since(services: Services, moment: datetime) -> None:
    """Let the services have looked at the cluster for the first time then."""
    with services.store.write() as connection:
        slurm_repository.marks(connection, CLUSTER.name, moment)


def run(number: int, begins: datetime = T0, seconds: int | None = 3600, **cells: Any) -> JobRun:
    """A run of a job of ``anna`` on an A100; ``seconds`` None: it goes on, and ``ran`` so long."""
    so_far = cells.pop("ran", 0)
    ran = so_far if seconds is None else seconds
    made = JobRun(
        id=str(number),
        label=str(number),
        name="train.py",
        user="anna",
        submitted_at=begins - timedelta(seconds=5),
        started_at=begins,
        ended_at=None if seconds is None else begins + timedelta(seconds=seconds),
        seconds=ran,
        gpus={"a100": 1},
        shards={},
        nodes=("m1",),
    )
    return replace(made, **cells)


def many(hours: int) -> list[JobRun]:
    """Runs after so many hours: each lasts ten times its number, and so some have ended."""
    found = []
    for number in range(1, JOBS + 1):
        lasts = number * 36_007
        over = lasts <= hours * 3600
        begins = T0 + timedelta(seconds=number)
        found.append(run(number, begins, lasts if over else None, ran=hours * 3600))
    return found


def debit_until_killed(ready: Connection, url: str) -> None:
    """Charge for them as time goes on, all over again, for ever."""
    services = open_services(
        url, Clock(T0 + timedelta(days=30)), gpu_rates=RATES, opening_grant=100
    )
    ready.send("working")
    while True:
        for hours in range(HOURS):
            services.job_billing.debit(CLUSTER, many(hours))


def debit_together(gate: Barrier, url: str) -> int:
    """Charge for all of them at the same moment as others; how much this one did."""
    services = open_services(
        url, Clock(T0 + timedelta(days=30)), gpu_rates=RATES, opening_grant=100
    )
    gate.wait(120)
    amount = services.job_billing.debit(CLUSTER, many(HOURS)).amount
    services.store.close()
    return amount


def wait_in_line(services: Services, name: str, user: str = "anna", **fields: Any) -> Ticket:
    """A ticket that waits since T0, for a server of its own name."""
    ticket = Ticket(
        id=name,
        server=ServerRef(user, name),
        request=Request(devices=1),
        engine="slurm",
        account=f"member:{user}",
        created_at=T0,
        **fields,
    )
    with services.store.write() as connection:
        queue_repository.insert_ticket(connection, ticket)
    return ticket


def open_group(services: Services, name: str) -> None:
    """A group's account, with nothing in it."""
    with services.store.write() as connection:
        ledger_repository.open_account(connection, f"group:{name}", T0)
