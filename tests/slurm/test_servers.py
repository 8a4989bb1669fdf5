"""Servers on a cluster: their way, what befalls them, what admins do, what their GPUs do. Real:
Slurm with two nodes in networks of their own, a Docker Engine and a sampler on each, a registry,
JupyterHub, proxy, accounting service, Chromium. Stand-in: NVML's library, the GPUs.

One hub sees all of it. Whoever dies, and in whatever order: servers go on, nothing is granted
twice, nothing is lost.
"""

from __future__ import annotations

import io
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
import requests
from docker.errors import ImageNotFound
from playwright.sync_api import Browser, Page

from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease, LeaseState
from gpuspawner.ledger.models import member_account
from gpuspawner.ledger.reports import StatementEntry
from gpuspawner.ledger.rules import owed
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.queue.models import Ticket
from gpuspawner.queue.rank import QueuePosition
from gpuspawner.services import Services, utcnow
from gpuspawner.slurm import job_spec
from gpuspawner.slurm.accounts import user_of
from gpuspawner.slurm.programs import minutes_of
from tests.support import axe
from tests.support.brokers import make_services
from tests.support.browser import screenshot
from tests.support.fast_monitor import FastMonitor
from tests.support.hub import ADMIN
from tests.support.images import INSTANT
from tests.support.node_sampler import NodeSampler
from tests.support.nvml.nvml_library import GIB, GPU
from tests.support.page_text import text_of
from tests.support.pages import PHONE, WIDE, look_over, sign_in
from tests.support.processes import wait_for
from tests.support.registry import SlowRegistry
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_hub import SlurmHub
from tests.support.slurm_node import Node
from tests.support.tier import SOAK

ENVIRONMENTS = """  - slug: days
    display_name: Days
    description: As long as the partition allows.
    image: {instant}
    devices: {{default: 1, max: 8}}
    hours: {{default: 1, max: 48}}
  - slug: brief
    display_name: Brief
    description: A session of a few seconds.
    image: {instant}
    devices: {{default: 1, max: 8}}
    hours: {{max: 0.002}}
  - slug: outside
    image: {instant}
    devices: {{default: 1, max: 8}}
    mem_limit: 64M
    spawner_override: {{job_cgroup: ""}}
  - slug: ahead
    display_name: Ahead
    description: Its image is on the first node, and nobody asks for it.
    image: {repository}:ahead
    devices: {{default: 1, max: 8}}
  - slug: later
    display_name: Later
    description: Its image is on no node yet.
    image: {repository}:later
    devices: {{default: 1, max: 8}}
  - slug: missing
    display_name: Missing
    description: Its image is nowhere.
    image: {repository}:missing
    devices: {{default: 1, max: 8}}
"""

CONFIG = """
c.GPUCredits.grace_seconds = 2
c.GPUQueue.group_weights = {{"research": 3}}
c.JupyterHub.load_groups = {{"research": {{"users": ["zoe"]}}}}
c.GPUDockerSpawner.own_images = {{"*": {{"images": ["{repository}:own"], "most": "1G"}}}}
service_constants["gpuspawner.service.duties.CLUSTER_SECONDS"] = 5
service_constants["gpuspawner.monitoring.health_service.QUIET_MINUTES"] = 0.2
service_constants["gpuspawner.service.device_monitor.JUDGE_EVERY"] = 1_000_000_000
"""
"""The hub judges no idle GPU: a test does, with a faster clock. A sick one is sick for so long that
who looks late still sees it."""

HELD = """
import pathlib, time
from gpuspawner.queue import service as queue
from gpuspawner.queue.service import QueueService
from gpuspawner.slurm.engine import SlurmEngine

running, start_ticket = SlurmEngine.running, QueueService.start_ticket

def held(self):
    with open("watch-asked", "a") as file:
        file.write(".")
    while pathlib.Path("hold-watch").exists():
        pathlib.Path("watch-held").touch()
        time.sleep(0.05)
    return running(self)

def start_with_time_to_claim(self, *args, **kwargs):
    minutes, at_once = pathlib.Path("claim").read_text().split()
    self.settings.claim_minutes, queue.AT_ONCE = float(minutes), float(at_once)
    return start_ticket(self, *args, **kwargs)

SlurmEngine.running, QueueService.start_ticket = held, start_with_time_to_claim
"""
"""While there is a file ``hold-watch``, the watch over servers gets no answer from the nodes, and
there is ``watch-held`` once it waits for one; the length of ``watch-asked`` says how often it has
asked. The file ``claim`` says for how many minutes a GPU from the queue is kept for its member, and
after how many seconds in the queue it is one from the queue."""

