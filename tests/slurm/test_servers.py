"""Servers on a cluster: their way, what befalls them, and what admins do. Real: Slurm with two
nodes and their Docker Engines, JupyterHub, proxy, accounting service, Chromium. Stand-in: the GPUs.

Whoever dies, and in whatever order: servers go on, nothing is granted twice, nothing is lost.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Any

import pytest
import requests
from playwright.sync_api import Browser

from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease, LeaseState
from gpuspawner.ledger.models import member_account
from gpuspawner.ledger.reports import StatementEntry
from gpuspawner.ledger.rules import owed
from gpuspawner.queue.models import Ticket
from gpuspawner.slurm import job_spec
from gpuspawner.slurm.accounts import user_of
from gpuspawner.slurm.programs import minutes_of
from tests.support.gpu_hub import text_of
from tests.support.hub import ADMIN
from tests.support.images import INSTANT
from tests.support.pages import WIDE, look_over, sign_in
from tests.support.processes import wait_for
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_hub import SlurmHub
from tests.support.tier import SOAK

ENVIRONMENTS = f"""  - slug: days
    display_name: Days
    description: As long as the partition allows.
    image: {INSTANT}
    devices: {{default: 1, max: 8}}
    hours: {{default: 1, max: 48}}
  - slug: brief
    display_name: Brief
    description: A session of a few seconds.
    image: {INSTANT}
    devices: {{default: 1, max: 8}}
    hours: {{max: 0.002}}
  - slug: outside
    image: {INSTANT}
    mem_limit: 64M
    spawner_override: {{job_cgroup: ""}}
"""

CONFIG = """
c.GPUCredits.grace_seconds = 2
service_constants["gpuspawner.service.duties.CLUSTER_SECONDS"] = 5
c.GPUQueue.group_weights = {"research": 3}
c.JupyterHub.load_groups = {"research": {"users": ["zoe"]}}
"""

HELD = """
import pathlib, time
from gpuspawner.slurm.engine import SlurmEngine

running = SlurmEngine.running

def held(self):
    with open("watch-asked", "a") as file:
        file.write(".")
    while pathlib.Path("hold-watch").exists():
        time.sleep(0.05)
    return running(self)

SlurmEngine.running = held
"""
"""While there is a file ``hold-watch``, the watch over servers gets no answer from the nodes; the
length of ``watch-asked`` says how often it has asked."""

DAEMONS = ("slurmctld", "slurmdbd", "hub")

NEW = ("gwen", "hugo")
"""Who have used nothing yet. Slurm has to know them for a minute before it counts with that."""


@pytest.fixture(scope="module")
def hub(
    hubs: None, shared_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmHub]:
    folder = tmp_path_factory.mktemp("servers") / "hub"
    with SlurmHub(folder, shared_cluster, CONFIG + HELD, environments=ENVIRONMENTS) as hub:
        for user in NEW:
            hub.services.ledger.open_account(user)
        yield hub


def line(hub: SlurmHub) -> list[str]:
    """The members in the queue, in Slurm's order."""
    return [ticket.server.user for ticket, _, _ in hub.services.positions.order()]


def test_server_gets_its_slurm_devices_and_returns_them(
    hub: SlurmHub, cluster: SlurmCluster
) -> None:
    lease = hub.begin("ann", gpus=2)
    node = hub.node_of(lease)
    assert node is cluster.nodes[0] and len(lease.devices) == 2
    assert hub.get("ann", "devices").text.split() == ["/dev/nvidia0", "/dev/nvidia1"]
    (container,) = hub.containers(node)
    job = int(container["Labels"]["gpuspawner.job"])
    parent = node.engine.client.inspect_container(container["Id"])["HostConfig"]["CgroupParent"]
    assert parent.endswith(f"/job_{job}/step_batch")
    wait_for(lambda: hub.services.leases.get(lease.id).charged, "a charge")
    hub.stop_server("ann")
    ended = hub.wait_end(lease)
    assert ended.charged == owed(ended.rate, ended.started_at, ended.ended_at) > 0
    assert not hub.containers(node)
    assert cluster.state(job) == "CANCELLED"


def test_catalog_page_shows_images_on_each_node(hub: SlurmHub, cluster: SlurmCluster) -> None:
    names = ", ".join(node.name for node in cluster.nodes)
    page = text_of(hub.open_page(ADMIN, "/hub/catalog").text)
    assert f"{INSTANT} the hub's machine: here built on this machine {names}: here" in page


