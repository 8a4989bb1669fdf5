"""What tickets members may have. Real: services, SQLite. Simulated: the devices and the clock."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from gpuspawner.core.errors import TooManyTickets, TooMuchAsked
from gpuspawner.leases.models import Lease
from tests.support.brokers import Clock, Make, acquire
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


def test_ticket_without_a_spawn_lets_others_pass_in_time(make: Make, clock: Clock) -> None:
    services = make(device_source="simulated:1xT4")
    lease = acquire(services, "owner")
    dan = line_up(services, "dan")
    clock.forward(minutes=1)
    eve = line_up(services, "eve")
    present = frozenset({eve.id})
    assert services.queue.turns(present) == []
    services.leases.release(lease.id, reason="stopped")
    assert services.queue.turns(present) == [], "dan's spawn may be on its way"
    clock.forward(minutes=3)
    assert services.queue.turns(present) == [eve.id]
    assert {ticket.id for ticket in services.queue.waiting()} == {dan.id, eve.id}
