"""Drivers that are too old for an environment. Real: the broker, SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

import pytest

from gpuspawner.core.errors import TooMuchAsked
from gpuspawner.devices.models import Inventory
from gpuspawner.leases.models import Lease, Request, ServerRef
from gpuspawner.queue.models import Ticket
from gpuspawner.queue.service import Terms
from gpuspawner.services import Broker
from tests.support.brokers import Clock, acquire, fleet, running

Make = Callable[..., Broker]
NEEDS = Request(devices=1, environment="torch", min_driver="550.54", min_cuda="12.4")


class Driven:
    """A machine's devices under another driver."""

    def __init__(self, broker: Broker, driver: str, cuda: str) -> None:
        self.devices = fleet(broker)
        self.driver, self.cuda = driver, cuda
        broker.watch.source = self

    @property
    def name(self) -> str:
        return self.devices.name

    def observe(self, now: datetime) -> Inventory:
        seen = self.devices.observe(now)
        return replace(seen, driver_version=self.driver, cuda_version=self.cuda)


@pytest.mark.parametrize(
    ("driver", "cuda", "words"),
    [
        ("535.104.05", "12.2", "needs NVIDIA driver 550.54 or newer, and this machine has 535"),
        ("550.9", "12.4", "needs NVIDIA driver 550.54 or newer, and this machine has 550.9"),
        ("550.54.14", "12.3", "needs CUDA 12.4 or newer, and this machine has 12.3"),
        ("560", "12", "needs CUDA 12.4 or newer, and this machine has 12"),
        ("550.54", "12.4", ""),
        ("550.54.14", "12.10", ""),
        ("simulated", "", ""),
        ("", "", ""),
    ],
)
def test_an_old_driver_is_refused_in_words(make: Make, driver: str, cuda: str, words: str) -> None:
    broker = make()
    Driven(broker, driver, cuda)
    if not words:
        assert len(broker.acquire(ServerRef("ada"), NEEDS, engine="docker").devices) == 1
        return
    with pytest.raises(TooMuchAsked, match=f"The environment 'torch' {words}"):
        broker.acquire(ServerRef("ada"), NEEDS, engine="docker")
    assert broker.open_leases() == []
    without = Request(environment="torch")
    assert broker.acquire(ServerRef("ada"), without, engine="docker").devices == ()


def test_nobody_waits_in_line_for_a_driver(make: Make) -> None:
    broker = make(device_source="simulated:1xT4")
    Driven(broker, "470.1", "11.4")
    running(broker, "bob")
    with pytest.raises(TooMuchAsked, match=r"NVIDIA driver 550\.54"):
        broker.ask(ServerRef("ada"), NEEDS, engine="docker", terms=Terms(wait=True))
    with pytest.raises(TooMuchAsked, match=r"NVIDIA driver 550\.54"):
        broker.must_fit(NEEDS)


def test_what_is_needed_stays_with_the_ticket(make: Make, clock: Clock) -> None:
    """The driver was set back while somebody waited: they are told, and nobody else waits less."""
    broker = make(device_source="simulated:1xT4")
    driven = Driven(broker, "550.54", "12.4")
    lease = running(broker, "bob")
    ticket = broker.ask(ServerRef("ada"), NEEDS, engine="docker", terms=Terms(wait=True))
    assert isinstance(ticket, Ticket)
    assert broker.ticket(ticket.id).request == NEEDS
    driven.driver = "535.1"
    broker.release(lease.id, reason="stopped")
    clock.forward(seconds=5)
    (turn,) = broker.turns(frozenset({ticket.id}))
    with pytest.raises(TooMuchAsked, match=r"this machine has 535\.1"):
        broker.start_ticket(turn)
    ended = broker.ticket(ticket.id)
    assert (ended.outcome, "535.1" in ended.end_reason) == ("refused", True)
    assert isinstance(acquire(broker, "eve"), Lease)
