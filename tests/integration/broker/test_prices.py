"""Rates that admins set, on both databases: what a start costs, and who may change it how."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from threading import Barrier
from typing import Any

import pytest

from gpuspawner.core.errors import ConfigError, InvalidRequest
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease, Request, ServerRef
from gpuspawner.ledger.rules import owed
from gpuspawner.queue.service import Terms
from gpuspawner.services import Broker
from tests.integration.broker.conftest import Make
from tests.support.brokers import T0, Clock, acquire, running

VIENNA = "Europe/Vienna"


@pytest.fixture
def database_url(each_database_url: str) -> str:
    """The queries, locks and constraints here are each database's own."""
    return each_database_url


def price(broker: Broker, user: str = "anna") -> int:
    """What a start costs an hour, right now; in the environment pytorch."""
    lease = acquire(broker, user)
    broker.release(lease.id, reason="only asked")
    return lease.rate


def test_an_admins_rate_goes_before_the_configurations(broker: Broker, clock: Clock) -> None:
    assert price(broker) == 4 * MICRO
    clock.forward(minutes=1)
    rate = broker.prices.set_rate("2.5", model="A100", actor="kim", reason="a holiday")
    assert (rate.id, rate.amount, rate.since) == (1, 2_500_000, clock.now)
    assert price(broker) == broker.prices.rates.rate_of("A100") == 2_500_000
    assert broker.overview().models[0].rate == 2_500_000
    (change,) = broker.trail()
    assert (change.actor, change.action, change.subject) == ("kim", "set rate", "rate 1")
    assert change.detail == ("2.50 credits an hour for A100 from 2025-03-01 12:01 UTC: a holiday")


def test_a_running_lease_keeps_its_price(broker: Broker, clock: Clock) -> None:
    lease = running(broker, "anna")
    broker.prices.set_rate(40, model="A100", actor="kim")
    clock.forward(hours=1)
    broker.ledger.charge_all()
    settled = broker.release(lease.id, ended_at=clock.now, reason="stopped")
    assert (settled.rate, settled.charged) == (4 * MICRO, 4 * MICRO)


def test_an_environment_has_its_own_price(broker: Broker) -> None:
    broker.prices.set_rate(0, environment="pytorch", actor="kim")
    broker.prices.set_rate(9, environment="other", model="A100", actor="kim")
    assert price(broker) == 0
    assert broker.prices.rates.rate_of("A100") == 4 * MICRO


def test_a_rate_holds_from_its_date_on(broker: Broker, clock: Clock) -> None:
    broker.prices.set_rate(1, since="2025-03-02", zone=VIENNA, actor="kim")
    clock.now = datetime(2025, 3, 1, 22, 59, 59, tzinfo=timezone.utc)
    assert price(broker) == 4 * MICRO
    clock.forward(seconds=1)
    assert price(broker) == MICRO


def test_a_session_from_night_into_day_keeps_the_price_of_the_night(
    make: Make, clock: Clock
) -> None:
    """The last night of winter is an hour shorter, and costs an hour less."""
    night = {"model": "A100", "hours": "20-8", "rate": 2}
    broker = make(gpu_rates={"A100": 4}, special_rates=[night], rate_zone=VIENNA)
    clock.now = datetime(2025, 3, 29, 18, 59, tzinfo=timezone.utc)
    assert price(broker) == 4 * MICRO, "19:59"
    clock.now = datetime(2025, 3, 29, 19, tzinfo=timezone.utc)
    lease = running(broker, "anna")
    assert lease.rate == 2 * MICRO
    clock.now = datetime(2025, 3, 30, 5, 59, tzinfo=timezone.utc)
    assert price(broker, "bert") == 2 * MICRO, "7:59 in summer"
    clock.now = datetime(2025, 3, 30, 6, tzinfo=timezone.utc)
    assert price(broker, "bert") == 4 * MICRO
    clock.forward(hours=5)
    settled = broker.release(lease.id, ended_at=clock.now, reason="stopped")
    assert settled.charged == 16 * 2 * MICRO


def test_a_rate_that_is_removed_brings_back_no_old_one(broker: Broker, clock: Clock) -> None:
    for amount in (1, 2, 3):
        broker.prices.set_rate(amount, model="A100", actor="kim")
        clock.forward(minutes=1)
    later = broker.prices.set_rate(9, model="A100", since="2030-01-01", actor="kim")
    broker.prices.set_rate(7, model="*", actor="kim")
    assert price(broker) == 3 * MICRO
    assert broker.prices.remove_rate(3, actor="lee", reason="over").amount == 3 * MICRO
    assert price(broker) == 7 * MICRO
    with pytest.raises(InvalidRequest, match="There is no rate 2 that an admin set"):
        broker.prices.remove_rate(2, actor="lee")
    broker.prices.remove_rate(5, actor="lee")
    assert price(broker) == 4 * MICRO, "the configuration's"
    assert broker.prices.remove_rate(later.id or 0, actor="lee").amount == 9 * MICRO
    assert [c.action for c in broker.trail()][:3] == ["remove rate"] * 3


