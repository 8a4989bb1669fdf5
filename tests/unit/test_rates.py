"""All rates together, and the price of one moment: all real, pure values."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.core.errors import ConfigError
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease, LeasedDevice, LeaseState, ServerRef
from gpuspawner.ledger import rules as ledger_rules
from gpuspawner.ledger.pricing import (
    Rate,
    RateCard,
    Rates,
    WeekHours,
    parse_moment,
    parse_rate,
    rates_by_model,
    special_rates,
)

NOON = datetime(2026, 3, 2, 12, tzinfo=timezone.utc)
"""A Monday."""
NIGHT = WeekHours.parse("20-8", "UTC")
A100 = "NVIDIA A100-SXM4-80GB"


def price(
    rates: Rates, at: datetime = NOON, model: str = A100, environment: str = "", slots: int = 1
) -> int:
    return rates.card(at, environment).rate_of(model, slots)


def test_the_store_goes_before_the_configuration() -> None:
    config = [*rates_by_model({"*": 1, "A100": 4}), Rate(amount=9, environment="lab")]
    rates = Rates.of(config, [Rate(id=1, amount=2)])
    assert price(rates) == price(rates, environment="lab") == 2


def test_the_more_particular_rate_wins_whatever_the_order() -> None:
    """Environment before model before share before hours before the date."""
    found = [
        Rate(amount=1),
        Rate(amount=2, since=NOON - timedelta(days=2)),
        Rate(amount=3, since=NOON - timedelta(days=1)),
        Rate(amount=4, hours=WeekHours.parse("0-24", "UTC")),
        Rate(amount=5, slots=1),
        Rate(amount=6, model="A100"),
        Rate(amount=7, model="A100 80GB"),
        Rate(amount=8, environment="lab"),
    ]
    for count in range(1, len(found) + 1):
        for some in (found[:count], found[:count][::-1]):
            assert price(Rates.of(some), environment="lab") == count
    assert price(Rates.of(found)) == 7, "the lab's is for nobody else"


def test_hours_and_dates_hold_at_their_time() -> None:
    rates = Rates.of(
        [
            Rate(amount=4),
            Rate(amount=1, hours=NIGHT),
            Rate(id=1, amount=2, since=NOON + timedelta(days=1)),
        ]
    )
    assert price(rates) == 4
    assert price(rates, NOON + timedelta(hours=8)) == 1
    assert price(rates, NOON + timedelta(hours=20)) == 4
    assert price(rates, NOON + timedelta(days=1)) == 2
    assert price(rates, NOON + timedelta(days=1, hours=9)) == 2, "the store's has no hours"
    assert rates.next_change(NOON) == NOON + timedelta(hours=8)
    assert rates.next_change(NOON + timedelta(hours=20)) == NOON + timedelta(days=1)
    assert Rates.of([Rate(amount=4)]).next_change(NOON) is None


def test_a_share_costs_its_part_rounded_up_unless_it_has_a_rate_of_its_own() -> None:
    rates = Rates.of([Rate(amount=100), Rate(amount=40, slots=4)])
    assert [price(rates, slots=n) for n in (1, 2, 3, 4)] == [100, 50, 34, 40]
    assert RateCard().rate_of("any", 3) == 333_334
    card = rates.card(NOON)
    assert card.price([SimpleNamespace(model=A100, slots=n) for n in (1, 4)]) == 140
    assert card.price([]) == 0


def test_special_rates_are_read() -> None:
    config: list[dict[str, Any]] = [
        {"model": "A100", "hours": "Mon-Fri 20-8", "rate": "2.5"},
        {"environment": "course", "rate": 0, "from": "2026-10-01"},
        {"slots": 4, "rate": 1, "from": date(2026, 3, 30)},
    ]
    night, course, quarter = special_rates(config, "Europe/Vienna")
    assert (night.amount, night.model, night.since) == (2_500_000, "A100", None)
    assert night.hours == WeekHours.parse("Mon-Fri 20-8", "Europe/Vienna")
    assert course.since == datetime(2026, 9, 30, 22, tzinfo=timezone.utc), "midnight in Vienna"
    assert (course.environment, course.model, course.amount) == ("course", "*", 0)
    assert (quarter.slots, quarter.since) == (4, datetime(2026, 3, 29, 22, tzinfo=timezone.utc))


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        (5, "5 is none"),
        ({"rat": 5}, "it has 'rat'"),
        ({"model": "A100"}, "its 'rate' is missing"),
        ({"rate": "1,5"}, "'1,5'. Write credits per GPU-hour as a decimal number"),
        ({"rate": 1, "model": ""}, "'' names no device model"),
        ({"rate": 1, "environment": 3}, "3 names no environment"),
        ({"rate": 1, "slots": 0}, "0 is no number of slots"),
        ({"rate": 1, "slots": True}, "True is no number of slots"),
        ({"rate": 1, "hours": "late"}, "'late' are no hours of the week"),
        ({"rate": 1, "from": "tomorrow"}, "'tomorrow' is no date"),
        ({"rate": 1, "from": "0001-01-01"}, "is no date"),
    ],
)
def test_a_special_rate_that_is_none_is_refused_by_its_number(entry: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        special_rates([{"rate": 1}, entry], "Asia/Tokyo")
    assert caught.value.message.startswith("Entry 2 of c.GPURates.special is not valid: ")
    assert sentence in caught.value.message


def test_two_entries_for_the_same_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Entry 2 .*: entry 1 is for the same"):
        special_rates([{"model": "A100-80GB", "rate": 1}, {"model": "80gb a100", "rate": 2}], "UTC")


def test_a_zone_of_nowhere_is_refused() -> None:
    with pytest.raises(ConfigError, match="'Mars' is no time zone"):
        special_rates([{"rate": 1, "from": "2026-10-01"}], "Mars")


@pytest.mark.parametrize(
    "value",
    [-1, "-0.5", "1,5", "", "nan", "NaN", float("nan"), float("inf"), 1e30, 10**30, 10**400,
     "9" * 400, "0." + "1" * 18, "1e3", True, None, [], "٣"],
)  # fmt: skip
def test_an_amount_that_is_none_is_a_sentence(value: Any) -> None:
    with pytest.raises(ValueError, match=r"such as 4 or '0\.5'") as caught:
        parse_rate(value)
    assert len(str(caught.value)) < 200


def test_a_moment_may_say_its_own_offset() -> None:
    assert parse_moment("2026-10-01 08:00+00:00", "Europe/Vienna").hour == 8
    assert parse_moment("2026-10-01 08:00", "Europe/Vienna").hour == 6


# The promises: the price shown is the price paid, and time and rate are all that it depends on.

DEVICES = ["NVIDIA A100-SXM4-80GB", "Tesla T4", "NVIDIA L40S"]
AMOUNTS = st.integers(0, 10**12)
HOURS = st.none() | st.sets(st.integers(0, 167), min_size=1).map(
    lambda hours: WeekHours("", frozenset(hours), "Europe/Vienna")
)
MOMENTS = st.datetimes(datetime(2025, 1, 1), datetime(2027, 1, 1), timezones=st.just(timezone.utc))
RATES = st.lists(
    st.builds(
        Rate,
        amount=AMOUNTS,
        model=st.sampled_from(["*", "A100", "T4", "A100 80GB", "nvidia"]),
        environment=st.sampled_from(["*", "lab", "course"]),
        slots=st.none() | st.integers(1, 4),
        hours=HOURS,
        since=st.none() | MOMENTS,
        id=st.none() | st.integers(1, 9),
    ),
    max_size=8,
)


def lease_at(rates: Rates, at: datetime, models: list[str]) -> Lease:
    """As a grant makes it: the rate is copied."""
    rate = rates.card(at, "lab").lease_rate(models)
    devices = tuple(
        LeasedDevice(uuid=f"GPU-{n}", slot=0, index=n, model=model, memory_bytes=1)
        for n, model in enumerate(models)
    )
    return Lease(
        id="1", server=ServerRef("ada"), account="member:ada", environment="lab", hold=0,
        devices=devices, rate=rate, granted_at=at, started_at=at, state=LeaseState.RUNNING,
    )  # fmt: skip


@given(
    RATES,
    MOMENTS,
    st.lists(st.sampled_from(DEVICES), min_size=1, max_size=4),
    st.timedeltas(timedelta(0), timedelta(days=30)),
    st.lists(st.floats(0, 1), max_size=6),
    RATES,
)
def test_the_price_shown_is_the_price_paid(
    found: list[Rate],
    at: datetime,
    models: list[str],
    length: timedelta,
    ticks: list[float],
    later: list[Rate],
) -> None:
    rates = Rates.of(found)
    shown = sum(rates.card(at, "lab").rate_of(model) for model in models)
    lease = lease_at(rates, at, models)
    paid = 0
    for part in sorted(ticks):  # over nights and days, whatever an admin sets meanwhile
        rates = Rates.of(found, later)
        due = ledger_rules.charge_due(lease, at + length * part)
        lease, paid = replace(lease, charged=lease.charged + due), paid + due
    paid += ledger_rules.settlement(lease, at + length, failed=False)
    micros = length // timedelta(microseconds=1)
    assert paid == shown * micros // 3_600_000_000
    assert lease.rate == shown


def test_of_two_that_are_as_particular_the_first_of_the_configuration_counts() -> None:
    night, evening = Rate(amount=1, hours=NIGHT), Rate(amount=2, hours=replace(NIGHT, zone="GMT"))
    at = NOON + timedelta(hours=9)
    assert price(Rates.of([night, evening]), at) == 1
    assert price(Rates.of([evening, night]), at) == 2


@given(RATES, MOMENTS, st.sampled_from(DEVICES))
def test_a_price_is_the_same_until_the_next_change(
    found: list[Rate], at: datetime, model: str
) -> None:
    rates = Rates.of(found)
    change = rates.next_change(at) or at + timedelta(days=8)
    for part in (0.0, 0.3, 0.999):
        # The product is rounded, which of one microsecond would be the change itself.
        moment = min(at + (change - at) * part, change - timedelta(microseconds=1))
        assert price(rates, moment, model, "lab") == price(rates, at, model, "lab")


@given(st.integers(0, MICRO * 100), st.integers(1, 64))
def test_all_slots_together_cost_at_least_the_device(amount: int, slots: int) -> None:
    rate = Rates.of([Rate(amount=amount)]).card(NOON).rate_of("any", slots)
    assert amount <= rate * slots < amount + slots
