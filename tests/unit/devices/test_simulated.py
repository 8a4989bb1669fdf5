"""Simulated devices: their fleet, and how hard they work. Real: processes that compute."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import psutil
import pytest

from gpuspawner.core.errors import ConfigError
from gpuspawner.devices import topology
from gpuspawner.devices.discovery import open_source
from gpuspawner.devices.models import DeviceProcess, DeviceStatus
from gpuspawner.devices.simulated import GIB, SCRIPT, SimulatedDevices, SimulatedSampler
from gpuspawner.devices.source import DevicesUnavailable, Sampler, held_bytes
from gpuspawner.monitoring.models import Condition, ProcessUse, Sample
from tests.support.processes import wait_for

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)


def test_spec_gives_models_and_memory_in_order() -> None:
    source = open_source("simulated:2xA100-80GB, 1xT4, 1 x rtx 4090,1xAcme-12GB")
    inventory = source.observe(NOW)
    assert [(d.index, d.model, d.memory_bytes // GIB) for d in inventory.devices] == [
        (0, "A100-80GB", 80),
        (1, "A100-80GB", 80),
        (2, "T4", 16),
        (3, "RTX4090", 24),
        (4, "Acme-12GB", 12),
    ]
    assert source.name == inventory.source == "simulated"
    assert (inventory.observed_at, inventory.error) == (NOW, "")


def test_simulated_ids_are_well_formed_distinct_and_stable() -> None:
    first, *others = SimulatedDevices("1xA100-80GB,3xA100-40GB,3xT4").observe(NOW).devices
    assert first.uuid == "GPU-sim-a9ce482e-3075-533a-b374-c524722cb0ae", "in every process"
    shape = re.compile(r"GPU-sim-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
    assert all(shape.fullmatch(device.uuid) for device in others)
    uuids = {d.uuid for d in SimulatedDevices("4xT4,1xA100-80GB,4xA100-40GB").observe(NOW).devices}
    assert len(uuids) == 9 and {first.uuid, *(d.uuid for d in others)} < uuids
    bus_ids = {d.pci_bus_id for d in SimulatedDevices("1000xA100").observe(NOW).devices}
    assert len(bus_ids) == 1000
    assert all(re.fullmatch(r"[0-9A-F]{8}:[0-9A-F]{2}:00\.0", bus_id) for bus_id in bus_ids)


def test_neighbours_are_linked_in_pairs_fours_and_eights() -> None:
    inventory = SimulatedDevices("10xA100,2xT4").observe(NOW)
    uuids = [d.uuid for d in inventory.devices]

    def closeness(one: int, other: int) -> int:
        return inventory.links.get(topology.pair(uuids[one], uuids[other]), 0)

    assert closeness(0, 1) == closeness(1, 0) == closeness(8, 9) == topology.nvlinks(4)
    assert closeness(1, 2) == closeness(0, 3) == topology.PIX
    assert closeness(3, 4) == closeness(0, 7) == topology.NODE
    assert closeness(7, 8) == closeness(9, 10) == 0
    assert closeness(10, 11) == topology.nvlinks(4)

    paths = [getattr(topology, name) for name in ("SYS", "NODE", "PHB", "PXB", "PIX")]
    steps = [0, *paths, topology.SAME_BOARD, *map(topology.nvlinks, (1, 2))]
    assert steps == sorted(set(steps))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (" , ", "4xA100-80GB,2xT4"),
        ("A100", "'A100' is not part of a simulated fleet"),
        ("0xT4", "'0xT4'"),
        ("4x", "'4x'"),
        ("4xA100,nonsense", "'nonsense'"),
        ("2xAcme", "write it after the model, such as 2xAcme-24GB"),
        ("2xAcme-0GB", "write it after the model"),
        ("20000xT4", "more than 10000"),
    ],
)
def test_invalid_fleet_spec_is_rejected_with_a_hint(spec: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        SimulatedDevices(spec)


def test_simulated_faults_last_until_they_are_restored() -> None:
    source = SimulatedDevices("3xT4")
    before = source.observe(NOW)
    first, sick, _ = (device.uuid for device in before.devices)
    source.fail(sick, "It fell off the bus.")
    source.occupy(first, 41)
    source.occupy(first, 42, kind="graphics", name="Xorg")
    seen = source.observe(NOW)
    ok, unknown = DeviceStatus.OK, DeviceStatus.UNKNOWN
    assert [d.status for d in seen.devices] == [ok, unknown, ok]
    assert (seen.devices[1].reason, seen.error) == ("It fell off the bus.", "")
    assert [[p.pid for p in d.processes] for d in seen.devices] == [[41, 42], [], []]
    assert [p.pid for p in seen.devices[0].compute_processes] == [41]
    assert [sample.error for sample in look(source.sampler())] == ["", "It fell off the bus.", ""]
    source.restore(sick)
    assert [d.status for d in source.observe(NOW).devices] == [ok] * 3
    assert source.observe(NOW).devices[0].processes
    for change in (source.fail, lambda uuid: source.occupy(uuid, 1)):
        with pytest.raises(KeyError):
            change("GPU-other")

    source.lose("The driver is gone.")
    lost = source.observe(NOW)
    assert (lost.devices, lost.error, dict(lost.links)) == ((), "The driver is gone.", {})
    with pytest.raises(DevicesUnavailable, match="The driver is gone"):
        look(source.sampler())
    source.restore()
    assert source.observe(NOW) == before


def test_concurrent_changes_and_observations_lose_nothing() -> None:
    source = SimulatedDevices("8xT4")
    uuids = [d.uuid for d in source.observe(NOW).devices]

    def put(uuid: str) -> None:
        for pid in range(50):
            source.occupy(uuid, pid)
            source.observe(NOW)

    threads = [threading.Thread(target=put, args=(uuid,)) for uuid in uuids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(d.processes) for d in source.observe(NOW).devices] == [50] * 8


def test_device_source_is_nvml_or_named_with_an_example() -> None:
    assert {open_source(spec).name for spec in ("", "auto", "nvml", " NVML ")} == {"nvml"}
    for spec in ("cuda", "simulated", "simulated:", "nvml:0", "4xT4", "auto:"):
        with pytest.raises(ConfigError, match=r"4xA100-80GB,2xT4"):
            open_source(spec)


def test_held_memory_excludes_memory_of_known_processes() -> None:
    drawing = DeviceProcess(7, 3 * GIB, "graphics", "Xorg")
    assert held_bytes(2 * GIB, ()) == 0  # a driver's own
    assert held_bytes(5 * GIB + 1, ()) == 5 * GIB
    assert held_bytes(5 * GIB, (drawing,)) == 0
    assert held_bytes(9 * GIB, (drawing,)) == 6 * GIB
    assert held_bytes(9 * GIB, (DeviceProcess(8, GIB, "compute"),)) == 0
    assert held_bytes(9 * GIB, (DeviceProcess(7, None, "graphics"),)) == 0


# What they do.


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


def look(sampler: Sampler, at: float = 0.0) -> list[Sample]:
    return list(sampler.sample(NOW, at))


def test_simulated_utilization_follows_process_load(
    devices: SimulatedDevices, process: subprocess.Popen[str]
) -> None:
    sampler = devices.sampler()
    assert isinstance(sampler, SimulatedSampler)
    first, second = (device.uuid for device in devices.observe(NOW).devices)
    sampler.pids = {first: [process.pid], second: []}
    sampler.watched = frozenset([first])
    look(sampler, 0)
    waits, other = look(sampler, 100)
    assert (waits.use, waits.used_bytes, waits.processes) == (0, 0, ())
    assert (waits.process_use, other.process_use) == ((), None), "only of devices that are watched"
    assert process.stdin
    process.stdin.write("work\n")
    process.stdin.flush()
    watched = psutil.Process(process.pid)
    before = watched.cpu_times().user
    wait_for(lambda: watched.cpu_times().user > before + 0.2, "it to compute")
    works, other = look(sampler, 101)
    assert works.use and works.busy
    assert works.process_use == (ProcessUse(process.pid, works.use),)
    assert works.used_bytes
    assert works.processes and [p.pid for p in works.processes] == [process.pid]
    assert works.milliwatts and other.milliwatts and works.milliwatts > other.milliwatts
    assert (other.use, other.processes) == (0, ())
    process.kill()
    process.wait()
    gone, _ = look(sampler, 102)
    assert (gone.use, gone.processes) == (0, ())


def test_script_makes_simulated_devices_fail(devices: SimulatedDevices, script: Path) -> None:
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
def test_invalid_script_keeps_the_previous_values(
    devices: SimulatedDevices, script: Path, caplog: pytest.LogCaptureFixture, text: str, said: str
) -> None:
    sampler = SimulatedSampler(devices)
    script.write_text('{"0": {"celsius": 50}}')
    look(sampler)
    script.write_text(text)
    assert [sample.celsius for sample in look(sampler)] == [50, 35]
    assert said in caplog.text


def test_script_sets_device_condition_and_probe_result(
    devices: SimulatedDevices, script: Path
) -> None:
    sampler = SimulatedSampler(devices)
    first, second = (device.uuid for device in devices.observe(NOW).devices)
    shows = {"0": {"condition": {"remap_pending": True}}, second: {"probe": "It computes wrongly."}}
    script.write_text(json.dumps(shows))
    conditions = [sample.condition for sample in look(sampler)]
    assert conditions == [Condition(remap_pending=True), None]
    probes = {uuid: sampler.fails_probe(uuid) for uuid in (first, second, "other")}
    assert list(probes.values()) == ["", "It computes wrongly.", "there is no such device"]
