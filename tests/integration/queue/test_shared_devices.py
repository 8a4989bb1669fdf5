"""Slots of shared devices in the queue. Real: services, SQLite. Simulated: devices and clock."""

from __future__ import annotations

from datetime import timedelta
from fractions import Fraction
from typing import Any

import pytest

from gpuspawner.core.errors import CannotExtend, NoDeviceFree, TooMuchAsked
from gpuspawner.leases import repository as leases_repository
from gpuspawner.leases.models import Lease, Request, ServerRef, Sharing, Terms
from gpuspawner.queue.models import Ticket
from gpuspawner.services import Services
from tests.support.brokers import Clock, Make, acquire, broken_invariants

TWO = {"device_source": "simulated:2xT4", "shared_devices": {"T4": 4}}
"""Two devices with four slots each."""


def ask(
    services: Services,
    user: str,
    sharing: Sharing = Sharing.SLOT,
    devices: int = 1,
    server: str = "",
    memory_bytes: int = 0,
    **terms: Any,
) -> Lease | Ticket:
    """What a member gets who asks for a share, or for whole devices."""
    asked = Terms(**{"wait": True, "seconds": 3600, **terms})
    request = Request(devices=devices, sharing=sharing, memory_bytes=memory_bytes)
    return services.queue.ask(ServerRef(user, server), request, engine="docker", terms=asked)


def leased(services: Services, user: str, sharing: Sharing = Sharing.SLOT, **more: Any) -> Lease:
    lease = ask(services, user, sharing, **more)
    assert isinstance(lease, Lease)
    return services.leases.confirm(lease.id, started_at=services.clock())


def waits(services: Services, user: str, sharing: Sharing = Sharing.SLOT, **more: Any) -> Ticket:
    Clock.of(services).forward(seconds=1)  # in this order
    ticket = ask(services, user, sharing, **more)
    assert isinstance(ticket, Ticket)
    return ticket


def turns(services: Services) -> list[str]:
    return services.queue.turns(frozenset(ticket.id for ticket in services.queue.waiting()))


def start_all(services: Services) -> list[Lease]:
    """Start whoever's turn it is."""
    started = [services.queue.start_ticket(ticket_id) for ticket_id in turns(services)]
    return [services.leases.confirm(x.id, started_at=services.clock()) for x in started]


def release(services: Services, *leases: Lease) -> None:
    for lease in leases:
        services.leases.release(lease.id, stopped_at=services.clock(), reason="stopped")


def places(leases: list[Lease]) -> list[tuple[int, int]]:
    """The index and the slot of each."""
    return [(lease.devices[0].index, lease.devices[0].slot) for lease in leases]


def test_tickets_fill_partly_used_devices_first(make: Make) -> None:
    services = make(**TWO)
    full = [leased(services, f"m{number}") for number in range(8)]
    assert places(full) == [(0, slot) for slot in range(4)] + [(1, slot) for slot in range(4)]
    tickets = [waits(services, f"w{number}") for number in range(4)]
    release(services, *full[:4], full[5])
    assert turns(services) == [ticket.id for ticket in tickets]
    assert places(start_all(services)) == [(1, 1), (0, 0), (0, 1), (0, 2)]
    services.positions.sync()
    assert list(services.line.supply.free.values()) == [Fraction(1, 4)]


def test_member_never_gets_two_slots_of_a_device(make: Make) -> None:
    services = make(**TWO)
    first = leased(services, "ada")
    others = [leased(services, f"m{number}") for number in range(7)]
    ticket = waits(services, "ada", server="second")
    release(services, others[0])
    assert turns(services) == [], "the free slot is beside her other one"
    standing = services.positions.standings()[ticket.id]
    assert standing.why == "a share of a GPU; none is free"
    release(services, first)
    assert [lease.devices[0].index for lease in start_all(services)] == [0]
    one, two = (waits(services, "ada", server=name) for name in ("third", "fourth"))
    release(services, *others[1:])
    assert turns(services) == [one.id, two.id], "before the lease of either"
    services.queue.start_ticket(one.id)
    with pytest.raises(NoDeviceFree):
        services.queue.start_ticket(two.id)
    assert [ticket.id for ticket in services.queue.waiting()] == [two.id]
    assert len({x.uuids for x in services.leases.open_leases() if x.server.user == "ada"}) == 2


