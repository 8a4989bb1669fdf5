"""Session length on the form, and the settings behind it. Real: the traits; all of it is pure."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traitlets.config import Config

from gpuspawner.catalog.models import Environment, SessionHours
from gpuspawner.core.errors import ConfigError
from gpuspawner.core.units import MICRO
from gpuspawner.spawners.base import Hours, hour_choices, usual_label
from gpuspawner.spawners.options import LEAST_HOURS, FormChoice, parse, session_seconds

ANY = Environment(slug="any", display_name="Any")


def labels(*limits: SessionHours, last: float | None = None, rates: Any = ()) -> list[str]:
    return [choice.label for choice in hour_choices(limits, last, rates)]


def test_the_form_offers_steps_up_to_the_greatest_limit_and_the_limit_itself() -> None:
    assert labels(SessionHours(max=6)) == ["1 h", "2 h", "4 h", "6 h"]
    assert labels(SessionHours(max=6), SessionHours(max=1.5)) == ["1 h", "2 h", "4 h", "6 h"]
    assert labels(SessionHours(max=0.5)) == ["30 min"]
    assert labels(SessionHours())[-1] == "7 d"
    assert labels() == []


def test_what_was_chosen_last_time_is_offered_while_it_is_allowed() -> None:
    assert labels(SessionHours(max=4), last=1.25) == ["1 h", "1 h 15 min", "2 h", "4 h"]
    assert labels(SessionHours(max=4), last=5) == ["1 h", "2 h", "4 h"]


def test_a_line_says_what_it_costs() -> None:
    one = labels(SessionHours(max=2), rates=[4 * MICRO])
    assert one == ["1 h, 4.00 credits a GPU", "2 h, 8.00 credits a GPU"]
    some = labels(SessionHours(max=1), rates=[10 * MICRO, MICRO // 2, 4 * MICRO])
    assert some == ["1 h, 0.50 to 10.00 credits a GPU"]
    assert labels(SessionHours(max=1), rates=[0, 0]) == ["1 h"]


def test_what_happens_when_nothing_is_said() -> None:
    assert usual_label([SessionHours(8, 24)]) == "as usual: 8 h"
    assert usual_label([SessionHours()]) == "until I stop it"
    assert usual_label([SessionHours(8, 24), SessionHours(2, 4)]) == "usual for the environment"
    assert usual_label([]) == "until I stop it"


limits = st.builds(
    SessionHours, st.none(), st.none() | st.floats(0.001, 8760, allow_subnormal=False)
)


@given(limits, st.none() | st.floats(LEAST_HOURS, 8760))
def test_every_line_of_the_form_can_be_chosen(limit: SessionHours, last: float | None) -> None:
    for choice in hour_choices([limit], last, [MICRO]):
        chosen = parse({"hours": [choice.value]})
        assert chosen.hours == choice.hours
        seconds = session_seconds(chosen, limit, ANY)
        assert seconds is not None and abs(seconds - 3600 * choice.hours) <= 0.5


# The settings.


def hours(**settings: Any) -> Hours:
    return Hours(config=Config({"Hours": settings}))


def test_settings_are_numbers_or_callables() -> None:
    assert hours().session_hours(ANY) == SessionHours()
    assert hours(most_hours=24, default_hours=8.5).session_hours(ANY) == SessionHours(8.5, 24)
    asked: list[Hours] = []

    def most(spawner: Hours) -> int:
        asked.append(spawner)
        return 12

    spawner = hours(most_hours=most)
    assert spawner.session_hours(ANY) == SessionHours(12, 12)
    assert asked == [spawner]
    assert hours(most_hours=lambda spawner: None).session_hours(ANY) == SessionHours()


@pytest.mark.parametrize("trait", ["most_hours", "default_hours"])
@pytest.mark.parametrize("value", [0, -1, 8761, 1e9, float("nan"), float("inf"), True, "two"])
def test_a_setting_that_makes_no_sense_is_named(trait: str, value: Any) -> None:
    spawner = hours(**{trait: lambda spawner: value})
    with pytest.raises(ConfigError) as caught:
        spawner.session_hours(ANY)
    assert f"c.GPUSpawnerMixin.{trait} is {value!r}" in caught.value.message


def test_the_choice_of_an_old_start_does_not_outlive_a_lower_limit() -> None:
    assert parse(FormChoice(hours=2).as_user_options()).hours == 2
    assert [choice.hours for choice in hour_choices([SessionHours(max=1)], 2, [])] == [1]
