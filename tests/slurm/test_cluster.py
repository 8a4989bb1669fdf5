"""Real: munge, MariaDB, slurmdbd, slurmctld, two slurmd with a network and a Docker Engine each.
Stand-in: the GPUs.

What the product leans on is proved here of Slurm and Docker themselves, by their own commands.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpuspawner.slurm.engine import LABEL_JOB
from tests.support import images
from tests.support.processes import wait_for
from tests.support.slurm_cluster import SlurmCluster

BUSY = ("Resources", "Priority")


def seen(cluster: SlurmCluster, job: int) -> dict[str, Any]:
    """The job as ``squeue --json`` has it."""
    jobs = json.loads(cluster.run("squeue", "--json"))["jobs"]
    found: dict[str, Any] = next(j for j in jobs if j["job_id"] == job)
    return found


def wait_seen(cluster: SlurmCluster, job: int, key: str) -> Any:
    """That field of the job as soon as there is something in it."""
    return wait_for(lambda: seen(cluster, job)[key], f"the {key} of job {job}", interval=0.2)


def running(cluster: SlurmCluster, *options: str, user: str = "ann") -> int:
    job = cluster.hold(user, *options)
    cluster.wait_state(job, "RUNNING")
    return job


@pytest.fixture(scope="module", autouse=True)
def members(shared_cluster: SlurmCluster) -> None:
    shared_cluster.user("ann", "lab1")
    shared_cluster.user("bob", "lab2", "high")


def test_waiting_job_has_a_reason_and_expected_start(cluster: SlurmCluster) -> None:
    holder = running(cluster, "--gres=gpu:h100:1", "--time=10")
    waiting = cluster.hold("bob", "--gres=gpu:h100:1", "--time=5")
    behind = cluster.hold("ann", "--gres=gpu:h100:1", "--time=5")
    expected = wait_seen(cluster, waiting, "start_time")
    assert expected >= seen(cluster, holder)["end_time"]
    for job in (waiting, behind):
        wait_for(lambda j=job: seen(cluster, j)["state_reason"] in BUSY, "the reason")
    assert seen(cluster, waiting)["gres_detail"] == []
    # More time for who runs, as an admin gives it.
    cluster.run("scontrol", "update", f"jobid={holder}", "timelimit=00:30:00")
    job = seen(cluster, holder)
    assert job["end_time"] - job["start_time"] == 30 * 60
    cluster.run("scancel", str(holder))
    cluster.wait_state(waiting, "RUNNING")
    assert seen(cluster, behind)["job_state"] == "PENDING"
    with pytest.raises(RuntimeError, match="Requested node configuration is not available"):
        cluster.hold("ann", "--gres=gpu:h100:2")
    with pytest.raises(RuntimeError, match="Requested time limit is invalid"):
        cluster.hold("ann", "--gres=gpu:h100:1", "--time=2-0")


def test_shards_share_a_device_and_high_priority_preempts(cluster: SlurmCluster) -> None:
    jobs = [running(cluster, "--gres=shard:2", "--constraint=h100", user=u) for u in ("ann", "bob")]
    assert [seen(cluster, job)["gres_detail"] for job in jobs] == [["shard:2(IDX:0)"]] * 2
    whole = cluster.hold("ann", "--gres=gpu:h100:1")
    wait_for(lambda: seen(cluster, whole)["state_reason"] in BUSY, "it to wait")
    cluster.run("scancel", *map(str, jobs))
    cluster.wait_state(whole, "RUNNING")
    urgent = cluster.hold("bob", "--gres=gpu:h100:1", "--qos=high")
    cluster.wait_state(urgent, "RUNNING")
    assert cluster.state(whole) == "PREEMPTED"


def test_job_container_is_limited_and_ends_before_next_job(cluster: SlurmCluster) -> None:
    node = cluster.nodes[1]
    job = running(cluster, "--gres=gpu:h100:1")
    parent = cluster.group(job)
    inside = node.contain({LABEL_JOB: str(job)}, cgroup_parent=parent)
    client = node.engine.client
    assert client.inspect_container(inside)["State"]["Running"]
    # The job has 100 MB, whatever Docker was told: dd's block of 200 MB is too much.
    greedy = ["sh", "-c", "dd if=/dev/zero of=/dev/null bs=200M count=1"]
    assert node.engine.run(images.SILENT, greedy)[0] == 0
    assert node.engine.run(images.SILENT, greedy, cgroup_parent=parent)[0] == 137
    cluster.wait_state(job, "RUNNING")

    following = cluster.hold("bob", "--gres=gpu:h100:1")
    cluster.run("scancel", str(job))
    cluster.wait_state(following, "RUNNING")
    assert node.containers() == [], "the epilog ended it before the next job had the device"
