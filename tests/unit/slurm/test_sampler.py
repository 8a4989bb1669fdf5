"""What a node's sampler says, as the hub believes it or does not. No parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.devices.models import DeviceProcess
from gpuspawner.devices.source import DevicesUnavailable
from gpuspawner.monitoring.health import SymptomWindow
from gpuspawner.monitoring.models import Condition, DeviceUse, RemoteProcess, Rollups, Sample
from gpuspawner.slurm.sampler import (
    MOST_LOOKS,
    InvalidAnswer,
    Recorder,
    SamplerReport,
    packed,
    port_of,
    read,
)

NOW = datetime(2026, 3, 2, 12, 0, 30, tzinfo=timezone.utc)
INDICES = {"GPU-a": 0, "GPU-b": 7}
EMPTY = {"age": 0, "devices": []}
FULL = Sample(
    uuid="GPU-b",
    index=7,
    at=NOW,
    use=87,
    memory_activity=40,
    used_bytes=2**40,
    total_bytes=2**41,
    milliwatts=251_000,
    celsius=66,
    sm_mhz=1290,
    memory_mhz=1593,
    throttle=0x24,
    ecc_errors=3,
    xids=(31, 79),
    processes=(DeviceProcess(4711, 2**30, "compute", "python"),),
    condition=Condition(remap_pending=False, remap_failed=True, link_width=8, link_most=16),
)


def said(*samples: Sample, age: float = 0.0, **more: Any) -> bytes:
    look = {"age": age, "devices": json.loads(packed(samples, lambda process: False))}
    told = {"version": 1, "of": "run", "last": 5, "trouble": "", "looks": [look]}
    return json.dumps(told | more).encode()


def test_sample_is_read_completely_with_hub_time() -> None:
    ours = replace(FULL, index=0, at=NOW + timedelta(hours=5))  # the node counts anew, and is fast
    found = read(said(ours, Sample(uuid="GPU-a", index=1, at=NOW), age=2.5), NOW, INDICES)
    at = NOW - timedelta(seconds=2.5)
    far = (RemoteProcess(4711, 2**30, "compute", "python", strange=False),)
    assert found == SamplerReport(
        of="run",
        last=5,
        samples=(replace(FULL, at=at, processes=far), Sample(uuid="GPU-a", index=0, at=at)),
        newest=frozenset(INDICES),
        trouble="",
    )


def test_sampler_values_are_cleaned_and_unknown_devices_dropped() -> None:
    lost = Sample(uuid="GPU-a", index=0, at=NOW, xids=(79,), error="It fell off\nthe bus.")
    found = read(said(lost, Sample(uuid="GPU-of-nobody", index=1, at=NOW)), NOW, INDICES)
    assert found.samples == (replace(lost, error="It fell offthe bus."),)
    many = replace(FULL, xids=(-1, 10**9, *range(1, 101)))
    (some,) = read(said(many), NOW, INDICES).samples
    assert some.xids == tuple(range(37, 101)), "the newest"
    assert (some.use, some.celsius) == (FULL.use, FULL.celsius)


def test_sampler_marks_unknown_compute_processes_as_strange() -> None:
    draws, mine, theirs = DeviceProcess(1, kind="graphics"), DeviceProcess(2), DeviceProcess(3)
    sample = Sample(uuid="GPU-a", index=0, at=NOW, processes=(draws, mine, theirs))
    devices = json.loads(packed([sample], lambda process: process.pid != 2))
    (found,) = read(said(looks=[{"age": 0, "devices": devices}]), NOW, INDICES).samples
    assert {p.pid: p.strange for p in found.processes or () if isinstance(p, RemoteProcess)} == {
        1: False,
        2: False,
        3: True,
    }


def test_missing_port_defaults_to_the_url_scheme() -> None:
    urls = ("http://127.0.0.1", "https://10.0.0.11", "http://a:9401", "https://a:9401")
    assert [port_of(urlsplit(url)) for url in urls] == [80, 443, 9401, 9401]


BAD_LOOKS: list[Any] = [{}, [1], [EMPTY] * (MOST_LOOKS + 1)]
NO_ANSWERS = {
    "not JSON": [b"", b"<html>", b"[" * 50_000, b"\xff\xfe\x00", b"9" * 5000],
    "not a gpuspawner sampler": [b"[]", b"{}"],
    "install the same gpuspawner": [said(version=2)],
    "must be": [said(version=None)],
    "its answer is not valid": [
        b'{"version": 1}',
        *(said(looks=some) for some in BAD_LOOKS),
        *(said(last=last) for last in (-1, True)),
        said(trouble=7),
        *(said(FULL, age=age) for age in (-0.1, 601, float("nan"), float("inf"))),
    ],
}


@pytest.mark.parametrize("why", NO_ANSWERS)
def test_invalid_sampler_answer_is_rejected_with_the_reason(why: str) -> None:
    for body in NO_ANSWERS[why]:
        with pytest.raises(InvalidAnswer, match=why):
            read(body, NOW, INDICES)


BAD_PROCESSES = [
    [1, None, "attack", "x", False],
    [1, None, "compute", "x", 1],
    [-1, None, "compute", "x", False],
]


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("use", [101, -1, 1.5, True, "87"]),
        ("celsius", [10**400]),
        ("used_bytes", [2**60]),
        ("error", [["x"]]),
        ("xids", [[1] * 1000, ["79"]]),
        ("processes", [[[1]], *([row] for row in BAD_PROCESSES)]),
        ("condition", [7, {"remap_failed": "yes"}]),
        ("uuid", [7]),
    ],
)
def test_one_invalid_value_rejects_the_whole_answer(key: str, values: list[Any]) -> None:
    for value in values:
        looks: Any = [{"age": 0, "devices": [{"uuid": "GPU-a", key: value}]}]
        with pytest.raises(InvalidAnswer):
            read(said(looks=looks), NOW, INDICES)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["uuid", "use", "processes", "condition", "age", "devices", "xids"]),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@given(looks=PLAIN, more=st.dictionaries(st.sampled_from(["of", "last", "trouble"]), PLAIN))
def test_any_sampler_answer_is_read_or_rejected(looks: Any, more: dict[str, Any]) -> None:
    try:
        found = read(said(looks=looks, **more), NOW, INDICES)
    except InvalidAnswer:
        return
    assert {sample.uuid for sample in found.samples} <= set(INDICES)


# The node's own part.


class Looks:
    """A sampler that shows what it is told to."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.use = 0
        self.fails: Exception | None = None

    def sample(self, now: datetime, monotonic: float) -> tuple[Sample, ...]:
        if self.fails is not None:
            raise self.fails
        return (Sample(uuid="GPU-a", index=0, at=now, use=self.use),)


