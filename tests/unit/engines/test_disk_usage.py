"""Limits of what containers write, and when their sizes are measured. Pure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpuspawner.engines.disk_usage import (
    LimitedContainer,
    label_of,
    limited,
    may_enforce,
    size,
    size_option,
)
from gpuspawner.leases.models import LeasedDevice
from gpuspawner.service.disk_monitor import DiskMeasurement, is_due
from gpuspawner.service.machines import node_of
from gpuspawner.slurm.cluster import Cluster, Node, NodeDevice
from gpuspawner.spawners.container import ContainerSettings, DiskLimit, build
from tests.support.leases import lease_of

MB, GB = 2**20, 2**30
XFS = [["Backing Filesystem", "xfs"], ["Supports d_type", "true"]]
EXT4 = [["Backing Filesystem", "extfs"]]
CONTAINERD = [["driver-type", "io.containerd.snapshotter.v1"]]


@pytest.mark.parametrize(
    ("driver", "status", "able"),
    [
        ("overlay2", XFS, True),
        ("overlay2", EXT4, False),
        ("btrfs", [["Btrfs", ""]], True),
        ("zfs", [["Zpool", "tank"]], True),
        ("devicemapper", [], True),
        ("vfs", XFS, False),
        ("fuse-overlayfs", XFS, False),
        ("overlayfs", CONTAINERD, False),
        ("btrfs", CONTAINERD, False),
        ("overlay2", None, False),
        ("", [[]], False),
    ],
)
def test_only_some_storage_drivers_can_enforce_disk_limits(
    driver: str, status: Any, able: bool
) -> None:
    assert may_enforce({"Driver": driver, "DriverStatus": status}) is able


def test_disk_usage_is_sized_judged_and_formatted() -> None:
    client: Any = SimpleNamespace(inspect_image=lambda image: {"Size": 20 * GB})
    for driver, option in (("overlay2", 10 * GB), ("zfs", 10 * GB), ("btrfs", 32 * GB)):
        assert size_option(client, driver, "image", 10 * GB) == option

    for written, watched, enforced in (
        (799, "", ""),
        (800, "near", "near"),
        (1000, "near", "near"),
        (1001, "over", "near"),
    ):
        assert LimitedContainer("lease-1", "c", 1000, False).judge(written) == watched
        assert LimitedContainer("lease-1", "c", 1000, True).judge(written) == enforced

    assert [size(n) for n in (0, 20 * MB, 1023 * MB, GB, 1.55 * GB, 10 * GB)] == [
        *("0 MB", "20 MB", "1023 MB", "1 GB", "1.6 GB", "10 GB")
    ]


@pytest.mark.parametrize(
    ("disk", "host", "option", "label"),
    [
        (None, {}, None, None),
        (DiskLimit(GB), {}, None, str(GB)),
        (DiskLimit(GB, 3 * GB), {}, {"size": str(3 * GB)}, f"{GB} enforced"),
        (DiskLimit(GB, GB), {"StorageOpt": {"size": "5G"}}, {"size": "5G"}, None),
    ],
)
def test_container_gets_disk_limit_option_and_label(
    disk: DiskLimit | None, host: dict[str, Any], option: Any, label: str | None
) -> None:
    settings = ContainerSettings(injection="none", environment={}, disk=disk)
    built = build({"host_config": host}, lease_of("ada"), settings)
    assert built["host_config"].get("StorageOpt") == option
    assert built["labels"].get("gpuspawner.disk_limit") == label


class Listing:
    """An engine's list of containers."""

    def __init__(self, *labels: dict[str, str]) -> None:
        self.labels = labels

    def containers(self, filters: Any) -> list[dict[str, Any]]:
        mounts = [
            {"Destination": "/home/jovyan/work", "Name": "gpuspawner-work-ada", "RW": True},
            {"Destination": "/datasets/x", "RW": False},
            {"Destination": "/var/lib/x", "Name": "0" * 64, "RW": True},
        ]
        return [{"Id": "c", "Labels": each, "Mounts": mounts} for each in self.labels]


def test_disk_limits_are_read_from_container_labels() -> None:
    lease = {"gpuspawner.lease": "lease-1"}
    client: Any = Listing(
        lease | {"gpuspawner.disk_limit": label_of(GB, True)},
        lease | {"gpuspawner.disk_limit": label_of(GB, False)},
        *(lease | {"gpuspawner.disk_limit": text} for text in ("", "0", "-5", "1G")),
        {"gpuspawner.lease": "", "gpuspawner.disk_limit": str(GB)},
    )
    folders = ("/home/jovyan/work",)
    assert limited(client) == [
        LimitedContainer("lease-1", "c", GB, True, folders),
        LimitedContainer("lease-1", "c", GB, False, folders),
    ]


@pytest.mark.parametrize(
    ("last", "now", "free", "due"),
    [
        (None, 0, None, True),
        (DiskMeasurement(100, 0.1, 50 * GB, 500 * MB), 101, 50 * GB, False),
        (DiskMeasurement(100, 0.1, 50 * GB, 500 * MB), 101, 49 * GB, True),
        (DiskMeasurement(100, 0.1, 50 * GB, 500 * MB), 159, 51 * GB, False),
        (DiskMeasurement(100, 0.1, 50 * GB, 500 * MB), 160, 51 * GB, True),
        # What takes long is not done all the time.
        (DiskMeasurement(100, 2, 50 * GB, 500 * MB), 109, 20 * GB, False),
        (DiskMeasurement(100, 2, 50 * GB, 500 * MB), 110, 20 * GB, True),
        # Where nobody sees the disk, time alone counts.
        (DiskMeasurement(100, 0.1, None, 500 * MB), 114, None, False),
        (DiskMeasurement(100, 0.1, None, 500 * MB), 115, None, True),
    ],
)
def test_container_measurement_is_due_by_time_and_disk_growth(
    last: DiskMeasurement | None, now: float, free: int | None, due: bool
) -> None:
    assert is_due(last, now, free) is due


def test_node_of_a_lease_is_found_by_its_device() -> None:
    devices = (NodeDevice("GPU-1", "T4", 16 * GB),)
    one = Node(name="one", address="", engine="")
    nodes = (one, Node(name="two", address="", engine="", devices=devices))
    cluster = Cluster(name="lab", nodes=nodes)

    def place(engine: str, *uuids: str) -> str:
        leased = tuple(LeasedDevice(uuid, 0, 0, "T4", 16 * GB) for uuid in uuids)
        return node_of(cluster, "slurm", lease_of("ada", engine=engine, devices=leased))

    assert place("slurm", "GPU-1") == "two"
    assert place("slurm", "GPU-gone") == ""
    assert place("slurm") == place("docker", "GPU-1") == "", "it is beside the hub"
