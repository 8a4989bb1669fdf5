"""Real: NVMLDevices in a process of its own, through pynvml and the dynamic linker. Only the
driver's library is a stand-in, compiled here."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpuspawner.devices import topology
from gpuspawner.leases.models import Request
from tests.support.nvml import nvml_library as nvml
from tests.support.nvml.machine import Machine, as_devices, links, reasons, statuses
from tests.support.nvml.nvml_library import GIB, gpus, mig_gpu
from tests.support.placements import choose, free_slots

# What a healthy machine shows.


def test_healthy_gpu_is_reported_with_every_field(machine: Machine) -> None:
    first, second = gpus(2)
    first.compute, first.graphics = [(os.getpid(), 3 * GIB)], [(4_000_001, 2**20)]
    second = replace(second, name="Tesla T4", memory_bytes=16106127360, mode=3)
    inventory = machine.has(first, second).look()
    assert inventory["error"] == ""
    assert inventory["source"] == "nvml"
    assert (inventory["driver_version"], inventory["cuda_version"]) == ("550.54.15", "12.4")
    own_name = Path("/proc/self/comm").read_text().strip()
    assert inventory["devices"] == [
        {
            "uuid": first.uuid,
            "index": 0,
            "model": "NVIDIA A100-SXM4-80GB",
            "memory_bytes": 80 * GIB,
            "pci_bus_id": "00000000:01:00.0",
            "parent_uuid": None,
            "compute_mode": "default",
            "slots": 1,
            "status": "ok",
            "reason": "",
            "processes": [
                {
                    "pid": os.getpid(),
                    "used_memory_bytes": 3 * GIB,
                    "kind": "compute",
                    "name": own_name,
                },
                {"pid": 4_000_001, "used_memory_bytes": 2**20, "kind": "graphics", "name": ""},
            ],
            "held_bytes": 0,
        },
        {
            "uuid": second.uuid,
            "index": 1,
            "model": "Tesla T4",
            "memory_bytes": 16106127360,
            "pci_bus_id": "00000000:02:00.0",
            "parent_uuid": None,
            "compute_mode": "exclusive_process",
            "slots": 1,
            "status": "ok",
            "reason": "",
            "processes": [],
            "held_bytes": 0,
        },
    ]


def test_compute_and_memory_use_occupy_but_graphics_does_not(
    machine: Machine,
) -> None:
    idle = computing, drawing, both, holding, driver = gpus(5)
    computing = replace(computing, compute=[(pid, GIB) for pid in range(500, 520)])
    drawing = replace(drawing, graphics=[(102, GIB)])
    both = replace(both, compute=[(103, -1)], graphics=[(103, GIB)])
    holding = replace(holding, used_bytes=5 * GIB + 17)
    driver = replace(driver, used_bytes=GIB)  # what the driver itself needs
    devices = as_devices(machine.has(computing, drawing, both, holding, driver).look())
    assert [p.pid for p in devices[0].processes] == [*range(500, 520)]
    assert devices[2].processes[0].used_memory_bytes is None
    assert [d.held_bytes for d in devices[3:]] == [5 * GIB, 0]
    free = {p.uuid for p in free_slots(devices)}
    assert free == {drawing.uuid, driver.uuid}
    machine.has(*idle)
    assert len(free_slots(as_devices(machine.look()))) == 5, "they are gone"


def test_nvml_compute_modes_are_reported_by_name(machine: Machine) -> None:
    names = {0: "default", 1: "exclusive_process", 2: "prohibited", 3: "exclusive_process"}
    machine.has(*(replace(gpu, mode=mode) for gpu, mode in zip(gpus(4), names, strict=True)))
    assert [d["compute_mode"] for d in machine.look()["devices"]] == [*names.values()]


def test_machine_without_a_gpu_reports_no_devices(machine: Machine) -> None:
    inventory = machine.has().look()
    assert (inventory["devices"], inventory["error"]) == ([], "")
    assert inventory["driver_version"] == "550.54.15"


def test_unsupported_queries_leave_fields_empty(machine: Machine) -> None:
    (gpu,) = gpus(1)
    gpu.compute = [(7, 1)]
    unsupported = (
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetComputeMode",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetGraphicsRunningProcesses_v3",
    )
    gpu.fails = dict.fromkeys(unsupported, nvml.NOT_SUPPORTED)
    (device,) = machine.has(gpu).look()["devices"]
    assert device["status"] == "ok"
    assert (device["memory_bytes"], device["pci_bus_id"], device["processes"]) == (0, "", [])
    assert (device["compute_mode"], device["model"]) == ("default", gpu.name)


def test_driver_before_510_still_reports_processes(machine: Machine) -> None:
    (gpu,) = gpus(1)
    gpu.compute, gpu.graphics = [(7, 1)], [(8, 1)]
    newer = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3")
    machine.has(gpu, fails=dict.fromkeys(newer, nvml.FUNCTION_NOT_FOUND))
    (device,) = machine.look()["devices"]
    assert [(p["pid"], p["kind"]) for p in device["processes"]] == [(7, "compute"), (8, "graphics")]


def test_driver_without_process_lists_leaves_devices_unknown(machine: Machine) -> None:
    older = "nvmlDeviceGetComputeRunningProcesses_v2"
    newer = "nvmlDeviceGetComputeRunningProcesses_v3"
    machine.has(*gpus(1), fails=dict.fromkeys((older, newer), nvml.FUNCTION_NOT_FOUND))
    (reason,) = reasons(machine.look()).values()
    assert reason == (
        "Its list of compute processes could not be read. "
        "The NVIDIA driver is too old for this query: update it."
    )


# MIG.


def test_mig_instances_are_devices_and_their_gpu_the_parent(machine: Machine) -> None:
    plain = replace(gpus(1)[0], mig=False)
    parent = mig_gpu(0, 3, mode=2, nvlinks=[plain.bus])
    first, second = parent.instances
    second.compute = [(77, GIB)]
    inventory = machine.has(plain, parent, levels={(0, 1): 10}).look()
    assert statuses(inventory) == {
        plain.uuid: "ok",
        parent.uuid: "parent",
        first.uuid: "ok",
        second.uuid: "ok",
    }
    assert reasons(inventory) == {
        parent.uuid: "It is in MIG mode: its instances are leased instead."
    }
    one, two = (d for d in inventory["devices"] if d["parent_uuid"] == parent.uuid)
    assert (one["index"], one["pci_bus_id"], one["compute_mode"]) == (1, parent.bus, "prohibited")
    assert (one["model"], one["memory_bytes"]) == ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5 * GIB)
    assert (two["model"], two["memory_bytes"]) == ("NVIDIA A100-SXM4-40GB MIG 4g.5gb", 20 * GIB)
    assert [p["pid"] for p in two["processes"]] == [77]
    assert inventory["links"] == [], "instances are linked to nothing"


def test_mig_instance_is_leased_but_never_its_parent(machine: Machine) -> None:
    devices = as_devices(machine.has(mig_gpu(0, 1)).look())
    (place,) = choose(Request(devices=1, model="A100"), devices)
    assert place.uuid.startswith("MIG-00000000")
    assert {p.uuid[:12] for p in free_slots(devices)} == {
        "MIG-00000000",
        "MIG-00000001",
    }


# Topology.


def test_pcie_levels_map_to_the_topology_scale(machine: Machine) -> None:
    fleet = gpus(7)
    levels = {(0, 1): 0, (0, 2): 10, (0, 3): 20, (0, 4): 30, (0, 5): 40, (0, 6): 50}
    assert links(machine.has(*fleet, levels=levels).look(), fleet) == {
        (0, 2): topology.PIX,
        (0, 3): topology.PXB,
        (0, 4): topology.PHB,
        (0, 5): topology.NODE,
        (0, 6): topology.SYS,
    }


def test_nvlinks_are_counted_and_outweigh_pcie(machine: Machine) -> None:
    fleet = gpus(4)
    fleet[0].nvlinks = [fleet[1].bus] * 4 + [fleet[2].bus] * 2
    fleet[1].nvlinks = [fleet[0].bus] * 4
    fleet[2].nvlinks = [fleet[0].bus] * 2 + ["00000007:99:00.0"]
    found = links(machine.has(*fleet, levels={(0, 1): 50, (2, 3): 10}).look(), fleet)
    assert found == {(0, 1): topology.nvlinks(4), (0, 2): topology.nvlinks(2), (2, 3): topology.PIX}


@pytest.mark.parametrize("mute", [0, 1])
def test_nvlink_reported_by_one_side_counts(machine: Machine, mute: int) -> None:
    fleet = gpus(2)
    fleet[0].nvlinks, fleet[1].nvlinks = [fleet[1].bus] * 3, [fleet[0].bus] * 3
    fleet[mute].fails = {"nvmlDeviceGetNvLinkState": nvml.NOT_SUPPORTED}
    assert links(machine.has(*fleet).look(), fleet) == {(0, 1): topology.nvlinks(3)}


def test_nvswitch_links_join_all_connected_gpus(machine: Machine) -> None:
    fleet = gpus(3)
    for gpu, count in zip(fleet, (12, 12, 6), strict=True):
        gpu.nvlinks = ["switch"] * count
    assert links(machine.has(*fleet).look(), fleet) == {
        (0, 1): topology.nvlinks(12),
        (0, 2): topology.nvlinks(6),
        (1, 2): topology.nvlinks(6),
    }


def test_placement_picks_the_pair_joined_by_nvlink(machine: Machine) -> None:
    fleet = gpus(4)
    fleet[1].nvlinks, fleet[3].nvlinks = [fleet[3].bus] * 2, [fleet[1].bus] * 2
    inventory = machine.has(*fleet, levels={(0, 1): 10, (2, 3): 10, (0, 2): 50}).look()
    keyed = {(a, b): n for a, b, n in inventory["links"]}
    places = choose(Request(devices=2), as_devices(inventory), (), keyed)
    assert [p.uuid for p in places] == [fleet[1].uuid, fleet[3].uuid]


def test_topology_is_read_once_for_each_set_of_gpus(machine: Machine) -> None:
    fleet = gpus(3)
    before = links(machine.has(*fleet, levels={(0, 1): 10, (1, 2): 50}).look(), fleet)
    assert links(machine.has(*fleet, levels={(0, 1): 50}).look(), fleet) == before
    machine.has(*fleet[:2], levels={(0, 1): 20})
    assert links(machine.look(), fleet) == {(0, 1): topology.PXB}


def test_driver_library_is_loaded_only_on_first_observation(library: Path, tmp_path: Path) -> None:
    """The stand-in would be in the process's memory map if it had been loaded."""
    program = (
        "import gpuspawner.devices.nvml as nvml\n"
        "source = nvml.NVMLDevices()\n"
        "maps = lambda: 'libnvidia-ml' in open('/proc/self/maps').read()\n"
        "before = maps()\n"
        "import datetime; source.observe(datetime.datetime.now())\n"
        "print(before, maps())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | nvml.environment(library, tmp_path / "fleet"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", "True"]
