"""Members who share a GPU, in containers. Real: hub, proxy, accounting service, a Docker Engine and
its stand-in for the hook of NVIDIA."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.engines.base import LABEL_LEASE
from gpuspawner.leases.models import Lease
from tests.support.brokers import services_on
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import CATALOG, GPUHub
from tests.support.processes import free_port, wait_for

CONFIG = """
c.GPUDevices.shared_devices = {{"A100": 2}}
c.JupyterHub.tornado_settings = {{"slow_spawn_timeout": 1}}
import gpuspawner
gpuspawner.add_services(c, url="http://127.0.0.1:{port}")
"""


@pytest.fixture(scope="module")
def hub(hubs: None, engine: PrivateEngine, images: Any, folder: Path) -> Iterator[GPUHub]:
    """One GPU of two slots."""
    config = CONFIG.format(port=free_port())
    catalog = CATALOG.replace("    default: true\n", "    default: true\n    sharing: any\n")
    with GPUHub(folder / "hub", engine, config, fleet="1xA100-80GB", catalog=catalog) as hub:
        yield hub
    engine.clean()


def session_of(hub: GPUHub, user: str) -> Lease:
    """The lease of a member's running server."""
    hub.wait_server(user)
    [lease] = hub.open_leases(user)
    return lease


def test_containers_share_a_device_until_somebody_needs_all_of_it(hub: GPUHub) -> None:
    for user in ("ada", "bob"):
        hub.spawn_and_wait(user, {"gpus": "share"})
    leases = [session_of(hub, user) for user in ("ada", "bob")]
    [uuid] = hub.devices
    assert {(each.devices[0].uuid, each.devices[0].slot) for each in leases} == {
        (uuid, 0),
        (uuid, 1),
    }
    for user, lease in zip(("ada", "bob"), leases, strict=True):
        inside, [device] = hub.environment_of(user), lease.devices
        assert inside["NVIDIA_VISIBLE_DEVICES"] == inside["GPUSPAWNER_GPU_UUIDS"] == uuid
        assert inside["GPUSPAWNER_GPU_SHARE"] == "0.5"
        assert inside["GPUSPAWNER_GPU_MEMORY"] == str(device.memory_bytes // 2)
        assert hub.device_nodes(user) == ["/dev/nvidia0"]
        container = hub.engine.client.inspect_container(hub.container_of(user))
        assert container["Config"]["Labels"][LABEL_LEASE] == lease.id
        assert [each["DeviceIDs"] for each in container["HostConfig"]["DeviceRequests"]] == [[uuid]]

    assert hub.spawn("cleo", {"gpus": "share"}).ok  # she waits for a slot
    asked_at = datetime.now(timezone.utc)
    hub.stop_server("ada")
    ada, cleo = hub.leases("ada")[0], session_of(hub, "cleo")
    assert ada.ended_at is not None and cleo.granted_at >= ada.ended_at
    assert cleo.devices[0].slot == ada.devices[0].slot
    with services_on(hub.database_url) as services:
        used = services.resources.totals_of([ada.id])[ada.id]
    assert used.sampled_at is not None and used.sampled_at >= asked_at, "measured at her stop"
    assert used.cpu_seconds

    assert hub.spawn("dora", {"gpus": 1}).ok  # she waits for all of it
    for user in ("bob", "cleo"):
        hub.stop_server(user)
    dora = session_of(hub, "dora")
    ends = [hub.leases(user)[0].ended_at for user in ("bob", "cleo")]
    assert all(end is not None and dora.granted_at >= end for end in ends)
    assert [(each.uuid, each.is_shared) for each in dora.devices] == [(uuid, False)]
    assert "GPUSPAWNER_GPU_SHARE" not in hub.environment_of("dora")
    assert hub.device_nodes("dora") == ["/dev/nvidia0"]
    assert len(hub.taken()) == 2, "both slots"
    hub.stop_server("dora")
    wait_for(lambda: not hub.taken(), "the end of all leases")
    assert hub.containers() == []
