"""What tickets members may have, and what becomes of them when the clock is set back an hour. Real:
services, SQLite. Simulated: the devices."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from gpuspawner.core.errors import TooManyTickets, TooMuchAsked
from gpuspawner.leases.models import Lease, ServerRef, Sighting
from gpuspawner.leases.reconciliation import HubState
from gpuspawner.ledger.rules import owed
from gpuspawner.services import Services
from tests.support.brokers import T0, Clock, Make, acquire, running
from tests.support.sessions import ask, line_up

asked = partial(ask, wait=True, groups=frozenset({"guests"}))


@pytest.mark.parametrize(
    ("limits", "wide", "fits", "words"),
    [
        (
            {"member_limits": {"devices": 2}},
            {"devices": 3},
            {},
            "for 3 GPUs, but your limit is 2 at once",
        ),
        (
            {"group_limits": {"guests": {"devices": 2}}},
            {"devices": 3},
            {},
            "for 3 GPUs, but your limit is 2",
        ),
        (
            {"member_limits": {"gpu_hours": 4}},
            {"devices": 2, "seconds": 3 * 3600},
            {"seconds": 2 * 3600},
            "for 6 GPU-hours, but your limit is 4",
        ),
    ],
    ids=["devices of a member", "devices of a group", "GPU-hours"],
)
def test_request_above_a_limit_is_refused(
    make: Make, limits: dict[str, Any], wide: dict[str, int], fits: dict[str, int], words: str
) -> None:
    services = make(**limits)
    with pytest.raises(TooMuchAsked, match=rf"You asked {words}"):
        asked(services, "anna", **wide)
    assert services.queue.waiting() == []
    ticket = asked(services, "anna", devices=2, **fits)
    assert services.queue.waiting() == [ticket]
    assert services.queue.turns(frozenset({ticket.id})) == [ticket.id], "its turn comes"


def test_ticket_at_a_device_limit_waits_with_a_reason(make: Make) -> None:
    services = make(member_limits={"devices": 2, "tickets": 3})
    lease = acquire(services, "anna", 2, "one")
    ticket = asked(services, "anna", server="two")
    assert services.queue.turns(frozenset({ticket.id})) == []
    assert "2 GPUs at once" in services.positions.standings()[ticket.id].why
    services.leases.release(lease.id, reason="stopped")
    assert services.queue.turns(frozenset({ticket.id})) == [ticket.id]


def test_new_request_for_a_server_replaces_its_ticket(make: Make) -> None:
    services = make(member_limits={"tickets": 1})
    acquire(services, "owner", 4)
    first = asked(services, "anna")
    assert asked(services, "anna") == first, "the same again is the same ticket"
    with pytest.raises(TooManyTickets):
        asked(services, "anna", server="other")
    second = asked(services, "anna", devices=2)
    assert services.queue.ticket(first.id).outcome == "replaced"
    assert [ticket.id for ticket in services.queue.waiting()] == [second.id]
    assert not isinstance(second, Lease)


def test_changed_hours_keep_the_queue_position(make: Make) -> None:
    services = make(
        member_limits={"tickets": 1, "gpu_hours": 8}, group_limits={"guests": {"tickets": 2}}
    )
    acquire(services, "owner", 4)
    first = asked(services, "anna", seconds=3600)
    asked(services, "bert")
    again = asked(services, "anna", seconds=7200)
    assert (again.id, again.created_at, again.seconds) == (first.id, first.created_at, 7200)
    assert services.queue.ticket(first.id) == again, "it is written down"
    assert services.line.scheduler.waiting[first.id].seconds == 7200, "and counts from now on"
    with pytest.raises(TooMuchAsked, match="You asked for 9 GPU-hours, but your limit is 8"):
        asked(services, "anna", seconds=9 * 3600)
    assert services.queue.ticket(first.id) == again


@pytest.fixture
def services(make: Make, clock: Clock) -> Services:
    """Four devices in use for half an hour, and charged for it."""
    services = make(gpu_rates={"*": 4})
    for number in range(4):
        running(services, f"runner{number}")
    clock.forward(minutes=30)
    assert services.ledger.charge_all() == 4
    return services


def lease_of(services: Services, user: str) -> Lease:
    found = services.leases.of_server(ServerRef(user))
    assert found is not None
    return found


def turns(services: Services) -> list[str]:
    """Whose turn it is, with a spawn for each ticket."""
    waiting = services.queue.waiting()
    users = {ticket.id: ticket.server.user for ticket in waiting}
    return [users[ticket] for ticket in services.queue.turns(frozenset(users))]


def test_queue_continues_after_the_clock_is_set_back(services: Services, clock: Clock) -> None:
    line_up(services, "dan", seconds=7200)
    clock.forward(minutes=10)
    line_up(services, "eve", seconds=7200)
    clock.forward(hours=-1)
    line_up(services, "fay", seconds=7200)
    assert turns(services) == []
    order = services.positions.order()
    assert [standing.place for _, _, standing in order] == [1, 2, 3]
    for ticket, ranked, standing in order:
        [waited] = [part for part in ranked.parts if part.name == "waiting"]
        assert waited.points >= 0, f"{ticket.server} has waited a negative time"
        assert "in the queue" in standing.sentence(clock.now)
    for number, next_one in enumerate([ticket for ticket, _, _ in order]):
        services.leases.release(lease_of(services, f"runner{number}").id, reason="stopped")
        assert turns(services) == [next_one.server.user]
        assert services.queue.start_ticket(next_one.id).granted_at == clock.now
    assert services.queue.waiting() == []


def test_clock_set_back_causes_no_double_charge_or_refund(services: Services, clock: Clock) -> None:
    half_an_hour = 2_000_000
    clock.forward(hours=-1)
    assert services.ledger.charge_all() == 0, "that time was paid for"
    stopped = services.leases.release(
        lease_of(services, "runner0").id, ended_at=clock.now, reason="stopped just now"
    )
    assert stopped.started_at is not None and stopped.ended_at is not None
    assert stopped.ended_at >= stopped.started_at
    assert 0 <= stopped.charged <= half_an_hour
    # Once the clock has caught up, charges are what they always were.
    clock.forward(hours=1, minutes=30)
    assert services.ledger.charge_all() == 3
    still = lease_of(services, "runner1")
    assert still.charged == owed(still.rate, T0, clock.now) == 2 * half_an_hour


def test_clock_set_back_charges_up_to_the_last_sighting(services: Services, clock: Clock) -> None:
    lease = lease_of(services, "runner0")
    open_leases = services.leases.open_leases()
    seen = [Sighting(lease_id=x.id, ref="c", server=x.server, alive=True) for x in open_leases]
    services.leases.reconcile({"docker": seen}, {x.server: HubState.READY for x in open_leases})
    clock.forward(hours=-1)
    ended = services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    assert ended.charged == lease.charged == owed(lease.rate, T0, ended.ended_at or T0)


def test_ticket_without_a_spawn_yields_after_clock_set_back(
    services: Services, clock: Clock
) -> None:
    dan = line_up(services, "dan", seconds=7200)
    clock.forward(minutes=1)
    eve = line_up(services, "eve", seconds=7200)
    present = frozenset({eve.id})
    assert services.queue.turns(present) == []
    clock.forward(hours=-1)
    assert services.queue.turns(present) == []
    services.leases.release(lease_of(services, "runner0").id, reason="stopped")
    assert services.queue.turns(present) == [], "dan's spawn may be on its way"
    clock.forward(minutes=3)
    assert services.queue.turns(present) == [eve.id]
    assert {ticket.id for ticket in services.queue.waiting()} == {dan.id, eve.id}