def test_waiting_member_sees_position_and_starts_automatically(
    hub: SlurmHub, cluster: SlurmCluster
) -> None:
    first = hub.begin("ann", gpus=2)
    hub.begin("bob", gpus=1, gpu_model="H100", wait=True)
    ticket = hub.queue_up("cara", gpus=1)
    standing = wait_for(
        lambda: hub.services.positions.standings().get(ticket.id), "where it stands"
    )
    assert (standing.place, standing.of) == (1, 1)
    assert "none is free" in standing.why
    hub.stop_server("ann")
    hub.wait_end(first)
    lease = hub.wait_lease("cara")
    assert lease.ticket_id == ticket.id
    hub.stop_servers("bob", "cara")


def test_dead_container_releases_its_gpus(hub: SlurmHub, cluster: SlurmCluster) -> None:
    lease = hub.begin("ann", gpus=2)
    (container,) = hub.containers(hub.node_of(lease))
    hub.ask("bob", gpus=2, wait=True)
    hub.node_of(lease).engine.client.kill(container["Id"])
    assert hub.wait_end(lease).outcome == ""
    hub.wait_lease("bob")
    assert hub.server("ann") is None
    hub.stop_server("bob")


def test_job_cancelled_in_slurm_ends_server_or_ticket(hub: SlurmHub, cluster: SlurmCluster) -> None:
    """One server runs, one waits: both are told, and neither leaves anything."""
    lease = hub.begin("ann", gpus=2)
    ticket = hub.queue_up("bob", gpus=2)
    cluster.run("scancel", f"--name=gpuspawner-{ticket.id}")
    cluster.run("scancel", f"--name=gpuspawner-{lease.ticket_id}")
    ended = wait_for(
        lambda: hub.services.queue.ticket(ticket.id).outcome, "the end of bob's ticket"
    )
    assert ended == "refused"
    assert "its job in Slurm was cancelled" in hub.services.queue.ticket(ticket.id).end_reason
    hub.wait_end(lease)
    wait_for(lambda: hub.server("ann") is None, "the hub to know")
    assert not hub.containers(cluster.nodes[0])


def test_lost_node_ends_servers_that_restart_elsewhere(
    hub: SlurmHub, cluster: SlurmCluster
) -> None:
    lease = hub.begin("ann", gpus=1, gpu_model="H100")
    node = hub.node_of(lease)
    cluster.cut(node)
    ended = hub.wait_end(lease, timeout=90)
    assert ended.ended_at and ended.started_at
    wait_for(lambda: hub.server("ann") is None, "the hub to know")
    again = hub.begin("ann", gpus=1)
    assert hub.node_of(again) is not node
    cluster.heal(node)
    wait_for(lambda: not hub.containers(node), "its stale container to go", timeout=90)
    hub.stop_server("ann")


def test_stopping_a_waiting_server_cancels_its_job(hub: SlurmHub, cluster: SlurmCluster) -> None:
    hub.begin("ann", gpus=2)
    hub.queue_up("bob", gpus=2)
    hub.stop_server("bob")
    wait_for(lambda: not cluster.run("squeue", "-h", "-t", "pending"), "its job to go")
    hub.stop_server("ann")


def test_impossible_request_is_refused_with_a_reason(hub: SlurmHub, cluster: SlurmCluster) -> None:
    assert "Ask for 2 at most" in hub.refusal("ann", gpus=3)
    assert "Titan" in hub.refusal("ann", gpus=1, gpu_model="Titan")
    said = hub.refusal("ann", environment="days", gpus=1, hours=30)
    assert "allows no job longer than 24 h" in said
    hub.begin("ann", gpus=2)
    assert "in use" in hub.refusal("bob", gpus=2, wait="no")
    hub.stop_server("ann")


def test_closed_slurm_account_refuses_the_request(hub: SlurmHub, cluster: SlurmCluster) -> None:
    """By the cluster's admin, for everybody of the hub's; who has left is in test_accounts.py."""
    closed = ("sacctmgr", "-i", "modify", "account", "where", "name=gpuspawner", "set")
    wait_for(lambda: cluster.run("sacctmgr", "-n", "-P", "show", "account", "gpuspawner"), "it")
    cluster.run(*closed, "grpsubmitjobs=0")
    try:
        said = hub.refusal("ann", gpus=1)
    finally:
        cluster.run(*closed, "grpsubmitjobs=-1")
    assert "Slurm rejected the request" in said and "AssocGrpSubmitJobsLimit" in said


