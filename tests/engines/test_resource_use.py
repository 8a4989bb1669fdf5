"""What containers use, and those whose memory is used up. Real: a Docker Engine, its containers,
SQLite. The Hub is a script."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import docker
import pytest

from gpuspawner.engines.base import LABEL_LEASE
from gpuspawner.engines.docker import DockerEngine
from gpuspawner.engines.resource_use import REPORT, MemoryKill
from gpuspawner.leases.models import Lease, LeaseState, Request, ServerRef, Terms
from gpuspawner.monitoring import last_sample
from gpuspawner.runs.models import Run, RunState, Work
from gpuspawner.service import resource_monitor
from gpuspawner.service.duties import RunDuty
from gpuspawner.service.machines import HERE, Machines
from gpuspawner.service.resource_monitor import ResourceDuty
from gpuspawner.services import Services
from gpuspawner.spawners.mixin import run_program
from tests.support.brokers import T0, Clock
from tests.support.engine import PrivateEngine, open_engine
from tests.support.images import BASE, SILENT
from tests.support.processes import wait_for
from tests.support.rounds import SITE, ScriptedHub, make_tick, open_services

MB = 2**20
LIMIT = 64 * MB
TOO_MUCH = ["python3", "-c", "bytearray(200 * 2**20)"]
BUSY = ["python3", "-c", "while True: pass"]
MAY_END = "/tmp/may-end"
"""A file in a container, for a program that ends when the test has seen it at work."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for an answer on a busy machine, too, which would be unknown after seconds."""
    monkeypatch.setattr(last_sample, "PATIENCE_SECONDS", 120.0)
    monkeypatch.setattr(resource_monitor, "ROUND_SECONDS", 120.0)


@pytest.fixture
def services(new_file: Callable[[], str]) -> Iterator[Services]:
    services = open_services(new_file(), Clock(), **{**SITE, "opening_grant": 1000})
    yield services
    services.store.close()


@pytest.fixture
async def hub() -> AsyncIterator[ScriptedHub]:
    async with ScriptedHub().serving() as hub:
        yield hub


def started(
    engine: PrivateEngine,
    lease: Lease,
    image: str = BASE,
    command: Any = ("sleep", "1000"),
    environment: Mapping[str, str] | None = None,
) -> str:
    """A container of a lease, whose memory is limited."""
    host = engine.client.create_host_config(mem_limit=LIMIT, memswap_limit=LIMIT)
    labels = {LABEL_LEASE: lease.id}
    made = engine.client.create_container(
        image, list(command), host_config=host, labels=labels, environment=environment
    )
    engine.client.start(made["Id"])
    return str(made["Id"])


def duty_of(services: Services, hub: ScriptedHub, engine: PrivateEngine) -> ResourceDuty:
    here = Machines({HERE: open_engine(engine.url)}, lambda lease: HERE)
    return ResourceDuty(make_tick(services, hub), here)


def session(services: Services, engine: PrivateEngine, **kind: Any) -> Lease:
    lease = services.leases.grant(ServerRef("ada"), Request(), engine="docker")
    return services.leases.confirm(lease.id, started(engine, lease, **kind))


def test_engine_reports_what_a_container_uses(
    services: Services, clean_engine: PrivateEngine
) -> None:
    lease = session(services, clean_engine)
    asked, ref = open_engine(clean_engine.url), lease.engine_ref
    first = asked.resource_use(ref)
    assert first is not None and first.cpu_seconds is not None
    assert first.memory_limit_bytes == asked.memory_limit(ref) == LIMIT
    assert first.memory_bytes is not None and 0 < first.memory_bytes < LIMIT
    assert first.network_received_bytes is not None
    work = ["python3", "-c", "sum(range(5_000_000))"]
    assert clean_engine.execute(ref, work)[0] == 0
    second = asked.resource_use(ref)
    assert second is not None and second.cpu_seconds is not None
    assert second.cpu_seconds > first.cpu_seconds
    clean_engine.client.kill(ref)
    clean_engine.client.wait(ref)
    assert asked.resource_use(ref) is None
    assert asked.memory_limit(ref) == LIMIT
    clean_engine.client.remove_container(ref)
    assert (asked.resource_use(ref), asked.memory_limit(ref)) == (None, None)


async def test_totals_grow_over_a_restart_of_the_container(
    services: Services, hub: ScriptedHub, clean_engine: PrivateEngine
) -> None:
    lease = session(services, clean_engine, command=BUSY)
    duty = duty_of(services, hub, clean_engine)

    async def seconds() -> float:
        await duty.sample()
        totals = services.resources.totals_of([lease.id])
        return (totals[lease.id].cpu_seconds or 0.0) if totals else 0.0

    while await seconds() < 1.0:
        pass
    before = await seconds()
    clean_engine.client.restart(lease.engine_ref, timeout=0)
    assert await seconds() >= before
    while (after := await seconds()) < before + 0.5:
        pass
    services.leases.release(lease.id, ended_at=T0, reason="stopped")
    assert await seconds() == after, "it stays for the receipt"


