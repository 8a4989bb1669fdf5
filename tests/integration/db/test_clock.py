"""Steps of the wall clock. Real: SQLite and PostgreSQL; the machine's clocks are the test's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from datetime import datetime, timedelta
from typing import Any

import pytest

from gpuspawner.core.clock import DAY, LASTS, LASTS_LONG, MINUTE, SECOND, Reading, to_datetime
from gpuspawner.core.errors import ClockWasSet
from gpuspawner.core.units import MICRO
from gpuspawner.db.clock import SteadyClock
from gpuspawner.engines.docker import was_given
from gpuspawner.leases.models import Lease, Request, ServerRef, Sighting, Terms
from gpuspawner.leases.reconciliation import HubState
from gpuspawner.ledger import reports
from gpuspawner.queue.models import Estimate, Ticket
from gpuspawner.queue.repository import estimates_since, store_estimates
from gpuspawner.services import Services
from tests.support.brokers import open_services, problems
from tests.support.clocks import apart, wall_clock_apart
from tests.support.postgres import PrivatePostgres
from tests.support.processes import REPO
from tests.support.rounds import ScriptedHub, make_tick

HOUR = 60 * MINUTE
YEAR = 365 * DAY
NOW = 1_800_000_000 * SECOND
A_CREDIT_A_SECOND: dict[str, Any] = {"opening_grant": 100_000, "gpu_rates": {"*": 3600}}
STEPS = pytest.mark.parametrize("step", [2 * HOUR, -YEAR])


class Machine:
    """A machine's clocks, which stand still until the test moves them."""

    def __init__(self) -> None:
        self.wall, self.since_boot, self.boot_id = NOW, 600 * SECOND, "boot-1"

    def read(self) -> Reading:
        return Reading(self.wall, self.since_boot, self.boot_id)

    @property
    def engine_now(self) -> datetime:
        """What Docker on this machine stamps on what happens now."""
        return to_datetime(self.wall)

    def forward(self, micros: int) -> None:
        self.wall += micros
        self.since_boot += micros

    def set_wall_clock(self, step: int) -> None:
        self.wall += step

    def reboot(self, off: int) -> None:
        """Crash, and boot after a while."""
        self.wall += off
        self.since_boot, self.boot_id = 20 * SECOND, "boot-2"


Start = Callable[..., Services]


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def start(database_url: str, machine: Machine) -> Iterator[Start]:
    """Start a process with services on the store. Each ``name`` is a process of its own."""
    started: dict[str, Services] = {}

    def start(name: str = "service") -> Services:
        if name in started:
            started[name].store.close()  # it was killed
        url = database_url.replace("sqlite:////", f"sqlite:////{'./' * len(name)}")
        if url == database_url:
            url += f"?application_name={name}"
        services = open_services(url, **A_CREDIT_A_SECOND)
        services.clock = services.store.clock = SteadyClock(services.store, machine.read)
        started[name] = services
        return services

    yield start
    for services in started.values():
        services.store.close()


def start_server(services: Services, user: str = "ada", seconds: int | None = None) -> Lease:
    """A lease whose container is still to come."""
    request = Request(devices=1, environment="pytorch")
    terms = Terms(seconds=seconds)
    return services.leases.grant(ServerRef(user), request, engine="docker", terms=terms)


def session(services: Services, machine: Machine, user: str = "ada", seconds: int = 3600) -> Lease:
    """A session of an hour that began now."""
    lease = start_server(services, user, seconds)
    return services.leases.confirm(lease.id, f"container-{user}", started_at=machine.engine_now)


def see(services: Services, lease: Lease, ended_at: datetime | None = None) -> None:
    """Compare: its server is alive, or ended then."""
    alive = ended_at is None
    seen = Sighting(
        lease_id=lease.id, ref=lease.engine_ref, server=lease.server, alive=alive, ended_at=ended_at
    )
    services.leases.reconcile({"docker": [seen]}, {lease.server: HubState.READY} if alive else {})


def step_clock(services: Services, machine: Machine, by: int, lasts: int = 0) -> None:
    """Set the wall clock, and look at it at once and after a while."""
    machine.set_wall_clock(by)
    services.clock_corrections.keep()
    if lasts:
        machine.forward(lasts)
        services.clock_corrections.keep()


def charged(services: Services, lease: Lease) -> float:
    services.ledger.charge_all()
    return services.leases.get(lease.id).charged / MICRO


def over(services: Services) -> list[str]:
    return [lease.id for lease in services.sessions.due_sessions().over]


# While processes run.


