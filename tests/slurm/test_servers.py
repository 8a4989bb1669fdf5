"""Real: Slurm with two nodes and their Docker Engines, JupyterHub, proxy, accounting service.
Stand-in: the GPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from gpuspawner.core.units import MICRO
from gpuspawner.ledger.repository import StatementLine
from gpuspawner.ledger.rules import owed
from gpuspawner.slurm.accounts import user_of
from tests.support.images import INSTANT
from tests.support.processes import wait_for
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_hub import SlurmHub

ENVIRONMENTS = f"""  - slug: days
    image: {INSTANT}
    devices: {{default: 1, max: 8}}
    hours: {{max: 48}}
  - slug: outside
    image: {INSTANT}
    mem_limit: 64M
    spawner_override: {{job_cgroup: ""}}
"""

NEW = ("gwen", "hugo")
"""Who have used nothing yet. Slurm has to know them for a minute before it counts with that."""


@pytest.fixture(scope="module")
def hub(
    hubs: None, shared_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmHub]:
    settings = """
c.GPUSlurm.sync_seconds = 5
c.GPUQueue.group_weights = {"research": 3}
c.JupyterHub.load_groups = {"research": {"users": ["zoe"]}}
"""
    hub = SlurmHub(tmp_path_factory.mktemp("slurm") / "hub", shared_cluster, settings)
    with (hub.folder / "catalog.yaml").open("a", encoding="utf-8") as catalog:
        catalog.write(ENVIRONMENTS)
    with hub:
        for user in NEW:
            hub.broker.ledger.open_account(user)
        yield hub


def test_a_server_gets_what_slurm_chose_and_gives_it_back(
    hub: SlurmHub, cluster: SlurmCluster
) -> None:
    hub.ask("ann", gpus=2)
    lease = hub.wait_lease("ann")
    node = hub.node_of(lease)
    assert node is cluster.nodes[0] and len(lease.devices) == 2
    assert hub.get("ann", "devices").text.split() == ["/dev/nvidia0", "/dev/nvidia1"]
    (container,) = hub.containers(node)
    job = int(container["Labels"]["gpuspawner.job"])
    parent = node.engine.client.inspect_container(container["Id"])["HostConfig"]["CgroupParent"]
    assert parent.endswith(f"/job_{job}/step_batch")
    wait_for(lambda: hub.broker.lease(lease.id).charged, "a charge")
    hub.stop_server("ann")
    ended = hub.wait_end(lease)
    assert ended.charged == owed(ended.rate, ended.started_at, ended.ended_at) > 0
    assert not hub.containers(node)
    assert cluster.state(job) == "CANCELLED"


def test_who_waits_sees_place_and_reason_and_starts_by_itself(
    hub: SlurmHub, cluster: SlurmCluster
) -> None:
    hub.ask("ann", gpus=2)
    first = hub.wait_lease("ann")
    hub.ask("bob", gpus=1, gpu_model="H100", wait=True)
    hub.wait_lease("bob")
    hub.ask("cara", gpus=1, wait=True)
    ticket = wait_for(lambda: hub.broker.waiting(), "cara's ticket")[0]
    standing = wait_for(lambda: hub.broker.standings().get(ticket.id), "where it stands")
    assert (standing.place, standing.of) == (1, 1)
    assert "none is free" in standing.why
    hub.stop_server("ann")
    hub.wait_end(first)
    lease = hub.wait_lease("cara")
    assert lease.ticket_id == ticket.id
    for user in ("bob", "cara"):
        hub.stop_server(user)


def test_a_server_without_a_gpu_needs_no_job(hub: SlurmHub, cluster: SlurmCluster) -> None:
    hub.ask("dora", gpus=0)
    lease = hub.wait_lease("dora")
    assert lease.engine == "docker" and not cluster.run("squeue", "-h")
    hub.stop_server("dora")


def test_a_container_that_dies_gives_its_gpus_back(hub: SlurmHub, cluster: SlurmCluster) -> None:
    hub.ask("ann", gpus=2)
    lease = hub.wait_lease("ann")
    (container,) = hub.containers(hub.node_of(lease))
    hub.ask("bob", gpus=2, wait=True)
    hub.node_of(lease).engine.client.kill(container["Id"])
    assert hub.wait_end(lease).outcome == ""
    hub.wait_lease("bob")
    assert hub.server("ann") is None
    hub.stop_server("bob")


def test_a_job_that_is_cancelled_behind_our_back(hub: SlurmHub, cluster: SlurmCluster) -> None:
    """One server runs, one waits: both are told, and neither leaves anything."""
    hub.ask("ann", gpus=2)
    lease = hub.wait_lease("ann")
    hub.ask("bob", gpus=2, wait=True)
    (ticket,) = wait_for(hub.broker.waiting, "bob's ticket")
    wait_for(lambda: cluster.run("squeue", "-h", "-t", "pending"), "bob's job")
    cluster.run("scancel", f"--name=gpuspawner-{ticket.id}")
    cluster.run("scancel", f"--name=gpuspawner-{lease.ticket_id}")
    ended = wait_for(lambda: hub.broker.ticket(ticket.id).outcome, "the end of bob's ticket")
    assert ended == "refused"
    assert "its job in Slurm was cancelled" in hub.broker.ticket(ticket.id).end_reason
    hub.wait_end(lease)
    wait_for(lambda: hub.server("ann") is None, "the hub to know")
    assert not hub.containers(cluster.nodes[0])


def test_a_lost_node_ends_its_servers_and_they_start_elsewhere(
    hub: SlurmHub, cluster: SlurmCluster
) -> None:
    hub.ask("ann", gpus=1, gpu_model="H100")
    lease = hub.wait_lease("ann")
    node = hub.node_of(lease)
    cluster.cut(node)
    ended = hub.wait_end(lease, timeout=90)
    assert ended.ended_at and ended.started_at
    wait_for(lambda: hub.server("ann") is None, "the hub to know")
    hub.ask("ann", gpus=1)
    again = hub.wait_lease("ann")
    assert hub.node_of(again) is not node
    cluster.heal(node)
    wait_for(lambda: not hub.containers(node), "its stale container to go", timeout=90)
    hub.stop_server("ann")


def test_the_hub_is_killed_while_jobs_wait_and_run(hub: SlurmHub, cluster: SlurmCluster) -> None:
    hub.ask("ann", gpus=2)
    lease = hub.wait_lease("ann")
    hub.ask("bob", gpus=2, wait=True)
    (ticket,) = wait_for(hub.broker.waiting, "bob's ticket")
    wait_for(lambda: cluster.run("squeue", "-h", "-t", "pending"), "bob's job")
    hub.kill9(services=True)
    assert hub.containers(cluster.nodes[0]), "servers go on"
    hub.start()
    assert hub.broker.lease(lease.id).ended_at is None
    wait_for(lambda: (hub.server("bob") or {}).get("pending"), "bob's spawn to be back")
    assert cluster.run("squeue", "-h").count("\n") == 2, "no job is doubled"
    hub.stop_server("ann")
    assert hub.wait_lease("bob").ticket_id == ticket.id
    hub.stop_server("bob")


def test_a_place_in_line_is_given_up(hub: SlurmHub, cluster: SlurmCluster) -> None:
    hub.ask("ann", gpus=2)
    hub.wait_lease("ann")
    hub.ask("bob", gpus=2, wait=True)
    wait_for(lambda: cluster.run("squeue", "-h", "-t", "pending"), "bob's job")
    hub.stop_server("bob")
    wait_for(lambda: not cluster.run("squeue", "-h", "-t", "pending"), "its job to go")
    hub.stop_server("ann")


def test_what_there_is_not_is_refused_in_words(hub: SlurmHub, cluster: SlurmCluster) -> None:
    assert "Ask for 2 at most" in hub.refusal("ann", gpus=3)
    assert "Titan" in hub.refusal("ann", gpus=1, gpu_model="Titan")
    said = hub.refusal("ann", environment="days", gpus=1, hours=30)
    assert "lets nothing run for over 24 h" in said
    hub.ask("ann", gpus=2)
    hub.wait_lease("ann")
    assert "in use" in hub.refusal("bob", gpus=2, wait="no")
    hub.stop_server("ann")


def test_an_account_that_is_closed(hub: SlurmHub, cluster: SlurmCluster) -> None:
    """By the cluster's admin, for everybody of the hub's; who has left is in test_accounts.py."""
    closed = ("sacctmgr", "-i", "modify", "account", "where", "name=gpuspawner", "set")
    wait_for(lambda: cluster.run("sacctmgr", "-n", "-P", "show", "account", "gpuspawner"), "it")
    cluster.run(*closed, "grpsubmitjobs=0")
    try:
        said = hub.refusal("ann", gpus=1)
    finally:
        cluster.run(*closed, "grpsubmitjobs=-1")
    assert "Slurm refused it" in said and "AssocGrpSubmitJobsLimit" in said


def test_a_partition_that_takes_no_jobs(hub: SlurmHub, cluster: SlurmCluster) -> None:
    cluster.run("scontrol", "update", "partitionname=gpu", "state=drain")
    try:
        assert "partition" in hub.refusal("ann", gpus=1)
        cluster.run("scontrol", "update", "partitionname=gpu", "state=down")
        hub.ask("ann", gpus=1, wait=True)
        (ticket,) = wait_for(hub.broker.waiting, "ann's ticket")
        wait_for(lambda: cluster.run("squeue", "-h", "-t", "pending"), "ann's job")
    finally:
        cluster.run("scontrol", "update", "partitionname=gpu", "state=up")
    assert hub.wait_lease("ann").ticket_id == ticket.id
    hub.stop_server("ann")


def test_names_that_neither_linux_nor_slurm_takes(hub: SlurmHub, cluster: SlurmCluster) -> None:
    member, server = "o'neil $(id);", "second"
    user = user_of(member)
    cluster.users.make(user)
    answer = hub.spawn(member, {"gpus": 1}, server)
    assert answer.ok, answer.text
    lease = hub.wait_lease(member, server)
    told = cluster.run("squeue", "-h", f"--name=gpuspawner-{lease.ticket_id}", "-o", "%u|%k")
    assert told.partition("|")[0] == user
    assert json.loads(told.partition("|")[2])["server"] == str(lease.server)
    assert hub.get(member, "devices", server).text.split() == ["/dev/nvidia0"]
    hub.stop_server(member, server)
    hub.wait_end(lease)


def test_a_container_outside_its_jobs_control_group(hub: SlurmHub, cluster: SlurmCluster) -> None:
    """As on nodes with cgroup v2: the limits are the environment's, and the rest is as ever."""
    hub.ask("ann", environment="outside", gpus=1)
    lease = hub.wait_lease("ann")
    node = hub.node_of(lease)
    (container,) = hub.containers(node)
    host = node.engine.client.inspect_container(container["Id"])["HostConfig"]
    assert (host["CgroupParent"], host["Memory"]) == ("", 64 * 2**20)
    assert hub.get("ann", "devices").text.split() == ["/dev/nvidia0"]
    cluster.run("scancel", container["Labels"]["gpuspawner.job"])
    hub.wait_end(lease)
    wait_for(lambda: not hub.containers(node), "the epilog to end it")
    wait_for(lambda: hub.server("ann") is None, "the hub to know")


