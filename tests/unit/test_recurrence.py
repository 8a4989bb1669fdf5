"""When something comes again. Real: everything, with the zones of this machine's database."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.ledger.refills import LEAST_GAP, Recurrence

VIENNA = "Europe/Vienna"
START = datetime(2027, 1, 1, 7, tzinfo=timezone.utc)
"""A Friday, 8 o'clock in Vienna."""


def local(rule: str, zone: str = VIENNA, start: datetime = START, count: int = 3) -> list[str]:
    """The first occurrences, by the clock of the zone."""
    made = Recurrence.parse(rule, zone, start)
    found = islice(made.after(start, inclusive=True), count)
    return [at.astimezone(ZoneInfo(zone)).strftime("%Y-%m-%d %H:%M") for at in found]


@pytest.mark.parametrize(
    ("rule", "days"),
    [
        ("FREQ=DAILY", ["2027-01-01 08:00", "2027-01-02 08:00", "2027-01-03 08:00"]),
        ("rrule:freq=weekly;byday=mo", ["2027-01-04 08:00", "2027-01-11 08:00"]),
        ("FREQ=MONTHLY;BYMONTHDAY=-1", ["2027-01-31 08:00", "2027-02-28 08:00"]),
        ("FREQ=MONTHLY;BYDAY=1MO;BYHOUR=6;BYMINUTE=30", ["2027-01-04 06:30", "2027-02-01 06:30"]),
        ("FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=29", ["2028-02-29 08:00", "2032-02-29 08:00"]),
        ("FREQ=DAILY;COUNT=2", ["2027-01-01 08:00", "2027-01-02 08:00"]),
        ("FREQ=DAILY;UNTIL=20270102", ["2027-01-01 08:00", "2027-01-02 08:00"]),
        ("FREQ=DAILY;UNTIL=20270102T070000Z", ["2027-01-01 08:00", "2027-01-02 08:00"]),
        ("FREQ=DAILY;UNTIL=20270102T065959Z", ["2027-01-01 08:00"]),
        ("FREQ=DAILY;BYHOUR=0,12;INTERVAL=2;", ["2027-01-01 12:00", "2027-01-03 00:00"]),
    ],
)
def test_a_rule_says_when(rule: str, days: list[str]) -> None:
    assert local(rule, count=len(days)) == days
    if "COUNT" in rule or "UNTIL" in rule:
        assert local(rule, count=50) == days


def test_daylight_saving_does_not_move_the_clock_on_the_wall() -> None:
    """Vienna changes on 28 March at 2 and on 31 October at 3."""
    march, october = (
        datetime(2027, month, day, 7 - summer, tzinfo=timezone.utc)
        for month, day, summer in ((3, 26, 0), (10, 29, 1))
    )
    assert local("FREQ=DAILY", start=march) == [
        *("2027-03-26 08:00", "2027-03-27 08:00", "2027-03-28 08:00")
    ]
    made = Recurrence.parse("FREQ=DAILY", VIENNA, march)
    gaps = [later - one for one, later in pairs(made, march)]
    assert gaps == [timedelta(hours=24), timedelta(hours=23), timedelta(hours=24)]
    made = Recurrence.parse("FREQ=DAILY", VIENNA, october)
    gaps = [later - one for one, later in pairs(made, october)]
    assert gaps == [timedelta(hours=24), timedelta(hours=25), timedelta(hours=24)]


def pairs(made: Recurrence, start: datetime) -> list[tuple[datetime, datetime]]:
    found = list(islice(made.after(start - timedelta(days=1)), 4))
    return list(pairwise(found))


def test_an_hour_that_is_left_out_or_comes_twice_is_one_occurrence() -> None:
    rule = "FREQ=DAILY;BYHOUR=2;BYMINUTE=30"
    march = datetime(2027, 3, 27, tzinfo=timezone.utc)
    assert local(rule, start=march) == [
        *("2027-03-27 02:30", "2027-03-28 03:30", "2027-03-29 02:30")
    ]
    october = datetime(2027, 10, 30, tzinfo=timezone.utc)
    made = Recurrence.parse(rule, VIENNA, october)
    found = [at.strftime("%d %H:%M") for at in islice(made.after(october), 3)]
    assert found == ["30 00:30", "31 00:30", "01 01:30"]


