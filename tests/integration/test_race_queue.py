"""Cancels while grants run. Real: processes, threads, SQLite, PostgreSQL; devices simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from gpuspawner.queue import repository as queue_repository
from gpuspawner.services import Broker
from tests.support import racing_line
from tests.support.brokers import open_broker, problems
from tests.support.racers import together

pytestmark = pytest.mark.usefixtures("processes")

TICKETS = 420
CANCELS = 200


@pytest.fixture
def database_url(each_database_url: str) -> str:
    """The queries, locks and constraints here are each database's own."""
    return each_database_url


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    broker = open_broker(database_url, refresh_seconds=60)
    broker.overview()
    yield broker
    broker.store.close()


def check(
    broker: Broker, ids: list[str], started: list[str], cancels: list[tuple[str, str]]
) -> None:
    """Every ticket has the one end that was told, and who was granted has one lease."""
    leases = broker.leases_of(None, limit=10 * TICKETS)
    assert Counter(lease.ticket_id for lease in leases) == Counter(started)
    assert max(Counter(started).values()) == 1, "none is granted twice"
    with broker.store.read() as connection:
        found = {ticket.id: ticket for ticket in queue_repository.some_tickets(connection, ids)}
    granted = {ticket.id for ticket in found.values() if ticket.outcome == "granted"}
    cancelled = {ticket.id for ticket in found.values() if ticket.outcome == "cancelled"}
    assert granted == set(started)
    assert granted | cancelled == set(ids) and not granted & cancelled, "none is lost"
    assert {found[lease.ticket_id or ""].lease_id for lease in leases} == {x.id for x in leases}
    for ticket_id, outcome in cancels:
        assert found[ticket_id].outcome == outcome, "what was answered is what is written"
    assert cancelled <= {ticket_id for ticket_id, _ in cancels}
    noted = Counter(change.subject for change in broker.trail(10 * TICKETS))
    assert noted == Counter(f"ticket {found[i].id} of {found[i].server}" for i in cancelled)
    assert len(cancels) == CANCELS and cancelled and len(granted) >= TICKETS - CANCELS
    assert broker.waiting() == [] and broker.open_leases() == []
    assert problems(broker.store) == []


def test_200_cancels_while_200_grants_run_in_processes(broker: Broker, database_url: str) -> None:
    """The hub grants; two services, of which each cancels on four threads."""
    ids, pace = racing_line.make_line(broker, TICKETS), racing_line.Pace(CANCELS)
    hub = (racing_line.hub_grants, database_url, ids, pace)
    services = [
        (racing_line.service_cancels, database_url, pace, CANCELS // 2, 2, seed)
        for seed in (0, 100)
    ]
    started, *cancels = together(hub, *services)
    check(broker, ids, started, [entry for some in cancels for entry in some])


def test_200_cancels_while_200_grants_run_in_threads(broker: Broker) -> None:
    """One hub, whose members stop their spawns while others get their turn."""
    ids, pace = racing_line.make_line(broker, TICKETS), racing_line.Pace(CANCELS)
    granting = broker.store.executor.submit(racing_line.grant_all, broker, ids, pace)
    cancels = racing_line.cancel_on_threads(broker, pace, CANCELS, 1, seed=0)
    check(broker, ids, granting.result(), cancels)