def test_whole_shared_device_is_gathered(make: Make, clock: Clock) -> None:
    services = make(**TWO)
    short = [leased(services, f"s{number}", seconds=1800) for number in range(4)]
    long = [leased(services, f"l{number}", seconds=7200) for number in range(4)]
    whole = waits(services, "wanda", Sharing.WHOLE)
    services.queue.move(whole.id, 1, actor="kim")
    slots = [waits(services, f"w{number}") for number in range(2)]
    release(services, short[0], long[0])
    # Half an hour more, and the first device is empty: what lasts an hour gets the other one.
    (started,) = start_all(services)
    assert started.ticket_id == slots[0].id and started.devices[0].index == 1
    clock.forward(minutes=29)
    assert services.positions.standings()[whole.id].latest == short[1].ends_at
    release(services, *short[1:])
    (started,) = start_all(services)
    assert started.ticket_id == whole.id and started.device_equivalents == 1
    assert {device.held_slots for device in started.devices} == {4}
    assert [ticket.id for ticket in services.queue.waiting()] == [slots[1].id]


def test_several_whole_shared_devices_are_gathered(make: Make, clock: Clock) -> None:
    services = make(device_source="simulated:3xT4", shared_devices={"T4": 2})
    short = [leased(services, f"s{number}", seconds=1800) for number in range(2)]
    long = [leased(services, f"l{number}", seconds=7200) for number in range(2)]
    idle = leased(services, "ida", Sharing.WHOLE)
    two = waits(services, "wanda", Sharing.WHOLE, devices=2)
    services.queue.move(two.id, 1, actor="kim")
    slot = waits(services, "sid", seconds=7200)
    release(services, short[0], idle)
    # The last device is free, the first one is in half an hour: nobody else gets them for longer.
    assert turns(services) == []
    assert services.positions.standings()[two.id].latest == short[1].ends_at
    clock.forward(minutes=20)
    brief = waits(services, "bea", seconds=300)
    (started,) = start_all(services)
    assert started.ticket_id == brief.id, "it ends before"
    release(services, started, short[1])
    (started,) = start_all(services)
    assert started.ticket_id == two.id and started.device_equivalents == 2
    assert [(device.index, device.held_slots) for device in started.devices] == [(0, 2), (2, 2)]
    release(services, long[0])
    (started,) = start_all(services)
    assert started.ticket_id == slot.id and broken_invariants(services) == {}


def test_share_of_several_slots_waits_until_they_are_free_together(make: Make) -> None:
    services = make(**TWO)
    small = [leased(services, f"m{number}") for number in range(8)]
    large = waits(services, "lara", memory_bytes=10 * 10**9)
    assert services.positions.standings()[large.id].why == (
        "a share of a GPU with 10 GB; none is free"
    )
    release(services, small[0], small[4], small[6])
    assert turns(services) == [], "one slot of a device, and two of the other"
    release(services, small[7])
    (started,) = start_all(services)
    assert started.ticket_id == large.id
    assert started.devices[0].share == Fraction(3, 4) and started.devices[0].index == 1
    assert started.rate == 3 * small[0].rate
    taken = services.store.run(leases_repository.taken)
    mine = sorted(place.slot for place, lease_id in taken.items() if lease_id == started.id)
    assert mine == [0, 2, 3], "they need not be next to each other"
    assert broken_invariants(services) == {}
    with pytest.raises(TooMuchAsked, match="The largest share of a GPU has 12 GB: ask for less"):
        ask(services, "max", memory_bytes=14 * 10**9)


def test_requests_that_the_queue_never_serves_are_refused(make: Make) -> None:
    services = make(device_source="simulated:1xA100-80GB,2xT4", shared_devices={"T4": 4})
    refused = pytest.raises(
        TooMuchAsked, match=r"of one model: 1 A100-80GB and 2 T4\. Ask for 2 at"
    )
    with refused:
        ask(services, "ada", Sharing.WHOLE, devices=3)
    acquire(services, "owner", model="A100")
    with refused:
        ask(services, "ada", Sharing.WHOLE, devices=3)
    with pytest.raises(TooMuchAsked, match="A share is of one GPU, and you asked for 2"):
        ask(services, "ada", devices=2)
    assert services.queue.waiting() == []
    assert isinstance(ask(services, "ada", Sharing.WHOLE), Lease)


