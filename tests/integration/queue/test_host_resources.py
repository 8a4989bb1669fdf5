"""Starts that wait for memory and CPU of the host. Real: services, threads, SQLite, PostgreSQL.
Simulated: the devices and the clock."""

from __future__ import annotations

from typing import Any

import pytest

from gpuspawner.core.errors import CannotExtend, HostFull, NoDeviceFree, TooMuchAsked
from gpuspawner.leases.host_resources import NOTHING, HostAmount
from gpuspawner.leases.models import Lease, Request, ServerRef, Terms
from gpuspawner.queue.models import Ticket
from gpuspawner.services import Services
from tests.support.brokers import Clock, Make, acquire
from tests.support.parts import each_database

GB = 2**30
BUDGET = {"host_memory": "36G", "system_memory": "4G"}
"""32 GB for servers."""


def ask(
    services: Services, user: str, devices: int = 0, memory: int = 0, **terms: Any
) -> Lease | Ticket:
    """Ask as a spawn does."""
    request = Request(devices=devices, environment="pytorch", host_memory_bytes=memory * GB)
    return services.queue.ask(
        ServerRef(user), request, engine="docker", terms=Terms(**{"wait": True, **terms})
    )


def waits(services: Services, user: str, devices: int = 0, memory: int = 0, **terms: Any) -> Ticket:
    """The ticket of somebody for whom too little is left."""
    got = ask(services, user, devices, memory, **terms)
    assert isinstance(got, Ticket)
    return got


def turns(services: Services) -> list[str]:
    """Who gets their turn now, if all spawns are there."""
    present = frozenset(ticket.id for ticket in services.queue.waiting())
    users = {ticket.id: ticket.server.user for ticket in services.queue.waiting()}
    return [users[ticket_id] for ticket_id in services.queue.turns(present)]


@each_database
def test_server_without_a_gpu_waits_for_memory(make: Make) -> None:
    services = make(**BUDGET)
    first = ask(services, "ada", 0, 20)
    assert isinstance(first, Lease)
    ticket = waits(services, "bob", 0, 16)
    assert isinstance(ask(services, "cyd", 0, 12), Lease), "what fits need not wait"
    assert isinstance(ask(services, "dee"), Lease), "nor what is guaranteed nothing"
    assert turns(services) == []
    position = services.positions.standings()[ticket.id]
    assert position.why == "16.0 GB of memory (0 bytes free)"
    assert position.sentence(services.clock()) == (
        "You are the only one in the queue. Waiting for 16.0 GB of memory (0 bytes free)."
    )
    services.leases.release(first.id, reason="stopped")
    assert turns(services) == ["bob"]
    lease = services.queue.start_ticket(ticket.id)
    assert lease.devices == () and lease.host == HostAmount(16 * GB)
    assert services.queue.waiting() == []


def test_gpu_request_waits_for_memory_with_that_reason(make: Make) -> None:
    services = make(**BUDGET)
    first = acquire(services, "ada", 3, host_memory_bytes=30 * GB)
    assert waits(services, "bob", 1, 16)
    waits(services, "cyd", 2, 16)
    reasons = [position.why for position in services.positions.standings().values()]
    assert sorted(reasons) == [
        "16.0 GB of memory (2.0 GB free)",
        "2 GPUs, and for 16.0 GB of memory (2.0 GB free)",
    ]
    assert turns(services) == []
    services.leases.release(first.id, reason="stopped")
    assert set(turns(services)) == {"bob", "cyd"}


def test_start_that_is_not_to_wait_is_told_what_is_missing(make: Make) -> None:
    services = make(**BUDGET)
    ask(services, "ada", 0, 20)
    with pytest.raises(HostFull, match=r"needs 16.0 GB of memory \(12.0 GB free\)"):
        ask(services, "bob", 0, 16, wait=False)
    with pytest.raises(NoDeviceFree, match=r"16.0 GB of memory \(12.0 GB free\)"):
        ask(services, "bob", 1, 16, wait=False)
    waits(services, "cyd", 0, 16)
    with pytest.raises(HostFull):
        ask(services, "bob", 0, 13, wait=False)
    with pytest.raises(TooMuchAsked, match=r"this machine has 32.0 GB of memory"):
        ask(services, "bob", 0, 33)


def test_outlook_says_what_the_host_lacks(make: Make, clock: Clock) -> None:
    services = make(**BUDGET)

    def outlook(devices: int, memory: int) -> tuple[bool, str]:
        request = Request(devices=devices, host_memory_bytes=memory * GB)
        found = services.positions.outlooks({"": request}, "zoe")[""]
        return found.at_once, found.lacking

    assert outlook(1, 16) == outlook(0, 16) == (True, "")
    ask(services, "ada", 0, 20)
    clock.forward(minutes=1)
    lacking = "16.0 GB of memory (12.0 GB free)"
    assert outlook(1, 16) == outlook(0, 16) == (False, lacking)
    assert outlook(1, 8) == outlook(0, 8) == (True, "")
    waits(services, "bob", 0, 16)
    clock.forward(minutes=1)
    assert outlook(1, 16) == outlook(0, 16) == (False, lacking)
    assert outlook(1, 8) == outlook(0, 8) == (True, "")


