"""Real: Slurm with two nodes and their Docker Engines, JupyterHub, proxy, accounting service.
Stand-in: the GPUs.

Whoever dies, and in whatever order: servers go on, nothing is granted twice, nothing is lost.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.processes import wait_for
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_hub import SlurmHub

DAEMONS = ("slurmctld", "slurmdbd", "hub")


@pytest.fixture(scope="module")
def hub(
    hubs: None, shared_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmHub]:
    with SlurmHub(tmp_path_factory.mktemp("away") / "hub", shared_cluster) as hub:
        yield hub


def jobs(cluster: SlurmCluster) -> Counter[str]:
    """How many jobs wait or run, by their name."""
    return Counter(cluster.run("squeue", "-h", "-o", "%j").split())


def assert_once(hub: SlurmHub) -> None:
    """No device belongs to two leases, and no ticket has two jobs."""
    held = [device.uuid for lease in hub.broker.open_leases() for device in lease.devices]
    assert len(held) == len(set(held))
    assert set(jobs(hub.cluster).values()) <= {1}


@pytest.mark.parametrize("again", [1, 2])
def test_all_of_them_die_in_some_order(
    hub: SlurmHub, cluster: SlurmCluster, chance: random.Random, again: int
) -> None:
    hub.ask("ann", gpus=1, gpu_model="H100")
    lease = hub.wait_lease("ann")
    (container,) = hub.containers(hub.node_of(lease))
    hub.ask("bob", gpus=1, gpu_model="H100", wait=True)
    (ticket,) = wait_for(hub.broker.waiting, "bob's ticket")
    cluster.save("ann")
    for name in chance.sample(DAEMONS, 3):
        hub.kill9(services=True) if name == "hub" else cluster.kill(name)
    # A controller that has not yet written down what the database told it cannot do without it.
    back = ["slurmdbd", "slurmctld"]
    back.insert(chance.randrange(3), "hub")
    for name in back:
        hub.start() if name == "hub" else cluster.restart(name)

    def waits_with_one_job() -> bool:
        return jobs(cluster)[f"gpuspawner-{ticket.id}"] == 1 and bool(hub.server("bob"))

    wait_for(waits_with_one_job, "bob to be back in line")
    assert_once(hub)
    assert hub.broker.lease(lease.id).ended_at is None
    assert [each["Id"] for each in hub.containers(hub.node_of(lease))] == [container["Id"]]
    wait_for(lambda: hub.get("ann", "devices").ok, "ann's server to be reached")
    hub.stop_server("ann")
    assert hub.wait_lease("bob").ticket_id == ticket.id
    assert_once(hub)
    hub.stop_server("bob")


def test_grants_go_on_without_the_accounting_database(hub: SlurmHub, cluster: SlurmCluster) -> None:
    hub.ask("ann", gpus=1)
    first = hub.wait_lease("ann")
    cluster.kill("slurmdbd")
    hub.stop_server("ann")
    hub.wait_end(first)
    hub.spawn("ann", {"gpus": 2})
    assert len(hub.wait_lease("ann").devices) == 2
    cluster.restart("slurmdbd")
    hub.stop_server("ann")


def test_nobody_gets_a_gpu_whose_epilog_failed(hub: SlurmHub, cluster: SlurmCluster) -> None:
    hub.ask("ann", gpus=1, gpu_model="H100")
    lease = hub.wait_lease("ann")
    node = hub.node_of(lease)
    hub.ask("bob", gpus=1, gpu_model="H100", wait=True)
    (ticket,) = wait_for(hub.broker.waiting, "bob's ticket")
    wait_for(lambda: jobs(cluster)[f"gpuspawner-{ticket.id}"], "bob's job")
    cluster.fail_epilog(node)
    hub.stop_server("ann")
    ended = hub.wait_end(lease)
    wait_for(lambda: cluster.node_state(node).startswith("drain"), "the node to be drained")

    def is_told() -> bool:
        standing = hub.broker.standings().get(ticket.id)
        return bool(standing and "closed or away" in standing.why)

    wait_for(is_told, "bob to be told")
    assert hub.broker.ticket(ticket.id).outcome == ""
    assert not hub.broker.open_leases()
    cluster.mend_epilog(node)
    later = hub.wait_lease("bob")
    assert ended.ended_at and later.granted_at >= ended.ended_at
    hub.stop_server("bob")


def test_who_is_preempted_is_told_why(hub: SlurmHub, cluster: SlurmCluster) -> None:
    hub.ask("ann", gpus=1, gpu_model="H100")
    lease = hub.wait_lease("ann")
    cluster.user("urgent", "lab", "high")
    # As a site decides it: whom its QOS preempts, the hub's own among them if there are any.
    preempted = {"normal", cluster.run("squeue", "-h", "-t", "R", "-o", "%q").strip()}
    words = ("modify", "qos", "high", "set", f"preempt={','.join(preempted)}")
    cluster.run("sacctmgr", "-i", "-Q", *words)
    job = cluster.hold("urgent", "--qos=high", "--gres=gpu:h100:1")
    cluster.wait_state(job, "RUNNING")
    ended = hub.wait_end(lease)
    assert "given to somebody who goes first" in ended.end_reason
    wait_for(lambda: hub.server("ann") is None, "the hub to know")
    assert not hub.containers(hub.node_of(lease))
    assert not [name for name in jobs(cluster) if name.startswith("gpuspawner-")]


def test_many_new_members_at_once_are_all_known(hub: SlurmHub, cluster: SlurmCluster) -> None:
    """The database forgets what two tell it at the same moment."""
    names = [f"newcomer{number}" for number in range(8)]
    for name in names:
        cluster.users.make(name)
    with ThreadPoolExecutor(len(names)) as threads:
        asked = list(threads.map(lambda name: hub.spawn(name, {"gpus": 1, "wait": True}), names))
    assert {answer.status_code for answer in asked} <= {201, 202}
    words = ("sacctmgr", "-n", "-P", "show", "assoc", f"user={','.join(names)}", "format=user")
    wait_for(lambda: set(cluster.run(*words).split()) == set(names), "all to be known")

    def submitted() -> int:
        return sum(count for name, count in jobs(cluster).items() if name.startswith("gpuspawner-"))

    wait_for(lambda: submitted() == len(names), "their jobs")
    for name in names:
        hub.stop_server(name)