async def test_member_is_told_of_a_kernel_that_used_all_memory(
    services: Services, hub: ScriptedHub, clean_engine: PrivateEngine
) -> None:
    lease = session(services, clean_engine)
    duty = duty_of(services, hub, clean_engine)
    await duty.look_for_kills()
    assert clean_engine.execute(lease.engine_ref, TOO_MUCH)[0] == 137
    wait_for(lambda: kills_of(open_engine(clean_engine.url), lease), "the engine's event")
    for _ in range(2):  # and a service that was started anew tells nothing twice
        await duty.look_for_kills()
        duty = duty_of(services, hub, clean_engine)
    [told] = services.notifications.notices_of("ada")
    assert told.title == "Your server ran out of memory"
    assert "64.0 MB of its 64.0 MB of memory, and the system ended a program in it" in told.body
    assert_counted(services, open_engine(clean_engine.url), lease)
    assert services.resources.totals_of([lease.id])[lease.id].memory_limit_bytes == LIMIT


def kills_of(engine: DockerEngine, lease: Lease) -> set[MemoryKill]:
    """What the engine has told of this lease; it keeps what it told of those of other tests."""
    return {each for each in engine.memory_kills() if each.lease_id == lease.id}


def assert_counted(services: Services, engine: DockerEngine, lease: Lease) -> None:
    """Kills count, and none counts twice."""
    told = len(kills_of(engine, lease))
    assert 1 <= services.resources.totals_of([lease.id])[lease.id].memory_kills <= told


def started_run(
    services: Services, engine: PrivateEngine, command: Any, **kind: Any
) -> tuple[Run, Lease]:
    run = Run(id="ada-1", user="ada", title="train", work=Work(command=("a",)), created_at=T0)
    services.runs.submit(run)
    terms = Terms(wait=True, seconds=3600)
    lease = services.queue.ask(run.server, Request(), engine="docker", terms=terms)
    assert isinstance(lease, Lease)
    ref = started(engine, lease, command=command, **kind)
    return run, services.leases.confirm(lease.id, ref)


def carried_out(services: Services, engine: PrivateEngine, program: str) -> tuple[Run, Lease]:
    """A run of a Python program, begun in its container as the hub does it."""
    work = Work(command=("python3", "-c", program), folder="runs/one")
    environment = {
        "GPUSPAWNER_WORKSPACE": "/tmp",
        "GPUSPAWNER_RUN_ID": "ada-1",
        "GPUSPAWNER_RUN_WORK": json.dumps(asdict(work)),
    }
    command = ["python3", "-c", run_program()]
    return started_run(services, engine, command, environment=environment)


async def test_run_is_measured_once_more_before_it_is_stopped(
    services: Services, hub: ScriptedHub, clean_engine: PrivateEngine
) -> None:
    run, lease = started_run(services, clean_engine, BUSY)
    asked = open_engine(clean_engine.url)

    def seconds() -> float:
        use = asked.resource_use(lease.engine_ref)
        return (use.cpu_seconds or 0.0) if use else 0.0

    wait_for(lambda: seconds() > 0.2, "the run to use some CPU time")
    used = seconds()
    services.runs.stop(run.id, actor="ada")
    await RunDuty(make_tick(services, hub, asked)).round()
    assert services.leases.get(lease.id).state is LeaseState.ENDED
    assert asked.inspect(lease.engine_ref) is None, "it was removed"
    [totals] = services.resources.totals_of([lease.id]).values()
    assert (totals.cpu_seconds or 0.0) >= used
    assert totals.memory_limit_bytes == LIMIT


@pytest.mark.parametrize("is_sampled", [True, False])
async def test_run_that_ends_by_itself_is_measured_to_its_end(
    services: Services, hub: ScriptedHub, clean_engine: PrivateEngine, is_sampled: bool
) -> None:
    """Five seconds of CPU time, and those of a program whose end it does not wait for."""
    program = (
        "import os, subprocess, time\nbytearray(30 * 2**20)\n"
        "orphan = 'import time\\nwhile time.process_time() < 1: pass\\nprint(flush=True)'\n"
        "begin = ['sh', '-c', f'python3 -c \"{orphan}\" > /tmp/orphan & ']\n"
        "subprocess.run(begin)\n"
        "while time.process_time() < 4: pass\n"
        "while not os.path.getsize('/tmp/orphan'): time.sleep(0.1)\n"
        f"while not os.path.exists('{MAY_END}'): time.sleep(0.1)"
    )
    run, lease = carried_out(services, clean_engine, program)
    asked, before = open_engine(clean_engine.url), 0.0
    if is_sampled:
        duty = duty_of(services, hub, clean_engine)
        while before < 0.2:
            await duty.sample()
            found = services.resources.totals_of([lease.id])
            before = (found[lease.id].cpu_seconds or 0.0) if found else 0.0
    assert clean_engine.execute(lease.engine_ref, ["touch", MAY_END])[0] == 0
    clean_engine.client.wait(lease.engine_ref)
    assert asked.resource_use(lease.engine_ref) is None
    await RunDuty(make_tick(services, hub, asked)).round()
    assert services.runs.get(run.id).state is RunState.DONE
    [totals] = services.resources.totals_of([lease.id]).values()
    assert before < 5 <= (totals.cpu_seconds or 0.0) < 6
    assert 30 * MB < (totals.memory_peak_bytes or 0) < LIMIT == totals.memory_limit_bytes