def test_limits_count_slots_as_parts(make: Make) -> None:
    services = make(**TWO, member_limits={"devices": 1, "gpu_hours": 1})
    for number in range(2):
        ticket = waits(services, "ada", server=str(number))
        assert turns(services) == [ticket.id]
        services.queue.start_ticket(ticket.id)
    ticket = waits(services, "ada", Sharing.WHOLE, server="whole")
    assert turns(services) == []
    why = services.positions.standings()[ticket.id].why
    assert "may have 1 GPU at once and has 1/2." in why
    with pytest.raises(TooMuchAsked, match=r"You asked for 1\.5 GPU-hours, but your limit is 1"):
        ask(services, "bob", seconds=6 * 3600)
    none = make(**TWO, member_limits={"devices": 0})
    with pytest.raises(TooMuchAsked, match="You asked for 1/4 of a GPU, but your limit is 0"):
        ask(none, "bob")


def test_outlook_counts_parts_of_devices(make: Make) -> None:
    services = make(**TWO)
    leased(services, "ada")
    slot, whole = Request(devices=1, sharing=Sharing.SLOT), Request(devices=1)
    found = services.positions.outlooks({"slot": slot, "whole": whole}, member="bob")
    assert (found["slot"].free, found["slot"].total, found["slot"].at_once) == (
        Fraction(7, 4),
        2,
        True,
    )
    assert (found["whole"].free, found["whole"].total, found["whole"].at_once) == (1, 2, True)
    own = services.positions.outlooks({"slot": slot}, member="ada")["slot"]
    assert (own.free, own.at_once) == (1, True), "not beside her other slot"


def test_preemptible_runs_yield_all_slots_of_a_device(make: Make, clock: Clock) -> None:
    services = make(**TWO)
    for number in range(8):
        clock.forward(seconds=1)
        server = ServerRef(f"m{number}", f"run:{number}")
        terms = Terms(wait=True, seconds=7200, preemptible=True)
        request = Request(devices=1, sharing=Sharing.SLOT)
        lease = services.queue.ask(server, request, engine="docker", terms=terms)
        assert isinstance(lease, Lease)
        services.leases.confirm(lease.id, started_at=clock.now)
    assert not services.queue.has_spare(Request(devices=1, sharing=Sharing.SLOT), "zoe")
    ticket = waits(services, "wanda", Sharing.WHOLE)
    assert turns(services) == [], "their devices come back in two minutes"
    yielding = [lease for lease in services.leases.open_leases() if lease.yields_at]
    assert len(yielding) == 4 and len({lease.uuids for lease in yielding}) == 1
    assert turns(services) == []
    assert sum(bool(lease.yields_at) for lease in services.leases.open_leases()) == 4
    release(services, *yielding)
    assert [lease.ticket_id for lease in start_all(services)] == [ticket.id]
    slot = waits(services, "sam")
    assert turns(services) == []
    assert sum(bool(lease.yields_at) for lease in services.leases.open_leases()) == 1
    assert services.positions.standings()[slot.id].latest is not None


def test_extension_of_a_slot_that_delays_a_whole_request_is_refused(
    make: Make, clock: Clock
) -> None:
    services = make(device_source="simulated:1xT4", shared_devices={"T4": 4})
    first, second = leased(services, "ada", seconds=7200), leased(services, "bob")
    clock.forward(minutes=10)
    services.extensions.extend(first.id, actor="ada")
    ticket = waits(services, "wanda", Sharing.WHOLE)
    ends_at = services.leases.get(first.id).ends_at
    assert services.positions.standings()[ticket.id].latest == ends_at
    clock.forward(minutes=10)
    with pytest.raises(CannotExtend, match="1 member waits for this GPU and would start later"):
        services.extensions.extend(first.id, actor="ada")
    longer = services.extensions.extend(second.id, actor="bob").ends_at
    assert longer == clock.now + timedelta(hours=1) < ends_at, "it delays nobody"


def test_past_slots_teach_estimates_of_all_shared_devices(make: Make, clock: Clock) -> None:
    services = make(**TWO)
    for number in range(8):
        leased(services, f"m{number}")
    for number in range(80):
        waits(services, f"w{number}")
        services.positions.store_estimates()
        clock.forward(minutes=9)
        release(services, services.leases.open_leases()[0])
        start_all(services)
    ticket = waits(services, "zoe")
    fresh = make(**TWO)  # learns from what is stored
    for known in (services, fresh):
        known.positions.sync()
        waiting = known.line.scheduler.waiting[ticket.id]
        assert (waiting.devices, len(waiting.kinds)) == (Fraction(1, 4), 2)
        now = clock.now.timestamp()
        estimate = known.line.estimator.guess(waiting, now, Fraction(1, 4))
        assert estimate is not None and now + 60 < estimate.likely < now + 3600
