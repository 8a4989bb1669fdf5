"""MIG instances with services: prices, receipts and reports agree on what they are. Real: services,
databases. Simulated: clock, and devices, some of which are shown as instances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from fractions import Fraction

import pytest
import sqlalchemy as sa

from gpuspawner.catalog.models import DeviceLimits, Environment
from gpuspawner.core.errors import TooMuchAsked
from gpuspawner.core.units import MICRO
from gpuspawner.db import hash_chain
from gpuspawner.devices.models import Device, Inventory
from gpuspawner.devices.source import Sampler
from gpuspawner.hub_pages.prices import PriceList
from gpuspawner.leases.models import Lease, Request, ServerRef, Terms
from gpuspawner.services import Services
from gpuspawner.web import view_models
from tests.support.brokers import Clock, Make, fleet
from tests.support.parts import each_database

GIB = 2**30
SEVENTH, HALF = Fraction(1, 7), Fraction(1, 2)
INSTANCES = ((1, "1g.5gb", 5, SEVENTH), (2, "1g.5gb", 5, SEVENTH), (3, "3g.20gb", 20, HALF))
"""By position in the fleet: profile, GB and part of what is shown as an instance."""
LAB = Environment(
    slug="lab", display_name="Lab", image="lab", devices=DeviceLimits(default=1, max=1)
)


class Divided:
    """A simulated fleet, some of whose devices are shown as instances."""

    def __init__(self, services: Services) -> None:
        self.fleet = fleet(services)
        self.name = self.fleet.name

    def observe(self, now: datetime) -> Inventory:
        seen = self.fleet.observe(now)
        devices = list(seen.devices)
        for at, profile, memory, part in INSTANCES:
            model = f"{devices[0].model} MIG {profile}"
            devices[at] = replace(
                devices[at], model=model, memory_bytes=memory * GIB, part=part, parent_uuid="GPU-0"
            )
        return replace(seen, devices=tuple(devices))

    def sampler(self, processes_every: float = 60.0) -> Sampler:
        return self.fleet.sampler(processes_every)


@pytest.fixture
def divided(make: Make) -> Callable[..., Services]:
    def make_divided(**settings: object) -> Services:
        settings = {"gpu_rates": {"*": 1, "A100": 4, "A100 MIG 3g.20gb": 3}} | settings
        services = make(device_source="simulated:4xA100-40GB", **settings)
        services.watch.source = Divided(services)
        services.devices.look(fresh=True)
        return services

    return make_divided


def start(services: Services, user: str, model: str, memory_bytes: int = 0, **terms: int) -> Lease:
    request = Request(devices=1, environment="lab", model=model, memory_bytes=memory_bytes)
    found = services.queue.ask(
        ServerRef(user), request, engine="docker", terms=Terms(wait=True, **terms)
    )
    assert isinstance(found, Lease)
    return services.leases.confirm(found.id, started_at=services.clock())


@each_database
def test_price_shown_is_paid_and_everything_counts_the_part(
    divided: Callable[..., Services], clock: Clock
) -> None:
    services = divided()
    overview = services.monitoring.overview()
    prices = PriceList(overview, [LAB], clock())
    shown = {count.model: (count.part, prices.rate(LAB, count)) for count in overview.models}
    small, large = "A100-40GB MIG 1g.5gb", "A100-40GB MIG 3g.20gb"
    assert shown == {
        "A100-40GB": (1, 4 * MICRO),
        small: (SEVENTH, 571_429),
        large: (HALF, 3 * MICRO),
    }
    assert prices.of(LAB) == "0.57 to 4.00 credits an hour"
    listed = {
        d.view.device.model: d.rate for d in view_models.device_figures(services, "", True)[1]
    }
    assert listed == {model: rate for model, (_, rate) in shown.items()}
    leases = {}
    services.positions.sync()
    for model, (part, rate) in shown.items():
        memory = 40 * GIB if part == 1 else 0
        dearest, _ = services.queue.dearest(
            Request(devices=1, environment="lab", model=model, memory_bytes=memory), Terms()
        )
        lease = start(services, f"m{part.denominator}", model, memory)
        (device,) = lease.devices
        assert (lease.rate, dearest, device.part) == (rate, rate, part)
        leases[model] = lease
    clock.forward(hours=7)
    for model, lease in leases.items():
        part, rate = shown[model]
        ended = services.leases.release(lease.id, stopped_at=clock(), reason="stopped")
        assert ended.charged == 7 * rate
        receipt = services.reports.receipt(lease.id)
        assert receipt.lease.devices[0].part == part
        assert receipt.lease.device_equivalents == part
    day = clock().replace(hour=0)
    use = services.reports.use_by([day, clock.forward(days=1)], "user")[0]
    hours = {member: each.micros / 3_600_000_000 for member, each in use.items()}
    assert hours == pytest.approx({"m1": 7.0, "m7": 1.0, "m2": 3.5})


@each_database
def test_seal_covers_the_part_of_a_lease(divided: Callable[..., Services]) -> None:
    services = divided()
    for model, memory in (("1g.5gb", 0), ("A100", 40 * GIB)):
        lease = start(services, "ada", model, memory)
        services.leases.release(lease.id, stopped_at=services.clock(), reason="stopped")
    with services.store.write() as connection:
        assert [*hash_chain.check_seals(connection)] == []
        change = sa.text("UPDATE lease_places SET part = :part WHERE memory_bytes = :memory")
        for wrong, right, memory in (("1", "1/7", 5 * GIB), ("1/2", "1", 40 * GIB)):
            connection.execute(change, {"part": wrong, "memory": memory})
            assert len([*hash_chain.check_seals(connection)]) == 1
            connection.execute(change, {"part": right, "memory": memory})
            assert [*hash_chain.check_seals(connection)] == []


def test_limit_on_gpu_hours_counts_the_part(divided: Callable[..., Services]) -> None:
    services = divided(member_limits={"gpu_hours": 2})
    with pytest.raises(TooMuchAsked, match="You asked for 4 GPU-hours, but your limit is 2"):
        start(services, "ada", "A100", 40 * GIB, seconds=4 * 3600)
    with pytest.raises(TooMuchAsked, match=r"You asked for 2\.14286 GPU-hours"):
        start(services, "ada", "1g.5gb", seconds=15 * 3600)
    asked, terms = Request(devices=1, model="1g.5gb"), Terms(seconds=13 * 3600)
    services.queue.require_possible(ServerRef("ada"), asked, engine="docker", terms=terms)


def test_devices_that_were_seen_keep_their_part(divided: Callable[..., Services]) -> None:
    services = divided()
    known: list[Device] = list(services.watch.look(services.clock()).devices)
    fleet_of = services.watch.source
    assert isinstance(fleet_of, Divided)
    fleet_of.fleet.lose()
    with services.store.read() as connection:
        rows = connection.execute(sa.text('SELECT part FROM devices ORDER BY "index"'))
        assert [row.part for row in rows] == ["1", "1/7", "1/7", "1/2"]
    assert [d.part for d in known] == [1, SEVENTH, SEVENTH, HALF]