async def test_figures_that_a_member_makes_up_are_ignored(
    services: Services, hub: ScriptedHub, clean_engine: PrivateEngine
) -> None:
    """The program ends what would report after it, which fails, and the log stays its own."""
    forged = REPORT + json.dumps({"cpu_seconds": 1e6, "memory_bytes": 1})
    program = (
        "import os, signal, time\nos.write(1, b'epoch 9\\n')\n"
        f"while not os.path.exists('{MAY_END}'): time.sleep(0.1)\n"
        f"open(f'/proc/{{os.getppid()}}/fd/1', 'w').write({forged!r} + '\\n')\n"
        "os.kill(os.getppid(), signal.SIGKILL)"
    )
    run, lease = carried_out(services, clean_engine, program)
    log = partial(clean_engine.client.logs, lease.engine_ref)
    wait_for(lambda: b"epoch 9" in log(), "its line to be passed on")
    assert clean_engine.execute(lease.engine_ref, ["touch", MAY_END])[0] == 0
    clean_engine.client.wait(lease.engine_ref)
    asked = open_engine(clean_engine.url)
    told = asked.reported_use(lease.engine_ref)
    assert told is not None and told.cpu_seconds == 1e6
    await RunDuty(make_tick(services, hub, asked)).round()
    assert services.resources.totals_of([lease.id]) == {}
    assert services.runs.get(run.id).run.reason == (
        "Its program ended with exit status 137. Its last line: epoch 9"
    )


async def test_stop_does_not_wait_for_an_engine_that_does_not_respond(
    services: Services, clean_engine: PrivateEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_sample, "PATIENCE_SECONDS", 0.2)
    lease, stopped = session(services, clean_engine, image=SILENT), []
    asked = open_engine(clean_engine.url)
    with clean_engine.hung():
        async with last_sample.last_sample(services, asked, lease.id, lease.engine_ref):
            stopped.append(lease)
        assert (stopped, services.resources.totals_of([lease.id])) == ([lease], {})
    while not services.resources.totals_of([lease.id]):  # an answer that is late counts
        await asyncio.sleep(0)


async def test_stop_goes_on_without_engine_or_container(
    services: Services, clean_engine: PrivateEngine, caplog: pytest.LogCaptureFixture
) -> None:
    lease, stopped = session(services, clean_engine), []
    nobody = DockerEngine(lambda: docker.APIClient("unix:///nobody/listens.sock"))
    for engine, ref in ((nobody, lease.engine_ref), (open_engine(clean_engine.url), "gone")):
        async with last_sample.last_sample(services, engine, lease.id, ref):
            stopped.append(ref)
    assert stopped == [lease.engine_ref, "gone"]
    assert services.resources.totals_of([lease.id]) == {}
    [said] = [it for it in caplog.messages if "The last use" in it]
    assert lease.id in said


async def test_run_that_ended_by_it_says_so(
    services: Services, hub: ScriptedHub, clean_engine: PrivateEngine
) -> None:
    program = f"exec 2> /dev/null; {shlex.join(TOO_MUCH)}; status=$?"
    # An engine that hears of the end before it hears why does not say why.
    ends = f"until [ -e {MAY_END} ]; do sleep 0.1; done; exit $status"
    run, lease = started_run(services, clean_engine, ["sh", "-c", f"{program}; {ends}"])
    docker = DockerEngine(lambda: clean_engine.client)
    duty = duty_of(services, hub, clean_engine)
    wait_for(lambda: kills_of(docker, lease), "the engine's event")
    assert clean_engine.execute(lease.engine_ref, ["touch", MAY_END])[0] == 0
    clean_engine.client.wait(lease.engine_ref)
    await duty.look_for_kills()
    assert "exit code 137, out of memory (limit 64.0 MB)" in {x.detail for x in docker.sightings()}
    await RunDuty(make_tick(services, hub, docker)).round()
    ended = services.runs.get(run.id)
    assert ended.state is RunState.FAILED
    assert ended.run.reason == (
        "Its program ended with exit status 137. The system ended a program in it because its "
        "64.0 MB of memory were used up."
    )
    for _ in range(2):
        await duty.look_for_kills()
    [told] = services.notifications.notices_of("ada")
    assert told.title == "Your run train failed", "and its end is told once"
    assert_counted(services, docker, lease)


async def test_engine_that_does_not_respond_is_asked_again(
    services: Services,
    hub: ScriptedHub,
    clean_engine: PrivateEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource_monitor, "ROUND_SECONDS", 0.2)
    lease = session(services, clean_engine, image=SILENT)
    duty = duty_of(services, hub, clean_engine)
    with clean_engine.hung():
        await duty.sample()
        await duty.sample()
        assert services.resources.totals_of([lease.id]) == {}
    while not services.resources.totals_of([lease.id]):
        await duty.sample()
