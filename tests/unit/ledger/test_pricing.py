"""Rates, and the price of one moment: all real, pure values."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.core.errors import ConfigError
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import LeasedDevice, LeaseState
from gpuspawner.ledger import rules as ledger_rules
from gpuspawner.ledger.pricing import (
    MAX_RATE,
    Rate,
    RateCard,
    Rates,
    WeekHours,
    parse_moment,
    parse_rate,
    rates_by_model,
    special_rates,
)
from tests.support.leases import lease_of

NOON = datetime(2026, 3, 2, 12, tzinfo=timezone.utc)
"""A Monday."""
NIGHT = WeekHours.parse("20-8", "UTC")
A100 = "NVIDIA A100-SXM4-80GB"


def card_of(config: Any) -> RateCard:
    return Rates.of(rates_by_model(config)).card(NOON)


def price(
    rates: Rates, at: datetime = NOON, model: str = A100, environment: str = "", slots: int = 1
) -> int:
    return rates.card(at, environment).rate_of(model, slots)


def test_stored_then_most_specific_then_first_rate_wins() -> None:
    # Environment before model before share before hours before the date.
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

    config = [*rates_by_model({"*": 1, "A100": 4}), Rate(amount=9, environment="lab")]
    rates = Rates.of(config, [Rate(id=1, amount=2)])
    assert price(rates) == price(rates, environment="lab") == 2

    night, evening = Rate(amount=1, hours=NIGHT), Rate(amount=2, hours=replace(NIGHT, zone="GMT"))
    at = NOON + timedelta(hours=9)
    assert price(Rates.of([night, evening]), at) == 1
    assert price(Rates.of([evening, night]), at) == 2


def test_rates_apply_at_their_hours_and_dates() -> None:
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


def leased(model: str, slots: int = 1, held_slots: int = 1) -> LeasedDevice:
    return LeasedDevice("GPU-1", 0, 0, model, 80 * 2**30, slots, held_slots)


def test_price_sums_devices_and_rounds_slots_up() -> None:
    rates = Rates.of([Rate(amount=100), Rate(amount=40, slots=4)])
    assert [price(rates, slots=n) for n in (1, 2, 3, 4)] == [100, 50, 34, 40]
    assert RateCard().rate_of("any", 3) == 333_334
    card = rates.card(NOON)
    whole, one_slot, all_slots = leased(A100), leased(A100, 4), leased(A100, 4, 4)
    assert card.price([whole, one_slot]) == 140
    assert card.price([all_slots]) == 100, "all slots of a device cost what the device costs"
    assert card.price([]) == 0

    card = card_of({"A100": 4})
    assert (card.rate_of("Tesla T4"), card.rate_of("NVIDIA A100")) == (MICRO, 4 * MICRO)
    assert card_of({"*": 0}).rate_of("Tesla T4") == 0


def test_special_rates_are_parsed_in_their_time_zone() -> None:
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

    assert parse_moment("2026-10-01 08:00+00:00", "Europe/Vienna").hour == 8
    assert parse_moment("2026-10-01 08:00", "Europe/Vienna").hour == 6


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        (5, "5 is none"),
        ({"rat": 5}, "it has 'rat'"),
        ({"model": "A100"}, "its 'rate' is missing"),
        ({"rate": "1,5"}, "'1,5'. Write credits per GPU-hour as a decimal number"),
        ({"rate": 10**30}, "more than 1000000"),
        ({"rate": "0." + "1" * 18}, "has more than six decimals"),
        ({"rate": 1, "model": ""}, "'' names no device model"),
        ({"rate": 1, "environment": 3}, "3 names no environment"),
        ({"rate": 1, "slots": 0}, "0 is not a number of slots"),
        ({"rate": 1, "slots": True}, "True is not a number of slots"),
        ({"rate": 1, "hours": "late"}, "'late' are not hours of the week"),
        ({"rate": 1, "from": "tomorrow"}, "'tomorrow' is not a date"),
        ({"rate": 1, "from": "0001-01-01"}, "is not a date"),
    ],
)
def test_invalid_special_rate_is_rejected_with_its_number(entry: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        special_rates([{"rate": 1}, entry], "Asia/Tokyo")
    assert caught.value.message.startswith("Entry 2 of c.GPURates.special is not valid: ")
    assert sentence in caught.value.message
    with pytest.raises(ConfigError, match=r"Entry 2 .*: entry 1 is for the same"):
        special_rates([{"model": "A100-80GB", "rate": 1}, {"model": "80gb a100", "rate": 2}], "UTC")
    with pytest.raises(ConfigError, match="'Mars' is not a time zone"):
        special_rates([{"rate": 1, "from": "2026-10-01"}], "Mars")


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


@given(
    RATES,
    MOMENTS,
    st.lists(st.sampled_from(DEVICES), min_size=1, max_size=4),
    st.timedeltas(timedelta(0), timedelta(days=30)),
    st.lists(st.floats(0, 1), max_size=6),
    RATES,
)
def test_price_shown_is_the_price_paid(
    found: list[Rate],
    at: datetime,
    models: list[str],
    length: timedelta,
    ticks: list[float],
    later: list[Rate],
) -> None:
    rates = Rates.of(found)
    shown = sum(rates.card(at, "lab").rate_of(model) for model in models)
    devices = [leased(model) for model in models]
    rate = rates.card(at, "lab").price(devices)  # as a grant copies it
    lease = lease_of("ada", rate=rate, granted_at=at, started_at=at, state=LeaseState.RUNNING)
    paid = 0
    for part in sorted(ticks):  # over nights and days, whatever an admin sets meanwhile
        rates = Rates.of(found, later)
        due = ledger_rules.charge_due(lease, at + length * part)
        lease, paid = replace(lease, charged=lease.charged + due), paid + due
    paid += ledger_rules.settlement(lease, at + length, failed=False)
    micros = length // timedelta(microseconds=1)
    assert paid == shown * micros // 3_600_000_000
    assert lease.rate == shown


@given(st.integers(0, MICRO * 100), st.integers(1, 64))
def test_all_slots_together_cost_at_least_the_device(amount: int, slots: int) -> None:
    rate = Rates.of([Rate(amount=amount)]).card(NOON).rate_of("any", slots)
    assert amount <= rate * slots < amount + slots


# The card of one moment.


def test_longest_model_pattern_wins_in_any_order() -> None:
    rates: dict[str, Any] = {"A100": 4, "A100 SXM4": 5, "A100 SXM4 80GB": Decimal("9.000001")}
    rates |= {"A100 MIG 1g.5gb": "0.6", "L4": 0.75}
    for config in (rates, dict(reversed(rates.items()))):
        card = card_of({"*": 1, **config})
        assert card.rate_of("NVIDIA A100-SXM4-80GB") == 9 * MICRO + 1
        assert card.rate_of("NVIDIA A100-SXM4-40GB MIG 1g.5gb") == 600_000
        assert card.rate_of("NVIDIA A100-SXM4-40GB") == 5 * MICRO
        assert card.rate_of("NVIDIA A100-PCIE-40GB") == 4 * MICRO
        assert card.rate_of("NVIDIA L4") == 750_000
        assert card.rate_of("NVIDIA GeForce RTX 4090") == MICRO


@pytest.mark.parametrize(
    "value",
    [
        *(-1, "-0.5", "four", "1,5", "", "1e3", "nan", "NaN", "inf", True, None, [], "1_000", "٣"),
        *(float("nan"), float("inf"), 1e30, 10**30, 10**400, "9" * 400, "0." + "1" * 18),
        *("0.0000001", 1e-7, MAX_RATE // MICRO + 1),
    ],
)
def test_invalid_rate_is_rejected_with_its_model(value: Any) -> None:
    with pytest.raises(ConfigError, match="rate of 'A100' is not valid") as caught:
        card_of({"A100": value})
    with pytest.raises(ValueError, match=r"such as 4 or '0\.5'") as said:
        parse_rate(value)
    assert "such as 4 or '0.5'" in caught.value.message and len(str(said.value)) < 200


@pytest.mark.parametrize(
    ("config", "said"),
    [
        *(({key: 1}, "names no device model") for key in ("", "  ", "--", 100, None)),
        ({"A100-80GB": 1, "80gb a100": 2}, "'A100-80GB' and '80gb a100' name the same"),
        ([("A100", 1)], "is not a mapping"),
    ],
)
def test_invalid_rate_card_is_rejected(config: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        card_of(config)


@given(st.decimals(0, 1_000_000, places=6))
def test_rates_keep_six_decimals_exactly(credits: Decimal) -> None:
    card = card_of({"*": f"{credits:f}"})
    assert card.rate_of("any") == int(credits.scaleb(6))


# Hours of the week.


NIGHT_IN_VIENNA = WeekHours.parse("20-8", "Europe/Vienna")
ZONES = ("UTC", "Europe/Vienna", "America/St_Johns", "Asia/Kathmandu", "Australia/Lord_Howe")
ANY_MOMENT = st.datetimes(
    datetime(2024, 1, 1), datetime(2028, 1, 1), timezones=st.just(timezone.utc)
)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("text", "hours"),
    [
        ("Mon", set(range(24))),
        ("mon 9-17", set(range(9, 17))),
        ("Mon 9:00-17:00", set(range(9, 17))),
        ("Mon 22-2, Tue 12-13", {22, 23, 24, 25, 36}),
        ("Sun 22-2", {166, 167, 0, 1}),
        ("Sat-Sun", set(range(120, 168))),
        ("Sun-Mon 0-1", {0, 144}),
        ("0-24", set(range(168))),
    ],
)
def test_week_hours_are_parsed(text: str, hours: set[int]) -> None:
    assert WeekHours.parse(text, "UTC").hours == hours


@pytest.mark.parametrize(
    "text", ["", "Moon", "Mon,", "Mon 25-3", "24-3", "8-8", "1:30-3", "Mon-", "9", "-1-3", 5, None]
)
def test_invalid_week_hours_are_rejected(text: object) -> None:
    with pytest.raises(ValueError, match=r"are not hours of .* like 'Mon-Fri 20-8, Sat, Sun'"):
        WeekHours.parse(text, "UTC")


@pytest.mark.parametrize("zone", ["", "Mars/Base", "..", "/etc/passwd", "Europe", "a\0b"])
def test_unknown_time_zone_is_rejected(zone: str) -> None:
    with pytest.raises(ValueError, match="is not a time zone: write a name such as 'Europe/V"):
        WeekHours.parse("20-8", zone)


def test_week_hours_follow_local_time_across_daylight_saving() -> None:
    assert not NIGHT_IN_VIENNA.holds(utc("2026-03-28 18:59"))
    assert NIGHT_IN_VIENNA.holds(utc("2026-03-28 19:00")), "20:00 in winter"
    assert NIGHT_IN_VIENNA.holds(utc("2026-03-29 05:59")), "7:59 in summer, from that night on"
    assert not NIGHT_IN_VIENNA.holds(utc("2026-03-29 06:00"))
    assert NIGHT_IN_VIENNA.holds(utc("2026-03-29 18:00")), "20:00 in summer"
    assert NIGHT_IN_VIENNA.next_change(utc("2026-03-28 20:00")) == utc("2026-03-29 06:00"), (
        "11 hours long"
    )
    assert NIGHT_IN_VIENNA.next_change(utc("2026-10-24 18:30")) == utc("2026-10-25 07:00"), (
        "13 hours long"
    )

    # Hours that daylight saving skips or repeats.
    at_two = WeekHours.parse("2-3", "Europe/Vienna")
    day = [utc("2026-03-29 00:00") + timedelta(minutes=15 * n) for n in range(80)]
    assert not any(at_two.holds(moment) for moment in day)
    twice = [utc("2026-10-24 22:00") + timedelta(hours=n) for n in range(24)]
    assert sum(at_two.holds(moment) for moment in twice) == 2
    assert WeekHours.parse("0-24", "UTC").next_change(utc("2026-01-01")) is None


@given(ANY_MOMENT, st.sampled_from(ZONES), st.sets(st.integers(0, 167), min_size=1, max_size=167))
def test_week_hours_hold_until_the_next_change(at: datetime, zone: str, hours: set[int]) -> None:
    some = WeekHours("", frozenset(hours), zone)
    change = some.next_change(at)
    assert change is not None and change > at
    assert some.holds(change) != some.holds(at)
    steps = [at + (change - at) * n / 50 for n in range(50)]
    assert {some.holds(step) for step in steps} == {some.holds(at)}
    assert some.holds(change - timedelta.resolution) == some.holds(at)
