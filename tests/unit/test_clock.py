"""The rules of the steady clock. Real: everything, it is pure."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.clock import (
    DAY,
    LASTS,
    LASTS_LONG,
    LONGEST_OFF,
    MINUTE,
    SECOND,
    STEP,
    TOLERATED,
    Offset,
    Reading,
    begin,
    engine_time,
    from_datetime,
    judge,
    kept,
    to_datetime,
)

HOUR = 60 * MINUTE
YEAR = 365 * DAY
NOW = 1_800_000_000 * SECOND
STEPS = [2 * HOUR, -2 * HOUR, YEAR, -YEAR, 61 * SECOND, -61 * SECOND]
AT = datetime(2025, 3, 1, 12, tzinfo=timezone.utc)


def reading(since_boot: int, wall_step: int = 0, boot_id: str = "a") -> Reading:
    return Reading(NOW + since_boot + wall_step, since_boot, boot_id)


def first() -> Offset:
    return begin(reading(5 * SECOND), None)


# Steps of the wall clock.


@pytest.mark.parametrize("step", STEPS)
def test_a_step_does_not_move_the_steady_time(step: int) -> None:
    verdict = judge(first(), reading(HOUR, step))
    assert (verdict.event, verdict.shift) == ("stepped", 0)
    assert verdict.offset.at(HOUR) == NOW + HOUR
    assert verdict.offset.step == step


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_is_corrected_leaves_no_trace(step: int) -> None:
    stepped = judge(first(), reading(HOUR, step)).offset
    verdict = judge(stepped, reading(HOUR + 8 * SECOND))
    assert (verdict.event, verdict.shift) == ("back", 0)
    assert verdict.offset == first()


@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_followed_when_it_has_lasted(step: int) -> None:
    lasts = LASTS_LONG if abs(step) > DAY else LASTS
    stepped = judge(first(), reading(HOUR, step)).offset
    assert judge(stepped, reading(HOUR + lasts - 1, step)).event == ""
    verdict = judge(stepped, reading(HOUR + lasts, step))
    assert (verdict.event, verdict.shift) == ("followed", step)
    assert verdict.offset.at(HOUR) == NOW + HOUR + step
    assert verdict.offset.version == first().version + 1
    assert judge(verdict.offset, reading(2 * HOUR, step)).offset == verdict.offset


def test_another_step_must_last_from_its_own_begin() -> None:
    offset = judge(first(), reading(HOUR, 2 * HOUR)).offset
    verdict = judge(offset, reading(HOUR + LASTS, 5 * HOUR))
    assert (verdict.event, verdict.shift) == ("stepped", 0)
    assert judge(verdict.offset, reading(HOUR + LASTS + 1, 5 * HOUR)).event == ""


@pytest.mark.parametrize("difference", [TOLERATED, -TOLERATED, 0])
def test_a_tiny_difference_is_left_alone(difference: int) -> None:
    assert judge(first(), reading(HOUR, difference)).offset == first()


@pytest.mark.parametrize("difference", [TOLERATED + 1, -TOLERATED - 1, STEP, -STEP])
def test_a_small_correction_is_followed_at_once(difference: int) -> None:
    verdict = judge(first(), reading(HOUR, difference))
    assert (verdict.event, verdict.shift) == ("corrected", difference)
    assert verdict.offset.at(HOUR) == NOW + HOUR + difference


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3 * LASTS_LONG),
            st.one_of(st.just(0), st.integers(-2 * YEAR, 2 * YEAR), st.integers(-STEP, STEP)),
        ),
        max_size=12,
    )
)
def test_no_steps_change_a_duration(moves: list[tuple[int, int]]) -> None:
    """A lease that began at the start is moved with each shift: its age is the time that passed."""
    offset = first()
    since_boot, began_at, wall_step = 5 * SECOND, NOW + 5 * SECOND, 0
    for passed, step in moves:
        since_boot += passed
        wall_step += step
        verdict = judge(offset, reading(since_boot, wall_step))
        offset = kept(verdict.offset, reading(since_boot, wall_step))
        began_at += verdict.shift
        assert offset.at(since_boot) - began_at == since_boot - 5 * SECOND


# A new boot.


def test_the_first_boot_follows_the_wall_clock() -> None:
    assert first().at(HOUR) == NOW + HOUR
    assert first().before is None


@pytest.mark.parametrize("off", [0, 30 * SECOND, 8 * HOUR, LONGEST_OFF])
def test_after_a_reboot_the_wall_clock_says_how_long_it_was_off(off: int) -> None:
    last = NOW - off
    offset = begin(reading(0, boot_id="b"), last)
    assert offset.at(0) == NOW
    assert offset.before == last
    assert judge(offset, reading(1, boot_id="b")).event == ""


@pytest.mark.parametrize("gap", [-2 * HOUR, -YEAR, LONGEST_OFF + 1, YEAR])
def test_after_a_reboot_a_doubtful_wall_clock_is_not_followed(gap: int) -> None:
    last = NOW - gap
    new = reading(90 * SECOND, boot_id="b")
    offset = begin(new, last)
    assert offset.at(90 * SECOND) == last + 90 * SECOND, "at least this much has passed"
    assert judge(offset, new).event == "stepped"


# What an engine says.


@pytest.mark.parametrize("skew", [timedelta(hours=2), timedelta(hours=-2), timedelta(days=365)])
@pytest.mark.parametrize("ran", [timedelta(seconds=14), timedelta(hours=1), timedelta(hours=9)])
def test_an_end_is_found_whenever_the_wall_clock_was_set(skew: timedelta, ran: timedelta) -> None:
    began, end = AT, AT + ran
    low, high = end - timedelta(seconds=30), end + timedelta(seconds=5)
    for stamped in (end, end + skew):
        assert engine_time(stamped, low, high, skew, costs_least=min) == end
    assert began <= end


@given(
    at=st.integers(-YEAR, YEAR),
    low=st.integers(0, HOUR),
    lasted=st.integers(0, HOUR),
    skew=st.sampled_from([0, *STEPS]),
)
def test_an_engines_time_stays_between_what_is_proved(
    at: int, low: int, lasted: int, skew: int
) -> None:
    def moment(micros: int) -> datetime:
        return AT + timedelta(microseconds=micros)

    earliest, latest = moment(low), moment(low + lasted)
    for choice in (min, max):
        found = engine_time(
            moment(at), earliest, latest, timedelta(microseconds=skew), costs_least=choice
        )
        assert found is None or earliest <= found <= latest


def test_an_impossible_time_says_nothing() -> None:
    low, high = AT, AT + timedelta(hours=1)
    for at in (AT - timedelta(days=1), AT + timedelta(days=1)):
        assert engine_time(at, low, high, timedelta(), costs_least=min) is None


def test_times_are_whole_microseconds() -> None:
    moment = AT + timedelta(microseconds=7)
    assert to_datetime(from_datetime(moment)) == moment
    assert replace(first(), kept_at=9).last == NOW + 9
