"""Why one ticket goes before another. Real: the scheduler and the comparison, both pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.queue.models import Priority, Ranked, ScorePart, Waiting
from gpuspawner.queue.scheduler import Scheduler
from gpuspawner.queue.standing import compare

NOW = 1_700_000_000.0

waiting = st.builds(
    Waiting,
    id=st.uuids().map(str),
    member=st.sampled_from(["anna", "bert"]),
    group=st.sampled_from(["", "research"]),
    devices=st.integers(1, 8),
    kinds=st.just(frozenset({"A100"})),
    asked_at=st.floats(NOW - 40 * 86400, NOW),
    seconds=st.none() | st.floats(60, 86400),
    priority=st.sampled_from(Priority),
    boost=st.floats(-1e6, 1e6),
    position=st.none() | st.integers(1, 9),
    last=st.booleans(),
)


@given(one=waiting, other=waiting)
def test_the_parts_of_the_difference_are_all_of_it(one: Waiting, other: Waiting) -> None:
    scheduler = Scheduler(group_weights={"research": 2})
    scheduler.set_capacity({"A100": 8})
    scheduler.submit(one)
    scheduler.submit(other)
    first, second = scheduler.order(NOW)
    found = compare(second, first)
    assert (found.first, found.second) == (first, second), "in whichever order they are given"
    assert sum(some.points for some in found.differences) == pytest.approx(found.points, abs=1e-3)
    named = [some.name for some in found.differences]
    assert sorted(named) == sorted({part.name for part in (*first.parts, *second.parts)})
    sizes = [abs(some.points) for some in found.differences]
    assert sizes == sorted(sizes, reverse=True)


def test_a_part_that_only_one_has_counts_in_full() -> None:
    first = Ranked(
        "a", 1, 7.0, (ScorePart("waiting", 2.0, "2 hours"), ScorePart("boost", 5.0, "mine"))
    )
    second = Ranked("b", 2, 3.0, (ScorePart("waiting", 3.0, "3 hours"),))
    boost, waited = compare(first, second).differences
    assert (boost.name, boost.points, boost.second) == ("boost", 5.0, None)
    assert (waited.name, waited.points) == ("waiting", -1.0)
