"""One estimate of a ticket for everybody: the granting hub stores it, all others show that one.
Real: line, estimators, processes, SQLite, PostgreSQL; devices simulated."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from gpuspawner.queue import repository
from gpuspawner.queue.models import Estimate, StoredEstimate, Ticket
from gpuspawner.queue.positions import FRESH_SECONDS, LOOK_SECONDS, TRIED
from gpuspawner.services import Services
from tests.support import racing_line
from tests.support.brokers import Clock, Make, running
from tests.support.parts import each_database
from tests.support.racers import together
from tests.support.racing_line import all_shown
from tests.support.sessions import line_up

T4 = {"device_source": "simulated:1xT4"}


def learn(services: Services, clock: Clock, waits: int = 24) -> None:
    """See so many members wait for the one device, longer and longer."""
    for number in range(waits):
        lease = running(services, "ada")
        clock.forward(minutes=1)
        ticket = line_up(services, "bob")
        clock.forward(minutes=1 + number % 7)
        services.positions.store_estimates()
        clock.forward(minutes=30 + number)
        services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
        [turn] = services.queue.turns(frozenset({ticket.id}))
        lease = services.leases.confirm(services.queue.start_ticket(turn).id, "container")
        services.positions.sync()
        clock.forward(minutes=20)
        services.leases.release(lease.id, ended_at=clock.now, reason="stopped")


def look(services: Services) -> int:
    """What the hub does in a round, once turns were given."""
    services.positions.sync()
    return services.positions.store_estimates()


def stored(services: Services) -> dict[str, StoredEstimate]:
    """The estimates of all waiting tickets in the store."""
    ever = datetime(2000, 1, 1, tzinfo=timezone.utc)
    return services.store.run(lambda c: repository.estimates_since(c, ever))[0]


def hub_with_a_ticket(make: Make, clock: Clock) -> tuple[Services, Ticket]:
    """A hub that has seen its queue for a while, and a ticket that waits there now."""
    hub = make(**T4)
    learn(hub, clock)
    running(hub, "ada")
    return hub, line_up(hub, "bob")


def minutes_away(services: Services, minutes: float) -> Estimate:
    """An estimate that no process would give by itself: it starts so many minutes from now."""
    low = services.clock().timestamp() + 60 * minutes
    return Estimate(low, low + 300, low + 600)


def store(services: Services, ticket: Ticket, estimate: Estimate | None) -> None:
    """Store an estimate now."""
    now = services.clock()
    with services.store.write() as connection:
        repository.store_estimates(connection, {ticket.id: estimate}, now, now)


@pytest.mark.usefixtures("processes")
def test_every_process_shows_the_estimate_that_the_hub_stored(
    make: Make, clock: Clock, database_url: str
) -> None:
    """The hub has seen the queue; the others read what is in the store when they start."""
    hub, ticket = hub_with_a_ticket(make, clock)
    assert stored(hub)[ticket.id].estimate, "in the same transaction"
    elsewhere = (racing_line.shown_elsewhere, database_url, clock.now, ticket.id)
    [service] = together(elsewhere)
    assert service == all_shown(hub, ticket)
    assert look(hub) == 0, "no other author, no other estimate"

    clock.forward(minutes=20)  # nobody stores any
    elsewhere = (racing_line.shown_elsewhere, database_url, clock.now, ticket.id)
    own, [other] = all_shown(hub, ticket), together(elsewhere)
    assert "8 of 10" in own["page"] and "8 of 10" in other["page"]
    assert own != other, "each has learned something else"

    assert look(hub) == 1

    service, command = together(elsewhere, elsewhere)
    assert service == command == all_shown(hub, ticket) != other


def test_long_queue_and_moved_ticket_get_estimates_in_the_next_round(
    make: Make, clock: Clock
) -> None:
    hub = make(**T4)
    learn(hub, clock)
    running(hub, "ada")
    for number in range(TRIED + 2):
        line_up(hub, f"m{number}")
    look(hub)
    last = line_up(hub, "bob")
    assert last.id not in stored(hub)
    look(hub)
    before = stored(hub)[last.id].estimate
    hub.queue.move(last.id, 1, actor="root")
    clock.forward(seconds=LOOK_SECONDS)
    look(hub)
    after = hub.positions.standings()[last.id].estimate
    assert before and after and after.high < before.high


def test_stored_estimate_is_kept_while_it_holds(make: Make, clock: Clock) -> None:
    hub, ticket = hub_with_a_ticket(make, clock)
    clock.forward(seconds=LOOK_SECONDS)
    assert look(hub) == 1, "it is old"
    before = stored(hub)[ticket.id]
    for _ in range(3):
        clock.forward(seconds=LOOK_SECONDS / 6)
        assert look(hub) == 0
        hub.positions.standings()
    assert stored(hub)[ticket.id] == before, "no look of anybody writes"
    store(hub, ticket, before.estimate)
    clock.forward(seconds=LOOK_SECONDS / 2)
    assert look(hub) == 0, "it holds"
    clock.forward(seconds=LOOK_SECONDS / 2)
    store(hub, ticket, minutes_away(hub, 5000))
    clock.forward(seconds=LOOK_SECONDS / 2)
    assert look(hub) == 1, "it does not hold"

    hub.devices.pause(actor="root", reason="new disks")
    hub.positions.sync()
    paused = line_up(hub, "cyd")
    clock.forward(seconds=LOOK_SECONDS)
    assert look(hub) == 0 and paused.id not in stored(hub), "none while granting is paused"
    hub.devices.resume(actor="root")
    assert look(hub) > 0 and stored(hub)[paused.id].estimate


def test_stored_estimate_is_shown_while_it_is_fresh_and_possible(make: Make, clock: Clock) -> None:
    service = make(**T4)
    hub, ticket = hub_with_a_ticket(make, clock)
    store(hub, ticket, minutes_away(hub, 0.5))
    clock.forward(seconds=100)
    told = hub.positions.standings()[ticket.id].estimate
    assert told and told.low == clock.now.timestamp() < told.likely, "not in the past"

    store(hub, ticket, minutes_away(hub, 5000))
    clock.forward(seconds=FRESH_SECONDS - 1)
    told, known = service.positions.standings()[ticket.id].estimate, stored(hub)[ticket.id].estimate
    assert told and known and told.low == known.low
    clock.forward(seconds=2)  # the hub that stores them has been down for minutes
    own = service.positions.standings()[ticket.id].estimate
    assert own and own.high < told.low


@pytest.mark.usefixtures("processes")
@each_database
def test_racing_authors_leave_the_newest_estimate(make: Make, database_url: str) -> None:
    """Two hubs during a takeover, and somebody who ends tickets meanwhile."""
    services = make()
    ids = racing_line.make_line(services, 24)
    authors = [(racing_line.store_again_and_again, database_url, ids, n, 5) for n in (1, 2)]
    *written, _ = together(*authors, (racing_line.end_some, database_url, ids[::3]))

    expected: dict[str, StoredEstimate] = {}
    for at, based_on, ticket_id, estimate in sorted(
        (each for some in written for each in some), key=lambda each: each[0]
    ):
        known = expected.get(ticket_id)
        if known is None or known.at <= based_on.timestamp():
            expected[ticket_id] = StoredEstimate(at.timestamp(), estimate)
    found = stored(services)
    assert found.keys() == set(ids) - set(ids[::3])
    for ticket_id, each in found.items():
        assert each == expected[ticket_id], "whole, of one author, and none that is older"
    assert all(services.queue.ticket(i).version == 1 for i in found), "no process reads it again"
