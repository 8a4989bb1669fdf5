"""Steps of the wall clock. Real: SQLite and PostgreSQL; the machine's clocks are the test's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from gpuspawner.core.clock import DAY, LASTS, LASTS_LONG, MINUTE, SECOND, Reading, to_datetime
from gpuspawner.core.errors import ClockWasSet
from gpuspawner.core.units import MICRO
from gpuspawner.db.clock import SteadyClock, read_clocks
from gpuspawner.engines.docker import was_given
from gpuspawner.leases.models import Lease, Request, ServerRef, Sighting
from gpuspawner.leases.reconciliation import HubState
from gpuspawner.ledger import statements
from gpuspawner.queue.service import Terms
from gpuspawner.services import Broker
from tests.support.brokers import open_broker, problems
from tests.support.clocks import apart, wall_clock_apart
from tests.support.postgres import PrivatePostgres
from tests.support.processes import REPO
from tests.support.rounds import ScriptedHub, make_tick

HOUR = 60 * MINUTE
YEAR = 365 * DAY
NOW = 1_800_000_000 * SECOND
STEPS = pytest.mark.parametrize("step", [2 * HOUR, -2 * HOUR, YEAR, -YEAR])


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


Start = Callable[..., Broker]


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def start(database_url: str, machine: Machine) -> Iterator[Start]:
    """Start a process with a broker on the store. Each ``name`` is a process of its own."""
    started: dict[str, Broker] = {}

    def start(name: str = "service") -> Broker:
        if name in started:
            started[name].store.close()  # it was killed
        url = database_url.replace("sqlite:////", f"sqlite:////{'./' * len(name)}")
        if url == database_url:
            url += f"?application_name={name}"
        broker = open_broker(url, opening_grant=100_000, gpu_rates={"*": 3600})  # a credit a second
        broker.clock = broker.store.clock = SteadyClock(broker.store, machine.read)
        started[name] = broker
        return broker

    yield start
    for broker in started.values():
        broker.store.close()


def session(broker: Broker, machine: Machine, user: str = "ada", seconds: int = 3600) -> Lease:
    """A session of an hour that began now."""
    request = Request(devices=1, environment="pytorch")
    terms = Terms(seconds=seconds)
    lease = broker.acquire(ServerRef(user), request, engine="docker", terms=terms)
    return broker.confirm(lease.id, f"container-{user}", started_at=machine.engine_now)


def charged(broker: Broker, lease: Lease) -> float:
    broker.ledger.charge_all()
    return broker.lease(lease.id).charged / MICRO


def over(broker: Broker) -> list[str]:
    return [lease.id for lease in broker.due_sessions().over]


# While processes run.


@STEPS
def test_a_step_during_a_session_changes_neither_charge_nor_end(
    start: Start, machine: Machine, step: int
) -> None:
    broker = start()
    lease = session(broker, machine)
    machine.forward(6 * SECOND)
    machine.set_wall_clock(step)
    broker.keep_clock()
    machine.forward(8 * SECOND)
    assert charged(broker, lease) == 14
    assert over(broker) == []
    machine.set_wall_clock(-step)
    broker.keep_clock()
    machine.forward(6 * SECOND)
    ended = broker.release(lease.id, ended_at=machine.engine_now, reason="stopped")
    assert ended.charged == 20 * MICRO
    assert problems(broker.store) == []


@STEPS
def test_a_server_that_ends_after_a_step_is_charged_up_to_its_end(
    start: Start, machine: Machine, step: int
) -> None:
    """Docker stamps the end with the wall clock."""
    broker = start()
    lease = session(broker, machine)
    machine.forward(30 * SECOND)
    machine.set_wall_clock(step)
    machine.forward(10 * SECOND)
    died_at = machine.engine_now
    machine.forward(25 * SECOND)
    exited = Sighting(
        lease_id=lease.id,
        ref=lease.engine_ref,
        server=lease.server,
        alive=False,
        ended_at=died_at,
    )
    broker.reconcile({"docker": [exited]}, {})
    assert broker.lease(lease.id).charged == 40 * MICRO


@STEPS
def test_a_start_before_a_step_is_charged_from_its_start(
    start: Start, machine: Machine, step: int
) -> None:
    broker = start()
    request = Request(devices=1, environment="pytorch")
    lease = broker.acquire(ServerRef("ada"), request, engine="docker")
    machine.forward(2 * SECOND)
    started_at = machine.engine_now
    machine.set_wall_clock(step)
    machine.forward(20 * SECOND)
    lease = broker.confirm(lease.id, "container", started_at=started_at)
    machine.forward(10 * SECOND)
    assert charged(broker, lease) == 30


@STEPS
def test_a_step_between_a_crash_and_a_restart_changes_nothing(
    start: Start, machine: Machine, step: int
) -> None:
    lease = session(start(), machine)
    machine.forward(10 * SECOND)
    machine.set_wall_clock(step)
    machine.forward(10 * SECOND)
    broker = start()
    broker.keep_clock()
    assert charged(broker, lease) == 20
    assert over(broker) == []
    machine.forward(HOUR - 21 * SECOND)
    assert over(broker) == []
    machine.forward(SECOND)
    assert over(broker) == [lease.id]
    assert charged(broker, lease) == 3600


# A step that lasts.


@pytest.mark.parametrize(
    ("step", "lasts"), [(2 * HOUR, LASTS), (-2 * HOUR, LASTS), (YEAR, LASTS_LONG)]
)
def test_times_follow_a_step_that_lasts_and_no_duration_changes(
    start: Start, machine: Machine, step: int, lasts: int
) -> None:
    broker = start()
    seconds = (lasts + 3 * HOUR) // SECOND
    lease = session(broker, machine, seconds=seconds)
    machine.forward(MINUTE)
    machine.set_wall_clock(step)
    broker.keep_clock()
    machine.forward(lasts)
    broker.ledger.charge_all()
    verdict = broker.keep_clock()
    assert verdict is not None and verdict.event == "followed"
    assert broker.clock() == machine.engine_now
    passed = (MINUTE + lasts) // SECOND
    assert charged(broker, lease) == passed
    moved = broker.lease(lease.id)
    assert moved.ends_at == broker.clock() + timedelta(seconds=seconds - passed)
    machine.forward(30 * SECOND)
    ended = broker.release(lease.id, ended_at=machine.engine_now, reason="stopped")
    assert ended.charged == (passed + 30) * MICRO
    assert problems(broker.store) == []
    told = [entry.detail for entry in broker.trail() if entry.action == "clock"]
    assert len(told) == 2 and all("wall clock" in text for text in told)


async def test_other_processes_follow_when_one_moved_the_clock(
    start: Start, machine: Machine
) -> None:
    """What was begun by the old time is done again by the new one."""
    hub, service = start("hub"), start("service")
    lease = session(hub, machine)
    machine.set_wall_clock(2 * HOUR)
    service.keep_clock()
    machine.forward(LASTS)
    service.keep_clock()
    with pytest.raises(ClockWasSet), hub.store.write():
        pass

    lease = session(hub, machine, "grace")
    machine.set_wall_clock(-2 * HOUR)
    service.keep_clock()
    machine.forward(LASTS)
    service.keep_clock()
    ended = await hub.run(hub.release, lease.id, ended_at=machine.engine_now, reason="stopped")
    assert ended.charged == LASTS // SECOND * MICRO
    assert hub.clock() == service.clock() == machine.engine_now


def test_a_time_read_before_another_thread_moved_the_clock_is_not_written(
    start: Start, machine: Machine
) -> None:
    broker = start()
    broker.keep_clock()
    machine.set_wall_clock(2 * HOUR)
    broker.keep_clock()
    machine.forward(LASTS)
    broker.clock()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(broker.keep_clock).result()
    with pytest.raises(ClockWasSet), broker.store.write():
        pass
    assert broker.clock() == machine.engine_now
    with broker.store.write():
        pass


def test_who_waits_has_waited_as_long_as_before(start: Start, machine: Machine) -> None:
    broker = start()
    for user in "abcd":
        session(broker, machine, user)
    request = Request(devices=1, environment="pytorch")
    broker.ask(ServerRef("eve"), request, engine="docker", terms=Terms(wait=True))
    broker.standings()
    machine.forward(MINUTE)
    machine.set_wall_clock(2 * HOUR)
    broker.keep_clock()
    machine.forward(LASTS)
    broker.keep_clock()
    [ticket] = broker.waiting()
    assert broker.clock() - ticket.created_at == timedelta(microseconds=MINUTE + LASTS)
    [standing] = broker.standings().values()
    assert standing.place == 1
    open_lease = broker.open_leases()[0]
    known = broker.line.scheduler.running[open_lease.id]
    assert open_lease.ends_at and known.ends_at == open_lease.ends_at.timestamp()


@pytest.mark.parametrize("small", [3 * SECOND, -3 * SECOND, 59 * SECOND, -59 * SECOND])
def test_small_corrections_are_followed_and_charge_nothing(
    start: Start, machine: Machine, small: int
) -> None:
    broker = start()
    lease = session(broker, machine)
    machine.forward(MINUTE)
    machine.set_wall_clock(small)
    broker.keep_clock()
    assert broker.clock() == machine.engine_now
    assert charged(broker, lease) == 60


# A reboot.


def test_a_crash_of_the_machine_ends_what_ran_on_it_then(start: Start, machine: Machine) -> None:
    """Docker says of what the crash ended that it ended after the boot."""
    broker = start()
    lease = session(broker, machine)
    machine.forward(100 * SECOND)
    broker.keep_clock()
    machine.forward(5 * SECOND)
    machine.reboot(off=8 * HOUR)
    broker = start()
    broker.keep_clock()
    exited = Sighting(
        lease_id=lease.id,
        ref=lease.engine_ref,
        server=lease.server,
        alive=False,
        ended_at=machine.engine_now,
    )
    broker.reconcile({"docker": [exited]}, {})
    assert broker.lease(lease.id).charged == 100 * MICRO
    assert broker.clock() == machine.engine_now


@pytest.mark.parametrize("wrong", [-2 * HOUR, -YEAR, YEAR])
def test_a_wall_clock_that_is_wrong_after_a_boot_ends_and_charges_nothing(
    start: Start, machine: Machine, wrong: int
) -> None:
    """What runs elsewhere, as on a cluster's nodes, goes on meanwhile."""
    broker = start()
    lease = session(broker, machine)
    machine.forward(100 * SECOND)
    broker.keep_clock()
    machine.reboot(off=MINUTE)
    machine.set_wall_clock(wrong)
    broker = start()
    verdict = broker.keep_clock()
    assert verdict is not None and verdict.event == "stepped"
    alive = Sighting(lease_id=lease.id, ref=lease.engine_ref, server=lease.server, alive=True)
    broker.reconcile({"docker": [alive]}, {lease.server: HubState.READY})
    assert charged(broker, lease) == 120
    assert over(broker) == []
    machine.set_wall_clock(-wrong)
    broker.keep_clock()
    assert 120 <= charged(broker, lease) <= 160


