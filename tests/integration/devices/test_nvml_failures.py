"""What NVMLDevices reports while devices, instances or the driver fail, and when it recovers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

from gpuspawner.devices import topology
from gpuspawner.devices.nvml import HANGING
from tests.support.nvml import nvml_library as nvml
from tests.support.nvml.machine import Machine, links, reasons, statuses
from tests.support.nvml.nvml_library import gpus, mig_gpu
from tests.support.processes import REPO

# One device that fails.

CALLS = [
    "nvmlDeviceGetName",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetComputeMode",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
]
NAMELESS_CALLS = ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID"]


def test_failing_device_becomes_unknown_and_others_stay_ok(machine: Machine) -> None:
    fleet = gpus(3)
    healthy = machine.has(*fleet).look()
    for call in CALLS + NAMELESS_CALLS:
        sick = replace(fleet[1], fails={call: nvml.GPU_IS_LOST}, compute=[(5, 5)])
        inventory = machine.has(fleet[0], sick, fleet[2]).look()
        assert inventory["error"] == ""
        assert list(statuses(inventory).values()) == ["ok", "unknown", "ok"], call
        reason = reasons(inventory)[sick.uuid]
        assert "could not be read. The GPU is lost, it fell off the bus" in reason, call
        for known, seen in zip(healthy["devices"], inventory["devices"], strict=True):
            kept = ("uuid", "index", "model", "memory_bytes", "pci_bus_id")
            assert {k: known[k] for k in kept} == {k: seen[k] for k in kept}, call
        assert inventory["devices"][1]["processes"] == [], call
        assert machine.has(*fleet).look()["devices"] == healthy["devices"], call


def test_device_failing_from_the_start_is_listed_by_uuid(machine: Machine) -> None:
    for call in CALLS:
        fleet = gpus(2)
        fleet[0].fails = {call: nvml.RESET_REQUIRED}
        inventory = machine.begin().has(*fleet).look()
        assert list(statuses(inventory).values()) == ["unknown", "ok"], call
        assert "nvidia-smi --gpu-reset" in reasons(inventory)[fleet[0].uuid], call


def test_device_without_known_uuid_is_skipped_and_logged_once(machine: Machine) -> None:
    for call in NAMELESS_CALLS:
        fleet = gpus(3)
        fleet[1].fails = {call: nvml.GPU_IS_LOST}
        machine.begin().has(*fleet)
        for _ in range(3):
            inventory = machine.look()
            assert statuses(inventory) == {fleet[0].uuid: "ok", fleet[2].uuid: "ok"}
            assert inventory["error"] == ""
        assert machine.log.read_text().count("GPU 1, or an instance of it, is not responding.") == 1

    fails = {"nvmlDeviceGetHandleByIndex_v2": nvml.NO_PERMISSION}
    inventory = machine.begin().has(*(replace(gpu, fails=fails) for gpu in gpus(2))).look()
    assert inventory["devices"] == []
    assert inventory["error"].startswith("No GPU answers.")
    assert "nvidia-smi" in inventory["error"]


def test_gpu_off_the_bus_is_unknown_after_indexes_shift(machine: Machine) -> None:
    fleet = gpus(3)
    machine.has(*fleet).look()
    inventory = machine.has(fleet[0], fleet[2]).look()
    assert {d["uuid"]: d["index"] for d in inventory["devices"]} == {
        fleet[0].uuid: 0,
        fleet[1].uuid: 1,
        fleet[2].uuid: 1,
    }
    assert statuses(inventory)[fleet[1].uuid] == "unknown"
    assert reasons(inventory) == {fleet[1].uuid: "NVML no longer lists it."}
    assert list(statuses(machine.has(*fleet).look()).values()) == ["ok"] * 3


def test_undecodable_name_makes_only_that_device_unknown(machine: Machine) -> None:
    fleet = gpus(2)
    machine.has(*fleet)
    text = machine.fleet.read_bytes().replace(b"name NVIDIA", b"name \xff\xfe", 1)
    machine.fleet.write_bytes(text)
    inventory = machine.look()
    assert list(statuses(inventory).values()) == ["unknown", "ok"]
    assert "name makes no sense" in reasons(inventory)[fleet[0].uuid]


def test_nvml_is_reopened_each_minute_while_device_is_unknown(machine: Machine) -> None:
    """A fresh start that fails tells that one was made: the answer is an error then."""
    fleet = gpus(2)
    sick = replace(fleet[0], fails={"nvmlDeviceGetName": nvml.UNKNOWN})
    cannot_open = {"nvmlInitWithFlags": nvml.DRIVER_NOT_LOADED}
    assert machine.has(*fleet, fails=cannot_open).look()["error"]
    assert machine.has(*fleet).look()["error"] == ""
    machine.has(*fleet, fails=cannot_open)
    assert machine.look(timedelta(hours=1))["error"] == "", "a healthy one stays open"
    machine.has(sick, fleet[1], fails=cannot_open)
    assert machine.look()["error"] == "", "this look finds it sick"
    assert "not loaded" in machine.look()["error"], "the next one opens NVML anew"
    assert machine.has(sick, fleet[1]).look()["error"] == ""
    assert machine.has(sick, fleet[1], fails=cannot_open).look(timedelta(seconds=59))["error"] == ""
    assert "not loaded" in machine.look()["error"]
    assert nvml.times_open(machine.fleet) == 0
    machine.has(sick, fleet[1])
    for _ in range(3):
        machine.look(timedelta(hours=1))
        assert nvml.times_open(machine.fleet) == 1


def test_failing_mig_instance_does_not_affect_others(machine: Machine) -> None:
    parent = mig_gpu(0, 1, 2)
    assert set(statuses(machine.has(parent).look()).values()) == {"parent", "ok"}
    for call in (
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetMigDeviceHandleByIndex",
        "nvmlDeviceGetUUID",
    ):
        parent.instances[1].fails = {call: nvml.UNKNOWN}
        inventory = machine.has(parent).look()
        assert list(statuses(inventory).values()) == ["parent", "ok", "unknown", "ok"], call
        assert inventory["devices"][2]["model"] == "NVIDIA A100-SXM4-40GB MIG 2g.5gb"
        assert "unknown error" in reasons(inventory)[parent.instances[1].uuid]


def test_mig_instances_of_an_unresponsive_gpu_are_unknown(machine: Machine) -> None:
    plain, parent = *gpus(1), mig_gpu(0, 1)
    machine.has(plain, parent).look()
    lost = replace(parent, fails={"nvmlDeviceGetMigMode": nvml.GPU_IS_LOST})
    inventory = machine.has(plain, lost).look()
    assert list(statuses(inventory).values()) == ["ok", "unknown", "unknown", "unknown"]
    assert all("fell off the bus" in reason for reason in reasons(inventory).values())
    unlisted = replace(parent, fails={"nvmlDeviceGetMaxMigDeviceCount": nvml.UNKNOWN})
    found = machine.has(plain, unlisted).look()
    assert list(statuses(found).values()) == ["ok", "parent", "unknown", "unknown"]
    found = machine.has(plain, parent).look()
    assert list(statuses(found).values()) == ["ok", "parent", "ok", "ok"]


def test_removed_mig_instance_is_no_longer_listed(machine: Machine) -> None:
    machine.has(mig_gpu(0, 1)).look()
    left = statuses(machine.has(mig_gpu(1, 4)).look())
    assert [uuid[:12] for uuid in left] == ["GPU-00000001", "MIG-00000001", "MIG-00000004"]
    whole = mig_gpu(mig=False)
    assert statuses(machine.has(whole).look()) == {whole.uuid: "ok"}


def test_failed_topology_query_loses_only_links_and_is_retried(machine: Machine) -> None:
    first, *others = gpus(5)
    calls = (
        "nvmlDeviceGetTopologyCommonAncestor",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetNvLinkRemoteDeviceType",
        "nvmlDeviceGetNvLinkRemotePciInfo_v2",
    )
    for call, other in zip(calls, others, strict=True):  # a set that was not seen before
        fleet = [replace(first, nvlinks=[other.bus]), replace(other, nvlinks=[first.bus])]
        inventory = machine.has(*fleet, levels={(0, 1): 10}, fails={call: nvml.UNKNOWN}).look()
        assert [statuses(inventory)[gpu.uuid] for gpu in fleet] == ["ok", "ok"]
        whole = {(0, 1): topology.nvlinks(1)}
        by_pcie = {(0, 1): topology.PIX}
        assert links(inventory, fleet) == (by_pcie if "NvLink" in call else whole), call
        assert links(machine.has(*fleet, levels={(0, 1): 10}).look(), fleet) == whole, call


# NVML as a whole.


def test_missing_driver_is_reported(tmp_path: Path) -> None:
    """A file that is no library hides a driver that this machine may have."""
    no_library = tmp_path / nvml.LIBRARY
    no_library.write_text("this is no library")
    machine = Machine(no_library, tmp_path / "fleet")
    try:
        inventory = machine.look()
    finally:
        machine.end()
    assert inventory["devices"] == []
    assert inventory["error"].startswith("This machine has no NVIDIA driver")


def test_driver_can_come_and_go(machine: Machine) -> None:
    inventory = machine.look()
    assert (inventory["devices"], inventory["links"]) == ([], [])
    assert inventory["error"].startswith("The NVIDIA driver is not loaded: run nvidia-smi")
    inventory = machine.has().look()
    assert (inventory["devices"], inventory["error"]) == ([], ""), "it has no GPU"
    assert inventory["driver_version"] == "550.54.15"
    inventory = machine.has(*gpus(2)).look()
    assert inventory["error"] == ""
    assert list(statuses(inventory).values()) == ["ok", "ok"]

    machine.fleet.unlink()
    assert machine.look()["error"] == "NVML was shut down."
    assert "not loaded" in machine.look()["error"]
    assert list(statuses(machine.has(*gpus(2)).look()).values()) == ["ok", "ok"]

    assert nvml.times_open(machine.fleet) == 1
    machine.tell("close")
    assert nvml.times_open(machine.fleet) == 0
    machine.has(*gpus(1), fails={"nvmlInitWithFlags": nvml.DRIVER_NOT_LOADED})
    assert "not loaded" in machine.look()["error"], "it was opened again"


def test_lost_driver_is_reported_and_devices_return(machine: Machine) -> None:
    fleet = gpus(2)
    before = machine.has(*fleet).look()
    for call, (code, says) in product(
        ("nvmlDeviceGetCount_v2", "nvmlDeviceGetName"),
        (
            (1, "shut down"),
            (nvml.DRIVER_NOT_LOADED, "not loaded"),
            (nvml.LIB_RM_VERSION_MISMATCH, "was updated while in use: restart the hub"),
        ),
    ):
        lost = machine.has(*fleet, fails={call: code}).look()
        assert (lost["devices"], lost["links"]) == ([], []), call
        assert says in lost["error"], call
        again = machine.has(*fleet).look()
        assert again["devices"] == before["devices"], call
        assert again["error"] == "", call


def test_unknown_driver_error_is_reported(machine: Machine) -> None:
    machine.has(*gpus(1), fails={"nvmlInitWithFlags": nvml.UNKNOWN})
    assert "restart the container" in machine.look()["error"]
    machine.has(*gpus(1), fails={"nvmlDeviceGetCount_v2": 77})
    assert machine.look()["error"] == "NVML says: Stand-in error 77."
    inventory = machine.has(*gpus(1), fails={"nvmlSystemGetDriverVersion": nvml.UNKNOWN}).look()
    assert (inventory["driver_version"], inventory["error"]) == ("", "")
    assert len(inventory["devices"]) == 1, "a version that cannot be read hides none"


# A driver that hangs.

HUB = """
import asyncio, json, sys
from tests.support.brokers import make_services
from gpuspawner.devices import nvml
from gpuspawner.core.errors import GPUSpawnerError
from gpuspawner.leases.models import Request, ServerRef