def test_drained_partition_refuses_and_down_partition_queues(
    hub: SlurmHub, cluster: SlurmCluster
) -> None:
    cluster.run("scontrol", "update", "partitionname=gpu", "state=drain")
    try:
        assert "partition" in hub.refusal("ann", gpus=1)
        cluster.run("scontrol", "update", "partitionname=gpu", "state=down")
        ticket = hub.queue_up("ann", gpus=1)
    finally:
        cluster.run("scontrol", "update", "partitionname=gpu", "state=up")
    assert hub.wait_lease("ann").ticket_id == ticket.id
    hub.stop_server("ann")


def test_member_with_special_characters_gets_a_server(hub: SlurmHub, cluster: SlurmCluster) -> None:
    member, server = "o'neil $(id);", "second"
    user = user_of(member)
    cluster.users.make(user)
    answer = hub.spawn(member, {"gpus": 1}, server)
    assert answer.ok, answer.text
    lease = hub.wait_lease(member, server)
    owner, _, comment = cluster.holder(lease.ticket_id, "%u|%k").partition("|")
    assert (owner, json.loads(comment)["server"]) == (user, str(lease.server))
    assert hub.get(member, "devices", server).text.split() == ["/dev/nvidia0"]
    hub.stop_server(member, server)
    hub.wait_end(lease)


def test_container_outside_the_job_cgroup_ends_with_the_job(
    hub: SlurmHub, cluster: SlurmCluster
) -> None:
    """As on nodes with cgroup v2: the limits are the environment's, and the rest is as ever."""
    lease = hub.begin("ann", environment="outside", gpus=1)
    node = hub.node_of(lease)
    (container,) = hub.containers(node)
    host = node.engine.client.inspect_container(container["Id"])["HostConfig"]
    assert (host["CgroupParent"], host["Memory"]) == ("", 64 * 2**20)
    assert hub.get("ann", "devices").text.split() == ["/dev/nvidia0"]
    cluster.run("scancel", container["Labels"]["gpuspawner.job"])
    hub.wait_end(lease)
    wait_for(lambda: not hub.containers(node), "the epilog to end it")
    wait_for(lambda: hub.server("ann") is None, "the hub to know")


def test_queue_keeps_order_and_heavy_users_wait(hub: SlurmHub, cluster: SlurmCluster) -> None:
    """Slurm counts who used how much once a minute and when it starts, and what servers use is
    theirs."""
    hub.begin("ann", gpus=1, gpu_model="H100")
    tickets = {
        user: hub.queue_up(user, "second" if user == "ann" else "", gpus=1, gpu_model="H100")
        for user in ("ann", *NEW)
    }

    cluster.restart("slurmctld")
    wait_for(lambda: line(hub) == [*NEW, "ann"], "ann to be behind", timeout=90)
    hub.stop_server("ann")
    for number, user in enumerate(NEW, start=1):
        assert hub.wait_lease(user).ticket_id == tickets[user].id
        assert line(hub) == [*NEW[number:], "ann"]
        hub.stop_server(user)
    assert hub.wait_lease("ann", "second").ticket_id == tickets["ann"].id
    hub.stop_server("ann", "second")


def test_member_without_a_gpu_pays_for_a_batch_job(hub: SlurmHub, cluster: SlurmCluster) -> None:
    lease = hub.begin("zoe", gpus=0)
    assert lease.engine == "docker" and not cluster.run("squeue", "-h"), "it needs no job"
    job = cluster.hold("zoe", "--gres=gpu:h100:1", script="#!/bin/sh\nexec sleep 2\n")

    def line() -> StatementEntry | None:
        lines = hub.services.ledger.statement("member:zoe")
        return next((line for line in lines if line.kind == "batch"), None)

    paid = wait_for(line, "the debit", timeout=60)
    assert f"Batch job {job} " in paid.reason
    seconds = cluster.run("sacct", "-X", "-n", "-P", "-j", str(job), "-o", "elapsedraw")
    assert paid.amount == -int(seconds) * MICRO
    known = ("sacctmgr", "-n", "-P", "show", "assoc", "user=zoe", "account=g-research")
    wait_for(lambda: cluster.run(*known), "Slurm to know the member", timeout=60)
    hub.stop_server("zoe")


# Whoever dies.


def jobs(cluster: SlurmCluster) -> Counter[str]:
    """How many jobs wait or run, by their name."""
    return Counter(cluster.run("squeue", "-h", "-o", "%j").split())


