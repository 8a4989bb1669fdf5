"""Runs whose member the Hub no longer has. Real: SQLite, HTTP. The Hub is a script."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from gpuspawner.core.errors import Unavailable
from gpuspawner.leases.models import Lease, Request, ServerRef, Sighting, Terms
from gpuspawner.runs.models import Run, RunState, Work
from gpuspawner.service import duties
from gpuspawner.service.duties import RunDuty
from gpuspawner.services import Services
from tests.support.brokers import T0, Clock, Make
from tests.support.rounds import SITE, ScriptedHub, make_tick


@pytest.fixture
def services(make: Make) -> Services:
    return make(**{**SITE, "opening_grant": 1000})


def submit(services: Services, user: str) -> str:
    run = Run(id=f"{user}-1", user=user, title="train", work=Work(command=("a",)), created_at=T0)
    services.runs.submit(run)
    return run.id


async def test_runs_of_a_removed_member_end_after_a_while(
    services: Services, hub: ScriptedHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, stays = submit(services, "ada"), submit(services, "bob")
    runs = submit(services, "eve")
    server = services.runs.get(runs).run.server
    terms = Terms(wait=True, seconds=3600)
    lease = services.queue.ask(server, Request(devices=1), engine="docker", terms=terms)
    services.leases.confirm(lease.id)
    hub.has(ServerRef("bob"))
    duty = RunDuty(make_tick(services, hub))

    await duty.end_gone()
    await duty.end_gone()
    assert services.runs.get(waits).state is RunState.WAITING, "a rename takes some time"
    monkeypatch.setattr(duties, "MEMBER_GONE_SECONDS", 0.0)
    hub.status = 503
    with pytest.raises(Unavailable):
        await duty.end_gone()
    assert services.runs.get(waits).state is RunState.WAITING, "unknown is not gone"
    hub.status = None
    await duty.end_gone()
    ended = services.runs.get(waits).run
    assert (ended.outcome, ended.reason) == ("stopped", "The member was removed at the Hub.")
    ordered = services.leases.get(lease.id)
    assert (ordered.outcome, ordered.end_reason) == ("admin", duties.MEMBER_GONE)
    assert services.runs.get(stays).state is RunState.WAITING


async def test_member_who_is_back_keeps_their_runs(
    services: Services, hub: ScriptedHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = submit(services, "ada")
    duty = RunDuty(make_tick(services, hub))
    await duty.end_gone()
    hub.has(ServerRef("ada"))
    await duty.end_gone()
    hub.has()
    monkeypatch.setattr(duties, "MEMBER_GONE_SECONDS", 0.05)
    await duty.end_gone()
    assert services.runs.get(waits).state is RunState.WAITING, "the time begins anew"


class EndedEngine:
    """An engine with one container, whose program ran for 90 seconds and has ended."""

    name = "docker"

    def __init__(self, lease: Lease) -> None:
        began = lease.granted_at
        self.found = [
            Sighting(
                lease_id=lease.id,
                ref="container",
                server=lease.server,
                alive=False,
                started_at=began,
                ended_at=began + timedelta(seconds=90),
                exit_code=0,
            )
        ]

    def sightings(self) -> list[Sighting]:
        return self.found

    def end(self, sighting: Sighting) -> None:
        self.found = []


async def test_program_that_ended_unseen_is_charged(services: Services, hub: ScriptedHub) -> None:
    """The hub was killed between the container's start and the confirmation of its lease."""
    run_id = submit(services, "ada")
    server = services.runs.get(run_id).run.server
    terms = Terms(wait=True, seconds=3600)
    lease = services.queue.ask(server, Request(devices=1), engine="docker", terms=terms)
    assert isinstance(lease, Lease) and lease.rate
    Clock.of(services).forward(seconds=120)
    with pytest.raises(Unavailable):  # by the scripted Hub, which is asked last, and starts no run
        await RunDuty(make_tick(services, hub, EndedEngine(lease))).round()
    assert services.runs.get(run_id).state is RunState.DONE
    assert services.leases.get(lease.id).charged == lease.rate * 90 // 3600


class EngineOfJobs(EndedEngine):
    """The same on a cluster: its devices are not free before its job has ended."""

    def __init__(self, lease: Lease) -> None:
        super().__init__(lease)
        self.found = [replace(each, alive=True) for each in self.found]

    def end_job(self, sighting: Sighting) -> None:
        assert sighting in self.found
        self.found = [replace(each, alive=False) for each in self.found]


async def test_job_ends_only_when_the_exit_status_is_recorded(
    services: Services, hub: ScriptedHub
) -> None:
    run_id = submit(services, "ada")
    server = services.runs.get(run_id).run.server
    terms = Terms(wait=True, seconds=3600)
    lease = services.queue.ask(server, Request(devices=1), engine="docker", terms=terms)
    assert isinstance(lease, Lease)
    services.leases.confirm(lease.id, "container", started_at=lease.granted_at)
    Clock.of(services).forward(seconds=120)
    engine = EngineOfJobs(lease)
    duty = RunDuty(make_tick(services, hub, engine))
    await duty.round()
    assert [each.alive for each in engine.found] == [False]
    followed = services.runs.get(run_id)
    assert (followed.state, followed.run.exit_code) == (RunState.RUNNING, 0)
    await duty.round()
    assert services.runs.get(run_id).state is RunState.DONE


async def test_job_of_an_exited_server_is_ended(services: Services, hub: ScriptedHub) -> None:
    server = ServerRef("ada")
    lease = services.leases.grant(server, Request(devices=1), engine="docker")
    services.leases.confirm(lease.id, "container", started_at=lease.granted_at)
    hub.has(server)
    engine = EngineOfJobs(lease)
    await make_tick(services, hub, engine).reconcile()
    assert [each.alive for each in engine.found] == [False]
