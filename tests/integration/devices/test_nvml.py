"""What NVMLDevices reports of a healthy machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gpuspawner.devices import topology
from gpuspawner.leases.models import Request
from tests.support.nvml import nvml_library as nvml
from tests.support.nvml.machine import Machine, as_devices, links, reasons, statuses
from tests.support.nvml.nvml_library import GIB, GPU, gpus, mig_gpu
from tests.support.placements import choose, free_slots


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
            "part": 1,
            "compute_mode": "default",
            "slots": 1,
            "reserved_for": [],
            "lent": False,
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
            "part": 1,
            "compute_mode": "exclusive_process",
            "slots": 1,
            "reserved_for": [],
            "lent": False,
            "status": "ok",
            "reason": "",
            "processes": [],
            "held_bytes": 0,
        },
    ]


def test_compute_and_memory_use_occupy_but_graphics_does_not(machine: Machine) -> None:
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


def test_unsupported_queries_leave_fields_empty(machine: Machine) -> None:
    names = {0: "default", 1: "exclusive_process", 2: "prohibited", 3: "exclusive_process"}
    machine.has(*(replace(gpu, mode=mode) for gpu, mode in zip(gpus(4), names, strict=True)))
    assert [d["compute_mode"] for d in machine.look()["devices"]] == [*names.values()]

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
    (device,) = machine.begin().has(gpu).look()["devices"]
    assert device["status"] == "ok"
    assert (device["memory_bytes"], device["pci_bus_id"], device["processes"]) == (0, "", [])
    assert (device["compute_mode"], device["model"]) == ("default", gpu.name)


def test_old_driver_reports_processes_or_leaves_devices_unknown(machine: Machine) -> None:
    (gpu,) = gpus(1)
    gpu.compute, gpu.graphics = [(7, 1)], [(8, 1)]
    lists = [f"nvmlDeviceGet{kind}RunningProcesses" for kind in ("Compute", "Graphics")]
    newer = {f"{each}_v3": nvml.FUNCTION_NOT_FOUND for each in lists}  # as before driver 510
    (device,) = machine.has(gpu, fails=newer).look()["devices"]
    assert [(p["pid"], p["kind"]) for p in device["processes"]] == [(7, "compute"), (8, "graphics")]

    neither = newer | {f"{lists[0]}_v2": nvml.FUNCTION_NOT_FOUND}
    (reason,) = reasons(machine.has(gpu, fails=neither).look()).values()
    assert reason == (
        "Its list of compute processes could not be read. "
        "The NVIDIA driver is too old for this query: update it."
    )


def test_mig_instances_are_leased_instead_of_their_gpu(machine: Machine) -> None:
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

    devices = as_devices(machine.begin().has(mig_gpu(0, 1)).look())
    (place,) = choose(Request(devices=1, model="A100"), devices)
    assert place.uuid.startswith("MIG-00000000")
    assert [p.uuid[:12] for p in free_slots(devices)] == ["MIG-00000000", "MIG-00000001"]


A100, A30 = ("NVIDIA A100-SXM4-40GB", 40, 7), ("NVIDIA A30", 24, 4)


@pytest.mark.parametrize(
    ("gpu", "profile", "gib", "attributes", "part"),
    [
        (A100, "1g.5gb", 4.75, (1, 1, 4864), "1/7"),
        (A100, "1g.10gb", 9.75, (1, 1, 9984), "1/4"),
        (A100, "3g.20gb", 19.62, (3, 3, 20096), "1/2"),
        (A100, "4g.20gb", 19.62, (4, 4, 20096), "4/7"),
        (A100, "7g.40gb", 39.25, (7, 7, 40192), 1),
        (A100, "1c.3g.20gb", 19.62, (3, 1, 20096), "1/6"),
        (A30, "1g.6gb", 5.81, (1, 1, 5952), "1/4"),
        (A30, "2g.12gb", 11.69, (2, 2, 11968), "1/2"),
    ],
)
def test_part_of_its_gpu_is_read_from_attributes_or_name(
    machine: Machine,
    gpu: tuple[str, int, int],
    profile: str,
    gib: float,
    attributes: tuple[int, int, int],
    part: object,
) -> None:
    model, memory, slices = gpu
    made = mig_gpu(0, name=model, memory_bytes=memory * GIB, slices=slices)
    (blank,) = made.instances
    named = replace(blank, name=f"{model} MIG {profile}", memory_bytes=int(gib * GIB))
    told = replace(named, name=f"{model} MIG", attributes=attributes)
    answer = {"nvmlDeviceGetAttributes_v2": nvml.FUNCTION_NOT_FOUND}
    for instance, fails in (
        (told, {}),
        (named, {}),
        (named, answer),
        (replace(named, fails={"nvmlDeviceGetAttributes_v2": nvml.UNKNOWN}), {}),
        (replace(named, fails={"nvmlDeviceGetMemoryInfo": nvml.NOT_SUPPORTED}), {}),
    ):
        shown = replace(made, instances=[instance])
        parent, found = machine.begin().has(shown, fails=fails).look()["devices"]
        assert (parent["part"], found["part"], found["status"]) == (1, part, "ok")


def test_part_that_cannot_be_read_any_more_stays(machine: Machine) -> None:
    made = mig_gpu(0)
    (blank,) = made.instances
    unnamed = replace(blank, name="NVIDIA A100-SXM4-40GB MIG", attributes=(1, 1, 4864))
    for instance, status, part in (
        (replace(unnamed, attributes=None), "ok", 1),
        (unnamed, "ok", "1/7"),
        (replace(unnamed, attributes=None), "ok", "1/7"),
        (replace(unnamed, fails={"nvmlDeviceGetName": nvml.GPU_IS_LOST}), "unknown", "1/7"),
    ):
        _, found = machine.has(replace(made, instances=[instance])).look()["devices"]
        assert (found["status"], found["part"]) == (status, part)


def test_topology_is_read_from_pcie_and_nvlink(machine: Machine) -> None:
    def found(
        fleet: Sequence[GPU], levels: Mapping[tuple[int, int], int] | None = None
    ) -> dict[tuple[int, int], int]:
        return links(machine.begin().has(*fleet, levels=levels).look(), fleet)

    levels = {(0, 2): 10, (0, 3): 20, (0, 4): 30, (0, 5): 40, (0, 6): 50}
    steps = (topology.PIX, topology.PXB, topology.PHB, topology.NODE, topology.SYS)
    assert found(gpus(7), levels) == {(0, n): step for n, step in enumerate(steps, 2)}

    fleet = gpus(4)
    fleet[0].nvlinks = [fleet[1].bus] * 4 + [fleet[2].bus] * 2
    fleet[1].nvlinks = [fleet[0].bus] * 4
    fleet[2].nvlinks = [fleet[0].bus] * 2 + ["00000007:99:00.0"]
    four, two = topology.nvlinks(4), topology.nvlinks(2)
    outweighed = found(fleet, {(0, 1): 50, (2, 3): 10})
    assert outweighed == {(0, 1): four, (0, 2): two, (2, 3): topology.PIX}

    for mute in (0, 1):  # one side tells
        fleet = gpus(2)
        fleet[0].nvlinks, fleet[1].nvlinks = [fleet[1].bus] * 4, [fleet[0].bus] * 4
        fleet[mute].fails = {"nvmlDeviceGetNvLinkState": nvml.NOT_SUPPORTED}
        assert found(fleet) == {(0, 1): four}

    fleet = [
        replace(gpu, nvlinks=["switch"] * n) for gpu, n in zip(gpus(3), (4, 4, 2), strict=True)
    ]
    assert found(fleet) == {(0, 1): four, (0, 2): two, (1, 2): two}


def test_topology_is_read_once_for_each_set_of_gpus(machine: Machine) -> None:
    fleet = gpus(3)
    before = links(machine.has(*fleet, levels={(0, 1): 10, (1, 2): 50}).look(), fleet)
    assert links(machine.has(*fleet, levels={(0, 1): 50}).look(), fleet) == before
    machine.has(*fleet[:2], levels={(0, 1): 20})
    assert links(machine.look(), fleet) == {(0, 1): topology.PXB}
