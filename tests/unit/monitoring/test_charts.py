"""Bars of the last weeks, and curves of what a device did. Pure."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.core.units import MICRO, format_credits
from gpuspawner.ledger.usage import LeaseUse
from gpuspawner.monitoring.charts import (
    CHART_HEIGHT,
    CHART_WIDTH,
    CURVE_HEIGHT,
    CURVE_WIDTH,
    POINTS,
    DrawnCurve,
    chart,
    curve,
    short,
)
from gpuspawner.monitoring.models import DeviceUse


@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=12))
def test_chart_bars_stay_inside_and_follow_cost_order(costs: list[int]) -> None:
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
        (0.001, "0.00"),
        (0.006, "0.01"),
        (9.999, "10.00"),
        (12.534, "12.53"),
        (9999.99, "9999.99"),
        (9999.996, "10k"),
        (999_499, "999k"),
        (999_999, "1.0M"),
        (10**9, "1000M"),
    ],
)
def test_bars_have_the_figures_of_the_statement_unless_those_are_long(
    credits: float, said: str
) -> None:
    micro = round(credits * MICRO)
    assert short(micro) == said
    assert said in ("0", format_credits(micro)) or credits > 9999.99
    assert len(said) <= 7


# Curves of what a device did.


T0 = datetime(2026, 3, 2, 12, 0, tzinfo=timezone.utc)
GB = 2**30


def part(number: int, use: int | None = 50, seconds: int = 60, **fields: Any) -> DeviceUse:
    counts: dict[str, Any] = {"samples": seconds, "known": seconds, "busy": seconds // 2}
    if use is not None:
        counts |= {"measured": seconds, "use_sum": seconds * use, "use_max": use}
    since = T0 + timedelta(seconds=number * seconds)
    return DeviceUse(uuid="GPU-1", since=since, seconds=seconds, **(counts | fields))


def drawn(parts: list[DeviceUse], minutes: int = 60) -> DrawnCurve:
    return curve("Last hour", parts, T0, T0 + timedelta(minutes=minutes), 80 * GB)


def places(path: str) -> list[tuple[float, float]]:
    found = [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]
    assert all(0 <= x <= CURVE_WIDTH and 0 <= y <= CURVE_HEIGHT for x, y in found)
    return found


def test_usage_curve_rises_with_utilization() -> None:
    it = drawn([part(n, use) for n, use in enumerate((0, 50, 100))])
    (_, low), (x1, low_again), (x2, middle), (x3, high) = places(it.use)
    assert low == low_again == it.ground
    assert middle == pytest.approx((it.ground + it.top) / 2)
    assert high == it.top
    assert x1 < x2 < x3 < CURVE_WIDTH
    assert it.summary == "used 50 % on average, 100 % at most; memory 0.0 of 80 GB at most"


def test_curve_has_gaps_where_samples_are_missing() -> None:
    silent = part(2, None, known=0, busy=0, error="It is lost.")
    it = drawn([part(0), part(1), silent, part(3), part(30)])
    assert it.use.count("M") == 3
    assert it.memory.count("M") == 3
    assert places(it.use)[-1] == places(it.use)[-2], "a minute by itself is a dot"
    assert drawn([silent]).summary == "It did not respond."
    assert drawn([silent]).use == ""


def test_mig_curve_shows_time_with_processes() -> None:
    it = drawn([part(0, None, memory_max=8 * GB), part(1, None)])
    assert it.use
    assert it.summary == (
        "had processes for 50 % of the time (its use cannot be measured); "
        "memory 8.0 of 80 GB at most"
    )


@pytest.mark.parametrize(
    ("count", "seconds"), [(60, 60), (61, 60), (719, 60), (13, 3600), (24 * 90, 3600)]
)
def test_curve_point_count_is_bounded_for_long_sessions(count: int, seconds: int) -> None:
    it = drawn([part(n, n % 100, seconds) for n in range(count)], count * seconds // 60)
    assert min(count, POINTS // 2) <= len(places(it.use)) - 1 <= POINTS + 1
    assert it.use.count("M") == 1


def test_curve_stays_inside_after_a_clock_change() -> None:
    assert len(places(drawn([part(0), part(500)], 1).use)) == 4
    assert places(drawn([part(0, 100, memory_max=100 * GB)], 0).memory)