def test_every_hour_of_a_day_with_23_is_23_times() -> None:
    rule = f"FREQ=DAILY;BYHOUR={','.join(map(str, range(24)))}"
    start = datetime(2027, 3, 27, 23, tzinfo=timezone.utc)  # 28 March, midnight
    made = Recurrence.parse(rule, VIENNA, start)
    found = list(islice(made.after(start, inclusive=True), 23))
    assert found == [start + timedelta(hours=hour) for hour in range(23)]


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("FREQ=SECONDLY", "comes too often"),
        ("FREQ=MINUTELY;INTERVAL=600", "comes too often"),
        ("FREQ=HOURLY", "comes too often"),
        ("FREQ=DAILY;BYSECOND=0,1", "comes too often"),
        ("FREQ=DAILY;BYMINUTE=0,1", "more than once an hour"),
        ("FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=30", "never comes"),
        ("FREQ=YEARLY;UNTIL=20261231", "never comes"),
        ("FREQ=DAILY;INTERVAL=7;BYDAY=MO;BYHOUR=8;COUNT=0", "COUNT=0 is not from 1"),
        ("FREQ=DAILY;INTERVAL=0", "INTERVAL=0 is not from 1"),
        ("FREQ=DAILY;INTERVAL=-1", "is not from 1"),
        ("FREQ=DAILY;INTERVAL=99999999999999999999", "is not from 1"),
        ("FREQ=DAILY;UNTIL=never", "UNTIL=NEVER is neither"),
        ("FREQ=DAILY;UNTIL=20271332", "no recurrence rule"),
        ("FREQ=WEEKLY;BYDAY=XX", "no recurrence rule"),
        ("FREQ=DAILY;BYHOUR=25", "no recurrence rule"),
        ("FREQ=DAILY;FREQ=WEEKLY", "see 'FREQ=WEEKLY'"),
        ("FREQ=DAILY;BYEASTER=1", "see 'BYEASTER=1'"),
        ("FREQ=DAILY;DTSTART=20270101", "see 'DTSTART=20270101'"),
        ("INTERVAL=2", "does not say how often"),
        ("every monday", "no recurrence rule"),
        ("", "no recurrence rule"),
        ("FREQ=DAILY\nRDATE:20270101", "no recurrence rule"),
        ("FREQ=" + "X" * 5000, "no recurrence rule"),
    ],
)
def test_what_is_no_rule_is_refused_in_words(rule: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        Recurrence.parse(rule, VIENNA, START)
    assert "FREQ=WEEKLY;BYDAY=MO;BYHOUR=8" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_zone_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="Nowhere/Else"):
        Recurrence.parse("FREQ=DAILY", "Nowhere/Else", START)


parts = st.lists(
    st.sampled_from(
        [
            *("INTERVAL=3", "BYDAY=MO,WE", "BYMONTHDAY=31", "BYMONTH=4", "BYSETPOS=1", "COUNT=5"),
            *("BYHOUR=2,3", "BYMINUTE=30", "BYYEARDAY=366", "BYWEEKNO=53", "UNTIL=20300101"),
            *("BYHOUR=1", "BYDAY=2TU", "WKST=SU", "BYMINUTE=0,59"),
        ]
    ),
    max_size=4,
)
frequency = st.sampled_from(["YEARLY", "MONTHLY"])


@given(frequency, parts, st.sampled_from([VIENNA, "UTC", "Australia/Lord_Howe"]))
def test_whatever_is_accepted_comes_in_order_and_not_too_often(
    freq: str, more: list[str], zone: str
) -> None:
    try:
        made = Recurrence.parse(";".join([f"FREQ={freq}", *more]), zone, START)
    except ValueError as error:
        assert str(error)
        return
    found = list(islice(made.after(START, inclusive=True), 30))
    assert found and found[0] >= START
    assert all(later - one >= LEAST_GAP for one, later in pairwise(found))
    for one, later in pairwise(found):
        assert made.next(one) == later
