"""Simulated devices that work as hard as real processes do, and fail as a script says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import psutil
import pytest

from gpuspawner.devices.simulated import SCRIPT, SimulatedDevices, SimulatedSampler
from gpuspawner.devices.source import LooksLost
from gpuspawner.monitoring.models import Condition, Sample
from tests.support.processes import wait_for

NOW = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
PROGRAM = """
import sys
print("ready", flush=True)
for line in sys.stdin:
    while line == "work\\n":
        pass
"""


@pytest.fixture
def devices() -> SimulatedDevices:
    return SimulatedDevices("2xT4")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(SCRIPT, str(tmp_path / "script.json"))
    return tmp_path / "script.json"


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert started.stdout and started.stdout.readline() == "ready\n"
    yield started
    started.kill()
    started.wait()


def look(sampler: SimulatedSampler, at: float = 0.0) -> list[Sample]:
    return list(sampler.sample(NOW, at))


def test_a_device_works_as_its_processes_do(
    devices: SimulatedDevices, process: subprocess.Popen[str]
) -> None:
    sampler = devices.sampler()
    assert isinstance(sampler, SimulatedSampler)
    first, second = (device.uuid for device in devices.observe(NOW).devices)
    sampler.pids = {first: [process.pid], second: []}
    look(sampler, 0)
    waits, other = look(sampler, 100)
    assert (waits.use, waits.used_bytes, waits.processes) == (0, 0, ())
    assert process.stdin
    process.stdin.write("work\n")
    process.stdin.flush()
    watched = psutil.Process(process.pid)
    before = watched.cpu_times().user
    wait_for(lambda: watched.cpu_times().user > before + 0.2, "it to compute")
    works, other = look(sampler, 101)
    assert works.use and works.busy
    assert works.used_bytes
    assert works.processes and [p.pid for p in works.processes] == [process.pid]
    assert works.milliwatts and other.milliwatts and works.milliwatts > other.milliwatts
    assert (other.use, other.processes) == (0, ())
    process.kill()
    process.wait()
    gone, _ = look(sampler, 102)
    assert (gone.use, gone.processes) == (0, ())


def test_a_script_makes_devices_fail(devices: SimulatedDevices, script: Path) -> None:
    first = devices.observe(NOW).devices[0].uuid
    sampler = SimulatedSampler(devices)
    assert [sample.celsius for sample in look(sampler)] == [35, 35]
    script.write_text(json.dumps({first: {"celsius": 97, "use": 100}, "1": {"xids": [79]}}))
    hot, sick = look(sampler)
    assert (hot.celsius, hot.use, sick.xids) == (97, 100, (79,))
    assert look(sampler)[1].xids == ()  # an error is reported once
    script.write_text(json.dumps({"1": {"xids": [79], "error": "It fell off the bus."}}))
    hot, sick = look(sampler)
    assert (hot.celsius, sick.error, sick.use) == (35, "It fell off the bus.", None)
    script.unlink()
    assert [sample.error for sample in look(sampler)] == ["", ""]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "write an object of objects"),
        ('{"0": {"heat": 3}}', "device 0 has 'heat'"),
        ('{"0": {"use": "much"}}', "use of device 0 is 'much'"),
        ('{"0": {"condition": {"cold": true}}}', "condition of device 0 has 'cold'"),
        ("{", "cannot be used"),
    ],
)
def test_a_script_with_a_mistake_changes_nothing(
    devices: SimulatedDevices,
    script: Path,
    caplog: pytest.LogCaptureFixture,
    text: str,
    said: str,
) -> None:
    sampler = SimulatedSampler(devices)
    script.write_text('{"0": {"celsius": 50}}')
    look(sampler)
    script.write_text(text)
    assert [sample.celsius for sample in look(sampler)] == [50, 35]
    assert said in caplog.text


def test_a_driver_that_is_lost_is_said(devices: SimulatedDevices) -> None:
    sampler = SimulatedSampler(devices)
    devices.lose("The driver is gone.")
    with pytest.raises(LooksLost, match="The driver is gone"):
        look(sampler)
    devices.restore()
    devices.fail(devices.observe(NOW).devices[0].uuid, "It is sick.")
    assert [sample.error for sample in look(sampler)] == ["It is sick.", ""]


def test_a_script_says_in_which_condition_a_device_is(
    devices: SimulatedDevices, script: Path
) -> None:
    sampler = SimulatedSampler(devices)
    first, second = (device.uuid for device in devices.observe(NOW).devices)
    shows = {"0": {"condition": {"remap_pending": True}}, second: {"probe": "It computes wrongly."}}
    script.write_text(json.dumps(shows))
    conditions = [sample.condition for sample in look(sampler)]
    assert conditions == [Condition(remap_pending=True), None]
    assert [sampler.fails_probe(uuid) for uuid in (first, second, "other")] == [
        "",
        "It computes wrongly.",
        "there is no such device",
    ]
