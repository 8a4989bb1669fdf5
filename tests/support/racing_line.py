"""What races for a line of tickets: a hub that grants, and whoever cancels meanwhile."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from multiprocessing.synchronize import Barrier
from typing import Any

from gpuspawner.core.errors import NoDeviceFree, TicketEnded
from gpuspawner.leases.models import Request, ServerRef
from gpuspawner.ledger.models import member_account
from gpuspawner.queue import repository as queue_repository
from gpuspawner.queue.commands import plain
from gpuspawner.queue.models import Estimate, Ticket
from gpuspawner.queue.schemas import TicketAnswer
from gpuspawner.services import Services
from tests.support.brokers import Clock, open_services
from tests.support.racers import FORKSERVER

THREADS = 4

SLACK = 10
"""Grants by which cancels may be behind."""

PATIENCE = 300.0
"""Seconds after which a racer gives up: something is stuck."""


class Pace:
    """How far grants and cancels are: neither side runs ahead of the other."""

    def __init__(self, cancels: int) -> None:
        self.cancels = cancels
        """How many there will be."""
        self.granted = FORKSERVER.Value("i", 0)
        self.tried = FORKSERVER.Value("i", 0)

    def count(self, which: Any) -> None:
        with which.get_lock():
            which.value += 1

    def before_grant(self) -> None:
        """Wait while the cancels are behind."""
        self._wait(lambda: self.tried.value >= min(self.cancels, self.granted.value - SLACK))

    def before_cancel(self, number: int) -> None:
        """Wait while fewer than ``number`` were granted."""
        self._wait(lambda: self.granted.value >= number)

    def _wait(self, until: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not until() and time.monotonic() < end:
            time.sleep(0.001)


def make_line(services: Services, count: int) -> list[str]:
    """As many tickets of as many members, the oldest first; their ids."""
    began = services.clock() - timedelta(hours=1)
    made = [
        Ticket(
            id=f"{number:016x}",
            server=ServerRef(f"user{number}"),
            request=Request(devices=1),
            engine="docker",
            account=member_account(f"user{number}"),
            created_at=began + timedelta(seconds=number),
        )
        for number in range(count)
    ]
    with services.store.write() as connection:
        for ticket in made:
            queue_repository.insert_ticket(connection, ticket)
    return [ticket.id for ticket in made]


def grant_all(services: Services, ids: list[str], pace: Pace) -> list[str]:
    """As the hub does: start whose turn it is, until nobody waits; whom it started.

    Each server stops at once, so that there are devices for the next ones.
    """
    present, started = frozenset(ids), []
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and (
        turns := services.queue.turns(present) or services.queue.waiting()
    ):
        for ticket_id in [turn for turn in turns if isinstance(turn, str)]:
            pace.before_grant()
            try:
                lease = services.queue.start_ticket(ticket_id)
            except (TicketEnded, NoDeviceFree):
                continue
            started.append(ticket_id)
            pace.count(pace.granted)
            services.leases.release(lease.id, reason="stopped")
    return started


def cancel_some(
    services: Services, pace: Pace, count: int, every: int, seed: int
) -> list[tuple[str, str]]:
    """Cancel ``count`` tickets, those that are next, one for ``every`` so many grants.

    Which, and what had become of each after the cancel.
    """
    chance, done = random.Random(seed), []
    for number in range(count):
        pace.before_cancel(every * number)
        target = chance.choice(services.queue.waiting()[:8])
        ticket = services.queue.end_ticket(target.id, "cancelled", f"racer {seed}", actor="racer")
        done.append((target.id, ticket.outcome))
        pace.count(pace.tried)
    return done


def hub_grants(gate: Barrier, url: str, ids: list[str], pace: Pace) -> list[str]:
    """:func:`grant_all` in a process of its own."""
    services = open_services(url, refresh_seconds=60)
    services.monitoring.overview()
    gate.wait(120)
    started = grant_all(services, ids, pace)
    services.store.close()
    return started


def service_cancels(
    gate: Barrier, url: str, pace: Pace, count: int, every: int, seed: int
) -> list[tuple[str, str]]:
    """:func:`cancel_some` in a process of its own."""
    services = open_services(url, refresh_seconds=60)
    services.monitoring.overview()
    gate.wait(120)
    done = cancel_on_threads(services, pace, count, every, seed)
    services.store.close()
    return done


def cancel_on_threads(
    services: Services, pace: Pace, count: int, every: int, seed: int
) -> list[tuple[str, str]]:
    """:func:`cancel_some` on :data:`THREADS` threads, which share the count."""
    with ThreadPoolExecutor(THREADS) as pool:
        asked = [
            pool.submit(
                cancel_some, services, pace, count // THREADS, every * THREADS, seed + thread
            )
            for thread in range(THREADS)
        ]
        return [entry for future in asked for entry in future.result()]


# A ticket's estimate, in processes of their own.


def shown_elsewhere(gate: Barrier, url: str, at: datetime, ticket_id: str) -> dict[str, Any]:
    """What another process shows of a ticket at a moment: in REST, by the command, on pages."""
    services = open_services(url, Clock(at), device_source="simulated:1xT4")
    ticket = services.queue.ticket(ticket_id)
    shown = all_shown(services, ticket)
    services.store.close()
    return shown


def all_shown(services: Services, ticket: Ticket) -> dict[str, Any]:
    """The estimate in an answer, by the command, and in the Hub's words."""
    standing = services.positions.standings()[ticket.id]
    answer = TicketAnswer.of(ticket=ticket, standing=standing).as_json()
    [listed] = [plain(*each) for each in services.positions.order() if each[0].id == ticket.id]
    shown = {
        "REST": {name: at[:23] for name, at in (answer["estimate"] or {}).items()},
        "command": {name: at[:23] for name, at in (listed["estimate"] or {}).items()},
        "page": standing.start(services.clock()),
    }
    assert shown["REST"] == shown["command"], "to the millisecond"
    return shown


Stored = tuple[datetime, datetime, str, Estimate]
"""When an estimate was written, what it was based on, whose it is, and the estimate."""


def store_again_and_again(
    gate: Barrier, url: str, ids: list[str], author: int, rounds: int
) -> list[Stored]:
    """Store estimates of all tickets, each of which only this author has in this round."""
    services = open_services(url, refresh_seconds=60)
    written = []
    gate.wait(120)
    for number in range(rounds):
        based_on = services.clock()
        now = based_on.timestamp()
        for ticket_id in ids:
            estimate = Estimate(now + author, now + 10 + author, now + 1000 + number)
            with services.store.write() as connection:
                at = services.clock()
                found = {ticket_id: estimate}
                queue_repository.store_estimates(connection, found, at, based_on)
            written.append((at, based_on, ticket_id, estimate))
    services.store.close()
    return written


def end_some(gate: Barrier, url: str, ids: list[str]) -> None:
    """End these tickets one after the other."""
    services = open_services(url, refresh_seconds=60)
    gate.wait(120)
    for ticket_id in ids:
        services.queue.end_ticket(ticket_id, "cancelled", "a racer did", tell=False)
    services.store.close()
