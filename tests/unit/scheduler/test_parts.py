"""What the line stands on: past use, lengths, ends of leases, policy. Real: everything; slow and
simple sums check the quick ones."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.queue.models import QueuePolicy
from gpuspawner.queue.ordering import FairShareUse
from gpuspawner.queue.rounds import ReleasePlan, Releases
from gpuspawner.queue.session_lengths import Length, Lengths
from tests.unit.scheduler.site import DAY, HOUR, T0

sessions = st.lists(
    st.tuples(st.integers(1, 8), st.integers(0, 60 * 24), st.integers(0, 20 * 24)), max_size=8
)


class TestUse:
    @given(sessions, st.integers(0, 30 * 24))
    def test_it_is_the_sum_of_every_faded_hour(
        self, held: list[tuple[int, int, int]], later: int
    ) -> None:
        """Against a sum over steps of six minutes, up to the last of the sessions and on."""
        half_life = 7 * DAY
        use = FairShareUse(half_life)
        changes = sorted(
            change
            for devices, start, hours in held
            for change in ((start, devices), (start + hours, -devices))
        )
        for at, devices in changes:
            use.change("m", devices, T0 + at * HOUR)
        now = T0 + (max([at for at, _ in changes], default=0) + later) * HOUR
        step = 360.0
        expected = 0.0
        for devices, start, hours in held:
            for n in range(hours * 10):
                age = now - (T0 + start * HOUR + (n + 0.5) * step)
                expected += devices * step * math.pow(0.5, age / half_life)

        assert use.of("m", now) == pytest.approx(expected, rel=1e-3, abs=1e-2)

    def test_what_is_held_for_ever_comes_to_a_most(self) -> None:
        use = FairShareUse(DAY)
        use.change("m", 3, T0)

        assert use.of("m", T0) == pytest.approx(0.0, abs=1e-3)
        assert use.of("m", T0 + 90 * DAY) == pytest.approx(3 * use.full)
        assert use.of("nobody", T0) == 0.0

    @given(st.lists(st.tuples(st.integers(-3, 3), st.floats(-1e12, 1e12)), max_size=20))
    def test_no_date_is_too_far(self, changes: list[tuple[int, float]]) -> None:
        use = FairShareUse(DAY)
        for devices, at in changes:
            use.change("m", devices, at)
            assert use.of("m", at) >= 0.0 and not math.isnan(use.of("m", -at))


def learned(*seconds: float, default: float = 1800.0, samples: int = 9) -> Lengths:
    lengths = Lengths(default, samples)
    alike = lengths.alike("m", "g", 1)
    for each in seconds:
        lengths.end(alike, alike.asked, T0, each)
        alike.asked += 1
    return lengths


def expect(lengths: Lengths, most: float | None = None, now: float = T0) -> Length:
    alike = lengths.alike("m", "g", 1)
    return lengths.estimate(alike, alike.asked, now, most)


class TestLengths:
    def test_sessions_of_the_like_say_how_long_one_lasts(self) -> None:
        assert expect(learned(*9 * [HOUR])) == Length(HOUR, HOUR)
        assert expect(learned(*5 * [60.0], *9 * [HOUR])) == Length(HOUR, HOUR)

    def test_never_longer_than_was_asked_for(self) -> None:
        assert expect(learned(*9 * [HOUR]), most=600.0) == Length(600.0, 600.0)

    def test_what_is_over_soon_now_and_then_costs_less_than_its_length(self) -> None:
        length = expect(learned(*4 * [60.0], *5 * [10 * HOUR]))

        assert length.seconds == 10 * HOUR
        assert 60.0 < length.cost < 2 * HOUR

    def test_of_an_unknown_one_everything_is_possible(self) -> None:
        alone, of_others = learned(), learned(*3 * [HOUR])
        stranger = of_others.alike("somebody else", "g", 1)

        assert expect(alone).seconds == 1800.0 and expect(alone).cost < 600.0
        assert expect(alone, most=8 * HOUR).seconds <= 8 * HOUR
        assert of_others.estimate(stranger, 0, T0, None).seconds == HOUR

    def test_witnesses_stand_near_in_the_row(self) -> None:
        """Of those asked for long before much is known; of these nothing yet."""
        lengths = learned(*99 * [HOUR])
        alike = lengths.alike("m", "g", 1)

        assert lengths.estimate(alike, alike.asked, T0, None).seconds == HOUR
        assert lengths.estimate(alike, alike.asked + 500, T0, None).seconds == 1800.0
        lengths.end(alike, alike.asked + 499, T0, 60.0)
        lengths.end(alike, alike.asked + 501, T0, 60.0)
        lengths.end(alike, alike.asked + 502, T0, 60.0)
        assert lengths.estimate(alike, alike.asked + 500, T0, None).seconds == 60.0

    def test_those_that_still_run_say_that_it_takes_longer(self) -> None:
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
    def test_an_estimate_is_always_a_length(
        self, ended: list[float], running: list[float], later: float, most: float | None
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
    def test_the_nearest_are_chosen(self, numbers: list[int], near: int) -> None:
        lengths = Lengths(1800.0, 9)
        alike = lengths.alike("m", "", 1)
        for number in numbers:
            lengths.end(alike, number, T0, float(number))
        done, _ = alike.witnesses(near, 9)
        distances = sorted(abs(number - near) for number in numbers if abs(number - near) <= 60)

        assert sorted(abs(seconds - near) for seconds in done) == distances[:9]

    def test_memory_is_bounded(self) -> None:
        lengths = learned(*map(float, range(5000)))
        everything, _ = lengths.alike("m", "g", 1).witnesses(4970, 10_000)

        assert len(everything) <= 121
        assert expect(lengths).seconds == pytest.approx(4996, abs=5)


class TestReleases:
    def test_what_comes_back_when(self) -> None:
        releases = Releases()
        releases.put("one", {"a": 2}, T0 + 60, guess=False)
        releases.put("two", {"a": 1, "b": 1}, T0 + 30, guess=True)
        releases.put("two", {"a": 1, "b": 1}, T0 + 90, guess=True)

        assert [at for at, _, _ in releases.ahead("a", T0)] == [T0 + 60, T0 + 90]
        assert releases.together("a", 3, 1, T0, ()) == (T0 + 60, 0)
        assert releases.together("a", 3, 0, T0, ()) == (T0 + 90, 0)
        assert releases.together("a", 4, 0, T0, ()) is None
        assert releases.together("a", 4, 0, T0, [(T0 + 70, "new", 1)]) == (T0 + 90, 0)
        assert list(releases.guessed_wrong(T0 + 89)) == []
        assert list(releases.guessed_wrong(T0 + 90)) == ["two"]
        releases.remove("one")
        releases.remove("one")
        assert releases.together("a", 2, 1, T0, ()) == (T0 + 90, 0)
        assert releases.ahead("never seen", T0) == ()

    def test_what_is_late_gets_as_long_again(self) -> None:
        releases = Releases()
        releases.put("late", {"a": 1}, T0 - 600, guess=False)
        releases.put("later", {"a": 1}, T0 - 1200, guess=False)
        releases.put("due", {"a": 1}, T0 + 900, guess=False)

        assert [at - T0 for at, _, _ in releases.ahead("a", T0)] == [600, 900, 1200]


class TestPlan:
    def test_promises_are_kept_free(self) -> None:
        plan = ReleasePlan(T0, 1, [(T0 + 100, 2), (T0 + 50, 1)])

        assert plan.earliest(1, 10) == T0
        assert plan.earliest(2, 10) == T0 + 50
        assert plan.earliest(5, 10) == math.inf
        plan.take(2, T0 + 50, 20)
        assert plan.earliest(1, 10) == T0
        assert plan.earliest(1, 60) == T0 + 70
        assert plan.earliest(3, 10) == T0 + 100


class TestPolicy:
    @pytest.mark.parametrize(
        "wrong",
        [
            {"half_life_seconds": 0},
            {"half_life_seconds": -1},
            {"overdue_seconds": math.nan},
            {"waiting_point_seconds": math.inf},
            {"level_gpu_hours": "four"},
            {"samples": 0},
            {"samples": 2.5},
            {"small_share": -0.1},
            {"member_share_points": True},
        ],
    )
    def test_a_wrong_parameter_is_named(self, wrong: dict[str, float]) -> None:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            QueuePolicy(**wrong)

    def test_some_parameters_may_be_zero(self) -> None:
        assert (
            QueuePolicy(small_share=0.0, member_share_points=0, overdue_share=0).small_share == 0.0
        )
