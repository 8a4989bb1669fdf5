"""Requests by memory, granted at once and from the queue. Real: services, SQLite. Simulated:
devices and clock."""

from __future__ import annotations

from random import Random

import pytest

from gpuspawner.catalog.models import DeviceLimits, Environment
from gpuspawner.core.errors import TooMuchAsked
from gpuspawner.leases.models import Lease, Request, ServerRef, Terms
from gpuspawner.queue import repository
from gpuspawner.queue.models import Ticket
from gpuspawner.services import Services
from gpuspawner.spawners.options import parse, resolve
from tests.support.brokers import Clock, Make
from tests.support.tier import SEED, examples

FLEET = "simulated:2xA100-80GB,3xA100-40GB,1xT4"
"""Two of 80 GB, three of 40 GB, one of 16 GB."""
ANY = Environment(
    slug="any", display_name="Any", image="lab", sharing="any", devices=DeviceLimits(max=8)
)


def request_for(memory: int | None, gpus: int | str = 1) -> Request:
    fields = {"gpus": gpus} if memory is None else {"gpus": gpus, "gpu_memory": memory}
    return resolve(parse(fields), ANY, limit=8)


def ask(
    services: Services, user: str, request: Request, *, preemptible: bool = False
) -> Lease | Ticket:
    Clock.of(services).forward(seconds=1)
    server = ServerRef.of_run(user, f"{user}-1") if preemptible else ServerRef(user)
    terms = Terms(wait=True, seconds=3600, preemptible=preemptible)
    return services.queue.ask(server, request, engine="docker", terms=terms)


def sizes(lease: Lease | Ticket) -> list[int]:
    """The GB of each device, or of each slot, of a lease."""
    assert isinstance(lease, Lease), "it waits"
    return [
        device.memory_bytes * device.held_slots // device.slots // 2**30 for device in lease.devices
    ]


def start_all(services: Services) -> dict[str, Lease]:
    """Start the tickets whose turn it is; their leases by member."""
    ids = frozenset(ticket.id for ticket in services.queue.waiting())
    leases = [services.queue.start_ticket(ticket_id) for ticket_id in services.queue.turns(ids)]
    return {lease.server.user: lease for lease in leases}


def test_direct_grant_takes_the_smallest_that_fits_and_never_waits_for_it(make: Make) -> None:
    services = make(device_source=FLEET)
    found = [sizes(ask(services, f"m{number}", request_for(10))) for number in range(6)]
    assert found == [[16], [40], [40], [40], [80], [80]]


def test_queue_takes_the_smallest_that_fits_and_never_waits_for_it(make: Make) -> None:
    services = make(device_source=FLEET)
    held = [ask(services, f"h{number}", request_for(None)) for number in range(6)]
    for user, request in (
        ("ada", request_for(10)),
        ("bob", request_for(50)),
        ("cyd", request_for(10)),
    ):
        assert isinstance(ask(services, user, request), Ticket)
    of_size = {
        gb: [x for x in held if isinstance(x, Lease) and sizes(x) == [gb]] for gb in (16, 40, 80)
    }

    def release(gb: int) -> None:
        services.leases.release(of_size[gb].pop().id, stopped_at=services.clock(), reason="stopped")

    release(80)
    assert {user: sizes(x) for user, x in start_all(services).items()} == {"ada": [80]}
    for gb in (80, 40, 40, 16):
        release(gb)
    assert {user: sizes(x) for user, x in start_all(services).items()} == {"bob": [80], "cyd": [16]}


def test_queue_gives_other_requests_what_it_gave_before(make: Make) -> None:
    """Of whole devices the kind of which most are free."""
    services = make(device_source=FLEET)
    held = [ask(services, f"h{number}", request_for(None)) for number in range(6)]
    assert isinstance(ask(services, "ada", request_for(None)), Ticket)
    for lease in held:
        services.leases.release(lease.id, stopped_at=services.clock(), reason="stopped")
    assert sizes(start_all(services)["ada"]) == [40]


