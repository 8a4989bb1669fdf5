"""Grants, holds and what is refused. Real: SQLite and PostgreSQL; simulated: devices and the
clock."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from gpuspawner.core.errors import (
    ConfigError,
    LedgerError,
    NoCredits,
    NoDeviceFree,
    TooMuchAsked,
    UnknownAccount,
)
from gpuspawner.core.units import MICRO
from gpuspawner.devices.models import Inventory
from gpuspawner.leases.models import Lease, LeaseState, Request, ServerRef, Terms
from gpuspawner.queue.models import Ticket
from gpuspawner.services import Services
from tests.support.brokers import T0, Clock, Make, acquire, credits_of, fleet, running, states
from tests.support.parts import each_database

ANNA, BERT = ServerRef("anna"), ServerRef("bert")


# From grant to release.


@each_database
def test_lease_passes_from_grant_to_release(services: Services, clock: Clock) -> None:
    lease = acquire(services, "anna", 2, server="lab")
    assert (lease.state, lease.granted_at, lease.engine) == (LeaseState.GRANTED, T0, "docker")
    assert (lease.server, lease.account) == (ServerRef("anna", "lab"), "member:anna")
    assert [d.index for d in lease.devices] == [0, 1] and len(set(lease.uuids)) == 2
    assert services.leases.of_server(lease.server) == lease == services.leases.get(lease.id)
    assert states(services) == ["leased", "leased", "free", "free"]

    clock.forward(minutes=3)
    lease = services.leases.confirm(lease.id, "container-1")
    assert (lease.state, lease.started_at) == (LeaseState.RUNNING, clock.now)
    assert lease.engine_ref == "container-1"

    clock.forward(minutes=90)
    lease = services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    assert (lease.state, lease.ended_at) == (LeaseState.ENDED, clock.now)
    assert lease.end_reason == "stopped"
    assert lease.charged == 12 * MICRO and credits_of(services) == 88
    assert states(services) == ["free"] * 4 and services.leases.open_leases() == []
    assert services.leases.of_server(lease.server) is None
    assert acquire(services, "bert", 4).uuids[:2] == lease.uuids, "free at once for the next"


def test_rate_at_the_grant_is_the_rate_charged(make: Make, clock: Clock) -> None:
    before = make(gpu_rates={"A100": 4, "T4": "0.5"}, device_source="simulated:1xA100-80GB,1xT4")
    lease = running(before, "anna", model="A100")
    assert lease.rate == 4 * MICRO
    after = make(gpu_rates={"*": 50}, device_source="simulated:1xA100-80GB,1xT4")
    clock.forward(hours=1)
    after.ledger.charge_all()
    assert credits_of(after) == 96
    assert running(after, "bert", model="T4").rate == 50 * MICRO
    assert after.leases.release(lease.id, ended_at=clock.now, reason="stopped").charged == 4 * MICRO


# Credits.


def test_account_is_opened_once(services: Services) -> None:
    assert services.ledger.member("anna").balance == 0
    assert services.ledger.open_account("anna").balance == 100 * MICRO
    assert services.ledger.open_account("anna").balance == 100 * MICRO
    acquire(services, "anna", 0)
    assert acquire(services, "bert").hold == pytest.approx(4 * MICRO / 6, abs=1)
    for user in ("anna", "bert"):  # Bert's opens with his first lease: he never signed in
        assert credits_of(services, user) == 100
        assert [line.kind for line in services.ledger.statement(f"member:{user}")] == ["grant"]


@pytest.mark.parametrize(("amount", "balance"), [(0, 0), ("12.5", 12.5), (0.000001, 0.000001)])
def test_opening_grant_follows_the_configuration(make: Make, amount: Any, balance: float) -> None:
    wrong = make(opening_grant="plenty")
    with pytest.raises(ConfigError, match=r"c\.GPUCredits\.opening_grant: 'plenty'"):
        wrong.ledger.open_account("anna")
    assert wrong.ledger.accounts() == []
    assert make(opening_grant=amount).ledger.open_account("anna").balance == balance * MICRO


def test_grant_with_the_same_key_is_given_once(services: Services) -> None:
    services.ledger.open_account("anna")

    def give(amount: int, key: str = "") -> bool:
        return services.ledger.grant("member:anna", amount, actor="admin", reason="term", key=key)

    assert give(5 * MICRO, "term-1") is True
    assert give(5 * MICRO, "term-1") is False
    with pytest.raises(LedgerError, match="used for another amount"):
        give(6 * MICRO, "term-1")
    assert give(5 * MICRO) and give(5 * MICRO)
    assert give(-15 * MICRO, "typo")
    assert credits_of(services) == 100
    with pytest.raises(UnknownAccount, match="member:nobody"):
        services.ledger.grant("member:nobody", 1, actor="admin", reason="gift")
    with pytest.raises(LedgerError):
        services.ledger.grant("member:anna", 0, actor="admin", reason="nothing")


def test_hold_lasts_until_it_is_charged(services: Services, clock: Clock) -> None:
    lease = running(services, "anna", 3)
    assert lease.hold == 2 * MICRO  # 3 x 4 credits an hour, 10 minutes
    account = services.ledger.member("anna")
    assert (account.balance, account.held) == (100 * MICRO, 2 * MICRO)
    assert account.available == 98 * MICRO
    clock.forward(minutes=4)
    services.ledger.charge_all()
    account = services.ledger.member("anna")
    assert (account.held, account.available) == (1_200_000, 98 * MICRO)
    assert [a.held for a in services.ledger.accounts()] == [1_200_000]
    clock.forward(minutes=26)
    services.ledger.charge_all()
    account = services.ledger.member("anna")
    assert (account.held, account.available) == (0, 94 * MICRO)
    services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    assert services.ledger.member("anna").held == 0


def test_missing_credits_are_explained_with_cost_and_help(make: Make) -> None:
    services = make(
        opening_grant="0.5", gpu_rates={"*": 4}, credits_help="Write to gpu@lab.example."
    )
    with pytest.raises(NoCredits) as caught:
        acquire(services, "anna")
    assert caught.value.message == (
        "Your balance of 0.50 credits does not cover this: it costs 4.00 credits an hour, and the "
        "first 10 minutes (0.67) must be there at the start. Write to gpu@lab.example. You can "
        "start without a GPU: that is free."
    )
    assert caught.value.fields == {"balance": MICRO // 2, "hold": 666_667}
    assert services.leases.open_leases() == []
    assert acquire(services, "anna", devices=0).devices == ()


def test_credits_on_hold_cannot_pay_for_another_lease(make: Make) -> None:
    services = make(opening_grant=1, gpu_rates={"*": 4})
    acquire(services, "anna")
    with pytest.raises(NoCredits, match=r"balance of 0.33 credits \(0.67 more are set aside"):
        acquire(services, "anna", server="lab")


@pytest.mark.parametrize("balance", [0, -5])
def test_empty_account_can_start_servers_that_cost_nothing(make: Make, balance: int) -> None:
    services = make(opening_grant=1, gpu_rates={"A100": 4, "T4": 0}, device_source="simulated:1xT4")
    services.ledger.open_account("anna")
    services.ledger.grant("member:anna", (balance - 1) * MICRO, actor="admin", reason="spent")
    assert acquire(services, "anna", devices=0).devices == ()
    assert acquire(services, "anna", server="lab").rate == 0


# No device free.


def test_refusal_counts_only_devices_that_match_the_request(make: Make) -> None:
    services = make(
        device_source="simulated:1xA100-80GB,1xT4", gpu_rates={"A100": 4, "T4": 1}, opening_grant=2
    )
    running(services, "anna", model="T4")
    running(services, "bert", model="A100")
    for wants, words in (
        ({"model": "T4"}, "The only T4 GPU is in use"),
        ({"models": ("A100",), "model": "A100"}, "only A100 GPU is in use"),
        ({"memory_bytes": 80 * 2**30}, "with 80 GB is in use"),
        ({}, "All 2 GPUs are in use."),
    ):
        with pytest.raises(NoDeviceFree, match=words) as caught:
            acquire(services, "cara", **wants)
    assert caught.value.fields["in_use"] == 2
    assert acquire(services, "cara", devices=0).devices == ()


def test_device_used_by_an_outside_program_is_not_leased(services: Services, clock: Clock) -> None:
    uuids = [view.device.uuid for view in services.monitoring.overview().devices]
    for uuid in uuids[:3]:
        fleet(services).occupy(uuid, pid=4711, name="miner")
    clock.forward(seconds=3)
    views = services.monitoring.overview().devices
    assert [view.state for view in views] == ["occupied"] * 3 + ["free"]
    assert views[0].detail == "used without a lease by miner (pid 4711)"
    assert running(services, "anna").uuids == (uuids[3],)
    with pytest.raises(NoDeviceFree, match="3 are used by programs outside the hub"):
        acquire(services, "bert")
    # The stranger leaves: the services look anew before they say no.
    fleet(services).restore(uuids[0])
    assert acquire(services, "bert").uuids == (uuids[0],)


def test_leftover_process_occupies_a_device_after_the_lease_ends(
    services: Services, clock: Clock
) -> None:
    lease = running(services, "anna", 4)
    fleet(services).occupy(lease.uuids[0], pid=4711, name="python")
    clock.forward(seconds=3)
    assert states(services) == ["leased"] * 4
    services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    assert states(services) == ["occupied", "free", "free", "free"]
    assert lease.uuids[0] not in acquire(services, "bert", 2).uuids
    fleet(services).restore()
    clock.forward(seconds=3)
    assert states(services).count("free") == 2


NEEDS = Request(devices=1, environment="torch", min_driver="550.54", min_cuda="12.4")


class Driven:
    """A machine's devices under another driver."""

    def __init__(self, services: Services, driver: str, cuda: str) -> None:
        self.devices = fleet(services)
        self.driver, self.cuda = driver, cuda
        services.watch.source = self

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
def test_driver_requirement_of_an_environment_is_enforced(
    make: Make, driver: str, cuda: str, words: str
) -> None:
    services = make()
    Driven(services, driver, cuda)
    if not words:
        assert len(services.leases.grant(ServerRef("ada"), NEEDS, engine="docker").devices) == 1
        return
    with pytest.raises(TooMuchAsked, match=f"The environment 'torch' {words}"):
        services.leases.grant(ServerRef("ada"), NEEDS, engine="docker")
    assert services.leases.open_leases() == []
    without = Request(environment="torch")
    assert services.leases.grant(ServerRef("ada"), without, engine="docker").devices == ()