services = make_services(database_url=sys.argv[1], device_source="nvml", refresh_seconds=0)
pages = []

async def do(word, rest):
    if word == "loaded":
        return "libnvidia-ml" in open("/proc/self/maps").read()
    if word == "patience":
        nvml.LOOK_SECONDS = float(rest)
    if word == "ask":
        request = Request(devices=1, environment="pytorch")
        try:
            grant = services.leases.grant
            lease = await services.run(grant, ServerRef(rest), request, engine="docker")
        except GPUSpawnerError as error:
            return error.message
        await services.run(services.leases.confirm, lease.id, "container")
        return {"lease": lease.id, "uuids": lease.uuids}
    if word == "pages":
        look = services.monitoring.overview
        pages.extend(asyncio.ensure_future(services.read(look)) for _ in range(int(rest)))
        await asyncio.sleep(0)
    if word == "unanswered":
        return sum(not page.done() for page in pages)
    if word == "answers":
        told, pages[:] = await asyncio.gather(*pages), []
        return [[{d.device.uuid: d.state for d in one.devices}, one.error] for one in told]
    if word == "release":
        return (await services.run(services.leases.release, rest, reason="stopped")).state

async def main():
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        word, _, rest = line.strip().partition(" ")
        print(json.dumps(await do(word, rest)), flush=True)

