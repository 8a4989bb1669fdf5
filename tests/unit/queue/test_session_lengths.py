"""How long sessions last, from those alike. Pure; simple sums check the quick ones."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.queue.session_lengths import ExpectedLength, SessionLengths
from tests.unit.queue.site import DAY, HOUR, T0


def learned(*seconds: float, default: float = 1800.0, samples: int = 9) -> SessionLengths:
    lengths = SessionLengths(default, samples)
    alike = lengths.alike("m", "g", 1)
    for each in seconds:
        lengths.end(alike, alike.asked, T0, each)
        alike.asked += 1
    return lengths


def expect(lengths: SessionLengths, most: float | None = None, now: float = T0) -> ExpectedLength:
    alike = lengths.alike("m", "g", 1)
    return lengths.estimate(alike, alike.asked, now, most)


def test_length_estimate_follows_similar_sessions_up_to_limit() -> None:
    assert expect(learned(*9 * [HOUR])) == ExpectedLength(HOUR, HOUR)
    assert expect(learned(*5 * [60.0], *9 * [HOUR])) == ExpectedLength(HOUR, HOUR)

    assert expect(learned(*9 * [HOUR]), most=600.0) == ExpectedLength(600.0, 600.0)

    length = expect(learned(*4 * [60.0], *5 * [10 * HOUR]))

    assert length.seconds == 10 * HOUR
    assert 60.0 < length.cost < 2 * HOUR

    alone, of_others = learned(), learned(*3 * [HOUR])
    stranger = of_others.alike("somebody else", "g", 1)

    assert expect(alone).seconds == 1800.0 and expect(alone).cost < 600.0
    assert expect(alone, most=8 * HOUR).seconds <= 8 * HOUR
    assert of_others.estimate(stranger, 0, T0, None).seconds == HOUR

    lengths = learned(*map(float, range(5000)))
    everything, _ = lengths.alike("m", "g", 1).witnesses(4970, 10_000)

    assert len(everything) <= 121
    assert expect(lengths).seconds == pytest.approx(4996, abs=5)


def test_length_estimate_uses_sessions_requested_nearby() -> None:
    """Of those asked for long before much is known; of these nothing yet."""
    lengths = learned(*99 * [HOUR])
    alike = lengths.alike("m", "g", 1)

    assert lengths.estimate(alike, alike.asked, T0, None).seconds == HOUR
    assert lengths.estimate(alike, alike.asked + 500, T0, None).seconds == 1800.0
    lengths.end(alike, alike.asked + 499, T0, 60.0)
    lengths.end(alike, alike.asked + 501, T0, 60.0)
    lengths.end(alike, alike.asked + 502, T0, 60.0)
    assert lengths.estimate(alike, alike.asked + 500, T0, None).seconds == 60.0


def test_running_sessions_lengthen_the_estimate() -> None:
    lengths = learned(*9 * [HOUR])
    alike = lengths.alike("m", "g", 1)
    for n in range(5):
        alike.start(alike.asked + n, T0)
    alike.asked += 5
    soon = lengths.estimate(alike, alike.asked, T0 + 60, None)
    later = lengths.estimate(alike, alike.asked, T0 + 9 * HOUR, None)

    assert soon.seconds == HOUR
    assert later.seconds > 9 * HOUR


@given(
    st.lists(st.floats(0, 9 * DAY), max_size=40),
    st.lists(st.floats(0, 9 * DAY), max_size=20),
    st.floats(-DAY, 9 * DAY),
    st.none() | st.floats(60, DAY),
)
def test_length_estimate_is_positive_and_within_the_limit(
    ended: list[float], running: list[float], later: float, most: float | None
) -> None:
    lengths = learned(*ended)
    alike = lengths.alike("m", "g", 1)
    for since in running:
        alike.start(alike.asked, T0 + since)
        alike.asked += 1
    length = lengths.estimate(alike, alike.asked, T0 + later, most)

    assert 0.0 < length.seconds <= (most or math.inf)
    assert 0.0 < length.cost < math.inf
    for since in running:
        end = lengths.end_of(alike, alike.asked, T0 + since, T0 + later)
        assert end >= T0 + max(later, since) - 1e-3


@given(st.lists(st.integers(0, 99), max_size=60), st.integers(0, 99))
def test_nearest_similar_sessions_are_selected(numbers: list[int], near: int) -> None:
    lengths = SessionLengths(1800.0, 9)
    alike = lengths.alike("m", "", 1)
    for number in numbers:
        lengths.end(alike, number, T0, float(number))
    done, _ = alike.witnesses(near, 9)
    distances = sorted(abs(number - near) for number in numbers if abs(number - near) <= 60)

    assert sorted(abs(seconds - near) for seconds in done) == distances[:9]
