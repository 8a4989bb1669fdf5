"""Preemptible runs fill idle devices and delay nobody. Real: services, threads, SQLite, PostgreSQL.
Simulated: four devices and the clock."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.core.errors import InvalidRequest, NoDeviceFree
from gpuspawner.leases.models import YIELD_SECONDS, Lease, Request, ServerRef, Terms
from gpuspawner.queue.models import Ticket
from gpuspawner.runs.models import Run, RunState
from gpuspawner.runs.rules import MOST_RESTARTS
from gpuspawner.services import Services
from tests.integration.runs.test_service import run_of, state_of
from tests.support.brokers import Clock, Make, acquire, migrated_bytes, open_services
from tests.support.parts import each_database

DEVICES = 4


def fill(services: Services, run: Run, devices: int = 1, seconds: int = 7200) -> Lease:
    """Grant a preemptible run what nobody else needs, and see its container."""
    if isinstance(services.clock, Clock):
        services.clock.forward(seconds=1)
    terms = Terms(wait=True, seconds=seconds, preemptible=True)
    request = Request(devices=devices)
    lease = services.queue.ask(run.server, request, engine="docker", terms=terms)
    assert isinstance(lease, Lease)
    return services.leases.confirm(lease.id, "container", started_at=services.clock())


def submitted(services: Services, number: int = 1, **fields: Any) -> Run:
    return services.runs.submit(run_of(number, preemptible=True, **fields))[0]


def ask(services: Services, user: str, devices: int = 1, **terms: Any) -> Lease | Ticket:
    terms = {"wait": True, "seconds": 3600, **terms}
    request = Request(devices=devices)
    return services.queue.ask(ServerRef(user), request, engine="docker", terms=Terms(**terms))


def waits(services: Services, user: str, devices: int = 1, **terms: Any) -> Ticket:
    ticket = ask(services, user, devices, **terms)
    assert isinstance(ticket, Ticket)
    return ticket


def turns(services: Services) -> list[str]:
    return services.queue.turns(frozenset(ticket.id for ticket in services.queue.waiting()))


def yielding(services: Services) -> list[str]:
    return [lease.id for lease in services.leases.open_leases() if lease.yields_at]


def has_ended(services: Services, lease: Lease, exit_code: int | None = None) -> None:
    if exit_code is not None:
        services.runs.note_exit(lease.server.run_id, exit_code)
    services.leases.release(lease.id, stopped_at=services.clock(), reason="it ended")
    services.runs.settle()


def test_run_gets_what_is_idle_for_less(make: Make) -> None:
    services = make(gpu_rates={"*": 60})
    acquire(services, "owner", DEVICES - 1)
    lease = fill(services, submitted(services))
    assert (lease.preemptible, lease.rate) == (True, 30 * 10**6)
    with pytest.raises(NoDeviceFree):
        fill(services, submitted(services, 2))
    assert services.queue.waiting() == [], "it takes nobody's place"


def test_share_of_the_price_is_a_setting(make: Make) -> None:
    services = make(gpu_rates={"*": 1})
    services.prices.settings.preemptible_share = 0.1
    assert fill(services, submitted(services)).rate == 100_000
    assert services.prices.preemptible(1) == 1, "rounded up, as all prices"


@pytest.mark.parametrize("wait", [True, False])
def test_youngest_yields_to_a_session(make: Make, wait: bool) -> None:
    services = make()
    acquire(services, "owner", DEVICES - 2)
    first = fill(services, submitted(services, 1))
    second = fill(services, submitted(services, 2))
    ticket = waits(services, "bob", wait=wait)
    assert turns(services) == [], "its device is not free yet"
    assert yielding(services) == [second.id]
    assert turns(services) == [] and yielding(services) == [second.id], "one is enough"
    ordered = services.leases.get(second.id)
    assert ordered.yields_at is not None
    assert ordered.yields_at - services.clock() < timedelta(seconds=YIELD_SECONDS)

    services.runs.preempt(second.id)
    assert services.leases.get(second.id).outcome == "", "it may save until then"
    Clock.of(services).forward(seconds=YIELD_SECONDS)
    services.runs.preempt(first.id)
    services.runs.preempt(second.id)
    assert services.leases.get(first.id).outcome == ""
    assert services.leases.get(second.id).outcome == "preempted"
    has_ended(services, second)
    assert turns(services) == [ticket.id]
    assert services.queue.start_ticket(ticket.id).devices == second.devices


def test_freed_device_goes_to_who_waits(make: Make) -> None:
    services = make()
    taken = acquire(services, "owner", DEVICES)
    ticket = waits(services, "bob")
    services.leases.release(taken.id, reason="stopped")
    run = submitted(services)
    for _ in range(DEVICES - 1):
        fill(services, submitted(services, random.getrandbits(60)))
    with pytest.raises(NoDeviceFree):
        fill(services, run)
    assert turns(services) == [ticket.id] and yielding(services) == []


def test_request_for_several_gathers_what_is_yielded(make: Make) -> None:
    services = make()
    held = [fill(services, submitted(services, n)) for n in range(1, DEVICES + 1)]
    ticket = waits(services, "bob", DEVICES - 1)
    assert turns(services) == []
    assert sorted(yielding(services)) == sorted(lease.id for lease in held[1:])
    for lease in held[1:]:
        assert turns(services) == []
        with pytest.raises(NoDeviceFree):
            fill(services, submitted(services, random.getrandbits(60)))
        has_ended(services, lease, 143)
    assert turns(services) == [ticket.id]
    assert yielding(services) == [], "the oldest keeps its own"


def test_spare_devices_are_those_that_a_run_gets(make: Make) -> None:
    services = make()
    acquire(services, "owner", DEVICES - 2)
    assert services.queue.has_spare(Request(devices=2))
    assert not services.queue.has_spare(Request(devices=3))
    fill(services, submitted(services), devices=2)
    assert not services.queue.has_spare(Request(devices=1)), "no preemptible run yields to another"


def test_wait_tells_when_it_ends(make: Make) -> None:
    services = make()
    acquire(services, "owner", DEVICES - 1)
    fill(services, submitted(services))
    outlook = services.positions.outlooks({"": Request(devices=1)}, "bob", seconds=3600)[""]
    soon = services.clock() + timedelta(seconds=YIELD_SECONDS)
    assert (outlook.at_once, outlook.latest) == (False, soon)
    ticket = waits(services, "bob")
    standing = services.positions.standings()[ticket.id]
    assert standing.why == "a GPU; none is free (preemptible runs are making room)"
    assert standing.latest is not None
    assert standing.latest <= services.clock() + timedelta(seconds=YIELD_SECONDS)


def test_preempted_run_begins_again_as_often_as_needed(make: Make) -> None:
    services = make()
    acquire(services, "owner", DEVICES - 1)
    run = submitted(services)
    for number in range(MOST_RESTARTS + 2):
        lease = fill(services, run)
        ticket = waits(services, "bob")
        turns(services)
        # Half of the programs save and end themselves, the others are stopped.
        has_ended(services, lease, 1 if number % 2 else 143)
        assert state_of(services, run) is RunState.WAITING
        services.queue.end_ticket(ticket.id, "cancelled", "changed my mind", tell=False)
    again = services.runs.get(run.id).run
    assert (again.preemptions, again.restarts) == (MOST_RESTARTS + 2, 0)


def test_run_that_ends_in_time_is_done(make: Make) -> None:
    services = make()
    acquire(services, "owner", DEVICES - 1)
    run = submitted(services)
    lease = fill(services, run)
    waits(services, "bob")
    turns(services)
    has_ended(services, lease, 0)
    assert state_of(services, run) is RunState.DONE


def test_run_that_its_member_stops_does_not_begin_again(make: Make) -> None:
    services = make()
    acquire(services, "owner", DEVICES - 1)
    run = submitted(services)
    lease = fill(services, run)
    waits(services, "bob")
    turns(services)
    services.runs.stop(run.id, actor="ada")
    has_ended(services, lease, 143)
    assert state_of(services, run) is RunState.STOPPED


def test_run_without_gpu_is_not_preemptible(make: Make) -> None:
    services = make()
    terms = Terms(preemptible=True)
    with pytest.raises(InvalidRequest, match="Only a run with a GPU can be preemptible"):
        services.queue.require_possible(
            ServerRef("ada"), Request(devices=0), engine="docker", terms=terms
        )


def start_all(services: Services) -> None:
    """Start every ticket whose turn it is, and let preemptible runs yield until nothing moves."""
    for _ in range(3 * DEVICES):
        for ticket_id in turns(services):
            services.queue.start_ticket(ticket_id)
        leaving = [lease for lease in services.leases.open_leases() if lease.yields_at]
        for lease in leaving:
            has_ended(services, lease, 143)
        if not leaving:
            return
    raise AssertionError("it moves for ever")


def sessions(services: Services) -> list[ServerRef]:
    return sorted(
        (lease.server for lease in services.leases.open_leases() if not lease.preemptible),
        key=str,
    )


@pytest.fixture
def two_hubs(tmp_path: Path) -> Iterator[tuple[Services, Services]]:
    """Services with a clock and a database each; nothing costs anything."""
    with ExitStack() as stack:
        found = []
        for name in ("filled", "alone"):
            (tmp_path / name).write_bytes(migrated_bytes())
            url = f"sqlite:///{tmp_path / name}"
            found.append(open_services(url, Clock(), gpu_rates={"*": 0}))
            stack.callback(found[-1].store.close)
        yield found[0], found[1]


@pytest.mark.parametrize("seed", range(10))
def test_nobody_is_served_later_because_of_them(
    two_hubs: tuple[Services, Services], seed: int
) -> None:
    """The same day twice: whoever has devices, and when, is the same with preemptible runs."""
    filled, alone = two_hubs
    filler = 0
    random_ = random.Random(seed)
    for number in range(60):
        for services in (filled, alone):
            Clock.of(services).forward(seconds=600)
        match random_.choice(("ask", "ask", "end", "end", "end", "fill", "fill")):
            case "ask":
                user, devices = f"user-{number}", random_.choice((1, 1, 1, 2, 3))
                for services in (filled, alone):
                    ask(services, user, devices, seconds=7200)
            case "end":
                if held := sessions(alone):
                    server = random_.choice(held)
                    for services in (filled, alone):
                        lease = services.leases.of_server(server)
                        assert lease is not None
                        services.leases.release(lease.id, reason="it ended")
            case "fill":
                with suppress(NoDeviceFree):
                    fill(filled, submitted(filled, number + 1), random_.choice((1, 2)), 600)
                    filler += 1
                Clock.of(alone).now = Clock.of(filled).now
        for services in (filled, alone):
            start_all(services)
        assert sessions(filled) == sessions(alone)
    assert filler > 2


@pytest.fixture
def services(database_url: str) -> Iterator[Services]:
    services = open_services(database_url)
    services.monitoring.overview()
    yield services
    services.store.close()


@each_database
def test_sessions_and_fillers_at_once(services: Services) -> None:
    """Every session gets its devices, whatever runs try to take meanwhile."""

    def try_to_fill(number: int) -> None:
        with suppress(NoDeviceFree):
            fill(services, submitted(services, number + 1))

    def start(number: int) -> None:
        got = ask(services, f"user-{number}")
        for _ in range(200):
            if isinstance(got, Lease):
                break
            for ticket_id in services.queue.turns(frozenset({got.id})):
                with suppress(NoDeviceFree):  # another session was faster; this one waits on
                    got = services.queue.start_ticket(ticket_id)
            for lease in services.leases.open_leases():
                if lease.yields_at:
                    has_ended(services, lease, 143)
        assert isinstance(got, Lease), "a session waits for a preemptible run"

    for turn in range(5):
        with ThreadPoolExecutor(2 * DEVICES) as pool:
            fillers = [pool.submit(try_to_fill, 100 * turn + n) for n in range(2 * DEVICES)]
            starts = [pool.submit(start, n) for n in range(DEVICES)]
            for each in (*fillers, *starts):
                each.result(60)
        held = services.leases.open_leases()
        assert len({uuid for lease in held for uuid in lease.uuids}) == len(held) == DEVICES
        assert not [lease for lease in held if lease.preemptible]
        for lease in held:
            services.leases.release(lease.id, reason="stopped")