@STEPS
def test_clock_step_changes_neither_charge_nor_session_end(
    start: Start, machine: Machine, step: int
) -> None:
    services = start()
    lease = session(services, machine)
    machine.forward(6 * SECOND)
    step_clock(services, machine, step)
    machine.forward(8 * SECOND)
    assert charged(services, lease) == 14
    assert over(services) == []
    step_clock(services, machine, -step)
    machine.forward(6 * SECOND)
    ended = services.leases.release(lease.id, ended_at=machine.engine_now, reason="stopped")
    assert ended.charged == 20 * MICRO
    assert problems(services.store) == []


@STEPS
def test_server_is_charged_correctly_across_a_clock_step(
    start: Start, machine: Machine, step: int
) -> None:
    """Docker stamps both with the wall clock."""
    services = start()
    lease = start_server(services)
    machine.forward(2 * SECOND)
    started_at = machine.engine_now
    machine.set_wall_clock(step)
    machine.forward(20 * SECOND)
    lease = services.leases.confirm(lease.id, "container", started_at=started_at)
    machine.forward(10 * SECOND)
    assert charged(services, lease) == 30
    machine.forward(10 * SECOND)
    died_at = machine.engine_now
    machine.forward(25 * SECOND)
    see(services, lease, died_at)
    assert services.leases.get(lease.id).charged == 40 * MICRO


@STEPS
def test_clock_step_between_crash_and_restart_has_no_effect(
    start: Start, machine: Machine, step: int
) -> None:
    lease = session(start(), machine)
    machine.forward(10 * SECOND)
    machine.set_wall_clock(step)
    machine.forward(10 * SECOND)
    services = start()
    services.clock_corrections.keep()
    assert charged(services, lease) == 20
    assert over(services) == []
    machine.forward(HOUR - 21 * SECOND)
    assert over(services) == []
    machine.forward(SECOND)
    assert over(services) == [lease.id]
    assert charged(services, lease) == 3600


# A step that lasts.


@pytest.mark.parametrize(("step", "lasts"), [(-2 * HOUR, LASTS), (YEAR, LASTS_LONG)])
def test_times_follow_a_lasting_clock_step_but_durations_stay(
    start: Start, machine: Machine, step: int, lasts: int
) -> None:
    services = start()
    seconds = (lasts + 3 * HOUR) // SECOND
    lease = session(services, machine, seconds=seconds)
    machine.forward(MINUTE)
    step_clock(services, machine, step)
    machine.forward(lasts)
    services.ledger.charge_all()
    verdict = services.clock_corrections.keep()
    assert verdict is not None and verdict.event == "followed"
    assert services.clock() == machine.engine_now
    passed = (MINUTE + lasts) // SECOND
    assert charged(services, lease) == passed
    moved = services.leases.get(lease.id)
    assert moved.ends_at == services.clock() + timedelta(seconds=seconds - passed)
    machine.forward(30 * SECOND)
    ended = services.leases.release(lease.id, ended_at=machine.engine_now, reason="stopped")
    assert ended.charged == (passed + 30) * MICRO
    assert problems(services.store) == []
    told = [entry.detail for entry in services.audit.trail() if entry.action == "clock"]
    assert len(told) == 2 and all("wall clock" in text for text in told)


async def test_other_processes_follow_a_corrected_clock(start: Start, machine: Machine) -> None:
    """A call that began before the correction is repeated with the new time."""
    hub, service = start("hub"), start("service")
    lease = session(hub, machine)
    step_clock(service, machine, 2 * HOUR, LASTS)
    with pytest.raises(ClockWasSet), hub.store.write():
        pass

    lease = session(hub, machine, "grace")
    step_clock(service, machine, -2 * HOUR, LASTS)
    ended_at = machine.engine_now
    ended = await hub.run(hub.leases.release, lease.id, ended_at=ended_at, reason="stopped")
    assert ended.charged == LASTS // SECOND * MICRO
    assert hub.clock() == service.clock() == machine.engine_now


def test_write_fails_once_after_another_thread_moves_the_clock(
    start: Start, machine: Machine
) -> None:
    services = start()
    services.clock_corrections.keep()
    step_clock(services, machine, 2 * HOUR)
    machine.forward(LASTS)
    services.clock()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(services.clock_corrections.keep).result()
    with pytest.raises(ClockWasSet), services.store.write():
        pass
    assert services.clock() == machine.engine_now
    with services.store.write():
        pass