CLAIM, BRIEF_CLAIM = "10 60", "0.05 0"
"""For ``claim``: on a busy machine, what is given at once comes late."""

POLICY = {
    "*": {"mode": "advise", "mode_waiting": "enforce", "first_minutes": 4, "countdown_minutes": 4},
}

DAEMONS = ("slurmctld", "slurmdbd", "hub")

WAITS = "Checking which GPUs are in use: waiting for Slurm"

NEW = ("gwen", "hugo")
"""Who have used nothing yet. Slurm has to know them for a minute before it counts with that."""

TAGS = ("ahead", "later", "own")


def remove_pulled(cluster: SlurmCluster) -> None:
    """Remove what nodes pulled, also in a run that was killed: they would not pull it again."""
    for node in cluster.nodes:
        client = node.engine.client
        tags = [tag for image in client.images() for tag in image["RepoTags"] or ()]
        for tag in tags:
            if "/large:" in tag:
                client.remove_image(tag, force=True)


@pytest.fixture(scope="module")
def registry(shared_cluster: SlurmCluster) -> Iterator[SlowRegistry]:
    """Images that answer at once, of which none goes out whole until it is told to; the first
    node has one of them."""
    remove_pulled(shared_cluster)
    client = shared_cluster.nodes[0].engine.client
    saved = io.BytesIO(b"".join(client.get_image(INSTANT)))
    with SlowRegistry(size=300_000, host=shared_cluster.address) as registry:
        for tag in TAGS:
            saved.seek(0)
            registry.add_saved(tag, saved, {"Labels": {"tag": tag}})
        client.pull(registry.repository, "ahead")
        registry.hang()
        yield registry
    remove_pulled(shared_cluster)


@pytest.fixture(scope="module")
def hub(
    hubs: None,
    shared_cluster: SlurmCluster,
    sampler_urls: dict[str, str],
    registry: SlowRegistry,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SlurmHub]:
    folder = tmp_path_factory.mktemp("servers") / "hub"
    made = SlurmHub(
        folder,
        shared_cluster,
        CONFIG.format(repository=registry.repository) + HELD,
        samplers=sampler_urls,
        environments=ENVIRONMENTS.format(instant=INSTANT, repository=registry.repository),
    )
    (folder / "claim").write_text(CLAIM)
    with made as hub:
        for user in NEW:
            hub.services.ledger.open_account(user)
        yield hub


def line(hub: SlurmHub) -> list[str]:
    """The members in the queue, in Slurm's order."""
    return [ticket.server.user for ticket, _, _ in hub.services.positions.order()]


# Images on the nodes. The registry hangs until the first of these tests lets it go on.


def has(node: Node, image: str) -> bool:
    try:
        node.engine.client.inspect_image(image)
    except ImageNotFound:
        return False
    return True


def waits(hub: SlurmHub, ticket: Ticket) -> str:
    """What the service says that a ticket waits for."""
    line = hub.call(ADMIN, "GET", "queue").json()
    return next(str(each["waits_for"]) for each in line["tickets"] if each["id"] == ticket.id)


