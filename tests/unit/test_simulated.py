"""Real: everything; a simulated fleet has no other part."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from datetime import datetime, timezone

import pytest

from gpuspawner.core.errors import ConfigError
from gpuspawner.devices import source as devices_source
from gpuspawner.devices.models import DeviceProcess, DeviceStatus
from gpuspawner.devices.simulated import GIB, SimulatedDevices
from gpuspawner.devices.source import held_bytes, open_source

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)


def test_spec_gives_models_and_memory_in_order() -> None:
    inventory = SimulatedDevices("4xA100-80GB, 2xT4, 1 x rtx 4090,1xAcme-12GB").observe(NOW)
    assert [(d.index, d.model, d.memory_bytes // 2**30) for d in inventory.devices] == [
        (0, "A100-80GB", 80),
        (1, "A100-80GB", 80),
        (2, "A100-80GB", 80),
        (3, "A100-80GB", 80),
        (4, "T4", 16),
        (5, "T4", 16),
        (6, "RTX4090", 24),
        (7, "Acme-12GB", 12),
    ]
    assert inventory.source == "simulated"
    assert inventory.observed_at == NOW
    assert inventory.error == ""


def test_uuids_have_a_real_shape_are_distinct_and_the_same_in_another_process() -> None:
    spec = "3xA100-40GB,3xA100-80GB,3xA100-40GB"
    uuids = [d.uuid for d in SimulatedDevices(spec).observe(NOW).devices]
    assert len(set(uuids)) == 9
    shape = re.compile(r"GPU-sim-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
    assert all(shape.fullmatch(uuid) for uuid in uuids)
    program = (
        "from datetime import datetime\n"
        "from gpuspawner.devices.simulated import SimulatedDevices\n"
        f"print(*[d.uuid for d in SimulatedDevices({spec!r}).observe(datetime.now()).devices])"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert elsewhere.stdout.split() == uuids


def test_a_longer_spec_keeps_the_devices_of_a_shorter_one() -> None:
    short = {d.uuid for d in SimulatedDevices("2xT4,1xA100").observe(NOW).devices}
    longer = {d.uuid for d in SimulatedDevices("3xA100,4xT4").observe(NOW).devices}
    assert short < longer


def test_bus_ids_are_distinct_and_well_formed() -> None:
    devices = SimulatedDevices("1000xA100").observe(NOW).devices
    bus_ids = {d.pci_bus_id for d in devices}
    assert len(bus_ids) == 1000
    assert all(re.fullmatch(r"[0-9A-F]{8}:[0-9A-F]{2}:00\.0", bus_id) for bus_id in bus_ids)


def test_neighbours_are_linked_in_pairs_fours_and_eights_and_never_across_entries() -> None:
    inventory = SimulatedDevices("10xA100,2xT4").observe(NOW)
    uuids = [d.uuid for d in inventory.devices]

    def closeness(one: int, other: int) -> int:
        return inventory.links.get(devices_source.pair(uuids[one], uuids[other]), 0)

    assert closeness(0, 1) == closeness(1, 0) == closeness(8, 9) == devices_source.nvlinks(4)
    assert closeness(1, 2) == closeness(0, 3) == devices_source.PIX
    assert closeness(3, 4) == closeness(0, 7) == devices_source.NODE
    assert closeness(7, 8) == closeness(9, 10) == 0
    assert closeness(10, 11) == devices_source.nvlinks(4)


def test_the_scale_prefers_nvlink_to_every_pcie_path() -> None:
    steps = [
        0,
        devices_source.SYS,
        devices_source.NODE,
        devices_source.PHB,
        devices_source.PXB,
        devices_source.PIX,
        devices_source.SAME_BOARD,
    ]
    assert [*steps, devices_source.nvlinks(1), devices_source.nvlinks(2)] == sorted(
        {*steps, devices_source.nvlinks(1), devices_source.nvlinks(2)}
    )


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "4xA100-80GB,2xT4"),
        (" , ", "4xA100-80GB,2xT4"),
        ("A100", "'A100' is not part of a simulated fleet"),
        ("0xT4", "'0xT4'"),
        ("-1xT4", "'-1xT4'"),
        ("4x", "'4x'"),
        ("4xA100,nonsense", "'nonsense'"),
        ("2xAcme", "write it after the model, such as 2xAcme-24GB"),
        ("2xAcme-0GB", "write it after the model"),
        ("20000xT4", "more than 10000"),
    ],
)
def test_a_bad_spec_is_refused_with_what_to_write(spec: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        SimulatedDevices(spec)


def test_a_failing_device_is_unknown_and_hides_no_other() -> None:
    source = SimulatedDevices("3xT4")
    sick = source.observe(NOW).devices[1].uuid
    source.fail(sick, "It fell off the bus.")
    seen = source.observe(NOW)
    assert [d.status for d in seen.devices] == [
        DeviceStatus.OK,
        DeviceStatus.UNKNOWN,
        DeviceStatus.OK,
    ]
    assert seen.devices[1].reason == "It fell off the bus."
    assert seen.error == ""
    source.restore(sick)
    assert source.observe(NOW).devices[1].status is DeviceStatus.OK


def test_processes_are_seen_until_restored() -> None:
    source = SimulatedDevices("2xT4")
    first, second = (d.uuid for d in source.observe(NOW).devices)
    source.occupy(first, 41)
    source.occupy(first, 42, kind="graphics", name="Xorg")
    seen = source.observe(NOW).devices
    assert [p.pid for p in seen[0].processes] == [41, 42]
    assert [p.pid for p in seen[0].compute_processes] == [41]
    assert seen[1].processes == ()
    source.restore(second)
    assert source.observe(NOW).devices[0].processes
    source.restore()
    assert source.observe(NOW).devices[0].processes == ()


def test_lost_means_nothing_seen_and_a_reason_until_restored() -> None:
    source = SimulatedDevices("2xT4")
    before = source.observe(NOW)
    source.lose("The driver is gone.")
    lost = source.observe(NOW)
    assert (lost.devices, lost.error) == ((), "The driver is gone.")
    assert not lost.links
    source.restore()
    assert source.observe(NOW) == before


def test_a_uuid_of_another_fleet_is_a_key_error() -> None:
    source = SimulatedDevices("1xT4")
    with pytest.raises(KeyError):
        source.fail("GPU-other")
    with pytest.raises(KeyError):
        source.occupy("GPU-other", 1)


def test_looks_and_changes_from_several_threads_lose_nothing() -> None:
    source = SimulatedDevices("8xT4")
    uuids = [d.uuid for d in source.observe(NOW).devices]

    def put(uuid: str) -> None:
        for pid in range(200):
            source.occupy(uuid, pid)
            source.observe(NOW)

    threads = [threading.Thread(target=put, args=(uuid,)) for uuid in uuids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(d.processes) for d in source.observe(NOW).devices] == [200] * 8


@pytest.mark.parametrize("spec", ["", "auto", "nvml", " NVML "])
def test_the_gpus_of_the_machine_are_the_default_source(spec: str) -> None:
    assert open_source(spec).name == "nvml"


def test_a_simulated_source_is_opened_by_its_spec() -> None:
    source = open_source("simulated:4xA100-80GB,2xT4")
    assert source.name == "simulated"
    assert len(source.observe(NOW).devices) == 6


@pytest.mark.parametrize("spec", ["cuda", "simulated", "simulated:", "nvml:0", "4xT4", "auto:"])
def test_an_unknown_source_is_refused_with_an_example(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"4xA100-80GB,2xT4"):
        open_source(spec)


def test_held_memory_is_what_no_process_explains() -> None:
    drawing = DeviceProcess(7, 3 * GIB, "graphics", "Xorg")
    assert held_bytes(2 * GIB, ()) == 0  # a driver's own
    assert held_bytes(5 * GIB + 1, ()) == 5 * GIB
    assert held_bytes(5 * GIB, (drawing,)) == 0
    assert held_bytes(9 * GIB, (drawing,)) == 6 * GIB
    assert held_bytes(9 * GIB, (DeviceProcess(8, GIB, "compute"),)) == 0
    assert held_bytes(9 * GIB, (DeviceProcess(7, None, "graphics"),)) == 0
