"""Parts of a GPU. Real: Slurm with two nodes and their Docker Engines, JupyterHub, proxy,
accounting service. Stand-in: the GPUs."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes import wait_for
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_hub import SlurmHub

MICRO = 1_000_000


def test_members_share_the_slots_of_one_gpu(
    hubs: None, tmp_path: Path, cluster: SlurmCluster
) -> None:
    """Five servers want the H100, which has four parts: the fifth waits for one of them."""
    users = [f"part{number}" for number in range(5)]
    with SlurmHub(tmp_path / "hub", cluster, shards=4) as hub:
        for user in users:
            hub.ask(user, gpus=1, gpu_model="H100", wait=True)
        leases = [hub.wait_lease(user) for user in users[:4]]
        (place,) = {lease.devices[0].uuid for lease in leases}
        assert {lease.devices[0].slot for lease in leases} == {0, 1, 2, 3}
        assert [lease.rate for lease in leases] == [3600 * MICRO // 4] * 4
        for user in users[:4]:
            assert hub.get(user, "devices").text.split() == ["/dev/nvidia0"]
        assert hub.refusal("greedy", gpus=2)
        (ticket,) = hub.services.queue.waiting()
        assert ticket.server.user == users[4]
        hub.stop_server(users[0])
        last = hub.wait_lease(users[4])
        assert (last.devices[0].uuid, last.devices[0].slot) == (place, leases[0].devices[0].slot)
        for user in users[1:]:
            hub.stop_server(user)
        wait_for(lambda: not cluster.run("squeue", "-h"), "all jobs to end")
