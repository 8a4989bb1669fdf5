"""Real: Slurm with two nodes and their Docker Engines, JupyterHub, proxy, accounting service,
Chromium. Stand-in: the GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests

from gpuspawner.leases.models import Lease
from gpuspawner.ledger.models import member_account
from gpuspawner.queue.models import Ticket
from gpuspawner.slurm import job_spec
from gpuspawner.slurm.programs import minutes_of
from tests.support.browser import open_browser, screenshot
from tests.support.hub import ADMIN
from tests.support.images import INSTANT
from tests.support.pages import sign_in
from tests.support.processes import wait_for
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_hub import SlurmHub

ENVIRONMENTS = f"""  - slug: brief
    display_name: Brief
    description: A session of a few seconds.
    image: {INSTANT}
    devices: {{default: 1, max: 8}}
    hours: {{max: 0.002}}
  - slug: day
    display_name: Day
    description: As long as the partition allows.
    image: {INSTANT}
    devices: {{default: 1, max: 8}}
    hours: {{default: 1, max: 48}}
"""


@pytest.fixture(scope="module")
def hub(
    hubs: None, shared_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmHub]:
    folder = tmp_path_factory.mktemp("hand") / "hub"
    hub = SlurmHub(folder, shared_cluster, "c.GPUCredits.grace_seconds = 2")
    with (folder / "catalog.yaml").open("a", encoding="utf-8") as catalog:
        catalog.write(ENVIRONMENTS)
    with hub:
        yield hub


def call(hub: SlurmHub, who: str, path: str, **sent: Any) -> requests.Response:
    """A change through the service's API."""
    headers = {"Authorization": f"token {hub.user_token(who)}"}
    url = f"{hub.url}/services/gpu/api/{path}"
    return requests.post(url, headers=headers, json=sent, timeout=60)


def asked(hub: SlurmHub, cluster: SlurmCluster, user: str, **options: Any) -> Ticket:
    """A member waits in line, and Slurm knows: the ticket."""
    hub.ask(user, wait=True, **options)
    found = wait_for(lambda: [t for t in hub.broker.waiting() if t.server.user == user], user)
    wait_for(lambda: said(cluster, found[0]), f"the job of {user}")
    return found[0]


def said(cluster: SlurmCluster, waits: Ticket | Lease) -> tuple[int, str, str]:
    """Priority, reason and time limit of the job of a ticket or lease; nothing without one."""
    name = waits.id if isinstance(waits, Ticket) else waits.ticket_id
    told = cluster.run("squeue", "-h", f"--name=gpuspawner-{name}", "-o", "%Q|%r|%l")
    priority, reason, limit = told.strip().split("|") if told.strip() else ("0", "", "")
    return (int(priority), reason, limit) if limit else (0, "", "")


def test_a_drained_gpu_drains_its_machine(
    browsers: None, hub: SlurmHub, cluster: SlurmCluster
) -> None:
    first, second = cluster.nodes
    gpu = first.devices[0].uuid
    answer = call(hub, ADMIN, f"devices/{gpu}/drain", reason="fan; it's broken")
    assert answer.json()["whole_machine"] == first.name and answer.json()["changed"]
    assert set(hub.broker.closures()) >= {device.uuid for device in first.devices}
    state = cluster.run("sinfo", "-h", "-n", first.name, "-o", "%T|%E")
    assert state.strip() == "drained|gpuspawner: fan; it's broken"
    hub.ask("ann", gpus=1)
    assert hub.node_of(hub.wait_lease("ann")) is second
    with open_browser() as browser:
        for width in (1280, 390):
            page = browser.new_page(viewport={"width": width, "height": 900})
            sign_in(page, hub, ADMIN, "")
            for name in ("", "cluster", "queue"):
                page.goto(f"{hub.url}/services/gpu/{name}")
                text = page.locator("main").inner_text()
                assert first.name in text and second.name in text
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                screenshot(page, f"machines-{name or 'mine'}-{width}")
            page.close()
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
    with open_browser() as browser:
        for width in (1280, 390):
            page = browser.new_page(viewport={"width": width, "height": 900})
            sign_in(page, hub, ADMIN, "")
            page.goto(f"{hub.url}/services/gpu/queue")
            page.get_by_role("button", name="Give it out again").first.click()
            told = page.locator("main").inner_text()
            assert f"scontrol update {node} State=RESUME" in told
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            screenshot(page, f"drained-by-others-{width}")
            page.close()
    cluster.run("scontrol", "update", node, "State=RESUME")
    assert call(hub, ADMIN, f"devices/{gpu}/undrain", reason="").json()["changed"]


