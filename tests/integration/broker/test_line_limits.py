"""Limits of members and groups in line. Real: broker, SQLite and PostgreSQL; devices simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpuspawner.core.errors import TooManyTickets, TooMuchAsked
from gpuspawner.leases.models import Lease, Request, ServerRef
from gpuspawner.queue.models import Ticket
from gpuspawner.queue.service import Terms
from gpuspawner.services import Broker
from tests.support.brokers import acquire

Make = Callable[..., Broker]


def ask(broker: Broker, user: str, server: str = "", devices: int = 1, **terms: Any) -> Any:
    asking = Terms(wait=True, **{"groups": frozenset({"guests"}), **terms})
    request = Request(devices=devices)
    return broker.ask(ServerRef(user, server), request, engine="docker", terms=asking)


@pytest.mark.parametrize(
    "limits", [{"member_limits": {"devices": 2}}, {"group_limits": {"guests": {"devices": 2}}}]
)
def test_more_than_a_limit_allows_is_refused_and_not_left_waiting(
    make: Make, limits: dict[str, Any]
) -> None:
    broker = make(**limits)
    with pytest.raises(TooMuchAsked, match=r"You asked for 3 GPUs, and 2 at once is your limit\."):
        ask(broker, "anna", devices=3)
    assert broker.waiting() == []
    assert isinstance(ask(broker, "anna", devices=2), Ticket), "its turn comes"
    (ticket,) = broker.waiting()
    assert broker.turns(frozenset({ticket.id})) == [ticket.id]


def test_more_hours_than_a_limit_allows_are_refused(make: Make) -> None:
    broker = make(member_limits={"gpu_hours": 4})
    with pytest.raises(TooMuchAsked, match="You asked for 6 GPU-hours, and 4 is your limit"):
        ask(broker, "anna", devices=2, seconds=3 * 3600)
    assert isinstance(ask(broker, "anna", devices=2, seconds=2 * 3600), Ticket)


def test_a_limit_that_is_reached_keeps_waiting_and_says_so(make: Make) -> None:
    broker = make(member_limits={"devices": 2, "tickets": 3})
    lease = acquire(broker, "anna", 2, "one")
    ticket = ask(broker, "anna", "two")
    assert broker.turns(frozenset({ticket.id})) == []
    assert "2 GPUs at once" in broker.standings()[ticket.id].why
    broker.release(lease.id, reason="stopped")
    assert broker.turns(frozenset({ticket.id})) == [ticket.id]


def test_another_request_for_the_same_server_takes_the_place_of_the_first(make: Make) -> None:
    broker = make(member_limits={"tickets": 1})
    acquire(broker, "owner", 4)
    first = ask(broker, "anna")
    assert ask(broker, "anna") == first, "the same again is the same ticket"
    with pytest.raises(TooManyTickets):
        ask(broker, "anna", "other")
    second = ask(broker, "anna", devices=2)
    assert broker.ticket(first.id).outcome == "replaced"
    assert [ticket.id for ticket in broker.waiting()] == [second.id]
    assert not isinstance(second, Lease)


def test_other_hours_for_the_same_devices_keep_the_place(make: Make) -> None:
    broker = make(
        member_limits={"tickets": 1, "gpu_hours": 8}, group_limits={"guests": {"tickets": 2}}
    )
    acquire(broker, "owner", 4)
    first = ask(broker, "anna", seconds=3600)
    ask(broker, "bert")
    again = ask(broker, "anna", seconds=7200)
    assert (again.id, again.created_at, again.seconds) == (first.id, first.created_at, 7200)
    assert broker.ticket(first.id) == again, "it is written down"
    assert broker.line.scheduler.waiting[first.id].seconds == 7200, "and counts from now on"
    with pytest.raises(TooMuchAsked, match="You asked for 9 GPU-hours, and 8 is your limit"):
        ask(broker, "anna", seconds=9 * 3600)
    assert broker.ticket(first.id) == again
