"""Whose server is whose. Real: two hubs with their stores on one Docker Engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpuspawner.model import MICRO
from tests.support.brokers import open_broker, problems
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import GPUHub, message_of
from tests.support.processes import wait_for
from tests.support.shared_hubs import SharedGPUHub

SHARED_HUB = "two_devices"


@pytest.fixture(scope="module")
def hub(hubs: None, shared_gpu_hub: SharedGPUHub) -> SharedGPUHub:
    return shared_gpu_hub


def test_another_hub_on_the_same_engine_is_left_alone(
    hubs: None, hub: GPUHub, engine: PrivateEngine, tmp_path: Path
) -> None:
    """A first start ends what nobody owns; a lease of another store is somebody's."""
    hub.spawn_and_wait("anna", {"gpus": 1})
    [lease] = hub.open_leases()
    with GPUHub(tmp_path / "other", engine, fleet="2xT4", name="other hub") as other:
        other.spawn_and_wait("bert", {"gpus": 1})
        assert {c["Labels"]["gpuspawner.member"] for c in hub.containers()} == {"anna", "bert"}
        assert hub.get("anna", "env").status_code == 200
        assert hub.open_leases() == [lease]
        other.stop_server("bert")
    assert hub.get("anna", "env").status_code == 200
    hub.stop_server("anna")


def test_a_server_whose_lease_ended_before_it_answered_does_not_run(hub: GPUHub) -> None:
    """Whoever ended it, the device may be somebody else's by now."""
    broker = open_broker(hub.database_url, device_source="simulated:2xT4")
    with ThreadPoolExecutor(1) as threads:
        hub.api("POST", "users/slow").raise_for_status()
        ask = {"json": {"gpus": 1}, "timeout": 120}
        asking = threads.submit(hub.api, "POST", "users/slow/server", **ask)
        [lease] = wait_for(lambda: hub.open_leases("slow"), "the lease")
        broker.release(lease.id, reason="released by an admin")
        (hub.folder / "go-on").touch()
        answer = asking.result()
    assert answer.status_code == 500
    assert message_of(answer) == (
        "Your server did not start: its lease was ended before it answered. Nothing was charged."
    )
    assert hub.server("slow") is None and hub.containers() == [] and hub.taken() == {}
    assert hub.balance("slow") == 100_000 * MICRO
    hub.spawn_and_wait("anna", {"gpus": 2})
    assert problems(broker.store) == []
    broker.store.close()
