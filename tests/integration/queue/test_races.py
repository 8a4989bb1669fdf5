"""Cancels while grants run. Real: processes, threads, SQLite, PostgreSQL; devices simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from gpuspawner.queue import repository as queue_repository
from gpuspawner.services import Services
from tests.support import racing_line
from tests.support.brokers import open_services, problems
from tests.support.parts import each_database
from tests.support.racers import together
from tests.support.tier import SOAK

pytestmark = pytest.mark.usefixtures("processes")

CANCELS = 200 if SOAK else 24
TICKETS = 2 * CANCELS + racing_line.SLACK + 2
"""So many that the last cancel finds some that wait, however late it comes."""


@pytest.fixture
def services(database_url: str) -> Iterator[Services]:
    services = open_services(database_url, refresh_seconds=60)
    services.monitoring.overview()
    yield services
    services.store.close()


def check(
    services: Services, ids: list[str], started: list[str], cancels: list[tuple[str, str]]
) -> None:
    """Every ticket has the one end that was told, and who was granted has one lease."""
    leases = services.leases.of_account(None, limit=10 * TICKETS)
    assert Counter(lease.ticket_id for lease in leases) == Counter(started)
    assert max(Counter(started).values()) == 1, "none is granted twice"
    with services.store.read() as connection:
        found = {ticket.id: ticket for ticket in queue_repository.some_tickets(connection, ids)}
    granted = {ticket.id for ticket in found.values() if ticket.outcome == "granted"}
    cancelled = {ticket.id for ticket in found.values() if ticket.outcome == "cancelled"}
    assert granted == set(started)
    assert granted | cancelled == set(ids) and not granted & cancelled, "none is lost"
    assert {found[lease.ticket_id or ""].lease_id for lease in leases} == {x.id for x in leases}
    for ticket_id, outcome in cancels:
        assert found[ticket_id].outcome == outcome, "what was answered is what is written"
    assert cancelled <= {ticket_id for ticket_id, _ in cancels}
    noted = Counter(change.subject for change in services.audit.trail(10 * TICKETS))
    assert noted == Counter(f"ticket {found[i].id} of {found[i].server}" for i in cancelled)
    assert len(cancels) == CANCELS and cancelled and len(granted) >= TICKETS - CANCELS
    assert services.queue.waiting() == [] and services.leases.open_leases() == []
    assert problems(services.store) == []


@each_database
def test_concurrent_cancels_and_grants_agree_across_processes(
    services: Services, database_url: str
) -> None:
    """The hub grants; two accounting services, of which each cancels on four threads."""
    ids, pace = racing_line.make_line(services, TICKETS), racing_line.Pace(CANCELS)
    hub = (racing_line.hub_grants, database_url, ids, pace)
    cancelling = [
        (racing_line.service_cancels, database_url, pace, CANCELS // 2, 2, seed)
        for seed in (0, 100)
    ]
    started, *cancels = together(hub, *cancelling)
    check(services, ids, started, [entry for some in cancels for entry in some])


def test_concurrent_cancels_and_grants_agree_across_threads(services: Services) -> None:
    """One hub, whose members stop their spawns while others get their turn."""
    ids, pace = racing_line.make_line(services, TICKETS), racing_line.Pace(CANCELS)
    granting = services.store.executor.submit(racing_line.grant_all, services, ids, pace)
    cancels = racing_line.cancel_on_threads(services, pace, CANCELS, 1, seed=0)
    check(services, ids, granting.result(), cancels)
