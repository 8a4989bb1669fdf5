"""Real: a Slurm of two nodes on the files that ``gpuspawner slurm config`` wrote, their engines
over TLS, the scripts around jobs. Stand-in: the GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from traitlets.config import Config

from gpuspawner.cli.app import main
from gpuspawner.cli.check_slurm import check_slurm, node_states
from gpuspawner.cli.hub import HubSettings, open_hub
from gpuspawner.engines.preflight import CheckFinding, Status, check_sees
from gpuspawner.leases.models import Request, ServerRef
from gpuspawner.queue.models import Ticket
from gpuspawner.slurm.cluster import Cluster
from gpuspawner.slurm.config import cluster_yaml
from gpuspawner.slurm.engine import LABEL_JOB
from gpuspawner.slurm.images import connector
from gpuspawner.slurm.programs import Slurm
from tests.support import images
from tests.support.brokers import open_services, problems, running
from tests.support.configured_cluster import ConfiguredCluster
from tests.support.engine import PrivateEngine
from tests.support.processes import free_port, wait_for


@pytest.fixture(scope="module")
def configured(clusters: None, engine: PrivateEngine, images: Any) -> Iterator[ConfiguredCluster]:
    """The checks need a real image: busybox alone cannot run them."""
    with ConfiguredCluster("4") as cluster:
        cluster.load_images(engine, images.INSTANT)
        cluster.user("ann")
        yield cluster


@pytest.fixture
def cluster(configured: ConfiguredCluster) -> Iterator[ConfiguredCluster]:
    configured.mend()
    yield configured
    configured.clean()


@pytest.fixture
def described(cluster: ConfiguredCluster) -> Cluster:
    """As a hub reads it; its Slurm is not in the usual place."""
    return replace(cluster.described(), slurm_conf=str(cluster.conf))


@pytest.fixture
def hub(cluster: ConfiguredCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubSettings:
    """A hub's settings, with members' files where all nodes see them."""
    monkeypatch.chdir(tmp_path)
    config = Config()
    config.JupyterHub.spawner_class = "gpuspawner.spawners.docker.GPUDockerSpawner"
    config.JupyterHub.hub_ip = cluster.address
    config.JupyterHub.hub_port = free_port()
    config.GPUDockerSpawner.image = images.INSTANT
    config.GPUDockerSpawner.gpu_injection = "device_requests"
    config.GPUDockerSpawner.workspace = f"{tmp_path}/{{username}}"
    return open_hub(config)


def write_hub(folder: Path, described: Cluster, setting: str) -> None:
    """The files of a hub on these nodes, for the command line: ``hub.py`` and ``cluster.yaml``."""
    (folder / "cluster.yaml").write_text(cluster_yaml(described))
    (folder / "hub.py").write_text(
        'c.JupyterHub.spawner_class = "gpuspawner.spawners.slurm.GPUSlurmSpawner"\n'
        f'c.GPUSlurm.cluster_file = "{folder}/cluster.yaml"\n'
        f"{setting}\n"
    )


def checked(hub: HubSettings, described: Cluster) -> dict[str, CheckFinding]:
    return {f.name: f for f in check_slurm(hub, None, described, True)}


def red(found: dict[str, CheckFinding]) -> list[str]:
    return [f.name for f in found.values() if f.status is not Status.OK]


def test_slurm_device_index_matches_the_cluster_file(
    cluster: ConfiguredCluster, described: Cluster
) -> None:
    first = described.nodes[0]
    kinds = ["--gres=gpu:h100:1", "--gres=gpu:a100:1"]
    jobs = [cluster.hold("ann", kind, f"--nodelist={first.name}") for kind in kinds]
    for job in jobs:
        cluster.wait_state(job, "RUNNING")
    told = {j["job_id"]: j for j in json.loads(cluster.run("squeue", "--json"))["jobs"]}
    assert [told[job]["gres_detail"] for job in jobs] == [
        ["gpu:h100:1(IDX:1)"],
        ["gpu:a100:1(IDX:0)"],
    ]
    assert ["H100" in first.device_at(1).model, "A100" in first.device_at(0).model] == [True, True]
    states = node_states(Slurm(conf=str(cluster.conf)))
    assert [dict(states[node.name].gpus) for node in described.nodes] == [
        {"a100": 1, "h100": 1},
        {"h100": 1},
    ]


def test_containers_of_ended_jobs_are_removed(cluster: ConfiguredCluster) -> None:
    node = cluster.nodes[0]
    before = cluster.hold("ann", "--gres=gpu:1", f"--nodelist={node.name}")
    cluster.wait_state(before, "RUNNING")
    living, stale = (node.contain({LABEL_JOB: str(job)}) for job in (before, 4_000_000))
    job = cluster.hold("ann", "--gres=gpu:1", f"--nodelist={node.name}")
    cluster.wait_state(job, "RUNNING")
    wait_for(lambda: stale not in node.containers(), "the stale container to go")
    assert living in node.containers()

    cluster.run("scancel", str(before))
    wait_for(lambda: living not in node.containers(), "the container to go with its job")
    cluster.wait_nodes(node)


def test_check_passes_for_a_healthy_cluster(hub: HubSettings, described: Cluster) -> None:
    found = checked(hub, described)
    assert red(found) == [], found
    for node in described.nodes:
        assert node.engine in found[f"engine {node.name}"].text
        assert found[f"GPUs {node.name}"].text.count(node.devices[0].uuid) == 1
        assert hub.api_url in found[f"hub API {node.name}"].text
        assert node.name in found["workspaces"].text
    with connector(described.nodes[0])() as client:
        why = check_sees(client, images.INSTANT, "/nowhere-at-all", "file", "x")
        assert "/nowhere-at-all" in why


@pytest.fixture
def only_here(cluster: ConfiguredCluster) -> Iterator[str]:
    """An image that the first node alone has."""
    client, name = cluster.nodes[0].engine.client, "gpuspawner-tests-only-here"
    client.tag(images.SILENT, name, "latest")
    yield f"{name}:latest"
    client.remove_image(f"{name}:latest", noprune=True)


def test_check_reports_cluster_faults_by_node(
    hub: HubSettings, described: Cluster, cluster: ConfiguredCluster, only_here: str
) -> None:
    first, second = cluster.nodes
    cluster.run("scontrol", "update", f"nodename={first.name}", "state=drain", "reason=fan broken")
    hub.spawner.image = only_here
    hub.spawner.workspace = "gpuspawner-work-{username}"
    moved = replace(described.nodes[0].devices[0], uuid="GPU-not-here-any-more")
    away = replace(described.nodes[1], engine=f"https://{second.address}:9")
    nodes = (replace(described.nodes[0], devices=(moved,)), away)
    found = checked(hub, replace(described, nodes=nodes))

    drained = found[f"node {first.name}"]
    assert "fan broken" in drained.text and f"NodeName={first.name} State=RESUME" in drained.remedy
    assert "is not responding" in found[f"engine {second.name}"].text
    assert "GPU-not-here-any-more" in found[f"GPUs {first.name}"].text
    assert "NFS" in found["workspaces"].remedy
    assert found["munge"].status is Status.OK


@pytest.fixture
def command(
    cluster: ConfiguredCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., str]:
    """What a command of the hub on the first node prints that finds something wrong."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DOCKER_HOST", cluster.nodes[0].socket)

    def run(*words: str) -> str:
        capsys.readouterr()
        assert main([*words, "-f", "hub.py"]) == 1
        return capsys.readouterr().out

    return run


