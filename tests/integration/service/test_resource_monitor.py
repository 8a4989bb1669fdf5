"""What the service does with what engines report of their containers. Real: SQLite, threads. The
engines are scripts: they say what containers use, hang or fail."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gpuspawner.engines.docker import DockerEngine
from gpuspawner.leases.models import Lease, Request, ServerRef
from gpuspawner.service import resource_monitor
from gpuspawner.service.machines import Machines
from gpuspawner.service.resource_monitor import ResourceDuty
from gpuspawner.services import Services
from tests.support.brokers import Make
from tests.support.rounds import SITE, ScriptedHub, make_tick, told

GB = 2**30
SECOND = 1_000_000_000


@pytest.fixture
def services(make: Make) -> Services:
    return make(**{**SITE, "opening_grant": 1000})


class ScriptedEngine:
    """Three answers of a Docker Engine: what a container uses, its limit, and its kills."""

    def __init__(self) -> None:
        self.cpu_seconds: dict[str, int] = {}
        """By container; one that is missing here is gone."""
        self.kills: list[dict[str, Any]] = []
        self.hangs = threading.Event()
        self.hangs.set()
        self.is_away = False

    def kill(self, lease: Lease, second: int) -> None:
        actor = {"ID": lease.engine_ref, "Attributes": {"gpuspawner.lease": lease.id}}
        self.kills.append({"Actor": actor, "timeNano": second * SECOND})

    def _answer(self) -> None:
        self.hangs.wait(60)
        if self.is_away:
            raise ConnectionError("nobody listens")

    def stats(self, ref: str, **options: Any) -> dict[str, Any]:
        self._answer()
        assert options == {"stream": False, "one_shot": True}
        used = {"total_usage": self.cpu_seconds[ref] * SECOND}
        memory = {"usage": GB, "limit": 2 * GB}
        read = "2026-11-29T08:57:24Z"
        return {"read": read, "cpu_stats": {"cpu_usage": used}, "memory_stats": memory}

    def inspect_container(self, ref: str) -> dict[str, Any]:
        self._answer()
        return {"Id": ref, "HostConfig": {"Memory": 2 * GB}}

    def events(self, **options: Any) -> Iterator[dict[str, Any]]:
        self._answer()
        return iter(list(self.kills))


@pytest.fixture
def engines() -> Iterator[dict[str, ScriptedEngine]]:
    engines = {"here": ScriptedEngine(), "there": ScriptedEngine()}
    yield engines
    for engine in engines.values():
        engine.hangs.set()


@pytest.fixture
def duty(
    services: Services, engines: dict[str, ScriptedEngine], monkeypatch: pytest.MonkeyPatch
) -> ResourceDuty:
    """Servers named after their machine are there; others are on none."""
    monkeypatch.setattr(resource_monitor, "ROUND_SECONDS", 60.0)  # where no engine hangs

    def connected(scripted: Any) -> DockerEngine:
        return DockerEngine(lambda: scripted)

    docker = {name: connected(engine) for name, engine in engines.items()}
    tick = make_tick(services, ScriptedHub())
    machines = Machines(docker, lambda lease: lease.server.name.removeprefix("run:"))
    return ResourceDuty(tick, machines)


def running(services: Services, user: str, name: str, engine: ScriptedEngine) -> Lease:
    lease = services.leases.grant(ServerRef(user, name), Request(), engine="docker")
    lease = services.leases.confirm(lease.id, f"container-{lease.id}")
    engine.cpu_seconds[lease.engine_ref] = 5
    return lease


def seconds(services: Services, *leases: Lease) -> list[float | None]:
    totals = services.resources.totals_of([lease.id for lease in leases])
    return [totals[x.id].cpu_seconds if x.id in totals else None for x in leases]


async def test_engine_that_hangs_delays_no_other_and_is_waited_for(
    services: Services,
    engines: dict[str, ScriptedEngine],
    duty: ResourceDuty,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource_monitor, "ROUND_SECONDS", 0.2)
    here = running(services, "ada", "here", engines["here"])
    there = running(services, "bob", "there", engines["there"])
    nowhere = running(services, "cleo", "", engines["there"])
    engines["there"].hangs.clear()
    engines["here"].kill(here, 1)
    for number in (1, 2):
        engines["here"].cpu_seconds[here.engine_ref] = 5 * number
        while seconds(services, here) != [5.0 * number]:
            await duty.sample()
        await duty.look_for_kills()
        while not services.notifications.notices_of("ada"):
            await duty.look_for_kills()
        assert seconds(services, here, there, nowhere) == [5.0 * number, None, None]
    [notice] = services.notifications.notices_of("ada")
    assert notice.title == "Your server here ran out of memory"
    engines["there"].kill(there, 2)
    engines["there"].hangs.set()
    while seconds(services, there) == [None] or not services.notifications.notices_of("bob"):
        await duty.sample()
        await duty.look_for_kills()
    assert seconds(services, there, nowhere) == [5.0, None]


async def test_failed_calls_leave_the_totals_and_are_logged_once(
    services: Services,
    engines: dict[str, ScriptedEngine],
    duty: ResourceDuty,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "tick")
    here = running(services, "ada", "here", engines["here"])
    await duty.sample()
    engines["here"].is_away = True
    for _ in range(3):
        await duty.sample()
        await duty.look_for_kills()
    assert seconds(services, here) == [5.0]
    engines["here"].is_away = False
    engines["here"].cpu_seconds[here.engine_ref] = 9
    await duty.sample()
    await duty.look_for_kills()
    assert seconds(services, here) == [9.0]
    for part in ("Resources of here", "Memory of here"):
        said = [line for line in told(caplog.records) if part in line]
        assert len(said) == 2 and said[1].endswith("all is well again"), said


async def test_run_is_told_of_a_kill_only_if_it_goes_on(
    services: Services, engines: dict[str, ScriptedEngine], duty: ResourceDuty
) -> None:
    run = running(services, "ada", "run:here", engines["here"])
    engines["here"].kill(run, 1)
    await duty.look_for_kills()
    assert services.notifications.notices_of("ada") == [], "it may end by it"
    await duty.look_for_kills()
    await duty.look_for_kills()
    [notice] = services.notifications.notices_of("ada")
    assert notice.title == "A run of yours ran out of memory"
    assert "because its 2.0 GB of memory were used up" in notice.body
    assert services.resources.totals_of([run.id])[run.id].memory_kills == 1


async def test_server_that_ended_between_two_looks_is_told(
    services: Services, engines: dict[str, ScriptedEngine], duty: ResourceDuty
) -> None:
    here = running(services, "ada", "here", engines["here"])
    await duty.look_for_kills()
    engines["here"].kill(here, 1)
    services.leases.release(here.id, ended_at=services.clock(), reason="exit code 137")
    await duty.look_for_kills()
    [notice] = services.notifications.notices_of("ada")
    assert "The server has stopped; you can start it again." in notice.body
