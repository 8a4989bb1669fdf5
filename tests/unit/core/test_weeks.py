"""Weeks of the hub's own zone. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import date, datetime, timedelta, timezone

import pytest

from gpuspawner.core import times
from gpuspawner.core.errors import InvalidRequest

NOW = datetime(2026, 3, 11, 12, tzinfo=timezone.utc)


@pytest.fixture(autouse=True)
def new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A zone whose clocks went forward on 8 March 2026."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_weeks_begin_on_monday_in_the_hub_time_zone() -> None:
    bounds = times.last_weeks(NOW, 3)
    local = [moment.astimezone() for moment in bounds]
    assert [moment.strftime("%a %H:%M") for moment in local] == ["Mon 00:00"] * 4
    assert [moment.day for moment in local] == [23, 2, 9, 16]
    assert bounds[2] <= NOW < bounds[3]
    assert bounds[1] - bounds[0] == timedelta(weeks=1)
    assert bounds[2] - bounds[1] == timedelta(weeks=1) - timedelta(hours=1)  # the clocks went on


def test_period_splits_at_mondays_and_defaults_to_four_weeks() -> None:
    march = [date(2026, 3, day) for day in range(1, 17)]
    found = list(times.split(march[3], march[15]))
    assert found == [(march[3], march[7]), (march[8], march[14]), (march[15], march[15])]
    assert times.period("", "", NOW) == (date(2026, 2, 16), march[10])
    assert times.period("", "2026-01-31", NOW) == (date(2026, 1, 5), date(2026, 1, 31))


@pytest.mark.parametrize(
    ("since", "until", "said"),
    [
        ("yesterday", "", "'from' is 'yesterday': write a day such as 2026-03-01"),
        ("", "2026-02-30", "'to' is '2026-02-30'"),
        ("1026-02-03", "", "'from'"),
        ("2026-3-1", "", "'from'"),
        ("2026-03-01T00", "", "'from'"),
        ("٢٠٢٦-03-01", "", "'from'"),
        ("2026-03-02", "2026-03-01", "which is after 'to'"),
        ("2024-01-01", "2026-03-01", "two years at most"),
    ],
)
def test_invalid_period_is_rejected_with_a_reason(since: str, until: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said.replace(".", r"\.")):
        times.period(since, until, NOW)
