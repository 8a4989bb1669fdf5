"""When something comes again. Real: everything, with the zones of this machine's database."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.ledger.refill_views import schedule
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
def test_recurrence_rule_gives_its_dates(rule: str, days: list[str]) -> None:
    assert local(rule, count=len(days)) == days
    if "COUNT" in rule or "UNTIL" in rule:
        assert local(rule, count=50) == days


def test_hour_without_a_minute_is_the_full_hour() -> None:
    """At whatever minute somebody creates the refill; the confirmation says the full hour, too."""
    rule, start = "FREQ=DAILY;BYHOUR=8,9;COUNT=2", START + timedelta(minutes=22)
    assert local(rule, start=start, count=9) == ["2027-01-01 09:00", "2027-01-02 08:00"]


@pytest.mark.parametrize(
    ("first", "hours"),
    [(datetime(2027, 3, 26, 7), [24, 23, 24]), (datetime(2027, 10, 29, 6), [24, 25, 24])],
    ids=["28 March at 2", "31 October at 3"],
)
def test_recurrence_keeps_local_time_across_daylight_saving(
    first: datetime, hours: list[int]
) -> None:
    start = first.replace(tzinfo=timezone.utc)
    assert {text[-5:] for text in local("FREQ=DAILY", start=start, count=4)} == {"08:00"}
    made = Recurrence.parse("FREQ=DAILY", VIENNA, start)
    found = list(islice(made.after(start - timedelta(days=1)), 4))
    assert [later - one for one, later in pairwise(found)] == [timedelta(hours=n) for n in hours]


def test_skipped_or_repeated_hour_recurs_once() -> None:
    rule = "FREQ=DAILY;BYHOUR=2;BYMINUTE=30"
    march = datetime(2027, 3, 27, tzinfo=timezone.utc)
    assert local(rule, start=march) == [
        *("2027-03-27 02:30", "2027-03-28 03:30", "2027-03-29 02:30")
    ]
    october = datetime(2027, 10, 30, tzinfo=timezone.utc)
    made = Recurrence.parse(rule, VIENNA, october)
    found = [at.strftime("%d %H:%M") for at in islice(made.after(october), 3)]
    assert found == ["30 00:30", "31 00:30", "01 01:30"]


def test_rule_recurs_every_hour_of_a_23_hour_day() -> None:
    rule = f"FREQ=DAILY;BYHOUR={','.join(map(str, range(24)))}"
    start = datetime(2027, 3, 27, 23, tzinfo=timezone.utc)  # 28 March, midnight
    found = list(islice(Recurrence.parse(rule, VIENNA, start).after(start, inclusive=True), 23))
    assert found == [start + timedelta(hours=hour) for hour in range(23)]


TOO_OFTEN = ("SECONDLY", "MINUTELY;INTERVAL=600", "HOURLY", "DAILY;BYSECOND=0,1")
NEVER = ("BYMONTH=2;BYMONTHDAY=30", "UNTIL=20261231")
UNKNOWN = ("FREQ=WEEKLY", "BYEASTER=1", "DTSTART=20270101")
NO_RULES = (
    *("FREQ=DAILY;UNTIL=20271332", "FREQ=WEEKLY;BYDAY=XX", "FREQ=DAILY;BYHOUR=25", "every monday"),
    *("", "FREQ=DAILY\nRDATE:20270101", "FREQ=" + "X" * 5000),
)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        *((f"FREQ={rule}", "comes too often") for rule in TOO_OFTEN),
        ("FREQ=DAILY;BYMINUTE=0,1", "more than once an hour"),
        *((f"FREQ=YEARLY;{day}", "never occurs") for day in NEVER),
        ("FREQ=DAILY;INTERVAL=7;BYDAY=MO;BYHOUR=8;COUNT=0", "COUNT=0 is not from 1"),
        ("FREQ=DAILY;INTERVAL=0", "INTERVAL=0 is not from 1"),
        *((f"FREQ=DAILY;INTERVAL={n}", "is not from 1") for n in ("-1", "9" * 20)),
        ("FREQ=DAILY;UNTIL=never", "UNTIL=NEVER is neither"),
        *((f"FREQ=DAILY;{part}", f"see '{part}'") for part in UNKNOWN),
        ("INTERVAL=2", "does not say how often"),
        *((rule, "not a recurrence rule") for rule in NO_RULES),
    ],
)
def test_invalid_recurrence_rule_is_rejected_with_an_example(rule: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        Recurrence.parse(rule, VIENNA, START)
    assert "FREQ=WEEKLY;BYDAY=MO;BYHOUR=8" in str(caught.value)
    assert len(str(caught.value)) < 400
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
def test_recurrences_are_ordered_and_spaced_apart(freq: str, more: list[str], zone: str) -> None:
    try:
        made = Recurrence.parse(";".join([f"FREQ={freq}", *more]), zone, START)
    except ValueError as error:
        assert str(error)
        return
    found = list(islice(made.after(START, inclusive=True), 20))
    assert found and found[0] >= START
    assert all(later - one >= LEAST_GAP for one, later in pairwise(found))
    # None follows the last occurrence of a rule that has three at most.
    for one, later in zip(found[:3], [*found[1:4], None], strict=False):
        assert made.next(one) == later


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("FREQ=DAILY;BYHOUR=6;BYMINUTE=0", "every day at 06:00"),
        ("FREQ=WEEKLY;BYDAY=MO;BYHOUR=18;BYMINUTE=5", "every Monday at 18:05"),
        ("FREQ=WEEKLY;BYHOUR=6;BYDAY=SU", "every Sunday at 06:00"),
        ("FREQ=MONTHLY;BYMONTHDAY=1;BYHOUR=0", "on day 1 of every month at 00:00"),
        ("FREQ=WEEKLY;BYDAY=MO", "FREQ=WEEKLY;BYDAY=MO"),
        ("FREQ=WEEKLY;BYDAY=MO,TU;BYHOUR=6", "FREQ=WEEKLY;BYDAY=MO,TU;BYHOUR=6"),
        ("FREQ=DAILY;BYHOUR=6,18", "FREQ=DAILY;BYHOUR=6,18"),
        ("FREQ=DAILY;INTERVAL=2;BYHOUR=6", "FREQ=DAILY;INTERVAL=2;BYHOUR=6"),
    ],
)
def test_simple_rules_are_shown_as_a_schedule(rule: str, words: str) -> None:
    assert schedule(rule) == words