def test_waiting_time_is_unchanged_by_a_clock_step(start: Start, machine: Machine) -> None:
    services = start()
    for user in "abcd":
        session(services, machine, user)
    request = Request(devices=1, environment="pytorch")
    asked = services.queue.ask(ServerRef("eve"), request, engine="docker", terms=Terms(wait=True))
    assert isinstance(asked, Ticket)
    services.positions.standings()
    now = services.clock()
    away = Estimate(*(now.timestamp() + 3600 * hours for hours in (1, 2, 3)))
    with services.store.write() as connection:
        store_estimates(connection, {asked.id: away}, now, now)
    machine.forward(MINUTE)
    step_clock(services, machine, 2 * HOUR, LASTS)
    [ticket] = services.queue.waiting()
    assert services.clock() - ticket.created_at == timedelta(microseconds=MINUTE + LASTS)
    with services.store.read() as connection:
        [estimate] = estimates_since(connection, ticket.created_at)[0].values()
    moved = ticket.created_at.timestamp() - asked.created_at.timestamp()
    assert moved and estimate.estimate
    for before, after in zip(astuple(away), astuple(estimate.estimate), strict=True):
        assert after - before == pytest.approx(moved), "as far from now as before"
    assert estimate.at - now.timestamp() == pytest.approx(moved)
    [standing] = services.positions.standings().values()
    assert standing.place == 1
    open_lease = services.leases.open_leases()[0]
    known = services.line.scheduler.running[open_lease.id]
    assert open_lease.ends_at and known.ends_at == open_lease.ends_at.timestamp()


# A reboot.


@pytest.mark.parametrize("boot_id", ["boot-2", "boot-1"], ids=["its own id", "boots have no id"])
def test_machine_crash_stops_charges_at_the_last_check(
    start: Start, machine: Machine, boot_id: str
) -> None:
    """Docker reports a container that the crash ended as ended after the boot."""
    services = start()
    lease = session(services, machine)
    machine.forward(100 * SECOND)
    services.clock_corrections.keep()
    machine.forward(5 * SECOND)
    machine.reboot(off=8 * HOUR)
    machine.boot_id = boot_id
    services = start()
    services.clock_corrections.keep()
    see(services, lease, machine.engine_now)
    assert services.leases.get(lease.id).charged == 100 * MICRO
    assert services.clock() == machine.engine_now


def restart_with_a_wrong_clock(
    start: Start, machine: Machine, wrong: int, seconds: int = 3600
) -> tuple[Services, Lease, str]:
    """A session of a cluster's goes on while this machine is off for a minute, and boots with a
    wrong wall clock; what its first look makes of that."""
    lease = session(start(), machine, seconds=seconds)
    machine.forward(100 * SECOND)
    start().clock_corrections.keep()
    machine.reboot(off=MINUTE)
    machine.set_wall_clock(wrong)
    services = start()
    verdict = services.clock_corrections.keep()
    see(services, lease)
    return services, lease, verdict.event if verdict else ""


@pytest.mark.parametrize("wrong", [-2 * HOUR, YEAR])
def test_wrong_clock_after_boot_does_not_end_or_overcharge(
    start: Start, machine: Machine, wrong: int
) -> None:
    services, lease, event = restart_with_a_wrong_clock(start, machine, wrong)
    assert event == "stepped"
    assert charged(services, lease) == 120
    assert over(services) == []
    step_clock(services, machine, -wrong)
    assert 120 <= charged(services, lease) <= 160


def receipt(services: Services, lease: Lease) -> dict[str, float]:
    """What the receipt of a session shows, by its reason."""
    with services.store.read() as connection:
        found = reports.items_of_account(connection, lease.id, lease.account).entries
    return {entry.reason: entry.amount / MICRO for entry in found}


