"""What a lease changes in a container. Real: the pure builders, compared with plain values."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from gpuspawner.engines.injection import (
    KEPT_CAPABILITIES,
    Hardening,
    candidates,
    dangers,
    gpu_host_config,
    harden,
    without_gpus,
)
from gpuspawner.leases.models import Lease, LeasedDevice, ServerRef
from gpuspawner.spawners.container import (
    ULIMITS,
    ContainerSettings,
    MountedWorkspace,
    Storage,
    build,
)
from gpuspawner.storage.shared_folders import FolderMount
from tests.support.leases import lease_of

GIB = 2**30
ONE, TWO = "GPU-aaaa", "MIG-bbbb"
NVIDIA_REQUEST = {"Driver": "", "DeviceIDs": [ONE, TWO], "Capabilities": [["gpu"]]}
FPGA_REQUEST = {"Driver": "cdi", "DeviceIDs": ["example.com/fpga=1"]}


def lease(*uuids: str) -> Lease:
    devices = tuple(LeasedDevice(u, 0, n, "A100", 80 * GIB) for n, u in enumerate(uuids))
    server = ServerRef("anna", "lab")
    return lease_of("anna", server=server, environment="pytorch", devices=devices)


def host_of(host: dict[str, Any], *uuids: str) -> dict[str, Any]:
    """The container's host_config, from the admin's."""
    built: dict[str, Any] = build({"host_config": host}, lease(*uuids), settings())["host_config"]
    return built


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


def test_container_spec_for_two_devices_is_complete() -> None:
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
        "volumes": ["/home/jovyan"],
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


def test_container_spec_without_devices_is_minimal() -> None:
    bare = settings(injection="none", shm_size=None, ulimits=())
    assert build({}, lease(), bare) == {
        "environment": {
            "GPUSPAWNER_LEASE_ID": "lease-1",
            "NVIDIA_VISIBLE_DEVICES": "void",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        },
        "labels": LABELS,
        "host_config": {"Binds": [], "Ulimits": [], "AutoRemove": False},
    }


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
def test_gpus_from_other_settings_are_dropped(host: dict[str, Any]) -> None:
    without = host_of(host)
    assert {"DeviceRequests", "Runtime", "Devices"}.isdisjoint(without)
    with_one = host_of(host, ONE)
    assert with_one["DeviceRequests"] == [{**NVIDIA_REQUEST, "DeviceIDs": [ONE]}]
    assert {"Runtime", "Devices"}.isdisjoint(with_one)


def test_settings_other_than_gpus_are_kept() -> None:
    assert without_gpus({"DeviceRequests": [], "Memory": 1}) == {"Memory": 1}
    fuse = {"PathOnHost": "/dev/fuse", "PathInContainer": "/dev/fuse"}
    host = {
        "DeviceRequests": [FPGA_REQUEST, NVIDIA_REQUEST],
        "Devices": [fuse, {"PathOnHost": "/dev/nvidiactl"}],
        "Runtime": "sysbox-runc",
    }
    built = host_of(host, ONE)
    assert built["DeviceRequests"] == [FPGA_REQUEST, {**NVIDIA_REQUEST, "DeviceIDs": [ONE]}]
    assert built["Devices"] == [fuse]
    assert built["Runtime"] == "sysbox-runc"


CDI_REQUEST = {"Driver": "cdi", "DeviceIDs": [f"nvidia.com/gpu={uuid}" for uuid in (ONE, TWO)]}


@pytest.mark.parametrize(
    ("injection", "host"),
    [
        ("device_requests", {"DeviceRequests": [NVIDIA_REQUEST]}),
        ("cdi", {"DeviceRequests": [CDI_REQUEST]}),
        ("runtime", {"Runtime": "nvidia"}),
        ("none", {}),
    ],
)
def test_each_injection_mode_sets_its_host_config(injection: str, host: dict[str, Any]) -> None:
    assert gpu_host_config(injection, [ONE, TWO]) == host
    assert gpu_host_config(injection, []) == {}
    built = build({}, lease(ONE, TWO), settings(injection=injection))
    kept = {k: v for k, v in built["host_config"].items() if k in ("DeviceRequests", "Runtime")}
    assert kept == host
    assert built["environment"]["NVIDIA_VISIBLE_DEVICES"] == f"{ONE},{TWO}"
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
def test_gpu_environment_variables_come_from_the_lease(
    environment: Any, uuids: tuple[str, ...], visible: str
) -> None:
    built = build({"environment": environment}, lease(*uuids), settings())
    assert built["environment"] == {
        "KEPT": "a=b",
        "GPUSPAWNER_LEASE_ID": "lease-1",
        "NVIDIA_VISIBLE_DEVICES": visible,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


# What users of PyTorch expect, unless the admin set something else.


MEMLOCK = {"Name": "memlock", "Soft": 1, "Hard": 1}
STACK = {"Name": "stack", "Soft": 67108864, "Hard": 67108864}


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ({}, {"ShmSize": 8 * GIB}),
        ({"ShmSize": GIB}, {"ShmSize": GIB}),
        ({"Memory": 4 * GIB}, {"ShmSize": 4 * GIB, "MemorySwap": 4 * GIB}),
        ({"Memory": 64 * GIB}, {"ShmSize": 8 * GIB, "MemorySwap": 64 * GIB}),
        ({"Memory": 4 * GIB, "MemorySwap": -1}, {"ShmSize": 4 * GIB, "MemorySwap": -1}),
        ({"Memory": 4 * GIB, "MemorySwap": 6 * GIB}, {"MemorySwap": 6 * GIB}),
        ({"IpcMode": "host"}, {"ShmSize": None}),
        ({"Ulimits": [MEMLOCK]}, {"Ulimits": [MEMLOCK, STACK]}),
        # The spawner removes the container, after reading its exit code and its log.
        ({"AutoRemove": True}, {"AutoRemove": False}),
    ],
)
def test_container_defaults_respect_admin_settings(
    host: dict[str, Any], expected: dict[str, Any]
) -> None:
    before = copy.deepcopy(host)
    built = host_of(host, ONE)
    assert {name: built.get(name) for name in expected} == expected
    assert host == before, "the argument is not changed"


# Names and labels.


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"team": "ml"}, {"team": "ml"}),
        ({"gpuspawner.lease": "forged", "team": "ml"}, {"team": "ml"}),
        (["team"], {"team": ""}),
        ({}, {}),
    ],
)
def test_lease_labels_override_admin_labels(given: Any, kept: dict[str, str]) -> None:
    again = settings(image="gpuspawner-kept:anna")
    built = build({"labels": given, "image": "lab/pytorch"}, lease(ONE), again)
    assert built["labels"] == {**kept, **LABELS}
    assert built["image"] == "gpuspawner-kept:anna", "the last one was kept"


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
def test_injection_modes_are_listed_best_first(info: dict[str, Any], ways: list[str]) -> None:
    assert candidates(info) == ways


@pytest.mark.parametrize(
    ("workspace", "home"),
    [
        ("/home/jovyan/work", "/home/jovyan"),
        ("/home/jovyan", "/home/jovyan"),
        ("/home/rstudio/work/", "/home/rstudio"),
    ],
)
def test_shared_folders_are_in_the_home_of_the_workspace(workspace: str, home: str) -> None:
    unused: Any = dict.fromkeys(("services", "docker", "calls", "prepared", "log"))
    folder = FolderMount("/srv/1", "Data", write=True, folder_id="1")
    mounted = MountedWorkspace("", workspace)
    storage = Storage(**unused, user="anna", workspace=mounted, folders=(folder,))
    assert storage.binds() == [f"/srv/1:{home}/shared/Data:rw"]


# Hardening.


DOCKERS_OWN = {
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD"),
    *("NET_BIND_SERVICE", "NET_RAW", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
}
USUAL = Hardening(memory=2**30)


def test_default_hardening_limits_the_container() -> None:
    assert harden({"NetworkMode": "lab"}, USUAL) == {
        "NetworkMode": "lab",
        "CapDrop": ["ALL"],
        "CapAdd": list(KEPT_CAPABILITIES),
        "SecurityOpt": ["no-new-privileges"],
        "PidsLimit": 4096,
        "Memory": 2**30,
        "OomScoreAdj": 500,
    }
    assert set(KEPT_CAPABILITIES) < DOCKERS_OWN, "nothing that Docker does not give anyway"


def test_disabled_hardening_changes_nothing() -> None:
    off = Hardening(capabilities=None, no_new_privileges=False, pids=0, memory=0)
    admins = {"CapAdd": ["SYS_PTRACE"], "OomScoreAdj": 0}
    assert harden(admins, off) == admins


ALL_KEPT = sorted(["SYS_PTRACE", *KEPT_CAPABILITIES])


@pytest.mark.parametrize(
    ("admin", "kept"),
    [
        ({"CapDrop": ["NET_RAW"]}, {"CapDrop": ["NET_RAW"], "CapAdd": None}),
        ({"CapAdd": ["SYS_PTRACE", "CHOWN"]}, {"CapDrop": ["ALL"], "CapAdd": ALL_KEPT}),
        ({"SecurityOpt": ["seccomp=x"]}, {"SecurityOpt": ["no-new-privileges", "seccomp=x"]}),
        ({"SecurityOpt": ["no-new-privileges:false"]}, {}),
        ({"PidsLimit": 300, "Memory": 5, "OomScoreAdj": 7}, {}),
        ({"PidsLimit": 0, "Memory": 0, "OomScoreAdj": 0}, {}),
        ({"PidsLimit": -1}, {}),
        ({"Privileged": True}, {"CapDrop": None, "CapAdd": None, "SecurityOpt": None}),
    ],
)
def test_hardening_respects_admin_settings(admin: dict[str, Any], kept: dict[str, Any]) -> None:
    before = dict(admin)
    found = harden(admin, USUAL)
    for key, value in (kept or before).items():
        assert (sorted(found[key]) if isinstance(value, list) else found.get(key)) == value
    assert admin == before, "the argument is not changed"


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ({}, []),
        ({"Binds": ["/srv/docker.sock.d:/x:rw"], "NetworkMode": "lab"}, []),
        ({"Privileged": True}, ["privileged"]),
        ({"Binds": ["/var/run/docker.sock:/s:ro"]}, ["socket"]),
        ({"Mounts": [{"Source": "/run/containerd/containerd.sock"}]}, ["socket"]),
        ({"PidMode": "host", "NetworkMode": "host"}, ["PidMode", "NetworkMode"]),
    ],
)
def test_settings_that_expose_the_host_are_named(host: dict[str, Any], words: list[str]) -> None:
    found = dangers(host)
    assert len(found) == len(words)
    assert all(word in sentence for word, sentence in zip(words, found, strict=True))
