"""A node whose clock is another. Real: Slurm with two nodes; munged, slurmd and sampler of one of
them are in another time, and its engine is not: a program in Go does not see it. Stand-in: the
GPUs, who sets the clock."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from traitlets.config import Config

from gpuspawner.cli.check_slurm import check_slurm
from gpuspawner.cli.hub import open_hub
from gpuspawner.engines.preflight import Status
from gpuspawner.slurm.telemetry import seconds_ahead
from tests.support.clocks import apart, node_apart
from tests.support.images import INSTANT
from tests.support.node_sampler import NodeSampler
from tests.support.nvml import nvml_library as nvml
from tests.support.processes import wait_for
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_hub import described


def test_node_with_a_wrong_clock_is_reported_with_offset(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = cluster.nodes
    url, later = f"https://{second.address}:9403", apart(600)

    def around(command: list[str]) -> list[str]:
        return second.engine.network.around(later(command))

    known = described(cluster, samplers={second.name: url})
    config = Config()
    config.JupyterHub.spawner_class = "gpuspawner.spawners.slurm.GPUSlurmSpawner"
    config.GPUDockerSpawner.image = INSTANT
    monkeypatch.chdir(tmp_path)
    library = nvml.build_nvml_library(tmp_path / "nvml")
    with (
        node_apart(cluster, second, 600),
        NodeSampler(tmp_path / "s", library, url, "--tls", str(second.tls), around=around),
    ):
        # munge refuses what either says, and Slurm says only that it does not respond.
        wait_for(lambda: cluster.node_state(second).endswith("*"), "Slurm to miss it")
        cluster.user("ann")
        job = cluster.hold("ann", "--gres=gpu:h100:1")
        node = known.node(second.name)
        wait_for(lambda: seconds_ahead(node) is not None, "the sampler to answer")
        found = {f.name: f for f in check_slurm(open_hub(config), None, known, False)}
        assert cluster.state(job) == "PENDING"
    clock = found[f"clock {second.name}"]
    said = re.match(r"Its clock is (\d+) s ahead of this machine's: munge refuses", clock.text)
    assert said and abs(int(said[1]) - 600) < 60
    assert clock.status is found[f"node {second.name}"].status is Status.FAIL
    assert found[f"clock {first.name}"].status is Status.OK
    wait_for(lambda: cluster.state(job) == "RUNNING", "the node to be back")
