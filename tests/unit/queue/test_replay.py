"""Policies to compare with, and traces. Real: everything; it is pure."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuspawner.queue import replay
from gpuspawner.queue.replay import (
    ANY,
    ReplayTarget,
    TraceError,
    TraceJob,
    figures,
    parse_trace,
    read_trace,
    replay_trace,
)
from gpuspawner.queue.scheduler import Scheduler
from tests.support.tier import examples

HEADER = "timestamp,duration,num_gpus,cluster"


def player(name: str, jobs: list[TraceJob], devices: int) -> ReplayTarget:
    if name != "ours":
        return replay.make(name, jobs)
    scheduler = Scheduler()
    scheduler.set_capacity({ANY: devices})
    return scheduler


def waits(name: str, jobs: list[TraceJob], devices: int) -> list[float]:
    played = replay_trace(jobs, {ANY: devices}, player(name, jobs, devices), replay.wakes(name))
    return [start - job.asked_at for job, start in zip(jobs, played.starts, strict=True)]


def job(asked_at: float, duration: float, devices: int = 1, group: str = "a") -> TraceJob:
    return TraceJob(asked_at=asked_at, duration=duration, devices=devices, group=group)


WIDE = [job(0, 100, 2), job(1, 10, 4), job(2, 50, 1), job(3, 500, 1)]
"""On four devices: a wide one waits until 100, a short one would be over by then."""


BY_USE = [job(0, 100), job(1, 90), job(2, 10), job(3, 50)]
BY_SHARE = [job(0, 100), job(1, 100), job(2, 100), job(3, 100, 1, "b")]
PAST = [job(1000 * n, 900 if n % 2 else 10, 1, "ab"[n % 2]) for n in range(20)]
BY_HISTORY = [*PAST, job(20_000, 500, 1, "c"), job(20_001, 900, 1, "b"), job(20_002, 10, 1, "a")]


@pytest.mark.parametrize(
    ("name", "jobs", "devices", "last"),
    [
        ("fifo", WIDE, 4, [0, 99, 108, 107]),
        ("clairvoyant", BY_USE, 1, [0, 159, 98, 107]),
        ("fair-share", BY_SHARE, 1, [97]),
        ("history", BY_HISTORY, 1, [509, 498]),
    ],
    ids=["nobody passes", "the least use first", "groups alternate", "learns who is short"],
)
def test_each_replay_policy_has_its_expected_order(
    name: str, jobs: list[TraceJob], devices: int, last: list[float]
) -> None:
    assert waits(name, jobs, devices)[-len(last) :] == last


@settings(max_examples=examples(60))
@given(
    st.lists(
        st.tuples(
            st.floats(0, 1e5), st.floats(0, 1e5), st.integers(1, 6), st.sampled_from(["a", "b", ""])
        ),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from(["ours", *replay.NAMES]),
)
def test_replay_runs_every_fitting_job_within_capacity(
    some: list[tuple[float, float, int, str]], name: str
) -> None:
    jobs = sorted((job(*values) for values in some), key=lambda each: each.asked_at)
    played = replay_trace(jobs, {ANY: 4}, player(name, jobs, 4), replay.wakes(name))
    for each, start in zip(jobs, played.starts, strict=True):
        assert (start >= each.asked_at) if each.devices <= 4 else start != start
    running = [
        (start, each.devices, start + each.duration)
        for each, start in zip(jobs, played.starts, strict=True)
        if start == start
    ]
    for moment, _, _ in running:
        at_once = sum(d for start, d, end in running if start <= moment < end)
        assert at_once <= 4


def test_replay_figures_are_correct_and_backfill_delays_nobody() -> None:
    jobs = [job(0, 3600), job(0, 3600, 1, "b")]
    found = figures(replay_trace(jobs, {ANY: 1}, replay.make("fifo", jobs)))
    assert (found.mean, found.longest, found.worst_group) == (0.5, 1.0, 1.0)
    assert found.slowdown == 1.5
    assert found.utilisation == 1.0

    [first, wide, short, long] = waits("easy", WIDE, 4)
    assert (first, wide) == (0, 99), "the planned start holds"
    assert short < 99 <= long


# Traces.


def test_trace_is_sorted_by_submission_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write(f"{HEADER}\n2017-10-09 07:00:10,5,2,x\n2017-10-09 07:00:00,7.5,1,y\n")
    first, second = read_trace(path)
    assert (first.group, first.duration, second.devices) == ("y", 7.5, 2)
    assert second.asked_at - first.asked_at == 10


@pytest.mark.parametrize(
    ("line", "what"),
    [
        *((f"2017-10-09 07:00:00,{d},1,x", f"duration is '{d}'") for d in ("abc", "nan", "-1")),
        *((f"2017-10-09 07:00:00,1,{n},x", f"num_gpus is '{n}'") for n in ("0", "1.5")),
        ("yesterday,1,1,x", "timestamp is 'yesterday'"),
        ("2017-10-09 07:00:00,1", "num_gpus is missing"),
    ],
)
def test_invalid_trace_line_is_rejected_with_its_number(line: str, what: str) -> None:
    with pytest.raises(TraceError, match=f"^month.csv, line 3: {what}"):
        parse_trace([HEADER, "2017-10-09 07:00:00,1,1,x", line], "month.csv")
    for lines in ([], ["a,b"], [HEADER]):
        with pytest.raises(TraceError, match=r"no column|no jobs"):
            parse_trace(lines)