def test_ticket_waits_for_its_image_and_others_are_prefetched(
    hub: SlurmHub, cluster: SlurmCluster, registry: SlowRegistry
) -> None:
    """No GPU is held meanwhile. What nobody asks for comes to the node that lacks it."""
    image, ahead = (f"{registry.repository}:{tag}" for tag in ("later", "ahead"))
    first, second = cluster.nodes
    hub.ask("ann", environment="later", gpus=1)
    # A node that has not answered yet is not named.
    waits_for = f"its image {image} is being fetched to {first.name} and {second.name}"
    assert any(waits_for in event["message"] for event in hub.events("ann"))
    assert not cluster.run("squeue", "-h"), "no GPU waits for a pull"
    # The same words in the service, which fetches nothing for her: it sees who lacks the image.
    (ticket,) = hub.services.queue.waiting()
    wait_for(lambda: waits_for in waits(hub, ticket), "the service to see it")
    assert not has(second, ahead)
    registry.go_on()
    hub.wait_lease("ann")
    wait_for(lambda: all(has(node, image) for node in cluster.nodes), "the image everywhere")
    hub.stop_server("ann")

    wait_for(lambda: has(second, ahead), "the image on the second node")
    told = f"{ahead} is on {second.name} after"
    wait_for(lambda: told in hub.log_text(), "the service's word")
    assert f"{ahead} is on {first.name} after" not in hub.log_text(), "it was there"


def test_node_without_the_image_is_not_chosen_until_pulled(
    hub: SlurmHub, cluster: SlurmCluster, registry: SlowRegistry
) -> None:
    """The image of a member's own, which nobody pulls ahead."""
    image = f"{registry.repository}:own"
    first, second = cluster.nodes
    registry.hangs_after = None
    second.engine.client.pull(registry.repository, "own")
    registry.hang()
    lease = hub.begin("ann", environment="instant", own_image=image, gpus=1)
    assert hub.node_of(lease) is second, "the other one has two GPUs free, and no image"
    assert not has(first, image)
    hub.queue_up("bob", environment="instant", own_image=image, gpus=1)
    registry.go_on()
    assert hub.node_of(hub.wait_lease("bob", timeout=90)) is first
    hub.stop_servers("ann", "bob")


def test_image_that_cannot_be_pulled_ends_the_ticket(
    hub: SlurmHub, cluster: SlurmCluster, registry: SlowRegistry
) -> None:
    hub.ask("cara", environment="missing", gpus=1)
    wait_for(lambda: not hub.services.queue.waiting() and hub.server("cara") is None, "the refusal")
    (ticket,) = hub.services.queue.tickets_of("cara")
    assert f"{registry.repository}:missing could not be pulled" in ticket.end_reason
    assert not cluster.run("squeue", "-h")


def test_catalog_page_shows_images_on_each_node(hub: SlurmHub, cluster: SlurmCluster) -> None:
    names = ", ".join(node.name for node in cluster.nodes)
    page = text_of(hub.open_page(ADMIN, "/hub/catalog").text)
    assert f"{INSTANT} the hub's machine: here built on this machine {names}: here" in page


# From the request to the end.


def test_devices_go_from_one_server_to_the_next(hub: SlurmHub, cluster: SlurmCluster) -> None:
    """Leases, a refusal, positions, a member who leaves the queue, and a container that dies."""
    lease = hub.begin("ann", gpus=2)
    node = hub.node_of(lease)
    assert node is cluster.nodes[0] and len(lease.devices) == 2
    assert hub.get("ann", "devices").text.split() == ["/dev/nvidia0", "/dev/nvidia1"]
    (container,) = hub.containers(node)
    job = int(container["Labels"]["gpuspawner.job"])
    parent = node.engine.client.inspect_container(container["Id"])["HostConfig"]["CgroupParent"]
    assert parent.endswith(f"/job_{job}/step_batch")
    assert "in use" in hub.refusal("bob", gpus=2, wait="no")

    ticket = hub.queue_up("cara", gpus=2, gpu_model="A100")
    leaves = hub.queue_up("dora", gpus=2, gpu_model="A100")

    def stands() -> QueuePosition | None:
        found = hub.services.positions.standings().get(ticket.id)
        return found if found and (found.place, found.of) == (1, 2) else None

    assert "none is free" in wait_for(stands, "where it stands").why
    hub.stop_server("dora")
    wait_for(lambda: not cluster.holder(leaves.id), "its job to go")

    wait_for(lambda: hub.services.leases.get(lease.id).charged, "a charge")
    hub.stop_server("ann")
    ended = hub.wait_end(lease)
    assert ended.charged == owed(ended.rate, ended.started_at, ended.ended_at) > 0
    assert container["Id"] not in [each["Id"] for each in hub.containers(node)]
    cluster.wait_state(job, "CANCELLED")

    second = hub.wait_lease("cara")
    assert second.ticket_id == ticket.id
    (container,) = hub.containers(node)
    hub.ask("bob", gpus=2, wait=True)
    node.engine.client.kill(container["Id"])
    assert hub.wait_end(second).outcome == ""
    hub.wait_lease("bob")
    wait_for(lambda: hub.server("cara") is None, "the hub to know")
    hub.stop_server("bob")


