"""The chart of the last weeks, and weeks themselves. Real: everything, it is pure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import date, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.core import weeks
from gpuspawner.core.errors import InvalidRequest
from gpuspawner.core.units import MICRO
from gpuspawner.ledger.usage import LeaseUse
from gpuspawner.monitoring.charts import CHART_HEIGHT, CHART_WIDTH, chart, short

NOW = datetime(2026, 3, 11, 12, tzinfo=timezone.utc)


@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=12))
def test_bars_stay_in_the_drawing_and_in_order(costs: list[int]) -> None:
    drawn = chart([LeaseUse(cost=cost) for cost in costs], ["x"] * len(costs))
    for bar, cost in zip(drawn.bars, costs, strict=True):
        assert 0 <= bar.x < bar.middle < bar.x + bar.width <= CHART_WIDTH
        assert 0 <= bar.y <= drawn.ground < CHART_HEIGHT
        assert bar.y + bar.height == drawn.ground
        assert (bar.height > 0) == (cost > 0)
    by_cost = sorted(zip(costs, drawn.bars, strict=True), key=lambda pair: pair[0])
    heights = [bar.height for _, bar in by_cost]
    assert heights == sorted(heights)


@pytest.mark.parametrize(
    ("credits", "said"),
    [
        (0, "0"),
        (0.001, "<0.01"),
        (0.01, "0.01"),
        (9.999, "9.99"),
        (10, "10.0"),
        (999.99, "999.9"),
        (1000, "1.0k"),
        (9999, "9.9k"),
        (10_000, "10k"),
        (999_999, "999k"),
        (1_000_000, "1.0M"),
        (10**9, "1000M"),
    ],
)
def test_values_are_short_and_never_too_high(credits: float, said: str) -> None:
    assert short(round(credits * MICRO)) == said
    assert len(said) <= 5


@pytest.fixture(autouse=True)
def new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A zone whose clocks went forward on 8 March 2026."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_weeks_begin_on_the_hubs_own_monday() -> None:
    bounds = weeks.last_weeks(NOW, 3)
    local = [moment.astimezone() for moment in bounds]
    assert [moment.strftime("%a %H:%M") for moment in local] == ["Mon 00:00"] * 4
    assert [moment.day for moment in local] == [23, 2, 9, 16]
    assert bounds[2] <= NOW < bounds[3]
    assert bounds[1] - bounds[0] == timedelta(weeks=1)
    assert bounds[2] - bounds[1] == timedelta(weeks=1) - timedelta(hours=1)  # the clocks went on


def test_a_period_is_split_at_mondays() -> None:
    found = list(weeks.split(date(2026, 3, 4), date(2026, 3, 16)))
    assert found == [
        (date(2026, 3, 4), date(2026, 3, 8)),
        (date(2026, 3, 9), date(2026, 3, 15)),
        (date(2026, 3, 16), date(2026, 3, 16)),
    ]


def test_the_usual_period_is_this_week_and_three_before_it() -> None:
    assert weeks.period("", "", NOW) == (date(2026, 2, 16), date(2026, 3, 11))
    assert weeks.period("", "2026-01-31", NOW) == (date(2026, 1, 5), date(2026, 1, 31))


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
        ("2024-01-01", "2026-03-01", "two years at the most"),
    ],
)
def test_a_period_that_makes_no_sense_is_named(since: str, until: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said.replace(".", r"\.")):
        weeks.period(since, until, NOW)
