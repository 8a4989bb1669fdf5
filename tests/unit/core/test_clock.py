"""The rules of the steady clock. Real: everything, it is pure."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.core.clock import (
    DAY,
    LASTS,
    LASTS_LONG,
    LONGEST_OFF,
    MINUTE,
    SECOND,
    SETTLES,
    STEP,
    TOLERATED,
    Offset,
    Reading,
    begin,
    engine_time,
    from_datetime,
    judge,
    kept,
    possible_times,
    stamp_error,
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
def test_corrected_clock_step_does_not_change_steady_time(step: int) -> None:
    verdict = judge(first(), reading(HOUR, step))
    assert (verdict.event, verdict.shift) == ("stepped", 0)
    assert verdict.offset.at(HOUR) == NOW + HOUR
    assert verdict.offset.step == step
    corrected = judge(verdict.offset, reading(HOUR + 8 * SECOND))
    assert (corrected.event, corrected.shift) == ("back", 0)
    assert corrected.offset == first()


@pytest.mark.parametrize("step", STEPS)
def test_lasting_clock_step_is_followed(step: int) -> None:
    lasts = LASTS_LONG if abs(step) > DAY else LASTS
    stepped = judge(first(), reading(HOUR, step)).offset
    assert judge(stepped, reading(HOUR + lasts - 1, step)).event == ""
    verdict = judge(stepped, reading(HOUR + lasts, step))
    assert (verdict.event, verdict.shift) == ("followed", step)
    assert verdict.offset.at(HOUR) == NOW + HOUR + step
    assert verdict.offset.version == first().version + 1
    assert judge(verdict.offset, reading(2 * HOUR, step)).offset == verdict.offset


def test_second_clock_step_restarts_the_waiting_period() -> None:
    offset = judge(first(), reading(HOUR, 2 * HOUR)).offset
    verdict = judge(offset, reading(HOUR + LASTS, 5 * HOUR))
    assert (verdict.event, verdict.shift) == ("stepped", 0)
    assert judge(verdict.offset, reading(HOUR + LASTS + 1, 5 * HOUR)).event == ""


@pytest.mark.parametrize("difference", [0, TOLERATED, TOLERATED + 1, STEP])
@pytest.mark.parametrize("sign", [1, -1])
def test_tiny_drift_is_ignored_and_small_drift_corrected(difference: int, sign: int) -> None:
    verdict = judge(first(), reading(HOUR, sign * difference))
    if difference <= TOLERATED:
        assert verdict.offset == first()
        return
    assert (verdict.event, verdict.shift) == ("corrected", sign * difference)
    assert verdict.offset.at(HOUR) == NOW + HOUR + sign * difference


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3 * LASTS_LONG),
            st.one_of(st.just(0), st.integers(-2 * YEAR, 2 * YEAR), st.integers(-STEP, STEP)),
        ),
        max_size=12,
    )
)
def test_clock_steps_never_change_durations(moves: list[tuple[int, int]]) -> None:
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


@pytest.mark.parametrize("off", [0, 30 * SECOND, 8 * HOUR, LONGEST_OFF])
def test_wall_clock_measures_downtime_after_a_reboot(off: int) -> None:
    last = NOW - off
    offset = begin(reading(0, boot_id="b"), last)
    assert offset.at(0) == NOW
    assert offset.before == last
    assert judge(offset, reading(1, boot_id="b")).event == ""
    assert first().at(HOUR) == NOW + HOUR and first().before is None, "the first boot"


@pytest.mark.parametrize("gap", [-2 * HOUR, -YEAR, LONGEST_OFF + 1, YEAR])
def test_implausible_wall_clock_after_reboot_is_not_followed(gap: int) -> None:
    last = NOW - gap
    new = reading(90 * SECOND, boot_id="b")
    offset = begin(new, last)
    assert offset.at(90 * SECOND) == last + 90 * SECOND, "at least this much has passed"
    assert judge(offset, new).event == "stepped"


def after_boot(off: int, wrong: int) -> Offset:
    """A boot after the machine was off for so long, with a wall clock that is so much ahead."""
    return begin(Reading(NOW + wrong, 90 * SECOND, "b"), NOW - off)


@pytest.mark.parametrize("wrong", [2 * HOUR, 20 * DAY, -2 * HOUR, YEAR, -YEAR])
def test_early_clock_correction_recounts_the_downtime(wrong: int) -> None:
    off, soon = 5 * MINUTE, 2 * MINUTE
    offset = after_boot(off, wrong)
    assert offset.before is not None
    counted = offset.at(offset.measured_at) - offset.before
    stepped = judge(offset, Reading(NOW + soon, 90 * SECOND + soon, "b"))
    later = soon + LASTS_LONG
    now = Reading(NOW + later, 90 * SECOND + later, "b")
    verdict = judge(stepped.offset, now)
    assert counted + verdict.recount == off
    assert verdict.offset.at(now.since_boot) == now.wall
    assert verdict.offset.before == NOW - off


def test_recount_ignores_late_steps_and_never_undercuts_uptime() -> None:
    offset = after_boot(HOUR, 0)
    later = SETTLES + MINUTE
    stepped = judge(offset, Reading(NOW + later + 2 * HOUR, 90 * SECOND + later, "b")).offset
    later += LASTS
    verdict = judge(stepped, Reading(NOW + later + 2 * HOUR, 90 * SECOND + later, "b"))
    assert (verdict.event, verdict.recount) == ("followed", 0)

    offset = after_boot(5 * MINUTE, 0)
    stepped = judge(offset, Reading(NOW - 2 * HOUR, 90 * SECOND, "b")).offset
    verdict = judge(stepped, Reading(NOW - 2 * HOUR + LASTS, 90 * SECOND + LASTS, "b"))
    assert 5 * MINUTE + verdict.recount == 90 * SECOND
    assert verdict.offset.before is not None
    assert verdict.offset.at(verdict.offset.measured_at) - verdict.offset.before == 90 * SECOND


# What an engine says.


def told(stamp: int, offset: Offset, now: Reading) -> list[int]:
    """What a time of the wall clock may mean."""
    return [from_datetime(at) for at in possible_times(to_datetime(stamp), offset, now)]


@pytest.mark.parametrize("step", [*STEPS, 59 * SECOND, -59 * SECOND, 3 * SECOND, -3 * SECOND])
@pytest.mark.parametrize("later", [5 * SECOND, 5 * MINUTE, LASTS_LONG + MINUTE])
def test_engine_times_around_a_clock_step_are_resolved(step: int, later: int) -> None:
    """While the step is not noticed, while it is not followed, and when it is. A clock that is set
    back tells some times twice."""
    offset = kept(first(), reading(HOUR))
    now = reading(HOUR + later, step)
    if later > 5 * SECOND:
        offset = judge(offset, reading(HOUR + 2 * SECOND, step)).offset
        offset = judge(kept(offset, now), now).offset
    for since_boot in (HOUR - 20 * SECOND, HOUR - MINUTE):
        found = told(NOW + since_boot, offset, now)
        assert offset.at(since_boot) in found
        assert len(found) == 1 or step < 0
    if later > 5 * SECOND:
        for since_boot in (HOUR + 70 * SECOND, HOUR + later):
            found = told(NOW + since_boot + step, offset, now)
            assert offset.at(since_boot) in found
            assert len(found) == 1 or step < 0


def test_ambiguous_times_near_a_step_keep_both_readings() -> None:
    before = kept(first(), reading(HOUR))
    offset = judge(before, reading(HOUR + 5 * SECOND, 3 * SECOND)).offset
    now = reading(2 * HOUR, 3 * SECOND)
    stamp = NOW + HOUR + 4 * SECOND
    assert sorted(told(stamp, offset, now)) == [stamp, stamp + 3 * SECOND]
    assert told(NOW - YEAR, first(), reading(HOUR)) == [NOW - YEAR], "it cannot be: left as it is"

    offset = after_boot(5 * MINUTE, -2 * HOUR)
    now = Reading(NOW - 2 * HOUR + MINUTE, 150 * SECOND, "b")
    offset = judge(offset, now).offset
    assert told(NOW - 2 * HOUR - 30 * SECOND, offset, now) == [offset.at(60 * SECOND)]

    moment = AT + timedelta(microseconds=7)
    assert to_datetime(from_datetime(moment)) == moment
    assert replace(first(), kept_at=9).last == NOW + 9


@given(
    times=st.lists(st.integers(-YEAR, YEAR), max_size=3),
    low=st.integers(0, HOUR),
    lasted=st.integers(0, HOUR),
)
def test_engine_time_stays_near_the_proven_bounds(times: list[int], low: int, lasted: int) -> None:
    def moment(micros: int) -> datetime:
        return AT + timedelta(microseconds=micros)

    earliest, latest, slack = moment(low), moment(low + lasted), timedelta(microseconds=STEP)
    for choice in (min, max):
        found = engine_time([moment(at) for at in times], earliest, latest, costs_least=choice)
        assert found is None or earliest - slack <= found <= latest + slack


def test_engine_time_prefers_values_within_bounds() -> None:
    def found(*ago: timedelta) -> datetime | None:
        times = [AT - each for each in ago]
        return engine_time(times, AT, AT + timedelta(hours=1), costs_least=min)

    inside, close, day = timedelta(minutes=-5), timedelta(seconds=30), timedelta(days=1)
    assert found(close, inside) == AT - inside
    assert found(close) == AT - close
    assert found(day) is found(-day) is found() is None


@pytest.mark.parametrize("step", [2 * HOUR, -2 * HOUR, YEAR])
@pytest.mark.parametrize("is_followed", [True, False])
def test_stamp_error_covers_the_lag_of_engine_times(step: int, is_followed: bool) -> None:
    """Of an event before the step when it is followed, and of one after it when it is not."""
    offset, since_boot = judge(first(), reading(HOUR, step)).offset, HOUR
    if is_followed:
        since_boot += LASTS_LONG
        offset = judge(offset, reading(since_boot, step)).offset
    stamped = NOW + since_boot if is_followed else NOW + since_boot + step
    error = timedelta(microseconds=max(0, offset.at(since_boot) - stamped))
    assert stamp_error(offset, reading(since_boot, step)) == error