def test_an_admin_changes_the_order_and_a_pause_holds_it(
    hub: SlurmHub, cluster: SlurmCluster
) -> None:
    hub.ask("ann", gpus=2)
    hub.wait_lease("ann")
    hub.ask("bob", gpus=1)
    hub.wait_lease("bob")
    cara, dora, emil = (asked(hub, cluster, user, gpus=1) for user in ("cara", "dora", "emil"))

    assert call(hub, ADMIN, f"queue/{dora.id}/boost", points=5, reason="").ok
    wait_for(lambda: said(cluster, dora)[0] >= said(cluster, cara)[0] + 4000, "the points")
    assert call(hub, ADMIN, f"queue/{emil.id}/move", position=1, reason="talk").ok
    wait_for(lambda: said(cluster, emil)[0] == 4_000_000_000 - 1, "the place")
    wait_for(lambda: places(hub) == ["emil", "dora", "cara"], "the line")

    assert call(hub, ADMIN, "granting", paused=True, reason="new fans").ok
    for ticket in (cara, dora, emil):
        wait_for(lambda t=ticket: said(cluster, t)[1] == "JobHeldAdmin", "a pause")
    assert "new fans" in hub.broker.standings()[cara.id].why
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
    for user in ("ann", "emil"):
        hub.stop_server(user)


def places(hub: SlurmHub) -> list[str]:
    return [ticket.server.user for ticket, _, _ in hub.broker.order()]


def test_a_longer_session_is_a_longer_job_where_the_partition_allows(
    hub: SlurmHub, cluster: SlurmCluster
) -> None:
    hub.ask("ann", environment="day", gpus=1, hours=1)
    hub.ask("bob", environment="day", gpus=1, hours=23 + 40 / 60)
    one, most = hub.wait_lease("ann"), hub.wait_lease("bob")
    assert said(cluster, one)[2] == "1:20:00" and said(cluster, most)[2] == "1-00:00:00"
    assert call(hub, "ann", f"leases/{one.id}/extend").ok
    extended = hub.broker.lease(one.id).extended
    assert extended > 0
    assert 80 < minutes_of(said(cluster, one)[2]) <= job_spec.minutes(3600 + extended)
    refused = call(hub, "bob", f"leases/{most.id}/extend")
    assert not refused.ok and "lets nothing run for over 24 h" in refused.json()["message"]
    assert hub.broker.lease(most.id).extended == 0 and said(cluster, most)[2] == "1-00:00:00"
    for user in ("ann", "bob"):
        hub.stop_server(user)


def test_the_end_of_a_session_and_of_credits_ends_container_and_job(
    hub: SlurmHub, cluster: SlurmCluster
) -> None:
    hub.ask("ann", environment="brief", gpus=1)
    first = hub.wait_lease("ann")
    hub.ask("fred", gpus=1)
    second = hub.wait_lease("fred")
    account = hub.broker.ledger.account(member_account("fred"))
    broke = -account.available + 2_000_000
    hub.broker.ledger.grant(member_account("fred"), broke, actor=ADMIN, reason="a mistake")
    assert hub.wait_end(first).outcome == "session_end"
    assert hub.wait_end(second, timeout=90).outcome == "credits"
    for lease in (first, second):
        wait_for(lambda x=lease: not any(said(cluster, x)), "its job to go")
    assert not any(hub.containers(node) for node in cluster.nodes)