def test_job_cancelled_in_slurm_ends_server_or_ticket(hub: SlurmHub, cluster: SlurmCluster) -> None:
    """One job is a running server's, which is outside its job's control group as with cgroup v2;
    the other waits. Both members are told, and nothing is left."""
    lease = hub.begin("ann", environment="outside", gpus=2)
    node = hub.node_of(lease)
    (container,) = hub.containers(node)
    host = node.engine.client.inspect_container(container["Id"])["HostConfig"]
    assert (host["CgroupParent"], host["Memory"]) == ("", 64 * 2**20)
    assert hub.get("ann", "devices").text.split() == ["/dev/nvidia0", "/dev/nvidia1"]
    ticket = hub.queue_up("bob", gpus=2)
    cluster.run("scancel", f"--name=gpuspawner-{ticket.id}")
    cluster.run("scancel", f"--name=gpuspawner-{lease.ticket_id}")
    ended = wait_for(
        lambda: hub.services.queue.ticket(ticket.id).outcome, "the end of bob's ticket"
    )
    assert ended == "refused"
    assert "its job in Slurm was cancelled" in hub.services.queue.ticket(ticket.id).end_reason
    hub.wait_end(lease)
    wait_for(lambda: not hub.containers(node), "the epilog to end it")
    wait_for(lambda: hub.server("ann") is None, "the hub to know")


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


def test_impossible_or_closed_request_is_refused_with_a_reason(
    hub: SlurmHub, cluster: SlurmCluster
) -> None:
    assert "Ask for 2 at most" in hub.refusal("ann", gpus=3)
    assert "Titan" in hub.refusal("ann", gpus=1, gpu_model="Titan")
    said = hub.refusal("ann", environment="days", gpus=1, hours=30)
    assert "allows no job longer than 24 h" in said

    # By the cluster's admin, for everybody of the hub's; who has left is in test_accounts.py.
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
    """The waiting member's name has special characters."""
    member, server = "o'neil $(id);", "second"
    user = user_of(member)
    cluster.users.make(user)
    cluster.run("scontrol", "update", "partitionname=gpu", "state=drain")
    try:
        assert "partition" in hub.refusal("ann", gpus=1)
        cluster.run("scontrol", "update", "partitionname=gpu", "state=down")
        answer = hub.spawn(member, {"gpus": 1, "wait": True}, server)
        assert answer.ok, answer.text
        (ticket,) = wait_for(hub.services.queue.waiting, "the ticket")
        wait_for(lambda: cluster.holder(ticket.id), "its job")
    finally:
        cluster.run("scontrol", "update", "partitionname=gpu", "state=up")
    lease = hub.wait_lease(member, server)
    assert lease.ticket_id == ticket.id
    owner, _, comment = cluster.holder(ticket.id, "%u|%k").partition("|")
    assert (owner, json.loads(comment)["server"]) == (user, str(lease.server))
    assert hub.get(member, "devices", server).text.split() == ["/dev/nvidia0"]
    hub.stop_server(member, server)
    hub.wait_end(lease)


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
    refusal = f"scontrol update {node} State=RESUME"
    page.locator("main", has_text=refusal).wait_for(timeout=90_000)
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


