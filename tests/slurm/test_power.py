"""Real: Slurm, and two nodes with a network and an engine each, of which one is off until it is
needed. Stand-in: the GPUs, and who switches a machine on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.processes import wait_for
from tests.support.slurm_power import PoweredCluster


@pytest.fixture
def powered() -> Iterator[PoweredCluster]:
    with PoweredCluster() as cluster:
        yield cluster


def test_a_node_is_on_while_it_is_needed(powered: PoweredCluster) -> None:
    (spare,) = powered.spare
    assert powered.node_state(spare) == "idle~"
    powered.user("ann")
    job = powered.hold("ann", "--gres=gpu:h100:1")
    # Slurm looks every 30 s whether a job's node has come: that is not waited for here.
    wait_for(lambda: powered.node_state(spare) == "mixed", "the node to be on")
    assert powered.state(job) in ("CONFIGURING", "RUNNING")
    powered.run("scancel", str(job))
    wait_for(lambda: powered.node_state(spare) == "idle~", "the node to be off")

    powered.delivers = False
    powered.reconfigure(ResumeTimeout=2)
    lost = powered.hold("ann", "--gres=gpu:h100:1")
    assert powered.wait_state(lost, "NODE_FAIL", timeout=60)
    reason = powered.run("sinfo", "-h", "-n", spare.name, "-o", "%E")
    assert reason.strip() == "ResumeTimeout reached"
    here = powered.hold("ann", "--gres=gpu:a100:1")
    powered.wait_state(here, "RUNNING")