@pytest.mark.parametrize("when", ["at the end", "after the end"])
def test_overcharge_by_a_fast_clock_after_boot_is_refunded(
    start: Start, machine: Machine, when: str
) -> None:
    """A clock that is two hours fast looks like a machine that was off for two hours."""
    services, lease, _ = restart_with_a_wrong_clock(start, machine, 2 * HOUR, seconds=24 * 3600)
    assert charged(services, lease) == 7200 + 160
    if when == "at the end":
        step_clock(services, machine, -2 * HOUR, LASTS)
        ended = services.leases.release(lease.id, stopped_at=services.clock(), reason="stopped")
        assert ended.charged == (160 + LASTS // SECOND) * MICRO
        assert receipt(services, lease)["Charged too much for ada"] == 7200 - LASTS // SECOND
        assert problems(services.store) == []
        return
    machine.forward(10 * SECOND)
    ended = services.leases.release(lease.id, stopped_at=services.clock(), reason="stopped")
    assert ended.charged == (7200 + 170) * MICRO
    step_clock(services, machine, -2 * HOUR, LASTS)
    assert services.leases.get(lease.id).charged == 170 * MICRO
    why = "the clock was 7,200 s ahead after the machine's start"
    assert receipt(services, lease)[why] == 7200
    step_clock(start("another"), machine, -2 * HOUR, LASTS)
    assert services.leases.get(lease.id).charged == 170 * MICRO
    assert problems(services.store) == []


# What an engine says.


@pytest.mark.parametrize("step", [2 * HOUR, -2 * HOUR])
@pytest.mark.parametrize("lasts", [0, LASTS])
def test_container_holds_its_device_despite_a_clock_step(
    start: Start, machine: Machine, step: int, lasts: int
) -> None:
    services = start()
    lease = session(services, machine)
    machine.forward(MINUTE)
    if step < 0:
        machine.set_wall_clock(step)
    started_at = machine.engine_now
    if step > 0:
        machine.set_wall_clock(step)
    services.clock_corrections.keep()
    machine.forward(lasts)
    services.clock_corrections.keep()
    lease = services.leases.get(lease.id)
    container = {
        "Config": {"Env": []},
        "HostConfig": {"DeviceRequests": [{"DeviceIDs": list(lease.uuids)}]},
        "State": {"StartedAt": started_at.isoformat().replace("+00:00", "Z")},
    }
    assert was_given(container, lease, services.time.stamp_error)


# What admins are told.


async def test_admins_are_warned_of_a_doubtful_clock_step(start: Start, machine: Machine) -> None:
    services = start()
    async with ScriptedHub().serving() as hub:
        tick = make_tick(services, hub)
        await tick.round("Clock", tick.keep_clock)
        assert services.time.step == timedelta()
        machine.set_wall_clock(2 * HOUR)
        await tick.round("Clock", tick.keep_clock)
        assert services.time.step == timedelta(hours=2)
        assert "The wall clock was set by +7,200 s" in tick._trouble["Clock"]
        machine.set_wall_clock(-2 * HOUR)
        await tick.round("Clock", tick.keep_clock)
        assert services.time.step == timedelta()
        assert tick._trouble == {}
    told = [entry.detail for entry in services.audit.trail() if entry.action == "clock"]
    assert len(told) == 2 and "right again" in told[0] + told[1]


SERVICE = """
import json, sys
from tests.support.brokers import make_services
services = make_services(database_url=sys.argv[1], device_source="simulated:4xA100-80GB")
verdict = services.clock_corrections.keep()
services.ledger.charge_all()
[lease] = services.leases.open_leases()
over = len(services.sessions.due_sessions().over)
print(json.dumps([verdict.event, lease.charged, over, services.clock().isoformat()]))
"""


def test_service_started_after_a_clock_step_charges_correctly(
    processes: None, database_url: str
) -> None:
    """The hub's process keeps the old time; the new one has only the kernel and the store."""
    services = open_services(database_url, **A_CREDIT_A_SECOND)
    request, terms = Request(devices=1, environment="pytorch"), Terms(seconds=3600)
    lease = services.leases.grant(ServerRef("ada"), request, engine="docker", terms=terms)
    lease = services.leases.confirm(lease.id)
    command = wall_clock_apart(-YEAR // SECOND)([sys.executable, "-c", SERVICE, database_url])
    before = services.clock()
    done = subprocess.run(command, stdout=subprocess.PIPE, cwd=REPO, check=True, text=True)
    after = services.clock()
    event, charged, over, now = json.loads(done.stdout)
    assert (event, over) == ("stepped", 0)
    assert before < datetime.fromisoformat(now) < after
    assert lease.started_at is not None
    passed = [(at - lease.started_at).total_seconds() for at in (before, after)]
    assert passed[0] <= charged / MICRO <= passed[1]
    services.store.close()


@pytest.fixture
def other_time(postgres: PrivatePostgres) -> Iterator[int]:
    """The seconds by which PostgreSQL's clock is off from its next start on."""
    seconds, before = -YEAR // SECOND, postgres.around
    postgres.around = apart(seconds)
    yield seconds
    postgres.halt()
    postgres.around = before
    postgres.start()


def test_clock_step_on_the_database_host_has_no_effect(
    postgres: PrivatePostgres, other_time: int, machine: Machine
) -> None:
    services = open_services(postgres.migrated_database(), **A_CREDIT_A_SECOND)
    services.clock = services.store.clock = SteadyClock(services.store, machine.read)
    lease = session(services, machine)
    machine.forward(10 * SECOND)
    assert charged(services, lease) == 10
    postgres.halt()
    postgres.start()
    assert postgres.seconds_ahead() == pytest.approx(other_time, abs=60)
    services.clock_corrections.keep()
    machine.forward(10 * SECOND)
    assert charged(services, lease) == 20
    assert over(services) == []
    ended = services.leases.release(lease.id, ended_at=machine.engine_now, reason="stopped")
    assert ended.charged == 20 * MICRO
    assert problems(services.store) == []
    services.store.close()