@pytest.fixture
def looks() -> Looks:
    return Looks()


@pytest.fixture
def recorder(looks: Looks) -> Recorder:
    return Recorder(looks, monotonic=lambda: looks.clock)


@pytest.fixture
def ask(recorder: Recorder) -> Callable[..., SamplerReport]:
    def ask(of: str = "", number: int = 0) -> SamplerReport:
        return read(recorder.since(of, number).encode(), NOW, INDICES)

    return ask


def test_each_look_is_sent_once_and_newcomers_get_newest(
    looks: Looks, recorder: Recorder, ask: Callable[..., SamplerReport]
) -> None:
    assert (ask().last, ask().samples) == (0, ())
    for looks.use in (1, 2, 3):
        looks.clock += 1
        assert recorder.look()
    first = ask()
    assert [sample.use for sample in first.samples] == [3]
    assert not ask(first.of, first.last).samples
    for looks.use in (4, 5):
        looks.clock += 1
        recorder.look()
    found = ask(first.of, first.last)
    assert [(s.use, (NOW - s.at).total_seconds()) for s in found.samples] == [(4, 1), (5, 0)]
    assert [sample.use for sample in ask("an earlier run", 2).samples] == [5]
    for _ in range(2 * MOST_LOOKS):
        recorder.look()
    assert len(ask(found.of, found.last).samples) == MOST_LOOKS


def test_failing_or_hanging_driver_is_reported(
    looks: Looks, recorder: Recorder, ask: Callable[..., SamplerReport]
) -> None:
    recorder.look()
    looks.fails = DevicesUnavailable("The driver is not loaded.")
    assert not recorder.look()
    assert ask().trouble == "The driver is not loaded."
    looks.fails = ZeroDivisionError("oh")
    assert not recorder.look()
    assert "cannot be read" in ask().trouble
    looks.fails = None
    recorder.look()
    assert ask().trouble == ""
    looks.clock += 30
    assert ask().trouble == "the driver has not answered for 30 s"


def test_long_lost_driver_is_reported_to_a_new_hub(
    looks: Looks, recorder: Recorder, ask: Callable[..., SamplerReport]
) -> None:
    recorder.look()
    known = ask()
    looks.fails = DevicesUnavailable("The driver is not loaded.")
    for looks.clock in (60.0, 530.0, 550.0, 650.0, 90_000.0):
        assert not recorder.look()
        for said in (ask(), ask(known.of, 0), ask(known.of, known.last)):
            assert said.trouble == "The driver is not loaded."
        assert bool(ask().samples) is (looks.clock < 540)
    looks.fails = None
    recorder.look()
    (sample,) = ask(known.of, known.last).samples
    assert sample.at == NOW


# What is silent is neither well nor sick, neither idle nor busy.


def test_silent_device_is_not_judged_and_its_minute_ends() -> None:
    signs, rollups = SymptomWindow(), Rollups()
    done: list[DeviceUse] = []
    rollups.add([Sample(uuid="GPU-a", index=0, at=NOW, use=50)])
    for second in range(1, 200):
        at = NOW + timedelta(seconds=second)
        sample = Sample(uuid="GPU-a", index=0, at=at, silent="the machine gpu2 is silent")
        assert sample.busy is None
        signs.add([sample])
        done += rollups.add([sample])
    assert (signs.look(), signs.going_on) == ((), frozenset())
    (minute,) = [*done, *rollups.rest()]
    assert (minute.samples, minute.use) == (1, 50)
