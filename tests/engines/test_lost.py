"""Containers that lose their devices. Real: Docker Engine, containers, cgroups. Stand-in: NVIDIA's
hook."""

from __future__ import annotations

import io
import signal
import tarfile
from typing import Any

import psutil
import pytest
from docker.types import DeviceRequest

from gpuspawner.core.errors import EngineUnavailable
from gpuspawner.engines.docker import DockerEngine
from gpuspawner.engines.gpu_loss import LostDevices, cause_and_remedy, check_cgroups
from gpuspawner.engines.preflight import Status
from gpuspawner.leases.models import Lease
from tests.support.device_loss import take_devices
from tests.support.engine import DEVICES, PrivateEngine, open_engine
from tests.support.images import INSTANT
from tests.support.leases import lease_of as unstored_lease
from tests.support.processes import signal_pid, wait_for


def lease_of(engine: PrivateEngine, image: str, device: int | None, *, cdi: bool = False) -> Lease:
    """A lease whose container runs; None: without a device. ``cdi``: not by the hook."""
    client = engine.client
    asked = [] if device is None else [DEVICES[device]]
    requests = [DeviceRequest(device_ids=asked, capabilities=[["gpu"]])] if asked else []
    if cdi:
        names = [f"nvidia.com/gpu={uuid}" for uuid in asked]
        requests = [DeviceRequest(driver="cdi", device_ids=names)]
    host = client.create_host_config(device_requests=requests)
    made = client.create_container(image, ["sleep", "1000"], host_config=host, user="1000")
    client.start(made["Id"])
    return unstored_lease("ada", id=f"lease-{device}", engine="docker", engine_ref=made["Id"])


PATIENCE = 240.0
"""Seconds for an answer that comes: a busy machine has lost nothing."""


@pytest.fixture
def docker_engine(clean_engine: PrivateEngine) -> DockerEngine:
    return open_engine(clean_engine.url)


def test_lost_devices_are_detected_per_container(
    clean_engine: PrivateEngine, docker_engine: DockerEngine, images: Any
) -> None:
    loses, keeps, without = (lease_of(clean_engine, images.INSTANT, n) for n in (0, 1, None))
    looks = LostDevices(docker_engine, PATIENCE)
    some = [loses, keeps, without]
    assert looks.surely(some) == {loses.id: False, keeps.id: False, without.id: False}
    take_devices(clean_engine, loses.engine_ref)
    assert looks.surely(some) == {loses.id: True, keeps.id: False, without.id: False}
    said = cause_and_remedy(docker_engine, loses.engine_ref)
    assert said.startswith("They came by NVIDIA's hook; the engine's cgroup driver is cgroupfs")
    assert 'c.GPUDockerSpawner.gpu_injection = "cdi"' in said

    def processes() -> list[str]:
        top = clean_engine.client.top(keeps.engine_ref)["Processes"]
        return [row[-1] for row in top]

    wait_for(lambda: processes() == ["sleep 1000"], "nothing to be left of a look inside")

    # Who cannot be looked into has lost nothing: that is not known.
    clean_engine.client.pause(keeps.engine_ref)
    clean_engine.client.remove_container(without.engine_ref, force=True)
    assert looks.look(some) == {loses.id: True}


def test_containers_with_cdi_devices_are_not_checked(cdi_engine: PrivateEngine) -> None:
    by_hook, by_cdi = (lease_of(cdi_engine, INSTANT, 0), lease_of(cdi_engine, INSTANT, 1, cdi=True))
    engine = open_engine(cdi_engine.url)
    assert LostDevices(engine, PATIENCE).look([by_hook, by_cdi]) == {by_hook.id: False}
    assert cause_and_remedy(engine, by_cdi.engine_ref).startswith("They came by CDI;")
    cdi_engine.clean()


HANGS, ANSWERS = b"#!/usr/bin/perl\nsleep 1000;\n", b"#!/usr/bin/perl\nexit 0;\n"


def test_hanging_probe_blocks_nobody_and_is_not_repeated(
    clean_engine: PrivateEngine, docker_engine: DockerEngine, images: Any
) -> None:
    hangs, answers = (lease_of(clean_engine, images.INSTANT, n) for n in (0, 1))
    _put(clean_engine, hangs.engine_ref, "bin/sh", HANGS)
    looks = LostDevices(docker_engine, patience=2)

    def hanging() -> list[int]:
        top = clean_engine.client.top(hangs.engine_ref)["Processes"]
        return [int(row[1]) for row in top if "perl" in row[-1]]

    seen = []
    for _ in range(3):
        # On a busy machine the other one, too, may take longer than is waited for.
        found = wait_for(lambda: looks.look([hangs, answers]), "an answer")
        assert found == {answers.id: False}
        seen += wait_for(hanging, "the other one to hang")  # it was told to begin, not more
    assert len(seen) == 3 and len(set(seen)) == 1, "the same one hangs on"
    look = psutil.Process(seen[0])
    assert look.uids().real == 1000, "it runs as the container's own user"
    # Once it is gone, there is a new one.
    _put(clean_engine, hangs.engine_ref, "bin/sh", ANSWERS)
    signal_pid(look.pid, signal.SIGKILL)
    wait_for(lambda: hangs.id in looks.look([hangs]), "the next look")


def _put(engine: PrivateEngine, container: str, path: str, content: bytes) -> None:
    """Write a program into a container, as its member might who is root there."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        info = tarfile.TarInfo(path)
        info.size, info.mode = len(content), 0o755
        tar.addfile(info, io.BytesIO(content))
    assert engine.client.put_archive(container, "/", packed.getvalue())


def test_lost_device_check_fails_without_an_engine(images: Any) -> None:
    lease = unstored_lease("ada", engine_ref="container")
    with pytest.raises(EngineUnavailable):
        LostDevices(open_engine("unix:///nowhere.sock")).surely([lease])


SYSTEMD = {"CgroupDriver": "systemd", "CgroupVersion": "2"}
CGROUPFS = {"CgroupDriver": "cgroupfs", "CgroupVersion": "1"}


@pytest.mark.parametrize(
    ("info", "mode", "status"),
    [
        (SYSTEMD, "device_requests", Status.FAIL),
        (SYSTEMD, "runtime", Status.UNCHECKED),
        (SYSTEMD, "cdi", Status.OK),
        (CGROUPFS, "device_requests", Status.OK),
        ({}, "device_requests", Status.OK),
        (SYSTEMD, "none", Status.UNCHECKED),
    ],
)
def test_check_reports_whether_devices_can_be_lost(
    info: dict[str, str], mode: str, status: Status
) -> None:
    finding = check_cgroups(info, mode)
    assert finding.status is status
    assert ("daemon-reload" in finding.text) == (info is SYSTEMD and mode not in ("cdi", "none"))
    assert bool(finding.remedy) == ("daemon-reload" in finding.text)