def assert_once(hub: SlurmHub) -> None:
    """No device belongs to two leases, and no ticket has two jobs."""
    held = [device.uuid for lease in hub.services.leases.open_leases() for device in lease.devices]
    assert len(held) == len(set(held))
    assert set(jobs(hub.cluster).values()) <= {1}


@pytest.mark.parametrize("again", [1, 2] if SOAK else [1])
def test_server_and_ticket_survive_a_crash_of_all_daemons(
    hub: SlurmHub, cluster: SlurmCluster, chance: random.Random, again: int
) -> None:
    lease = hub.begin("ann", gpus=1, gpu_model="H100")
    (container,) = hub.containers(hub.node_of(lease))
    ticket = hub.queue_up("bob", gpus=1, gpu_model="H100")
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

    wait_for(waits_with_one_job, "bob to be back in the queue")
    assert_once(hub)
    assert hub.services.leases.get(lease.id).ended_at is None
    assert [each["Id"] for each in hub.containers(hub.node_of(lease))] == [container["Id"]]
    wait_for(lambda: hub.get("ann", "devices").ok, "ann's server to be reached")
    hub.stop_server("ann")
    assert hub.wait_lease("bob").ticket_id == ticket.id
    assert_once(hub)
    hub.stop_server("bob")


def test_resumed_start_waits_for_slurm(hub: SlurmHub, cluster: SlurmCluster) -> None:
    """The hub is up before the controller is, as after a start of the machine."""
    hub.begin("ann", gpus=1, gpu_model="H100")
    ticket = hub.queue_up("bob", gpus=1, gpu_model="H100")
    cluster.save("ann")
    hub.kill9(services=True)
    cluster.kill("slurmctld")
    hub.start()
    wait_for(lambda: hub.server("bob"), "the service to begin the start again")
    waits = "Checking which GPUs are in use: waiting for Slurm"
    said = list(takewhile(lambda event: event.get("message") != waits, hub.events("bob")))
    assert not any(event.get("failed") for event in said)
    cluster.restart("slurmctld")
    hub.stop_server("ann")
    assert hub.wait_lease("bob").ticket_id == ticket.id
    assert_once(hub)
    hub.stop_server("bob")


def test_grants_continue_without_the_accounting_database(
    hub: SlurmHub, cluster: SlurmCluster
) -> None:
    first = hub.begin("ann", gpus=1)
    cluster.kill("slurmdbd")
    hub.stop_server("ann")
    hub.wait_end(first)
    hub.spawn("ann", {"gpus": 2})
    assert len(hub.wait_lease("ann").devices) == 2
    cluster.restart("slurmdbd")
    hub.stop_server("ann")


def test_gpu_with_a_failed_epilog_is_not_granted(hub: SlurmHub, cluster: SlurmCluster) -> None:
    lease = hub.begin("ann", gpus=1, gpu_model="H100")
    node = hub.node_of(lease)
    ticket = hub.queue_up("bob", gpus=1, gpu_model="H100")
    cluster.fail_epilog(node)
    hub.stop_server("ann")
    ended = hub.wait_end(lease)
    wait_for(lambda: cluster.node_state(node).startswith("drain"), "the node to be drained")

    def is_told() -> bool:
        standing = hub.services.positions.standings().get(ticket.id)
        return bool(standing and "closed or down" in standing.why)

    wait_for(is_told, "bob to be told")
    assert hub.services.queue.ticket(ticket.id).outcome == ""
    assert not hub.services.leases.open_leases()
    cluster.mend_epilog(node)
    later = hub.wait_lease("bob")
    assert ended.ended_at and later.granted_at >= ended.ended_at
    hub.stop_server("bob")


def test_watch_leaves_a_server_that_started_meanwhile(hub: SlurmHub, cluster: SlurmCluster) -> None:
    """The member stops and starts again while the nodes are asked which servers run.

    Slurm is away at the stop, so the spawner of the first server keeps its lease.
    """
    hold, asked = hub.folder / "hold-watch", hub.folder / "watch-asked"

    def wait_asked() -> None:
        before = asked.stat().st_size
        wait_for(lambda: asked.stat().st_size > before, "the watch to ask")

    first = hub.begin("ann", gpus=1)
    wait_for(asked.exists, "the watch to begin")
    hold.touch()
    try:
        wait_asked()
        cluster.kill("slurmctld")
        hub.stop_server("ann")
        cluster.restart("slurmctld")
        hub.wait_end(first)
        lease = hub.begin("ann", gpus=1)
    finally:
        hold.unlink()
    wait_asked()  # it has dealt with the answer before
    assert (hub.server("ann") or {}).get("ready")
    assert hub.services.leases.get(lease.id).state is LeaseState.RUNNING
    hub.stop_server("ann")


