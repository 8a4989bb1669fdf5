"""When schedules come: cron expressions, time zones, daylight saving, times that were missed. Real:
the rules and cronsim. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.core.errors import InvalidRequest
from gpuspawner.runs.models import Work
from gpuspawner.runs.schedules import (
    DueRun,
    Schedule,
    explain,
    newest_due,
    next_time,
    require_cron,
)

VIENNA = "Europe/Vienna"
FIRST = datetime(2026, 11, 29, 12, tzinfo=timezone.utc)


def utc(year: int, month: int, day: int, hour: int = 0, minute: int = 0) -> datetime:
    return datetime(year, month, day, hour, minute, tzinfo=timezone.utc)


def times(cron: str, zone: str, after: datetime, count: int) -> list[str]:
    found = []
    for _ in range(count):
        after = next_time(cron, zone, after)
        found.append(f"{after:%m-%d %H:%M}")
    return found


def schedule(cron: str, next_at: datetime, zone: str = "UTC") -> Schedule:
    return Schedule(
        id="train-1",
        user="ada",
        title="train",
        cron=cron,
        zone=zone,
        work=Work(command=("train",)),
        created_at=FIRST,
        next_at=next_at,
    )


def test_time_of_day_follows_the_zone() -> None:
    assert times("30 7 * * 1-5", VIENNA, utc(2026, 7, 3, 12), 2) == ["07-06 05:30", "07-07 05:30"]
    assert times("30 7 * * 1-5", VIENNA, utc(2026, 12, 4, 12), 1) == ["12-07 06:30"]
    assert times("30 7 * * MON", "Asia/Kolkata", utc(2026, 12, 4), 1) == ["12-07 02:00"]
    assert times("0 0 L * *", "UTC", utc(2027, 2, 1), 2) == ["02-28 00:00", "03-31 00:00"]


def test_skipped_time_of_day_comes_at_the_end_of_the_gap() -> None:
    """In Vienna, the clocks go from 2:00 to 3:00 on 28 March 2027, which is 1:00 UTC."""
    before = utc(2027, 3, 27, 12)
    assert times("30 2 * * *", VIENNA, before, 2) == ["03-28 01:00", "03-29 00:30"]
    assert times("15,45 2 * * *", VIENNA, before, 2) == ["03-28 01:00", "03-29 00:15"]


def test_time_of_day_that_occurs_twice_comes_once() -> None:
    """In Vienna, the clocks go from 3:00 to 2:00 on 25 October 2026, which is 1:00 UTC."""
    before = utc(2026, 10, 24, 12)
    assert times("30 2 * * *", VIENNA, before, 2) == ["10-25 00:30", "10-26 01:30"]
    in_the_second_hour = utc(2026, 10, 25, 1, 10)
    assert times("30 2 * * *", VIENNA, in_the_second_hour, 1) == ["10-26 01:30"]


def test_each_hour_is_each_real_hour() -> None:
    autumn, spring = utc(2026, 10, 24, 23, 30), utc(2027, 3, 27, 23, 30)
    for start in (autumn, spring):
        found, after = [start], start
        for _ in range(5):
            after = next_time("30 * * * *", VIENNA, after)
            found.append(after)
        assert {later - sooner for sooner, later in pairwise(found)} == {timedelta(hours=1)}


@pytest.mark.parametrize(
    "cron", ["", "x", "* * * *", "0 0 7 * * *", "60 * * * *", "@daily", "٣ 7 * * *"]
)
def test_other_text_is_refused(cron: str) -> None:
    with pytest.raises(InvalidRequest, match="The field 'cron' is not a cron expression"):
        require_cron(cron, "UTC", FIRST)


def test_day_that_never_comes_and_unknown_zones_are_refused() -> None:
    for cron in ("0 0 31 2 *", "0 0 30 FEB *"):
        with pytest.raises(InvalidRequest, match="cron"):
            require_cron(cron, "UTC", FIRST)
    with pytest.raises(InvalidRequest, match="no day that comes"):
        require_cron("0 0 */31 * MON#5", "UTC", FIRST)
    with pytest.raises(InvalidRequest, match="not a time zone"):
        require_cron("0 7 * * *", "Europe/Nowhere", FIRST)
    assert require_cron("0 0 29 2 *", "UTC", FIRST) == utc(2028, 2, 29)


def test_newest_of_several_missed_times_is_due() -> None:
    each_minute = schedule("* * * * *", FIRST)
    assert newest_due(each_minute, FIRST) == (FIRST, FIRST + timedelta(minutes=1))
    year = FIRST + timedelta(days=365, seconds=30)
    assert newest_due(each_minute, year) == (
        year - timedelta(seconds=30),
        year + timedelta(seconds=30),
    )
    yearly = schedule("0 12 29 11 *", FIRST)
    assert newest_due(yearly, FIRST + timedelta(days=100)) == (FIRST, utc(2027, 11, 29, 12))
    assert newest_due(yearly, utc(2040, 1, 1)) == (utc(2039, 11, 29, 12), utc(2040, 11, 29, 12))


CRONS = ("*/7 * * * *", "30 2 * * *", "0 3 1 * *", "15 1-3 * * 0", "0 12 29 2 *")


@given(
    cron=st.sampled_from(CRONS),
    zone=st.sampled_from([VIENNA, "UTC", "America/New_York", "Australia/Lord_Howe"]),
    start=st.integers(0, 10**9),
    missed=st.integers(0, 10**6),
)
def test_newest_due_time_is_the_last_that_has_come(
    cron: str, zone: str, start: int, missed: int
) -> None:
    first = next_time(cron, zone, datetime.fromtimestamp(10**9 + start, timezone.utc))
    now = first + timedelta(seconds=missed)
    due, after = newest_due(schedule(cron, first, zone), now)
    assert first <= due <= now < after
    assert next_time(cron, zone, due) == after


def test_run_of_a_time_has_a_key_and_a_folder_of_its_own() -> None:
    due = DueRun(schedule("0 7 * * *", FIRST), FIRST)
    assert due.key == f"schedule:train-1:{int(FIRST.timestamp())}"
    assert due.folder == "runs/2026-11-29-120000-train-1"


def test_expression_is_said_in_words() -> None:
    assert explain("30 7 * * 1-5") == "At 07:30 on Monday through Friday"