@pytest.mark.parametrize(
    ("fields", "field", "sentence"),
    [
        ({"amount": "1,5"}, "rate", "'1,5'. Write credits per GPU-hour as a decimal number"),
        ({"amount": "NaN"}, "rate", "'NaN'"),
        ({"amount": float("nan")}, "rate", "nan"),
        ({"amount": "-4"}, "rate", "'-4'"),
        ({"amount": 10**30}, "rate", "more than 1000000"),
        ({"amount": "0." + "1" * 18}, "rate", "has more than six decimals"),
        ({"model": "--"}, "model", "names no device model"),
        ({"environment": " "}, "environment", "names no environment"),
        ({"slots": 0}, "slots", "is no number of slots"),
        ({"hours": "late"}, "hours", "'late' are no hours of the week"),
        ({"zone": "Mars"}, "zone", "'Mars' is no time zone"),
        ({"since": "soon"}, "from", "'soon' is no date"),
        ({"since": "2025-03-01 11:59"}, "from", "cannot hold from 2025-03-01 11:59 UTC"),
        ({"since": "2025-03-01 12:59", "zone": VIENNA}, "from", "12:59 CET: that is over"),
    ],
)
def test_what_cannot_be_is_a_sentence_and_changes_nothing(
    broker: Broker, fields: dict[str, Any], field: str, sentence: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        broker.prices.set_rate(**{"amount": 1, "actor": "kim", **fields})
    assert sentence in caught.value.message
    assert caught.value.fields["field"] == field
    assert broker.trail() == []
    assert price(broker) == 4 * MICRO


def test_two_admins_at_once(make: Make) -> None:
    """Of two rates from the same moment on, one is written and the other one is told."""
    brokers = [make(), make()]
    gate = Barrier(2)

    def set_rate(broker: Broker) -> str:
        gate.wait(120)
        try:
            broker.prices.set_rate(5, model="A100", since="2025-04-01", actor="kim")
        except InvalidRequest as error:
            return error.message
        return ""

    with ThreadPoolExecutor(2) as threads:
        said = sorted(threads.map(set_rate, brokers))
    assert said[0] == ""
    assert said[1].startswith("Rate 1 is for the same from the same moment on: 5.000000 credits")
    assert len(brokers[0].trail()) == 1


def test_the_clock_set_back_and_forward_a_day(broker: Broker, clock: Clock) -> None:
    broker.prices.set_rate(1, model="A100", actor="kim")
    clock.forward(days=-1)
    assert price(broker) == 4 * MICRO, "it holds from when it was set"
    with pytest.raises(InvalidRequest, match="that is over"):
        broker.prices.set_rate(2, model="A100", since="2025-02-28 11:00", actor="kim")
    broker.prices.set_rate(2, model="A100", actor="kim")
    assert price(broker) == 2 * MICRO
    clock.forward(days=1)
    assert price(broker) == MICRO


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"gpu_rates": {"A100": "1,5"}}, "The rate of 'A100' is not valid"),
        ({"special_rates": [{"rate": "1,5"}]}, "Entry 1 of c.GPURates.special"),
        ({"rate_zone": "Mars"}, "GPURates.zone: 'Mars' is no time zone"),
    ],
)
def test_a_configuration_that_is_none_stops_the_start(
    make: Make, settings: dict[str, Any], sentence: str
) -> None:
    make()
    with pytest.raises(ConfigError) as caught:
        make(**settings)
    assert sentence in caught.value.message


def test_what_is_shown_is_what_is_paid_whatever_is_set_meanwhile(
    broker: Broker, clock: Clock
) -> None:
    """Over a day of changes: each start pays what the form showed at its moment."""
    broker.prices.set_rate(3, model="A100", hours="20-8", zone=VIENNA, actor="kim")
    broker.prices.set_rate("0.5", environment="pytorch", since="2025-03-02 06:00", actor="kim")
    broker.prices.set_rate(6, environment="pytorch", hours="Sun 9-10", actor="kim")
    paid: list[tuple[int, Lease]] = []
    for hour in range(48):
        clock.now = T0 + timedelta(hours=hour, seconds=1)
        shown = broker.overview().rates.card(clock.now, "pytorch").rate_of("NVIDIA A100-SXM4-80GB")
        lease = running(broker, "anna")
        clock.forward(minutes=30, microseconds=hour)
        paid.append((shown, broker.release(lease.id, ended_at=clock.now, reason="stopped")))
    assert {shown for shown, _ in paid} == {4 * MICRO, 3 * MICRO, MICRO // 2, 6 * MICRO}
    for shown, lease in paid:
        assert lease.ended_at
        assert lease.charged == owed(shown, lease.started_at, lease.ended_at)


# Who has the form open when prices rise.


@pytest.mark.parametrize(
    ("minutes", "rate"), [(0.1, 4), (9.99, 4), (10, 4), (10.01, 9), (10_000_000, 9)]
)
def test_what_a_form_showed_holds_for_ten_minutes(
    broker: Broker, clock: Clock, minutes: float, rate: int
) -> None:
    terms = Terms(shown_at=clock.now)
    broker.prices.set_rate(9, model="A100", since="2025-03-01 12:00:01", actor="kim")
    clock.forward(minutes=minutes)
    request = Request(devices=1, environment="pytorch")
    lease = broker.acquire(ServerRef("anna"), request, engine="docker", terms=terms)
    assert lease.rate == rate * MICRO


def test_a_form_that_has_not_come_yet_says_nothing(broker: Broker, clock: Clock) -> None:
    """Nobody starts by day at the price of the night to come."""
    broker.prices.set_rate(1, model="A100", since="2025-03-01 12:05", actor="kim")
    terms = Terms(shown_at=clock.now + timedelta(minutes=6))
    request = Request(devices=1, environment="pytorch")
    lease = broker.acquire(ServerRef("anna"), request, engine="docker", terms=terms)
    assert lease.rate == 4 * MICRO


def test_a_price_that_fell_is_paid_at_once(broker: Broker, clock: Clock) -> None:
    terms = Terms(shown_at=clock.now)
    clock.forward(minutes=1)
    broker.prices.set_rate(1, model="A100", actor="kim")
    request = Request(devices=1, environment="pytorch")
    lease = broker.acquire(ServerRef("anna"), request, engine="docker", terms=terms)
    assert lease.rate == MICRO