def test_session_is_extended_within_limits_and_ends_with_time_or_credits(
    hub: SlurmHub, cluster: SlurmCluster
) -> None:
    """The end takes container and job with it, and is charged to the second."""
    hub.ask("ann", environment="days", gpus=1, hours=1)
    hub.ask("fred", environment="days", gpus=1, hours=23 + 40 / 60)
    one, most = hub.wait_lease("ann"), hub.wait_lease("fred")
    assert said(cluster, one)[2] == "1:20:00" and said(cluster, most)[2] == "1-00:00:00"
    assert call(hub, "ann", f"leases/{one.id}/extend").ok
    extended = hub.services.leases.get(one.id).extended
    assert extended > 0
    assert 80 < minutes_of(said(cluster, one)[2]) <= job_spec.minutes(3600 + extended)
    refused = call(hub, "fred", f"leases/{most.id}/extend")
    assert not refused.ok and "allows no job longer than 24 h" in refused.json()["message"]
    assert hub.services.leases.get(most.id).extended == 0 and said(cluster, most)[2] == "1-00:00:00"

    hub.ask("cara", environment="brief", gpus=1)

    def began() -> Lease | None:
        """Its lease, which may have ended by now."""
        leases = hub.services.leases.of_account(None)
        return next((x for x in leases if x.environment == "brief" and x.up_since), None)

    brief = wait_for(began, "cara's server", timeout=60)
    assert (brief.seconds, brief.claim_seconds) == (7, None), "it came at once"
    account = hub.services.ledger.account(member_account("fred"))
    broke = -account.available + 2_000_000
    hub.services.ledger.grant(member_account("fred"), broke, actor=ADMIN, reason="a mistake")
    ended = hub.wait_end(brief)
    assert ended.outcome == "session_end" and ended.end_reason.startswith("its time was over at ")
    assert ended.charged == owed(brief.rate, ended.started_at, ended.ended_at) > 0
    assert hub.wait_end(most, timeout=90).outcome == "credits"
    wait_for(lambda: all(gone(hub, cluster, each) for each in (brief, most)), "all to be gone")
    hub.stop_server("ann")


# Whoever dies. After what admins do, which needs all GPUs of a node: Slurm 22.05.8 starts jobs
# without a device while nodes register with a controller that was restarted. Once such a job had
# ended, no job for two GPUs began on its node any more, and jobs for one did.


def jobs(cluster: SlurmCluster) -> Counter[str]:
    """How many jobs wait or run, by their name."""
    return Counter(cluster.run("squeue", "-h", "-o", "%j").split())


def assert_once(hub: SlurmHub) -> None:
    """No device belongs to two leases, and no ticket has two jobs."""
    held = [device.uuid for lease in hub.services.leases.open_leases() for device in lease.devices]
    assert len(held) == len(set(held))
    assert set(jobs(hub.cluster).values()) <= {1}


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


@pytest.mark.parametrize("place", [0, 1, 2] if SOAK else [1])
def test_server_and_ticket_survive_a_crash_of_all_daemons(
    hub: SlurmHub, cluster: SlurmCluster, chance: random.Random, place: int
) -> None:
    """The hub comes back as the first, the second or the last. One that is up before the controller
    is, as after a start of the machine, waits for it."""
    lease = hub.begin("ann", gpus=1, gpu_model="H100")
    (container,) = hub.containers(hub.node_of(lease))
    ticket = hub.queue_up("bob", gpus=1, gpu_model="H100")
    cluster.save("ann")
    for name in chance.sample(DAEMONS, 3):
        hub.kill9(services=True) if name == "hub" else cluster.kill(name)
    # A controller that has not yet written down what the database told it cannot do without it.
    back = ["slurmdbd", "slurmctld"]
    back.insert(place, "hub")
    for name in back:
        if name != "hub":
            cluster.restart(name)
            continue
        hub.start()
        if place < 2:
            wait_for(lambda: hub.server("bob"), "the service to begin the start again")
            said = []
            for event in hub.events("bob"):
                said.append(event)
                if event.get("message") == WAITS:
                    break
            assert said[-1].get("message") == WAITS
            assert not any(event.get("failed") for event in said)

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


def test_gpu_with_a_failed_epilog_is_not_granted(hub: SlurmHub, cluster: SlurmCluster) -> None:
    """The accounting database is away all the while: who asks then gets devices without it."""
    lease = hub.begin("ann", gpus=1, gpu_model="H100")
    node = hub.node_of(lease)
    hub.make_user("bob")
    cluster.kill("slurmdbd")
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
    cluster.restart("slurmdbd")
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
    hold.touch()
    try:
        wait_for((hub.folder / "watch-held").exists, "the watch to ask")
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