def test_preempted_server_ends_with_the_reason(hub: SlurmHub, cluster: SlurmCluster) -> None:
    lease = hub.begin("ann", gpus=1, gpu_model="H100")
    cluster.user("urgent", "lab", "high")
    # As a site decides it: whom its QOS preempts, the hub's own among them if there are any.
    preempted = {"normal", cluster.run("squeue", "-h", "-t", "R", "-o", "%q").strip()}
    words = ("modify", "qos", "high", "set", f"preempt={','.join(preempted)}")
    cluster.run("sacctmgr", "-i", "-Q", *words)
    node = hub.node_of(lease)
    with cluster.epilog_waits(node):
        job = cluster.hold("urgent", "--qos=high", "--gres=gpu:h100:1")
        # The hub sees that the container has ended, and removes it, before Slurm has ended the job.
        stops = "the hub to stop the server"
        wait_for(lambda: (hub.server("ann") or {}).get("pending") == "stop", stops)
        wait_for(lambda: not hub.containers(node), "the container to be removed")
    cluster.wait_state(job, "RUNNING")
    ended = hub.wait_end(lease)
    assert "preempted by a job with higher priority" in ended.end_reason
    wait_for(lambda: hub.server("ann") is None, "the hub to know")
    assert not hub.containers(node)
    assert not [name for name in jobs(cluster) if name.startswith("gpuspawner-")]


def test_many_new_members_at_once_are_all_registered(hub: SlurmHub, cluster: SlurmCluster) -> None:
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


# What admins do.


def call(hub: SlurmHub, who: str, path: str, **sent: Any) -> requests.Response:
    """A change through the service's API."""
    return hub.call(who, "POST", path, json=sent)


def said(cluster: SlurmCluster, waits: Ticket | Lease) -> tuple[int, str, str]:
    """Priority, reason and time limit of the job of a ticket or lease; nothing without one."""
    told = cluster.holder(waits.id if isinstance(waits, Ticket) else waits.ticket_id, "%Q|%r|%l")
    priority, reason, limit = told.split("|") if told else ("0", "", "")
    return int(priority), reason, limit


def test_draining_a_gpu_drains_its_node(
    hub: SlurmHub, cluster: SlurmCluster, browser: Browser
) -> None:
    first, second = cluster.nodes
    gpu = first.devices[0].uuid
    answer = call(hub, ADMIN, f"devices/{gpu}/drain", reason="fan; it's broken")
    assert answer.json()["whole_machine"] == first.name and answer.json()["changed"]
    assert set(hub.services.devices.closures()) >= {device.uuid for device in first.devices}
    state = cluster.run("sinfo", "-h", "-n", first.name, "-o", "%T|%E")
    assert state.strip() == "drained|gpuspawner: fan; it's broken"
    hub.ask("ann", gpus=1)
    assert hub.node_of(hub.wait_lease("ann")) is second
    page = browser.new_page(viewport=WIDE)
    sign_in(page, hub, ADMIN, "")
    for name in ("cluster", "devices"):
        page.goto(f"{hub.url}/services/gpu/{name}")
        text = page.locator("main").inner_text()
        assert first.name in text and second.name in text
        look_over(page, f"machines-{name}", accessible=False)
    hub.stop_server("ann")
    answer = call(hub, ADMIN, f"devices/{gpu}/undrain", reason="")
    assert answer.json()["changed"] and not answer.json()["drained"]
    wait_for(lambda: cluster.run("sinfo", "-h", "-n", first.name, "-o", "%T").strip() == "idle",
             "the node")  # fmt: skip
    assert not call(hub, ADMIN, f"devices/{gpu}/undrain", reason="").json()["changed"]

    # What somebody else drained in Slurm, they open there.
    assert call(hub, ADMIN, f"devices/{gpu}/drain", reason="fan").json()["changed"]
    node = f"NodeName={first.name}"
    cluster.run("scontrol", "update", node, "State=DRAIN", "Reason=new disk")
    refused = call(hub, ADMIN, f"devices/{gpu}/undrain", reason="")
    assert refused.status_code == 400 and "new disk" in refused.json()["message"]
    page.goto(f"{hub.url}/services/gpu/devices")
    page.get_by_role("button", name="Return to service").first.click()
    assert f"scontrol update {node} State=RESUME" in page.locator("main").inner_text()
    look_over(page, "drained-by-others", accessible=False)
    page.close()
    cluster.run("scontrol", "update", node, "State=RESUME")
    assert call(hub, ADMIN, f"devices/{gpu}/undrain", reason="").json()["changed"]