asyncio.run(main())
"""


def test_hanging_driver_delays_no_release_and_recovers(
    library: Path, migrated_file: Path, tmp_path: Path
) -> None:
    """Pages that wait for the driver block nothing; after the time-out its devices are unknown."""
    fleet, shown = tmp_path / "fleet", gpus(2)
    nvml.write_fleet(fleet, shown)
    log, file = tmp_path / "log", shutil.copy(migrated_file, tmp_path)
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", HUB, f"sqlite:///{file}"],
            env=os.environ | nvml.environment(library, fleet),
            cwd=REPO,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )

    def tell(command: str) -> Any:
        assert process.stdin and process.stdout
        process.stdin.write(command + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, log.read_text()
        return json.loads(answer)

    try:
        assert not tell("loaded"), "services that were made have not looked yet"
        first, second = tell("ask ada"), tell("ask grace")
        assert tell("loaded")
        nvml.write_fleet(fleet, shown, hangs=["nvmlDeviceGetCount_v2"])
        tell("patience 600")
        tell("pages 10")
        assert tell(f"release {first['lease']}") == "ended"
        assert tell("unanswered") == 10
        nvml.write_fleet(fleet, shown)
        healthy = {gpu.uuid: "free" for gpu in shown}
        healthy[second["uuids"][0]] = "leased"
        tell("answers")
        tell("pages 1")
        assert tell("answers") == [[healthy, ""]]

        nvml.write_fleet(fleet, shown, hangs=["nvmlDeviceGetCount_v2"])
        tell("patience 1")
        for _ in range(2):  # while it hangs, and again while the same call still hangs
            tell("pages 10")
            for statuses_now, error in tell("answers"):
                assert error == HANGING
                assert "free" not in statuses_now.values()
        assert "not responding" in tell("ask edsger")
        assert tell(f"release {second['lease']}") == "ended"
        tell("pages 1")
        [[statuses_now, _]] = tell("answers")
        assert set(statuses_now.values()) == {"unknown"}

        nvml.write_fleet(fleet, shown)
        tell("patience 600")
        tell("pages 1")
        assert tell("answers") == [[{gpu.uuid: "free" for gpu in shown}, ""]]
        assert tell("ask edsger")["uuids"]
    finally:
        nvml.write_fleet(fleet, shown)
        assert process.stdin
        process.stdin.close()
        process.wait(timeout=120)
        print(log.read_text())