def gone(hub: SlurmHub, cluster: SlurmCluster, lease: Lease) -> bool:
    """Whether nothing of a server is left anywhere."""
    container = [c for c in hub.containers(hub.node_of(lease)) if lease.id in c["Labels"].values()]
    job = cluster.holder(lease.ticket_id)
    return hub.server(lease.server.user) is None and not container and not job


# What their GPUs do.


def gpus(node: Node, *uses: int) -> list[GPU]:
    """The devices of a node, used by so many percent each; memory and heat follow."""
    return [
        GPU(
            uuid=device.uuid,
            bus=f"00000000:{number:02X}:00.0",
            name=device.model,
            memory_bytes=device.memory_bytes,
            use=(use, 0),
            used_bytes=use * GIB // 4,
            celsius=use,
        )
        for number, (device, use) in enumerate(zip(node.devices, uses, strict=True), start=1)
    ]


def told(hub: SlurmHub, user: str, kind: NoticeKind) -> list[str]:
    """The titles of what a member was told, the newest first."""
    return [
        notice.title
        for notice in hub.services.notifications.notices_of(user)
        if notice.kind is kind
    ]


@pytest.fixture
def brief_claims(hub: SlurmHub) -> Iterator[Callable[[], None]]:
    """From the call on, members who waited for a GPU have three seconds to connect."""
    claim = hub.folder / "claim"

    def begin() -> None:
        claim.write_text(BRIEF_CLAIM)

    yield begin
    claim.write_text(CLAIM)


