"""What a lease changes in a container. Real: the pure builders; compared with plain values."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest

from gpuspawner.engines.injection import (
    candidates,
    detect_injection,
    gpu_environment,
    gpu_host_config,
    without_gpus,
)
from gpuspawner.leases.models import Lease, LeasedDevice, ServerRef
from gpuspawner.spawners.container import ULIMITS, ContainerSettings, build, labels

GIB = 2**30
ONE, TWO = "GPU-aaaa", "MIG-bbbb"
NVIDIA_REQUEST = {"Driver": "", "DeviceIDs": [ONE, TWO], "Capabilities": [["gpu"]]}
FPGA_REQUEST = {"Driver": "cdi", "DeviceIDs": ["example.com/fpga=1"]}


def lease(*uuids: str) -> Lease:
    return Lease(
        id="lease-1",
        server=ServerRef("anna", "lab"),
        account="member:anna",
        environment="pytorch",
        devices=tuple(LeasedDevice(u, 0, n, "A100", 80 * GIB) for n, u in enumerate(uuids)),
        rate=1,
        hold=1,
        granted_at=datetime(2025, 3, 1, tzinfo=timezone.utc),
    )


def settings(**changes: Any) -> ContainerSettings:
    plain = ContainerSettings(
        injection="device_requests",
        shm_size=8 * GIB,
        ulimits=ULIMITS,
        environment={"GPUSPAWNER_LEASE_ID": "lease-1"},
    )
    return replace(plain, **changes)


LABELS = {
    "gpuspawner.lease": "lease-1",
    "gpuspawner.member": "anna",
    "gpuspawner.server": "lab",
    "gpuspawner.environment": "pytorch",
}


# The whole container.


def test_a_plain_container_with_two_devices() -> None:
    create = {
        "image": "lab/pytorch",
        "name": "jupyter-anna--lab",
        "command": ["jupyterhub-singleuser"],
        "environment": {"JUPYTERHUB_USER": "anna"},
        "volumes": ["/home/jovyan"],
        "host_config": {"Binds": ["anna:/home/jovyan:rw"], "PortBindings": {"8888/tcp": None}},
    }
    workspace = ["gpuspawner-work-anna:/home/jovyan/work:rw", "/srv/imagenet:/datasets/imagenet:ro"]

    assert build(create, lease(ONE, TWO), settings(binds=workspace)) == {
        "image": "lab/pytorch",
        "name": "jupyter-anna--lab",
        "command": ["jupyterhub-singleuser"],
        "environment": {
            "JUPYTERHUB_USER": "anna",
            "GPUSPAWNER_LEASE_ID": "lease-1",
            "NVIDIA_VISIBLE_DEVICES": f"{ONE},{TWO}",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        },
        "volumes": ["/home/jovyan", "/home/jovyan/work", "/datasets/imagenet"],
        "labels": LABELS,
        "host_config": {
            "Binds": ["anna:/home/jovyan:rw", *workspace],
            "PortBindings": {"8888/tcp": None},
            "DeviceRequests": [NVIDIA_REQUEST],
            "ShmSize": 8 * GIB,
            "Ulimits": [
                {"Name": "memlock", "Soft": -1, "Hard": -1},
                {"Name": "stack", "Soft": 67108864, "Hard": 67108864},
            ],
            "AutoRemove": False,
        },
    }


def test_an_empty_one_without_devices() -> None:
    bare = settings(injection="none", shm_size=None, ulimits=())
    assert build({}, lease(), bare) == {
        "environment": {
            "GPUSPAWNER_LEASE_ID": "lease-1",
            "NVIDIA_VISIBLE_DEVICES": "void",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        },
        "volumes": [],
        "labels": LABELS,
        "host_config": {"Binds": [], "Ulimits": [], "AutoRemove": False},
    }


def test_what_goes_in_is_left_as_it_was() -> None:
    create = {
        "environment": {"A": "1"},
        "labels": {"team": "ml"},
        "volumes": ["/x"],
        "host_config": {"DeviceRequests": [NVIDIA_REQUEST], "Ulimits": [], "Binds": ["a:/x:rw"]},
    }
    before = copy.deepcopy(create)
    build(create, lease(ONE), settings(binds=["b:/y:rw"]))
    assert create == before


# Devices come from the lease alone.


OTHERS = [
    {"DeviceRequests": [{"Driver": "", "Count": -1, "Capabilities": [["gpu"]]}]},
    {"DeviceRequests": [{"Driver": "nvidia", "Count": -1, "Capabilities": [["compute"]]}]},
    {"DeviceRequests": [{"Driver": "", "Count": -1, "Capabilities": [["nvidia"]]}]},
    {"DeviceRequests": [{"Driver": "", "Count": -1, "Capabilities": [["compute", "utility"]]}]},
    {"DeviceRequests": [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=all"]}]},
    {"DeviceRequests": [NVIDIA_REQUEST]},
    {"DeviceRequests": None},
    {"Runtime": "nvidia"},
    {"Devices": [{"PathOnHost": "/dev/nvidia0", "PathInContainer": "/dev/nvidia0"}]},
    {"Devices": [{"PathOnHost": "/dev/nvidia-caps/nvidia-cap3"}]},
]


@pytest.mark.parametrize("host", OTHERS)
def test_devices_that_came_from_elsewhere_are_dropped(host: dict[str, Any]) -> None:
    without = build({"host_config": host}, lease(), settings())["host_config"]
    assert {"DeviceRequests", "Runtime", "Devices"}.isdisjoint(without)
    with_one = build({"host_config": host}, lease(ONE), settings())["host_config"]
    assert with_one["DeviceRequests"] == [{**NVIDIA_REQUEST, "DeviceIDs": [ONE]}]
    assert {"Runtime", "Devices"}.isdisjoint(with_one)


def test_what_is_no_gpu_stays() -> None:
    fuse = {"PathOnHost": "/dev/fuse", "PathInContainer": "/dev/fuse"}
    host = {
        "DeviceRequests": [FPGA_REQUEST, NVIDIA_REQUEST],
        "Devices": [fuse, {"PathOnHost": "/dev/nvidiactl"}],
        "Runtime": "sysbox-runc",
    }
    built = build({"host_config": host}, lease(ONE), settings())["host_config"]
    assert built["DeviceRequests"] == [FPGA_REQUEST, {**NVIDIA_REQUEST, "DeviceIDs": [ONE]}]
    assert built["Devices"] == [fuse]
    assert built["Runtime"] == "sysbox-runc"


@pytest.mark.parametrize(
    ("injection", "host"),
    [
        ("device_requests", {"DeviceRequests": [NVIDIA_REQUEST]}),
        (
            "cdi",
            {
                "DeviceRequests": [
                    {
                        "Driver": "cdi",
                        "DeviceIDs": [f"nvidia.com/gpu={ONE}", f"nvidia.com/gpu={TWO}"],
                    }
                ]
            },
        ),
        ("runtime", {"Runtime": "nvidia"}),
        ("none", {}),
    ],
)
def test_each_way_of_injection(injection: str, host: dict[str, Any]) -> None:
    assert gpu_host_config(injection, [ONE, TWO]) == host
    assert gpu_host_config(injection, []) == {}
    built = build({}, lease(ONE, TWO), settings(injection=injection))
    kept = {k: v for k, v in built["host_config"].items() if k in ("DeviceRequests", "Runtime")}
    assert kept == host
    assert built["environment"]["NVIDIA_VISIBLE_DEVICES"] == f"{ONE},{TWO}"


def test_an_unknown_way_is_no_way() -> None:
    with pytest.raises(ValueError, match="carrier pigeon"):
        gpu_host_config("carrier pigeon", [ONE])


@pytest.mark.parametrize(
    "environment",
    [
        {"NVIDIA_VISIBLE_DEVICES": "all", "CUDA_VISIBLE_DEVICES": "3", "KEPT": "a=b"},
        ["NVIDIA_VISIBLE_DEVICES=all", "CUDA_VISIBLE_DEVICES=3", "KEPT=a=b"],
    ],
)
@pytest.mark.parametrize(("uuids", "visible"), [((ONE,), ONE), ((), "void")])
def test_variables_about_devices_are_set_anew(
    environment: Any, uuids: tuple[str, ...], visible: str
) -> None:
    built = build({"environment": environment}, lease(*uuids), settings())
    assert built["environment"] == {
        "KEPT": "a=b",
        "GPUSPAWNER_LEASE_ID": "lease-1",
        "NVIDIA_VISIBLE_DEVICES": visible,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    assert gpu_environment("none", uuids)["NVIDIA_VISIBLE_DEVICES"] == visible


# What PyTorch's users expect, unless the admin said something else.


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ({}, {"ShmSize": 8 * GIB}),
        ({"ShmSize": GIB}, {"ShmSize": GIB}),
        ({"Memory": 4 * GIB}, {"ShmSize": 4 * GIB, "MemorySwap": 4 * GIB}),
        ({"Memory": 64 * GIB}, {"ShmSize": 8 * GIB, "MemorySwap": 64 * GIB}),
        ({"Memory": 4 * GIB, "MemorySwap": -1}, {"ShmSize": 4 * GIB, "MemorySwap": -1}),
        ({"Memory": 4 * GIB, "MemorySwap": 6 * GIB}, {"MemorySwap": 6 * GIB}),
    ],
)
def test_shared_memory_and_swap(host: dict[str, Any], expected: dict[str, int]) -> None:
    built = build({"host_config": host}, lease(ONE), settings())["host_config"]
    assert {name: built[name] for name in expected} == expected


def test_a_container_in_the_hosts_ipc_has_no_shared_memory_of_its_own() -> None:
    built = build({"host_config": {"IpcMode": "host"}}, lease(ONE), settings())["host_config"]
    assert "ShmSize" not in built


def test_a_limit_that_the_admin_set_is_kept() -> None:
    said = {"Name": "memlock", "Soft": 1, "Hard": 1}
    built = build({"host_config": {"Ulimits": [said]}}, lease(ONE), settings())["host_config"]
    assert built["Ulimits"] == [said, {"Name": "stack", "Soft": 67108864, "Hard": 67108864}]


# Names and labels.


@pytest.mark.parametrize("given", [{"team": "ml"}, {"gpuspawner.lease": "forged", "team": "ml"}])
def test_labels_join_the_admins_and_win(given: dict[str, str]) -> None:
    built = build({"labels": given}, lease(ONE), settings())
    assert built["labels"] == {"team": "ml", **LABELS}


def test_labels_as_a_list_are_kept_too() -> None:
    assert build({"labels": ["team"]}, lease(ONE), settings())["labels"] == {"team": "", **LABELS}
    assert labels(lease()) == LABELS


def test_another_image_when_the_last_one_was_kept() -> None:
    built = build({"image": "lab/pytorch"}, lease(ONE), settings(image="gpuspawner-kept:anna"))
    assert built["image"] == "gpuspawner-kept:anna"


def test_it_removes_itself_never() -> None:
    """An exit code and the last words are worth keeping; the spawner removes it."""
    built = build({"host_config": {"AutoRemove": True}}, lease(ONE), settings())
    assert built["host_config"]["AutoRemove"] is False


# What an engine's own information offers.

CDI_DEVICE = {"Source": "cdi", "ID": f"nvidia.com/gpu={ONE}"}


@pytest.mark.parametrize(
    ("info", "ways"),
    [
        ({}, ["device_requests"]),
        ({"Runtimes": {"runc": {}}, "CDISpecDirs": None}, ["device_requests"]),
        ({"Runtimes": {"runc": {}, "nvidia": {}}}, ["device_requests", "runtime"]),
        ({"CDISpecDirs": ["/etc/cdi"]}, ["device_requests", "cdi"]),
        (
            {"Runtimes": {"nvidia": {}}, "CDISpecDirs": ["/etc/cdi"]},
            ["device_requests", "runtime", "cdi"],
        ),
        ({"DiscoveredDevices": [CDI_DEVICE]}, ["cdi", "device_requests"]),
        (
            {"DiscoveredDevices": [{"Source": "cdi", "ID": "example.com/fpga=1"}]},
            ["device_requests"],
        ),
    ],
)
def test_the_ways_worth_trying_best_first(info: dict[str, Any], ways: list[str]) -> None:
    assert candidates(info) == ways
    assert detect_injection(info) == ways[0]


def test_without_gpus_says_nothing_of_what_was_not_there() -> None:
    assert without_gpus({}) == {}
    assert without_gpus({"DeviceRequests": [], "Memory": 1}) == {"Memory": 1}