def test_the_line_goes_on_in_order_and_who_used_much_waits_behind(
    hub: SlurmHub, cluster: SlurmCluster
) -> None:
    """Slurm counts who used how much once a minute and when it starts, and what servers use is
    theirs."""
    hub.ask("ann", gpus=1, gpu_model="H100")
    hub.wait_lease("ann")
    tickets = {}
    for user in ("ann", *NEW):
        server = "second" if user == "ann" else ""
        hub.ask(user, server, gpus=1, gpu_model="H100", wait=True)
        found = wait_for(
            lambda u=user: [t for t in hub.broker.waiting() if t.server.user == u], user
        )
        tickets[user] = found[0]

    def line() -> list[str]:
        return [ticket.server.user for ticket, _, _ in hub.broker.order()]

    wait_for(lambda: cluster.run("squeue", "-h", "-t", "pending").count("\n") == 3, "their jobs")
    cluster.restart("slurmctld")
    wait_for(lambda: line() == [*NEW, "ann"], "ann to be behind", timeout=90)
    hub.stop_server("ann")
    for number, user in enumerate(NEW, start=1):
        assert hub.wait_lease(user).ticket_id == tickets[user].id
        assert line() == [*NEW[number:], "ann"]
        hub.stop_server(user)
    assert hub.wait_lease("ann", "second").ticket_id == tickets["ann"].id
    hub.stop_server("ann", "second")


def test_a_job_beside_servers_is_paid_by_its_member(hub: SlurmHub, cluster: SlurmCluster) -> None:
    hub.ask("zoe", gpus=0)
    hub.wait_lease("zoe")
    job = cluster.hold("zoe", "--gres=gpu:h100:1", script="#!/bin/sh\nexec sleep 2\n")

    def line() -> StatementLine | None:
        lines = hub.broker.ledger.statement("member:zoe")
        return next((line for line in lines if line.kind == "batch"), None)

    paid = wait_for(line, "the debit", timeout=60)
    assert f"Batch job {job} " in paid.reason
    seconds = cluster.run("sacct", "-X", "-n", "-P", "-j", str(job), "-o", "elapsedraw")
    assert paid.amount == -int(seconds) * MICRO
    known = ("sacctmgr", "-n", "-P", "show", "assoc", "user=zoe", "account=g-research")
    wait_for(lambda: cluster.run(*known), "Slurm to know the member", timeout=60)
    hub.stop_server("zoe")
