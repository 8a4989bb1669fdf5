"""Rates that admins set, on both databases: what a start costs, and who may change it how."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from gpuspawner.core.errors import ConfigError, InvalidRequest
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease, Request, ServerRef, Terms
from gpuspawner.ledger.rules import owed
from gpuspawner.services import Services
from tests.support.brokers import T0, Clock, Make, acquire, running
from tests.support.parts import each_database
from tests.support.threads import at_once

VIENNA = "Europe/Vienna"


def price(services: Services, user: str = "anna") -> int:
    """What a start costs an hour, right now; in the environment pytorch."""
    lease = acquire(services, user)
    services.leases.release(lease.id, reason="only asked")
    return lease.rate


def test_admin_rate_overrides_configuration_but_not_open_leases(
    services: Services, clock: Clock
) -> None:
    lease = running(services, "bert")
    assert price(services) == lease.rate == 4 * MICRO
    clock.forward(minutes=1)
    rate = services.prices.set_rate("2.5", model="A100", actor="kim", reason="a holiday")
    assert (rate.id, rate.amount, rate.since) == (1, 2_500_000, clock.now)
    assert price(services) == services.prices.rates.rate_of("A100") == 2_500_000
    assert services.monitoring.overview().models[0].rate == 2_500_000
    (change,) = services.audit.trail()
    assert (change.actor, change.action, change.subject) == ("kim", "set rate", "rate 1")
    assert change.detail == ("2.50 credits an hour for A100 from 2025-03-01 12:01 UTC: a holiday")
    clock.forward(minutes=59)
    services.ledger.charge_all()
    settled = services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    assert (settled.rate, settled.charged) == (4 * MICRO, 4 * MICRO)
    services.prices.set_rate(0, environment="pytorch", actor="kim")
    services.prices.set_rate(9, environment="other", model="A100", actor="kim")
    assert price(services) == 0, "an environment has its own price"
    assert services.prices.rates.rate_of("A100") == 2_500_000


def test_session_keeps_the_night_rate_into_the_day(make: Make, clock: Clock) -> None:
    """The last night of winter is an hour shorter, and costs an hour less."""
    night = {"model": "A100", "hours": "20-8", "rate": 2}
    services = make(gpu_rates={"A100": 4}, special_rates=[night], rate_zone=VIENNA)
    clock.now = datetime(2025, 3, 29, 18, 59, tzinfo=timezone.utc)
    assert price(services) == 4 * MICRO, "19:59"
    clock.now = datetime(2025, 3, 29, 19, tzinfo=timezone.utc)
    lease = running(services, "anna")
    assert lease.rate == 2 * MICRO
    clock.now = datetime(2025, 3, 30, 5, 59, tzinfo=timezone.utc)
    assert price(services, "bert") == 2 * MICRO, "7:59 in summer"
    clock.now = datetime(2025, 3, 30, 6, tzinfo=timezone.utc)
    assert price(services, "bert") == 4 * MICRO
    clock.forward(hours=5)
    settled = services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    assert settled.charged == 16 * 2 * MICRO


def test_removed_rate_does_not_restore_an_older_one(services: Services, clock: Clock) -> None:
    for amount in (1, 2, 3):
        services.prices.set_rate(amount, model="A100", actor="kim")
        clock.forward(minutes=1)
    later = services.prices.set_rate(9, model="A100", since="2030-01-01", actor="kim")
    services.prices.set_rate(7, model="*", actor="kim")
    assert price(services) == 3 * MICRO
    assert services.prices.remove_rate(3, actor="lee", reason="over").amount == 3 * MICRO
    assert price(services) == 7 * MICRO
    with pytest.raises(InvalidRequest, match="There is no rate 2"):
        services.prices.remove_rate(2, actor="lee")
    services.prices.remove_rate(5, actor="lee")
    assert price(services) == 4 * MICRO, "the configuration's"
    assert services.prices.remove_rate(later.id or 0, actor="lee").amount == 9 * MICRO
    assert [c.action for c in services.audit.trail()][:3] == ["remove rate"] * 3


def test_invalid_rate_is_rejected_and_changes_nothing(services: Services) -> None:
    invalid: list[tuple[dict[str, Any], str, str]] = [
        ({"amount": "1,5"}, "rate", "'1,5'. Write credits per GPU-hour as a decimal number"),
        ({"amount": float("nan")}, "rate", "nan"),
        ({"model": "--"}, "model", "names no device model"),
        ({"environment": " "}, "environment", "names no environment"),
        ({"slots": 0}, "slots", "is not a number of slots"),
        ({"hours": "late"}, "hours", "'late' are not hours of the week"),
        ({"zone": "Mars"}, "zone", "'Mars' is not a time zone"),
        ({"since": "soon"}, "from", "'soon' is not a date"),
        ({"since": "2025-03-01 11:59"}, "from", "cannot start at 2025-03-01 11:59 UTC"),
        ({"since": "2025-03-01 12:59", "zone": VIENNA}, "from", "12:59 CET: that is in the past"),
    ]
    for fields, field, sentence in invalid:
        with pytest.raises(InvalidRequest) as caught:
            services.prices.set_rate(**{"amount": 1, "actor": "kim", **fields})
        assert sentence in caught.value.message
        assert caught.value.fields["field"] == field
    assert services.audit.trail() == []
    assert price(services) == 4 * MICRO


@each_database
def test_concurrent_rates_for_one_moment_conflict(make: Make) -> None:
    """Of two rates from the same moment on, one is written and the other one is told."""
    brokers = [make(), make()]

    def set_rate(number: int) -> Any:
        prices = brokers[number].prices
        return prices.set_rate(5, model="A100", since="2025-04-01", actor="kim")

    (refused,) = (said for said in at_once(2, set_rate) if isinstance(said, InvalidRequest))
    assert refused.message.startswith("Rate 1 is for the same from the same moment on: 5.00 c")
    assert len(brokers[0].audit.trail()) == 1


def test_rates_follow_a_clock_set_back(services: Services, clock: Clock) -> None:
    services.prices.set_rate(1, model="A100", actor="kim")
    clock.forward(days=-1)
    assert price(services) == 4 * MICRO, "it holds from when it was set"
    with pytest.raises(InvalidRequest, match="that is in the past"):
        services.prices.set_rate(2, model="A100", since="2025-02-28 11:00", actor="kim")
    services.prices.set_rate(2, model="A100", actor="kim")
    assert price(services) == 2 * MICRO
    clock.forward(days=1)
    assert price(services) == MICRO


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"gpu_rates": {"A100": "1,5"}}, "The rate of 'A100' is not valid"),
        ({"special_rates": [{"rate": "1,5"}]}, "Entry 1 of c.GPURates.special"),
        ({"rate_zone": "Mars"}, "GPURates.zone: 'Mars' is not a time zone"),
    ],
)
def test_invalid_rate_configuration_stops_the_start(
    make: Make, settings: dict[str, Any], sentence: str
) -> None:
    make()
    with pytest.raises(ConfigError) as caught:
        make(**settings)
    assert sentence in caught.value.message


def test_displayed_rate_is_always_the_rate_charged(services: Services, clock: Clock) -> None:
    """Over a day of changes: each start pays what the form showed at its moment."""
    services.prices.set_rate(3, model="A100", hours="20-8", zone=VIENNA, actor="kim")
    services.prices.set_rate("0.5", environment="pytorch", since="2025-03-02 06:00", actor="kim")
    services.prices.set_rate(6, environment="pytorch", hours="Sun 9-10", actor="kim")
    paid: list[tuple[int, Lease]] = []
    for hour in (0, 6, 7, 17, 18, 20, 21, 22, 31, 45):
        clock.now = T0 + timedelta(hours=hour, seconds=1)
        shown = (
            services.monitoring.overview()
            .rates.card(clock.now, "pytorch")
            .rate_of("NVIDIA A100-SXM4-80GB")
        )
        lease = running(services, "anna")
        clock.forward(minutes=30, microseconds=hour)
        paid.append(
            (shown, services.leases.release(lease.id, ended_at=clock.now, reason="stopped"))
        )
    assert {shown for shown, _ in paid} == {4 * MICRO, 3 * MICRO, MICRO // 2, 6 * MICRO}
    for shown, lease in paid:
        assert lease.ended_at
        assert lease.charged == owed(shown, lease.started_at, lease.ended_at)


@pytest.mark.parametrize(
    ("shown", "price", "since", "minutes", "rate"),
    [
        *((0, 9, "12:00:01", minutes, 4) for minutes in (0.1, 9.99, 10)),
        *((0, 9, "12:00:01", minutes, 9) for minutes in (10.01, 10_000_000)),
        # Nobody starts by day at the price of the night to come.
        (6, 1, "12:05", 0, 4),
        (0, 1, "12:01", 1, 1),
    ],
    ids=str,
)
def test_displayed_rate_applies_for_ten_minutes_unless_it_falls(
    services: Services,
    clock: Clock,
    shown: float,
    price: int,
    since: str,
    minutes: float,
    rate: int,
) -> None:
    terms = Terms(shown_at=clock.now + timedelta(minutes=shown))
    services.prices.set_rate(price, model="A100", since=f"2025-03-01 {since}", actor="kim")
    clock.forward(minutes=minutes)
    request = Request(devices=1, environment="pytorch")
    lease = services.leases.grant(ServerRef("anna"), request, engine="docker", terms=terms)
    assert lease.rate == rate * MICRO