def restart_with_a_clock_ahead(start: Start, machine: Machine) -> tuple[Broker, Lease]:
    """A session of a cluster's goes on while this machine is off for a minute, and boots with a
    wall clock that is two hours ahead, which nobody can tell from having been off."""
    lease = session(start(), machine, seconds=24 * 3600)
    machine.forward(100 * SECOND)
    start().keep_clock()
    machine.reboot(off=MINUTE)
    machine.set_wall_clock(2 * HOUR)
    broker = start()
    broker.keep_clock()
    alive = Sighting(lease_id=lease.id, ref=lease.engine_ref, server=lease.server, alive=True)
    broker.reconcile({"docker": [alive]}, {lease.server: HubState.READY})
    return broker, lease


def correct_the_clock(broker: Broker, machine: Machine) -> None:
    machine.set_wall_clock(-2 * HOUR)
    broker.keep_clock()
    machine.forward(LASTS)
    broker.keep_clock()


def receipt(broker: Broker, lease: Lease) -> dict[str, float]:
    """What the receipt of a session shows, by its reason."""
    with broker.store.read() as connection:
        found = statements.items_of_account(connection, lease.id, lease.account).entries
    return {entry.reason: entry.amount / MICRO for entry in found}


def test_what_a_wrong_clock_after_a_boot_charged_comes_back_at_the_end(
    start: Start, machine: Machine
) -> None:
    broker, lease = restart_with_a_clock_ahead(start, machine)
    assert charged(broker, lease) == 7200 + 160
    correct_the_clock(broker, machine)
    ended = broker.release(lease.id, stopped_at=broker.clock(), reason="stopped")
    assert ended.charged == (160 + LASTS // SECOND) * MICRO
    assert receipt(broker, lease)["Charged too much for ada"] == 7200 - LASTS // SECOND
    assert problems(broker.store) == []


def test_what_a_wrong_clock_after_a_boot_charged_comes_back_after_the_end(
    start: Start, machine: Machine
) -> None:
    broker, lease = restart_with_a_clock_ahead(start, machine)
    machine.forward(10 * SECOND)
    ended = broker.release(lease.id, stopped_at=broker.clock(), reason="stopped")
    assert ended.charged == (7200 + 170) * MICRO
    correct_the_clock(broker, machine)
    assert broker.lease(lease.id).charged == 170 * MICRO
    why = "the clock was 7,200 s ahead after the machine's start"
    assert receipt(broker, lease)[why] == 7200
    correct_the_clock(start("another"), machine)
    assert broker.lease(lease.id).charged == 170 * MICRO
    assert problems(broker.store) == []


def test_a_boot_is_noticed_where_boots_have_no_id(start: Start, machine: Machine) -> None:
    lease = session(start(), machine)
    machine.forward(100 * SECOND)
    start().keep_clock()
    machine.reboot(off=HOUR)
    machine.boot_id = "boot-1"
    broker = start()
    broker.keep_clock()
    assert broker.clock() == machine.engine_now
    assert broker.release(lease.id, reason="the server was gone").charged <= 100 * MICRO


# What an engine says.


@pytest.mark.parametrize("small", [59 * SECOND, -59 * SECOND, 3 * SECOND, -3 * SECOND])
def test_a_server_that_ends_before_a_small_correction_is_charged_up_to_its_end(
    start: Start, machine: Machine, small: int
) -> None:
    broker = start()
    lease = session(broker, machine)
    machine.forward(90 * SECOND)
    alive = Sighting(lease_id=lease.id, ref=lease.engine_ref, server=lease.server, alive=True)
    broker.reconcile({"docker": [alive]}, {lease.server: HubState.READY})
    machine.forward(10 * SECOND)
    died_at = machine.engine_now
    machine.forward(SECOND)
    broker.keep_clock()
    machine.set_wall_clock(small)
    machine.forward(SECOND)
    broker.keep_clock()
    machine.forward(SECOND)
    broker.reconcile({"docker": [replace(alive, alive=False, ended_at=died_at)]}, {})
    assert broker.lease(lease.id).charged == 100 * MICRO


@pytest.mark.parametrize("step", [2 * HOUR, -2 * HOUR])
@pytest.mark.parametrize("lasts", [0, LASTS])
def test_a_container_given_the_device_after_the_grant_holds_it_whatever_the_clock_says(
    start: Start, machine: Machine, step: int, lasts: int
) -> None:
    broker = start()
    lease = session(broker, machine)
    machine.forward(MINUTE)
    if step < 0:
        machine.set_wall_clock(step)
    started_at = machine.engine_now
    if step > 0:
        machine.set_wall_clock(step)
    broker.keep_clock()
    machine.forward(lasts)
    broker.keep_clock()
    lease = broker.lease(lease.id)
    container = {
        "Config": {"Env": []},
        "HostConfig": {"DeviceRequests": [{"DeviceIDs": list(lease.uuids)}]},
        "State": {"StartedAt": started_at.isoformat().replace("+00:00", "Z")},
    }
    assert was_given(container, lease, broker.stamp_error)


@pytest.mark.parametrize("small", [59 * SECOND, -59 * SECOND, 3 * SECOND, -3 * SECOND])
def test_a_small_correction_changes_no_later_charge(
    start: Start, machine: Machine, small: int
) -> None:
    broker = start()
    machine.forward(MINUTE)
    broker.keep_clock()
    machine.set_wall_clock(small)
    machine.forward(SECOND)
    broker.keep_clock()
    machine.forward(HOUR)
    request = Request(devices=1, environment="pytorch")
    lease = broker.acquire(ServerRef("ada"), request, engine="docker")
    machine.forward(20 * SECOND)
    started_at = machine.engine_now
    machine.forward(20 * SECOND)
    lease = broker.confirm(lease.id, "container", started_at=started_at)
    machine.forward(80 * SECOND)
    died_at = machine.engine_now
    machine.forward(30 * SECOND)
    assert broker.release(lease.id, ended_at=died_at, reason="exited").charged == 100 * MICRO


# What admins are told.


async def test_admins_are_told_while_a_step_is_doubted(start: Start, machine: Machine) -> None:
    broker = start()
    async with ScriptedHub().serving() as hub:
        tick = make_tick(broker, hub)
        await tick.round("Clock", tick.keep_clock)
        assert broker.clock_step == timedelta()
        machine.set_wall_clock(2 * HOUR)
        await tick.round("Clock", tick.keep_clock)
        assert broker.clock_step == timedelta(hours=2)
        assert "The wall clock was set by +7,200 s" in tick._trouble["Clock"]
        machine.set_wall_clock(-2 * HOUR)
        await tick.round("Clock", tick.keep_clock)
        assert broker.clock_step == timedelta()
        assert tick._trouble == {}
    told = [entry.detail for entry in broker.trail() if entry.action == "clock"]
    assert len(told) == 2 and "right again" in told[0] + told[1]


SERVICE = """
import json, sys
from tests.support.brokers import make_broker
broker = make_broker(database_url=sys.argv[1], device_source="simulated:4xA100-80GB")
verdict = broker.keep_clock()
broker.ledger.charge_all()
[lease] = broker.open_leases()
over = len(broker.due_sessions().over)
print(json.dumps([verdict.event, lease.charged, over, broker.clock().isoformat()]))
"""


@pytest.mark.parametrize("step", [7200, -7200, 31_536_000, -31_536_000])
def test_a_service_that_starts_after_a_step_goes_on_as_before(
    processes: None, database_url: str, step: int
) -> None:
    """The hub's process keeps the old time; the new one has only the kernel and the store."""
    broker = open_broker(database_url, opening_grant=100_000, gpu_rates={"*": 3600})
    request, terms = Request(devices=1, environment="pytorch"), Terms(seconds=3600)
    lease = broker.acquire(ServerRef("ada"), request, engine="docker", terms=terms)
    lease = broker.confirm(lease.id)
    command = wall_clock_apart(step)([sys.executable, "-c", SERVICE, database_url])
    before = broker.clock()
    done = subprocess.run(command, stdout=subprocess.PIPE, cwd=REPO, check=True, text=True)
    after = broker.clock()
    event, charged, over, now = json.loads(done.stdout)
    assert (event, over) == ("stepped", 0)
    assert before < datetime.fromisoformat(now) < after
    assert lease.started_at is not None
    passed = [(at - lease.started_at).total_seconds() for at in (before, after)]
    assert passed[0] <= charged / MICRO <= passed[1]
    broker.store.close()


@pytest.mark.parametrize("step", [7200, -7200, 31_536_000, -31_536_000])
def test_a_step_on_the_host_of_the_database_changes_nothing(
    postgres_servers: None, machine: Machine, step: int
) -> None:
    with PrivatePostgres() as server:
        broker = open_broker(server.fresh_database(), opening_grant=100_000, gpu_rates={"*": 3600})
        broker.clock = broker.store.clock = SteadyClock(broker.store, machine.read)
        lease = session(broker, machine)
        machine.forward(10 * SECOND)
        assert charged(broker, lease) == 10
        server.halt()
        server.around = apart(step)
        server.start()
        assert server.seconds_ahead() == pytest.approx(step, abs=60)
        broker.keep_clock()
        machine.forward(10 * SECOND)
        assert charged(broker, lease) == 20
        assert over(broker) == []
        ended = broker.release(lease.id, ended_at=machine.engine_now, reason="stopped")
        assert ended.charged == 20 * MICRO
        assert problems(broker.store) == []
        broker.store.close()


def test_the_machines_own_clocks_agree() -> None:
    one, two = read_clocks(), read_clocks()
    assert one.boot_id == two.boot_id
    passed = two.since_boot - one.since_boot
    assert passed >= 0
    assert abs((two.wall - one.wall) - passed) < SECOND
