"""Which runs a hub is about to start, and how it cancels a start. Real: services, SQLite, the
spawner's hooks, the comparison of leases. Stand-ins: the Hub's users, the comparison where a test
says so, and an engine that pulls an image until its start is cancelled."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from jupyterhub import orm
from jupyterhub.spawner import SimpleLocalProcessSpawner
from sqlalchemy.orm import Session
from traitlets.config import Config

from gpuspawner.core.errors import StartFailed
from gpuspawner.engines.local import LocalEngine
from gpuspawner.leases.models import Lease, LeaseState, Request, ServerRef, Terms
from gpuspawner.queue.models import Ticket
from gpuspawner.runs.models import Run, RunState, Work
from gpuspawner.services import KEY as SERVICES
from gpuspawner.services import Services
from gpuspawner.spawners.mixin import ExitStatus, GPUSpawnerMixin
from gpuspawner.spawners.recovery import KEY
from gpuspawner.spawners.runs import RunLauncher
from tests.support.brokers import T0, Make
from tests.support.processes import PATIENCE
from tests.support.telling import until

LONG = 30 * PATIENCE


class SlowEngine:
    """Events of an engine: each tells a test how far a start is, or lets it go on."""

    def __init__(self) -> None:
        self.pulls = asyncio.Event()
        self.fails = asyncio.Event()
        self.is_asked_for_proof = asyncio.Event()
        self.gives_proof = asyncio.Event()


class PullingSpawner(SimpleLocalProcessSpawner):
    """Pulls an image until that fails."""

    async def start(self) -> Any:
        engine: SlowEngine = self.user.settings["engine"]
        engine.pulls.set()
        await engine.fails.wait()
        raise StartFailed(cause="the registry is away")


class SlowSpawner(GPUSpawnerMixin, PullingSpawner):
    """Proves a server gone when the test lets it."""

    engine_name = "local"
    runs_programs = True

    def engine(self) -> LocalEngine:
        return LocalEngine()

    async def prove_gone(self) -> ExitStatus:
        engine: SlowEngine = self.user.settings["engine"]
        engine.is_asked_for_proof.set()
        await engine.gives_proof.wait()
        return ExitStatus(gone=True)


def launcher_of(services: Services, engine: SlowEngine) -> RunLauncher:
    """The launcher of a hub with one user, ada."""
    database = sa.create_engine("sqlite://")
    orm.Base.metadata.create_all(database)
    settings: dict[str, Any] = {
        "log": logging.getLogger(),
        "config": Config(),
        "hub": None,
        "spawner_class": SlowSpawner,
        "engine": engine,
        SERVICES: services,
    }
    user = SimpleNamespace(
        name="ada",
        escaped_name="ada",
        groups=[],
        admin=False,
        base_url="/user/ada/",
        url="/user/ada/",
        authenticator=None,
        db=Session(database),
        settings=settings,
    )
    settings["users"] = {"ada": user}
    return RunLauncher(settings, services)


async def test_lease_that_a_failed_start_left_is_not_reported_as_on_its_way(make: Make) -> None:
    """Such as of an engine that crashed between creation and start: a comparison frees its GPU."""
    services = make()
    run, _ = services.runs.submit(
        Run(id="train-1", user="ada", title="", work=Work(command=("train",)), created_at=T0)
    )
    terms = Terms(wait=True)
    lease = services.queue.ask(run.server, Request(devices=1), engine="docker", terms=terms)
    assert isinstance(lease, Lease)
    assert services.runs.get(run.id).state is RunState.STARTING
    user = SimpleNamespace(name="ada")
    settings = {"log": logging.getLogger(), "users": {"ada": user}}
    launcher = RunLauncher(settings | {KEY: SimpleNamespace(is_compared=True)}, services)
    await launcher.start_all()
    assert launcher.starting == []


async def test_run_of_an_unknown_member_waits(make: Make) -> None:
    """Its member may have been renamed a moment ago."""
    services = make()
    run, _ = services.runs.submit(
        Run(id="train-1", user="ada", title="", work=Work(command=("train",)), created_at=T0)
    )
    launcher = RunLauncher({"log": logging.getLogger(), "users": {}}, services)
    await launcher.start_all()
    assert launcher.starting == []
    assert services.runs.get(run.id).state is RunState.WAITING


@pytest.mark.parametrize("cause", ["cancelled", "failed"])
async def test_release_of_a_start_is_not_interrupted(make: Make, cause: str) -> None:
    """The start of a preemptible run yields its device, while the engine is slow to prove the
    container gone. A round that cancels it meanwhile would leave the lease open."""
    services, engine = make(device_source="simulated:1xT4"), SlowEngine()
    work = Work(command=("train",))
    run, _ = services.runs.submit(
        Run(id="train-1", user="ada", title="", work=work, preemptible=True, created_at=T0)
    )
    launcher = launcher_of(services, engine)
    await launcher.start_all()
    await asyncio.wait_for(engine.pulls.wait(), LONG)
    (lease,) = services.leases.open_leases()
    if cause == "failed":
        engine.fails.set()
        await asyncio.wait_for(engine.is_asked_for_proof.wait(), LONG)

    terms = Terms(wait=True)
    ticket = services.queue.ask(ServerRef("bob"), Request(devices=1), engine="local", terms=terms)
    assert isinstance(ticket, Ticket)
    assert services.queue.turns(frozenset([ticket.id])) == []
    assert services.leases.get(lease.id).yields_at is not None
    await launcher.start_all()
    await asyncio.wait_for(engine.is_asked_for_proof.wait(), LONG)
    for _ in range(2):
        await launcher.start_all()
    assert services.leases.get(lease.id).state is LeaseState.GRANTED
    assert [start.id for start in launcher.starting] == [run.id]

    engine.gives_proof.set()
    await until(lambda: launcher.starting == [], "the end of the start", LONG)
    settled = services.leases.get(lease.id)
    assert (settled.state, settled.charged) == (LeaseState.ENDED, 0)
    assert services.queue.turns(frozenset([ticket.id])) == [ticket.id]
    assert services.queue.start_ticket(ticket.id).devices == lease.devices
    services.granter.give_up()
