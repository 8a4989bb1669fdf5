"""Which runs a hub is about to start. Real: services, SQLite. The Hub's users and the comparison at
its start are stand-ins."""

from __future__ import annotations

import logging
from types import SimpleNamespace

from gpuspawner.leases.models import Lease, Request, Terms
from gpuspawner.runs.models import Run, RunState, Work
from gpuspawner.spawners.recovery import KEY
from gpuspawner.spawners.runs import RunLauncher
from tests.support.brokers import T0, Make


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
