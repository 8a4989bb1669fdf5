"""Samples of containers that are added up: over restarts, and where figures are missing."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.engines.resource_use import ReportedUse, ResourceUse
from gpuspawner.monitoring.resource_totals import (
    COUNTERS,
    ResourceRecord,
    add_report,
    add_sample,
)

T0 = datetime(2026, 3, 1, tzinfo=timezone.utc)


def added(*samples: tuple[str, ResourceUse]) -> ResourceRecord:
    record = ResourceRecord()
    for number, (container, use) in enumerate(samples):
        record = add_sample(record, container, use, T0 + timedelta(minutes=number))
    return record


def test_counters_are_added_over_a_restart_and_another_container() -> None:
    record = added(
        ("a", ResourceUse(cpu_seconds=10, disk_read_bytes=100, network_sent_bytes=5)),
        ("a", ResourceUse(cpu_seconds=15, disk_read_bytes=300, network_sent_bytes=5)),
        # Restarted: more was read than ever before.
        ("a", ResourceUse(cpu_seconds=2, disk_read_bytes=1000, network_sent_bytes=1)),
        # Another container of the same lease, with larger counters.
        ("b", ResourceUse(cpu_seconds=20, disk_read_bytes=2000)),
        ("b", ResourceUse(cpu_seconds=21, disk_read_bytes=2000, network_sent_bytes=4)),
    )
    totals = record.totals
    assert (totals.cpu_seconds, totals.disk_read_bytes) == (15 + 2 + 21, 300 + 1000 + 2000)
    assert totals.network_sent_bytes == 5 + 1 + 4
    assert totals.disk_written_bytes is None, "it was never reported"
    assert totals.sampled_at == T0 + timedelta(minutes=4)


def test_network_that_was_left_adds_nothing() -> None:
    record = added(
        ("a", ResourceUse(cpu_seconds=10, network_sent_bytes=100)),
        ("a", ResourceUse(cpu_seconds=11, network_sent_bytes=40)),
        ("a", ResourceUse(cpu_seconds=12, network_sent_bytes=50)),
    )
    assert record.totals.network_sent_bytes == 110


def test_memory_is_the_last_and_the_peak_of_what_is_known() -> None:
    record = added(
        ("a", ResourceUse(memory_bytes=5, memory_limit_bytes=10)),
        ("a", ResourceUse(memory_bytes=9, memory_limit_bytes=20)),
        ("a", ResourceUse()),
    )
    totals = record.totals
    assert (totals.memory_bytes, totals.memory_peak_bytes) == (None, 9)
    assert totals.memory_limit_bytes == 20
    assert totals.cpu_seconds is None


_COUNT = st.none() | st.integers(0, 1 << 40)
_USES = st.builds(
    ResourceUse,
    memory_bytes=_COUNT,
    memory_limit_bytes=_COUNT,
    **dict.fromkeys(COUNTERS, _COUNT),
)


@given(st.lists(st.tuples(st.sampled_from("ab"), _USES), max_size=12))
def test_totals_never_decrease_and_never_forget(samples: list[tuple[str, ResourceUse]]) -> None:
    record = ResourceRecord()
    for number, (container, use) in enumerate(samples):
        after = add_sample(record, container, use, T0 + timedelta(minutes=number))
        for name in (*COUNTERS, "memory_peak_bytes"):
            old, new = getattr(record.totals, name), getattr(after.totals, name)
            assert old is None or (new is not None and new >= old)
            if name in COUNTERS and getattr(use, name) is not None:
                assert new is not None
                assert new >= getattr(use, name) or container == record.container_id
        record = after


@given(st.lists(st.lists(st.integers(0, 1000), min_size=1, max_size=5), min_size=1, max_size=5))
def test_totals_are_the_sum_of_what_each_container_used(increments: list[list[int]]) -> None:
    samples = []
    for number, steps in enumerate(increments):
        for count in range(1, len(steps) + 1):
            done = sum(steps[:count])
            use = ResourceUse(**dict.fromkeys(COUNTERS, done))
            samples.append((f"container-{number}", use))
    totals = added(*samples).totals
    expected = sum(map(sum, increments))
    assert all(getattr(totals, name) == expected for name in COUNTERS)


@given(st.data())
def test_order_and_repetition_of_samples_change_nothing(data: st.DataObject) -> None:
    """Two processes sample a container, and each answer comes when it likes."""
    steps = data.draw(st.lists(st.integers(0, 1000), min_size=1, max_size=8))
    read = [
        (
            T0 + timedelta(seconds=number),
            ResourceUse(**dict.fromkeys(COUNTERS, sum(steps[: number + 1]))),
        )
        for number in range(len(steps))
    ]
    again = data.draw(st.lists(st.sampled_from(read), max_size=4))
    record = ResourceRecord()
    for at, use in data.draw(st.permutations(read + again)):
        record = add_sample(record, "a", use, at)
    assert all(getattr(record.totals, name) == sum(steps) for name in COUNTERS)
    assert record.totals.sampled_at == read[-1][0]


def test_figures_that_were_read_in_another_order_than_their_times_are_no_restart() -> None:
    record = add_sample(ResourceRecord(), "a", ResourceUse(cpu_seconds=10), T0)
    soon = T0 + timedelta(milliseconds=1)
    record = add_sample(record, "a", ResourceUse(cpu_seconds=9.99), soon)
    record = add_sample(record, "a", ResourceUse(cpu_seconds=11), T0 + timedelta(seconds=30))
    assert record.totals.cpu_seconds == 11


def test_samples_go_on_after_the_clock_of_the_engine_was_set_back() -> None:
    record = add_sample(ResourceRecord(), "a", ResourceUse(cpu_seconds=10), T0)
    earlier = T0 - timedelta(hours=1)
    record = add_sample(record, "a", ResourceUse(cpu_seconds=12), earlier)
    assert (record.totals.cpu_seconds, record.totals.sampled_at) == (12, earlier)
    record = add_sample(record, "a", ResourceUse(cpu_seconds=13), earlier + timedelta(seconds=30))
    assert record.totals.cpu_seconds == 13


def reported(cpu_seconds: float, memory_bytes: int = 5, minutes: float = 1) -> ReportedUse:
    """The report of a run on two cores that ended so long after T0, where it began."""
    return ReportedUse(
        cpu_seconds=cpu_seconds,
        memory_bytes=memory_bytes,
        cpus=2,
        memory_limit_bytes=20,
        started_at=T0,
        ended_at=T0 + timedelta(minutes=minutes),
    )


def test_report_adds_what_was_used_since_the_last_sample() -> None:
    use = ResourceUse(cpu_seconds=10, memory_bytes=9, network_sent_bytes=100)
    sampled = add_sample(ResourceRecord(), "a", use, T0 + timedelta(seconds=30))
    record = add_report(sampled, "a", reported(35, memory_bytes=12))
    assert record.totals == replace(
        sampled.totals,
        cpu_seconds=35,
        memory_peak_bytes=12,
        memory_limit_bytes=20,
        sampled_at=T0 + timedelta(minutes=1),
    )
    assert add_report(record, "a", reported(35, memory_bytes=12)) == record, "twice is once"
    late = add_sample(record, "a", ResourceUse(cpu_seconds=11), T0 + timedelta(seconds=31))
    assert late == record


def test_report_is_all_that_is_known_of_a_short_run() -> None:
    totals = add_report(ResourceRecord(), "a", reported(5, minutes=0.1)).totals
    assert (totals.cpu_seconds, totals.memory_peak_bytes, totals.memory_limit_bytes) == (5, 5, 20)
    assert totals.disk_read_bytes is None and totals.memory_bytes is None


def test_report_of_another_container_of_the_lease_begins_anew() -> None:
    record = added(("a", ResourceUse(cpu_seconds=10)))
    assert add_report(record, "b", reported(5)).totals.cpu_seconds == 15


@pytest.mark.parametrize(
    "told",
    [
        reported(9.9),  # less than was measured
        reported(-1),
        reported(10 + 62.1),  # more than two cores can do in half a minute
        reported(20, memory_bytes=21),  # more than the limit
        reported(20, minutes=-1),  # it ended before it began
    ],
)
def test_report_that_cannot_be_true_changes_nothing(told: ReportedUse) -> None:
    use = ResourceUse(cpu_seconds=10, memory_bytes=9, memory_limit_bytes=20)
    record = add_sample(ResourceRecord(), "a", use, T0 + timedelta(seconds=30))
    assert add_report(record, "a", told) == record


@given(
    st.none() | st.tuples(st.floats(0, 1e6), st.integers(0, 1 << 40)),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(0, 1 << 70),
)
def test_no_report_takes_off_or_adds_more_than_the_machine_could_do(
    sampled: tuple[float, int] | None, seconds: float, memory: int
) -> None:
    record = ResourceRecord()
    if sampled is not None:
        use = ResourceUse(cpu_seconds=sampled[0], memory_bytes=sampled[1])
        record = add_sample(record, "a", use, T0 + timedelta(seconds=30))
    before, after = record.totals, add_report(record, "a", reported(seconds, memory)).totals
    most = 2 * (61 if sampled is None else 31)
    assert 0 <= (after.cpu_seconds or 0) - (before.cpu_seconds or 0) <= most + 1e-6
    assert (after.memory_peak_bytes or 0) >= (before.memory_peak_bytes or 0)
    assert (after.memory_peak_bytes or 0) <= max(20, before.memory_peak_bytes or 0)