def test_memory_is_kept_for_who_has_waited_long_for_it(make: Make, clock: Clock) -> None:
    services = make(**BUDGET)
    first = ask(services, "ada", 0, 20)
    old = waits(services, "bob", 0, 16)
    assert turns(services) == []
    clock.forward(minutes=9)
    assert turns(services) == []
    assert isinstance(ask(services, "cyd", 0, 4), Lease)
    clock.forward(minutes=2)
    assert turns(services) == []
    assert waits(services, "dee", 0, 4)
    assert turns(services) == []
    services.leases.release(first.id, reason="stopped")
    assert turns(services) == ["bob", "dee"]
    services.queue.start_ticket(old.id)


def test_pause_of_grants_holds_back_no_server_without_a_gpu(make: Make) -> None:
    services = make(**BUDGET)
    first = ask(services, "ada", 0, 20)
    waits(services, "bob", 0, 16)
    waits(services, "cyd", 1, 16)
    services.devices.pause(actor="root", reason="a fan")
    assert isinstance(ask(services, "dee", 0, 4), Lease)
    services.leases.release(first.id, reason="stopped")
    assert turns(services) == ["bob"]


def test_ticket_for_memory_outlives_its_process(make: Make) -> None:
    services = make(**BUDGET)
    ask(services, "ada", 0, 20)
    ticket = waits(services, "bob", 0, 16)
    again = services.queue.ticket(ticket.id)
    assert again.request == ticket.request and again.request.host == HostAmount(16 * GB)
    other = make(**BUDGET)
    assert turns(other) == []
    assert other.positions.standings()[ticket.id].why == "16.0 GB of memory (12.0 GB free)"
    assert turns(make()) == ["bob"], "without a budget, nobody waits for it"


def test_preemptible_run_yields_its_memory(make: Make, clock: Clock) -> None:
    services = make(**BUDGET)
    run = services.queue.ask(
        ServerRef("ada", "run:1"),
        Request(devices=1, host_memory_bytes=20 * GB),
        engine="docker",
        terms=Terms(preemptible=True),
    )
    assert isinstance(run, Lease)
    waits(services, "bob", 0, 16)
    assert turns(services) == []
    assert services.leases.get(run.id).yields_at is not None
    services.leases.release(run.id, reason="preempted")
    assert turns(services) == ["bob"]
    with pytest.raises(HostFull):
        services.queue.ask(
            ServerRef("ada", "run:2"),
            Request(devices=1, host_memory_bytes=20 * GB),
            engine="docker",
            terms=Terms(preemptible=True),
        )


def test_nobody_waiting_gets_the_memory_of_a_restart(make: Make) -> None:
    services = make(**BUDGET)
    lease = ask(services, "ada", 1, 20)
    assert isinstance(lease, Lease)
    services.leases.confirm(lease.id)
    for user, devices in (("bob", 0), ("cyd", 1)):
        waits(services, user, devices, 16)
    services.restarts.tell_lost(lease.id)
    services.restarts.restart(lease.id, actor="ada")
    services.leases.release(lease.id, reason="stopped")
    assert turns(services) == []
    reasons = {position.why for position in services.positions.standings().values()}
    assert reasons == {"16.0 GB of memory (12.0 GB free)"}
    again = ask(services, "ada", 1, 20)
    assert isinstance(again, Lease) and again.uuids == lease.uuids
    services.leases.release(again.id, reason="stopped")
    assert set(turns(services)) == {"bob", "cyd"}


def test_session_is_not_extended_while_others_wait_for_its_memory(make: Make, clock: Clock) -> None:
    services = make(**BUDGET)
    lease = ask(services, "ada", 1, 20, seconds=3600)
    assert isinstance(lease, Lease)
    services.leases.confirm(lease.id)
    clock.forward(minutes=10)
    waits(services, "bob", 0, 16)
    with pytest.raises(CannotExtend):
        services.extensions.extend(lease.id, actor="ada")


@each_database
def test_racing_requests_leave_the_budget_whole(make: Make) -> None:
    """All ask at once, and the rounds start what fits until everybody had their turn."""
    services = make(**BUDGET, member_limits={})
    services.monitoring.overview()

    def race(number: int) -> Lease | Ticket:
        return ask(services, f"m{number}", number % 2, 1 + number % 9)

    got = list(services.store.executor.map(race, range(40)))
    assert any(isinstance(each, Ticket) for each in got)
    budget = services.leases.budget
    assert budget is not None
    served = 0
    while services.queue.waiting():
        present = frozenset(ticket.id for ticket in services.queue.waiting())
        for ticket_id in services.queue.turns(present):
            services.queue.start_ticket(ticket_id)
        held = services.leases.open_leases()
        assert sum((lease.host for lease in held), NOTHING).fits(budget.total)
        services.leases.release(held[0].id, reason="stopped")
        served += 1
        assert served <= 40
