"""Real: Slurm and its power saving, two nodes of which one is off until it is needed, JupyterHub,
accounting service. Stand-in: the GPUs, and who switches a machine on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.browser import open_browser, screenshot
from tests.support.hub import ADMIN
from tests.support.pages import sign_in
from tests.support.processes import wait_for
from tests.support.slurm_hub import SlurmHub
from tests.support.slurm_node import Node
from tests.support.slurm_power import PoweredCluster


@pytest.fixture
def hub(
    hubs: None, clusters: None, browsers: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmHub]:
    folder = tmp_path_factory.mktemp("spare") / "hub"
    with PoweredCluster() as cluster:
        # None answers: on one machine because it is off, and on the other there is none.
        samplers = {node.name: f"https://{node.address}:9401" for node in cluster.nodes}
        with SlurmHub(folder, cluster, samplers=samplers) as hub:
            yield hub


def test_queue_powers_on_a_node_and_survives_its_failure(soak: None, hub: SlurmHub) -> None:
    cluster = hub.cluster
    assert isinstance(cluster, PoweredCluster)
    (spare,) = cluster.spare
    says_calmly_that_it_is_off(hub, spare, cluster.nodes[0])
    hub.begin("ann", gpus=2)
    cluster.delivers = False
    ticket = hub.queue_up("bob", gpus=1)

    def why(words: str) -> bool:
        standing = hub.services.positions.standings().get(ticket.id)
        return bool(standing and words in standing.why)

    wait_for(lambda: why("is being switched on"), "bob to be told")

    def gave_up() -> bool:
        return cluster.node_state(spare).startswith("down")

    wait_for(gave_up, "Slurm to give the machine up", timeout=60, interval=0.5)
    jobs = ("squeue", "-h", "-t", "pending", "-o", "%j")
    wait_for(lambda: ticket.id in cluster.run(*jobs), "bob's ticket to be in the queue again")
    assert hub.services.queue.ticket(ticket.id).outcome == ""
    assert [lease.server.user for lease in hub.services.leases.open_leases()] == ["ann"]

    cluster.delivers = True
    cluster.run("scontrol", "update", f"nodename={spare.name}", "state=power_down_force")

    def repaired() -> bool:
        state = cluster.node_state(spare)
        if state == "down~":  # given up a moment later than it was switched off
            cluster.run("scontrol", "update", f"nodename={spare.name}", "state=resume")
        return not state.startswith("down")

    wait_for(repaired, "the machine to be there for jobs", timeout=60, interval=0.5)
    lease = hub.wait_lease("bob", timeout=90)
    assert lease.ticket_id == ticket.id and hub.node_of(lease) is spare
    hub.stop_server("bob")
    wait_for(lambda: cluster.node_state(spare) == "idle~", "the machine to be off", timeout=60)
    hub.stop_server("ann")


def says_calmly_that_it_is_off(hub: SlurmHub, spare: Node, other: Node) -> None:
    with open_browser() as browser:
        seen_by = (
            (ADMIN, 1280, "does not report the use of its GPUs"),
            ("ann", 390, "no measurements from its machine"),
        )
        for user, width, why in seen_by:
            page = browser.new_page(viewport={"width": width, "height": 900})
            sign_in(page, hub, user, "cluster")
            tile, silent = (
                page.locator(f".tile[data-uuid='{node.devices[0].uuid}']")
                for node in (spare, other)
            )
            silent.locator(".wrong", has_text=why).wait_for(timeout=90_000)
            tile.locator(".quiet", has_text="off (power saving)").wait_for(timeout=90_000)
            assert tile.locator(".state").inner_text() == "free"
            assert tile.locator(".wrong").inner_text() == ""
            screenshot(page, f"cluster-off-{width}")
            page.close()