def test_check_command_reports_a_stopped_slurm(
    described: Cluster,
    cluster: ConfiguredCluster,
    only_here: str,
    tmp_path: Path,
    command: Callable[..., str],
) -> None:
    second = cluster.nodes[1]
    write_hub(tmp_path, described, f'c.GPUDockerSpawner.image = "{only_here}"')
    cluster.kill("slurmctld")
    cluster.kill("munged")
    found: dict[str, list[dict[str, str]]] = {}
    for check in json.loads(command("check", "--no-containers", "--json"))["checks"]:
        found.setdefault(check["name"], []).append(check)
    assert "2 nodes, 3 devices" in found["cluster"][0]["text"]
    assert found["munge"][0]["remedy"] == "sudo systemctl start munge"
    assert found["controller"][0]["status"] == "fail"
    assert "systemctl status slurmctld" in found["controller"][0]["remedy"]
    assert f"is not on {second.name}" in found["image"][-1]["text"]
    assert found[f"engine {second.name}"][0]["status"] == "ok"
    assert found[f"GPUs {second.name}"][0]["status"] == "unchecked"
    assert not [name for name in found if name.startswith("node ")]


def test_catalog_pull_reports_the_image_on_every_node(
    described: Cluster,
    cluster: ConfiguredCluster,
    only_here: str,
    tmp_path: Path,
    command: Callable[..., str],
) -> None:
    """These nodes reach no registry: what a pull itself does is tried on one engine."""
    first, second = cluster.nodes
    moved = replace(described.nodes[1], name="moved", devices=(), shards={})
    away = replace(moved, name="away", engine=f"https://{second.address}:9")
    nodes = replace(described, nodes=(described.nodes[0], moved, away))
    (tmp_path / "catalog.yaml").write_text(
        f"environments: [{{slug: lab, display_name: Lab, image: {only_here!r}}}]"
    )
    write_hub(tmp_path, nodes, f'c.GPUSpawnerMixin.catalog = "{tmp_path}/catalog.yaml"')
    lines = command("catalog", "pull").splitlines()
    assert lines[0] == f"{only_here}: here"
    assert lines[1] == f"{only_here} on {first.name}: here"
    assert lines[2].startswith("moved: ") and only_here in lines[2]
    assert lines[3].startswith("away: its Docker Engine is not responding")


def test_database_moves_from_one_host_to_slurm_and_back(
    described: Cluster, cluster: ConfiguredCluster, tmp_path: Path
) -> None:
    """One database: one box, then two machines, then the one box. Nobody loses anything."""
    url, file = f"sqlite:///{tmp_path}/hub.sqlite", tmp_path / "cluster.yaml"
    file.write_text(cluster_yaml(described))
    box = open_services(url)
    box.leases.release(running(box, "ann").id, reason="stopped")
    before = box.ledger.member("ann").balance
    box.store.close()

    several = open_services(url, cluster=str(file))
    ticket = several.queue.ask(ServerRef("ann"), Request(devices=1), engine="slurm")
    assert isinstance(ticket, Ticket)
    mine = frozenset({ticket.id})
    wait_for(lambda: several.queue.turns(mine), "ann's turn")
    lease = several.leases.confirm(several.queue.start_ticket(ticket.id).id, "container")
    assert described.device(lease.devices[0].uuid) is not None
    assert several.delegation.delegate is not None
    several.delegation.delegate.cancel(ticket.id)
    wait_for(lambda: several.delegation.delegate.turns()[ticket.id].over, "the end of the job")
    several.leases.release(lease.id, reason="stopped")
    assert problems(several.store) == []
    several.store.close()

    back = open_services(url)
    here = {device.uuid for device in back.devices.look(fresh=True).inventory.devices}
    lease = running(back, "ann")
    assert lease.devices[0].uuid in here
    back.leases.release(lease.id, reason="stopped")
    assert 0 < back.ledger.member("ann").balance <= before
    assert len(back.leases.of_account(None)) == 3
    assert problems(back.store) == []
    back.store.close()