def test_idle_server_yields_and_no_show_is_not_charged(
    hub: SlurmHub,
    cluster: SlurmCluster,
    samplers: list[NodeSampler],
    brief_claims: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.ask("works", gpus=1, gpu_model="A100")
    hub.ask("rests", gpus=1, gpu_model="H100")
    works, rests = hub.wait_lease("works"), hub.wait_lease("rests")
    brief_claims()
    for node, sampler in zip(cluster.nodes, samplers, strict=True):
        sampler.show(*gpus(node, *(20 * (d.uuid in works.uuids) for d in node.devices)))
    file = str(hub.folder / "cluster.yaml")
    ticket = hub.queue_up("waits", gpus=1, gpu_model="H100")
    with FastMonitor(hub, monkeypatch, times=30, cluster=file, when_idle=POLICY):
        ended = hub.wait_end(rests)
    assert (ended.outcome, ended.end_reason) == ("idle", "its GPUs were not used")
    assert ended.charged == owed(rests.rate, ended.started_at, ended.ended_at) > 0
    assert "stops at" in told(hub, "rests", NoticeKind.SESSION_ENDS)[0]
    assert told(hub, "rests", NoticeKind.STOPPED) == ["Your server was stopped: its GPU was idle"]

    turn = wait_for(lambda: hub.services.queue.ticket(ticket.id).lease_id, "the turn of who waits")
    missed = hub.wait_end(hub.services.leases.get(turn))
    assert missed.uuids == rests.uuids and missed.claim_seconds == 3
    assert (missed.outcome, missed.charged) == ("no_show", 0)
    assert told(hub, "waits", NoticeKind.TURN) == ["It is your turn"]
    wait_for(lambda: all(gone(hub, cluster, each) for each in (rests, missed)), "all to be gone")

    now = hub.services.leases.get(works.id)
    assert not now.outcome and hub.get("works", "devices").ok
    assert hub.services.notifications.notices_of("works") == []
    hub.stop_server("works")


@pytest.fixture
def work(samplers: list[NodeSampler], cluster: SlurmCluster) -> None:
    """The devices of the first node work at 31 and 32 %, that of the second at 81 %."""
    first, second = cluster.nodes
    samplers[0].show(*gpus(first, 31, 32))
    samplers[1].show(*gpus(second, 81))


def shows(page: Page, uuid: str, text: str) -> None:
    """Wait until the live page says so of a device."""
    page.wait_for_selector(f".tile[data-uuid='{uuid}']:has-text('{text}')", timeout=90_000)


@pytest.mark.usefixtures("work")
def test_sick_gpu_drains_its_node_until_the_probe_passes(
    hub: SlurmHub, cluster: SlurmCluster, samplers: list[NodeSampler]
) -> None:
    (gpu,) = gpus(cluster.nodes[1], 81)

    def verdict() -> str:
        known = hub.services.health.device_states().get(gpu.uuid)
        return known.state.verdict if known else ""

    def fall_sick() -> bool:
        """Again and again: nobody hears of it before the hub has asked for the first time."""
        if verdict() == "sick":
            return True
        samplers[1].show(replace(gpu, xids=[(next(errors), 79)]))
        return False

    errors = itertools.count(1)
    wait_for(fall_sick, "the verdict", timeout=30, interval=2)
    machine = cluster.nodes[1]
    wait_for(lambda: "drain" in cluster.node_state(machine), "Slurm to be told", timeout=30)
    samplers[1].show(gpu)
    wait_for(lambda: verdict() == "watch", "a probe that passes", timeout=30)
    given = f"Device {gpu.uuid} is back in service"
    wait_for(lambda: given in hub.log_text(), "the cluster to be told", timeout=30)
    wait_for(lambda: cluster.node_state(machine) == "idle", "it to take jobs", timeout=30)


@pytest.mark.usefixtures("work")
def test_live_page_shows_all_nodes_and_names_a_silent_one(
    hub: SlurmHub, cluster: SlurmCluster, samplers: list[NodeSampler], browser: Browser
) -> None:
    """The last test of this hub: what was told is remembered when it has ended."""
    first, second = cluster.nodes
    (one, two), (other,) = first.devices, second.devices
    lease = hub.begin("ann", gpus=1, gpu_model="H100")
    assert lease.uuids == (other.uuid,)
    pages: list[Page] = []
    for user, size in (("ann", PHONE), (ADMIN, WIDE)):
        page = browser.new_page(viewport=size)
        pages.append(page)
        sign_in(page, hub, user, "cluster")
        for device, use in ((one, 31), (two, 32), (other, 81)):
            shows(page, device.uuid, f"{use} %")
            shows(page, device.uuid, f"{use / 4:.1f} of")
        shows(page, other.uuid, "yours" if user == "ann" else "ann")
        shows(page, other.uuid, "81 °C")
        assert axe.troubles(page) == []
        screenshot(page, f"cluster-nodes-{size['width']}")
    hub.stop_server("ann")

    phone, wide = pages
    samplers[0].kill()
    shows(wide, one.uuid, f"the machine {first.name} does not report the use of its GPUs")
    screenshot(wide, "cluster-silent-1280")
    shows(phone, one.uuid, "no measurements from its machine")
    assert "refused" not in phone.content(), "why, admins are told"
    screenshot(phone, "cluster-silent-390")
    phone.close()
    samplers[1].show(*gpus(second, 71))
    shows(wide, other.uuid, "71 %")
    samplers[0].start()
    shows(wide, one.uuid, "31 %")
    cluster.cut(second)
    shows(wide, other.uuid, f"the machine {second.name} does not report the use of its GPUs")
    samplers[0].show(*gpus(first, 21, 22))
    shows(wide, one.uuid, "21 %")
    cluster.heal(second)
    shows(wide, other.uuid, "71 %")
    wide.close()
    # Nobody was blamed for the silence, and what was told is remembered.
    verdicts = {known.state.verdict for known in hub.services.health.device_states().values()}
    assert verdicts <= {"fine", "watch"}
    hub.shut_down()
    since = utcnow() - timedelta(hours=1)
    services = make_services(database_url=hub.database_url)
    uses = {one.uuid: 31, two.uuid: 32, other.uuid: 81}
    try:
        wait_for(lambda: remembered(services, since).keys() == uses.keys(), "all that was told")
        assert remembered(services, since) == uses
    finally:
        services.store.close()


def remembered(services: Services, since: datetime) -> dict[str, int]:
    """The most that each device was used, in percent."""
    minutes = services.monitoring.use_between(since, utcnow() + timedelta(minutes=1))
    assert not any(minute.error or minute.strangers for minute in minutes)
    found: dict[str, int] = {}
    for minute in minutes:
        found[minute.uuid] = max(found.get(minute.uuid, 0), minute.use_max)
    return found