@pytest.mark.parametrize("is_slot", [False, True], ids=["whole", "slots"])
def test_queue_and_direct_grant_agree(make: Make, is_slot: bool) -> None:
    """The same request at the same moment, before and after a ticket: both get the same size."""
    chance = Random(SEED)
    shared = {"T4": 4, "A100-40GB": 2} if is_slot else {}
    services = make(device_source=FLEET, shared_devices=shared, opening_grant=10**6)
    what: int | str = "share" if is_slot else 1
    open_leases: list[Lease] = []
    for number in range(examples(60)):
        for lease in [x for x in open_leases if chance.random() < 0.4]:
            services.leases.release(lease.id, stopped_at=services.clock(), reason="stopped")
            open_leases.remove(lease)
        memory = chance.choice([1, 4, 10, 16] if is_slot else [1, 16, 24, 40, 60])
        asked = ask(services, f"m{number}", request_for(memory, what))
        if isinstance(asked, Ticket):
            services.queue.end_ticket(asked.id, "cancelled", "not needed")
            continue
        services.leases.release(asked.id, stopped_at=services.clock(), reason="stopped")
        # While granting is paused the same request becomes a ticket.
        services.devices.pause(actor="kim")
        ticket = ask(services, f"m{number}", request_for(memory, what))
        assert isinstance(ticket, Ticket)
        services.devices.resume(actor="kim")
        granted = start_all(services)[f"m{number}"]
        assert sizes(granted) == sizes(asked) and sizes(asked)[0] >= memory
        open_leases.append(granted)


def test_share_is_the_smallest_that_fits(make: Make) -> None:
    services = make(device_source=FLEET, shared_devices={"T4": 4, "A100-40GB": 2, "A100-80GB": 2})
    assert sizes(ask(services, "ada", request_for(30, "share"))) == [40]
    assert sizes(ask(services, "bob", request_for(10, "share"))) == [12], "three slots of the T4"
    assert sizes(ask(services, "cyd", request_for(10, "share"))) == [20], "the T4 has 4 GB left"
    assert sizes(ask(services, "dan", request_for(2, "share"))) == [4]


def test_preemptible_run_takes_the_smallest_spare_device(make: Make) -> None:
    services = make(device_source=FLEET)
    assert sizes(ask(services, "ada", request_for(10), preemptible=True)) == [16]
    assert sizes(ask(services, "bob", request_for(10), preemptible=True)) == [40]
    assert sizes(ask(services, "cyd", request_for(50), preemptible=True)) == [80]


def test_outlook_and_ticket_of_a_request_by_memory(make: Make) -> None:
    services = make(device_source=FLEET)
    outlook = services.positions.outlooks({"": request_for(50)})[""]
    assert (outlook.free, outlook.total, outlook.at_once) == (2, 2, True)
    for user in ("ada", "bob"):
        assert sizes(ask(services, user, request_for(50))) == [80]
    ticket = ask(services, "cyd", request_for(50))
    assert isinstance(ticket, Ticket)
    assert services.positions.standings()[ticket.id].why == "a GPU with 50 GB; none is free"
    stored = services.store.run(lambda connection: repository.get_ticket(connection, ticket.id))
    assert stored.request.smallest and stored.request.memory_bytes == 50 * 10**9


@pytest.mark.parametrize(
    ("memory", "gpus", "words"),
    [
        (90, 1, "This hub has no GPU with 90 GB. The most is 80 GB: ask for less."),
        (30, "share", "The largest share of a GPU has 12 GB: ask for less."),
        (50, 3, "but only 2 with 50 GB or more. Ask for 2 at most."),
    ],
)
def test_more_than_any_device_has_is_refused_with_the_largest(
    make: Make, memory: int, gpus: int | str, words: str
) -> None:
    services = make(device_source=FLEET, shared_devices={"T4": 4})
    with pytest.raises(TooMuchAsked) as refused:
        ask(services, "ada", request_for(memory, gpus))
    assert refused.value.message.endswith(words)
    assert services.queue.waiting() == []
