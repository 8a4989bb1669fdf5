"""Hours of the week: all real, pure values; the zones are the machine's own or tzdata's."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.ledger.pricing import WeekHours, open_zone

NIGHT = WeekHours.parse("20-8", "Europe/Vienna")
ZONES = ("UTC", "Europe/Vienna", "America/St_Johns", "Asia/Kathmandu", "Australia/Lord_Howe")
MOMENTS = st.datetimes(datetime(2024, 1, 1), datetime(2028, 1, 1), timezones=st.just(timezone.utc))


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
def test_hours_are_read(text: str, hours: set[int]) -> None:
    assert WeekHours.parse(text, "UTC").hours == hours


@pytest.mark.parametrize(
    "text", ["", "Moon", "Mon,", "Mon 25-3", "24-3", "8-8", "1:30-3", "Mon-", "9", "-1-3", 5, None]
)
def test_what_is_no_hour_is_refused_by_its_name(text: object) -> None:
    with pytest.raises(ValueError, match=r"are no hours of .* like 'Mon-Fri 20-8, Sat, Sun'"):
        WeekHours.parse(text, "UTC")


@pytest.mark.parametrize("zone", ["", "Mars/Base", "..", "/etc/passwd", "Europe", "a\0b"])
def test_a_zone_that_is_none_is_refused_by_its_name(zone: str) -> None:
    with pytest.raises(ValueError, match="is no time zone: write a name such as 'Europe/Vienna'"):
        WeekHours.parse("20-8", zone)


def test_daylight_saving_moves_with_the_clock_on_the_wall() -> None:
    assert not NIGHT.holds(utc("2026-03-28 18:59"))
    assert NIGHT.holds(utc("2026-03-28 19:00")), "20:00 in winter"
    assert NIGHT.holds(utc("2026-03-29 05:59")), "7:59 in summer, from that night on"
    assert not NIGHT.holds(utc("2026-03-29 06:00"))
    assert NIGHT.holds(utc("2026-03-29 18:00")), "20:00 in summer"
    assert NIGHT.next_change(utc("2026-03-28 20:00")) == utc("2026-03-29 06:00"), "11 hours long"
    assert NIGHT.next_change(utc("2026-10-24 18:30")) == utc("2026-10-25 07:00"), "13 hours long"


def test_an_hour_that_does_not_come_and_one_that_comes_twice() -> None:
    at_two = WeekHours.parse("2-3", "Europe/Vienna")
    day = [utc("2026-03-29 00:00") + timedelta(minutes=15 * n) for n in range(80)]
    assert not any(at_two.holds(moment) for moment in day)
    twice = [utc("2026-10-24 22:00") + timedelta(hours=n) for n in range(24)]
    assert sum(at_two.holds(moment) for moment in twice) == 2


def test_hours_that_are_always_change_never() -> None:
    assert WeekHours.parse("0-24", "UTC").next_change(utc("2026-01-01")) is None


@given(MOMENTS, st.sampled_from(ZONES), st.sets(st.integers(0, 167), min_size=1, max_size=167))
def test_nothing_changes_before_the_next_change(at: datetime, zone: str, hours: set[int]) -> None:
    some = WeekHours("", frozenset(hours), zone)
    change = some.next_change(at)
    assert change is not None and change > at
    assert some.holds(change) != some.holds(at)
    steps = [at + (change - at) * n / 50 for n in range(50)]
    assert {some.holds(step) for step in steps} == {some.holds(at)}
    assert some.holds(change - timedelta.resolution) == some.holds(at)


@given(MOMENTS, st.sampled_from(ZONES))
def test_an_hour_is_the_one_on_the_wall(at: datetime, zone: str) -> None:
    local = at.astimezone(open_zone(zone))
    wall = WeekHours.parse(f"{local:%a} {local.hour}-{local.hour + 1}", zone)
    assert wall.holds(at)
    assert not wall.holds(at + timedelta(hours=3))
