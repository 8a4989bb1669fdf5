"""Real: the GPU, its driver and NVML; nvidia-smi is the second opinion.

Last passed on an NVIDIA H200, driver 580.159.04, CUDA 13.0, on 2026-11-27 at 26eb697d.
"""

from __future__ import annotations

import csv
import re
import subprocess
from datetime import datetime, timezone

import pytest

from gpuspawner.devices import placement
from gpuspawner.devices.discovery import open_source
from gpuspawner.devices.models import DeviceStatus, Inventory
from gpuspawner.devices.source import SamplingSource
from gpuspawner.engines.device_probe import probe_by_process
from gpuspawner.leases.models import Request
from tests.support.placements import choose, free_slots

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def inventory() -> Inventory:
    return open_source("nvml").observe(datetime.now(timezone.utc))


def nvidia_smi(*arguments: str) -> str:
    done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def query(*fields: str) -> list[list[str]]:
    output = nvidia_smi(f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    return [[cell.strip() for cell in row] for row in csv.reader(output.splitlines())]


def test_observation_names_driver_and_cuda_versions(inventory: Inventory) -> None:
    assert inventory.error == ""
    assert [[inventory.driver_version]] == query("driver_version")[:1]
    assert re.fullmatch(r"\d+\.\d", inventory.cuda_version)
    assert f"CUDA Version: {inventory.cuda_version}" in nvidia_smi()


def test_devices_are_those_that_nvidia_smi_lists(inventory: Inventory) -> None:
    listed = re.findall(r"UUID: ([^)]+)\)", nvidia_smi("-L"))
    assert sorted(d.uuid for d in inventory.devices) == sorted(listed)


def test_device_properties_match_nvidia_smi(inventory: Inventory) -> None:
    rows = query("index", "uuid", "name", "pci.bus_id", "memory.total", "compute_mode")
    gpus = {d.uuid: d for d in inventory.devices if d.parent_uuid is None}
    assert len(rows) == len(gpus)
    for index, uuid, name, bus_id, mebibytes, mode in rows:
        gpu = gpus[uuid]
        assert (str(gpu.index), gpu.model, gpu.pci_bus_id) == (index, name, bus_id)
        assert gpu.memory_bytes // 2**20 == int(mebibytes)
        assert gpu.compute_mode == mode.lower()


def test_mig_instances_belong_to_a_gpu_in_mig_mode(inventory: Inventory) -> None:
    status = {d.uuid: d.status for d in inventory.devices}
    parents = {d.parent_uuid for d in inventory.devices if d.parent_uuid is not None}
    assert all(status[parent] is DeviceStatus.PARENT for parent in parents)
    in_mig_mode = {uuid for uuid, mode in query("uuid", "mig.mode.current") if mode == "Enabled"}
    assert {u for u, s in status.items() if s is DeviceStatus.PARENT} == in_mig_mode


def test_every_pair_of_gpus_has_a_link(inventory: Inventory) -> None:
    whole = [d for d in inventory.devices if d.parent_uuid is None and d.status is DeviceStatus.OK]
    assert len(inventory.links) == len(whole) * (len(whole) - 1) // 2


def test_second_observation_is_quick_and_finds_the_same(inventory: Inventory) -> None:
    source = open_source("nvml")
    source.observe(datetime.now(timezone.utc))
    started = datetime.now(timezone.utc)
    again = source.observe(started)
    assert (datetime.now(timezone.utc) - started).total_seconds() < 1
    assert [d.uuid for d in again.devices] == [d.uuid for d in inventory.devices]


def test_free_device_can_be_chosen(inventory: Inventory) -> None:
    free = free_slots(inventory.devices)
    if free:
        (place,) = choose(Request(devices=1), inventory.devices, (), inventory.links)
        assert place in free
    else:
        assert all(placement.leasable(d) is not None or not d.empty for d in inventory.devices)


def test_free_gpu_passes_a_probe(inventory: Inventory) -> None:
    for place in free_slots(inventory.devices)[:1]:
        found = probe_by_process(place.uuid)
        print(found)
        assert found.failure == ""
        assert "GiB filled and read back" in found.text


def test_conditions_match_nvidia_smi(inventory: Inventory) -> None:
    source = open_source("nvml")
    assert isinstance(source, SamplingSource)
    samples = {s.uuid: s for s in source.sampler().sample(datetime.now(timezone.utc), 0.0)}
    fields = ("pcie.link.width.max", "enforced.power.limit", "power.default_limit")
    for uuid, lanes, limit, usual in query("uuid", *fields):
        condition = samples[uuid].condition if uuid in samples else None
        if condition is None:
            continue  # in MIG mode its instances are there
        print(uuid, condition)
        assert str(condition.link_most or "[N/A]") == lanes
        assert (
            limit == "[N/A]" or abs((condition.limit_milliwatts or 0) - 1000 * float(limit)) < 1e3
        )
        assert usual == "[N/A]" or condition.usual_milliwatts


def test_samples_match_nvidia_smi() -> None:
    source = open_source("nvml")
    assert isinstance(source, SamplingSource)
    sampler, at = source.sampler(), datetime.now(timezone.utc)
    for second in range(3):
        samples = {s.uuid: s for s in sampler.sample(at, float(second))}
    rows = query("uuid", "memory.total", "temperature.gpu", "clocks.max.sm")
    for uuid, mebibytes, celsius, most_mhz in rows:
        sample = samples.get(uuid)
        if sample is None:
            continue  # in MIG mode its instances are there
        assert sample.error == ""
        assert sample.use is not None and 0 <= sample.use <= 100
        assert sample.used_bytes is not None and sample.total_bytes is not None
        assert sample.used_bytes <= sample.total_bytes
        assert sample.total_bytes // 2**20 == int(mebibytes)
        assert sample.celsius is not None and abs(sample.celsius - int(celsius)) <= 10
        assert sample.sm_mhz is not None and 0 < sample.sm_mhz <= int(most_mhz)
        assert sample.milliwatts
    assert all(sample.error == "" for sample in samples.values())
