"""How sessions end on a cluster. Real: Slurm with two nodes in networks of their own, a sampler on
each, hub, proxy, accounting service. Stand-in: NVML's library, the GPUs.

What is judged by the minute is judged in a time that goes thirty times as fast.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from gpuspawner.leases.models import Lease
from gpuspawner.ledger.rules import owed
from gpuspawner.notifications.models import NoticeKind
from tests.support.fast_monitor import FastMonitor
from tests.support.images import INSTANT
from tests.support.node_sampler import NodeSampler
from tests.support.nvml.nvml_library import GPU
from tests.support.processes import wait_for
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_hub import SlurmHub

POLICY = {
    "*": {"mode": "advise", "mode_waiting": "enforce", "first_minutes": 4, "countdown_minutes": 4},
    "environment:brief": {"mode": "off", "mode_waiting": "off"},
}

CONFIG = """
c.GPUQueue.claim_minutes = 0.05
c.GPUMonitoring.sample_seconds = 0
c.GPUSessions.warn_minutes = [0.05]
c.GPUNotifications.hook = ["tee", "-a", "notices.json"]
"""

ENVIRONMENTS = f"""  - slug: brief
    display_name: Brief
    description: A session of seven seconds.
    image: {INSTANT}
    devices: {{default: 1, max: 8}}
    hours: {{max: 0.002}}
"""


@pytest.fixture(scope="module")
def hub(
    hubs: None,
    shared_cluster: SlurmCluster,
    sampler_urls: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SlurmHub]:
    folder = tmp_path_factory.mktemp("sessions") / "hub"
    parts = {"samplers": sampler_urls, "environments": ENVIRONMENTS}
    with SlurmHub(folder, shared_cluster, CONFIG, **parts) as hub:
        yield hub


def show(cluster: SlurmCluster, samplers: list[NodeSampler], works: Lease) -> None:
    """What this lease holds works, and every other GPU rests."""
    for node, sampler in zip(cluster.nodes, samplers, strict=True):
        fleet = [
            GPU(
                uuid=device.uuid,
                bus=f"00000000:{number:02X}:00.0",
                name=device.model,
                memory_bytes=device.memory_bytes,
                use=(60, 0) if device.uuid in works.uuids else (0, 0),
            )
            for number, device in enumerate(node.devices, start=1)
        ]
        sampler.show(*fleet)


def told(hub: SlurmHub, user: str, kind: NoticeKind) -> list[str]:
    """The titles of what a member was told, the newest first."""
    return [
        notice.title
        for notice in hub.services.notifications.notices_of(user)
        if notice.kind is kind
    ]


def lines(hub: SlurmHub, name: str) -> list[dict[str, Any]]:
    """What a hook of the service's was told."""
    file = hub.folder / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def gone(hub: SlurmHub, cluster: SlurmCluster, lease: Lease) -> bool:
    """Whether nothing of a server is left anywhere."""
    container = [c for c in hub.containers(hub.node_of(lease)) if lease.id in c["Labels"].values()]
    job = cluster.holder(lease.ticket_id)
    return hub.server(lease.server.user) is None and not container and not job


def test_idle_server_yields_and_no_show_is_not_charged(
    hub: SlurmHub,
    cluster: SlurmCluster,
    samplers: list[NodeSampler],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.ask("works", gpus=1, gpu_model="A100")
    hub.ask("rests", gpus=1, gpu_model="H100")
    works, rests = hub.wait_lease("works"), hub.wait_lease("rests")
    show(cluster, samplers, works)
    file = str(hub.folder / "cluster.yaml")
    hub.ask("waits", gpus=1, gpu_model="H100", wait=True)
    with FastMonitor(hub, monkeypatch, times=30, cluster=file, when_idle=POLICY):
        ended = hub.wait_end(rests)
    assert (ended.outcome, ended.end_reason) == ("idle", "its GPUs were not used")
    assert ended.charged == owed(rests.rate, ended.started_at, ended.ended_at) > 0
    assert "stops at" in told(hub, "rests", NoticeKind.SESSION_ENDS)[0]
    stopped = "Your server was stopped: its GPU was idle"
    assert told(hub, "rests", NoticeKind.STOPPED) == [stopped]

    lease = hub.wait_lease("waits")
    assert lease.uuids == rests.uuids and lease.claim_seconds == 3
    assert told(hub, "waits", NoticeKind.TURN) == ["It is your turn"]
    missed = hub.wait_end(lease)
    assert (missed.outcome, missed.charged) == ("no_show", 0)
    wait_for(lambda: all(gone(hub, cluster, each) for each in (rests, lease)), "all to be gone")
    wait_for(lambda: stopped in {line["title"] for line in lines(hub, "notices.json")}, "the hook")

    now = hub.services.leases.get(works.id)
    assert not now.outcome and hub.get("works", "devices").ok
    assert hub.services.notifications.notices_of("works") == []
    hub.stop_server("works")


def test_session_is_warned_and_charged_up_to_its_end(hub: SlurmHub, cluster: SlurmCluster) -> None:
    lease = hub.begin("ann", environment="brief", gpus=2)
    # It came at once: ann need not show that she is there.
    assert (lease.seconds, lease.claim_seconds) == (7, None)
    assert told(hub, "ann", NoticeKind.TURN) == []
    ended = hub.wait_end(lease)
    assert ended.outcome == "session_end" and ended.end_reason.startswith("its time was over at ")
    assert ended.charged == owed(lease.rate, ended.started_at, ended.ended_at) > 0
    wait_for(lambda: gone(hub, cluster, lease), "all to be gone")
    (warning,) = told(hub, "ann", NoticeKind.SESSION_ENDS)
    assert warning.startswith("Your server stops at ")
    assert told(hub, "ann", NoticeKind.STOPPED) == [
        "Your server was stopped: its time limit was reached"
    ]

    def heard() -> list[tuple[str, list[str]]]:
        told_ann = [line for line in lines(hub, "notices.json") if line["user"] == "ann"]
        return [(line["event"], line["gpus"]) for line in told_ann]

    wait_for(lambda: len(heard()) > 1, "the hook, which nobody waits for")
    assert heard() == [("session_ends", list(lease.uuids)), ("session_over", list(lease.uuids))]