def test_ticket_keeps_its_driver_requirement(make: Make, clock: Clock) -> None:
    """The driver was set back while somebody waited: they are told, and nobody else waits less."""
    services = make(device_source="simulated:1xT4")
    driven = Driven(services, "550.54", "12.4")
    lease = running(services, "bob")
    ticket = services.queue.ask(ServerRef("ada"), NEEDS, engine="docker", terms=Terms(wait=True))
    assert isinstance(ticket, Ticket)
    assert services.queue.ticket(ticket.id).request == NEEDS
    driven.driver = "535.1"
    clock.forward(seconds=5)
    with pytest.raises(TooMuchAsked, match=r"NVIDIA driver 550\.54"):
        services.queue.ask(ServerRef("fay"), NEEDS, engine="docker", terms=Terms(wait=True))
    with pytest.raises(TooMuchAsked, match=r"NVIDIA driver 550\.54"):
        services.positions.require_fit(NEEDS)
    services.leases.release(lease.id, reason="stopped")
    (turn,) = services.queue.turns(frozenset({ticket.id}))
    with pytest.raises(TooMuchAsked, match=r"this machine has 535\.1"):
        services.queue.start_ticket(turn)
    ended = services.queue.ticket(ticket.id)
    assert (ended.outcome, "535.1" in ended.end_reason) == ("refused", True)
    assert isinstance(acquire(services, "eve"), Lease)