def test_admin_reorders_the_queue_and_pauses_granting(hub: SlurmHub, cluster: SlurmCluster) -> None:
    hub.begin("ann", gpus=2)
    hub.begin("bob", gpus=1)
    cara, dora, emil = (hub.queue_up(user, gpus=1) for user in ("cara", "dora", "emil"))

    assert call(hub, ADMIN, f"queue/{dora.id}/boost", points=5, reason="").ok
    wait_for(lambda: said(cluster, dora)[0] >= said(cluster, cara)[0] + 4000, "the points")
    assert call(hub, ADMIN, f"queue/{emil.id}/move", position=1, reason="talk").ok
    wait_for(lambda: said(cluster, emil)[0] == 4_000_000_000 - 1, "the place")
    wait_for(lambda: line(hub) == ["emil", "dora", "cara"], "the line")

    assert call(hub, ADMIN, "granting", paused=True, reason="new fans").ok
    for ticket in (cara, dora, emil):
        wait_for(lambda t=ticket: said(cluster, t)[1] == "JobHeldAdmin", "a pause")
    assert "new fans" in hub.services.positions.standings()[cara.id].why
    hub.stop_server("bob")
    assert cluster.run("squeue", "-h", "-t", "running").count("\n") == 1, "ann's alone"
    assert call(hub, ADMIN, "granting", paused=False, reason="").ok
    assert hub.wait_lease("emil").ticket_id == emil.id
    wait_for(lambda: said(cluster, dora)[0] >= said(cluster, cara)[0] + 4000, "them again")

    # Given back to the order, and cancelled.
    assert call(hub, ADMIN, f"queue/{cara.id}/move", position=1, reason="").ok
    wait_for(lambda: said(cluster, cara)[0] == 4_000_000_000 - 1, "the place")
    assert call(hub, ADMIN, f"queue/{cara.id}/move", position=None, reason="").ok
    wait_for(lambda: 0 < said(cluster, cara)[0] < 1_000_000, "the order")
    for ticket in (cara, dora):
        assert call(hub, ADMIN, f"queue/{ticket.id}/cancel", reason="the course is over").ok
        wait_for(lambda t=ticket: not any(said(cluster, t)), "its job to go")
    hub.stop_servers("ann", "emil")


def test_session_extension_lengthens_the_job_within_limits(
    hub: SlurmHub, cluster: SlurmCluster
) -> None:
    hub.ask("ann", environment="days", gpus=1, hours=1)
    hub.ask("bob", environment="days", gpus=1, hours=23 + 40 / 60)
    one, most = hub.wait_lease("ann"), hub.wait_lease("bob")
    assert said(cluster, one)[2] == "1:20:00" and said(cluster, most)[2] == "1-00:00:00"
    assert call(hub, "ann", f"leases/{one.id}/extend").ok
    extended = hub.services.leases.get(one.id).extended
    assert extended > 0
    assert 80 < minutes_of(said(cluster, one)[2]) <= job_spec.minutes(3600 + extended)
    refused = call(hub, "bob", f"leases/{most.id}/extend")
    assert not refused.ok and "allows no job longer than 24 h" in refused.json()["message"]
    assert hub.services.leases.get(most.id).extended == 0 and said(cluster, most)[2] == "1-00:00:00"
    hub.stop_servers("ann", "bob")


def test_session_end_or_empty_account_ends_container_and_job(
    hub: SlurmHub, cluster: SlurmCluster
) -> None:
    first = hub.begin("ann", environment="brief", gpus=1)
    second = hub.begin("fred", gpus=1)
    account = hub.services.ledger.account(member_account("fred"))
    broke = -account.available + 2_000_000
    hub.services.ledger.grant(member_account("fred"), broke, actor=ADMIN, reason="a mistake")
    assert hub.wait_end(first).outcome == "session_end"
    assert hub.wait_end(second, timeout=90).outcome == "credits"
    for lease in (first, second):
        wait_for(lambda x=lease: not any(said(cluster, x)), "its job to go")
    assert not any(hub.containers(node) for node in cluster.nodes)
